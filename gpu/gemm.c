/* gemm.c: products of many tokens on tensor cores. Weights are decoded tile by tile into a bounded buffer of half rows
 * (dequant.cu), cuBLAS multiplies (half inputs, f32 sums and output), powers of two and bias come last. F32 weights stay f32
 * throughout: they are few, and where they occur (routers, decay rates) 11 bits would change decisions. BF16 weights become
 * half as well: with a power of two per row that loses nothing but values below 2^-29 of the row's largest, works on every
 * chip, and leaves the activations 3 bits more than bf16 products would.
 *
 * The same shapes give the same bits: the workspace is ours and of fixed size, one stream uses the handle, and reductions of
 * lower precision are off; cuBLAS's choice of algorithm then depends on the shapes and the chip only. */
#include "core/err.h"
#include "core/quant.h"
#include "core/strip.h"
#include "gpu/impl.h"
#include "gpu/kernels.h"

#include <cublas_v2.h>

#include <limits.h>
#include <stdlib.h>

struct gpu_gemm {
    struct gpu *g;
    cudaStream_t st;
    cublasHandle_t blas;
    uint16_t *d_x;      /* [rows of x, cols] */
    int *d_x_exp;       /* [rows of x] */
    int *d_w_exp;       /* [rows of the tile] */
    int *d_starts, *d_list; /* choices by expert */
    void *d_tile;
    size_t tile_bytes;
    int n_choice, n_expert; /* of the last grouping */
};

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

int gpu_blas_failed(struct gpu *g, int status, const char *call) {
    cudaError_t e = cudaGetLastError(); /* what is behind it, if the runtime knows */
    if (e == cudaSuccess && status == CUBLAS_STATUS_ALLOC_FAILED) e = cudaErrorMemoryAllocation;
    if (e != cudaSuccess) return gpu_failed(g, e, call, 0);
    return err_set(ERR_DEVICE, "GPU %d: %s: %s", g->index, call, cublasGetStatusString((cublasStatus_t)status));
}

