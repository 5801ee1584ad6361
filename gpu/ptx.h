/* ptx.h: the only file with inline PTX. Each wrapper has a twin for the emulator. What an architecture lacks is not
 * declared for it: call sites are guarded with #if GPU_ARCH. Layouts of registers are those of the PTX ISA, with
 * g = lane / 4 and t = lane % 4:
 *   mma m16n8k16 (f16, bf16)  a[0..3]: rows g, g+8, g, g+8, columns 2t,2t+1 (+8 for 2, 3); b[0..1]: column g, rows 2t,2t+1
 *                             (+8); d[0..3]: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
 *   mma m16n8k8  (f16)        a[0..1]: rows g, g+8, columns 2t,2t+1; b: column g, rows 2t,2t+1; d as above
 *   mma m16n8k32 (s8)         a[0..3]: rows g, g+8, g, g+8, columns 4t..4t+3 (+16 for 2, 3); b[0..1]: column g, rows 4t..4t+3
 *                             (+16); d as above, int32
 *   mma m8n8k16  (s8)         a: row g, columns 4t..; b: column g, rows 4t..; d[0..1]: (g, 2t) (g, 2t+1)
 *   ldmatrix                  register m of lane l: row l / 4, columns 2 (l % 4).. of the 8 x 8 matrix m, whose row r is at the
 *                             address given by lane 8 m + r; _trans: the transposed matrix */
#ifndef LH_GPU_PTX_H
#define LH_GPU_PTX_H

#include "gpu/compat.h"

#if defined(GPU_EMU)
#include <emu_ptx.h>
#define PTX_SITE , EMU_SITE
#define PTX_SITE_ALONE EMU_SITE
#define PTX_MEET(op, args) emu_collective(op, FULL_MASK, (uint64_t)(uintptr_t)&(args), 0, EMU_HERE)
#else
#define PTX_SITE
#define PTX_SITE_ALONE
__device__ __forceinline__ unsigned ptx_shared(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#endif

/* --- cp.async: 16 bytes from global to shared memory past the registers (sm_80; a plain copy below) ----------------------- */

/* smem and gmem are multiples of 16. The bytes are there after cp_async_wait and a barrier. */
__device__ __forceinline__ void cp_async16(void *smem, const void *gmem PTX_SITE) {
#if GPU_ARCH < 800
    *static_cast<int4 *>(smem) = *static_cast<const int4 *>(gmem);
#elif defined(GPU_EMU)
    emu_cp_async(smem, gmem, 16, 16, EMU_HERE);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ptx_shared(smem)), "l"(gmem) : "memory");
#endif
}
/* As above; 16 zero bytes when !valid (gmem is then not read, but must be an address of device memory). */
__device__ __forceinline__ void cp_async16_or_zero(void *smem, const void *gmem, bool valid PTX_SITE) {
#if GPU_ARCH < 800
    *static_cast<int4 *>(smem) = valid ? *static_cast<const int4 *>(gmem) : make_int4(0, 0, 0, 0);
#elif defined(GPU_EMU)
    emu_cp_async(smem, gmem, 16, valid ? 16 : 0, EMU_HERE);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared(smem)), "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if GPU_ARCH >= 800
#if defined(GPU_EMU)
    emu_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
#endif
}
/* Waits until all but the newest N committed groups of this thread are done. */
template <int N> __device__ __forceinline__ void cp_async_wait(PTX_SITE_ALONE) {
#if GPU_ARCH >= 800
#if defined(GPU_EMU)
    emu_cp_async_wait(N, EMU_HERE);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
#endif
}

/* --- loads of data that is read once: past L1 --------------------------------------------------------------------------- */

__device__ __forceinline__ uint4 load_once16(const void *p) {
#if GPU_ARCH >= 700 && !defined(GPU_EMU)
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
#else
    return *static_cast<const uint4 *>(p);
#endif
}

/* --- integer dot product: c + sum of 4 products of signed bytes (an instruction from sm_61 on) ----------------------------- */

