/* emu_math.h: arithmetic intrinsics of device code. Part of the shadow <cuda_runtime.h>; rounding as the intrinsics'
 * names say, approximations by the host's exact functions. */
#ifndef EMU_MATH_H
#define EMU_MATH_H

#include <cmath>
#include <math.h>
#include <limits.h>

/* glibc declares functions of these names: macros, after <cmath>. */
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float sinpif(float x) { return (float)sin(M_PI * fmod((double)x, 2.0)); }
inline float cospif(float x) { return (float)cos(M_PI * fmod((double)x, 2.0)); }
inline void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }

namespace emu {
inline int to_int(double r) {
    return r != r ? 0 : r >= 2147483647.0 ? INT_MAX : r <= -2147483648.0 ? INT_MIN : (int)r;
}
inline unsigned to_uint(double r) { return !(r > 0) ? 0 : r >= 4294967295.0 ? UINT_MAX : (unsigned)r; }
} // namespace emu
inline int __float2int_rn(float x) { return emu::to_int(rint((double)x)); }
inline int __float2int_rz(float x) { return emu::to_int(trunc((double)x)); }
inline int __float2int_rd(float x) { return emu::to_int(floor((double)x)); }
inline int __float2int_ru(float x) { return emu::to_int(ceil((double)x)); }
inline unsigned __float2uint_rn(float x) { return emu::to_uint(rint((double)x)); }
inline unsigned __float2uint_rz(float x) { return emu::to_uint(trunc((double)x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }

#define EMU_BITCAST(name, T, F)                                                                                        \
    inline T name(F v) {                                                                                               \
        T r;                                                                                                           \
        memcpy(&r, &v, sizeof r);                                                                                      \
        return r;                                                                                                      \
    }
EMU_BITCAST(__float_as_int, int, float)
EMU_BITCAST(__float_as_uint, unsigned, float)
EMU_BITCAST(__int_as_float, float, int)
EMU_BITCAST(__uint_as_float, float, unsigned)
EMU_BITCAST(__double_as_longlong, long long, double)
EMU_BITCAST(__longlong_as_double, double, long long)
#undef EMU_BITCAST

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
    return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t v = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned sel = s >> (4 * i), byte = (unsigned)(v >> (8 * (sel & 7))) & 0xffu;
        if (sel & 8) byte = byte & 0x80u ? 0xffu : 0;
        r |= byte << (8 * i);
    }
    return r;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
inline int __mul24(int a, int b) { return (int)((unsigned)((int)((unsigned)a << 8) >> 8) * (unsigned)((int)((unsigned)b << 8) >> 8)); }
inline int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }

inline int __dp4a(int a, int b, int c) {
    unsigned s = (unsigned)c;
    for (int i = 0; i < 32; i += 8) s += (unsigned)((int)(int8_t)(a >> i) * (int)(int8_t)(b >> i));
    return (int)s;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255u) * (b >> i & 255u);
    return c;
}
inline int __dp2a_lo(int a, int b, int c) { return c + (int16_t)a * (int8_t)b + (a >> 16) * (int8_t)(b >> 8); }
inline int __dp2a_hi(int a, int b, int c) { return c + (int16_t)a * (int8_t)(b >> 16) + (a >> 16) * (b >> 24); }

#define EMU_BYTES(name, expr)                                                                                          \
    inline unsigned name(unsigned a, unsigned b) {                                                                     \
        unsigned r = 0;                                                                                                \
        for (int i = 0; i < 32; i += 8) {                                                                              \
            int x = (int8_t)(a >> i), y = (int8_t)(b >> i);                                                            \
            r |= ((unsigned)(expr) & 255u) << i;                                                                       \
        }                                                                                                              \
        return r;                                                                                                      \
    }
EMU_BYTES(__vadd4, x + y)
EMU_BYTES(__vsub4, x - y)
EMU_BYTES(__vsubss4, x - y < -128 ? -128 : x - y > 127 ? 127 : x - y)
EMU_BYTES(__vaddss4, x + y < -128 ? -128 : x + y > 127 ? 127 : x + y)
EMU_BYTES(__vcmpeq4, x == y ? 255 : 0)
EMU_BYTES(__vcmpne4, x != y ? 255 : 0)
EMU_BYTES(__vminu4, (x & 255) < (y & 255) ? x : y)
EMU_BYTES(__vmaxu4, (x & 255) > (y & 255) ? x : y)
EMU_BYTES(__vsign4, y < 0 ? -x : y > 0 ? x : 0)
#undef EMU_BYTES

#define EMU_MINMAX(T)                                                                                                  \
    inline T min(T a, T b) { return b < a ? b : a; }                                                                   \
    inline T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

/* Loads and stores with a cache hint are plain ones. */
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldca(const T *p) { return *p; }
template <class T> inline T __ldlu(const T *p) { return *p; }
template <class T> inline T __ldcv(const T *p) { return *p; }
template <class T> inline void __stcs(T *p, T v) { *p = v; }
template <class T> inline void __stcg(T *p, T v) { *p = v; }
template <class T> inline void __stwt(T *p, T v) { *p = v; }
inline long long clock64() { return 0; }

#endif
