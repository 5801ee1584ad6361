/* delta.cu: Gated DeltaNet layers (struct delta_args of core/ops.h), everything in f32: convolution and norms of q, k and v,
 * the rule token by token for calls shorter than a chunk and in chunks of 64 for longer ones, the gated norm of the output.
 * A call shorter than a chunk gives the same bits as one token after the other. */
#include "gpu/kernels.h"
#include "gpu/common.cuh"

enum { CHUNK = DELTA_CHUNK, GROUP = DELTA_GROUP, MAX_DIM = 256, TAPS = 4 };

static __host__ __device__ __forceinline__ int64_t channels(const struct delta_args_gpu &a) {
    return (2 * (int64_t)a.n_key + a.n_value) * a.dim;
}
static __device__ __forceinline__ int key_head(const struct delta_args_gpu &a, int head) {
    return a.tiled ? head % a.n_key : head / (a.n_value / a.n_key);
}
/* Row of the first token: q of a value head; k lies n_key * dim further. */
static __device__ __forceinline__ const float *q_of(const struct delta_args_gpu &a, int head) {
    return a.u + (int64_t)key_head(a, head) * a.dim;
}
static __device__ __forceinline__ const float *v_of(const struct delta_args_gpu &a, int head) {
    return a.u + (2 * (int64_t)a.n_key + head) * a.dim;
}

static __device__ __forceinline__ float sigma(float x) { return 1.0f / (1.0f + expf(-x)); }
static __device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
static __device__ __forceinline__ float ln_decay(const struct delta_args_gpu &a, int64_t t, int head) {
    return a.rate[head] * softplus(a.a[t * a.n_value + head] + a.dt[head]);
}

static __device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
/* x + s * y */
static __device__ __forceinline__ float4 add4(float4 x, float s, float4 y) {
    return make_float4(fmaf(s, y.x, x.x), fmaf(s, y.y, x.y), fmaf(s, y.z, x.z), fmaf(s, y.w, x.w));
}
static __device__ __forceinline__ float4 scale4(float s, float4 x) { return make_float4(s * x.x, s * x.y, s * x.z, s * x.w); }
static __device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

/* --- before the rule ----------------------------------------------------------------------------------------------------- */

/* What the convolution of each chunk needs of the tokens before it, since chunks are overwritten side by side: before [n_chunk,
 * 3, channels]; and `last` for the call after this one. A thread owns a channel of a chunk. Bound by copying 3 of 64 rows. */
static __global__ void delta_before_k(struct delta_args_gpu a, float *before, int n) {
    const int64_t n_ch = channels(a), ch = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (ch >= n_ch) return;
    const int first = (int)blockIdx.y * CHUNK;
    float *dst = before + (int64_t)blockIdx.y * (TAPS - 1) * n_ch + ch;
    for (int i = 0; i < TAPS - 1; i++)
        dst[i * n_ch] = first ? a.u[(int64_t)(first - (TAPS - 1) + i) * n_ch + ch] : a.last[i * n_ch + ch];
    if (first == 0)
        for (int i = 0; i < TAPS - 1; i++) a.last[i * n_ch + ch] = a.u[(int64_t)(n - (TAPS - 1) + i) * n_ch + ch]; /* n >= 3 */
}

/* Convolution and SiLU in place, and the lengths of q and k. A warp owns a head through the tokens of a chunk, a lane PER of
 * its channels: their taps and last inputs stay in registers, four tokens are on their way. `last`, when given, is updated
 * (one chunk only). Bound by reading and writing u once. */
