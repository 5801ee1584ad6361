/* kern_elem.h: element-wise kernels of one instruction set. Sums have a fixed order: the same input gives the same bits. */
#ifndef LH_CPU_KERN_ELEM_H
#define LH_CPU_KERN_ELEM_H

#include "cpu/impl.h"

struct kern_elem {
    /* y = w * x / sqrt(mean(x^2) + eps), n elements. y may be x. */
    void (*rmsnorm)(float *y, const float *x, const float *w, int64_t n, float eps);
    void (*add)(float *x, const float *d, int64_t n);
    /* y = act(gate) * up. y may be gate or up. */
    void (*glu)(float *y, const float *gate, const float *up, int64_t n, enum act act);
    /* x += sigma(gate) * d. */
    void (*add_gated)(float *x, const float *d, float gate, int64_t n);
    /* Rotates n_pair pairs at the front of one head; cs [n_pair, 2]. */
    void (*rotate)(float *x, const float *cs, int n_pair, enum rope_pairing pairing);
    void (*softcap)(float *x, int64_t n, float cap);
};

KERN_TABLES(kern_elem)

#endif
