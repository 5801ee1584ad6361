/* common.cuh: small device functions that several kernels use. */
#ifndef LH_GPU_COMMON_CUH
#define LH_GPU_COMMON_CUH

#include "gpu/compat.h"

/* C headers with functions that have the name of a struct. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#include "core/quant.h"
#include "core/strip.h"
#pragma GCC diagnostic pop

__device__ __forceinline__ float f16_value(unsigned bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
__device__ __forceinline__ float bf16_value(unsigned bits) { return __uint_as_float(bits << 16); }

/* Sum or maximum over a block of `warps` warps, the same value in every thread; part: shared [warps]. All threads call. */
template <int warps> __device__ __forceinline__ float block_sum(float v, float (&part)[warps]) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < warps; i++) v += part[i];
    return v;
}

/* Block size of kv_rotate (core/kv.h) for heads of dim elements. */
__device__ __forceinline__ int rotate_block(int dim) {
    int n = dim & -dim;
    return n > 256 ? 256 : n;
}

/* x[count] in shared memory times the Hadamard matrix of each block of n: kv_rotate of core/kv.h, to the same bits. All
 * threads of the block call; begins and ends with a barrier. */
__device__ __forceinline__ void rotate_shared(float *x, int count, int n) {
    for (int h = 1; h < n; h *= 2) {
        __syncthreads();
        for (int p = threadIdx.x; p < count / 2; p += blockDim.x) {
            int i = p / h * 2 * h + p % h;
            float a = x[i], b = x[i + h];
            x[i] = __fadd_rn(a, b);
            x[i + h] = __fsub_rn(a, b);
        }
    }
    __syncthreads();
    float scale = __fdiv_rn(1.0f, __fsqrt_rn((float)n));
    for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = __fmul_rn(x[i], scale);
    __syncthreads();
}

/* --- numbers beyond half's range: exact powers of two, undone on the result --------------------------------------------- */

/* x 2^e for |e| <= 252: exact while the result is a normal number, and never infinite on the way. */
__device__ __forceinline__ float times_pow2(float x, int e) {
    int a = max(-126, min(126, e)), b = max(-126, min(126, e - a));
    return __fmul_rn(__fmul_rn(x, __int_as_float((a + 127) << 23)), __int_as_float((b + 127) << 23));
}

/* e such that numbers of at most `most`, times 2^-e, lie within 2^15 in half. 0 where they are at home there as they are:
 * between 2^-6 and 2^15, where half's smallest step, 2^-24, is 2^-18 of `most` or less. So results rarely need scaling. */
__device__ __forceinline__ int half_exponent(float most) {
    if (!(most > 0 && most < INFINITY) || (most >= 0x1p-6f && most <= 0x1p15f)) return 0;
    int e;
    frexpf(most, &e);
    return e - 15;
}

/* Two numbers as half, the first in the low bits. */
__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    return __half_as_ushort(__float2half_rn(a)) | (uint32_t)__half_as_ushort(__float2half_rn(b)) << 16;
}

#endif
