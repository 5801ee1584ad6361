/* emu_types.h: vector types and qualifiers of CUDA C++ for the host compiler. Part of the shadow <cuda_runtime.h>. */
#ifndef EMU_TYPES_H
#define EMU_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
/* No __shared__, no __constant__, no __noinline__: SMEM_ARRAY and SMEM_DYN, kernel parameters, GPU_NOINLINE. */

#define EMU_VEC(T, name, a1, a2, a3, a4)                                                                               \
    struct name##1 { T x; };                                                                                           \
    struct __attribute__((aligned(a2))) name##2 { T x, y; };                                                           \
    struct name##3 { T x, y, z; };                                                                                     \
    struct __attribute__((aligned(a4))) name##4 { T x, y, z, w; };
EMU_VEC(signed char, char, 1, 2, 1, 4)
EMU_VEC(unsigned char, uchar, 1, 2, 1, 4)
EMU_VEC(short, short, 2, 4, 2, 8)
EMU_VEC(unsigned short, ushort, 2, 4, 2, 8)
EMU_VEC(int, int, 4, 8, 4, 16)
EMU_VEC(unsigned int, uint, 4, 8, 4, 16)
EMU_VEC(float, float, 4, 8, 4, 16)
EMU_VEC(double, double, 8, 16, 8, 16)
EMU_VEC(long long, longlong, 8, 16, 8, 16)
EMU_VEC(unsigned long long, ulonglong, 8, 16, 8, 16)
#undef EMU_VEC

#ifdef __cplusplus

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

#define EMU_MAKE(T, name)                                                                                              \
    inline name##1 make_##name##1(T x) { return {x}; }                                                                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_MAKE(signed char, char)
EMU_MAKE(unsigned char, uchar)
EMU_MAKE(short, short)
EMU_MAKE(unsigned short, ushort)
EMU_MAKE(int, int)
EMU_MAKE(unsigned int, uint)
EMU_MAKE(float, float)
EMU_MAKE(double, double)
EMU_MAKE(long long, longlong)
EMU_MAKE(unsigned long long, ulonglong)
#undef EMU_MAKE

#else

#define EMU_C(n) typedef struct n n;
EMU_C(int2) EMU_C(int4) EMU_C(uint2) EMU_C(uint3) EMU_C(uint4) EMU_C(float2) EMU_C(float4)
#undef EMU_C
typedef struct dim3 { unsigned x, y, z; } dim3;

#endif
#endif
