/* attn_decode.cu: KV pages of core/kv.h on the device: storing keys and values, and attention of a few query rows over a
 * long context (flash decoding): the context is cut into runs of pages that work side by side, partial results are merged
 * in order. Many tokens are more rows of the grid, which reads K and V once per ATTN_ROWS rows. */
#include "gpu/kernels.h"
#include "gpu/common.cuh"

#define LOG2E 1.44269504088896341f

enum { PAGE = 256, LANES = 16, BLOCK = 32, MAX_DIM = 256, THREADS = 128, WARPS = THREADS / 32 };
enum { RUN_1 = ATTN_RUN_1, RUN_4 = ATTN_RUN_4, RUNS_4 = ATTN_RUNS_4 };

static __device__ __forceinline__ int64_t run_first_page(int64_t run, int per_page) {
    if (per_page || run < RUN_1) return run;
    return run < RUNS_4 ? RUN_1 + (run - RUN_1) * 4 : RUN_4 + (run - RUNS_4) * 16;
}
static int64_t run_of_page(int64_t page, int per_page) {
    if (per_page || page < RUN_1) return page;
    return page < RUN_4 ? RUN_1 + (page - RUN_1) / 4 : RUNS_4 + (page - RUN_4) / 16;
}
/* A short window has few pages: each is a run of its own wherever the window is. */
static int short_window(int64_t window) { return window > 0 && window <= RUN_1 * PAGE; }

static __device__ __forceinline__ unsigned char *kv_head_at(const struct gpu_kv &kv, int64_t page, int head) {
    int64_t slot = kv.ring ? page % kv.n_slot : page;
    return kv.base + (size_t)slot * kv.page_bytes + (size_t)head * kv.head_bytes;
}

/* --- kv_put -------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void store_plain(unsigned char *p, size_t at, int type, float x) {
    if (type == QT_F32) reinterpret_cast<float *>(p)[at] = x;
    else if (type == QT_F16) reinterpret_cast<unsigned short *>(p)[at] = __half_as_ushort(__float2half_rn(x));
    else reinterpret_cast<unsigned short *>(p)[at] = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* Sum over a warp in the order of kv_q4_try (core/kv_q4.h): eight strands, then a tree. The same in every lane. */
static __device__ __forceinline__ float strand_sum(float v) {
    int strand = threadIdx.x % 8;
    float s = 0;
    for (int j = 0; j < 32; j += 8) s = __fadd_rn(s, __shfl_sync(FULL_MASK, v, strand + j));
    for (int x = 4; x; x >>= 1) s = __fadd_rn(s, __shfl_xor_sync(FULL_MASK, s, x));
    return s;
}

/* kv_encode_q4 of core/kv_q4.h for a block of 32, a lane per value: the same bits. m: the first value of largest size. */
static __device__ __forceinline__ unsigned short encode_q4(int &code, float v, float m) {
    const float steps[3] = {8.0f, 8.25f, 8.5f};
    float d = 0, best = -1;
    code = 8;
    if (!(__half_as_ushort(__float2half_rn(__fdiv_rn(m, -8.0f))) & 0x7fff)) return 0; /* the same m in all lanes */
    for (int s = 0; s < 3; s++) {
        int c = __float2int_rz(__fadd_rn(__fmul_rn(v, __fdiv_rn(-steps[s], m)), 8.5f));
        c = c > 15 ? 15 : c < 0 ? 0 : c;
        float q = (float)(c - 8), sx = strand_sum(__fmul_rn(v, q)), sc = strand_sum(q * q);
        float try_d = sc > 0 ? __fdiv_rn(sx, sc) : 0.0f, gain = __fmul_rn(try_d, sx);
        if (!(gain > best)) continue;
        best = gain;
        d = try_d;
        code = c;
    }
    return __half_as_ushort(__float2half_rn(d));
}

