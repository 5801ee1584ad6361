/* elemwise.cu: embedding rows, norms, rotation, activations, residuals, routing. Every kernel is bound by reading and
 * writing its arrays once, or by its launch. */
#include "gpu/kernels.h"
#include "gpu/quant_decode.cuh"

/* Host arrays in the parameters of a launch. */
struct id_list {
    int64_t v[LAUNCH_IDS];
};
struct freq_list {
    double v[LAUNCH_FREQS];
};

enum { FLAT = 256 };

static __device__ __forceinline__ int64_t flat_index() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }

/* Row ids[blockIdx.y] of a plain matrix in strips; a thread takes a word, which holds 1 or 2 elements. */
template <int type> static __global__ void embed_plain_k(float *x, struct gpu_mat m, id_list ids, float scale) {
    int64_t row = ids.v[blockIdx.y], b = flat_index();
    if (b >= m.n_block) return;
    const uint32_t *w = reinterpret_cast<const uint32_t *>(m.data + (size_t)(row / STRIP_ROWS) * m.strip_bytes);
    uint32_t v = w[b * STRIP_ROWS + row % STRIP_ROWS];
    float *y = x + (int64_t)blockIdx.y * m.cols;
    if (type == QT_F32) {
        y[b] = __fmul_rn(__uint_as_float(v), scale);
        return;
    }
    y[2 * b] = __fmul_rn(type == QT_F16 ? f16_value(v & 0xffffu) : bf16_value(v & 0xffffu), scale);
    if (2 * b + 1 < m.cols) y[2 * b + 1] = __fmul_rn(type == QT_F16 ? f16_value(v >> 16) : bf16_value(v >> 16), scale);
}

/* The same of a quantised matrix; a thread decodes 4 elements. */
template <int type> static __global__ void embed_quant_k(float *x, struct gpu_mat m, id_list ids, float scale) {
    using Q = quant<type>;
    int64_t row = ids.v[blockIdx.y], at = flat_index();
    if (at >= m.cols / 4) return;
    const unsigned char *strip = m.data + (size_t)(row / STRIP_ROWS) * m.strip_bytes;
    int lane = (int)(row % STRIP_ROWS), run = (int)(at / 8 % (Q::outer * Q::inner));
    int64_t b = at / (8 * Q::outer * Q::inner);
    const uint32_t *w = reinterpret_cast<const uint32_t *>(strip) + b * Q::n_word * STRIP_ROWS + lane;
    const unsigned char *sc = strip + m.scales_off + (size_t)(b * STRIP_ROWS + lane) * Q::scale_bytes;
    float y[4];
    quant_decode4<type>(y, w, sc, run / Q::inner, run % Q::inner, (int)(at % 8));
    float *dst = x + (int64_t)blockIdx.y * m.cols + 4 * at;
    for (int e = 0; e < 4; e++) dst[e] = __fmul_rn(y[e], scale);
}

static __global__ void gather_k(float *y, const float *x, id_list ids, int64_t dim) {
    int64_t i = flat_index();
    if (i < dim) y[(int64_t)blockIdx.y * dim + i] = x[(int64_t)ids.v[blockIdx.y] * dim + i];
}

/* y = w * x / sqrt(mean(x^2) + eps). A block of 256 threads per row; each thread reads and writes elements of its own, so y
 * may be x. */
static __global__ void rmsnorm_k(float *y, const float *x, const float *w, int dim, float eps) {
    SMEM_ARRAY(float, part, [8]);
    const float *xr = x + (size_t)blockIdx.x * dim;
    float *yr = y + (size_t)blockIdx.x * dim, s = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) s = fmaf(xr[i], xr[i], s);
    s = block_sum(s, part);
    float r = 1.0f / sqrtf(s / dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) yr[i] = w[i] * (xr[i] * r);
}

static __global__ void add_k(float *x, const float *d, int64_t n) {
    int64_t i = flat_index();
    if (i < n) x[i] += d[i];
}

static __device__ __forceinline__ float sigma(float x) { return 1.0f / (1.0f + expf(-x)); }

/* enum act of core/ops.h: 0 silu, 1 gelu, 2 sigmoid. */
static __device__ __forceinline__ float activate(float x, int act) {
    if (act == 0) return x / (1.0f + expf(-x));
    if (act == 1) return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    return sigma(x);
}
static __global__ void glu_k(float *y, const float *gate, const float *up, int64_t n, int act) {
    int64_t i = flat_index();
    if (i < n) y[i] = activate(gate[i], act) * up[i];
}

static __global__ void add_gated_k(float *x, const float *d, const float *gate, int64_t n, int64_t dim) {
    int64_t i = flat_index();
    if (i < n) x[i] = fmaf(sigma(gate[i / dim]), d[i], x[i]);
}

static __global__ void softcap_k(float *x, int64_t n, float cap) {
    int64_t i = flat_index();
    if (i < n) x[i] = cap * tanhf(x[i] / cap);
}

