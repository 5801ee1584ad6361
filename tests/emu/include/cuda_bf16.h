/* cuda_bf16.h: shadow of bfloat16. Conversions everywhere; arithmetic only where the device has it (EMU_ARCH >= 800). */
#ifndef EMU_CUDA_BF16_H
#define EMU_CUDA_BF16_H

#include <cuda_runtime.h>

#ifdef __cplusplus

namespace emu {
inline uint16_t bf16_bits(float f) { /* to nearest even; NaN becomes the device's 0x7fff */
    unsigned u = __float_as_uint(f);
    if (f != f) return 0x7fff;
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
} // namespace emu

struct __align__(2) __nv_bfloat16 {
    uint16_t x;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) : x(emu::bf16_bits(f)) {}
    explicit operator float() const { return __uint_as_float((unsigned)x << 16); }
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(const __nv_bfloat16 &a, const __nv_bfloat16 &b) : x(a), y(b) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline float __bfloat162float(nv_bfloat16 h) { return (float)h; }
inline nv_bfloat16 __float2bfloat16(float f) { return nv_bfloat16(f); }
inline nv_bfloat16 __float2bfloat16_rn(float f) { return nv_bfloat16(f); }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    nv_bfloat16 h;
    h.x = u;
    return h;
}
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 h) { return h.x; }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 a, nv_bfloat16 b) { return {a, b}; }
inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 a) { return {a, a}; }
inline nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {nv_bfloat16(a), nv_bfloat16(b)}; }
inline nv_bfloat162 __float22bfloat162_rn(float2 f) { return {nv_bfloat16(f.x), nv_bfloat16(f.y)}; }
inline nv_bfloat162 __float2bfloat162_rn(float f) { return {nv_bfloat16(f), nv_bfloat16(f)}; }
inline float2 __bfloat1622float2(nv_bfloat162 h) { return {(float)h.x, (float)h.y}; }
inline nv_bfloat16 __low2bfloat16(nv_bfloat162 h) { return h.x; }
inline nv_bfloat16 __high2bfloat16(nv_bfloat162 h) { return h.y; }
inline float __low2float(nv_bfloat162 h) { return (float)h.x; }
inline float __high2float(nv_bfloat162 h) { return (float)h.y; }

#if EMU_ARCH >= 800
inline nv_bfloat16 __hadd(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat16((float)a + (float)b); }
inline nv_bfloat16 __hmul(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat16((float)a * (float)b); }
inline nv_bfloat16 __hfma(nv_bfloat16 a, nv_bfloat16 b, nv_bfloat16 c) {
    return nv_bfloat16(fmaf((float)a, (float)b, (float)c));
}
inline nv_bfloat162 __hadd2(nv_bfloat162 a, nv_bfloat162 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline nv_bfloat162 __hmul2(nv_bfloat162 a, nv_bfloat162 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline nv_bfloat162 __hfma2(nv_bfloat162 a, nv_bfloat162 b, nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
#endif

#endif
#endif