template <int PER>
static __global__ void __launch_bounds__(128) delta_conv_k(struct delta_args_gpu a, const float *before, float *last, int n) {
    enum { AHEAD = 4 };
    const int head = (int)(blockIdx.x * 4 + threadIdx.x / 32), lane = threadIdx.x % 32;
    if (head >= 2 * a.n_key + a.n_value) return; /* whole warps */
    const int64_t n_ch = channels(a), c0 = (int64_t)head * a.dim + lane;
    const int first = (int)blockIdx.y * CHUNK, end = min(first + CHUNK, n);
    before += (int64_t)blockIdx.y * (TAPS - 1) * n_ch;
    const float unit = head < a.n_key ? 1.0f / sqrtf((float)a.dim) : 1.0f;
    float4 w[PER];
    float x0[PER], x1[PER], x2[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        bool mine = 32 * i + lane < a.dim;
        int64_t ch = c0 + 32 * i;
        w[i] = mine ? load4(a.conv + ch * TAPS) : make_float4(0, 0, 0, 0);
        x0[i] = mine ? before[ch] : 0.0f;
        x1[i] = mine ? before[n_ch + ch] : 0.0f;
        x2[i] = mine ? before[2 * n_ch + ch] : 0.0f;
    }
    for (int t = first; t < end; t += AHEAD) {
        float in[AHEAD][PER];
#pragma unroll
        for (int b = 0; b < AHEAD; b++)
#pragma unroll
            for (int i = 0; i < PER; i++)
                in[b][i] = t + b < end && 32 * i + lane < a.dim ? a.u[(int64_t)(t + b) * n_ch + c0 + 32 * i] : 0.0f;
#pragma unroll
        for (int b = 0; b < AHEAD; b++) {
            if (t + b >= end) continue; /* whole warps */
            float y[PER], sum = 0, scale = 1;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                float c = fmaf(w[i].w, in[b][i], fmaf(w[i].z, x2[i], fmaf(w[i].y, x1[i], w[i].x * x0[i])));
                y[i] = c / (1.0f + expf(-c));
                sum = fmaf(y[i], y[i], sum);
                x0[i] = x1[i];
                x1[i] = x2[i];
                x2[i] = in[b][i];
            }
            if (head < 2 * a.n_key) scale = unit / fmaxf(sqrtf(warp_sum(sum)), a.eps);
#pragma unroll
            for (int i = 0; i < PER; i++)
                if (32 * i + lane < a.dim) a.u[(int64_t)(t + b) * n_ch + c0 + 32 * i] = y[i] * scale;
        }
    }
    if (!last) return;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (32 * i + lane >= a.dim) continue;
        int64_t ch = c0 + 32 * i;
        last[ch] = x0[i];
        last[n_ch + ch] = x1[i];
        last[2 * n_ch + ch] = x2[i];
    }
}

/* --- token by token ------------------------------------------------------------------------------------------------------ */

enum { STEP_ROWS = 4, STEP_WARPS = 4, STEP_BLOCK = STEP_ROWS * STEP_WARPS };

/* STEP_ROWS rows of S^T of a value head per warp, PER pieces of 16 bytes of each row per lane, in registers from the first
 * token to the last. Both products with S come before its update: o = decay S^T q + e (k.q). No shared memory. Bound by reading
 * and writing S once, 8 n_value dim^2 bytes, whatever n is up to 8 or so. */
template <int PER> static __global__ void __launch_bounds__(32 * STEP_WARPS, 4) delta_steps_k(struct delta_args_gpu a, int n) {
    const int head = blockIdx.y, lane = threadIdx.x % 32, row = (int)(blockIdx.x * STEP_WARPS + threadIdx.x / 32) * STEP_ROWS;
    const int64_t n_ch = channels(a);
    const float *q = q_of(a, head) + 4 * lane, *k = q + (int64_t)a.n_key * a.dim, *v = v_of(a, head) + row;
    float *s = a.s + ((int64_t)head * a.dim + row) * a.dim + 4 * lane, *o = a.y + (int64_t)head * a.dim + row;
    const float4 zero = make_float4(0, 0, 0, 0);
    float4 sr[STEP_ROWS][PER];
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++)
#pragma unroll
        for (int i = 0; i < PER; i++) sr[r][i] = 4 * lane + 128 * i < a.dim ? load4(s + r * a.dim + 128 * i) : zero;
    for (int t = 0; t < n; t++) {
        float4 kt[PER], qt[PER];
        float kq = 0, sk[STEP_ROWS] = {}, sq[STEP_ROWS] = {};
#pragma unroll
        for (int i = 0; i < PER; i++) {
            bool mine = 4 * lane + 128 * i < a.dim;
            kt[i] = mine ? load4(k + t * n_ch + 128 * i) : zero;
            qt[i] = mine ? load4(q + t * n_ch + 128 * i) : zero;
            kq = dot4(kt[i], qt[i], kq);
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                sk[r] = dot4(sr[r][i], kt[i], sk[r]);
                sq[r] = dot4(sr[r][i], qt[i], sq[r]);
            }
        }
        const float decay = expf(ln_decay(a, t, head)), beta = sigma(a.b[(int64_t)t * a.n_value + head]);
        kq = warp_sum(kq);
