/* attn_prefill.cu: attention of many queries on tensor cores. Keys and values that are not F16 are first turned into half,
 * page by page and once per call, in the layout of core/kv.h; a block then takes a tile of query rows (tokens x heads of a
 * group, which share every staged key and value) through the pages, with a running maximum and sum.
 *
 * Arithmetic: q, K and V as half times an exact power of two (per query row; per page and head), scores and sums in f32, the
 * softmax in f32, its weights rounded to half times 2^15, so that only weights below 2^-39 of the largest lose accuracy. */
#include "gpu/common.cuh"
#include "gpu/kernels.h"
#include "gpu/ptx.h"

#include <mma.h>

enum { PAGE = 256, LANES = 16, BLOCK = 32, MAX_DIM = 256, NPOS = 32 /* positions at a time */, S_LD = NPOS + 4, PREP = 128,
       STAGE_THREADS = 256 };
#define P_SHIFT 15.0f

static __host__ __device__ __forceinline__ int pad16(int n) { return (n + 15) / 16 * 16; }

static __device__ __forceinline__ int64_t slot_of(const struct gpu_kv &kv, int64_t page) { return kv.ring ? page % kv.n_slot : page; }

/* --- queries ------------------------------------------------------------------------------------------------------------- */

/* A query row as half, rotated as the keys are; zeros from dim_k on. One row per block. Bound by its launch. */
static __global__ void __launch_bounds__(PREP)
    query_k(uint16_t *y, int *exp, const float *q, int dim, int rotate) {
    SMEM_ARRAY(float, x, [MAX_DIM]);
    SMEM_ARRAY(float, part, [PREP / 32]);
    const int ld = pad16(dim);
    float most = 0;
    for (int d = threadIdx.x; d < dim; d += PREP) x[d] = q[(size_t)blockIdx.x * dim + d]; /* unless rotated, each its own */
    if (rotate) rotate_shared(x, dim, rotate_block(dim));
    for (int d = threadIdx.x; d < dim; d += PREP) most = fmaxf(most, fabsf(x[d]));
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < PREP / 32; i++) most = fmaxf(most, part[i]);
    int e = half_exponent(most);
    if (threadIdx.x == 0) exp[blockIdx.x] = e;
    for (int d = threadIdx.x; d < ld; d += PREP)
        y[(size_t)blockIdx.x * ld + d] = __half_as_ushort(__float2half_rn(d < dim ? times_pow2(x[d], -e) : 0.0f));
}

/* --- pages to half ------------------------------------------------------------------------------------------------------- */

/* Eight neighbours in a plane of the layout of plain types, K [16][dim][16] or V [dim / 32][256][32 or 16]; `at` is the first.
 * Quantised: K words [16][dim / 4 or 8][16], V bytes as V values. */
template <int type, bool values>
static __device__ __forceinline__ void stage8(float (&x)[8], const unsigned char *plane, const unsigned short *scales, int at, int dim) {
    if constexpr (type == QT_F32 || type == QT_BF16) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = type == QT_F32 ? reinterpret_cast<const float *>(plane)[at + i]
                                  : bf16_value(reinterpret_cast<const unsigned short *>(plane)[at + i]);
    } else if constexpr (values) { /* the blocks are whole: at / 32 counts them */
        float d = f16_value(scales[at / BLOCK]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int lane = at % BLOCK + i;
            if (type == QT_Q8_0) x[i] = d * (float)(signed char)plane[at + i];
            else {
                unsigned c = plane[at / BLOCK * 16 + lane % 16];
                x[i] = d * (float)((int)(lane < 16 ? c & 15u : c >> 4) - 8);
            }
        }
    } else {
        const int g = at / (dim * LANES), e = at / LANES % dim, l = at % LANES;
        constexpr int per_word = type == QT_Q8_0 ? 4 : 8;
        const uint32_t *w = reinterpret_cast<const uint32_t *>(plane) + (g * (dim / per_word) + e / per_word) * LANES + l;
        const unsigned short *sc = scales + (g * (dim / BLOCK) + e / BLOCK) * LANES + l;
        const int shift = type == QT_Q8_0 ? 8 * (e % 4) : 4 * (e % 8 / 2) + 16 * (e % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int c = type == QT_Q8_0 ? (int)(signed char)(w[i] >> shift & 255u) : (int)(w[i] >> shift & 15u) - 8;
            x[i] = f16_value(sc[i]) * (float)c;
        }
    }
}

