/* mma.h: shadow of nvcuda::wmma, shape 16x16x16 with half or bfloat16 inputs and float or half sums. Fragments are opaque,
 * as on the device: their layout here is deliberately another one, code may only loop over x[i] for i < num_elements. */
#ifndef EMU_MMA_H
#define EMU_MMA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <emu_ptx.h>

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment {
    static_assert(m == 16 && n == 16 && k == 16, "the emulator has wmma 16x16x16 only");
    static constexpr int num_elements = 8;
    T x[8];
};

template <class U, class T, class L> inline void fill_fragment(fragment<U, 16, 16, 16, T, L> &f, emu::same_t<T> v) {
    for (int i = 0; i < 8; i++) f.x[i] = v;
}

namespace detail {
template <class T> constexpr emu::wmma_type type_of();
template <> constexpr emu::wmma_type type_of<half>() { return emu::WMMA_HALF; }
template <> constexpr emu::wmma_type type_of<nv_bfloat16>() { return emu::WMMA_BF16; }
template <> constexpr emu::wmma_type type_of<float>() { return emu::WMMA_FLOAT; }

/* The warp's barrier that the _sync names promise, for memory too, and for the alignment that the device asks for. */
inline void meet(const void *p, unsigned ld, size_t size, EMU_SITE) {
    if ((uintptr_t)p % 32 || ld * size % 16) {
        fprintf(stderr, "%s:%d: wmma: address %p must be a multiple of 32 bytes, leading dimension %u of 16 bytes\n",
                EMU_HERE, p, ld);
        emu_trap(EMU_HERE);
    }
    emu::wmma_args a = {emu::WMMA_SYNC, emu::WMMA_FLOAT, emu::WMMA_FLOAT, nullptr, nullptr, nullptr, nullptr};
    emu_collective(EMU_WMMA, 0xffffffffu, (uint64_t)(uintptr_t)&a, 0, EMU_HERE);
}
template <class T, class P> inline void load(T *x, P *p, unsigned ld, bool row) {
    int l = emu::lane();
    for (int i = 0; i < 8; i++) {
        unsigned e = (unsigned)(8 * l + i), r = e / 16, c = e % 16;
        x[i] = row ? p[r * ld + c] : p[c * ld + r];
    }
}
} // namespace detail

template <class U, class T, class L>
inline void load_matrix_sync(fragment<U, 16, 16, 16, T, L> &f, const T *p, unsigned ld, EMU_SITE) {
    detail::meet(p, ld, sizeof(T), EMU_HERE);
    detail::load(f.x, p, ld, std::is_same<L, row_major>::value);
}
template <class T>
inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &f, const T *p, unsigned ld, layout_t lay, EMU_SITE) {
    detail::meet(p, ld, sizeof(T), EMU_HERE);
    detail::load(f.x, p, ld, lay == mem_row_major);
}
template <class T>
inline void store_matrix_sync(T *p, const fragment<accumulator, 16, 16, 16, T> &f, unsigned ld, layout_t lay, EMU_SITE) {
    detail::meet(p, ld, sizeof(T), EMU_HERE);
    int l = emu::lane();
    for (int i = 0; i < 8; i++) {
        unsigned e = (unsigned)(8 * l + i), r = e / 16, c = e % 16;
        p[lay == mem_row_major ? r * ld + c : c * ld + r] = f.x[i];
    }
}
template <class D, class T, class LA, class LB>
inline void mma_sync(fragment<accumulator, 16, 16, 16, D> &d, const fragment<matrix_a, 16, 16, 16, T, LA> &a,
                     const fragment<matrix_b, 16, 16, 16, T, LB> &b, const fragment<accumulator, 16, 16, 16, D> &c,
                     EMU_SITE) {
    static_assert(EMU_ARCH >= 800 || std::is_same<T, half>::value, "wmma of bfloat16 needs sm_80");
    emu::wmma_args w = {emu::WMMA_MMA, detail::type_of<T>(), detail::type_of<D>(), a.x, b.x, c.x, d.x};
    emu_collective(EMU_WMMA, 0xffffffffu, (uint64_t)(uintptr_t)&w, 0, EMU_HERE);
}

} // namespace wmma
} // namespace nvcuda
#endif
