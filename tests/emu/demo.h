/* demo.h: launchers of demo.cu. Pointers are device memory; errors are those of the launch. */
#ifndef EMU_DEMO_H
#define EMU_DEMO_H

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif
cudaError_t demo_rmsnorm(float *d_y /* [rows, dim] */, const float *d_x, const float *d_w /* [dim] */, int rows, int dim,
                         float eps, cudaStream_t st);
/* d_c [m, n] float = d_a [m, k] d_b [n, k]^T, half; m and n multiples of 64, k of 32. */
cudaError_t demo_gemm(float *d_c, const void *d_a, const void *d_b, int m, int n, int k, cudaStream_t st);
/* d_d [16, 8] float = d_a [16, 16] d_b [8, 16]^T, half. */
cudaError_t demo_mma(float *d_d, const void *d_a, const void *d_b, cudaStream_t st);
#ifdef __cplusplus
}
#endif
#endif
