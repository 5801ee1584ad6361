/* matrix.cpp: ldmatrix, mma.sync and wmma for a whole warp at once. The last lane to arrive calls matrix_leader with the
 * operand records of all 32, which lie on their stacks. Register layouts follow the PTX ISA (see gpu/ptx.h); those of wmma
 * fragments are our own. Products are exact, sums in f32 with one rounding each, in the order of k. */
#include "fiber.h"
#include "simt.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <emu_ptx.h>

#include <cstring>

namespace {

template <class T> const T &record(const uint64_t *in, int lane) { return *reinterpret_cast<const T *>(in[lane]); }

void ldmatrix(const uint64_t *in) {
    const emu::ldmatrix_args &first = record<emu::ldmatrix_args>(in, 0);
    for (int m = 0; m < first.n; m++) {
        const uint16_t *rows[8];
        for (int r = 0; r < 8; r++) {
            rows[r] = static_cast<const uint16_t *>(record<emu::ldmatrix_args>(in, 8 * m + r).row);
            if ((uintptr_t)rows[r] % 16)
                emu_report("ldmatrix: row address %p of lane %d must be a multiple of 16", (const void *)rows[r], 8 * m + r);
            tsan_read(rows[r], 16);
        }
        for (int l = 0; l < 32; l++) {
            const emu::ldmatrix_args &a = record<emu::ldmatrix_args>(in, l);
            if (a.n != first.n || a.trans != first.trans) emu_report("ldmatrix: lanes 0 and %d ask for different forms", l);
            int r = l / 4, c = 2 * (l % 4);
            uint32_t lo = a.trans ? rows[c][r] : rows[r][c], hi = a.trans ? rows[c + 1][r] : rows[r][c + 1];
            a.r[m] = lo | hi << 16;
        }
    }
}

float f16(uint32_t v, int i) { return (float)__ushort_as_half((unsigned short)(v >> 16 * i)); }
float bf16(uint32_t v, int i) { return (float)__ushort_as_bfloat16((unsigned short)(v >> 16 * i)); }

/* Gathers A [rows, k] and B [k, 8] from the registers and adds the product to D. `per` values per register. */
template <class T, class F> void mma(const uint64_t *in, int rows, int k, int per, F value) {
    T a[16][32], b[32][8];
    int width = 4 * per; /* columns of A that a group of four lanes holds in one register */
    for (int l = 0; l < 32; l++) {
        const emu::mma_args &m = record<emu::mma_args>(in, l);
        int g = l / 4, t = l % 4;
        for (int reg = 0; reg < rows / 8 * (k / width); reg++) {
            int row = g + (rows == 16 ? 8 * (reg & 1) : 0), col = per * t + (rows == 16 ? reg / 2 : reg) * width;
            for (int i = 0; i < per; i++) a[row][col + i] = value(m.a[reg], i);
        }
        for (int reg = 0; reg < k / width; reg++)
            for (int i = 0; i < per; i++) b[per * t + reg * width + i][g] = value(m.b[reg], i);
    }
    T d[16][8] = {};
    for (int l = 0; l < 32; l++) {
        const T *s = static_cast<const T *>(record<emu::mma_args>(in, l).d);
        for (int i = 0; i < rows / 4; i++) d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2] = s[i];
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < k; j++)
            for (int c = 0; c < 8; c++) d[r][c] += a[r][j] * b[j][c];
    for (int l = 0; l < 32; l++) {
        T *s = static_cast<T *>(record<emu::mma_args>(in, l).d);
        for (int i = 0; i < rows / 4; i++) s[i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
    }
}

void mma_any(const uint64_t *in) {
    auto byte = [](uint32_t v, int i) { return (int)(int8_t)(v >> 8 * i); };
    emu::mma_shape shape = record<emu::mma_args>(in, 0).shape;
    for (int l = 1; l < 32; l++)
        if (record<emu::mma_args>(in, l).shape != shape) emu_report("mma: lanes 0 and %d ask for different shapes", l);
    switch (shape) {
    case emu::MMA_F16_16816: mma<float>(in, 16, 16, 2, f16); break;
    case emu::MMA_F16_1688: mma<float>(in, 16, 8, 2, f16); break;
    case emu::MMA_BF16_16816: mma<float>(in, 16, 16, 2, bf16); break;
    case emu::MMA_S8_16832: mma<int>(in, 16, 32, 4, byte); break;
    case emu::MMA_S8_16816: mma<int>(in, 16, 16, 4, byte); break;
    case emu::MMA_S8_8816: mma<int>(in, 8, 16, 4, byte); break;
    }
}

void widen(float *dst, const void *src, emu::wmma_type t) {
    for (int i = 0; i < 8; i++)
        dst[i] = t == emu::WMMA_HALF   ? (float)static_cast<const half *>(src)[i]
                 : t == emu::WMMA_BF16 ? (float)static_cast<const nv_bfloat16 *>(src)[i]
                                       : static_cast<const float *>(src)[i];
}

void wmma(const uint64_t *in) {
    emu::wmma_what what = record<emu::wmma_args>(in, 0).what;
    float a[16][16], b[16][16], d[16][16];
    for (int l = 0; l < 32; l++) {
        const emu::wmma_args &w = record<emu::wmma_args>(in, l);
        if (w.what != what) emu_report("wmma: lanes 0 and %d are at different operations", l);
        if (what == emu::WMMA_SYNC) continue;
        widen(&a[l / 2][8 * (l % 2)], w.a, w.in);
        widen(&b[l / 2][8 * (l % 2)], w.b, w.in);
        widen(&d[l / 2][8 * (l % 2)], w.c, w.out);
    }
    if (what == emu::WMMA_SYNC) return;
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < 16; c++) d[r][c] += a[r][k] * b[k][c];
    for (int l = 0; l < 32; l++) {
        const emu::wmma_args &w = record<emu::wmma_args>(in, l);
        for (int i = 0; i < 8; i++) {
            if (w.out == emu::WMMA_HALF)
                static_cast<half *>(w.d)[i] = half(d[l / 2][8 * (l % 2) + i]);
            else
                static_cast<float *>(w.d)[i] = d[l / 2][8 * (l % 2) + i];
        }
    }
}

} // namespace

void matrix_leader(int op, const uint64_t *in) {
    if (op == EMU_LDMATRIX)
        ldmatrix(in);
    else if (op == EMU_MMA)
        mma_any(in);
    else
        wmma(in);
}
