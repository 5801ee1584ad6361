/* simd_attn.h: what attention needs beyond simd.h: products of 16-bit pairs and a short 2^x. */
#ifndef LH_CPU_SIMD_ATTN_H
#define LH_CPU_SIMD_ATTN_H

#include "cpu/simd.h"

/* Each lane of a and b holds two i16: acc + lo*lo + hi*hi. */
#if defined(LH_ISA_avx512)

SIMD_FN vi vi_dp16(vi acc, vi a, vi b) { return simd_dpwssd(acc, a, b); }
/* Bytes 0 and 2, or 1 and 3, of each lane as two i16. */
SIMD_FN vi vi_even8(vi a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
SIMD_FN vi vi_odd8(vi a) { return _mm512_srai_epi16(a, 8); }
/* i16 halves minus 8. */
SIMD_FN vi vi_sub8_16(vi a) { return _mm512_sub_epi16(a, _mm512_set1_epi16(8)); }
SIMD_FN vf vf_scale2(vf p, vf n) { return _mm512_scalef_ps(p, n); }
SIMD_FN vf vf_nearest(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#else

#if defined(LH_ISA_avx2)

SIMD_FN vi vi_dp16(vi acc, vi a, vi b) {
    return SIMD_VI(_mm256_add_epi32(acc.a, _mm256_madd_epi16(a.a, b.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(a.b, b.b)));
}
SIMD_FN vi vi_even8(vi a) {
    return SIMD_VI(_mm256_srai_epi16(_mm256_slli_epi16(a.a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(a.b, 8), 8));
}
SIMD_FN vi vi_odd8(vi a) { return SIMD_VI(_mm256_srai_epi16(a.a, 8), _mm256_srai_epi16(a.b, 8)); }
SIMD_FN vi vi_sub8_16(vi a) {
    __m256i e = _mm256_set1_epi16(8);
    return SIMD_VI(_mm256_sub_epi16(a.a, e), _mm256_sub_epi16(a.b, e));
}
SIMD_FN vf vf_nearest(vf x) {
    return SIMD_VF(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                   _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

typedef int16_t simd_h8 __attribute__((vector_size(16)));
SIMD_FN vi vi_dp16(vi acc, vi a, vi b) {
    SIMD_EACH(vi, acc.q[k] + (a.q[k] << 16 >> 16) * (b.q[k] << 16 >> 16) + (a.q[k] >> 16) * (b.q[k] >> 16));
}
SIMD_FN vi vi_even8(vi a) { SIMD_EACH(vi, (simd_i4)((simd_h8)a.q[k] << 8 >> 8)); }
SIMD_FN vi vi_odd8(vi a) { SIMD_EACH(vi, (simd_i4)((simd_h8)a.q[k] >> 8)); }
SIMD_FN vi vi_sub8_16(vi a) { SIMD_EACH(vi, (simd_i4)((simd_h8)a.q[k] - 8)); }
SIMD_FN vf vf_nearest(vf x) { return vf_from_vi(vi_round(x)); }

#endif

/* p * 2^n for p in [0.5, 2] and an integer n in -126..0. */
SIMD_FN vf vf_scale2(vf p, vf n) { return vf_bits(vi_add(vi_bits(p), vi_shl(vi_round(n), 23))); }

#endif

/* 2^x for x <= 0, 0 below -125; -infinity gives 0, NaN gives NaN. Error at most 2 ulp: 2^r for |r| <= 1/2 by a polynomial
 * of degree 6 (Taylor in r ln2, exact at r = 0, so that the largest score has weight exactly 1). */
SIMD_FN vf vf_exp2_neg(vf x) {
    vf t = vf_max(vf_set1(-126.0f), x); /* constant first: a NaN x passes through */
    vf n = vf_nearest(t), r = vf_sub(t, n);
    vf p = vf_set1(1.54035304e-4f);
    p = vf_fma(p, r, vf_set1(1.33335581e-3f));
    p = vf_fma(p, r, vf_set1(9.61812911e-3f));
    p = vf_fma(p, r, vf_set1(5.55041087e-2f));
    p = vf_fma(p, r, vf_set1(2.40226507e-1f));
    p = vf_fma(p, r, vf_set1(6.93147181e-1f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_select_lt(x, vf_set1(-125.0f), vf_zero(), vf_scale2(p, n));
}

#endif
