/* attn_digits.h: sums of quantised V in integers, for builds with byte dot products. Private to kern_attn.c.
 *
 * p times the scale of V is written as three balanced base-256 digits (23 bits of the largest such product that the row's
 * part of a page can have), so that a sum over positions is three byte dot products per four positions instead of four
 * FMA, and V needs no conversion. The sums are exact, so their error is that of f32 p, and no order matters.
 * Bytes of V are unsigned, code + bias; the bias leaves as bias * (sum of the digits), where the sums start. */
#ifndef LH_CPU_ATTN_DIGITS_H
#define LH_CPU_ATTN_DIGITS_H

#include "core/kv.h"
#include "core/quant.h"
#include "cpu/simd.h"

/* What to ask memory for while p is used: what lies `near` bytes on, and `jump` further from `end` on, where a plane ends and
 * the next one to be used lies elsewhere. Into the second-level cache; any address may be asked for. */
struct ahead {
    ptrdiff_t near, jump;
    const unsigned char *end;
};

SIMD_FN void prefetch(const unsigned char *p, struct ahead a) {
    uintptr_t t = (uintptr_t)p + (uintptr_t)a.near;
    simd_prefetch_l2((const void *)(t >= (uintptr_t)a.end ? t + (uintptr_t)a.jump : t));
}

#if defined(LH_ISA_avx512)

enum { DIGITS = 3, DIGIT_ROWS = 4, DIGIT_MOST = 8300000, DIGIT_ZERO = 0x808080 };

/* Up to four rows against one block of 32 dims. */
struct digit_rows {
    _Alignas(64) int8_t at[DIGIT_ROWS][KV_PAGE / 4][4][4]; /* [row][four positions][digit, the lowest first][position] */
    _Alignas(64) float d[KV_PAGE];                         /* scales of V as multiples of `unit`, 0 outside the span */
    int32_t start[DIGIT_ROWS][4];                          /* -bias * sum of digit k */
    float unit[DIGIT_ROWS];
    float d_unit;                                          /* that of d, */
    int block, span_from, span_to;                         /* which is for these positions */
};

SIMD_FN int v_bias(int type) { return type == QT_Q8_0 ? 128 : 8; }

/* 256 scales as multiples of the unit that makes the largest DIGIT_MOST. A scale that is no number makes the unit one, and
 * with it the output. */
SIMD_FN float digit_scales(float *out, const uint16_t *d, int from, int to, ptrdiff_t ahead) {
    __m512i top = _mm512_setzero_si512(), i = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                                                               13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i x[KV_PAGE / 32];
    for (int k = 0; k < KV_PAGE / 32; k++) {
        x[k] = _mm512_loadu_si512(d + 32 * k);
        simd_prefetch_l2((const void *)((uintptr_t)(d + 32 * k) + (uintptr_t)ahead));
        if (to - from < KV_PAGE) {
            __m512i at = _mm512_add_epi16(i, _mm512_set1_epi16((short)(32 * k)));
            __mmask32 in = _mm512_cmpge_epi16_mask(at, _mm512_set1_epi16((short)from)) &
                           _mm512_cmplt_epi16_mask(at, _mm512_set1_epi16((short)to));
            x[k] = _mm512_maskz_mov_epi16(in, x[k]);
        }
        top = _mm512_max_epu16(top, _mm512_and_si512(x[k], _mm512_set1_epi16(0x7fff)));
    }
    __m256i t = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
    __m128i u = _mm_max_epu16(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    u = _mm_xor_si128(u, _mm_set1_epi16(-1)); /* there is an instruction for the smallest of eight */
    float most = _mm_cvtss_f32(_mm_cvtph_ps(_mm_xor_si128(_mm_minpos_epu16(u), _mm_set1_epi16(-1))));
    vf inverse = vf_set1(most > 0 ? DIGIT_MOST / most : 0);
    for (int k = 0; k < KV_PAGE / 32; k++) {
        vf_store(out + 32 * k, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(x[k])), inverse));
        vf_store(out + 32 * k + VLEN, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(x[k], 1)), inverse));
    }
    return most * (1.0f / DIGIT_MOST);
}

