/* kernels.h: launchers of the kernels, between gpu/ops.c and the .cu files. Pointers in the arguments are device addresses
 * unless marked host. Launchers trust their shapes (gpu/ops.c has checked them), enqueue on the stream and return what the
 * launch returned. Shapes as in core/ops.h. */
#ifndef LH_GPU_KERNELS_H
#define LH_GPU_KERNELS_H

#include "gpu/sizes.h"

#include <cuda_runtime.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether this build has code for the current device. */
cudaError_t kernels_loadable(void);

/* --- elemwise.cu --------------------------------------------------------------------------------------------------------- */

/* A matrix in strips (core/strip.h). The structs here have no padding: it would travel to the device uninitialised. */
struct gpu_mat {
    const unsigned char *data;
    size_t strip_bytes, scales_off;
    int64_t rows, cols, n_block;
    int64_t type; /* enum quant_type */
};

/* Host arrays travel in the parameters of a launch, this many values at a time: no staging buffer, nothing to wait for. */
enum { LAUNCH_IDS = 256, LAUNCH_FREQS = 256 };

/* ids: host [n], n <= LAUNCH_IDS. */
cudaError_t embed_launch(float *x, const struct gpu_mat *embd, const int32_t *ids, int n, float scale, cudaStream_t st);
cudaError_t gather_launch(float *y, const float *x, const int32_t *ids, int n, int64_t dim, cudaStream_t st);
cudaError_t rmsnorm_launch(float *y, const float *x, const float *w, int64_t n_row, int dim, float eps, cudaStream_t st);
cudaError_t add_launch(float *x, const float *d, int64_t n, cudaStream_t st);
/* act: enum act */
cudaError_t glu_launch(float *y, const float *gate, const float *up, int64_t n, int act, cudaStream_t st);
cudaError_t add_gated_launch(float *x, const float *d, const float *gate, int n_tok, int64_t dim, cudaStream_t st);
cudaError_t softcap_launch(float *x, int64_t n, float cap, cudaStream_t st);
/* inv_freq: host [n], n <= LAUNCH_FREQS: pairs first .. first + n of n_pair. */
cudaError_t rope_table_launch(float *cs, const double *inv_freq, int first, int n, int n_pair, float mscale, int64_t pos0,
                              int n_tok, cudaStream_t st);
/* neox: pairs are (i, i + n_rot / 2). norm: ?[head_dim] */
cudaError_t rope_launch(float *x, int n_tok, int n_head, int head_dim, const float *norm, float eps, const float *cs, int n_rot,
                        int neox, cudaStream_t st);
cudaError_t route_launch(int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used, int normalise,
                         cudaStream_t st);
/* y[t] = sum over k of weight[t, k] * part[t * n_used + k]. */
cudaError_t expert_sum_launch(float *y, const float *part, const float *weight, const int32_t *held, int n_tok, int n_used, int64_t dim,
                              cudaStream_t st);

/* --- matvec.cu ----------------------------------------------------------------------------------------------------------- */

enum { MATVEC_COLS = 8 }; /* columns that share one reading of the weights */

/* y[c, rows] = W x[c] + bias for n_col columns. With ids, column c is a choice: it uses matrix ids[c] of a stack and the
 * activations of token c / x_div. */
struct matvec_args {
    struct gpu_mat w;
    const struct gpu_xq *xq; /* quantised types: [*, cols / 32] */
    const float *x;          /* F32, F16, BF16: [*, cols] */
    float *y;
    const float *bias;       /* ?[rows] */
    int64_t n_col;
    const int32_t *ids;      /* ?[n_col] */
    int x_div, n_expert;
    size_t expert_bytes;     /* from one matrix of the stack to the next */
    unsigned long long *bad; /* becomes 0 when an expert does not exist. NULL: a negative id is an expert elsewhere, y is 0 */
};
cudaError_t matvec_launch(const struct matvec_args *a, cudaStream_t st);
/* n_block blocks of 32 elements, all tokens one after the other. */
cudaError_t quantise_launch(struct gpu_xq *xq, const float *x, int64_t n_block, cudaStream_t st);