/* Position in the page of element `at` of a plane; of K, eight neighbours are eight positions. */
template <bool values> static __device__ __forceinline__ int place_of(int at, int dim) {
    if (!values) return at / (dim * LANES) * LANES + at % LANES;
    int b = at / (PAGE * BLOCK), width = dim - b * BLOCK > 16 ? 32 : 16;
    return (at - b * PAGE * BLOCK) / width;
}

/* One page of one head: its largest size, then half(x 2^-e) with one e for all. Positions that hold nothing yet become zero.
 * dim: of V padded to 16. Bound by reading the page, the second time from cache, and writing it. */
template <int type, bool values>
static __global__ void __launch_bounds__(STAGE_THREADS)
    stage_k(uint16_t *to, int *exp, struct gpu_kv kv, int dim, int64_t page_first, int64_t n_pos, size_t page_halves, size_t head_halves) {
    SMEM_ARRAY(float, part, [STAGE_THREADS / 32]);
    const int64_t page = page_first + blockIdx.x;
    const int head = (int)blockIdx.y, n = PAGE * dim, held = (int)min((int64_t)PAGE, n_pos - page * PAGE);
    const unsigned char *at = kv.base + (size_t)slot_of(kv, page) * kv.page_bytes + (size_t)head * kv.head_bytes;
    const unsigned char *plane = values ? at + kv.v_off : at;
    const unsigned short *scales = reinterpret_cast<const unsigned short *>(at + (values ? kv.vs_off : kv.ks_off));
    float most = 0, x[8];
    for (int i = 8 * threadIdx.x; i < n; i += 8 * STAGE_THREADS) {
        stage8<type, values>(x, plane, scales, i, dim);
        int pos = place_of<values>(i, dim);
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (pos + (values ? 0 : e) < held) most = fmaxf(most, fabsf(x[e]));
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < STAGE_THREADS / 32; i++) most = fmaxf(most, part[i]);
    const int shift = half_exponent(most);
    if (threadIdx.x == 0) exp[2 * ((size_t)blockIdx.x * kv.n_kv + head) + values] = shift;
    uint16_t *out = to + blockIdx.x * page_halves + head * head_halves;
    for (int i = 8 * threadIdx.x; i < n; i += 8 * STAGE_THREADS) {
        stage8<type, values>(x, plane, scales, i, dim);
        int pos = place_of<values>(i, dim);
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = pos + (values ? 0 : e) < held ? times_pow2(x[e], -shift) : 0.0f;
        *reinterpret_cast<uint4 *>(out + i) =
            make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]), half_pair(x[6], x[7]));
    }
}

/* --- attention ----------------------------------------------------------------------------------------------------------- */

/* Where half pages are, in halves: page % n_slot of a ring, else page - origin (n_slot 0).
 * exp: ?[2 * (page - origin) * n_kv + 2 * head + which]. */
struct half_pages {
    const uint16_t *base;
    const int *exp;
    int64_t origin, n_slot;
    size_t page, head;
};
struct tile_args {
    struct attn_prefill_args a;
    struct half_pages k, v;
};

/* Shared memory of a block, in the order in which it lies there. Every matrix is kept in pieces of 16 columns, [piece][row][16]:
 * the 16 x 16 tiles that the matrix instructions read are 512 bytes in a row, without bank conflicts. */
struct tile_memory {
    uint16_t *q;  /* [dk / 16][rows][16] */
    uint16_t *k;  /* [NPOS / 16][dk][16] */
    uint16_t *v;  /* [dv / 16][NPOS][16] */
    uint16_t *p;  /* [NPOS / 16][rows][16] weights */
    float *s;     /* [rows][S_LD] scores; then [warps][256] pieces of the output */
    float *keep;  /* [rows] */
};
static __host__ __device__ __forceinline__ size_t tile_bytes(int rows, int dk, int dv) {
    return (size_t)(rows * dk + NPOS * dk + NPOS * dv + rows * NPOS) * 2 + (size_t)(rows * S_LD + rows) * 4;
}
static __device__ __forceinline__ struct tile_memory lay_out(unsigned char *raw, int rows, int dk, int dv) {
    struct tile_memory m;
    m.q = reinterpret_cast<uint16_t *>(raw);
    m.k = m.q + rows * dk;
    m.v = m.k + NPOS * dk;
    m.p = m.v + NPOS * dv;
    m.s = reinterpret_cast<float *>(m.p + rows * NPOS);
    m.keep = m.s + rows * S_LD;
    return m;
}

