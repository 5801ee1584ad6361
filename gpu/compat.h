/* compat.h: what kernels and launchers use instead of raw CUDA syntax, so that one text builds with nvcc and, for tests,
 * with a host C++ compiler against the emulator (GPU_EMU, tests/emu). Device code includes this first, and gpu/ptx.h for
 * asynchronous copies and matrix instructions. C files may include it for the host part at the end.
 *
 *   GPU_ARCH                    100 * major + 10 * minor inside device code (0 in nvcc's host pass): #if GPU_ARCH >= 800
 *   GPU_LAUNCH(kernel, grid, block, smem_bytes, stream, args...)   the only way to launch; returns cudaError_t
 *   GPU_COST(bytes, flops, unit)   just before a launch: bytes that must cross device memory once, operations, GPU_UNIT_*
 *   SMEM_ARRAY(T, name, [a][b])    static shared array, 32-byte aligned, uninitialised
 *   SMEM_DYN(T, name)              T *name: the dynamic shared memory of the launch, 128-byte aligned
 *   FULL_MASK, warp_sum, warp_max  whole-warp reductions, result in every lane; the same tree of additions everywhere
 *   GPU_LOADPTR(p)                 use of a device pointer that was itself loaded from device memory
 *   GPU_NOINLINE                   instead of __noinline__ */
#ifndef LH_GPU_COMPAT_H
#define LH_GPU_COMPAT_H

#include <cuda_runtime.h>
#include <stdint.h>

/* What bounds the arithmetic of a kernel. */
enum gpu_unit { GPU_UNIT_F32 = 0, GPU_UNIT_F16 = 1, GPU_UNIT_INT8 = 2, GPU_UNIT_TENSOR = 3 };

#ifdef __cplusplus
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define FULL_MASK 0xffffffffu
#define GPU_NOINLINE __attribute__((noinline))

#if defined(GPU_EMU)

#include <emu.h>

#define GPU_ARCH EMU_ARCH
#define GPU_LAUNCH(kernel, grid, block, smem_bytes, stream, ...)                                                       \
    emu::launch(#kernel, __FILE__, __LINE__, kernel, grid, block, smem_bytes, stream, ##__VA_ARGS__)
#define GPU_COST(bytes, flops, unit) emu_cost((double)(bytes), (double)(flops), unit)
/* Every instance of a kernel template has an array of its own: the key is a static of the function. */
#define SMEM_ARRAY(T, name, dims)                                                                                      \
    static const char name##_key = 0;                                                                                  \
    using name##_type = T dims;                                                                                        \
    name##_type &name = *static_cast<name##_type *>(emu_smem(&name##_key, sizeof(name##_type), 32, #name))
#define SMEM_DYN(T, name) T *name = static_cast<T *>(emu_smem_dyn())
#define GPU_LOADPTR(p) (static_cast<decltype(p)>(emu_loadptr(p)))

inline float warp_sum(float v, EMU_SITE) {
    return emu::unpack<float>(emu_collective(EMU_SUM_F32, FULL_MASK, emu::pack(v), 0, EMU_HERE));
}
inline float warp_max(float v, EMU_SITE) {
    return emu::unpack<float>(emu_collective(EMU_MAX_F32, FULL_MASK, emu::pack(v), 0, EMU_HERE));
}
inline int warp_sum(int v, EMU_SITE) {
    return emu::unpack<int>(emu_collective(EMU_ADD_I32, FULL_MASK, emu::pack(v), 0, EMU_HERE));
}
inline int warp_max(int v, EMU_SITE) {
    return emu::unpack<int>(emu_collective(EMU_MAX_I32, FULL_MASK, emu::pack(v), 0, EMU_HERE));
}

#else /* nvcc, or clang in CUDA mode */

#include <utility>

#if defined(__CUDA_ARCH__)
#define GPU_ARCH __CUDA_ARCH__
#else
#define GPU_ARCH 0
#endif
#define GPU_LAUNCH(kernel, grid, block, smem_bytes, stream, ...)                                                       \
    gpu_launch(kernel, grid, block, smem_bytes, stream, ##__VA_ARGS__)
/* On a device the kernel's time is measured; the declared cost is what it is compared with. */
#define GPU_COST(bytes, flops, unit) ((void)(bytes), (void)(flops), (void)(unit))
#define SMEM_ARRAY(T, name, dims) __shared__ __align__(32) T name dims
#define SMEM_DYN(T, name)                                                                                              \
    extern __shared__ __align__(128) unsigned char gpu_smem_dyn[];                                                     \
    T *name = reinterpret_cast<T *>(gpu_smem_dyn)
#define GPU_LOADPTR(p) (p)

template <typename... P, typename... A>
inline cudaError_t gpu_launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream,
                              A &&...args) {
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = smem_bytes;
    c.stream = stream;
    return cudaLaunchKernelEx(&c, kernel, std::forward<A>(args)...);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int x = 16; x; x >>= 1) v += __shfl_xor_sync(FULL_MASK, v, x);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int x = 16; x; x >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, x));
    return v;
}
__device__ __forceinline__ int warp_sum(int v) {
#pragma unroll
    for (int x = 16; x; x >>= 1) v += __shfl_xor_sync(FULL_MASK, v, x);
    return v;
}
__device__ __forceinline__ int warp_max(int v) {
#pragma unroll
    for (int x = 16; x; x >>= 1) v = max(v, __shfl_xor_sync(FULL_MASK, v, x));
    return v;
}

#endif
#endif /* __cplusplus */

/* --- host side of hand-over flags, C and C++: the only places where the host looks at mapped memory ----------------------- */

#if defined(GPU_EMU)
#include <emu.h>
#define gpu_host_flag_load(flag) emu_flag_load(flag)                 /* acquire */
#define gpu_host_flag_store(flag, value) emu_flag_store(flag, value) /* release */
#define gpu_host_flag_wait(flag, value) emu_flag_wait(flag, value)   /* until (int32_t)(*flag - value) >= 0 */
#else
static inline uint32_t gpu_host_flag_load(const uint32_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static inline void gpu_host_flag_store(uint32_t *flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
static inline void gpu_host_flag_wait(const uint32_t *flag, uint32_t value) {
    while ((int32_t)(gpu_host_flag_load(flag) - value) < 0) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}
#endif

/* What a sub-allocator of one big device allocation tells the emulator, for bounds and poison per piece. */
#if defined(GPU_EMU)
#define gpu_piece_add(d_ptr, bytes) emu_piece_add(d_ptr, bytes)
#define gpu_pieces_del(d_from, bytes) emu_pieces_del(d_from, bytes)
#else
#define gpu_piece_add(d_ptr, bytes) ((void)(d_ptr), (void)(bytes))
#define gpu_pieces_del(d_from, bytes) ((void)(d_from), (void)(bytes))
#endif

#endif