/* As the GGUF quantiser. most: the largest size in the block. */
static __device__ __forceinline__ unsigned short encode_q8(int &code, float v, float most) {
    float d = __fdiv_rn(most, 127.0f);
    unsigned short h = __half_as_ushort(__float2half_rn(d));
    code = __float2int_rz(roundf(__fmul_rn(v, h ? __fdiv_rn(1.0f, d) : 0.0f)));
    return h;
}

/* Codes of x[dim] (shared) to code[dim] (shared), scale of block b to scales[b * stride]; a warp takes a block of 32. */
static __device__ __forceinline__ void encode_blocks(int *code, unsigned short *scales, size_t stride, const float *x, int dim,
                                                     int type) {
    int lane = threadIdx.x % 32;
    for (int b = threadIdx.x / 32; b < dim / BLOCK; b += WARPS) {
        float v = x[b * BLOCK + lane], most = warp_max(fabsf(v));
        unsigned equal = __ballot_sync(FULL_MASK, fabsf(v) == most);
        float first = __shfl_sync(FULL_MASK, v, equal ? __ffs((int)equal) - 1 : 0);
        int c;
        unsigned short h = type == QT_Q8_0 ? encode_q8(c, v, most) : encode_q4(c, v, first);
        code[b * BLOCK + lane] = c;
        if (lane == 0) scales[b * stride] = h;
    }
}

static __device__ __forceinline__ void note_bad(unsigned long long *bad, int64_t pos) {
    atomicMin(bad, (unsigned long long)pos);
}

/* x[dim] of one side into shared memory, rotated where the cache says so. Without a barrier behind it when not rotated: here
 * and in encode_blocks thread t takes elements t, t + THREADS, ... */
static __device__ __forceinline__ void load_side(float *x, const float *src, int dim, int rotate, float most, int64_t pos,
                                                 unsigned long long *bad) {
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        x[d] = src[d];
        if (!(fabsf(src[d]) <= most)) note_bad(bad, pos);
    }
    if (rotate) rotate_shared(x, dim, rotate_block(dim));
}

/* One position of one KV head per block of 128 threads: K, then V. Shared memory: 2 KiB. Bound by its launch. */
static __global__ void __launch_bounds__(THREADS)
    kv_put_k(struct gpu_kv kv, int64_t pos0, const float *k, const float *v, float max_k, float max_v, unsigned long long *bad) {
    SMEM_ARRAY(float, x, [MAX_DIM]);
    SMEM_ARRAY(int, code, [MAX_DIM]);
    const int64_t pos = pos0 + blockIdx.x;
    const int head = (int)blockIdx.y, r = (int)(pos % PAGE), g = r / LANES, l = r % LANES;
    const size_t row = (size_t)blockIdx.x * kv.n_kv + head;
    unsigned char *at = kv_head_at(kv, pos / PAGE, head);

    load_side(x, k + row * kv.dim_k, kv.dim_k, kv.rotate_k, max_k, pos, bad);
    if (kv.type_k == QT_Q8_0 || kv.type_k == QT_Q4_0) {
        unsigned short *scales = reinterpret_cast<unsigned short *>(at + kv.ks_off) + (size_t)g * (kv.dim_k / BLOCK) * LANES + l;
        encode_blocks(code, scales, LANES, x, kv.dim_k, kv.type_k);
        __syncthreads();
        const int per_word = kv.type_k == QT_Q8_0 ? 4 : 8;
        uint32_t *words = reinterpret_cast<uint32_t *>(at) + (size_t)g * (kv.dim_k / per_word) * LANES + l;
        for (int i = threadIdx.x; i < kv.dim_k / per_word; i += blockDim.x) {
            uint32_t w = 0;
            for (int e = 0; e < per_word; e++) {
                uint32_t c = (uint32_t)code[i * per_word + e];
                w |= per_word == 4 ? (c & 255u) << (8 * e) : c << (4 * (e / 2) + 16 * (e % 2));
            }
            words[i * LANES] = w;
        }
    } else {
        for (int d = threadIdx.x; d < kv.dim_k; d += blockDim.x)
            store_plain(at, ((size_t)g * kv.dim_k + d) * LANES + l, kv.type_k, x[d]);
    }
    __syncthreads(); /* x and code are used again */

    load_side(x, v + row * kv.dim_v, kv.dim_v, kv.rotate_v, max_v, pos, bad);
    unsigned char *values = at + kv.v_off;
    if (kv.type_v == QT_Q8_0 || kv.type_v == QT_Q4_0) {
        encode_blocks(code, reinterpret_cast<unsigned short *>(at + kv.vs_off) + r, PAGE, x, kv.dim_v, kv.type_v);
        __syncthreads();
        if (kv.type_v == QT_Q8_0)
            for (int d = threadIdx.x; d < kv.dim_v; d += blockDim.x)
                values[((size_t)(d / BLOCK) * PAGE + r) * BLOCK + d % BLOCK] = (unsigned char)code[d];
        else
            for (int i = threadIdx.x; i < kv.dim_v / 2; i += blockDim.x) {
                int d = i / 16 * BLOCK + i % 16;
                values[((size_t)(i / 16) * PAGE + r) * 16 + i % 16] = (unsigned char)(code[d] | code[d + 16] << 4);
            }
        return;
    }
    const int pad = (kv.dim_v + LANES - 1) / LANES * LANES;
    for (int d = threadIdx.x; d < pad; d += blockDim.x) {
        int b = d / BLOCK, width = kv.dim_v - b * BLOCK > 16 ? 32 : 16;
        store_plain(values, (size_t)b * PAGE * BLOCK + (size_t)r * width + d % BLOCK, kv.type_v, d < kv.dim_v ? x[d] : 0.0f);
    }
}