static __device__ __forceinline__ const uint16_t *head_of(const struct half_pages &h, int64_t page, int head) {
    return h.base + (size_t)(h.n_slot ? page % h.n_slot : page - h.origin) * h.page + head * h.head;
}

/* Keys of NPOS positions from r0 of a page: as they lie there, 16 positions side by side. */
static __device__ __forceinline__ void load_keys(uint16_t *k, const uint16_t *from, int r0, int dim, int pad, int threads) {
    for (int g = 0; g < NPOS / LANES; g++)
        for (int i = threadIdx.x; i < 2 * dim; i += threads)
            cp_async16(k + g * pad * LANES + 8 * i, from + (size_t)(r0 / LANES + g) * dim * LANES + 8 * i);
}

/* Values likewise; zero from position `held` of the page on: 0 times what was never written may be a NaN. */
static __device__ __forceinline__ void load_values(uint16_t *v, const uint16_t *from, int r0, int held, int pad, int threads) {
    for (int i = threadIdx.x; i < NPOS * pad / 8; i += threads) {
        int b = i / (NPOS * BLOCK / 8), rest = i % (NPOS * BLOCK / 8), wide = pad - b * BLOCK > 16;
        int r = wide ? rest / 4 : rest / 2, c = wide ? rest % 4 : rest % 2, width = wide ? 32 : 16;
        cp_async16_or_zero(v + ((2 * b + c / 2) * NPOS + r) * 16 + c % 2 * 8,
                           from + (size_t)b * PAGE * BLOCK + (size_t)(r0 + r) * width + 8 * c, r0 + r < held);
    }
}

/* One query row of the block, for the four threads that do its softmax. */
struct query_row {
    int64_t lo, hi;  /* positions it sees */
    size_t at;       /* tok * n_head + head */
    float m, l;      /* largest score so far, times log2(e); this thread's part of the sum */
    int exp;         /* of q */
    bool real;
};
static __device__ __forceinline__ struct query_row find_row(int row, int n_row, int head, const struct attn_prefill_args &a) {
    const int group = a.n_head / a.kv.n_kv;
    struct query_row r = {0, 0, 0, -INFINITY, 0, 0, row < n_row};
    if (!r.real) return r;
    r.at = (size_t)(row / group) * a.n_head + head * group + row % group;
    r.hi = a.pos0 + row / group + 1;
    r.lo = a.window && r.hi > a.window ? r.hi - a.window : 0;
    r.exp = a.q_exp[r.at];
    return r;
}

/* Softmax weights of 8 scores of a row: s to p (half, times 2^P_SHIFT). Returns by how much what was added up before shrinks.
 * factor: of the scores, log2(e) and powers of two included; value_scale: of the values, folded into the weights. */
static __device__ __forceinline__ float weigh(uint16_t *p, const float *s, struct query_row &r, int64_t pos, bool all, float factor,
                                              float value_scale) {
    float x[8], most = r.m;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = all || (pos + i >= r.lo && pos + i < r.hi) ? s[i] * factor : -INFINITY;
        most = fmaxf(most, x[i]);
    }
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
    const float shift = most == -INFINITY ? 0.0f : most, keep = exp2f(r.m - shift);
    float sum = 0;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        half a = __float2half_rn(exp2f(x[i] - shift + P_SHIFT)), b = __float2half_rn(exp2f(x[i + 1] - shift + P_SHIFT));
        sum += __half2float(a) + __half2float(b); /* of the weights as they are used */
        w[i / 2] = half_pair(__half2float(a) * value_scale, __half2float(b) * value_scale);
    }
    r.l = r.l * keep + sum;
    r.m = most;
    *reinterpret_cast<uint4 *>(p) = make_uint4(w[0], w[1], w[2], w[3]);
    return keep;
}

