/* kern_delta.h: kernels of the Gated DeltaNet layers (struct delta_args of core/ops.h) of one instruction set. Sums have a
 * fixed order that depends on nothing but the sizes named here: cutting the rows of S over threads changes no bit. */
#ifndef LH_CPU_KERN_DELTA_H
#define LH_CPU_KERN_DELTA_H

#include "cpu/impl.h"

enum { DELTA_CHUNK = 64 }; /* tokens of a chunk */

/* One value head: n_row rows (elements of v) of its S^T. */
struct delta_rows {
    float *s;               /* [n_row, dim], updated */
    float *o;               /* [n_tok][o_step]: n_row outputs per token */
    const float *q, *k, *v; /* [n_tok][u_step]: dim, dim and n_row elements per token; |k| = 1, |q| = 1 / sqrt(dim) */
    const float *g, *beta;  /* [n_tok] ln decay <= 0, and beta */
    int64_t o_step, u_step;
    int n_tok, n_row, dim;  /* n_row, dim: multiples of 16, at most DELTA_MAX_DIM */
};

/* Working memory of the chunked form, for one head. */
struct delta_chunk {
    float q[DELTA_CHUNK * DELTA_MAX_DIM];       /* [chunk, dim] */
    float k[DELTA_CHUNK * DELTA_MAX_DIM];
    float st[DELTA_MAX_DIM * DELTA_MAX_DIM];    /* [dim, n_row] S */
    float kt[DELTA_MAX_DIM * DELTA_CHUNK];      /* [dim, chunk] keys, then keys times their decay to the end */
    float d[DELTA_CHUNK * DELTA_MAX_DIM];       /* [chunk, n_row] R, then D */
    float a[DELTA_CHUNK * DELTA_CHUNK];         /* A, strictly below the diagonal */
    float p[DELTA_CHUNK * DELTA_CHUNK];         /* q.k with decay, up to the diagonal */
    float o[DELTA_CHUNK * DELTA_MAX_DIM];
};

struct kern_delta {
    /* Convolution and SiLU in place for channels c0 .. c0 + 16 of u [n_tok, n_ch]; last [3, n_ch] is updated. */
    void (*conv)(float *u, float *last, const float *taps, int64_t n_ch, int64_t c0, int n_tok);
    /* y = x * scale / max(|x|, eps). */
    void (*unit)(float *y, const float *x, int n, float scale, float eps);
    /* Token by token, a few rows of S at a time: S is read and written once, whatever n_tok is. */
    void (*steps)(const struct delta_rows *r);
    /* In chunks: the same up to rounding. */
    void (*chunks)(const struct delta_rows *r, struct delta_chunk *w);
};

KERN_TABLES(kern_delta)

#endif