/* --- attention ----------------------------------------------------------------------------------------------------------- */

/* s[i] += dot(q row i, key at position r of the page). q: shared [ATTN_ROWS, dim]. A thread owns the position: 16 of them
 * lie side by side, so a half-warp reads 16 values in one go. */
static __device__ __forceinline__ void dot4(float (&s)[ATTN_ROWS], const float *q, int dim, int d, const float (&k)[4]) {
#pragma unroll
    for (int i = 0; i < ATTN_ROWS; i++) {
        float4 v = *reinterpret_cast<const float4 *>(q + i * dim + d);
        s[i] = __fmaf_rn(v.w, k[3], __fmaf_rn(v.z, k[2], __fmaf_rn(v.y, k[1], __fmaf_rn(v.x, k[0], s[i]))));
    }
}

template <int type>
static __device__ __forceinline__ void key_scores(float (&s)[ATTN_ROWS], const unsigned char *head, size_t ks_off, int r, int dim,
                                                  const float *q) {
    const int g = r / LANES, l = r % LANES;
    if constexpr (type == QT_Q8_0 || type == QT_Q4_0) {
        constexpr int per_word = type == QT_Q8_0 ? 4 : 8, steps = BLOCK / per_word;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(head) + (size_t)g * (dim / per_word) * LANES + l;
        const unsigned short *scales =
            reinterpret_cast<const unsigned short *>(head + ks_off) + (size_t)g * (dim / BLOCK) * LANES + l;
        for (int b = 0; b < dim / BLOCK; b++) {
            float part[ATTN_ROWS] = {}, scale = f16_value(scales[b * LANES]);
#pragma unroll
            for (int j = 0; j < steps; j++) {
                uint32_t w = words[(b * steps + j) * LANES];
                if (type == QT_Q8_0) {
                    float k[4];
                    for (int e = 0; e < 4; e++) k[e] = (float)(signed char)(w >> (8 * e) & 255u);
                    dot4(part, q, dim, b * BLOCK + 4 * j, k);
                } else {
                    for (int n = 0; n < 2; n++) { /* dims 4n .. 4n + 3 of 8: nibbles 2n, 2n + 4, 2n + 1, 2n + 5 */
                        float k[4];
                        for (int e = 0; e < 4; e++)
                            k[e] = (float)((int)(w >> (4 * (2 * n + e / 2) + 16 * (e % 2)) & 15u) - 8);
                        dot4(part, q, dim, b * BLOCK + 8 * j + 4 * n, k);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < ATTN_ROWS; i++) s[i] = __fmaf_rn(part[i], scale, s[i]);
        }
    } else {
        const size_t first = (size_t)g * dim * LANES + l;
#pragma unroll 2
        for (int d = 0; d < dim; d += 4) {
            float k[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                size_t at = first + (size_t)(d + e) * LANES;
                if (type == QT_F32) k[e] = reinterpret_cast<const float *>(head)[at];
                else if (type == QT_F16) k[e] = f16_value(reinterpret_cast<const unsigned short *>(head)[at]);
                else k[e] = bf16_value(reinterpret_cast<const unsigned short *>(head)[at]);
            }
            dot4(s, q, dim, d, k);
        }
    }
}

/* Value of dim b * 32 + lane at position r of the page. values: the head's V plane. */
template <int type>
static __device__ __forceinline__ float value_at(const unsigned char *values, const unsigned char *scales, int b, int width, int r,
                                                 int lane) {
    if constexpr (type == QT_Q8_0 || type == QT_Q4_0) {
        size_t row = (size_t)b * PAGE + r;
        float d = f16_value(reinterpret_cast<const unsigned short *>(scales)[row]);
        if (type == QT_Q8_0) return d * (float)(signed char)values[row * BLOCK + lane];
        unsigned c = values[row * 16 + lane % 16];
        return d * (float)((int)(lane < 16 ? c & 15u : c >> 4) - 8);
    } else {
        size_t at = (size_t)b * PAGE * BLOCK + (size_t)r * width + lane;
        if (type == QT_F32) return reinterpret_cast<const float *>(values)[at];
        unsigned bits = reinterpret_cast<const unsigned short *>(values)[at];
        return type == QT_F16 ? f16_value(bits) : bf16_value(bits);
    }
}

/* One run of pages, one KV head, up to 8 query rows per block of 128 threads. For every 128 positions: a thread computes the
 * scores of one position for all rows, then each warp owns blocks of 32 dims (a lane owns a dim) and adds up the values of
 * all positions: no sums across lanes but those of the softmax. Shared memory: 12.5 KiB. Bound by reading K and V once.
 * Left alone, ptxas gives 78 to 93 registers, which for f32 keys spill on sm_86; three blocks a multiprocessor leave those 143. */
template <int TK, int TV> static __global__ void __launch_bounds__(THREADS, TK == QT_F32 ? 3 : 0) attn_run_k(struct attn_args_gpu a) {
    SMEM_ARRAY(float, q, [ATTN_ROWS * MAX_DIM]);
    SMEM_ARRAY(float, p, [THREADS][ATTN_ROWS]);
    SMEM_ARRAY(float, across, [WARPS][ATTN_ROWS]);
    SMEM_ARRAY(int64_t, limits, [2][ATTN_ROWS]);
    const struct gpu_kv &kv = a.kv;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = (int)blockIdx.y;
    const int group = a.n_head / kv.n_kv, row0 = (int)blockIdx.z * ATTN_ROWS;
    const int n_row = min((int)ATTN_ROWS, a.n_tok * group - row0);

    for (int i = tid; i < ATTN_ROWS * kv.dim_k; i += THREADS) {
        int row = row0 + i / kv.dim_k, tok = row / group, h = head * group + row % group;
        q[i] = i / kv.dim_k < n_row ? a.q[((size_t)tok * a.n_head + h) * kv.dim_k + i % kv.dim_k] : 0.0f;
    }
    if (tid < ATTN_ROWS) { /* a row that does not exist sees nothing */
        int64_t hi = tid < n_row ? a.pos0 + (row0 + tid) / group + 1 : 0;
        limits[1][tid] = hi;
        limits[0][tid] = a.window && hi > a.window ? hi - a.window : 0;
    }
    __syncthreads();
    if (kv.rotate_k) rotate_shared(q, ATTN_ROWS * kv.dim_k, rotate_block(kv.dim_k));
    const int64_t lo = limits[0][0], hi = limits[1][n_row - 1]; /* rows are in order of position */

    const float factor = a.scale * LOG2E;
    float m[ATTN_ROWS], l[ATTN_ROWS], o[2][ATTN_ROWS];
#pragma unroll
    for (int i = 0; i < ATTN_ROWS; i++) m[i] = -INFINITY, l[i] = 0, o[0][i] = 0, o[1][i] = 0;
    int64_t first = a.page_first + blockIdx.x * a.per_run, last = min(first + a.per_run, a.page_end);
    if (!a.per_run) {
        first = run_first_page(a.run_first + blockIdx.x, a.per_page);
        last = run_first_page(a.run_first + blockIdx.x + 1, a.per_page);
    }
    const int64_t begin = max(first * PAGE, lo / THREADS * THREADS), end = min(last * PAGE, hi);
    for (int64_t base = begin; base < end; base += THREADS) {
        const unsigned char *at = kv_head_at(kv, base / PAGE, head);
        const int r0 = (int)(base % PAGE);
        float s[ATTN_ROWS] = {};
        int64_t pos = base + tid;
        bool seen = pos >= lo && pos < hi;
        if (seen) key_scores<TK>(s, at, kv.ks_off, r0 + tid, kv.dim_k, q);
#pragma unroll
        for (int i = 0; i < ATTN_ROWS; i++) {
            s[i] = seen && pos >= limits[0][i] && pos < limits[1][i] ? s[i] * factor : -INFINITY;
            float most = warp_max(s[i]);
            if (lane == 0) across[warp][i] = most;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ATTN_ROWS; i++) {
            float most = m[i];
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, across[w][i]);
            float shift = most == -INFINITY ? 0.0f : most, keep = exp2f(m[i] - shift), e = exp2f(s[i] - shift);
            p[tid][i] = e;
            l[i] = __fmaf_rn(l[i], keep, e);
            o[0][i] *= keep;
            o[1][i] *= keep;
            m[i] = most;
        }
        __syncthreads();
        const int from = (int)(max(base, lo) - base), to = (int)(min(base + THREADS, hi) - base);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int b = warp + j * WARPS, width = kv.dim_v - b * BLOCK > 16 ? 32 : 16;
            if (b * BLOCK >= kv.dim_v || lane >= width) continue;
#pragma unroll 2
            for (int x = from; x < to; x++) {
                float v = value_at<TV>(at + kv.v_off, at + kv.vs_off, b, width, r0 + x, lane);
#pragma unroll
                for (int i = 0; i < ATTN_ROWS; i++) o[j][i] = __fmaf_rn(p[x][i], v, o[j][i]);
            }
        }
    }

    /* `across` was last read before a barrier */
#pragma unroll
    for (int i = 0; i < ATTN_ROWS; i++) {
        float sum = warp_sum(l[i]);
        if (lane == 0) across[warp][i] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ATTN_ROWS; i++) {
        if (i >= n_row) continue;
        int row = row0 + i, at = row / group * a.n_head + head * group + row % group;
        float *part = a.part + ((size_t)at * a.part_stride + a.run_at + blockIdx.x) * (kv.dim_v + 2);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int d = (warp + j * WARPS) * BLOCK + lane;
            if (d < kv.dim_v) part[d] = o[j][i];
        }
        if (tid) continue;
        part[kv.dim_v] = m[i];
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += across[w][i];
        part[kv.dim_v + 1] = sum;
    }
}

