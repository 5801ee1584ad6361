/* impl.h: what the C files of gpu/ share. Nobody outside gpu/ includes this. */
#ifndef LH_GPU_IMPL_H
#define LH_GPU_IMPL_H

#include "gpu/compat.h"
#include "gpu/gpu.h"

struct gpu {
    int index;
    struct gpu_info info;
    bool lost; /* an error that the device does not recover from: nothing more is asked of it */
};
struct gpu_stream {
    struct gpu *g;
    cudaStream_t s;
};
struct gpu_event {
    struct gpu *g;
    cudaEvent_t e;
};

/* Records a failed call (its text, the bytes it was about, free device memory), clears the runtime's error and marks the
 * device as lost where it is. Returns the code: ERR_BUDGET for memory, else ERR_DEVICE. */
int gpu_failed(struct gpu *g, cudaError_t e, const char *call, size_t bytes);
/* ERR_DEVICE with a sentence. */
int gpu_is_lost(const struct gpu *g);

/* rc = 0 or the code of a failed runtime call; jumps to `out` when it failed. */
#define GPU_TRY(g, call, bytes)                                                                                        \
    do {                                                                                                               \
        cudaError_t gpu_try_e = (call);                                                                                \
        if (gpu_try_e != cudaSuccess) {                                                                                \
            rc = gpu_failed(g, gpu_try_e, #call, bytes);                                                               \
            goto out;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* --- gemm.c: products of many tokens ------------------------------------------------------------------------------------- */

/* As gpu_failed, of a cublasStatus_t. */
int gpu_blas_failed(struct gpu *g, int status, const char *call);

struct gpu_gemm;
/* d_workspace, d_pass: the scratch of gpu_scratch_of; what lies in `pass` is used during a call only. */
int gpu_gemm_open(struct gpu_gemm **out, struct gpu *g, struct gpu_stream *s, const struct ops_limits *l, void *d_workspace,
                  void *d_pass);
void gpu_gemm_close(struct gpu_gemm *m);

struct gpu_mat;
/* The matmul of core/ops.h, shapes already checked; w[i] is m->out[i].w. */
int gpu_gemm_matmul(struct gpu_gemm *m, const struct matmul *a, const struct gpu_mat *w);
/* The expert products of many tokens. group: sorts the choices of a call; product: y[choice] = W[expert] x[choice / x_div]
 * from f32 rows x; `again`: the same rows as in the last call, which are still there as half. */
int gpu_gemm_group(struct gpu_gemm *m, const int32_t *d_ids, int n_choice, int n_expert, unsigned long long *d_bad);
enum gpu_gemm_input { GEMM_NEW_ROWS, GEMM_SAME_ROWS };
int gpu_gemm_experts(struct gpu_gemm *m, float *y, const struct gpu_mat *w, size_t expert_bytes, const float *x, int n_row, int x_div,
                     enum gpu_gemm_input input);

#endif