#pragma unroll
        for (int r = 0; r < STEP_ROWS; r++) {
            float e = beta * (v[t * n_ch + r] - decay * warp_sum(sk[r]));
            float out = fmaf(e, kq, decay * warp_sum(sq[r]));
            if (lane == r) o[(int64_t)t * a.n_value * a.dim + r] = out;
#pragma unroll
            for (int i = 0; i < PER; i++) sr[r][i] = add4(scale4(decay, sr[r][i]), e, kt[i]);
        }
    }
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++)
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (4 * lane + 128 * i < a.dim) *reinterpret_cast<float4 *>(s + r * a.dim + 128 * i) = sr[r][i];
}

/* --- in chunks ----------------------------------------------------------------------------------------------------------- */

enum { BLOCK = 16, CHUNK_THREADS = 256, TILE = 32, LD_TILE = TILE + 4, LD = CHUNK + 4 };

/* a[CHUNK, LD] strictly below the diagonal, x[CHUNK, LD] becomes (I + a)^-1 diag(beta): forward substitution by blocks of 16
 * rows, all columns side by side. First what the finished blocks contribute, then the block of the diagonal in registers. */
static __device__ __forceinline__ void invert(float *x, const float *a, const float *beta) {
    const int tid = threadIdx.x;
#pragma unroll
    for (int b = 0; b < CHUNK / BLOCK; b++) {
        const int i = b * BLOCK + tid / BLOCK;
#pragma unroll
        for (int c = 0; c <= b; c++) { /* rows above BLOCK * c are 0 in this block of columns */
            const int j = c * BLOCK + tid % BLOCK;
            float s = i == j ? beta[i] : 0.0f;
#pragma unroll 4
            for (int m = c * BLOCK; m < b * BLOCK; m++) s = fmaf(-a[i * LD + m], x[m * LD + j], s);
            x[i * LD + j] = s;
        }
        __syncthreads();
        if (tid < (b + 1) * BLOCK) {
            float s[BLOCK];
#pragma unroll
            for (int r = 0; r < BLOCK; r++) {
                s[r] = x[(b * BLOCK + r) * LD + tid];
#pragma unroll
                for (int m = 0; m < r; m++) s[r] = fmaf(-a[(b * BLOCK + r) * LD + b * BLOCK + m], s[m], s[r]);
                x[(b * BLOCK + r) * LD + tid] = s[r];
            }
        }
        __syncthreads();
    }
}

/* struct delta_work of one chunk (blockIdx.x) and value head (blockIdx.y): nothing in it depends on S. 256 threads, each with
 * rows ti + 16 x and columns tj + 16 y of k.k and q.k on and below the diagonal blocks. Tokens behind the end of the call
 * count as beta 0 and decay 1 and read the last one's k. 36 KiB of shared memory. Bound by arithmetic, some
 * 1.25 * 64 * 64 * dim multiplications. */
