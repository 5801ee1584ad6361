/* kern_attn.h: the arithmetic of attention for a block of query rows of one KV head, page by page. cpu/attn.c cuts the
 * work into blocks and runs of pages; this does one page, and merges results of runs.
 *
 * Rows of a block are (token, query head of the group), token-major. They are computed in tiles of up to `tile` rows.
 * For each row and page: scores s = scale * log2(e) * q.k, t = max s, p = 2^(s - t), M = max(m, t), alpha = 2^(m - M),
 * beta = 2^(t - M), l = l * alpha + beta * sum p, o = o * alpha + beta * sum p v, m = M. The largest p of a page is 1, so
 * that p can be written in digits (attn_digits.h). What a row gets does not depend on the tile or block that it is in: sums over dims
 * and positions run in one order, lanes of the sum of p are position % 16. So the same bits come out for any cut. */
#ifndef LH_CPU_KERN_ATTN_H
#define LH_CPU_KERN_ATTN_H

#include "core/kv.h"
#include "cpu/impl.h"

enum { ATTN_TILE_MAX = 12, ATTN_MAX_TILES = 48 };

/* A block of rows. All arrays belong to the worker and are 64-byte aligned. */
struct attn_rows {
    const struct kv_layer *layer;
    int n_row, n_tile;  /* n_tile <= ATTN_MAX_TILES; tile i has rows tile_row[i] .. tile_row[i+1] */
    int dim_o;          /* head_dim_v rounded up to 16: row stride of o */
    int *tile_row;      /* [n_tile + 1] */
    int64_t *lo, *hi;   /* [n_row] allowed positions lo <= p < hi */
    float *q;           /* [n_tile][head_dim_k][ATTN_TILE_MAX] plain K: q * scale * log2(e) */
    int32_t *qi;        /* [n_tile][head_dim_k/2][ATTN_TILE_MAX] quantised K: q as pairs of i16 in the order of the K words */
    float *qs;          /* [n_tile][head_dim_k/32][ATTN_TILE_MAX] scale of those, times scale * log2(e) */
    int32_t *qsum;      /* same shape: sum of the 32 i16 */
    float *s;           /* [n_row][KV_PAGE] scores, then p */
    float *ps;          /* [ATTN_TILE_MAX][KV_PAGE] p times the scales of a V block */
    float *alpha;       /* [n_row] what the page multiplies o and l of earlier pages with, */
    float *beta;        /* [n_row] and its own */
    float *panel;       /* [32 * max(KV_PAGE, head_dim_k)]: widened K or V */
    float *o, *m, *l;   /* [n_row][dim_o], [n_row], [n_row]: state of the run */
};

struct kern_attn {
    int tile; /* rows per tile */
    /* Packs row `row` of the block from q[head_dim_k] (already rotated where K is). scale: of q.k. */
    void (*pack)(struct attn_rows *b, int row, const float *q, float scale);
    /* o, m, l = nothing yet. */
    void (*clear)(const struct attn_rows *b);
    /* Adds the page of `head` (address of the head in the page) that starts at position `pos`. next: the same head in
     * the page after it, which is prefetched (any address does). */
    void (*page)(const struct attn_rows *b, const unsigned char *head, const unsigned char *next, int64_t pos);
    /* (o, m, l)[n] of a row += (o2, m2, l2). */
    void (*merge)(float *o, float *m, float *l, const float *o2, float m2, float l2, int n);
    /* dst[n] = o / l. */
    void (*finish)(float *dst, const float *o, float l, int n);
};

KERN_TABLES(kern_attn)

#endif
