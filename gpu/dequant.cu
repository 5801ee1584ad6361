/* dequant.cu: what surrounds tensor-core products of many tokens: weights from strips to rows of half, activations to half,
 * and the powers of two of both undone on the output. The products themselves are in gemm.c and experts.cu.
 *
 * Half has 11 bits but a narrow range. Each token and each row of weights is therefore multiplied by a power of two of its
 * own (half_exponent in common.cuh) where it does not lie well in that range: nothing becomes infinite, little is lost. */
#include "gpu/kernels.h"
#include "gpu/quant_decode.cuh"

enum { PARTS = 16, THREADS = PARTS * STRIP_ROWS, RUN = 32, CHUNK = PARTS * RUN, WARPS = THREADS / 32 };

/* --- activations --------------------------------------------------------------------------------------------------------- */

/* y[t] = half(x[t] 2^-exp[t]), zeros from cols to ld. One token per block. Bound by reading x; the second reading is cached.
 * A NaN stays one. */
static __global__ void __launch_bounds__(THREADS) to_half_k(uint16_t *y, int *exp, const float *x, int64_t cols, int64_t ld) {
    SMEM_ARRAY(float, part, [WARPS]);
    const float *row = x + (size_t)blockIdx.x * cols;
    float most = 0;
    for (int64_t i = threadIdx.x; i < cols; i += THREADS) most = fmaxf(most, fabsf(row[i]));
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = fmaxf(most, part[i]);
    int e = half_exponent(most);
    if (threadIdx.x == 0) exp[blockIdx.x] = e;
    uint32_t *out = reinterpret_cast<uint32_t *>(y + (size_t)blockIdx.x * ld);
    for (int64_t i = threadIdx.x; i < ld / 2; i += THREADS) {
        float a = 2 * i < cols ? row[2 * i] : 0.0f, b = 2 * i + 1 < cols ? row[2 * i + 1] : 0.0f;
        out[i] = half_pair(times_pow2(a, -e), times_pow2(b, -e));
    }
}

/* y[t, r] = y[t, r] 2^(token[t] + row[r]) + bias[r]. A thread owns a row of the weights and TOKENS tokens. Reads and writes y
 * only where there is something to do, which is rare without a bias. */
enum { TOKENS = 16 };
static __global__ void __launch_bounds__(THREADS)
    finish_k(float *y, int64_t ld, int64_t n_row, int n_tok, const int *token, const int *row, const float *bias) {
    int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (r >= n_row) return;
    const int t0 = (int)blockIdx.y * TOKENS, t1 = min(t0 + TOKENS, n_tok), mine = row ? row[r] : 0;
    const float add = bias ? bias[r] : 0.0f;
    for (int t = t0; t < t1; t++) {
        int e = mine + (token ? token[t] : 0);
        if (e == 0 && !bias) continue;
        float *p = y + t * ld + r;
        float v = e ? times_pow2(*p, e) : *p;
        *p = bias ? __fadd_rn(v, add) : v;
    }
}

/* --- weights ------------------------------------------------------------------------------------------------------------- */

/* Which strip a block works on: strip blockIdx.x of the tile, matrix blockIdx.z. False: an expert that nobody chose. */
static __device__ __forceinline__ bool find_strip(const unsigned char *&strip, size_t &out_row, const struct dequant_args &a) {
    const int64_t m = a.first_matrix + blockIdx.z;
    if (a.starts && a.starts[m] == a.starts[m + 1]) return false;
    strip = a.w.data + (size_t)m * a.matrix_bytes + (size_t)(a.row0 / STRIP_ROWS + blockIdx.x) * a.w.strip_bytes;
    out_row = ((size_t)blockIdx.z * gridDim.x + blockIdx.x) * STRIP_ROWS;
    return true;
}

/* exp[r] of the rows of a strip. A quantised row's bound comes from its scales alone: a byte less its offset is at most 128,
 * a code of a minimum at most 15; everything is held 2^-8 times its size, so that the bound itself cannot overflow. 16 lanes
 * own a row each, 16 half-warps share its blocks. Bound by reading the scales (BF16: everything). */
