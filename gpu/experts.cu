/* experts.cu: expert products of many tokens. The choices are grouped by expert on the device, so the host never learns the
 * counts and the stream is never waited for; one launch multiplies all experts whose weights dequant.cu has just decoded. */
#include "gpu/common.cuh"
#include "gpu/kernels.h"
#include "gpu/ptx.h"

#include <mma.h>

/* A block makes 128 rows x 64 choices of one expert in steps of 32 columns; 8 warps, 32 x 32 each. */
enum { ROWS = 128, COLS = 64, STEP = 32, THREADS = 256, GROUP_THREADS = 128 };

/* Numbers among the n_held experts from `first` on, -1: elsewhere. */
static __global__ void held_k(int32_t *to, const int32_t *ids, int n_choice, int n_expert, int first, int n_held, unsigned long long *bad) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n_choice) return;
    int e = ids[i];
    if (e < 0 || e >= n_expert) atomicMin(bad, 0ull);
    to[i] = e >= first && e < first + n_held ? e - first : -1;
}

static __device__ __forceinline__ int expert_of(int id, int n_expert) { return id < 0 || id >= n_expert ? 0 : id; }

/* A warp per expert counts the choices of smaller experts, then lists its own. Bound by reading ids, which stay in cache. */
static __global__ void __launch_bounds__(GROUP_THREADS)
    group_k(int *starts, int *list, const int32_t *ids, int n_choice, int n_expert, unsigned long long *bad) {
    const int e = (int)(blockIdx.x * (GROUP_THREADS / 32) + threadIdx.x / 32), lane = threadIdx.x % 32;
    if (e >= n_expert) return; /* whole warps */
    int less = 0;
    for (int i = lane; i < n_choice; i += 32) {
        if (!bad && ids[i] < 0) continue;
        less += expert_of(ids[i], n_expert) < e;
        if (bad && e == 0 && (ids[i] < 0 || ids[i] >= n_expert)) atomicMin(bad, 0ull);
    }
    int at = warp_sum(less);
    if (lane == 0) starts[e] = at;
    for (int base = 0; base < n_choice; base += 32) {
        int i = base + lane;
        bool mine = i < n_choice && (bad || ids[i] >= 0) && expert_of(ids[i], n_expert) == e;
        unsigned all = __ballot_sync(FULL_MASK, mine);
        if (mine) list[at + __popc(all & ((1u << lane) - 1))] = i;
        at += __popc(all);
    }
    if (lane == 0 && e == n_expert - 1) starts[n_expert] = at;
}

/* Which expert has tile number `tile`, counted through all experts of the launch: its place in the launch, -1 when there are
 * fewer tiles. *first: the tile's first choice among the expert's. Every warp finds out for itself. */
static __device__ __forceinline__ int find_expert(int *first, int tile, const struct expert_gemm_args &a) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < a.n_matrix; base += 32) {
        const int *s = a.starts + a.first_expert + base + lane;
        int tiles = base + lane < a.n_matrix ? (s[1] - s[0] + COLS - 1) / COLS : 0, upto = tiles;
        for (int d = 1; d < 32; d *= 2) {
            int v = __shfl_up_sync(FULL_MASK, upto, d);
            if (lane >= d) upto += v;
        }
        unsigned past = __ballot_sync(FULL_MASK, upto > tile);
        if (past) {
            int who = __ffs((int)past) - 1;
            *first = (tile - __shfl_sync(FULL_MASK, upto - tiles, who)) * COLS;
            return base + who;
        }
        tile -= __shfl_sync(FULL_MASK, upto, 31);
    }
    return -1;
}

/* One step of columns into shared memory, in pieces of 16 columns: [piece][row][16]. The 16 x 16 tiles that the matrix
 * instructions read are then 512 bytes in a row, without bank conflicts. */
template <int N>
static __device__ __forceinline__ void load_step(uint16_t (&to)[STEP / 16][N][16], const uint16_t *from, const int *row, int64_t ld,
                                                 int64_t k0) {
    for (int i = threadIdx.x; i < N * STEP / 8; i += THREADS) {
        int r = i / (STEP / 8), c = i % (STEP / 8) * 8;
        bool there = row[r] >= 0 && k0 + c < ld;
        cp_async16_or_zero(&to[c / 16][r][c % 16], there ? from + row[r] * ld + k0 + c : from, there);
    }
}

/* The product of one expert's tile; two buffers, the next step is loaded under the present one. Shared memory: 33 KiB.
 * Bound by the tensor cores' operands from shared memory. */
