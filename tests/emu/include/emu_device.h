/* emu_device.h: what device code sees of the emulator: thread indices, barriers, warp collectives, atomics, shared memory,
 * kernel launch. Included by the shadow <cuda_runtime.h>. The state behind it lives in tests/emu/simt.cpp, which is never
 * built with sanitizers; nothing here touches that state except through calls. */
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <utility>

#ifndef EMU_ARCH
#error "EMU_ARCH (700, 750 or 800) says which #if GPU_ARCH branches run"
#endif

#define EMU_TLS extern __thread __attribute__((tls_model("initial-exec")))
EMU_TLS uint3 threadIdx, blockIdx;
EMU_TLS struct emu_dim { unsigned x, y, z; } blockDim, gridDim;
static constexpr int warpSize = 32;

#define EMU_SITE [[maybe_unused]] const char *file = __builtin_FILE(), [[maybe_unused]] int line = __builtin_LINE()
#define EMU_HERE file, line

enum emu_collective_op {
    EMU_SYNCWARP, EMU_SHFL, EMU_BALLOT, EMU_ANY, EMU_ALL, EMU_MATCH_ANY,
    EMU_ADD_I32, EMU_MIN_I32, EMU_MAX_I32, EMU_MIN_U32, EMU_MAX_U32, EMU_AND, EMU_OR, EMU_XOR,
    EMU_SUM_F32, EMU_MAX_F32,
    EMU_LDMATRIX, EMU_MMA, EMU_WMMA /* pointers to operands; barriers of memory like syncwarp */
};

extern "C" {
/* All lanes of mask meet; v and aux are this lane's operands, the result is this lane's. */
uint64_t emu_collective(int op, unsigned mask, uint64_t v, int aux, const char *file, int line);
/* All threads of the block meet; how: 0 barrier, 1 count, 2 and, 3 or of pred. */
int emu_barrier(int how, int pred, const char *file, int line);
/* The block's array of this key (the same address for all its threads), poisoned when new. */
void *emu_smem(const void *key, size_t bytes, size_t align, const char *name);
void *emu_smem_dyn(void);
void emu_cp_async(void *dst, const void *src, unsigned bytes, unsigned src_bytes, const char *file, int line);
void emu_cp_async_commit(void);
void emu_cp_async_wait(int newest, const char *file, int line);
void *emu_loadptr(const void *device_pointer);
[[noreturn]] void emu_trap(const char *file, int line);
int emu_register_arch(int arch);
}

namespace emu {

#ifndef EMU_RUNTIME
inline const int arch = emu_register_arch(EMU_ARCH); /* one architecture per program */
#endif

template <class T> inline uint64_t pack(T v) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "warp collectives take up to 8 bytes");
    uint64_t u = 0;
    memcpy(&u, &v, sizeof v);
    return u;
}
template <class T> inline T unpack(uint64_t u) {
    T v;
    memcpy(&v, &u, sizeof v);
    return v;
}
template <class T> inline T shfl(unsigned mask, T v, int src, EMU_SITE) {
    return unpack<T>(emu_collective(EMU_SHFL, mask, pack(v), src, EMU_HERE));
}
inline int lane() { return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31u); }

/* --- launch ----------------------------------------------------------------------------------------------------------- */

struct launch_info {
    const char *name, *file;
    int line;
    const void *fn;
    dim3 grid, block;
    size_t smem;
    cudaStream_t stream;
    void (*invoke)(void *args); /* runs the kernel body for the current thread */
    const void *args;           /* copied bitwise by emu_launch */
    size_t arg_bytes;
};

} // namespace emu

cudaError_t emu_launch(const emu::launch_info &l);
/* Translate what a kernel is given: device handle to storage; a pointer that a kernel must not have is reported. */
extern "C" void *emu_param_pointer(const void *p, const char *kernel, int index, const char *file, int line);
extern "C" void emu_param_struct(void *p, size_t bytes, const char *kernel, int index, const char *file, int line);

namespace emu {

template <class... P> struct call {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> args;
    static void invoke(void *self) {
        call *c = static_cast<call *>(self);
        std::apply(c->kernel, c->args);
    }
};

template <class T> inline void translate(T &v, const char *name, int i, EMU_SITE) {
    if constexpr (std::is_pointer<T>::value)
        v = static_cast<T>(emu_param_pointer(static_cast<const void *>(v), name, i, EMU_HERE));
    else if constexpr (std::is_class<T>::value)
        emu_param_struct(&v, sizeof v, name, i, EMU_HERE);
}

template <class... P, class... A>
inline cudaError_t launch(const char *name, const char *file, int line, void (*kernel)(P...), dim3 grid, dim3 block,
                          size_t smem, cudaStream_t stream, A &&...a) {
    static_assert((std::is_trivially_copyable<std::decay_t<P>>::value && ...), "kernel parameters are copied bitwise");
    static_assert((0 + ... + sizeof(std::decay_t<P>)) <= 4096, "kernel parameters: 4096 bytes at most");
    static_assert(sizeof...(P) == sizeof...(A), "kernel called with the wrong number of arguments");
    call<P...> c{kernel, {static_cast<std::decay_t<P>>(std::forward<A>(a))...}};
    std::apply(
        [&](auto &...v) {
            int i = 0;
            (void)i;
            (translate(v, name, i++, file, line), ...);
        },
        c.args);
    return emu_launch({name, file, line, reinterpret_cast<const void *>(kernel), grid, block, smem, stream,
                       call<P...>::invoke, &c, sizeof c});
}

} // namespace emu

