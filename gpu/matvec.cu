/* matvec.cu: products of weight matrices in strips with up to MATVEC_COLS tokens per reading of the weights, and the
 * quantisation of activations that the contract of core/ops.h prescribes. More tokens are more columns of the grid: that
 * reads the weights once per 8 tokens, which is right for decoding and verification and slow for long prompts. */
#include "gpu/kernels.h"
#include "gpu/ptx.h"
#include "gpu/quant_decode.cuh"

enum { PARTS = 16, THREADS = PARTS * STRIP_ROWS };

/* A group of 8 lanes quantises 32 elements, 4 a lane. Bound by reading x. */
static __global__ void quantise_k(struct gpu_xq *xq, const float *x, int64_t n_block) {
    int64_t b = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    int lane = threadIdx.x % 8;
    bool real = b < n_block;
    if (!real) b = n_block - 1; /* all lanes of a warp take part in the shuffles */
    float4 v = reinterpret_cast<const float4 *>(x + 32 * b)[lane];
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    if (v.x != v.x || v.y != v.y || v.z != v.z || v.w != v.w) most = INFINITY; /* a NaN must reach the result */
    for (int s = 1; s < 8; s *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, s));
    float d = __fdiv_rn(most, 127.0f), e[4] = {v.x, v.y, v.z, v.w};
    int word = 0, sum = 0;
    for (int i = 0; i < 4; i++) {
        int q = d > 0 ? __float2int_rn(__fdiv_rn(e[i], d)) : 0;
        q = max(-127, min(127, q)); /* subnormal d: the quotient may be larger */
        word |= (q & 255) << (8 * i);
        sum += q;
    }
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    int other = __shfl_xor_sync(FULL_MASK, sum, 4);
    if (!real) return;
    xq[b].q[lane] = word;
    if (lane) return;
    xq[b].d = d;
    xq[b].sum[0] = sum;
    xq[b].sum[1] = other;
    xq[b].s = __fmul_rn(d, (float)(sum + other));
}