static __global__ void __launch_bounds__(THREADS) expert_gemm_k(struct expert_gemm_args a) {
    using namespace nvcuda;
    SMEM_ARRAY(uint16_t, ws, [2][STEP / 16][ROWS][16]);
    SMEM_ARRAY(uint16_t, xs, [2][STEP / 16][COLS][16]);
    SMEM_ARRAY(float, out, [THREADS / 32][256]);
    SMEM_ARRAY(int, w_row, [ROWS]);
    SMEM_ARRAY(int, x_row, [COLS]);
    SMEM_ARRAY(int, choice, [COLS]);
    int first, m = find_expert(&first, (int)blockIdx.x, a);
    if (m < 0) return; /* the whole block */
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, r0 = (int)blockIdx.y * ROWS;
    const int *list = a.list + a.starts[a.first_expert + m] + first;
    const int n = min((int)COLS, a.starts[a.first_expert + m + 1] - a.starts[a.first_expert + m] - first);
    const int64_t padded = (a.n_row + STRIP_ROWS - 1) / STRIP_ROWS * STRIP_ROWS;
    const uint16_t *w = a.w + (size_t)m * padded * a.ld;
    if (tid < ROWS) w_row[tid] = r0 + tid < a.n_row ? r0 + tid : -1;
    if (tid < COLS) {
        choice[tid] = tid < n ? list[tid] : -1;
        x_row[tid] = tid < n ? list[tid] / a.x_div : -1;
    }
    __syncthreads();

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) wmma::fill_fragment(acc[i][j], 0.0f);
    const int wr = warp % 4 * 32, wc = warp / 4 * 32, n_step = (int)((a.ld + STEP - 1) / STEP);
    load_step(ws[0], w, w_row, a.ld, 0);
    load_step(xs[0], a.x, x_row, a.ld, 0);
    cp_async_commit();
    for (int s = 0; s < n_step; s++) {
        cp_async_wait<0>();
        __syncthreads(); /* this step's tiles are there, and everybody has finished with the other buffer */
        if (s + 1 < n_step) {
            load_step(ws[(s + 1) % 2], w, w_row, a.ld, (int64_t)(s + 1) * STEP);
            load_step(xs[(s + 1) % 2], a.x, x_row, a.ld, (int64_t)(s + 1) * STEP);
        }
        cp_async_commit();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fw[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fx[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                wmma::load_matrix_sync(fw[i], reinterpret_cast<const half *>(ws[s % 2][k][wr + 16 * i]), 16);
                wmma::load_matrix_sync(fx[i], reinterpret_cast<const half *>(xs[s % 2][k][wc + 16 * i]), 16);
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) wmma::mma_sync(acc[i][j], fw[i], fx[j], acc[i][j]);
        }
    }

#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            wmma::store_matrix_sync(out[warp], acc[i][j], 16, wmma::mem_col_major); /* [choice][row] */
            __syncwarp();
            for (int e = lane; e < 256; e += 32) {
                int c = wc + 16 * j + e / 16, r = wr + 16 * i + e % 16;
                if (choice[c] < 0 || w_row[r] < 0) continue;
                int shift = (a.w_exp ? a.w_exp[(size_t)m * padded + r0 + r] : 0) + a.x_exp[x_row[c]];
                a.y[(size_t)choice[c] * a.rows + a.row0 + r0 + r] = times_pow2(out[warp][e], shift);
            }
            __syncwarp();
        }
}

cudaError_t expert_held_launch(int32_t *to, const int32_t *ids, int n_choice, int n_expert, int first, int n_held, unsigned long long *bad,
                               cudaStream_t st) {
    GPU_COST(8.0 * n_choice, 2.0 * n_choice, GPU_UNIT_F32);
    return GPU_LAUNCH(held_k, dim3((unsigned)((n_choice + GROUP_THREADS - 1) / GROUP_THREADS)), dim3(GROUP_THREADS), 0, st, to, ids, n_choice,
                      n_expert, first, n_held, bad);
}

cudaError_t expert_group_launch(int *starts, int *list, const int32_t *ids, int n_choice, int n_expert,
                                unsigned long long *bad, cudaStream_t st) {
    const int warps = GROUP_THREADS / 32;
    GPU_COST(8.0 * n_choice, 2.0 * n_choice * n_expert, GPU_UNIT_F32);
    return GPU_LAUNCH(group_k, dim3((unsigned)((n_expert + warps - 1) / warps)), dim3(GROUP_THREADS), 0, st, starts, list, ids,
                      n_choice, n_expert, bad);
}

cudaError_t expert_gemm_launch(const struct expert_gemm_args *a, cudaStream_t st) {
    /* tiles at most: every expert may have one that is not full. The cost is the share of these experts. */
    dim3 grid((unsigned)(a->n_choice / COLS + a->n_matrix), (unsigned)((a->n_row + ROWS - 1) / ROWS));
    double choices = (double)a->n_choice * a->n_matrix / a->n_expert;
    GPU_COST(2.0 * a->n_matrix * a->n_row * a->ld + choices * (2.0 * a->ld + 4.0 * a->n_row), 2.0 * choices * a->n_row * a->ld,
             GPU_UNIT_TENSOR);
    return GPU_LAUNCH(expert_gemm_k, grid, dim3(THREADS), 0, st, *a);
}