static __global__ void __launch_bounds__(CHUNK_THREADS, 2)
    delta_chunk_k(struct delta_args_gpu a, struct delta_work *work, int n) {
    SMEM_ARRAY(float, tiles, [2 * CHUNK * LD_TILE]); /* of k and q; then x of invert */
    SMEM_ARRAY(float, am, [CHUNK * LD]);
    SMEM_ARRAY(float, beta, [CHUNK]);
    SMEM_ARRAY(float, g, [CHUNK]);
    SMEM_ARRAY(float, hi, [CHUNK]); /* sums of g in two floats: differences of large sums count */
    SMEM_ARRAY(float, lo, [CHUNK]);
    const int tid = threadIdx.x, head = blockIdx.y, t0 = (int)blockIdx.x * CHUNK, ti = tid / BLOCK, tj = tid % BLOCK;
    const int64_t n_ch = channels(a);
    struct delta_work *w = work + (int64_t)blockIdx.x * a.n_value + head;
    if (tid < CHUNK) {
        bool real = t0 + tid < n;
        g[tid] = real ? ln_decay(a, t0 + tid, head) : 0.0f;
        beta[tid] = real ? sigma(a.b[(int64_t)(t0 + tid) * a.n_value + head]) : 0.0f;
    }
    __syncthreads();
    if (tid < CHUNK) {
        double sum = 0;
        for (int i = 0; i <= tid; i++) sum += g[i];
        hi[tid] = (float)sum;
        lo[tid] = (float)(sum - (double)hi[tid]);
    }

    const float *q = q_of(a, head), *k = q + (int64_t)a.n_key * a.dim;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int d0 = 0; d0 < a.dim; d0 += TILE) {
        const int n_piece = min(TILE, a.dim - d0) / 4;
        __syncthreads();
        for (int x = tid; x < CHUNK * TILE / 4; x += CHUNK_THREADS) {
            int i = x / (TILE / 4), piece = x % (TILE / 4);
            if (piece >= n_piece) continue;
            int64_t at = (int64_t)min(t0 + i, n - 1) * n_ch + d0 + 4 * piece;
            *reinterpret_cast<float4 *>(tiles + i * LD_TILE + 4 * piece) = load4(k + at);
            *reinterpret_cast<float4 *>(tiles + (CHUNK + i) * LD_TILE + 4 * piece) = load4(q + at);
        }
        __syncthreads();
        for (int x = 0; x < 4 * n_piece; x += 4) {
            float4 kj[4];
#pragma unroll
            for (int c = 0; c < 4; c++) kj[c] = load4(tiles + (tj + BLOCK * c) * LD_TILE + x);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float *row = tiles + (ti + BLOCK * r) * LD_TILE + x;
                float4 ki = load4(row), qi = load4(row + CHUNK * LD_TILE);
#pragma unroll
                for (int c = 0; c <= r; c++) {
                    kk[r][c] = dot4(ki, kj[c], kk[r][c]);
                    qk[r][c] = dot4(qi, kj[c], qk[r][c]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = ti + BLOCK * r, j = tj + BLOCK * c;
            /* Masked before the exponential: what comes later would be an overflow. */
            float e = j <= i ? expf(hi[i] - hi[j] + (lo[i] - lo[j])) : 0.0f;
            if (c <= r) am[i * LD + j] = j < i ? beta[i] * kk[r][c] * e : 0.0f;
            w->p[i * CHUNK + j] = j <= i ? qk[r][c] * e : 0.0f;
        }
    if (tid < CHUNK) {
        w->decay[tid] = expf(hi[tid]);
        w->rest[tid] = expf(hi[CHUNK - 1] - hi[tid] + (lo[CHUNK - 1] - lo[tid]));
    }
    __syncthreads();
    invert(tiles, am, beta);
    for (int x = tid; x < CHUNK * CHUNK; x += CHUNK_THREADS) {
        int i = x / CHUNK, j = x % CHUNK;
        w->t[x] = j <= i ? tiles[i * LD + j] : 0.0f;
    }
}

/* A thread of delta_walk_k: it owns tokens ti and ti + 32 and NR of the block's 8 NR rows of S^T. */
struct walker {
    int ti, tr;
};

/* sum[i][r] += m[ti + 32 i] d for a lower triangular m [CHUNK, CHUNK] in global memory, which the 8 threads of a ti read, and d
 * [CHUNK, 8 NR + 4] in shared memory. */
template <int NR>
static __device__ __forceinline__ void add_triangle(float (&sum)[2][NR], const float *m, const float *d, walker at) {
    enum { LD_D = 8 * NR + 4 };
    m += at.ti * CHUNK;
    d += at.tr * NR;
#pragma unroll 2
    for (int j = 0; j < CHUNK; j += 4) {
        float4 c0 = j < CHUNK / 2 ? load4(m + j) : make_float4(0, 0, 0, 0), c1 = load4(m + 32 * CHUNK + j);
#pragma unroll
        for (int r = 0; r < NR; r++) {
            float4 x = make_float4(d[j * LD_D + r], d[(j + 1) * LD_D + r], d[(j + 2) * LD_D + r], d[(j + 3) * LD_D + r]);
            sum[0][r] = dot4(c0, x, sum[0][r]);
            sum[1][r] = dot4(c1, x, sum[1][r]);
        }
    }
}

/* Where row r of S^T lies in shared memory: the rows r, r + NR, .. that the 8 threads of a ti read at once are neighbours, so
 * that their 16 bytes each come from different banks. */
template <int NR> static __device__ __forceinline__ int place_of(int r) { return r % NR * 8 + r / NR; }

/* 8 NR rows of S^T of a value head through all chunks of the call, S in shared memory:
 *   R = v - decay S^T k;  D = T R;  o = decay S^T q + P D;  S = decay_end S + sum of rest k D^T
 * 256 threads; rows of k, q, T and P serve the 8 threads of a ti alone, so they come from global memory. In the last step a
 * thread owns 4 x 4 elements of S. 8 NR (dim + 4) + 64 (8 NR + 4) floats of shared memory. Bound by arithmetic:
 * 64 * 8 NR * (3 dim + 96) multiplications per chunk. Three blocks to a multiprocessor hide each other's loads; the compiler
 * for sm_70 needs more registers than that leaves. */
template <int NR, int DIM>
static __global__ void __launch_bounds__(CHUNK_THREADS, GPU_ARCH == 700 ? 2 : 3)
    delta_walk_k(struct delta_args_gpu a, const struct delta_work *work, int n) {
    enum { ROWS = 8 * NR, LD_S = DIM + 4, LD_D = ROWS + 4 };
    SMEM_ARRAY(float, s, [ROWS * LD_S]);
    SMEM_ARRAY(float, d, [CHUNK * LD_D]); /* R, then D, then rest D */
    const int tid = threadIdx.x, head = blockIdx.y, row0 = (int)blockIdx.x * ROWS, pieces = a.dim / 4;
    const walker me = {tid / 8, tid % 8};
    const int64_t n_ch = channels(a);
    const float *q = q_of(a, head), *k = q + (int64_t)a.n_key * a.dim, *v = v_of(a, head) + row0 + me.tr * NR;
    float *sg = a.s + ((int64_t)head * a.dim + row0) * a.dim, *o = a.y + (int64_t)head * a.dim + row0 + me.tr * NR;
    for (int x = tid; x < ROWS * pieces; x += CHUNK_THREADS) {
        int r = x / pieces, c = x % pieces * 4;
        *reinterpret_cast<float4 *>(s + place_of<NR>(r) * LD_S + c) = load4(sg + (int64_t)r * a.dim + c);
    }
    __syncthreads();

    const struct delta_work *w = work + head;
    for (int t0 = 0; t0 < n; t0 += CHUNK, w += a.n_value) {
        float out[2][NR] = {}, x[2][NR] = {};
        const int64_t at0 = min(t0 + me.ti, n - 1) * n_ch, at1 = min(t0 + me.ti + 32, n - 1) * n_ch;
#pragma unroll 1 /* registers */
        for (int c = 0; c < a.dim; c += 4) {
            float4 k0 = load4(k + at0 + c), k1 = load4(k + at1 + c), q0 = load4(q + at0 + c), q1 = load4(q + at1 + c);
#pragma unroll
            for (int r = 0; r < NR; r++) {
                float4 sr = load4(s + (r * 8 + me.tr) * LD_S + c);
                x[0][r] = dot4(sr, k0, x[0][r]);
                x[1][r] = dot4(sr, k1, x[1][r]);
                out[0][r] = dot4(sr, q0, out[0][r]);
                out[1][r] = dot4(sr, q1, out[1][r]);
            }
        }
        float *mine = d + me.ti * LD_D + me.tr * NR; /* and 32 rows further */
        const float decay0 = w->decay[me.ti], decay1 = w->decay[me.ti + 32];
#pragma unroll
        for (int r = 0; r < NR; r++) {
            mine[r] = fmaf(-decay0, x[0][r], v[at0 + r]);
            mine[32 * LD_D + r] = fmaf(-decay1, x[1][r], v[at1 + r]);
            out[0][r] *= decay0;
            out[1][r] *= decay1;
            x[0][r] = x[1][r] = 0;
        }
        __syncthreads();
        add_triangle<NR>(x, w->t, d, me);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < NR; r++) {
            mine[r] = x[0][r];
            mine[32 * LD_D + r] = x[1][r];
        }
        __syncthreads();
        add_triangle<NR>(out, w->p, d, me);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < NR; r++)
                if (t0 + me.ti + 32 * i < n) o[(int64_t)(t0 + me.ti + 32 * i) * a.n_value * a.dim + r] = out[i][r];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < NR; r++) {
            mine[r] *= w->rest[me.ti];
            mine[32 * LD_D + r] *= w->rest[me.ti + 32];
        }
        __syncthreads();
        const float end = w->decay[CHUNK - 1];
        const int n_real = min(CHUNK, n - t0);
        for (int y = tid; y < ROWS / 4 * pieces; y += CHUNK_THREADS) {
            const int r0 = y / pieces * 4, c = y % pieces * 4;
            const float *kc = k + t0 * n_ch + c;
            float4 sum[4];
#pragma unroll
            for (int r = 0; r < 4; r++) sum[r] = scale4(end, load4(s + place_of<NR>(r0 + r) * LD_S + c));
#pragma unroll 2
            for (int i = 0; i < n_real; i++) {
                float4 kt = load4(kc + i * n_ch), e = load4(d + i * LD_D + r0);
                sum[0] = add4(sum[0], e.x, kt);
                sum[1] = add4(sum[1], e.y, kt);
                sum[2] = add4(sum[2], e.z, kt);
                sum[3] = add4(sum[3], e.w, kt);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) *reinterpret_cast<float4 *>(s + place_of<NR>(r0 + r) * LD_S + c) = sum[r];
        }
        __syncthreads();
    }
    for (int x = tid; x < ROWS * pieces; x += CHUNK_THREADS) {
        int r = x / pieces, c = x % pieces * 4;
        *reinterpret_cast<float4 *>(sg + (int64_t)r * a.dim + c) = load4(s + place_of<NR>(r) * LD_S + c);
    }
}