template <int type> static __global__ void __launch_bounds__(THREADS) row_exponents_k(struct dequant_args a) {
    SMEM_ARRAY(float, most, [PARTS][STRIP_ROWS]);
    const unsigned char *strip;
    size_t out_row;
    if (!find_strip(strip, out_row, a)) return; /* the whole block */
    const int lane = threadIdx.x % STRIP_ROWS, part = threadIdx.x / STRIP_ROWS;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(strip) + lane;
    float top = 0;
    if constexpr (type == QT_BF16) {
        for (int64_t b = part; b < a.w.n_block; b += PARTS) {
            uint32_t w = words[b * STRIP_ROWS];
            top = fmaxf(top, fmaxf(fabsf(bf16_value(w & 0xffffu)), fabsf(bf16_value(w >> 16))));
        }
    } else {
        using Q = quant<type>;
        constexpr int runs = Q::outer * Q::inner, halves = 32 / Q::group;
        const unsigned char *scales = strip + a.w.scales_off + lane * Q::scale_bytes;
        for (int64_t r = part; r < a.w.n_block * runs; r += PARTS) {
            int64_t b = r / runs;
            const int g = (int)(r % runs);
            const uint32_t *w = words + b * (Q::n_word * STRIP_ROWS);
            const unsigned char *sc = scales + b * (Q::scale_bytes * STRIP_ROWS);
            for (int h = 0; h < halves; h++) {
                float bound = 0.5f * fabsf(Q::scale(w, sc, g, h));
                if (Q::min == MIN_RUN) bound += 0x1p-8f * fabsf(Q::low(w, g));
                if (Q::min == MIN_HALF) bound += 15 * 0x1p-8f * fabsf(Q::low(w, g));
                top = fmaxf(top, bound);
            }
        }
    }
    most[part][lane] = top;
    __syncthreads();
    if (part) return;
    for (int i = 1; i < PARTS; i++) top = fmaxf(top, most[i][lane]);
    const bool scaled = type != QT_BF16, large = top >= 0x1p100f;
    a.exp[out_row + lane] = scaled && large ? half_exponent(top) + 8 : half_exponent(scaled ? 0x1p8f * top : top);
}

/* Elements of run r of a row, zeros beyond its end. words, scales: the lane's. */
template <int type>
static __device__ __forceinline__ void decode_run(float (&y)[RUN], const uint32_t *words, const unsigned char *scales, int64_t r,
                                                  const struct gpu_mat &m) {
    if constexpr (type == QT_F16 || type == QT_BF16) {
#pragma unroll
        for (int j = 0; j < RUN / 2; j++) {
            int64_t b = r * (RUN / 2) + j;
            uint32_t w = b < m.n_block ? words[b * STRIP_ROWS] : 0u; /* an odd last column is padded with zero */
            y[2 * j] = type == QT_F16 ? f16_value(w & 0xffffu) : bf16_value(w & 0xffffu);
            y[2 * j + 1] = type == QT_F16 ? f16_value(w >> 16) : bf16_value(w >> 16);
        }
    } else {
        using Q = quant<type>;
        constexpr int runs = Q::outer * Q::inner;
        const int64_t b = r / runs;
        const int o = (int)(r % runs) / Q::inner, i = (int)(r % runs) % Q::inner;
        const bool there = b < m.n_block;
        const uint32_t *w = words + (there ? b : 0) * (Q::n_word * STRIP_ROWS);
        const unsigned char *sc = scales + (there ? b : 0) * (Q::scale_bytes * STRIP_ROWS);
#pragma unroll
        for (int k = 0; k < RUN / 4; k++) {
            float v[4];
            quant_decode4<type>(v, w, sc, o, i, k);
#pragma unroll
            for (int e = 0; e < 4; e++) y[4 * k + e] = there ? v[e] : 0.0f;
        }
    }
}

/* Rows of half, W 2^-exp, zeros from cols to ld. A block owns 512 columns of a strip: a lane of a half-warp decodes 32 of its
 * row, a 16 KiB tile in shared memory turns them into whole rows of the output. Bound by writing them. */
template <int type> static __global__ void __launch_bounds__(THREADS) dequant_k(struct dequant_args a) {
    constexpr int LD = CHUNK + 8; /* rows start 4 banks apart: 16-byte stores of 8 lanes do not collide */
    SMEM_ARRAY(uint16_t, tile, [STRIP_ROWS][LD]);
    const unsigned char *strip;
    size_t out_row;
    if (!find_strip(strip, out_row, a)) return; /* the whole block */
    const int lane = threadIdx.x % STRIP_ROWS, part = threadIdx.x / STRIP_ROWS;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(strip) + lane;
    const unsigned char *scales = strip + a.w.scales_off;
    if constexpr (type != QT_F16 && type != QT_BF16) scales += lane * quant<type>::scale_bytes;
    float y[RUN];
    decode_run<type>(y, words, scales, (int64_t)blockIdx.y * PARTS + part, a.w);
    const int e = type == QT_F16 ? 0 : -a.exp[out_row + lane];
#pragma unroll
    for (int j = 0; j < RUN / 8; j++) {
        uint32_t p[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float u = y[8 * j + 2 * k], v = y[8 * j + 2 * k + 1];
            p[k] = type == QT_F16 ? half_pair(u, v) : half_pair(times_pow2(u, e), times_pow2(v, e));
        }
        *reinterpret_cast<uint4 *>(&tile[lane][part * RUN + 8 * j]) = make_uint4(p[0], p[1], p[2], p[3]);
    }
    __syncthreads();
    uint16_t *out = static_cast<uint16_t *>(a.out) + out_row * a.ld;
    for (int i = threadIdx.x; i < STRIP_ROWS * CHUNK / 8; i += THREADS) {
        int r = i / (CHUNK / 8), at = i % (CHUNK / 8) * 8;
        int64_t c = (int64_t)blockIdx.y * CHUNK + at;
        if (c < a.ld) *reinterpret_cast<uint4 *>(out + r * a.ld + c) = *reinterpret_cast<const uint4 *>(&tile[r][at]);
    }
}

