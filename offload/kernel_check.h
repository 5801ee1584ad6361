/* kernel_check.h: whether fast kernels compute what the generic ones compute, on the weights of a loaded model. */
#ifndef LH_OFFLOAD_KERNEL_CHECK_H
#define LH_OFFLOAD_KERNEL_CHECK_H

#include "core/decoder.h"
#include "cpu/isa.h"

/* Products of one token with the matrices of the first, middle and last layer and with the output matrix (those that w has
 * addresses of; of stacked experts the first): kernels `isa` against generic ones. Both quantise x alike and multiply
 * integers exactly, so only the order of f32 sums may differ. ERR_NUMERIC: names tensor and difference. ERR_NOMEM. */
int kernel_check(const struct model *m, const struct weights *w, enum isa isa);

#endif