/* Largest m and sum of l of a row's runs. more: ?one result that is not among the runs. */
static __device__ __forceinline__ float runs_sum(float &shift, const float *part, int64_t n_run, int dim, const float *more) {
    float most = more ? more[dim] : -INFINITY, l = 0;
    for (int64_t r = 0; r < n_run; r++) most = fmaxf(most, part[r * (dim + 2) + dim]);
    shift = most == -INFINITY ? 0.0f : most;
    for (int64_t r = 0; r < n_run; r++) {
        const float *p = part + r * (dim + 2) + dim;
        l = __fmaf_rn(p[1], exp2f(p[0] - shift), l);
    }
    return more ? __fmaf_rn(more[dim + 1], exp2f(more[dim] - shift), l) : l;
}

/* One query row per block: merges its runs in order, and `more` after them, divides, rotates back. Bound by reading the partial
 * results. */
static __global__ void __launch_bounds__(THREADS) attn_merge_k(struct attn_args_gpu a) {
    SMEM_ARRAY(float, x, [MAX_DIM]);
    const int dim = a.kv.dim_v;
    const float *part = a.part + (size_t)blockIdx.x * a.part_stride * (dim + 2);
    const float *more = a.more ? a.more + (size_t)blockIdx.x * (dim + 2) : NULL;
    float shift, l = runs_sum(shift, part, a.n_run, dim, more);
    if (threadIdx.x == 0 && !(l > 0 && l < INFINITY)) note_bad(a.bad, a.pos0 + blockIdx.x / a.n_head);
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        float s = 0;
        for (int64_t r = 0; r < a.n_run; r++) {
            const float *p = part + r * (dim + 2);
            s = __fmaf_rn(p[d], exp2f(p[dim] - shift), s);
        }
        if (more) s = __fmaf_rn(more[d], exp2f(more[dim] - shift), s);
        x[d] = s / l; /* read by this thread, but for the rotation, which begins with a barrier */
    }
    if (a.kv.rotate_v) rotate_shared(x, dim, rotate_block(dim));
    for (int d = threadIdx.x; d < dim; d += THREADS) a.o[(size_t)blockIdx.x * dim + d] = x[d];
}