/* --- after the rule ------------------------------------------------------------------------------------------------------ */

/* y = RMSNorm(y) * silu(z), a warp per token and head. Bound by reading y and z and writing y once. */
static __global__ void __launch_bounds__(128) delta_norm_k(struct delta_args_gpu a, int64_t n_row) {
    const int64_t row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= n_row) return; /* whole warps */
    const int lane = threadIdx.x % 32;
    float *y = a.y + row * a.dim;
    const float *z = a.z + row * a.dim;
    float x[MAX_DIM / 32], sum = 0;
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; i++) {
        x[i] = 32 * i + lane < a.dim ? y[32 * i + lane] : 0.0f;
        sum = fmaf(x[i], x[i], sum);
    }
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)a.dim + a.eps);
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; i++) {
        int at = 32 * i + lane;
        if (at < a.dim) y[at] = a.norm[at] * (x[i] * scale) * (z[at] / (1.0f + expf(-z[at])));
    }
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

/* before: NULL: one chunk, continues from a.last and updates it. */
static cudaError_t convolve(const struct delta_args_gpu &a, const float *before, int n, cudaStream_t st) {
    double n_ch = (double)channels(a);
    dim3 grid((unsigned)((2 * a.n_key + a.n_value + 3) / 4), (unsigned)((n + CHUNK - 1) / CHUNK));
    const float *from = before ? before : a.last;
    float *last = before ? NULL : a.last;
    GPU_COST(n_ch * (8.0 * n + 16 + (before ? 12.0 * grid.y : 24.0)), 20.0 * n_ch * n, GPU_UNIT_F32);
    if (a.dim <= 128) return GPU_LAUNCH(delta_conv_k<4>, grid, dim3(128), 0, st, a, from, last, n);
    return GPU_LAUNCH(delta_conv_k<8>, grid, dim3(128), 0, st, a, from, last, n);
}