/* ROWS query rows of one KV head through the pages. Warp (i, h) of ROWS / 16 x 2 owns 16 rows and, of 32 positions, the scores
 * of half h, and of the output, every second piece of 16 dims (MAXD / 32 of them at most, in registers). The 4 threads of a
 * row do its softmax. K of the next positions arrives under the softmax, V of these under the scores. Shared memory: tile_bytes.
 * Bound by the operands that the tensor cores read from shared memory. */
template <int MAXD, int ROWS> static __global__ void __launch_bounds__(ROWS * 4, 1) attn_tile_k(struct tile_args t) {
    using namespace nvcuda;
    constexpr int THREADS = ROWS * 4, PIECES = MAXD / 32;
    typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    SMEM_DYN(unsigned char, raw);
    const struct attn_prefill_args &a = t.a;
    const int dk = pad16(a.kv.dim_k), dv = pad16(a.kv.dim_v), group = a.n_head / a.kv.n_kv;
    const struct tile_memory mem = lay_out(raw, ROWS, dk, dv);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, strip = warp / 2, side = warp % 2, head = (int)blockIdx.y;
    /* the last rows see most and start first */
    const int row0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, n_row = min(ROWS, a.n_tok * group - row0);
    struct query_row mine = find_row(row0 + tid / 4, row0 + n_row, head, a);
    const int64_t hi_first = a.pos0 + row0 / group + 1, hi = a.pos0 + (row0 + n_row - 1) / group + 1;
    const int64_t lo = a.window && hi_first > a.window ? hi_first - a.window : 0, lo_last = a.window && hi > a.window ? hi - a.window : 0;
    const int64_t begin = max(lo / NPOS * NPOS, a.page_first * PAGE), end = min(hi, a.page_end * PAGE);

    for (int i = tid; i < ROWS * dk / 8; i += THREADS) {
        int r = i / (dk / 8), c = i % (dk / 8) * 8, row = row0 + r;
        size_t at = (size_t)(row / group) * a.n_head + head * group + row % group;
        uint4 v = r < n_row ? *reinterpret_cast<const uint4 *>(a.q_half + at * dk + c) : make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4 *>(mem.q + (c / 16 * ROWS + r) * 16 + c % 16) = v;
    }
    /* the rows of K beyond dim_k are never loaded */
    for (int i = tid; i < NPOS / 16 * (dk - a.kv.dim_k) * 16; i += THREADS) {
        int n = (dk - a.kv.dim_k) * 16;
        mem.k[i / n * dk * 16 + a.kv.dim_k * 16 + i % n] = 0;
    }
    /* Which row an element of a fragment belongs to is the hardware's business: a matrix of row numbers tells. */
    for (int i = tid; i < 256; i += THREADS) mem.s[i] = (float)(i / 16);
    __syncthreads();
    sums o[PIECES], map;
    int row_of[map.num_elements];
    wmma::load_matrix_sync(map, mem.s, 16, wmma::mem_row_major);
#pragma unroll
    for (int i = 0; i < map.num_elements; i++) row_of[i] = strip * 16 + (int)map.x[i];
    __syncthreads();

    float *const slice = mem.s + warp * 256;
    int o_exp = 0;
    bool empty = true; /* o_exp is still anything */
    if (a.first) {
#pragma unroll
        for (int f = 0; f < PIECES; f++) wmma::fill_fragment(o[f], 0.0f);
    } else {
        if (mine.real) {
            const float *st = a.state + mine.at * ATTN_STATE;
            mine.m = st[0];
            mine.l = st[2 + tid % 4];
        }
        const int first_row = row0; /* every block has one */
        float e = a.state[((size_t)(first_row / group) * a.n_head + head * group + first_row % group) * ATTN_STATE + 1];
        empty = e == -INFINITY;
        o_exp = empty ? 0 : (int)e;
#pragma unroll
        for (int f = 0; f < PIECES; f++) {
            const int d0 = (2 * f + side) * 16;
            wmma::fill_fragment(o[f], 0.0f);
            if (d0 >= dv) continue;
            for (int i = lane; i < 256; i += 32) {
                int row = row0 + strip * 16 + i / 16, d = d0 + i % 16;
                size_t at = (size_t)(row / group) * a.n_head + head * group + row % group;
                slice[i] = row < row0 + n_row && d < a.kv.dim_v ? a.o[at * a.kv.dim_v + d] : 0.0f;
            }
            __syncwarp();
            wmma::load_matrix_sync(o[f], slice, 16, wmma::mem_row_major);
            __syncwarp();
        }
    }

    if (begin < end) load_keys(mem.k, head_of(t.k, begin / PAGE, head), (int)(begin % PAGE), a.kv.dim_k, dk, THREADS);
    cp_async_commit();
    for (int64_t base = begin; base < end; base += NPOS) {
        const int64_t page = base / PAGE;
        const int r0 = (int)(base % PAGE);
        const int *k_exp = t.k.exp ? t.k.exp + 2 * ((page - t.k.origin) * a.kv.n_kv + head) : NULL;
        const int *v_exp = t.v.exp ? t.v.exp + 2 * ((page - t.v.origin) * a.kv.n_kv + head) + 1 : NULL;
        cp_async_wait<0>();
        __syncthreads(); /* K is there; V, P and S of the positions before are done with */
        load_values(mem.v, head_of(t.v, page, head), r0, (int)min((int64_t)PAGE, hi - page * PAGE), dv, THREADS);
        cp_async_commit();
        {
            sums s[2]; /* two chains of products */
            wmma::fill_fragment(s[0], 0.0f);
            wmma::fill_fragment(s[1], 0.0f);
            for (int c = 0; c < dk / 16; c += 2) {
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    if (c + u >= dk / 16) continue;
                    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fq;
                    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fk;
                    wmma::load_matrix_sync(fq, reinterpret_cast<const half *>(mem.q + ((c + u) * ROWS + strip * 16) * 16), 16);
                    wmma::load_matrix_sync(fk, reinterpret_cast<const half *>(mem.k + (side * dk + (c + u) * 16) * 16), 16);
                    wmma::mma_sync(s[u], fq, fk, s[u]);
                }
            }
#pragma unroll
            for (int i = 0; i < s[0].num_elements; i++) s[0].x[i] += s[1].x[i];
            wmma::store_matrix_sync(mem.s + strip * 16 * S_LD + side * 16, s[0], S_LD, wmma::mem_row_major);
        }
        __syncthreads(); /* the scores are there, K is done with */
        if (base + NPOS < end)
            load_keys(mem.k, head_of(t.k, (base + NPOS) / PAGE, head), (int)((base + NPOS) % PAGE), a.kv.dim_k, dk, THREADS);
        cp_async_commit();
        {
            const int ve = v_exp ? *v_exp : 0, next = empty ? ve : max(o_exp, ve), r = tid / 4, part = tid % 4;
            /* a factor that overflows would make a NaN of a score of 0: beyond 2^100 it does not matter by how much */
            float factor = times_pow2(a.scale * 1.44269504f, max(-200, min(100, mine.exp + (k_exp ? *k_exp : 0))));
            bool all = base >= lo_last && base + NPOS <= hi_first;
            float keep = weigh(mem.p + ((part / 2) * ROWS + r) * 16 + part % 2 * 8, mem.s + r * S_LD + 8 * part, mine, base + 8 * part, all,
                               factor, times_pow2(1.0f, max(-252, ve - next)));
            if (part == 0) mem.keep[r] = empty ? keep : times_pow2(keep, max(-252, o_exp - next));
            o_exp = next;
            empty = false;
        }
        cp_async_wait<1>();
        __syncthreads(); /* V, P and `keep` are there */
        float keep[map.num_elements];
#pragma unroll
        for (int i = 0; i < map.num_elements; i++) keep[i] = mem.keep[row_of[i]];
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fp[NPOS / 16];
#pragma unroll
        for (int j = 0; j < NPOS / 16; j++)
            wmma::load_matrix_sync(fp[j], reinterpret_cast<const half *>(mem.p + (j * ROWS + strip * 16) * 16), 16);
#pragma unroll
        for (int f = 0; f < PIECES; f++) {
            const int d0 = (2 * f + side) * 16;
            if (d0 >= dv) continue;
#pragma unroll
            for (int i = 0; i < map.num_elements; i++) o[f].x[i] *= keep[i];
#pragma unroll
            for (int j = 0; j < NPOS / 16; j++) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fv;
                wmma::load_matrix_sync(fv, reinterpret_cast<const half *>(mem.v + (d0 * NPOS + j * 16 * 16)), 16);
                wmma::mma_sync(o[f], fp[j], fv, o[f]);
            }
        }
    }

    __syncthreads(); /* `keep` and the scores are done with */
    if (a.last) {
        float l = mine.l + __shfl_xor_sync(FULL_MASK, mine.l, 1);
        l += __shfl_xor_sync(FULL_MASK, l, 2);
        if (tid % 4 == 0) {
            mem.keep[tid / 4] = 1.0f / l;
            if (mine.real && !(l > 0 && l < INFINITY))
                atomicMin(a.bad, (unsigned long long)(mine.hi - 1));
        }
    } else if (mine.real) {
        float *st = a.state + mine.at * ATTN_STATE;
        st[2 + tid % 4] = mine.l;
        if (tid % 4 == 0) st[0] = mine.m, st[1] = empty ? -INFINITY : (float)o_exp;
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < PIECES; f++) {
        const int d0 = (2 * f + side) * 16;
        if (d0 >= dv) continue;
        wmma::store_matrix_sync(slice, o[f], 16, wmma::mem_row_major);
        __syncwarp();
        for (int i = lane; i < 256; i += 32) {
            int r = strip * 16 + i / 16, row = row0 + r, d = d0 + i % 16;
            if (r >= n_row || d >= a.kv.dim_v) continue;
            size_t at = (size_t)(row / group) * a.n_head + head * group + row % group;
            a.o[at * a.kv.dim_v + d] = a.last ? times_pow2(slice[i] * mem.keep[r], o_exp) : slice[i];
        }
        __syncwarp();
    }
}

