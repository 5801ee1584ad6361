/* kern_matmul.h: contract between cpu/matmul.c and the weight kernels (cpu/kern_matmul_*.c), one build per instruction
 * set. A kernel multiplies 16 rows (one strip of core/strip.h, lane = row) with up to `cols` tokens ("columns").
 * The arithmetic of a column is the same whatever the other columns are and however a call is cut into tiles. */
#ifndef LH_CPU_KERN_MATMUL_H
#define LH_CPU_KERN_MATMUL_H

#include "core/quant.h"
#include "cpu/impl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* 32 elements of one token, quantised (core/ops.h). */
struct xq {
    int8_t q[32];
    int16_t sum[2]; /* of each half of q */
    float d;        /* x = d * q */
    float s;        /* d * (sum[0] + sum[1]) */
};
_Static_assert(sizeof(struct xq) == 44, "activation block");

/* 16 rows (F32 weights: up to 32, two strips) times n_col columns, over a range of blocks of each row. */
struct matmul_tile {
    const uint8_t *words, *scales; /* of the strip, at the first block of the range */
    ptrdiff_t second;              /* F32: bytes from there to the second strip; needed when n_row > 16 */
    int64_t n_block;               /* of the range (a word of 1 or 2 elements for F32, F16, BF16) */
    const void *x; /* quantised weights: struct xq [n_block * elems / 32, stride]; F32: f32 [n_block, stride];
                      F16, BF16: f32 [2 n_block, stride]; at the range's first element and the tile's first column */
    int stride;    /* columns that lie side by side in x */
    int n_col;     /* of this tile, <= stride */
    int n_row;     /* rows to store, at least 1 */
    float *y;      /* column c, row r at y[c * y_stride + r] */
    int64_t y_stride;
    ptrdiff_t ahead, next; /* what to prefetch: so many bytes after the words and after the scales at work */
    bool to_l2;            /* words into the second-level cache, and no scales: see matmul.c */
    bool resume;       /* sums start from y (an earlier range of the same rows), else from 0 */
    const float *bias; /* ?[n_row], added at the end */
};

typedef void (*matmul_tile_fn)(const struct matmul_tile *t);

struct kern_matmul {
    int cols, plain_cols;           /* columns a tile is best at: quantised weights; F32, F16, BF16 */
    int plain_strips;               /* strips an F32 tile takes at once, 1 or 2 */
    matmul_tile_fn tile[QT_END];    /* by enum quant_type; NULL: not decodable */
    /* F16 and BF16 words [n_block, 16] as f32 words [2 n_block, 16], F32 words [n_block, 16] as they are. */
    void (*widen)(float *dst, int type, const uint8_t *words, int64_t n_block);
    /* One token's cols (a multiple of 32) elements to dst[i * stride], i < cols / 32. */
    void (*quantize)(struct xq *dst, int64_t stride, const float *x, int64_t cols);
};
KERN_TABLES(kern_matmul)

/* The tile functions of each build, for the tables in kern_matmul.c. */
#define MATMUL_TILE(name) LH_CAT(matmul_tile_##name, LH_ISA)
#ifdef LH_ISA
#define X(name, id, elems, bytes, enc) void MATMUL_TILE(name)(const struct matmul_tile *t);
QUANT_LIST(X)
#undef X
#endif

#endif