static cudaError_t steps(const struct delta_args_gpu &a, int n, cudaStream_t st) {
    double s = (double)a.n_value * a.dim * a.dim;
    dim3 grid((unsigned)(a.dim / STEP_BLOCK), (unsigned)a.n_value);
    GPU_COST(8 * s + 4.0 * n * ((double)channels(a) + (double)a.n_value * a.dim), 7 * s * n, GPU_UNIT_F32);
    if (a.dim <= 128) return GPU_LAUNCH(delta_steps_k<1>, grid, dim3(32 * STEP_WARPS), 0, st, a, n);
    return GPU_LAUNCH(delta_steps_k<2>, grid, dim3(32 * STEP_WARPS), 0, st, a, n);
}

static cudaError_t chunks(const struct delta_args_gpu &a, struct delta_work *w, int n, cudaStream_t st) {
    const unsigned n_chunk = (unsigned)((n + CHUNK - 1) / CHUNK), heads = (unsigned)a.n_value;
    const double works = (double)n_chunk * heads, work = works * sizeof(struct delta_work), u = 4.0 * n * (double)channels(a);
    const double square = (double)CHUNK * CHUNK, s = (double)a.n_value * a.dim * a.dim;
    GPU_COST(u + work, works * square * (2.5 * a.dim + CHUNK / 3), GPU_UNIT_F32);
    cudaError_t e = GPU_LAUNCH(delta_chunk_k, dim3(n_chunk, heads), dim3(CHUNK_THREADS), 0, st, a, w, n);
    if (e != cudaSuccess) return e;
    GPU_COST(8 * s + u + work + 4.0 * n * a.n_value * a.dim, works * a.dim * CHUNK * (6.0 * a.dim + 3 * CHUNK), GPU_UNIT_F32);
    if (a.dim <= 128 && a.dim % 32 == 0)
        return GPU_LAUNCH((delta_walk_k<4, 128>), dim3((unsigned)a.dim / 32, heads), dim3(CHUNK_THREADS), 0, st, a, w, n);
    return GPU_LAUNCH((delta_walk_k<2, 256>), dim3((unsigned)a.dim / 16, heads), dim3(CHUNK_THREADS), 0, st, a, w, n);
}

