/* cuda_fp16.h: shadow of half and half2. Conversions are explicit and there are no arithmetic operators, so that code
 * which mixes half and float by accident does not build. Arithmetic is done in float and rounded once: the same bits as
 * the device for add, sub and mul; __hfma may differ in the last bit (it is rounded twice here). */
#ifndef EMU_CUDA_FP16_H
#define EMU_CUDA_FP16_H

#include <cuda_runtime.h>

#ifdef __cplusplus
#include <immintrin.h>

struct __align__(2) __half {
    uint16_t x;
    __half() = default;
    explicit __half(float f) : x((uint16_t)_cvtss_sh(f, 0)) {}
    explicit operator float() const { return _cvtsh_ss(x); }
};
struct __align__(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(const __half &a, const __half &b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;
struct __half_raw { unsigned short x; };
struct __half2_raw { unsigned short x, y; };

inline float __half2float(half h) { return (float)h; }
inline half __float2half(float f) { return half(f); }
inline half __float2half_rn(float f) { return half(f); }
inline half __double2half(double d) { return half((float)d); }
inline half __int2half_rn(int i) { return half((float)i); }
inline half __short2half_rn(short i) { return half((float)i); }
inline int __half2int_rn(half h) { return __float2int_rn((float)h); }
inline half __ushort_as_half(unsigned short u) {
    half h;
    h.x = u;
    return h;
}
inline half __short_as_half(short s) { return __ushort_as_half((unsigned short)s); }
inline unsigned short __half_as_ushort(half h) { return h.x; }
inline short __half_as_short(half h) { return (short)h.x; }

inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 make_half2(half a, half b) { return {a, b}; }
inline half2 __half2half2(half a) { return {a, a}; }
inline half2 __float2half2_rn(float f) { return {half(f), half(f)}; }
inline half2 __floats2half2_rn(float a, float b) { return {half(a), half(b)}; }
inline half2 __float22half2_rn(float2 f) { return {half(f.x), half(f.y)}; }
inline float2 __half22float2(half2 h) { return {(float)h.x, (float)h.y}; }
inline half __low2half(half2 h) { return h.x; }
inline half __high2half(half2 h) { return h.y; }
inline float __low2float(half2 h) { return (float)h.x; }
inline float __high2float(half2 h) { return (float)h.y; }
inline half2 __low2half2(half2 h) { return {h.x, h.x}; }
inline half2 __high2half2(half2 h) { return {h.y, h.y}; }
inline half2 __lowhigh2highlow(half2 h) { return {h.y, h.x}; }
inline half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
inline half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }

#define EMU_H2(name, expr)                                                                                             \
    inline half __h##name(half p, half q) {                                                                            \
        float a = (float)p, b = (float)q;                                                                              \
        return half(expr);                                                                                             \
    }                                                                                                                  \
    inline half2 __h##name##2(half2 p, half2 q) { return {__h##name(p.x, q.x), __h##name(p.y, q.y)}; }
EMU_H2(add, a + b)
EMU_H2(sub, a - b)
EMU_H2(mul, a *b)
EMU_H2(min, fminf(a, b))
EMU_H2(max, fmaxf(a, b))
#undef EMU_H2
inline half __hdiv(half a, half b) { return half((float)a / (float)b); }
inline half2 __h2div(half2 a, half2 b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }
inline half __hneg(half a) { return __ushort_as_half((unsigned short)(a.x ^ 0x8000u)); }
inline half2 __hneg2(half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
inline half __habs(half a) { return __ushort_as_half((unsigned short)(a.x & 0x7fffu)); }
inline half2 __habs2(half2 a) { return {__habs(a.x), __habs(a.y)}; }
inline half __hfma(half a, half b, half c) { return half(fmaf((float)a, (float)b, (float)c)); }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline bool __hgt(half a, half b) { return (float)a > (float)b; }
inline bool __hge(half a, half b) { return (float)a >= (float)b; }
inline bool __hlt(half a, half b) { return (float)a < (float)b; }
inline bool __hle(half a, half b) { return (float)a <= (float)b; }
inline bool __heq(half a, half b) { return (float)a == (float)b; }
inline bool __hisnan(half a) { return (a.x & 0x7fff) > 0x7c00; }
inline half hexp(half a) { return half(expf((float)a)); }
inline half2 h2exp(half2 a) { return {hexp(a.x), hexp(a.y)}; }
inline half hexp2(half a) { return half(exp2f((float)a)); }
inline half2 h2exp2(half2 a) { return {hexp2(a.x), hexp2(a.y)}; }
inline half hrcp(half a) { return half(1.0f / (float)a); }
inline half2 h2rcp(half2 a) { return {hrcp(a.x), hrcp(a.y)}; }

#endif
#endif