/* --- barriers and collectives ------------------------------------------------------------------------------------------- */

inline void __syncthreads(EMU_SITE) { emu_barrier(0, 0, EMU_HERE); }
inline int __syncthreads_count(int pred, EMU_SITE) { return emu_barrier(1, pred, EMU_HERE); }
inline int __syncthreads_and(int pred, EMU_SITE) { return emu_barrier(2, pred, EMU_HERE); }
inline int __syncthreads_or(int pred, EMU_SITE) { return emu_barrier(3, pred, EMU_HERE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { emu_collective(EMU_SYNCWARP, mask, 0, 0, EMU_HERE); }

template <class T> inline T __shfl_sync(unsigned mask, T v, int src, int width = 32, EMU_SITE) {
    int l = emu::lane();
    return emu::shfl(mask, v, (l & ~(width - 1)) | (src & (width - 1)), EMU_HERE);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32, EMU_SITE) {
    int l = emu::lane(), s = l ^ x;
    return emu::shfl(mask, v, s >= (l | (width - 1)) + 1 ? l : s, EMU_HERE);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, EMU_SITE) {
    int l = emu::lane();
    return emu::shfl(mask, v, (l & (width - 1)) + (int)d >= width ? l : l + (int)d, EMU_HERE);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, EMU_SITE) {
    int l = emu::lane();
    return emu::shfl(mask, v, (l & (width - 1)) < (int)d ? l : l - (int)d, EMU_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int pred, EMU_SITE) {
    return (unsigned)emu_collective(EMU_BALLOT, mask, pred != 0, 0, EMU_HERE);
}
inline int __any_sync(unsigned mask, int pred, EMU_SITE) {
    return (int)emu_collective(EMU_ANY, mask, pred != 0, 0, EMU_HERE);
}
inline int __all_sync(unsigned mask, int pred, EMU_SITE) {
    return (int)emu_collective(EMU_ALL, mask, pred != 0, 0, EMU_HERE);
}
template <class T> inline unsigned __match_any_sync(unsigned mask, T v, EMU_SITE) {
    return (unsigned)emu_collective(EMU_MATCH_ANY, mask, emu::pack(v), 0, EMU_HERE);
}
#if EMU_ARCH >= 800
#define EMU_REDUCE(name, T, op)                                                                                        \
    inline T name(unsigned mask, T v, EMU_SITE) {                                                                      \
        return emu::unpack<T>(emu_collective(op, mask, emu::pack(v), 0, EMU_HERE));                                    \
    }
EMU_REDUCE(__reduce_add_sync, int, EMU_ADD_I32)
EMU_REDUCE(__reduce_add_sync, unsigned, EMU_ADD_I32)
EMU_REDUCE(__reduce_min_sync, int, EMU_MIN_I32)
EMU_REDUCE(__reduce_max_sync, int, EMU_MAX_I32)
EMU_REDUCE(__reduce_min_sync, unsigned, EMU_MIN_U32)
EMU_REDUCE(__reduce_max_sync, unsigned, EMU_MAX_U32)
EMU_REDUCE(__reduce_and_sync, unsigned, EMU_AND)
EMU_REDUCE(__reduce_or_sync, unsigned, EMU_OR)
EMU_REDUCE(__reduce_xor_sync, unsigned, EMU_XOR)
#undef EMU_REDUCE
#endif

/* --- atomics and fences ------------------------------------------------------------------------------------------------- */

inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) {}
#define __trap() emu_trap(__FILE__, __LINE__)

namespace emu {
template <class T> struct same { using type = T; }; /* an argument that takes no part in deduction */
template <class T> using same_t = typename same<T>::type;
template <class T, class F> inline T atomic_rmw(T *p, F f) {
    using U = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    U *u = reinterpret_cast<U *>(p), old = __atomic_load_n(u, __ATOMIC_RELAXED), neu;
    do {
        T v;
        memcpy(&v, &old, sizeof v);
        v = f(v);
        memcpy(&neu, &v, sizeof v);
    } while (!__atomic_compare_exchange_n(u, &old, neu, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    T v;
    memcpy(&v, &old, sizeof v);
    return v;
}
} // namespace emu

template <class T> inline T atomicAdd(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return (T)(o + v); }); }
template <class T> inline T atomicSub(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return (T)(o - v); }); }
template <class T> inline T atomicMax(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return o > v ? o : v; }); }
template <class T> inline T atomicMin(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return o < v ? o : v; }); }
template <class T> inline T atomicOr(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return (T)(o | v); }); }
template <class T> inline T atomicAnd(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return (T)(o & v); }); }
template <class T> inline T atomicXor(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T o) { return (T)(o ^ v); }); }
template <class T> inline T atomicExch(T *p, emu::same_t<T> v) { return emu::atomic_rmw(p, [v](T) { return v; }); }
template <class T> inline T atomicCAS(T *p, emu::same_t<T> c, emu::same_t<T> v) {
    return emu::atomic_rmw(p, [c, v](T o) { return o == c ? v : o; });
}
inline unsigned atomicInc(unsigned *p, unsigned lim) {
    return emu::atomic_rmw(p, [lim](unsigned o) { return o >= lim ? 0u : o + 1u; });
}
inline unsigned atomicDec(unsigned *p, unsigned lim) {
    return emu::atomic_rmw(p, [lim](unsigned o) { return o == 0 || o > lim ? lim : o - 1u; });
}

#include <emu_math.h>
#endif