/* F32 weights as rows of f32 for a product in f32. A block owns 128 columns of a strip. */
enum { F32_COLS = 128 };
static __global__ void __launch_bounds__(THREADS) dequant_f32_k(struct dequant_args a) {
    SMEM_ARRAY(float, tile, [STRIP_ROWS][F32_COLS + 1]);
    const unsigned char *strip;
    size_t out_row;
    if (!find_strip(strip, out_row, a)) return; /* the whole block */
    const float *words = reinterpret_cast<const float *>(strip);
    const int64_t c0 = (int64_t)blockIdx.y * F32_COLS;
    for (int i = threadIdx.x; i < STRIP_ROWS * F32_COLS; i += THREADS) {
        int64_t c = c0 + i / STRIP_ROWS;
        tile[i % STRIP_ROWS][i / STRIP_ROWS] = c < a.w.n_block ? words[c * STRIP_ROWS + i % STRIP_ROWS] : 0.0f;
    }
    __syncthreads();
    float *out = static_cast<float *>(a.out) + out_row * a.ld;
    for (int i = threadIdx.x; i < STRIP_ROWS * F32_COLS; i += THREADS) {
        int r = i / F32_COLS, c = i % F32_COLS;
        if (c0 + c < a.ld) out[r * a.ld + c0 + c] = tile[r][c];
    }
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

cudaError_t to_half_launch(uint16_t *y, int *exp, const float *x, int64_t n_row, int64_t cols, int64_t ld, cudaStream_t st) {
    GPU_COST((double)n_row * (4.0 * cols + 2.0 * ld), 3.0 * n_row * cols, GPU_UNIT_F32);
    return GPU_LAUNCH(to_half_k, dim3((unsigned)n_row), dim3(THREADS), 0, st, y, exp, x, cols, ld);
}

cudaError_t gemm_finish_launch(float *y, int64_t ld, int64_t n_row, int n_tok, const int *token, const int *row,
                               const float *bias, cudaStream_t st) {
    double touched = bias ? (double)n_row * n_tok : 0.0; /* without a bias hardly anything is */
    dim3 grid((unsigned)((n_row + THREADS - 1) / THREADS), (unsigned)((n_tok + TOKENS - 1) / TOKENS));
    GPU_COST(8 * touched + 4.0 * n_row, touched, GPU_UNIT_F32);
    return GPU_LAUNCH(finish_k, grid, dim3(THREADS), 0, st, y, ld, n_row, n_tok, token, row, bias);
}

template <int type> static cudaError_t dequant_type(const struct dequant_args &a, dim3 grid, cudaStream_t st) {
    double strips = (double)grid.x * grid.z, elems = strips * STRIP_ROWS * a.w.cols;
    if constexpr (type == QT_F32) {
        grid.y = (unsigned)((a.ld + F32_COLS - 1) / F32_COLS);
        GPU_COST(strips * a.w.strip_bytes + 4 * elems, 0, GPU_UNIT_F32);
        return GPU_LAUNCH(dequant_f32_k, grid, dim3(THREADS), 0, st, a);
    } else {
        if constexpr (type != QT_F16) {
            /* quantised: a ninth of the bytes at most are scales */
            GPU_COST(strips * a.w.strip_bytes / (type == QT_BF16 ? 1 : 9), elems / (type == QT_BF16 ? 1 : 16), GPU_UNIT_F32);
            cudaError_t e = GPU_LAUNCH((row_exponents_k<type>), grid, dim3(THREADS), 0, st, a);
            if (e != cudaSuccess) return e;
        }
        grid.y = (unsigned)((a.ld + CHUNK - 1) / CHUNK);
        GPU_COST(strips * a.w.strip_bytes + 2 * elems, 4 * elems, GPU_UNIT_F32);
        return GPU_LAUNCH((dequant_k<type>), grid, dim3(THREADS), 0, st, a);
    }
}

cudaError_t dequant_launch(const struct dequant_args *a, cudaStream_t st) {
    dim3 grid((unsigned)((a->n_row + STRIP_ROWS - 1) / STRIP_ROWS), 1, (unsigned)a->n_matrix);
    switch (a->w.type) {
#define X(name, id, elems, bytes, enc)                                                                                 \
    case id: return dequant_type<id>(*a, grid, st);
        QUANT_LIST(X)
#undef X
    default: return cudaErrorInvalidValue;
    }
}