/* The rule for the next n tokens, at most GROUP. */
static cudaError_t rule(const struct delta_args_gpu &a, void *work, int n, cudaStream_t st) {
    if (n < CHUNK) {
        cudaError_t e = convolve(a, NULL, n, st);
        return e != cudaSuccess ? e : steps(a, n, st);
    }
    const unsigned n_chunk = (unsigned)((n + CHUNK - 1) / CHUNK);
    const int64_t n_ch = channels(a);
    struct delta_work *w = static_cast<struct delta_work *>(work); /* and then `before` */
    float *before = reinterpret_cast<float *>(w + (size_t)n_chunk * (size_t)a.n_value);
    GPU_COST(24.0 * (double)n_ch * n_chunk, 0, GPU_UNIT_F32);
    cudaError_t e = GPU_LAUNCH(delta_before_k, dim3((unsigned)((n_ch + 255) / 256), n_chunk), dim3(256), 0, st, a, before, n);
    if (e == cudaSuccess) e = convolve(a, before, n, st);
    return e != cudaSuccess ? e : chunks(a, w, n, st);
}

cudaError_t delta_launch(const struct delta_args_gpu *args, void *work, cudaStream_t st) {
    struct delta_args_gpu a = *args;
    for (int t = 0; t < args->n_tok; t += GROUP) {
        const int n = args->n_tok - t < GROUP ? args->n_tok - t : GROUP;
        cudaError_t e = rule(a, work, n, st);
        if (e != cudaSuccess) return e;
        const int64_t heads = (int64_t)n * a.n_value;
        a.y += heads * a.dim;
        a.u += n * channels(a);
        a.a += heads;
        a.b += heads;
    }
    const int64_t n_row = (int64_t)args->n_tok * args->n_value;
    GPU_COST(12.0 * (double)n_row * args->dim, 12.0 * (double)n_row * args->dim, GPU_UNIT_F32);
    return GPU_LAUNCH(delta_norm_k, dim3((unsigned)((n_row + 3) / 4)), dim3(128), 0, st, *args, n_row);
}
