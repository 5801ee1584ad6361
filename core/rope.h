/* rope.h: rotation frequencies from the RoPE parameters of a model, and the user's changes to those parameters.
 * Everything in double: at position 262144 one f32 step of the fastest pair is 0.03 rad. Pure functions, thread-safe.
 * Formulas: plain f_i = base^(-2i/n_rot); "linear" and the per-pair divisors of Llama 3.x divide it; YaRN as in its
 * paper (arXiv:2309.00071, section 3.4) with the correction range rounded outwards to whole pairs; longrope uses one of
 * two divisor tables and a magnitude from the file. */
#ifndef LH_CORE_ROPE_H
#define LH_CORE_ROPE_H

#include "core/model.h"

#include <stdbool.h>

/* inv_freq[n_rot/2]: pair i of position p is rotated by p * inv_freq[i]; *mscale multiplies cos and sin.
 * freq_factors: ?[n_rot/2] divisors (rope_freqs.weight, or rope_factors_long / _short as rope_is_long says). n_ctx: the
 * configured context, > 0. ERR_ARG: an impossible parameter, longrope without divisors. ERR_FORMAT: a divisor that is not
 * a positive number. */
int rope_frequencies(double *inv_freq, float *mscale, const struct rope *r, const float *freq_factors, int64_t n_ctx);

/* longrope: does a session of n_ctx positions take the long divisors? */
static inline bool rope_is_long(const struct rope *r, int64_t n_ctx) { return n_ctx > r->n_ctx_orig; }

/* The user's options; a field that holds its value of rope_user_none leaves the file's parameter alone. */
struct rope_user {
    int scaling;       /* enum rope_scaling, -1 */
    double factor;     /* extension factor, >= 1; 0 */
    double freq_base;  /* 0 */
    double freq_scale; /* 1 / factor, another spelling of it; 0 */
    int64_t n_ctx_orig; /* 0 */
    double ext_factor; /* 0..1; -1 */
    double attn_factor; /* 0 */
    double beta_fast, beta_slow; /* 0 */
};
struct rope_user rope_user_none(void);

/* Applies u to r. A factor without a kind makes an unscaled model linear; kind NONE sets the factor to 1. The rope of
 * sliding-window layers (model.ropes[1]) is never scaled: apply this to ropes[0] only.
 * ERR_ARG: factor and freq_scale together, a number out of range, longrope asked for. *r is then as it was. */
int rope_override(struct rope *r, const struct rope_user *u);

const char *rope_scaling_name(enum rope_scaling s); /* "none", "linear", "yarn", "longrope" */
/* -1: unknown. Bytes with a length, as they come from a file. */
int rope_scaling_from_name(const char *name, size_t bytes);

#endif