__device__ __forceinline__ int dot4_s8(int a, int b, int c) {
#if GPU_ARCH >= 610
    return __dp4a(a, b, c);
#else
    for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
    return c;
#endif
}

/* --- ldmatrix: sm_75 ---------------------------------------------------------------------------------------------------- */

#if GPU_ARCH == 0 || GPU_ARCH >= 750
#if defined(GPU_EMU)
#define PTX_LDMATRIX(name, n, trans, text, ...)                                                                        \
    __device__ __forceinline__ void name(uint32_t (&r)[n], const void *row PTX_SITE) {                                 \
        emu::ldmatrix_args a = {row, r, n, trans};                                                                     \
        PTX_MEET(EMU_LDMATRIX, a);                                                                                     \
    }
#else
#define PTX_LDMATRIX(name, n, trans, text, ...)                                                                        \
    __device__ __forceinline__ void name(uint32_t (&r)[n], const void *row) {                                          \
        asm volatile(text : __VA_ARGS__ : "r"(ptx_shared(row)) : "memory");                                            \
    }
#endif
PTX_LDMATRIX(ldmatrix_x1, 1, false, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];", "=r"(r[0]))
PTX_LDMATRIX(ldmatrix_x1_trans, 1, true, "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];", "=r"(r[0]))
PTX_LDMATRIX(ldmatrix_x2, 2, false, "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];", "=r"(r[0]), "=r"(r[1]))
PTX_LDMATRIX(ldmatrix_x2_trans, 2, true, "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];", "=r"(r[0]),
             "=r"(r[1]))
PTX_LDMATRIX(ldmatrix_x4, 4, false, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];", "=r"(r[0]),
             "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
PTX_LDMATRIX(ldmatrix_x4_trans, 4, true, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];",
             "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]))
#undef PTX_LDMATRIX

/* --- mma: d += a b ------------------------------------------------------------------------------------------------------ */

/* half, sm_75 */
__device__ __forceinline__ void mma_f16_1688(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1] PTX_SITE) {
#if defined(GPU_EMU)
    emu::mma_args m = {emu::MMA_F16_1688, d, a, b};
    PTX_MEET(EMU_MMA, m);
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#endif
}
/* signed bytes, sm_75 */
__device__ __forceinline__ void mma_s8_8816(int (&d)[2], const uint32_t (&a)[1], const uint32_t (&b)[1] PTX_SITE) {
#if defined(GPU_EMU)
    emu::mma_args m = {emu::MMA_S8_8816, d, a, b};
    PTX_MEET(EMU_MMA, m);
#else
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(a[0]), "r"(b[0]));
#endif
}
#endif /* sm_75 */

#if GPU_ARCH == 0 || GPU_ARCH >= 800
#if defined(GPU_EMU)
#define PTX_MMA(name, D, constraint, na, nb, shape_id, text)                                                           \
    __device__ __forceinline__ void name(D (&d)[4], const uint32_t (&a)[na], const uint32_t (&b)[nb] PTX_SITE) {       \
        emu::mma_args m = {emu::shape_id, d, a, b};                                                                    \
        PTX_MEET(EMU_MMA, m);                                                                                          \
    }
#else
#define PTX_MMA(name, D, constraint, na, nb, shape_id, text)                                                           \
    __device__ __forceinline__ void name(D (&d)[4], const uint32_t (&a)[na], const uint32_t (&b)[nb]) {                \
        asm volatile(text " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                     \
                     : "+" constraint(d[0]), "+" constraint(d[1]), "+" constraint(d[2]), "+" constraint(d[3])          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
    }
#endif
PTX_MMA(mma_f16_16816, float, "f", 4, 2, MMA_F16_16816, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
PTX_MMA(mma_bf16_16816, float, "f", 4, 2, MMA_BF16_16816, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
PTX_MMA(mma_s8_16832, int, "r", 4, 2, MMA_S8_16832, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
#undef PTX_MMA
#endif /* sm_80 */

#endif
