/* probe.c: what a card's matrix units reach: the rate that products are compared with. See gpu.h. */
#include "core/err.h"
#include "core/mem.h"
#include "gpu/impl.h"

#include <cublas_v2.h>

int gpu_probe_gemm(double *s, struct gpu_arena *a, struct gpu_stream *st, int m, int n, int k, int reps) {
    struct gpu *g = st->g;
    struct gpu_event *from = NULL, *to = NULL;
    cublasHandle_t blas = NULL;
    size_t mark = gpu_arena_used(a);
    void *d_w = NULL, *d_x = NULL, *d_y = NULL;
    const float one = 1, zero = 0;
    cublasStatus_t b = CUBLAS_STATUS_SUCCESS;
    if (m < 1 || n < 1 || k < 1 || reps < 1) return err_set(ERR_ARG, "GPU %d: a product of %d x %d x %d, %d times", g->index, m, n, k, reps);
    int rc = gpu_alloc(&d_w, a, size_mul3((size_t)m, (size_t)k, 2), "probe weights");
    if (!rc) rc = gpu_alloc(&d_x, a, size_mul3((size_t)n, (size_t)k, 2), "probe input");
    if (!rc) rc = gpu_alloc(&d_y, a, size_mul3((size_t)n, (size_t)m, 4), "probe output");
    if (!rc) rc = gpu_event_open(&from, g, GPU_EVENT_TIMED);
    if (!rc) rc = gpu_event_open(&to, g, GPU_EVENT_TIMED);
    /* f16 0x2424 and 0x2828, about 0.016 and 0.033: a matrix of zeros draws less power than any real one */
    if (!rc) rc = gpu_fill(st, d_w, 0x24, (size_t)m * (size_t)k * 2);
    if (!rc) rc = gpu_fill(st, d_x, 0x28, (size_t)n * (size_t)k * 2);
    if (!rc && (b = cublasCreate(&blas))) rc = gpu_blas_failed(g, (int)b, "cublasCreate");
    if (!rc && (b = cublasSetStream(blas, st->s))) rc = gpu_blas_failed(g, (int)b, "cublasSetStream");
    for (int i = -1; i < reps && !rc; i++) { /* the first is not timed: it picks and loads a kernel */
        if (i == 0) rc = gpu_event_record(from, st);
        if (!rc && (b = cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &one, d_w, CUDA_R_16F, k, d_x, CUDA_R_16F, k, &zero, d_y,
                                     CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT)))
            rc = gpu_blas_failed(g, (int)b, "cublasGemmEx");
    }
    if (!rc) rc = gpu_event_record(to, st);
    if (!rc) rc = gpu_event_sync(to);
    if (!rc) rc = gpu_event_seconds(s, from, to);
    if (!rc) *s /= reps;
    else (void)gpu_stream_sync(st); /* nothing may still read what is given back */
    if (blas) (void)cublasDestroy(blas);
    gpu_event_close(from), gpu_event_close(to);
    gpu_arena_release(a, mark);
    return rc;
}