#define BLAS_TRY(g, call)                                                                                              \
    do {                                                                                                               \
        cublasStatus_t blas_try_s = (call);                                                                            \
        if (blas_try_s != CUBLAS_STATUS_SUCCESS) {                                                                     \
            rc = gpu_blas_failed(g, (int)blas_try_s, #call);                                                           \
            goto out;                                                                                                  \
        }                                                                                                              \
    } while (0)

int gpu_gemm_open(struct gpu_gemm **out, struct gpu *g, struct gpu_stream *s, const struct ops_limits *l, void *d_workspace,
                  void *d_pass) {
    int rc = 0;
    struct gpu_gemm *m = calloc(1, sizeof *m);
    if (!m) return err_set(ERR_NOMEM, "GPU %d: out of host memory", g->index);
    const struct gpu_gemm_scratch p = gpu_gemm_scratch_of(l);
    unsigned char *base = d_pass;
    *m = (struct gpu_gemm){.g = g, .st = s->s, .tile_bytes = p.tile_bytes};
    m->d_x = (uint16_t *)(void *)(base + p.x);
    m->d_x_exp = (int *)(void *)(base + p.x_exp);
    m->d_w_exp = (int *)(void *)(base + p.w_exp);
    m->d_starts = (int *)(void *)(base + p.starts);
    m->d_list = (int *)(void *)(base + p.list);
    m->d_tile = base + p.tile;
    BLAS_TRY(g, cublasCreate(&m->blas));
    BLAS_TRY(g, cublasSetStream(m->blas, m->st));
    BLAS_TRY(g, cublasSetWorkspace(m->blas, d_workspace, p.workspace_bytes)); /* after the stream, which resets it */
    BLAS_TRY(g, cublasSetMathMode(m->blas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    *out = m;
    return 0;
out:
    gpu_gemm_close(m);
    return rc;
}

void gpu_gemm_close(struct gpu_gemm *m) {
    if (!m) return;
    if (m->blas) (void)cublasDestroy(m->blas);
    (void)cudaGetLastError();
    free(m);
}

static int launched(struct gpu_gemm *m, cudaError_t e, const char *what) {
    return e == cudaSuccess ? 0 : gpu_failed(m->g, e, what, 0);
}

/* Rows of one tile: equal tiles, all of them when they fit. */
static int64_t tile_rows(const struct gpu_gemm *m, int64_t rows, int64_t ld, size_t elem) {
    int64_t most = lesser((int64_t)(m->tile_bytes / elem) / ld, GEMM_TILE_ROWS) / STRIP_ROWS * STRIP_ROWS;
    if (most >= round_up(rows, STRIP_ROWS)) return rows;
    int64_t n_tile = (rows + most - 1) / most, equal = round_up((rows + n_tile - 1) / n_tile, GEMM_ROW_STEP);
    return lesser(equal, most);
}

static int to_half(struct gpu_gemm *m, const float *x, int64_t n_row, int64_t cols) {
    return launched(m, to_half_launch(m->d_x, m->d_x_exp, x, n_row, cols, round_up(cols, 8), m->st), "to_half");
}

/* y[n_tok, ldy] (from a row of the weights on) = x W^T of one decoded tile. Row-major y^T is the column-major result. */
static int tile_product(struct gpu_gemm *m, const struct matmul *a, int out_i, const struct gpu_mat *w, const struct dequant_args *d) {
    const float one = 1, zero = 0, *bias = a->out[out_i].bias;
    float *y = a->out[out_i].y + d->row0;
    const bool f32 = w->type == QT_F32;
    int rc = 0;
    if (f32)
        BLAS_TRY(m->g, cublasSgemm(m->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)d->n_row, a->n_tok, (int)a->cols, &one, m->d_tile,
                                   (int)d->ld, a->x, (int)a->cols, &zero, y, (int)w->rows));
    else
        BLAS_TRY(m->g, cublasGemmEx(m->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)d->n_row, a->n_tok, (int)d->ld, &one, m->d_tile,
                                    CUDA_R_16F, (int)d->ld, m->d_x, CUDA_R_16F, (int)d->ld, &zero, y, CUDA_R_32F, (int)w->rows,
                                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    if (f32 && !bias) return 0;
    return launched(m, gemm_finish_launch(y, w->rows, d->n_row, a->n_tok, f32 ? NULL : m->d_x_exp,
                                          f32 || w->type == QT_F16 ? NULL : m->d_w_exp, bias ? bias + d->row0 : NULL, m->st),
                    "matmul");
out:
    return rc;
}

static int one_matmul(struct gpu_gemm *m, const struct matmul *a, int i, const struct gpu_mat *w) {
    const bool f32 = w->type == QT_F32;
    const int64_t ld = round_up(w->cols, f32 ? 4 : 8), step = tile_rows(m, w->rows, ld, f32 ? sizeof(float) : sizeof(uint16_t));
    if (w->rows > INT_MAX || ld > INT_MAX)
        return err_set(ERR_UNSUPPORTED, "matmul: weights [%lld, %lld] are beyond what cuBLAS counts", (long long)w->rows, (long long)w->cols);
    for (int64_t r = 0; r < w->rows; r += step) {
        struct dequant_args d = {.w = *w, .out = m->d_tile, .exp = m->d_w_exp, .row0 = r, .n_row = lesser(step, w->rows - r), .ld = ld,
                                 .n_matrix = 1};
        int rc = launched(m, dequant_launch(&d, m->st), "dequant");
        if (!rc) rc = tile_product(m, a, i, w, &d);
        if (rc) return rc;
    }
    return 0;
}

int gpu_gemm_matmul(struct gpu_gemm *m, const struct matmul *a, const struct gpu_mat *w) {
    bool half = false;
    for (int i = 0; i < a->n; i++) half |= w[i].type != QT_F32;
    int rc = half ? to_half(m, a->x, a->n_tok, a->cols) : 0;
    for (int i = 0; i < a->n && !rc; i++) rc = one_matmul(m, a, i, &w[i]);
    return rc;
}

/* --- experts ------------------------------------------------------------------------------------------------------------- */

int gpu_gemm_group(struct gpu_gemm *m, const int32_t *d_ids, int n_choice, int n_expert, unsigned long long *d_bad) {
    m->n_choice = n_choice;
    m->n_expert = n_expert;
    return launched(m, expert_group_launch(m->d_starts, m->d_list, d_ids, n_choice, n_expert, d_bad, m->st), "experts");
}

int gpu_gemm_experts(struct gpu_gemm *m, float *y, const struct gpu_mat *w, size_t expert_bytes, const float *x, int n_row, int x_div,
                     enum gpu_gemm_input input) {
    const int64_t ld = round_up(w->cols, 8), rows = round_up(w->rows, STRIP_ROWS);
    int64_t step = tile_rows(m, w->rows, ld, sizeof(uint16_t)), at_once = 1; /* rows; experts when all rows fit */
    if (step == w->rows) {
        at_once = lesser((int64_t)(m->tile_bytes / sizeof(uint16_t)) / (rows * ld), GEMM_TILE_ROWS / rows);
        at_once = at_once < 1 ? 1 : lesser(at_once, m->n_expert);
    }
    int rc = input == GEMM_NEW_ROWS ? to_half(m, x, n_row, w->cols) : 0;
    for (int64_t e = 0; e < m->n_expert; e += at_once)
        for (int64_t r = 0; r < w->rows && !rc; r += step) {
            struct dequant_args d = {.w = *w, .out = m->d_tile, .exp = m->d_w_exp, .starts = m->d_starts, .matrix_bytes = expert_bytes,
                                     .row0 = r, .n_row = lesser(step, w->rows - r), .ld = ld, .first_matrix = e,
                                     .n_matrix = lesser(at_once, m->n_expert - e)};
            struct expert_gemm_args g = {.w = m->d_tile, .x = m->d_x, .w_exp = w->type == QT_F16 ? NULL : m->d_w_exp, .x_exp = m->d_x_exp,
                                         .y = y, .starts = m->d_starts, .list = m->d_list, .ld = ld, .row0 = r, .n_row = d.n_row,
                                         .rows = w->rows, .first_expert = (int)e, .n_matrix = (int)d.n_matrix,
                                         .n_expert = m->n_expert, .n_choice = m->n_choice, .x_div = x_div};
            rc = launched(m, dequant_launch(&d, m->st), "dequant");
            if (!rc) rc = launched(m, expert_gemm_launch(&g, m->st), "experts");
        }
    return rc;
}
