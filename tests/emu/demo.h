/* demo.h: launchers of demo.cu. Pointers are device memory; errors are those of the launch. */
#ifndef EMU_DEMO_H
#define EMU_DEMO_H

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
cudaError_t demo_rmsnorm(float *d_y /* [rows, dim] */, const float *d_x, const float *d_w /* [dim] */, int rows, int dim,
                         float eps, cudaStream_t st);
/* d_c [m, n] float = d_a [m, k] d_b [n, k]^T, half; m and n multiples of 64, k of 32. */
cudaError_t demo_gemm(float *d_c, const void *d_a, const void *d_b, int m, int n, int k, cudaStream_t st);
/* d_d [16, 8] float = d_a [16, 16] d_b [8, 16]^T, half. */
cudaError_t demo_mma(float *d_d, const void *d_a, const void *d_b, cudaStream_t st);
/* demo_host.c: n_step times x = norm(3 norm(x) + 1), the affine part by the host in the middle of the step. h_ask, h_answer
 * [dim] and flag [2] (0 before and after) are mapped memory. 0 or -1. */
int demo_host_steps(float *d_x, const float *d_w, int dim, float *h_ask, float *h_answer, uint32_t *flag, int n_step);
#ifdef __cplusplus
}
#endif
#endif