/* Output rows rotated back. One row per block. */
static __global__ void __launch_bounds__(PREP) unrotate_k(float *o, int dim) {
    SMEM_ARRAY(float, x, [MAX_DIM]);
    float *row = o + (size_t)blockIdx.x * dim;
    for (int d = threadIdx.x; d < dim; d += PREP) x[d] = row[d];
    rotate_shared(x, dim, rotate_block(dim));
    for (int d = threadIdx.x; d < dim; d += PREP) row[d] = x[d];
}

/* --- launchers ----------------------------------------------------------------------------------------------------------- */

static size_t head_halves(int dim) { return (size_t)PAGE * (size_t)dim; }

size_t attn_stage_halves(const struct gpu_kv *kv) {
    size_t k = kv->type_k == QT_F16 ? 0 : head_halves(kv->dim_k), v = kv->type_v == QT_F16 ? 0 : head_halves(pad16(kv->dim_v));
    return (size_t)kv->n_kv * (k + v);
}

/* Where the pages of one side lie, and the conversion that puts them there. */
template <bool values>
static cudaError_t stage_side(struct half_pages *h, uint16_t **to, const struct attn_prefill_args &a, cudaStream_t st) {
    const struct gpu_kv &kv = a.kv;
    const int type = values ? kv.type_v : kv.type_k, dim = values ? pad16(kv.dim_v) : kv.dim_k;
    const int64_t pages = a.page_end - a.page_first;
    if (type == QT_F16) {
        *h = {reinterpret_cast<const uint16_t *>(kv.base + (values ? kv.v_off : 0)), NULL, 0, kv.ring ? kv.n_slot : 0,
              kv.page_bytes / 2, kv.head_bytes / 2};
        return cudaSuccess;
    }
    *h = {*to, a.stage_exp, a.page_first, 0, (size_t)kv.n_kv * head_halves(dim), head_halves(dim)};
    *to += (size_t)pages * h->page;
    const dim3 grid((unsigned)pages, (unsigned)kv.n_kv);
    const double n = (double)pages * (double)h->page;
    const double bytes = type == QT_F32 ? 4 : type == QT_BF16 ? 2 : (type == QT_Q8_0 ? 34.0 : 18.0) / 32;
    GPU_COST(n * (bytes + 2), 4 * n, GPU_UNIT_F32);
    uint16_t *out = const_cast<uint16_t *>(h->base);
#define STAGE(t)                                                                                                       \
    GPU_LAUNCH((stage_k<t, values>), grid, dim3(STAGE_THREADS), 0, st, out, a.stage_exp, kv, dim, a.page_first,       \
               a.pos0 + a.n_tok, h->page, h->head)
    switch (type) {
    case QT_F32: return STAGE(QT_F32);
    case QT_BF16: return STAGE(QT_BF16);
    case QT_Q8_0: return STAGE(QT_Q8_0);
    case QT_Q4_0: return STAGE(QT_Q4_0);
    default: return cudaErrorInvalidValue;
    }
#undef STAGE
}

