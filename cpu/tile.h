/* tile.h: the product of a strip of quantised weights with a few columns. Private to cpu/kern_matmul_*.c.
 * One loop over the blocks of 16 rows: unpack a word vector once, multiply it with the matching four activations of each
 * column, and after each scale group bring the exact integer sums to f32. Sums never cross lanes. */
#ifndef LH_CPU_TILE_H
#define LH_CPU_TILE_H

#include "cpu/kern_matmul.h"
#include "cpu/unpack.h"

/* Most columns in one pass: sums and scratch of all columns stay in registers (32 of 16 lanes; 16 of 8 lanes). */
#if defined(LH_ISA_avx512)
enum { TILE_COLS = 12 };
#elif defined(LH_ISA_avx2)
enum { TILE_COLS = 4 };
#else
enum { TILE_COLS = 2 };
#endif

/* The generic build keeps its loops: unrolled, four-register lanes take minutes to compile. So do builds that are not for
 * speed. */
#if defined(LH_ISA_generic) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* sum[c] += the products of words k0..k0+n-1 of run (o, i) with the activations of column c. */
SIMD_FN void dot_words(const int type, const int nc, vi *sum, const uint8_t *w, vi table, int o, const int i,
                       const struct xq *x, const int k0, const int n) {
    const struct traits t = traits(type);
#if defined(LH_ISA_avx2)
    vi part[TILE_COLS];
    UNROLL for (int c = 0; c < nc; c++) part[c] = vi_zero(); /* never read: the first word of a step replaces it */
    UNROLL for (int k = k0; k < k0 + n; k++) {
        vi v = unpack_word(type, w, table, o, i, k), a = vi_abs8(v);
        int in_step = (k - k0) % t.step;
        UNROLL for (int c = 0; c < nc; c++) {
            const int8_t *b = x[c].q + 4 * k;
            part[c] = t.is_signed ? dot_signed(v, a, b) : dot_unsigned(part[c], v, b, in_step == 0);
            if (in_step == t.step - 1) sum[c] = dot_flush(sum[c], part[c]);
        }
    }
#else
    (void)t;
    UNROLL for (int k = k0; k < k0 + n; k++) {
        vi v = unpack_word(type, w, table, o, i, k);
        UNROLL for (int c = 0; c < nc; c++) sum[c] = dot(sum[c], v, x[c].q + 4 * k);
    }
#endif
}

/* acc[c] += run (o, i) of a block: 32 elements under one scale, or twice 16. */
SIMD_FN void tile_run(const int type, const int nc, vf *acc, const uint8_t *w, vi table, const struct scales *s, int o,
                      const int i, const struct xq *x) {
    const struct traits t = traits(type);
    const int g = o * t.inner + i, halves = 32 / t.group, words = t.group / 4;
    UNROLL for (int h = 0; h < halves; h++) {
        vi sum[TILE_COLS];
        UNROLL for (int c = 0; c < nc; c++) sum[c] = vi_zero();
        dot_words(type, nc, sum, w, table, o, i, x, h * words, words);
        /* The offset of the weights leaves as an integer: -off * (sum of the activations). */
        const uint32_t both = halves == 1 ? 0x10001 : h ? 0x10000 : 1; /* which halves the run covers */
        const vi off = vi_set1((int32_t)((uint32_t)(-t.off & 0xffff) * both));
        if (t.off) UNROLL for (int c = 0; c < nc; c++) sum[c] = dot_pair(sum[c], off, x[c].sum);
        vf d = s->d[g * halves + h];
        UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_fma(vf_mul(vf_from_vi(sum[c]), d), vf_set1(x[c].d), acc[c]);
    }
    if (t.min == MIN_RUN) UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_fma(s->m[g], vf_set1(x[c].s), acc[c]);
    if (t.min == MIN_HALF)
        UNROLL for (int c = 0; c < nc; c++) {
            vf sum = vf_from_vi(dot_pair(vi_zero(), s->pair[g], x[c].sum));
            acc[c] = vf_fma(vf_mul(sum, s->m[0]), vf_set1(x[c].d), acc[c]);
        }
}

/* Where the sums of nc columns and 16 rows come from and go to. */
struct tile_out {
    float *y;
    int64_t y_stride;
    int n_row;
    bool resume;
    const float *bias;
};

