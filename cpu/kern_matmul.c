/* kern_matmul.c: tiles of F32, F16 and BF16 weights, quantisation of activations, and the table of a build. */
#include "cpu/kern_matmul.h"

#include "cpu/tile.h"

/* Most columns in one pass. AVX-512 works on two strips at once, so that each broadcast activation serves two products:
 * a broadcast for every product would keep the load ports busier than the multipliers. */
#if defined(LH_ISA_avx512)
enum { PLAIN_COLS = 12, PLAIN_STRIPS = 2 };
#elif defined(LH_ISA_avx2)
enum { PLAIN_COLS = 6, PLAIN_STRIPS = 1 };
#else
enum { PLAIN_COLS = 2, PLAIN_STRIPS = 1 };
#endif

/* Elements 2b and 2b + 1 of 16 rows. */
SIMD_FN void widen_word(const int type, vf *low, vf *high, const uint8_t *w) {
    if (type == QT_F16) {
        vf_from_f16_pair(low, high, vi_load(w));
    } else {
        *low = vf_bits(vi_shl(vi_load(w), 16));
        *high = vf_bits(vi_and(vi_load(w), vi_set1((int32_t)0xffff0000)));
    }
}

SIMD_FN void plain_pass(const int type, const int ns, const int nc, const struct matmul_tile *t, int c0) {
    const uint8_t *w = t->words;
    const float *x = (const float *)t->x + c0;
    vf acc[PLAIN_STRIPS][PLAIN_COLS];
    UNROLL for (int s = 0; s < ns; s++) tile_begin(nc, acc[s], tile_out(t, s * VLEN, c0));
    for (int64_t b = 0; b < t->n_block; b++, w += ROW_WORDS) {
        vf low[PLAIN_STRIPS], high[PLAIN_STRIPS];
        UNROLL for (int s = 0; s < ns; s++) {
            simd_prefetch(w + s * t->second + t->ahead);
            if (type == QT_F32) low[s] = vf_load((const float *)(const void *)(w + s * t->second));
            else widen_word(type, &low[s], &high[s], w + s * t->second);
        }
        UNROLL for (int c = 0; c < nc; c++)
            UNROLL for (int s = 0; s < ns; s++) acc[s][c] = vf_fma(low[s], vf_set1(x[c]), acc[s][c]);
        x += t->stride;
        if (type == QT_F32) continue;
        UNROLL for (int c = 0; c < nc; c++)
            UNROLL for (int s = 0; s < ns; s++) acc[s][c] = vf_fma(high[s], vf_set1(x[c]), acc[s][c]);
        x += t->stride;
    }
    UNROLL for (int s = 0; s < ns; s++) tile_end(nc, acc[s], tile_out(t, s * VLEN, c0));
}

SIMD_FN void plain_columns(const int type, const int ns, const struct matmul_tile *t) {
    int c = 0;
    for (; t->n_col - c >= PLAIN_COLS; c += PLAIN_COLS) plain_pass(type, ns, PLAIN_COLS, t, c);
    if (PLAIN_COLS > 4) for (; t->n_col - c >= 4; c += 4) plain_pass(type, ns, 4, t, c);
    for (; t->n_col - c >= 2; c += 2) plain_pass(type, ns, 2, t, c);
    for (; t->n_col - c >= 1; c += 1) plain_pass(type, ns, 1, t, c);
}

void MATMUL_TILE(F16)(const struct matmul_tile *t) { plain_columns(QT_F16, 1, t); }
void MATMUL_TILE(BF16)(const struct matmul_tile *t) { plain_columns(QT_BF16, 1, t); }
void MATMUL_TILE(F32)(const struct matmul_tile *t) {
    if (PLAIN_STRIPS == 2 && t->n_row > VLEN) plain_columns(QT_F32, PLAIN_STRIPS, t);
    else plain_columns(QT_F32, 1, t);
}

static void widen(float *dst, int type, const uint8_t *words, int64_t n_block) {
    if (type == QT_F32) memcpy(dst, words, (size_t)n_block * ROW_WORDS);
    for (int64_t b = 0; b < n_block && type != QT_F32; b++, words += ROW_WORDS, dst += 2 * VLEN) {
        vf low, high;
        if (type == QT_F16) widen_word(QT_F16, &low, &high, words);
        else widen_word(QT_BF16, &low, &high, words);
        vf_store(dst, low), vf_store(dst + VLEN, high);
    }
}

/* round(x / d). The limit matters where d is subnormal and therefore imprecise, and for a NaN, which becomes 127. */
SIMD_FN vi quantize_lanes(vf x, float d) {
    return vi_round(vf_max(vf_min(vf_div(x, vf_set1(d)), vf_set1(127)), vf_set1(-127)));
}

/* Magnitudes are compared as integers, so that a NaN is the largest of all and reaches d. */
static void quantize_block(struct xq *b, const float *x) {
    vf x0 = vf_load(x), x1 = vf_load(x + VLEN);
    float d = f32_from_bits((uint32_t)vi_hmax(vi_max(vi_bits(vf_abs(x0)), vi_bits(vf_abs(x1))))) / 127.0f;
    vi q0 = vi_zero(), q1 = vi_zero();
    if (d != 0) q0 = quantize_lanes(x0, d), q1 = quantize_lanes(x1, d);
    vi_store_i8(b->q, q0), vi_store_i8(b->q + VLEN, q1);
    b->sum[0] = (int16_t)vi_sum(q0), b->sum[1] = (int16_t)vi_sum(q1);
    b->d = d;
    b->s = d * (float)(b->sum[0] + b->sum[1]);
}

static void quantize(struct xq *dst, int64_t stride, const float *x, int64_t cols) {
    for (int64_t i = 0; i < cols / 32; i++) quantize_block(dst + i * stride, x + 32 * i);
}

const struct kern_matmul KERN_SYM(kern_matmul) = {
    .cols = TILE_COLS,
    .plain_cols = PLAIN_COLS,
    .tile = {
#define X(name, id, elems, bytes, enc) [id] = MATMUL_TILE(name),
        QUANT_LIST(X)
#undef X
    },
    .plain_strips = PLAIN_STRIPS,
    .widen = widen,
    .quantize = quantize,
};