/* One thread per pair and token. Double sine and cosine reduce any angle exactly. */
static __global__ void rope_table_k(float *cs, freq_list freq, int first, int n, int n_pair, float mscale, int64_t pos0, int n_tok) {
    int64_t at = flat_index(), t = at / n;
    if (t >= n_tok) return;
    int i = (int)(at % n);
    double angle = __dmul_rn((double)(pos0 + t), freq.v[i]);
    float *dst = cs + (t * n_pair + first + i) * 2;
    dst[0] = (float)(mscale * cos(angle));
    dst[1] = (float)(mscale * sin(angle));
}

/* One warp per head of a token; a lane owns pairs, then single dims behind n_rot. */
static __global__ void rope_k(float *x, int64_t n_row, int n_head, int head_dim, const float *norm, float eps, const float *cs,
                              int n_rot, int neox) {
    int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= n_row) return; /* whole warps */
    int lane = threadIdx.x % 32, n_pair = n_rot / 2;
    float *h = x + row * head_dim, r = 1;
    if (norm) {
        float s = 0;
        for (int i = lane; i < head_dim; i += 32) s = fmaf(h[i], h[i], s);
        r = 1.0f / sqrtf(warp_sum(s) / head_dim + eps);
    }
    const float *c = cs + row / n_head * n_rot;
    for (int i = lane; i < n_pair; i += 32) {
        int u = neox ? i : 2 * i, v = neox ? i + n_pair : 2 * i + 1;
        float p = h[u], q = h[v], co = c[2 * i], si = c[2 * i + 1];
        if (norm) p = norm[u] * (p * r), q = norm[v] * (q * r);
        h[u] = p * co - q * si;
        h[v] = p * si + q * co;
    }
    if (norm)
        for (int i = n_rot + lane; i < head_dim; i += 32) h[i] = norm[i] * (h[i] * r);
}

/* One warp per token; lane l owns experts l, l + 32, ... (32 at most, a bit each in `taken`). NaN counts as -infinity, so
 * that every id is one of an expert; the weights are then NaN. */
static __device__ __forceinline__ float routing_logit(const float *l, int e) {
    float v = l[e];
    return v == v ? v : -INFINITY;
}
static __global__ void route_k(int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used, int normalise) {
    int t = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = threadIdx.x % 32;
    if (t >= n_tok) return; /* whole warps */
    const float *l = logits + (int64_t)t * n_expert;
    unsigned taken = 0;
    float top = 0, chosen = 0, all = 0;
    for (int k = 0; k < n_used; k++) {
        int best = n_expert;
        float v = -INFINITY;
        for (int e = lane, i = 0; e < n_expert; e += 32, i++)
            if (!(taken >> i & 1u) && (best == n_expert || routing_logit(l, e) > v)) best = e, v = routing_logit(l, e);
        float most = warp_max(v);
        int id = -warp_max(v == most ? -best : -n_expert); /* ties: the lower id */
        if (id < n_expert && id % 32 == lane) taken |= 1u << (id / 32);
        if (k == 0) top = most;
        chosen += expf(most - top);
        if (lane == 0) ids[(int64_t)t * n_used + k] = id;
        if (lane == 0) weight[(int64_t)t * n_used + k] = expf(most - top);
    }
    for (int e = lane; e < n_expert; e += 32) all += expf(l[e] - top);
    all = warp_sum(all);
    if (lane == 0)
        for (int k = 0; k < n_used; k++) weight[(int64_t)t * n_used + k] /= normalise ? chosen : all;
}

