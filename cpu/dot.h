/* dot.h: what weight kernels need besides simd.h: products of bytes, 16-entry tables, 16-bit floats in 32-bit lanes.
 * Private to cpu/kern_matmul_*.c.
 *
 * A "word vector" is a vi: in lane r, four weights of row r as bytes. dot() adds their products with the four activations
 * at `a`, the same ones in all lanes; dot_pair() adds the products of pairs of 16 bits with the
 * pair at `a`. Weights are unsigned (at most 255), or signed where SIGNED_BYTES is 1.
 * AVX2 has only a product that adds pairs of u8 * i8 in 16 bits, so its running sum `part` stays in 16 bits for as many
 * words as cannot overflow and then is flushed to 32 bits:
 *   weights <= 15: 8 words (8 * 2 * 15 * 127 = 30480); <= 31: 4 words; <= 63: 2 words; signed: 1 word.
 * Elsewhere every word goes to 32 bits at once and flushing does nothing. */
#ifndef LH_CPU_DOT_H
#define LH_CPU_DOT_H

#include "cpu/simd.h"

#if defined(LH_ISA_avx512)

/* Signed weights are offset by 128 instead (the caller takes 128 * sum of the activations off again). */
enum { SIGNED_BYTES = 0 };

/* Written out because GCC 12 does not fold the broadcast into these instructions; as a load of its own it is a quarter of
 * all instructions of a tile and costs as much. */
typedef int32_t __attribute__((may_alias)) dot_i32;
SIMD_FN vi dot(vi part, vi w, const void *a) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(part) : "v"(w), "m"(*(const dot_i32 *)a));
    return part;
}
SIMD_FN vi dot_pair(vi sum, vi pairs, const void *a) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(pairs), "m"(*(const dot_i32 *)a));
    return sum;
}
SIMD_FN vi table_load(const int8_t t[16]) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t)); }
SIMD_FN vi table_bytes(vi table, vi index) { return _mm512_shuffle_epi8(table, index); }

SIMD_FN vf vf_from_f16_low(vi w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
SIMD_FN vf vf_from_f16_high(vi w) { return vf_from_f16_low(vi_shr(w, 16)); }
/* Both halves: one shuffle puts the low ones in front of the high ones. */
SIMD_FN void vf_from_f16_pair(vf *low, vf *high, vi w) {
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                           20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i p = _mm512_permutexvar_epi16(order, w);
    *low = _mm512_cvtph_ps(_mm512_castsi512_si256(p));
    *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(p, 1));
}

/* Bits shift..shift+3 of each lane as bit 4 of the four bytes. The permutation looks at four index bits only. */
SIMD_FN vi spread_bits(vi v, int shift) {
    const __m512i t = _mm512_set_epi32(0x10101010, 0x10101000, 0x10100010, 0x10100000, 0x10001010, 0x10001000, 0x10000010,
                                       0x10000000, 0x00101010, 0x00101000, 0x00100010, 0x00100000, 0x00001010, 0x00001000,
                                       0x00000010, 0x00000000);
    return _mm512_permutexvar_epi32(vi_shr(v, shift), t);
}

#elif defined(LH_ISA_avx2)

enum { SIGNED_BYTES = 1 };

SIMD_FN __m256i dot_half(__m256i part, __m256i w, __m256i a, int is_first) {
    __m256i p = _mm256_maddubs_epi16(w, a);
    return is_first ? p : _mm256_add_epi16(part, p);
}
SIMD_FN __m256i dot_broadcast(const void *a) {
    int32_t v;
    memcpy(&v, a, 4);
    return _mm256_set1_epi32(v);
}
SIMD_FN vi dot_unsigned(vi part, vi w, const void *a, int is_first) {
    __m256i v = dot_broadcast(a);
    return SIMD_VI(dot_half(part.a, w.a, v, is_first), dot_half(part.b, w.b, v, is_first));
}
/* |w| * (a with the sign of w); |-128| = 128 is right as an unsigned byte. */
SIMD_FN vi dot_signed(vi w, vi w_abs, const void *a) {
    __m256i v = dot_broadcast(a);
    return SIMD_VI(_mm256_maddubs_epi16(w_abs.a, _mm256_sign_epi8(v, w.a)),
                   _mm256_maddubs_epi16(w_abs.b, _mm256_sign_epi8(v, w.b)));
}
SIMD_FN vi vi_abs8(vi w) { return SIMD_VI(_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)); }
SIMD_FN vi dot_flush(vi sum, vi part) {
    const __m256i one = _mm256_set1_epi16(1);
    return SIMD_VI(_mm256_add_epi32(sum.a, _mm256_madd_epi16(part.a, one)),
                   _mm256_add_epi32(sum.b, _mm256_madd_epi16(part.b, one)));
}
SIMD_FN vi dot_pair(vi sum, vi pairs, const void *a) {
    __m256i v = dot_broadcast(a);
    return SIMD_VI(_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, v)),
                   _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, v)));
}
SIMD_FN vi table_load(const int8_t t[16]) {
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)t));
    return SIMD_VI(v, v);
}
SIMD_FN vi table_bytes(vi table, vi index) {
    return SIMD_VI(_mm256_shuffle_epi8(table.a, index.a), _mm256_shuffle_epi8(table.b, index.b));
}

