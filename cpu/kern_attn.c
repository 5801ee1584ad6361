/* kern_attn.c: see kern_attn.h. Layout of pages: core/kv.h.
 *
 * Lanes are positions in scores and dims in outputs. With one or two tiles K and V are unpacked in registers for each
 * tile (decoding: memory is the limit). With more, 32 positions of K or 16-32 dims of V are widened once into a panel in
 * L1 that all tiles use: the same kernels run on it with type F32, or on i16 pairs where K is quantised. Quantised V with
 * AVX-512 goes through attn_digits.h however many rows there are. */
#include "cpu/kern_attn.h"

#include "core/quant.h"
#include "cpu/simd_attn.h"

#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#include "cpu/attn_digits.h"

enum { AHEAD_LEAST = 8 << 10 };
enum { TM = ATTN_TILE_MAX, K_I16 = 1000, PANEL_F32 = 1001, WIDEN_FROM = 3, PANEL_POS = 32, PANEL_DIMS = 32, CHUNK_POS = 64 };

/* Rows of a tile, and vectors side by side for r rows: accumulators fill the registers, less what is being multiplied. Few
 * rows do not keep all multipliers busy, but wait for memory; more streams of it would make them wait longer. In the
 * two-register build a vector is two registers. */
#if defined(LH_ISA_avx512)
enum { TILE = 12 };
#define K_VECS(r) 2
#define V_VECS(r) 2
#elif defined(LH_ISA_avx2)
enum { TILE = 6 };
#define K_VECS(r) ((r) <= 2 ? 2 : 1)
#define V_VECS(r) ((r) <= 2 ? 2 : 1)
#else
enum { TILE = 4 };
#define K_VECS(r) ((r) == 1 ? 2 : 1)
#define V_VECS(r) ((r) == 1 ? 2 : 1)
#endif

/* --- scores ------------------------------------------------------------------------------------------------------------ */

/* Where vectors of K are: vector v (16 positions) of step d at p + v * vec + d * step bytes. A step is a dim of plain K, a
 * word of quantised K, a pair in a panel. Scales: v * s_vec + block * s_step, f16, in a panel f32. */
struct k_src {
    const unsigned char *p, *s;
    size_t vec, step, s_vec, s_step;
    struct ahead ahead;
    ptrdiff_t s_ahead; /* from the scales of K to those of V, which are few and wanted from the start */
};

/* How far ahead memory is asked for K and V: far enough for its latency, and at least the two groups of K that are used side
 * by side. A core drops prefetches when too many are under way, so more would not help. */
static ptrdiff_t ahead_bytes(const struct kv_layer *l) {
    size_t two = l->ks_off / (KV_PAGE / KV_LANES) * 2;
    return (ptrdiff_t)(two > AHEAD_LEAST ? two : AHEAD_LEAST);
}

static struct k_src k_page(const struct kv_layer *l, const unsigned char *head) {
    size_t dim = (size_t)l->head_dim_k;
    size_t e = l->type_k == QT_F32 ? 64 : l->type_k == QT_F16 || l->type_k == QT_BF16 ? 32 : 64;
    size_t steps = l->type_k == QT_Q8_0 ? dim / 4 : l->type_k == QT_Q4_0 ? dim / 8 : dim;
    return (struct k_src){.p = head, .s = head + l->ks_off, .vec = steps * e, .step = e, .s_vec = dim / KV_BLOCK * 32, .s_step = 32,
                          .ahead = {.near = ahead_bytes(l), .jump = (ptrdiff_t)(l->v_off - l->ks_off), .end = head + l->ks_off},
                          .s_ahead = (ptrdiff_t)(l->vs_off - l->ks_off)};
}

INLINE vf load_plain(int type, const unsigned char *p) {
    if (type == QT_F16) return vf_from_f16((const uint16_t *)p);
    if (type == QT_BF16) return vf_from_bf16((const uint16_t *)p);
    return vf_load((const float *)p);
}