/* --- dequant.cu ---------------------------------------------------------------------------------------------------------- */

/* Rows row0 .. row0 + n_row (row0 a multiple of STRIP_ROWS) of n_matrix matrices of a stack, decoded: out [n_matrix, n_row
 * rounded up to STRIP_ROWS, ld], zeros from cols to ld: f32 of F32, else half of W 2^-exp with exp per row of `out` (F16: as
 * they are, exp not written). With starts, matrices that no choice uses (starts[i] == starts[i + 1]) are left out. */
struct dequant_args {
    struct gpu_mat w;
    void *out;
    int *exp;
    const int *starts;   /* ?[n_expert + 1] */
    size_t matrix_bytes; /* from one matrix to the next */
    int64_t row0, n_row, ld, first_matrix, n_matrix;
};
cudaError_t dequant_launch(const struct dequant_args *a, cudaStream_t st);
/* y[r] = half(x[r] 2^-exp[r]) of n_row rows; ld even. */
cudaError_t to_half_launch(uint16_t *y, int *exp, const float *x, int64_t n_row, int64_t cols, int64_t ld, cudaStream_t st);
/* y[t * ld + r] = y[t * ld + r] 2^(token[t] + row[r]) + bias[r]; each ?. */
cudaError_t gemm_finish_launch(float *y, int64_t ld, int64_t n_row, int n_tok, const int *token, const int *row,
                               const float *bias, cudaStream_t st);

/* --- experts.cu ---------------------------------------------------------------------------------------------------------- */

/* to[choice] = the number of its expert among the n_held from `first` on, -1: elsewhere. An expert that does not exist: *bad
 * becomes 0. */
cudaError_t expert_held_launch(int32_t *to, const int32_t *ids, int n_choice, int n_expert, int first, int n_held, unsigned long long *bad,
                               cudaStream_t st);
/* Choices by expert: expert e has list[starts[e] .. starts[e + 1]], in order. An expert that does not exist: *bad becomes 0,
 * and the choice counts as one of expert 0. bad NULL: choices of a negative expert are left out. */
cudaError_t expert_group_launch(int *starts, int *list, const int32_t *ids, int n_choice, int n_expert,
                                unsigned long long *bad, cudaStream_t st);

/* y[choice, row0 + r] = W[expert of choice] x[choice / x_div] for rows 0 .. n_row of n_matrix experts that dequant_launch has
 * decoded. */
struct expert_gemm_args {
    const uint16_t *w, *x;       /* [n_matrix, n_row rounded up to STRIP_ROWS, ld], [*, ld] */
    const int *w_exp, *x_exp;    /* ? per row */
    float *y;                    /* [n_choice, rows] */
    const int *starts, *list;
    int64_t ld, row0, n_row, rows;
    int first_expert, n_matrix, n_expert, n_choice, x_div, pad;
};
cudaError_t expert_gemm_launch(const struct expert_gemm_args *a, cudaStream_t st);

/* --- attn_decode.cu ------------------------------------------------------------------------------------------------------ */

/* A layer of struct kv (core/kv.h). */
struct gpu_kv {
    unsigned char *base;
    int64_t n_slot;
    int ring, n_kv, dim_k, dim_v, type_k, type_v, rotate_k, rotate_v;
    size_t ks_off, v_off, vs_off, head_bytes, page_bytes;
};

/* bad: becomes the smallest position whose values are not finite in the cache's type. */
cudaError_t kv_put_launch(const struct gpu_kv *kv, int64_t pos0, int n_tok, const float *k, const float *v, float max_k,
                          float max_v, unsigned long long *bad, cudaStream_t st);

/* Pages are grouped into runs; every run of pages leaves (o, m, l) per query row, and a second kernel merges the runs in order:
 * o is not divided yet and in the basis that V is stored in, m is in units of log2 (scores times log2 e). */