/* Digits of row r for positions from .. to, rounded outwards to 16; p <= 1. */
SIMD_FN void digit_pack(struct digit_rows *g, int r, const float *p, int type, int from, int to) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i sign = _mm512_set1_epi32(DIGIT_ZERO), bias = _mm512_set1_epi8((char)v_bias(type));
    const vf zero = vf_set1(DIGIT_ZERO);
    __m512i sum = _mm512_setzero_si512(), sum2 = sum; /* two: one would wait for itself */
    for (int i = from / VLEN * VLEN; i < to; i += VLEN) {
        __m512i x = _mm512_cvtps_epi32(_mm512_fmadd_ps(vf_load(p + i), vf_load(g->d + i), zero));
        x = _mm512_shuffle_epi8(_mm512_xor_si512(x, sign), turn);
        _mm512_store_si512(g->at[r][i / 4], x);
        __m512i t = simd_dpbusd(sum2, bias, x);
        sum2 = sum, sum = t;
    }
    sum = _mm512_add_epi32(sum, sum2);
    __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    _mm_storeu_si128((__m128i *)g->start[r], _mm_sub_epi32(_mm_setzero_si128(), q));
}

/* Four positions of a block: x[h] has in lane d their bytes of dim 16 * h + d. */
SIMD_FN void v_bytes(const int type, const unsigned char *p, __m512i x[2]) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i a = _mm512_loadu_si512(p), b;
    if (type == QT_Q4_0) {
        a = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a);
        a = _mm512_shuffle_epi8(a, turn);
        x[0] = _mm512_and_si512(a, _mm512_set1_epi8(15));
        x[1] = _mm512_and_si512(_mm512_srli_epi32(a, 4), _mm512_set1_epi8(15));
    } else {
        const __m512i pick = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
        b = _mm512_loadu_si512(p + 64);
        x[0] = _mm512_permutex2var_epi32(a, pick, b);
        x[1] = _mm512_permutex2var_epi32(a, _mm512_add_epi32(pick, _mm512_set1_epi32(4)), b);
        for (int h = 0; h < 2; h++) x[h] = _mm512_shuffle_epi8(_mm512_xor_si512(x[h], _mm512_set1_epi8((char)0x80)), turn);
    }
}

/* acc[r][h][k] = the sum of digit k with the bytes of 16 dims, positions from .. to rounded outwards to four. v: the
 * block in the page. */
SIMD_FN void digit_sums(const int R, const int type, const struct digit_rows *g, const unsigned char *v, struct ahead ahead, int from,
                        int to, __m512i acc[DIGIT_ROWS][2][DIGITS]) {
    const int step = type == QT_Q4_0 ? 64 : 128;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int k = 0; k < DIGITS; k++)
        acc[r][h][k] = _mm512_set1_epi32(g->start[r][k]);
    for (int i = from / 4; i < (to + 3) / 4; i++) {
        __m512i x[2];
        const unsigned char *p = v + i * step;
        v_bytes(type, p, x);
        prefetch(p, ahead);
        if (type == QT_Q8_0) prefetch(p + 64, ahead);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < DIGITS; k++) {
            int32_t four;
            memcpy(&four, g->at[r][i][k], 4);
            __m512i y = _mm512_set1_epi32(four);
            UNROLL for (int h = 0; h < 2; h++) acc[r][h][k] = simd_dpbusd(acc[r][h][k], x[h], y);
        }
    }
}

/* o = o * alpha + unit * the number that the three sums are the digits of. */
SIMD_FN void digit_add(float *o, float alpha, float unit, const __m512i sum[DIGITS]) {
    vf t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[1]), vf_set1(256), _mm512_cvtepi32_ps(sum[0]));
    t = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[2]), vf_set1(65536), t);
    vf_store(o, _mm512_fmadd_ps(t, vf_set1(unit), _mm512_mul_ps(vf_load(o), vf_set1(alpha))));
}

#endif

#endif
