/* f16.h: 16-bit floats (IEEE binary16 and bfloat16) to and from f32, and the two 8-bit scale formats of the packed
 * types. Pure functions, thread-safe, the same bits on every machine: round to nearest even, subnormals kept, overflow to
 * infinity, NaN stays a (quiet) NaN. Where the build has F16C the instruction is used; it gives the same bits. */
#ifndef LH_CORE_F16_H
#define LH_CORE_F16_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) && !defined(__CUDACC__)
#include <immintrin.h>
#define LH_F16_HARDWARE 1
#endif

static inline uint32_t f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float f32_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Without hardware. Exponent and mantissa move to their f32 places, then one exact product repairs the bias: it turns
 * binary16 subnormals into normal f32 numbers as well. */
static inline float f16_to_f32_soft(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x0f800000u) /* infinity or NaN: exponent 31 */
        return f32_from_bits(sign | 0x7f800000u | (rest & 0x007fffffu) | ((rest & 0x007fffffu) ? 0x00400000u : 0));
    return f32_from_bits(sign | f32_bits(f32_from_bits(rest) * 0x1p112f));
}

static inline uint16_t f32_to_f16_soft(float f) {
    uint32_t u = f32_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* 65520 and above round to infinity */
    if (a < 0x38800000u) {
        /* Below 2^-14: adding 0.5 puts the last kept bit (2^-24) at the end of the f32 mantissa, rounded by the FPU. */
        return (uint16_t)(sign | (f32_bits(f32_from_bits(a) + 0.5f) - 0x3f000000u));
    }
    a += 0xc8000fffu + ((a >> 13) & 1); /* exponent bias 127 to 15, then half minus one, plus the odd bit for ties */
    return (uint16_t)(sign | (a >> 13));
}

static inline float f16_to_f32(uint16_t h) {
#ifdef LH_F16_HARDWARE
    return _cvtsh_ss(h);
#else
    return f16_to_f32_soft(h);
#endif
}

static inline uint16_t f32_to_f16(float f) {
#ifdef LH_F16_HARDWARE
    return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
    return f32_to_f16_soft(f);
#endif
}

static inline float bf16_to_f32(uint16_t b) {
    return f32_from_bits((uint32_t)b << 16);
}

static inline uint16_t f32_to_bf16(float f) {
    uint32_t u = f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* Half the value of an E8M0 byte, 2^(e-128), because the MXFP4 code table is doubled. e = 255 is not special. */
static inline float e8m0_half_to_f32(uint8_t e) {
    return f32_from_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

/* Half the value of a UE4M3 byte (NVFP4 scale, table doubled as well). 0 and 0x7f give 0, bit 7 is ignored. */
static inline float ue4m3_half_to_f32(uint8_t b) {
    uint32_t e = (b >> 3) & 15, m = b & 7;
    if ((b & 0x7f) == 0x7f || (b & 0x7f) == 0) return 0;
    if (e == 0) return (float)m * 0x1p-10f;
    return f32_from_bits(((e + 127 - 7 - 1) << 23) | (m << 20));
}

#endif