enum { ATTN_ROWS = 8 }; /* query rows (tokens x heads of a group) that share one reading of K and V */
struct attn_args_gpu {
    struct gpu_kv kv;
    float *o;       /* [n_tok, n_head, dim_v] */
    const float *q; /* [n_tok, n_head, dim_k] */
    float *part;    /* [n_tok * n_head, part_stride, dim_v + 2] scratch */
    const float *more; /* ?[n_tok * n_head, dim_v + 2] one more partial result, the last to be merged; may be mapped host memory */
    int64_t pos0, window;
    int n_tok, n_head;
    float scale;      /* of q.k */
    int per_page;     /* every page is a run; filled by attn_decode_launch, like the runs below */
    int64_t run_first, n_run;
    int64_t page_first, page_end, per_run; /* attn_pages_launch; per_run 0: borders depend on the page number only */
    int64_t part_stride, run_at;           /* runs that a row has room for, where the launch puts its first */
    unsigned long long *bad; /* becomes the smallest position with a result that is not finite */
};
/* All pages that the queries see, to o. part has room for attn_runs_at_most(n_ctx) runs (part_stride and more are not read). */
cudaError_t attn_decode_launch(const struct attn_args_gpu *a, cudaStream_t st);
/* Pages page_first .. page_end, cut into attn_runs_of_pages(pages) runs, to runs run_at.. of part. */
int64_t attn_runs_of_pages(int64_t n_page);
cudaError_t attn_pages_launch(const struct attn_args_gpu *a, cudaStream_t st);
/* The first n_run runs become one, the first. */
cudaError_t attn_fold_launch(const struct attn_args_gpu *a, cudaStream_t st);
/* The first n_run runs and `more`, to o. */
cudaError_t attn_merge_launch(const struct attn_args_gpu *a, cudaStream_t st);

/* --- delta.cu ------------------------------------------------------------------------------------------------------------ */

/* struct delta_args of core/ops.h. */
struct delta_args_gpu {
    float *y, *u;
    const float *z, *b, *a, *conv, *dt, *rate, *norm;
    float *last, *s;
    int n_key, n_value, dim, tiled, n_tok; /* n_tok >= 1; dim: a multiple of 16, at most 256 */
    float eps;
};
/* work: delta_work_bytes (gpu/sizes.h) */
cudaError_t delta_launch(const struct delta_args_gpu *a, void *work, cudaStream_t st);

/* --- attn_prefill.cu ----------------------------------------------------------------------------------------------------- */

/* Attention of many tokens over pages page_first .. page_end of a layer. The pages a query sees may come in several calls, in
 * order, with the same everything else: `first` starts, calls between carry on, `last` finishes; in between o and state hold
 * what has been added up so far, and how the pages are divided does not change a bit of the result. Pages that no query sees
 * may be left out. */
struct attn_prefill_args {
    struct gpu_kv kv;
    float *o;             /* [n_tok, n_head, dim_v] */
    const float *q;       /* [n_tok, n_head, dim_k], needed with `first` */
    uint16_t *q_half;     /* scratch [n_tok * n_head, dim_k rounded up to 16] */
    int *q_exp;           /* scratch [n_tok * n_head] */
    float *state;         /* scratch [n_tok * n_head, ATTN_STATE]: largest score, exponent of o, 4 partial sums of the softmax */
    uint16_t *stage;      /* scratch [attn_stage_halves] when K or V is not F16: the pages of the call as half */
    int *stage_exp;       /* scratch [pages * n_kv * 2] likewise */
    int64_t pos0, window, page_first, page_end;
    size_t smem_bytes;    /* most shared memory of a block on this device */
    int n_tok, n_head, first, last;
    float scale;          /* of q.k */
    int pad;
    unsigned long long *bad;
};
/* Halves that one page takes in stage: 0 when both K and V are F16 and are read where they are. */
size_t attn_stage_halves(const struct gpu_kv *kv);
cudaError_t attn_prefill_launch(const struct attn_prefill_args *a, cudaStream_t st);

#ifdef __cplusplus
}
#endif
#endif