SIMD_FN vf vf_from_f16_low(vi w) {
    vi m = vi_and(w, vi_set1(0xffff));
    __m256i p = _mm256_permute4x64_epi64(_mm256_packus_epi32(m.a, m.b), 0xd8);
    return SIMD_VF(_mm256_cvtph_ps(_mm256_castsi256_si128(p)), _mm256_cvtph_ps(_mm256_extracti128_si256(p, 1)));
}
SIMD_FN vf vf_from_f16_high(vi w) {
    vi m = vi_shr(w, 16);
    __m256i p = _mm256_permute4x64_epi64(_mm256_packus_epi32(m.a, m.b), 0xd8);
    return SIMD_VF(_mm256_cvtph_ps(_mm256_castsi256_si128(p)), _mm256_cvtph_ps(_mm256_extracti128_si256(p, 1)));
}
SIMD_FN void vf_from_f16_pair(vf *low, vf *high, vi w) { *low = vf_from_f16_low(w), *high = vf_from_f16_high(w); }

SIMD_FN vi spread_bits(vi v, int shift) {
    /* The byte that holds the bits goes to all four bytes of its lane, each byte keeps its own bit. */
    int b = shift / 8;
    __m256i pick = _mm256_add_epi8(_mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808,
                                                     0x0c0c0c0c),
                                   _mm256_set1_epi8((char)b));
    __m256i bit = _mm256_set1_epi32(shift % 8 ? (int)0x80402010 : 0x08040201), sixteen = _mm256_set1_epi8(16);
    __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(v.a, pick), bit);
    __m256i y = _mm256_and_si256(_mm256_shuffle_epi8(v.b, pick), bit);
    return SIMD_VI(_mm256_and_si256(_mm256_cmpeq_epi8(x, bit), sixteen), _mm256_and_si256(_mm256_cmpeq_epi8(y, bit), sixteen));
}

#else /* generic */

enum { SIGNED_BYTES = 0 };

typedef int16_t dot_h8 __attribute__((vector_size(16)));

/* Products of bytes 0 and 2, and of 1 and 3, fit 16 bits (255 * 127); their halves are sign-extended and added. */
SIMD_FN simd_i4 dot_two(simd_i4 sum, simd_i4 bytes, int lo, int hi) {
    simd_i4 a = {0, 0, 0, 0};
    a += (int)((uint32_t)hi << 16) | (lo & 0xffff);
    simd_i4 p = (simd_i4)((dot_h8)bytes * (dot_h8)a);
    return sum + (p >> 16) + ((simd_i4)((simd_u4)p << 16) >> 16);
}
SIMD_FN vi dot(vi part, vi w, const void *a) {
    const int8_t *x = a;
    for (int k = 0; k < 4; k++) {
        part.q[k] = dot_two(part.q[k], w.q[k] & 0x00ff00ff, x[0], x[2]);
        part.q[k] = dot_two(part.q[k], (simd_i4)((simd_u4)w.q[k] >> 8) & 0x00ff00ff, x[1], x[3]);
    }
    return part;
}
SIMD_FN vi dot_pair(vi sum, vi pairs, const void *a) {
    int16_t x[2 * VLEN], y[2];
    int32_t r[VLEN];
    memcpy(x, &pairs, sizeof x), memcpy(y, a, sizeof y), memcpy(r, &sum, sizeof r);
    for (int i = 0; i < VLEN; i++) r[i] += x[2 * i] * y[0] + x[2 * i + 1] * y[1];
    return vi_load(r);
}
SIMD_FN vi table_load(const int8_t t[16]) {
    vi r = vi_zero();
    memcpy(&r, t, 16);
    return r;
}
SIMD_FN vi table_bytes(vi table, vi index) {
    uint8_t t[16], x[4 * VLEN];
    memcpy(t, &table, 16), memcpy(x, &index, sizeof x);
    for (int i = 0; i < 4 * VLEN; i++) x[i] = t[x[i] & 15];
    return vi_load(x);
}
SIMD_FN vf vf_from_f16_low(vi w) {
    int32_t x[VLEN];
    float f[VLEN];
    vi_store(x, w);
    for (int i = 0; i < VLEN; i++) f[i] = f16_to_f32((uint16_t)x[i]);
    return vf_load(f);
}
SIMD_FN vf vf_from_f16_high(vi w) { return vf_from_f16_low(vi_shr(w, 16)); }
SIMD_FN void vf_from_f16_pair(vf *low, vf *high, vi w) { *low = vf_from_f16_low(w), *high = vf_from_f16_high(w); }
/* Multiplying four bits by 1 + 2^7 + 2^14 + 2^21 puts bit i at the bottom of byte i. */
SIMD_FN vi spread_bits(vi v, int shift) {
    uint32_t x[VLEN];
    vi_store(x, v);
    for (int i = 0; i < VLEN; i++) x[i] = ((((x[i] >> shift) & 15) * 0x00204081u) & 0x01010101u) << 4;
    return vi_load(x);
}

#endif

#endif