/* held: ?negative where the choice's expert is elsewhere. */
static __global__ void expert_sum_k(float *y, const float *part, const float *weight, const int32_t *held, int n_used, int64_t dim) {
    int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x, t = blockIdx.x; /* tokens in x: y ends at 65,535 */
    if (i >= dim) return;
    float s = 0;
    for (int k = 0; k < n_used; k++)
        if (!held || held[t * n_used + k] >= 0) s = fmaf(weight[t * n_used + k], part[(t * n_used + k) * dim + i], s);
    y[t * dim + i] = s;
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

static dim3 flat_grid(int64_t n, int rows) { return dim3((unsigned)((n + FLAT - 1) / FLAT), (unsigned)rows); }

cudaError_t kernels_loadable(void) {
    cudaFuncAttributes a;
    return cudaFuncGetAttributes(&a, add_k);
}

template <int type, bool plain>
static cudaError_t embed_type(float *x, const struct gpu_mat *m, const id_list &ids, int n, float scale, cudaStream_t st) {
    GPU_COST((double)n * (4.0 * m->cols + (double)m->strip_bytes / STRIP_ROWS), 0, GPU_UNIT_F32);
    if constexpr (plain) return GPU_LAUNCH(embed_plain_k<type>, flat_grid(m->n_block, n), dim3(FLAT), 0, st, x, *m, ids, scale);
    else return GPU_LAUNCH(embed_quant_k<type>, flat_grid(m->cols / 4, n), dim3(FLAT), 0, st, x, *m, ids, scale);
}

static id_list id_list_of(const int32_t *ids, int n) {
    id_list l = {};
    for (int i = 0; i < n; i++) l.v[i] = ids[i];
    return l;
}

cudaError_t embed_launch(float *x, const struct gpu_mat *m, const int32_t *ids, int n, float scale, cudaStream_t st) {
    id_list l = id_list_of(ids, n);
    switch (m->type) {
#define X(name, id, elems, bytes, enc)                                                                                 \
    case id: return embed_type<id, elems == 1>(x, m, l, n, scale, st);
        QUANT_LIST(X)
#undef X
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t gather_launch(float *y, const float *x, const int32_t *ids, int n, int64_t dim, cudaStream_t st) {
    GPU_COST(8.0 * n * dim, 0, GPU_UNIT_F32);
    return GPU_LAUNCH(gather_k, flat_grid(dim, n), dim3(FLAT), 0, st, y, x, id_list_of(ids, n), dim);
}

cudaError_t rmsnorm_launch(float *y, const float *x, const float *w, int64_t n_row, int dim, float eps, cudaStream_t st) {
    GPU_COST(8.0 * n_row * dim, 4.0 * n_row * dim, GPU_UNIT_F32);
    return GPU_LAUNCH(rmsnorm_k, dim3((unsigned)n_row), dim3(256), 0, st, y, x, w, dim, eps);
}

cudaError_t add_launch(float *x, const float *d, int64_t n, cudaStream_t st) {
    GPU_COST(12.0 * n, n, GPU_UNIT_F32);
    return GPU_LAUNCH(add_k, flat_grid(n, 1), dim3(FLAT), 0, st, x, d, n);
}

cudaError_t glu_launch(float *y, const float *gate, const float *up, int64_t n, int act, cudaStream_t st) {
    GPU_COST(12.0 * n, 10.0 * n, GPU_UNIT_F32);
    return GPU_LAUNCH(glu_k, flat_grid(n, 1), dim3(FLAT), 0, st, y, gate, up, n, act);
}

cudaError_t add_gated_launch(float *x, const float *d, const float *gate, int n_tok, int64_t dim, cudaStream_t st) {
    int64_t n = n_tok * dim;
    GPU_COST(12.0 * n, 10.0 * n, GPU_UNIT_F32);
    return GPU_LAUNCH(add_gated_k, flat_grid(n, 1), dim3(FLAT), 0, st, x, d, gate, n, dim);
}

cudaError_t softcap_launch(float *x, int64_t n, float cap, cudaStream_t st) {
    GPU_COST(8.0 * n, 10.0 * n, GPU_UNIT_F32);
    return GPU_LAUNCH(softcap_k, flat_grid(n, 1), dim3(FLAT), 0, st, x, n, cap);
}

cudaError_t rope_table_launch(float *cs, const double *inv_freq, int first, int n, int n_pair, float mscale, int64_t pos0,
                              int n_tok, cudaStream_t st) {
    freq_list f = {};
    for (int i = 0; i < n; i++) f.v[i] = inv_freq[i];
    GPU_COST(8.0 * n * n_tok, 200.0 * n * n_tok, GPU_UNIT_F32);
    return GPU_LAUNCH(rope_table_k, flat_grid((int64_t)n * n_tok, 1), dim3(FLAT), 0, st, cs, f, first, n, n_pair, mscale, pos0,
                      n_tok);
}

cudaError_t rope_launch(float *x, int n_tok, int n_head, int head_dim, const float *norm, float eps, const float *cs, int n_rot,
                        int neox, cudaStream_t st) {
    int64_t n_row = (int64_t)n_tok * n_head;
    GPU_COST(8.0 * n_row * head_dim, 10.0 * n_row * head_dim, GPU_UNIT_F32);
    return GPU_LAUNCH(rope_k, dim3((unsigned)((n_row + 3) / 4)), dim3(128), 0, st, x, n_row, n_head, head_dim, norm, eps, cs,
                      n_rot, neox);
}

cudaError_t route_launch(int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used, int normalise,
                         cudaStream_t st) {
    GPU_COST(4.0 * n_tok * n_expert, 20.0 * n_tok * n_expert, GPU_UNIT_F32);
    return GPU_LAUNCH(route_k, dim3((unsigned)((n_tok + 3) / 4)), dim3(128), 0, st, ids, weight, logits, n_tok, n_expert, n_used,
                      normalise);
}

cudaError_t expert_sum_launch(float *y, const float *part, const float *weight, const int32_t *held, int n_tok, int n_used, int64_t dim,
                              cudaStream_t st) {
    GPU_COST(4.0 * n_tok * (n_used + 1) * dim, 2.0 * n_tok * n_used * dim, GPU_UNIT_F32);
    return GPU_LAUNCH(expert_sum_k, dim3((unsigned)n_tok, (unsigned)((dim + FLAT - 1) / FLAT)), dim3(FLAT), 0, st, y,
                      part, weight, held, n_used, dim);
}