/* acc[c] += run (o, i) of a block: 32 elements under one scale, or twice 16. x: the run's activations of column 0. */
template <int type, int NC>
static __device__ __forceinline__ void matvec_run(float (&acc)[NC], const uint32_t *w, const unsigned char *sc, int o, int i,
                                                  const struct gpu_xq *x, const int64_t *col) {
    using Q = quant<type>;
    constexpr int halves = 32 / Q::group, words = Q::group / 4;
    const int g = o * Q::inner + i;
    uint32_t v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = Q::word(w, o, i, k);
    float d[halves], low = 0;
    int code[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < halves; h++) {
        d[h] = Q::scale(w, sc, g, h);
        if (Q::min == MIN_HALF) code[h] = Q::code(w, g, h);
    }
    if (Q::min != MIN_NONE) low = Q::low(w, g);
#pragma unroll
    for (int c = 0; c < NC; c++) {
        const int4 *p = reinterpret_cast<const int4 *>(x + col[c]);
        int4 a = p[0], b = p[1], tail = p[2];
        int q[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        int part[2] = {tail.y, tail.z};
        float xd = __int_as_float(tail.x);
#pragma unroll
        for (int h = 0; h < halves; h++) {
            int sum = -Q::off * (halves == 1 ? part[0] + part[1] : part[h]);
#pragma unroll
            for (int k = h * words; k < (h + 1) * words; k++) sum = dot4_s8((int)v[k], q[k], sum);
            acc[c] = __fmaf_rn(__fmul_rn((float)sum, d[h]), xd, acc[c]);
        }
        if (Q::min == MIN_RUN) acc[c] = __fmaf_rn(low, __int_as_float(tail.w), acc[c]);
        if (Q::min == MIN_HALF) {
            float sum = (float)(code[0] * part[0] + code[1] * part[1]);
            acc[c] = __fmaf_rn(__fmul_rn(sum, low), xd, acc[c]);
        }
    }
}

/* Which strip, columns and activations a block works on. Columns are tiles of y and, past its limit, z of the grid. */
struct place {
    const unsigned char *strip;
    int64_t x_col[MATVEC_COLS]; /* column c's token; a repeated one where there are fewer columns than NC */
    int col0, n_col;
};
enum { GRID_Y = 65535 };
/* False: the block has nothing to do: one of the last layer of z without columns, or a choice whose expert is elsewhere. */
template <int NC> static __device__ __forceinline__ bool find_place(place &p, const struct matvec_args &a) {
    p.strip = a.w.data + (size_t)blockIdx.x * a.w.strip_bytes;
    const int64_t col0 = ((int64_t)blockIdx.z * GRID_Y + blockIdx.y) * NC;
    if (col0 >= a.n_col) return false;
    p.col0 = (int)col0;
    p.n_col = min(NC, (int)a.n_col - p.col0);
#pragma unroll
    for (int c = 0; c < NC; c++) p.x_col[c] = p.col0 + min(c, p.n_col - 1);
    if (!a.ids) return true;
    int e = a.ids[p.col0];
    if (e < 0 && !a.bad) { /* held elsewhere: 0, so that what follows has no NaN to convert */
        int64_t row = (int64_t)blockIdx.x * STRIP_ROWS + threadIdx.x;
        if (threadIdx.x < STRIP_ROWS && row < a.w.rows) a.y[(int64_t)p.col0 * a.w.rows + row] = 0;
        return false;
    }
    if (e < 0 || e >= a.n_expert) {
        e = 0;
        if (threadIdx.x == 0) atomicMin(a.bad, 0ull);
    }
    p.strip += (size_t)e * a.expert_bytes;
    p.x_col[0] /= a.x_div;
    return true;
}

/* Sums of the PARTS half-warps, added in order, and the bias. */
template <int NC>
static __device__ __forceinline__ void store_sums(float (&part)[PARTS][NC][STRIP_ROWS], const float (&acc)[NC], const place &p,
                                                  const struct matvec_args &a) {
    int lane = threadIdx.x % STRIP_ROWS, mine = threadIdx.x / STRIP_ROWS;
#pragma unroll
    for (int c = 0; c < NC; c++) part[mine][c][lane] = acc[c];
    __syncthreads();
    int64_t row = (int64_t)blockIdx.x * STRIP_ROWS + lane;
    if (mine >= p.n_col || row >= a.w.rows) return;
    float s = 0;
    for (int i = 0; i < PARTS; i++) s = __fadd_rn(s, part[i][mine][lane]);
    if (a.bias) s = __fadd_rn(s, a.bias[row]);
    a.y[(int64_t)(p.col0 + mine) * a.w.rows + row] = s;
}

/* For these ptxas settles on 80 registers, which spill on sm_75 (NVFP4), sm_86 and sm_89 (Q4_1), sm_100 (Q8_0). */
static constexpr bool spills_alone(int type, int nc) {
    return nc == 8 && (type == QT_NVFP4 || type == QT_Q4_1 || type == QT_Q8_0);
}

/* y = W x. A block owns a strip of 16 rows and NC columns; a lane of a half-warp owns a row, the 16 half-warps share out
 * the outer parts of the blocks along the row. Shared memory: NC KiB. Bound by reading W once per NC columns. */
template <int type, int NC> static __global__ void __launch_bounds__(THREADS, spills_alone(type, NC) ? 1 : 0) matvec_k(struct matvec_args a) {
    using Q = quant<type>;
    SMEM_ARRAY(float, part, [PARTS][NC][STRIP_ROWS]);
    place p;
    if (!find_place<NC>(p, a)) return;
    const int lane = threadIdx.x % STRIP_ROWS;
    const int n_unit = (int)a.w.n_block * Q::outer;
    int64_t col[NC];
    float acc[NC];
#pragma unroll
    for (int c = 0; c < NC; c++) acc[c] = 0, col[c] = p.x_col[c] * (n_unit * Q::inner);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(p.strip) + lane;
    const unsigned char *scales = p.strip + a.w.scales_off + lane * Q::scale_bytes;
    for (int u = threadIdx.x / STRIP_ROWS; u < n_unit; u += PARTS) {
        int64_t b = u / Q::outer;
        int o = u % Q::outer;
        const uint32_t *w = words + b * (Q::n_word * STRIP_ROWS);
        const unsigned char *sc = scales + b * (Q::scale_bytes * STRIP_ROWS);
#pragma unroll
        for (int i = 0; i < Q::inner; i++)
            matvec_run<type, NC>(acc, w, sc, o, i, a.xq + (int64_t)u * Q::inner + i, col);
    }
    store_sums<NC>(part, acc, p, a);
}

/* The same for F32, F16 and BF16: a half-warp takes every 16th word, products and sums in f32. */
template <int type, int NC> static __global__ void __launch_bounds__(THREADS) matvec_plain_k(struct matvec_args a) {
    SMEM_ARRAY(float, part, [PARTS][NC][STRIP_ROWS]);
    place p;
    if (!find_place<NC>(p, a)) return;
    float acc[NC];
#pragma unroll
    for (int c = 0; c < NC; c++) acc[c] = 0;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(p.strip) + threadIdx.x % STRIP_ROWS;
    for (int64_t b = threadIdx.x / STRIP_ROWS; b < a.w.n_block; b += PARTS) {
        uint32_t w = words[b * STRIP_ROWS];
        if (type == QT_F32) {
#pragma unroll
            for (int c = 0; c < NC; c++) acc[c] = __fmaf_rn(__uint_as_float(w), a.x[p.x_col[c] * a.w.cols + b], acc[c]);
            continue;
        }
        float low = type == QT_F16 ? f16_value(w & 0xffffu) : bf16_value(w & 0xffffu);
        float high = type == QT_F16 ? f16_value(w >> 16) : bf16_value(w >> 16);
        bool odd = 2 * b + 1 == a.w.cols; /* the strip is padded, x is not */
#pragma unroll
        for (int c = 0; c < NC; c++) {
            const float *x = a.x + p.x_col[c] * a.w.cols + 2 * b;
            acc[c] = __fmaf_rn(low, x[0], acc[c]);
            if (!odd) acc[c] = __fmaf_rn(high, x[1], acc[c]);
        }
    }
    store_sums<NC>(part, acc, p, a);
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

template <int type, bool plain, int NC> static cudaError_t matvec_columns(const struct matvec_args &a, cudaStream_t st) {
    const int64_t tiles = (a.n_col + NC - 1) / NC;
    dim3 grid((unsigned)((a.w.rows + STRIP_ROWS - 1) / STRIP_ROWS), (unsigned)(tiles < GRID_Y ? tiles : (int64_t)GRID_Y),
              (unsigned)((tiles + GRID_Y - 1) / GRID_Y));
    double n_matrix = (double)tiles; /* read once per tile; with ids NC is 1 */
    double x_bytes = plain ? 4 : sizeof(struct gpu_xq) / 32.0;
    GPU_COST(n_matrix * grid.x * a.w.strip_bytes + a.n_col * (x_bytes * a.w.cols + 4.0 * a.w.rows),
             2.0 * a.n_col * a.w.rows * a.w.cols, plain ? GPU_UNIT_F32 : GPU_UNIT_INT8);
    if constexpr (plain) return GPU_LAUNCH((matvec_plain_k<type, NC>), grid, dim3(THREADS), 0, st, a);
    else return GPU_LAUNCH((matvec_k<type, NC>), grid, dim3(THREADS), 0, st, a);
}

template <int type, bool plain> static cudaError_t matvec_type(const struct matvec_args &a, cudaStream_t st) {
    return a.ids || a.n_col == 1 ? matvec_columns<type, plain, 1>(a, st) : matvec_columns<type, plain, MATVEC_COLS>(a, st);
}

cudaError_t matvec_launch(const struct matvec_args *a, cudaStream_t st) {
    switch (a->w.type) {
#define X(name, id, elems, bytes, enc)                                                                                 \
    case id: return matvec_type<id, elems == 1>(*a, st);
        QUANT_LIST(X)
#undef X
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t quantise_launch(struct gpu_xq *xq, const float *x, int64_t n_block, cudaStream_t st) {
    GPU_COST(n_block * (128.0 + sizeof *xq), 128.0 * n_block, GPU_UNIT_F32);
    return GPU_LAUNCH(quantise_k, dim3((unsigned)((n_block + 15) / 16)), dim3(128), 0, st, xq, x, n_block);
}
