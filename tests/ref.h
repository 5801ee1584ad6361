/* ref.h: textbook versions of operations, in double, that the tests of every back end are held against. */
#ifndef LH_TESTS_REF_H
#define LH_TESTS_REF_H

#include <stddef.h>
#include <stdint.h>

/* Rows of a packed type as in a file: random codes, scales of ordinary size with random signs, some of them zero.
 * Release with free(). */
void *ref_random_rows(int type, int64_t rows, int64_t cols, uint64_t seed);

/* The same rows in strips (core/strip.h), 64-byte aligned. Release with free(). */
void *ref_strips(int type, const void *rows_as_in_file, int64_t rows, int64_t cols);

/* y[n_tok, rows] = x[n_tok, cols] W^T + bias[?rows] in double on decoded weights. */
void ref_matmul(double *y, int type, const void *w, int64_t rows, int64_t cols, const float *x, int n_tok, const float *bias);

/* The same by the arithmetic contract of core/ops.h: x of quantised weights is quantised per 32 elements; everything after
 * that in double. size[n_tok, rows] receives the sum of the absolute values of all terms that a kernel adds up (scale and
 * minimum of a group count apart), the measure that rounding errors are relative to. */
void ref_matmul_contract(double *y, double *size, int type, const void *w, int64_t rows, int64_t cols, const float *x, int n_tok,
                         const float *bias);

/* Bound of |y - ref_matmul_contract| / size for any order of f32 additions: each of the terms of a row (one per scale group,
 * one per minimum, or one per element of F32, F16, BF16) meets at most as many roundings as there are additions, two each
 * where they are not fused, and 6 more in its own products, its scale and the bias. */
double ref_matmul_tolerance(int type, int64_t cols);

/* x = d * q of the contract, written back as double: x_hat[cols]. */
void ref_quantise(double *x_hat, const float *x, int64_t cols);

#endif