/* One query row per block: its runs become one, in the place of the first. A thread overwrites only what it alone has read;
 * m and l, which all have read, behind a barrier. */
static __global__ void __launch_bounds__(THREADS) attn_fold_k(struct attn_args_gpu a) {
    const int dim = a.kv.dim_v;
    float *part = a.part + (size_t)blockIdx.x * a.part_stride * (dim + 2);
    float shift, l = runs_sum(shift, part, a.n_run, dim, NULL), most = -INFINITY;
    for (int64_t r = 0; r < a.n_run; r++) most = fmaxf(most, part[r * (dim + 2) + dim]);
    for (int d = threadIdx.x; d < dim; d += THREADS) {
        float s = 0;
        for (int64_t r = 0; r < a.n_run; r++) {
            const float *p = part + r * (dim + 2);
            s = __fmaf_rn(p[d], exp2f(p[dim] - shift), s);
        }
        part[d] = s;
    }
    __syncthreads();
    if (threadIdx.x) return;
    part[dim] = most;
    part[dim + 1] = l;
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

cudaError_t kv_put_launch(const struct gpu_kv *kv, int64_t pos0, int n_tok, const float *k, const float *v, float max_k,
                          float max_v, unsigned long long *bad, cudaStream_t st) {
    double values = (double)n_tok * kv->n_kv * (kv->dim_k + kv->dim_v);
    GPU_COST(4 * values + (double)n_tok * kv->page_bytes / PAGE, 4 * values, GPU_UNIT_F32);
    return GPU_LAUNCH(kv_put_k, dim3((unsigned)n_tok, (unsigned)kv->n_kv), dim3(THREADS), 0, st, *kv, pos0, k, v, max_k, max_v,
                      bad);
}

template <int TK, int TV> static cudaError_t attn_types(const struct attn_args_gpu &a, cudaStream_t st) {
    int rows = a.n_tok * (a.n_head / a.kv.n_kv), tiles = (rows + ATTN_ROWS - 1) / ATTN_ROWS;
    double seen = (double)(a.pos0 + a.n_tok);
    if (a.window && seen > a.window + a.n_tok) seen = (double)a.window + a.n_tok;
    if (a.per_run && seen > (double)(a.page_end - a.page_first) * PAGE) seen = (double)(a.page_end - a.page_first) * PAGE;
    GPU_COST(seen * a.kv.page_bytes / PAGE, 2.0 * seen * a.n_tok * a.n_head * (a.kv.dim_k + a.kv.dim_v), GPU_UNIT_F32);
    return GPU_LAUNCH((attn_run_k<TK, TV>), dim3((unsigned)a.n_run, (unsigned)a.kv.n_kv, (unsigned)tiles), dim3(THREADS), 0, st,
                      a);
}

template <int TK> static cudaError_t attn_key_type(const struct attn_args_gpu &a, cudaStream_t st) {
    switch (a.kv.type_v) {
    case QT_F32: return attn_types<TK, QT_F32>(a, st);
    case QT_F16: return attn_types<TK, QT_F16>(a, st);
    case QT_BF16: return attn_types<TK, QT_BF16>(a, st);
    case QT_Q8_0: return attn_types<TK, QT_Q8_0>(a, st);
    case QT_Q4_0: return attn_types<TK, QT_Q4_0>(a, st);
    default: return cudaErrorInvalidValue;
    }
}

static cudaError_t attn_runs(const struct attn_args_gpu &a, cudaStream_t st) {
    switch (a.kv.type_k) {
    case QT_F32: return attn_key_type<QT_F32>(a, st);
    case QT_F16: return attn_key_type<QT_F16>(a, st);
    case QT_BF16: return attn_key_type<QT_BF16>(a, st);
    case QT_Q8_0: return attn_key_type<QT_Q8_0>(a, st);
    case QT_Q4_0: return attn_key_type<QT_Q4_0>(a, st);
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t attn_merge_launch(const struct attn_args_gpu *args, cudaStream_t st) {
    const struct attn_args_gpu &a = *args;
    const double runs = (double)a.n_run + (a.more ? 1 : 0);
    GPU_COST(4.0 * a.n_tok * a.n_head * runs * (a.kv.dim_v + 2), 2.0 * a.n_tok * a.n_head * runs * a.kv.dim_v, GPU_UNIT_F32);
    return GPU_LAUNCH(attn_merge_k, dim3((unsigned)(a.n_tok * a.n_head)), dim3(THREADS), 0, st, a);
}

cudaError_t attn_fold_launch(const struct attn_args_gpu *args, cudaStream_t st) {
    const struct attn_args_gpu &a = *args;
    const double runs = (double)a.n_run + 1;
    GPU_COST(4.0 * a.n_tok * a.n_head * runs * (a.kv.dim_v + 2), 2.0 * a.n_tok * a.n_head * runs * a.kv.dim_v, GPU_UNIT_F32);
    return GPU_LAUNCH(attn_fold_k, dim3((unsigned)(a.n_tok * a.n_head)), dim3(THREADS), 0, st, a);
}

cudaError_t attn_decode_launch(const struct attn_args_gpu *args, cudaStream_t st) {
    struct attn_args_gpu a = *args;
    a.per_page = short_window(a.window);
    int64_t first = a.pos0 + 1, lo = a.window && first > a.window ? first - a.window : 0;
    a.run_first = run_of_page(lo / PAGE, a.per_page);
    a.n_run = a.part_stride = run_of_page((a.pos0 + a.n_tok - 1) / PAGE, a.per_page) - a.run_first + 1;
    a.per_run = a.run_at = 0;
    a.more = NULL;
    cudaError_t e = attn_runs(a, st);
    return e == cudaSuccess ? attn_merge_launch(&a, st) : e;
}

/* Some hundreds of blocks with a few KV heads fill a chip; more only make more to merge. */
enum { MOST_RUNS = 64 };
static int64_t pages_of_run(int64_t n_page) { return (n_page + MOST_RUNS - 1) / MOST_RUNS; }
int64_t attn_runs_of_pages(int64_t n_page) { return n_page ? (n_page + pages_of_run(n_page) - 1) / pages_of_run(n_page) : 0; }

cudaError_t attn_pages_launch(const struct attn_args_gpu *args, cudaStream_t st) {
    struct attn_args_gpu a = *args;
    a.per_run = pages_of_run(a.page_end - a.page_first);
    a.n_run = attn_runs_of_pages(a.page_end - a.page_first);
    a.run_first = a.per_page = 0;
    return attn_runs(a, st);
}
