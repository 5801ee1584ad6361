/* ref_attn.h: attention in double over what the KV cache holds, and how far an f32 computation may be from it. */
#ifndef LH_TESTS_REF_ATTN_H
#define LH_TESTS_REF_ATTN_H

#include "core/kv.h"
#include "core/ops.h"

/* o[n_head, head_dim_v] of token `tok` of the call (a->o is not used), tol[n_head] the allowed absolute difference:
 * max|v| times (twice the error of a score + the error of exponentials and sums).
 * Score: 4 * 2^-24 * sqrt(head_dim) * sum|q k| * scale (random walk of the rounding of a sum, times 4); quantised K: plus
 * half a step of a 16-bit q, 2^-16 * (largest |q| of each 32) * |k| summed, which is a hard bound; 2^-18 of sum|q k| when
 * the rows are rotated in f32 is within that. Sums over positions: 2^-24 * (16 + sqrt(positions / 16)). */
void ref_attn_row(double *o, double *tol, const struct attn_args *a, int tok);

/* The same for products in half (11 bits) with f32 sums, as the GPU takes many tokens. Score: rounding of q, and of k where
 * its type does not fit half exactly, 2^-11 of each product and independent: 4 * 2^-11 * sqrt(2 * sum (q k)^2) * scale; the
 * smallest of a row, half's subnormals, 2^-25 (or 2^-39 of the largest, whichever is larger) of each. Weights and values:
 * 2^-11 each of max|v|; weights below 2^-39 of the largest: 2^-40 times the positions. f32 parts as above. */
void ref_attn_row_half(double *o, double *tol, const struct attn_args *a, int tok);

#endif