template <int MAXD, int ROWS> static cudaError_t attn_tiles(const struct tile_args &t, cudaStream_t st) {
    const struct attn_prefill_args &a = t.a;
    const size_t smem = tile_bytes(ROWS, pad16(a.kv.dim_k), pad16(a.kv.dim_v));
    const int64_t rows = (int64_t)a.n_tok * (a.n_head / a.kv.n_kv);
    if (smem > 48 * 1024) {
        cudaError_t e = cudaFuncSetAttribute(attn_tile_k<MAXD, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
        if (e != cudaSuccess) return e;
    }
    double seen = 0; /* positions that a query sees in these pages, summed over the queries */
    for (int i = 0; i < a.n_tok; i++) {
        int64_t hi = a.pos0 + i + 1, lo = a.window && hi > a.window ? hi - a.window : 0;
        lo = lo > a.page_first * PAGE ? lo : a.page_first * PAGE;
        hi = hi < a.page_end * PAGE ? hi : a.page_end * PAGE;
        if (hi > lo) seen += (double)(hi - lo);
    }
    double page = 2.0 * a.kv.n_kv * (head_halves(a.kv.dim_k) + head_halves(a.kv.dim_v));
    GPU_COST((double)(a.page_end - a.page_first) * page + (double)a.n_tok * a.n_head * (2.0 * a.kv.dim_k + 4.0 * a.kv.dim_v),
             2.0 * seen * a.n_head * (a.kv.dim_k + a.kv.dim_v), GPU_UNIT_TENSOR);
    return GPU_LAUNCH((attn_tile_k<MAXD, ROWS>), dim3((unsigned)((rows + ROWS - 1) / ROWS), (unsigned)a.kv.n_kv), dim3(ROWS * 4), smem,
                      st, t);
}

cudaError_t attn_prefill_launch(const struct attn_prefill_args *args, cudaStream_t st) {
    struct tile_args t;
    memset(&t, 0, sizeof t);
    t.a = *args;
    const struct attn_prefill_args &a = t.a;
    const struct gpu_kv &kv = a.kv;
    const unsigned rows = (unsigned)(a.n_tok * a.n_head);
    cudaError_t e = cudaSuccess;
    if (a.first) {
        GPU_COST(rows * 6.0 * kv.dim_k, rows * 2.0 * kv.dim_k, GPU_UNIT_F32);
        e = GPU_LAUNCH(query_k, dim3(rows), dim3(PREP), 0, st, a.q_half, a.q_exp, a.q, kv.dim_k, kv.rotate_k);
    }
    uint16_t *to = a.stage;
    if (e == cudaSuccess) e = stage_side<false>(&t.k, &to, a, st);
    if (e == cudaSuccess) e = stage_side<true>(&t.v, &to, a, st);
    if (e != cudaSuccess) return e;
    const int dk = pad16(kv.dim_k), dv = pad16(kv.dim_v);
    if (tile_bytes(64, dk, dv) > a.smem_bytes) e = attn_tiles<256, 32>(t, st); /* sm_75 with the widest heads */
    else if (dv <= 64) e = attn_tiles<64, 64>(t, st);
    else if (dv <= 128) e = attn_tiles<128, 64>(t, st);
    else e = attn_tiles<256, 64>(t, st);
    if (e != cudaSuccess || !a.last || !kv.rotate_v) return e;
    GPU_COST(rows * 8.0 * kv.dim_v, rows * 8.0 * kv.dim_v, GPU_UNIT_F32);
    return GPU_LAUNCH(unrotate_k, dim3(rows), dim3(PREP), 0, st, a.o, kv.dim_v);
}
