/* matmul.h: products of weight matrices with tokens, as jobs for the pool. Shared by cpu/matmul.c and cpu/experts.c.
 *
 * Tokens of a product are cut into column blocks of the width the kernels are best at (the last one may be narrower); the
 * activations of a block lie side by side, element group by element group, as struct matmul_tile wants them.
 * A task is a run of strips that follow each other in memory, times a range of column blocks. The cut never changes a
 * result. */
#ifndef LH_CPU_MATMUL_H
#define LH_CPU_MATMUL_H

#include "core/strip.h"
#include "cpu/impl.h"
#include "cpu/kern_matmul.h"

enum { MATMUL_TOKENS = 512 }; /* most tokens prepared at a time: compute-bound long before, and scratch stays small */

/* y[n_tok, rows] = x W^T + bias. */
struct product {
    struct mat w;
    const void *x; /* prepared activations: of every 32 columns (struct xq), or plain f32 */
    int n_tok;
    float *y;
    const float *bias; /* ?[rows] */
    /* Filled by products_run. */
    struct strip_layout l;
    matmul_tile_fn tile;
    bool to_l2;            /* prefetch into the second-level cache */
    int width;             /* of a column block */
    int64_t first;         /* strip or task among those of all products */
    int64_t strips, cols;  /* strips and column blocks per task */
    int n_col_task;
};

struct matmul_state {
    const struct kern_matmul *kern;
    bool is_amd;
    int n_tok;          /* tokens prepared at a time */
    uint8_t *quantised; /* [n_tok, limits.cols / 32] struct xq */
    float *plain;       /* [n_tok, limits.cols + 1], the spare element for an odd number of 16-bit weights */
    float *panels;      /* [threads, PANEL_FLOATS of matmul.c] */
    struct experts_state *experts;
};

/* Whether weights of this type multiply plain f32 activations. */
static inline bool matmul_is_plain(int type) { return type == QT_F32 || type == QT_F16 || type == QT_BF16; }

/* Bytes of a prepared token. */
size_t matmul_token_bytes(int type, int64_t cols);

/* Runs up to 2^20 products whose x is prepared, in one go over all their strips. ERR_ARG: a type without kernel or cols
 * that are not a multiple of its block. */
int products_run(struct cpu *c, struct product *p, int n);

/* Prepares tokens 0..n_tok-1 of x[*, cols], or those at rows[0..n_tok-1], for products with weights of `type`. */
struct prepare {
    void *dst; /* [n_tok] * matmul_token_bytes */
    const float *x;
    const int32_t *rows; /* ?[n_tok] */
    int64_t cols;
    int n_tok, type;
};
void prepare_run(struct cpu *c, const struct prepare *p, int n);

/* cpu/experts.c */
size_t experts_scratch_bytes(const struct cpu_opts *o);
int experts_open(struct cpu *c, struct matmul_state *s);
void experts_close(struct matmul_state *s);

#endif