/* s[r][first .. first + 16*NV) of R rows, plain K. q: [dim][TM]. */
INLINE void score_plain(const int R, const int NV, const int type, const struct k_src *k, const float *q, int dim, float *s,
                        int first) {
    vf acc[TM][2];
    const unsigned char *p = k->p + (size_t)(first / VLEN) * k->vec;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vf_zero();
    for (int d = 0; d < dim; d++, p += k->step, q += TM) {
        vf x[2];
        UNROLL for (int v = 0; v < NV; v++) {
            x[v] = load_plain(type, p + (size_t)v * k->vec);
            /* Two dims of a 16-bit type share a line. */
            if (type == QT_F32 || (type != PANEL_F32 && d % 2 == 0)) prefetch(p + (size_t)v * k->vec, k->ahead);
        }
        UNROLL for (int r = 0; r < R; r++) {
            vf y = vf_set1(q[r]);
            UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vf_fma(y, x[v], acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) vf_store(s + r * KV_PAGE + first + v * VLEN, acc[r][v]);
}

/* Pair j of i16 of a word (K_I16: of a pair) of quantised K. */
INLINE vi unpack_pair(int type, const unsigned char *p, int j) {
    vi w = vi_load(p);
    if (type == K_I16) return w;
    if (type == QT_Q8_0) return j ? vi_odd8(w) : vi_even8(w);
    return vi_and(j ? vi_shr(w, 4 * j) : w, vi_set1(0x000f000f));
}

/* The same for quantised K. Products are exact in i32: 32 * 32767 * 128 < 2^31 / 15. */
INLINE void score_quant(const int R, const int NV, const int type, const struct k_src *k, const int32_t *qi, const float *qs,
                        const int32_t *qsum, int dim, float *s, int first) {
    const int pairs = type == K_I16 ? 1 : type == QT_Q8_0 ? 2 : 4;
    vf acc[TM][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) acc[r][v] = vf_zero();
    const unsigned char *p = k->p + (size_t)(first / VLEN) * k->vec, *sc = k->s + (size_t)(first / VLEN) * k->s_vec;
    for (int b = 0; b < dim / KV_BLOCK; b++, sc += k->s_step, qs += TM, qsum += TM) {
        vi sum[TM][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++)
            sum[r][v] = type == QT_Q4_0 ? vi_set1(-8 * qsum[r]) : vi_zero();
        for (int w = 0; w < KV_BLOCK / 2 / pairs; w++, p += k->step, qi += pairs * TM) {
            if (type != K_I16) UNROLL for (int v = 0; v < NV; v++) prefetch(p + (size_t)v * k->vec, k->ahead);
            UNROLL for (int j = 0; j < pairs; j++) {
                vi x[2];
                UNROLL for (int v = 0; v < NV; v++) x[v] = unpack_pair(type, p + (size_t)v * k->vec, j);
                UNROLL for (int r = 0; r < R; r++) {
                    vi y = vi_set1(qi[j * TM + r]);
                    UNROLL for (int v = 0; v < NV; v++) sum[r][v] = vi_dp16(sum[r][v], x[v], y);
                }
            }
        }
        UNROLL for (int v = 0; v < NV; v++) {
            if (type != K_I16 && b % 2 == 0) simd_prefetch_l2((const void *)((uintptr_t)(sc + (size_t)v * k->s_vec) + (uintptr_t)k->s_ahead)); /* 64 bytes: two blocks */
            vf d = type == K_I16 ? vf_load((const float *)(sc + (size_t)v * k->s_vec)) : vf_from_f16((const uint16_t *)(sc + (size_t)v * k->s_vec));
            UNROLL for (int r = 0; r < R; r++)
                acc[r][v] = vf_fma(vf_from_vi(sum[r][v]), vf_mul(d, vf_set1(qs[r])), acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) vf_store(s + r * KV_PAGE + first + v * VLEN, acc[r][v]);
}

/* Scores of a tile of R rows for positions from .. to of a page, rounded outwards to whole steps of NV vectors. base: the
 * position where k starts. */
INLINE void score_span(const int R, const int type, const struct attn_rows *b, int tile, const struct k_src *k, int from, int to,
                       int base) {
    /* Integers and their sums in f32 share the registers. */
    const bool plain = type == QT_F32 || type == QT_F16 || type == QT_BF16 || type == PANEL_F32;
    const int NV = !plain && R > 6 ? 1 : K_VECS(R);
    int dim = b->layer->head_dim_k, step = NV * VLEN;
    float *s = b->s + (size_t)b->tile_row[tile] * KV_PAGE + base;
    size_t blocks = (size_t)tile * (size_t)(dim / KV_BLOCK) * TM;
    for (int first = from / step * step; first < to; first += step) {
        if (plain)
            score_plain(R, NV, type, k, b->q + (size_t)tile * (size_t)dim * TM, dim, s, first);
        else
            score_quant(R, NV, type, k, b->qi + (size_t)tile * (size_t)(dim / 2) * TM, b->qs + blocks, b->qsum + blocks, dim, s, first);
    }
}

#if defined(LH_ISA_avx512)
#define ROW_CASES(CALL) CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6) CALL(7) CALL(8) CALL(9) CALL(10) \
    CALL(11) CALL(12)
#elif defined(LH_ISA_avx2)
#define ROW_CASES(CALL) CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6)
#else
#define ROW_CASES(CALL) CALL(1) CALL(2) CALL(3) CALL(4)
#endif

typedef void (*score_fn)(const struct attn_rows *b, int tile, const struct k_src *k, int from, int to, int base);

#define SCORE_CASE(n) case n: score_span(n, SCORE_TYPE, b, tile, k, from, to, base); break;
#define SCORE_FN(name)                                                                                                 \
    static __attribute__((noinline)) void name(const struct attn_rows *b, int tile, const struct k_src *k, int from,   \
                                               int to, int base) {                                                     \
        switch (b->tile_row[tile + 1] - b->tile_row[tile]) { ROW_CASES(SCORE_CASE) }                                   \
    }
#define SCORE_TYPE QT_F32
SCORE_FN(score_f32)
#undef SCORE_TYPE
#define SCORE_TYPE QT_F16
SCORE_FN(score_f16)
#undef SCORE_TYPE
#define SCORE_TYPE QT_BF16
SCORE_FN(score_bf16)
#undef SCORE_TYPE
#define SCORE_TYPE QT_Q8_0
SCORE_FN(score_q8)
#undef SCORE_TYPE
#define SCORE_TYPE QT_Q4_0
SCORE_FN(score_q4)
#undef SCORE_TYPE
#define SCORE_TYPE PANEL_F32
SCORE_FN(score_panel)
#undef SCORE_TYPE
#define SCORE_TYPE K_I16
SCORE_FN(score_i16)
#undef SCORE_TYPE

static score_fn score_of(int type) {
    switch (type) {
    case QT_F32: return score_f32;
    case QT_F16: return score_f16;
    case QT_BF16: return score_bf16;
    case QT_Q8_0: return score_q8;
    default: return score_q4;
    }
}

/* Widens PANEL_POS positions from `first`: plain K to f32 [dim][32], quantised K to i16 pairs [dim/2][32] with f32 scales
 * [dim/32][32] after them. */
static struct k_src widen_k(const struct attn_rows *b, const struct k_src *k, int first) {
    enum { NV = PANEL_POS / VLEN };
    int type = b->layer->type_k, dim = b->layer->head_dim_k;
    const unsigned char *p = k->p + (size_t)(first / VLEN) * k->vec, *sc = k->s + (size_t)(first / VLEN) * k->s_vec;
    float *out = b->panel;
    struct k_src panel = {.p = (unsigned char *)out, .s = (unsigned char *)(out + dim / 2 * PANEL_POS), .vec = VLEN * 4,
                          .step = PANEL_POS * 4, .s_vec = VLEN * 4, .s_step = PANEL_POS * 4};
    if (type == QT_F32 || type == QT_F16 || type == QT_BF16) {
        for (int d = 0; d < dim; d++)
            for (int v = 0; v < NV; v++) {
                const unsigned char *src = p + (size_t)v * k->vec + (size_t)d * k->step;
                vf_store(out + d * PANEL_POS + v * VLEN, type == QT_F16 ? load_plain(QT_F16, src) : type == QT_BF16 ? load_plain(QT_BF16, src) : load_plain(QT_F32, src));
            }
        return panel;
    }
    int pairs = type == QT_Q8_0 ? 2 : 4;
    for (int w = 0; w < dim / 2 / pairs; w++)
        for (int v = 0; v < NV; v++) {
            const unsigned char *src = p + (size_t)v * k->vec + (size_t)w * k->step;
            for (int j = 0; j < pairs; j++)
                vi_store(out + (w * pairs + j) * PANEL_POS + v * VLEN,
                         type == QT_Q4_0 ? vi_sub8_16(unpack_pair(QT_Q4_0, src, j)) : unpack_pair(QT_Q8_0, src, j));
        }
    for (int i = 0; i < dim / KV_BLOCK; i++)
        for (int v = 0; v < NV; v++)
            vf_store(out + dim / 2 * PANEL_POS + i * PANEL_POS + v * VLEN,
                     vf_from_f16((const uint16_t *)(sc + (size_t)v * k->s_vec + (size_t)i * k->s_step)));
    return panel;
}

/* --- ranges ------------------------------------------------------------------------------------------------------------ */

struct span {
    int from, to; /* positions relative to a page; from >= to: none */
};

static struct span row_span(const struct attn_rows *b, int row, int64_t pos) {
    int64_t from = b->lo[row] - pos, to = b->hi[row] - pos;
    return (struct span){from < 0 ? 0 : from > KV_PAGE ? KV_PAGE : (int)from, to > KV_PAGE ? KV_PAGE : to < 0 ? 0 : (int)to};
}

/* All rows of a tile. */
static struct span tile_span(const struct attn_rows *b, int tile, int64_t pos) {
    struct span t = {KV_PAGE, 0};
    for (int row = b->tile_row[tile]; row < b->tile_row[tile + 1]; row++) {
        struct span r = row_span(b, row, pos);
        if (r.from >= r.to) continue;
        t.from = r.from < t.from ? r.from : t.from;
        t.to = r.to > t.to ? r.to : t.to;
    }
    return t;
}

static void scores(const struct attn_rows *b, const unsigned char *head, const struct span *u) {
    struct k_src k = k_page(b->layer, head);
    if (b->n_tile < WIDEN_FROM) {
        for (int first = 0; first < KV_PAGE; first += CHUNK_POS) { /* one after the other while K is in the first-level cache */
            struct k_src x = k;
            for (int t = 0; t < b->n_tile; t++) {
                int from = u[t].from > first ? u[t].from : first, to = u[t].to < first + CHUNK_POS ? u[t].to : first + CHUNK_POS;
                if (from < to) score_of(b->layer->type_k)(b, t, &x, from, to, 0);
                x.ahead.near = x.ahead.jump = x.s_ahead = 0; /* the first tile has asked for it */
            }
        }
        return;
    }
    bool quant = b->layer->type_k == QT_Q8_0 || b->layer->type_k == QT_Q4_0;
    for (int first = 0; first < KV_PAGE; first += PANEL_POS) {
        struct k_src panel;
        bool wide = false;
        for (int t = 0; t < b->n_tile; t++) {
            if (u[t].from >= first + PANEL_POS || u[t].to <= first || u[t].from >= u[t].to) continue;
            if (!wide) panel = widen_k(b, &k, first), wide = true;
            (quant ? score_i16 : score_panel)(b, t, &panel, 0, PANEL_POS, first);
        }
    }
}

/* --- softmax ----------------------------------------------------------------------------------------------------------- */

/* Scores outside the row's span become -infinity, so that their p is 0, whatever was read there. */
static void mask_span(float *s, struct span row, struct span tile) {
    for (int i = tile.from / VLEN * VLEN; i < row.from; i++) s[i] = -INFINITY;
    for (int i = row.to; i < (tile.to + VLEN - 1) / VLEN * VLEN; i++) s[i] = -INFINITY;
}

/* m, l, alpha, beta of a tile's rows, and p in place of s. A row that sees nothing of the page, while others of its tile do,
 * gets alpha 1, beta 0 and p 0. */
static void softmax_tile(const struct attn_rows *b, int tile, int64_t pos, struct span t) {
    int row0 = b->tile_row[tile], n = b->tile_row[tile + 1] - row0, first = t.from / VLEN * VLEN;
    float top[VLEN], alpha[VLEN] = {0}, beta[VLEN] = {0};
    for (int i = 0; i < n; i++) {
        struct span r = row_span(b, row0 + i, pos);
        float *s = b->s + (size_t)(row0 + i) * KV_PAGE, m = b->m[row0 + i];
        top[i] = -INFINITY;
        if (r.from < r.to) {
            if (r.from > first || r.to < t.to || t.to % VLEN) mask_span(s, r, t);
            vf x = vf_load(s + first);
            for (int j = first + VLEN; j < t.to; j += VLEN) x = vf_max(x, vf_load(s + j));
            top[i] = vf_hmax(x);
        } else {
            for (int j = first; j < t.to; j += VLEN) vf_store(s + j, vf_set1(-INFINITY));
        }
        float most = top[i] > m || top[i] != top[i] ? top[i] : m;
        alpha[i] = m == -INFINITY ? -INFINITY : m - most;
        beta[i] = top[i] == -INFINITY ? -INFINITY : top[i] - most;
        b->m[row0 + i] = most;
    }
    vf_store(alpha, vf_exp2_neg(vf_load(alpha)));
    vf_store(beta, vf_exp2_neg(vf_load(beta)));
    for (int i = 0; i < n; i++) {
        float *s = b->s + (size_t)(row0 + i) * KV_PAGE;
        /* A row that sees nothing: any finite number makes its p zero. */
        vf sum = vf_zero(), vm = vf_set1(top[i] == -INFINITY ? 0 : top[i]);
        for (int j = first; j < t.to; j += VLEN) {
            vf p = vf_exp2_neg(vf_sub(vf_load(s + j), vm));
            vf_store(s + j, p);
            sum = vf_add(sum, p);
        }
        b->alpha[row0 + i] = alpha[i];
        b->beta[row0 + i] = beta[i];
        b->l[row0 + i] = b->l[row0 + i] * alpha[i] + vf_sum(sum) * beta[i];
    }
}

/* --- outputs ----------------------------------------------------------------------------------------------------------- */

/* Where V is: 16 dims (column c) of position i at p + c/2 * block + c%2 * half + i * row bytes; Q4_0: nibble c%2. */
struct v_src {
    const unsigned char *p;
    size_t block, half, row;
    struct ahead ahead;
    int narrow; /* column in a block of 16 dims, whose rows are half as long; -1: none */
};

static struct v_src v_page(const struct attn_rows *b, const unsigned char *head, const unsigned char *next) {
    int type = b->layer->type_v, n_col = b->dim_o / VLEN;
    size_t half = type == QT_F32 ? 64 : type == QT_Q8_0 ? 16 : type == QT_Q4_0 ? 0 : 32;
    size_t row = type == QT_Q4_0 ? 16 : 2 * half;
    return (struct v_src){.p = head + b->layer->v_off, .block = row * KV_PAGE, .half = half, .row = row,
                          .ahead = {.near = ahead_bytes(b->layer), .jump = next - (head + b->layer->vs_off), .end = head + b->layer->vs_off},
                          .narrow = n_col % 2 ? n_col - 1 : -1};
}

/* 16 values of V; codes of Q4_0 as they are, 8 too large. */
INLINE vf load_v(const int type, const unsigned char *p, int odd) {
    if (type == QT_Q8_0) return vf_from_i8((const int8_t *)p);
    if (type == QT_Q4_0) {
        vi w = vi_from_u8(p);
        return vf_from_vi(odd ? vi_shr(w, 4) : vi_and(w, vi_set1(15)));
    }
    return load_plain(type, p);
}

/* A tile's share of the output. */
struct out_arg {
    const float *p, *alpha, *beta; /* p: [R][KV_PAGE] */
    const float *start;            /* [R] where the sums start: -8 * sum of p for Q4_0 */
    size_t o_row;
    float *o;
    struct span u;
};

/* o[r][16*NC dims from col] = o * alpha + beta * sum over the span of p[r][i] v[i]. */
INLINE void out_cols(const int R, const int NC, const int type, const struct v_src *v, int col, const struct out_arg *a) {
    const int per_line = type == QT_Q4_0 ? 4 : type == QT_Q8_0 ? 2 : 1; /* positions whose 32 dims share 64 bytes */
    vf acc[TM][2];
    const unsigned char *at[2];
    size_t row = col == v->narrow ? v->row / 2 : v->row;
    UNROLL for (int c = 0; c < NC; c++)
        at[c] = v->p + (size_t)((col + c) / 2) * v->block + (size_t)((col + c) % 2) * v->half + (size_t)a->u.from * row;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < NC; c++) acc[r][c] = vf_set1(a->start[r]);
    for (int i = a->u.from; i < a->u.to; i++) {
        vf x[2];
        UNROLL for (int c = 0; c < NC; c++) {
            x[c] = load_v(type, at[c], NC == 1 ? col % 2 : c % 2);
            if (type != PANEL_F32 && (type == QT_F32 || (NC == 1 ? col : c) % 2 == 0) && i % per_line == 0) prefetch(at[c], v->ahead);
            at[c] += row;
        }
        UNROLL for (int r = 0; r < R; r++) {
            vf y = vf_set1(a->p[(size_t)r * KV_PAGE + (size_t)i]);
            UNROLL for (int c = 0; c < NC; c++) acc[r][c] = vf_fma(y, x[c], acc[r][c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        vf alpha = vf_set1(a->alpha[r]), beta = vf_set1(a->beta[r]);
        UNROLL for (int c = 0; c < NC; c++) {
            float *y = a->o + (size_t)r * a->o_row + (col + c) * VLEN;
            vf_store(y, vf_fma(acc[r][c], beta, vf_mul(vf_load(y), alpha)));
        }
    }
}

/* ps[r][i] = p[r][i] * scale of V block, and -bias times their sums. */
INLINE void scale_p(const int R, const struct attn_rows *b, const unsigned char *head, const float *p, int block, struct span u,
                    float *start) {
    const uint16_t *d = (const uint16_t *)(head + b->layer->vs_off) + (size_t)block * KV_PAGE;
    float bias = b->layer->type_v == QT_Q4_0 ? 8 : 0;
    vf sum[TM];
    UNROLL for (int r = 0; r < R; r++) sum[r] = vf_zero();
    for (int i = u.from / VLEN * VLEN; i < u.to; i += VLEN) {
        vf s = vf_from_f16(d + i);
        UNROLL for (int r = 0; r < R; r++) {
            vf y = vf_load(p + r * KV_PAGE + i), x = vf_select_lt(vf_zero(), y, vf_mul(y, s), vf_zero()); /* s may be NaN where y is 0 */
            vf_store(b->ps + r * KV_PAGE + i, x);
            sum[r] = vf_add(sum[r], x);
        }
    }
    UNROLL for (int r = 0; r < R; r++) start[r] = -bias * vf_sum(sum[r]);
}

/* Columns col .. end (col even) of a tile of R rows, in groups of V_VECS(R). */
INLINE void out_span(const int R, const int type, const struct attn_rows *b, int tile, const struct v_src *v,
                     const unsigned char *head, int col, int end, struct span u) {
    const int NC = V_VECS(R);
    bool scaled = b->layer->type_v == QT_Q8_0 || b->layer->type_v == QT_Q4_0;
    size_t row = (size_t)b->tile_row[tile];
    const float *p = b->s + row * KV_PAGE;
    float start[TM] = {0};
    struct out_arg a = {.start = start, .p = scaled ? b->ps : p, .alpha = b->alpha + row, .beta = b->beta + row, .o_row = (size_t)b->dim_o, .o = b->o + row * (size_t)b->dim_o, .u = u};
    while (col < end) {
        if (scaled) scale_p(R, b, head, p, col / 2, u, start);
        if (NC >= 2 && end - col >= 2) {
            out_cols(R, NC >= 2 ? 2 : 1, type, v, col, &a);
            col += 2;
        } else { /* one column at a time; both of a block share the scaled p */
            out_cols(R, 1, type, v, col++, &a);
            if (col < end) out_cols(R, 1, type, v, col++, &a);
        }
    }
}

typedef void (*out_fn)(const struct attn_rows *b, int tile, const struct v_src *v, const unsigned char *head, int col, int end,
                       struct span u);

#define OUT_CASE(n) case n: out_span(n, OUT_TYPE, b, tile, v, head, col, end, u); break;
#define OUT_FN(name)                                                                                                   \
    static __attribute__((noinline)) void name(const struct attn_rows *b, int tile, const struct v_src *v,             \
                                               const unsigned char *head, int col, int end, struct span u) {           \
        switch (b->tile_row[tile + 1] - b->tile_row[tile]) { ROW_CASES(OUT_CASE) }                                     \
    }
#define OUT_TYPE QT_F32
OUT_FN(out_f32)
#undef OUT_TYPE
#define OUT_TYPE QT_F16
OUT_FN(out_f16)
#undef OUT_TYPE
#define OUT_TYPE QT_BF16
OUT_FN(out_bf16)
#undef OUT_TYPE
#define OUT_TYPE QT_Q8_0
OUT_FN(out_q8)
#undef OUT_TYPE
#define OUT_TYPE QT_Q4_0
OUT_FN(out_q4)
#undef OUT_TYPE
#define OUT_TYPE PANEL_F32
OUT_FN(out_panel)
#undef OUT_TYPE

static out_fn out_of(int type) {
    switch (type) {
    case QT_F32: return out_f32;
    case QT_F16: return out_f16;
    case QT_BF16: return out_bf16;
    case QT_Q8_0: return out_q8;
    default: return out_q4;
    }
}

INLINE void widen_cols(const int type, const struct v_src *v, float *panel, int col, int n, struct span u) {
    for (int c = 0; c < n; c++) {
        size_t row = col + c == v->narrow ? v->row / 2 : v->row;
        const unsigned char *p = v->p + (size_t)(col / 2) * v->block + (size_t)c * v->half;
        for (int i = u.from; i < u.to; i++) vf_store(panel + i * PANEL_DIMS + c * VLEN, load_v(type, p + (size_t)i * row, c));
    }
}

/* Columns col .. col + n (n <= 2) as f32 (codes as from load_v where V is quantised: the scales go into p). */
static struct v_src widen_v(const struct attn_rows *b, const struct v_src *v, int col, int n, struct span u) {
    switch (b->layer->type_v) {
    case QT_F32: widen_cols(QT_F32, v, b->panel, col, n, u); break;
    case QT_F16: widen_cols(QT_F16, v, b->panel, col, n, u); break;
    case QT_BF16: widen_cols(QT_BF16, v, b->panel, col, n, u); break;
    case QT_Q8_0: widen_cols(QT_Q8_0, v, b->panel, col, n, u); break;
    default: widen_cols(QT_Q4_0, v, b->panel, col, n, u); break;
    }
    return (struct v_src){.p = (unsigned char *)b->panel, .block = 0, .half = VLEN * 4, .row = PANEL_DIMS * 4, .narrow = -1};
}

#if defined(LH_ISA_avx512)

typedef void (*digit_fn)(const struct digit_rows *g, const unsigned char *v, struct ahead ahead, struct span u,
                         const struct attn_rows *b, int row, int col);

INLINE void digit_block(const int R, const int type, const struct digit_rows *g, const unsigned char *v, struct ahead ahead,
                        struct span u, const struct attn_rows *b, int row, int col) {
    __m512i acc[DIGIT_ROWS][2][DIGITS];
    digit_sums(R, type, g, v, ahead, u.from, u.to, acc);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++)
        digit_add(b->o + (size_t)(row + r) * (size_t)b->dim_o + (col + h) * VLEN, b->alpha[row + r], b->beta[row + r] * g->unit[r],
                  acc[r][h]);
}

#define DIGIT_FN(name, R, type)                                                                                        \
    static __attribute__((noinline)) void name(const struct digit_rows *g, const unsigned char *v, struct ahead ahead,    \
                                               struct span u, const struct attn_rows *b, int row, int col) {           \
        digit_block(R, type, g, v, ahead, u, b, row, col);                                                             \
    }
#define DIGIT_ROWS_OF(name, type)                                                                                      \
    DIGIT_FN(name##1, 1, type) DIGIT_FN(name##2, 2, type) DIGIT_FN(name##3, 3, type) DIGIT_FN(name##4, 4, type)
DIGIT_ROWS_OF(digits_q8_, QT_Q8_0)
DIGIT_ROWS_OF(digits_q4_, QT_Q4_0)

static const digit_fn digit_fns[2][DIGIT_ROWS] = {{digits_q8_1, digits_q8_2, digits_q8_3, digits_q8_4},
                                                  {digits_q4_1, digits_q4_2, digits_q4_3, digits_q4_4}};

/* Digits of p of rows row .. row + n for V block `block`. Returns the positions that any of them sees. */
static struct span load_digits(struct digit_rows *g, const struct attn_rows *b, const unsigned char *head, int block, int row, int n,
                               int64_t pos, ptrdiff_t s_ahead) {
    const uint16_t *d = (const uint16_t *)(head + b->layer->vs_off) + (size_t)block * KV_PAGE;
    struct span all = {KV_PAGE, 0};
    for (int r = 0; r < n; r++) {
        struct span u = row_span(b, row + r, pos);
        if (u.from >= u.to) continue;
        all.from = u.from < all.from ? u.from : all.from;
        all.to = u.to > all.to ? u.to : all.to;
    }
    for (int r = 0; r < n; r++) {
        struct span u = row_span(b, row + r, pos);
        if (u.from >= u.to) u.from = u.to = all.to; /* nothing of the page: all digits are zero */
        bool whole = u.from / VLEN == all.from / VLEN && (u.to + VLEN - 1) / VLEN == (all.to + VLEN - 1) / VLEN;
        if (!whole) memset(g->at[r], 0, sizeof g->at[r]);
        if (u.from != g->span_from || u.to != g->span_to || block != g->block) {
            g->d_unit = digit_scales(g->d, d, u.from, u.to, s_ahead);
            g->span_from = u.from, g->span_to = u.to, g->block = block;
        }
        g->unit[r] = g->d_unit;
        digit_pack(g, r, b->s + (size_t)(row + r) * KV_PAGE, b->layer->type_v, u.from, u.to);
    }
    return all;
}

/* Quantised V, rows in groups of up to DIGIT_ROWS. Each puts the bytes in order anew, beside its products. */
static void outputs_digits(const struct attn_rows *b, const unsigned char *head, const unsigned char *next, int64_t pos) {
    const struct kv_layer *l = b->layer;
    struct ahead ahead = {.near = ahead_bytes(l), .jump = next - (head + l->vs_off), .end = head + l->vs_off};
    ptrdiff_t s_ahead = next + l->ks_off - (head + l->vs_off);
    struct digit_rows g = {.block = -1};
    int type = b->layer->type_v, n_group = (b->n_row + DIGIT_ROWS - 1) / DIGIT_ROWS;
    for (int block = 0; block < b->layer->head_dim_v / KV_BLOCK; block++) {
        const unsigned char *v = head + b->layer->v_off + (size_t)block * KV_PAGE * (type == QT_Q4_0 ? 16 : 32);
        for (int i = 0; i < n_group; i++) {
            int row = b->n_row * i / n_group, n = b->n_row * (i + 1) / n_group - row;
            struct span u = load_digits(&g, b, head, block, row, n, pos, s_ahead);
            if (u.from < u.to) digit_fns[type == QT_Q4_0][n - 1](&g, v, i ? (struct ahead){0} : ahead, u, b, row, 2 * block);
        }
    }
}

#endif

static void outputs(const struct attn_rows *b, const unsigned char *head, const unsigned char *next, const struct span *u,
                    struct span page, int64_t pos) {
#if defined(LH_ISA_avx512)
    if (b->layer->type_v == QT_Q8_0 || b->layer->type_v == QT_Q4_0) {
        outputs_digits(b, head, next, pos);
        return;
    }
#else
    (void)pos;
#endif
    struct v_src v = v_page(b, head, next);
    int n_col = b->dim_o / VLEN;
    if (b->n_tile < WIDEN_FROM) {
        int step = b->n_tile == 1 ? n_col : 2;
        for (int col = 0; col < n_col; col += step) {
            struct v_src x = v;
            for (int t = 0; t < b->n_tile; t++, x.ahead.near = x.ahead.jump = 0)
                if (u[t].from < u[t].to) out_of(b->layer->type_v)(b, t, &x, head, col, col + step < n_col ? col + step : n_col, u[t]);
        }
        return;
    }
    for (int col = 0; col < n_col; col += 2) {
        int n = n_col - col < 2 ? 1 : 2;
        struct v_src panel = widen_v(b, &v, col, n, page);
        for (int t = 0; t < b->n_tile; t++)
            if (u[t].from < u[t].to) out_panel(b, t, &panel, head, col, col + n, u[t]);
    }
}

/* --- table ------------------------------------------------------------------------------------------------------------- */

static void page(const struct attn_rows *b, const unsigned char *head, const unsigned char *next, int64_t pos) {
    struct span u[ATTN_MAX_TILES], all = {KV_PAGE, 0};
    for (int t = 0; t < b->n_tile; t++) {
        u[t] = tile_span(b, t, pos);
        if (u[t].from >= u[t].to) continue;
        all.from = u[t].from < all.from ? u[t].from : all.from;
        all.to = u[t].to > all.to ? u[t].to : all.to;
    }
    if (all.from >= all.to) return;
    scores(b, head, u);
    for (int t = 0; t < b->n_tile; t++)
        if (u[t].from < u[t].to) softmax_tile(b, t, pos, u[t]);
    outputs(b, head, next, u, all, pos);
}

static void pack_plain(struct attn_rows *b, int tile, int r, const float *q, float scale) {
    int dim = b->layer->head_dim_k;
    float *out = b->q + (size_t)tile * (size_t)dim * TM + r;
    for (int d = 0; d < dim; d++) out[d * TM] = q[d] * scale;
}

/* Rounds 32 values to i16 with a scale of their own; pairs in the order of unpack_pair. */
static void pack_quant(struct attn_rows *b, int tile, int r, const float *q, float scale) {
    int dim = b->layer->head_dim_k, blocks = dim / KV_BLOCK;
    for (int i = 0; i < blocks; i++) {
        const float *x = q + i * KV_BLOCK;
        float top = 0;
        for (int d = 0; d < KV_BLOCK; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
        float d16 = top / 32767, id = d16 > 1e-30f ? 1 / d16 : 0;
        int32_t c[KV_BLOCK], sum = 0;
        for (int d = 0; d < KV_BLOCK; d++) sum += c[d] = (int32_t)lrintf(x[d] * id);
        size_t at = ((size_t)tile * (size_t)blocks + (size_t)i) * TM + (size_t)r;
        b->qs[at] = d16 * scale;
        b->qsum[at] = sum;
        int32_t *out = b->qi + ((size_t)tile * (size_t)(dim / 2) + (size_t)i * (KV_BLOCK / 2)) * TM + r;
        for (int j = 0; j < KV_BLOCK / 2; j++) {
            int lo = b->layer->type_k == QT_Q8_0 ? j / 2 * 4 + j % 2 : 2 * j, hi = b->layer->type_k == QT_Q8_0 ? lo + 2 : lo + 1;
            out[j * TM] = (int32_t)((uint32_t)(c[lo] & 0xffff) | (uint32_t)c[hi] << 16);
        }
    }
}

static void pack(struct attn_rows *b, int row, const float *q, float scale) {
    int tile = 0;
    while (b->tile_row[tile + 1] <= row) tile++;
    scale *= 1.44269504f;
    if (b->layer->type_k == QT_Q8_0 || b->layer->type_k == QT_Q4_0)
        pack_quant(b, tile, row - b->tile_row[tile], q, scale);
    else
        pack_plain(b, tile, row - b->tile_row[tile], q, scale);
}

static void clear(const struct attn_rows *b) {
    memset(b->o, 0, sizeof *b->o * (size_t)b->n_row * (size_t)b->dim_o);
    for (int r = 0; r < b->n_row; r++) b->m[r] = -INFINITY, b->l[r] = 0;
}

static void merge(float *o, float *m, float *l, const float *o2, float m2, float l2, int n) {
    if (m2 == -INFINITY) return; /* nothing in that run */
    float top = *m > m2 ? *m : m2, f[VLEN] = {*m - top, m2 - top};
    vf_store(f, vf_exp2_neg(vf_load(f)));
    vf a = vf_set1(f[0]), b = vf_set1(f[1]);
    for (int i = 0; i < n; i += VLEN) vf_store(o + i, vf_fma(vf_load(o2 + i), b, vf_mul(vf_load(o + i), a)));
    *l = *l * f[0] + l2 * f[1];
    *m = top;
}

static void finish(float *dst, const float *o, float l, int n) {
    vf d = vf_set1(l);
    int i = 0;
    for (; i + VLEN <= n; i += VLEN) vf_store(dst + i, vf_div(vf_load(o + i), d));
    if (i < n) vf_store_n(dst + i, vf_div(vf_load(o + i), d), n - i);
}

const struct kern_attn KERN_SYM(kern_attn) = {
    .tile = TILE, .pack = pack, .clear = clear, .page = page, .merge = merge, .finish = finish,
};