/* Rows row0.. of columns c0... */
SIMD_FN struct tile_out tile_out(const struct matmul_tile *t, int row0, int c0) {
    int n_row = t->n_row - row0 < VLEN ? t->n_row - row0 : VLEN;
    float *y = t->y + c0 * t->y_stride + row0;
    return (struct tile_out){y, t->y_stride, n_row, t->resume, t->bias ? t->bias + row0 : NULL};
}

SIMD_FN void tile_begin(const int nc, vf *acc, struct tile_out o) {
    if (!o.resume) {
        UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_zero();
    } else if (o.n_row == VLEN) {
        UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_load(o.y + c * o.y_stride);
    } else {
        UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_load_n(o.y + c * o.y_stride, o.n_row);
    }
}

SIMD_FN void tile_end(const int nc, vf *acc, struct tile_out o) {
    if (o.bias) {
        vf bias = vf_load_n(o.bias, o.n_row);
        UNROLL for (int c = 0; c < nc; c++) acc[c] = vf_add(acc[c], bias);
    }
    if (o.n_row == VLEN) {
        UNROLL for (int c = 0; c < nc; c++) vf_store(o.y + c * o.y_stride, acc[c]);
    } else {
        UNROLL for (int c = 0; c < nc; c++) vf_store_n(o.y + c * o.y_stride, acc[c], o.n_row);
    }
}

/* The share of run (o, i) in the prefetches of a block, spread because only a dozen or so can be under way. */
SIMD_FN void tile_prefetch(const int type, const uint8_t *w, bool to_l2, int o, const int i) {
    const struct traits t = traits(type);
    const int per_outer = (t.n_word + t.outer - 1) / t.outer;
    w += (size_t)(o * per_outer) * ROW_WORDS;
    if (to_l2) {
        UNROLL for (int k = i * per_outer / t.inner; k < (i + 1) * per_outer / t.inner; k++) simd_prefetch_l2(w + (size_t)k * ROW_WORDS);
    } else {
        UNROLL for (int k = i * per_outer / t.inner; k < (i + 1) * per_outer / t.inner; k++) simd_prefetch(w + (size_t)k * ROW_WORDS);
    }
}

SIMD_FN void tile_pass(const int type, const int nc, const struct matmul_tile *t, int c0) {
    const struct traits tr = traits(type);
    const vi table = type_table(type);
    const uint8_t *w = t->words, *sc = t->scales;
    const struct xq *x = (const struct xq *)t->x + c0;
    vf acc[TILE_COLS];
    tile_begin(nc, acc, tile_out(t, 0, c0));
    for (int64_t b = 0; b < t->n_block; b++) {
        struct scales s;
        if (tr.scale_bytes && !t->to_l2) simd_prefetch(sc + t->next);
        unpack_scales(type, w, sc, &s);
        for (int o = 0; o < tr.outer; o++)
            UNROLL for (int i = 0; i < tr.inner; i++, x += t->stride) {
                tile_prefetch(type, w + t->ahead, t->to_l2, o, i);
                tile_run(type, nc, acc, w, table, &s, o, i, x);
            }
        w += tr.n_word * ROW_WORDS, sc += tr.scale_bytes * VLEN;
    }
    tile_end(nc, acc, tile_out(t, 0, c0));
}

/* Every pass gives a column the same operations in the same order, so the split into passes changes nothing. */
SIMD_FN void tile_columns(const int type, const struct matmul_tile *t) {
    int c = 0;
    for (; t->n_col - c >= TILE_COLS; c += TILE_COLS) tile_pass(type, TILE_COLS, t, c);
#if defined(LH_ISA_avx512)
    for (; t->n_col - c >= 8; c += 8) tile_pass(type, 8, t, c);
    for (; t->n_col - c >= 4; c += 4) tile_pass(type, 4, t, c);
    for (; t->n_col - c >= 2; c += 2) tile_pass(type, 2, t, c);
#endif
    for (; c < t->n_col; c++) tile_pass(type, 1, t, c);
}

#define TILE_DEFINE(name)                                                                                              \
    void MATMUL_TILE(name)(const struct matmul_tile *t) { tile_columns(QT_##name, t); }

#endif
