/* demo.cu: small kernels in the project's dialect, built by nvcc and against the emulator: the same text. The emulator's
 * tests run them; they are no part of the engine. Prototypes in demo.h. */
#include "tests/emu/demo.h"

#include "gpu/compat.h"
#include "gpu/ptx.h"

#include <mma.h>

/* y[row] = w * x[row] / sqrt(mean(x[row]^2) + eps). One block of 256 threads per row. Bound by reading x once. */
static __global__ void demo_rmsnorm_k(float *y, const float *x, const float *w, int dim, float eps) {
    SMEM_ARRAY(float, part, [8]);
    const float *xr = x + (size_t)blockIdx.x * dim;
    float s = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) s += xr[i] * xr[i];
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < 8; i++) s += part[i];
    float scale = rsqrtf(s / dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) y[(size_t)blockIdx.x * dim + i] = w[i] * xr[i] * scale;
}

/* C[m, n] = A[m, k] B[n, k]^T, half in, float out; m, n, k multiples of 64, 64, 32. A block of 4 warps owns 64 x 64 of C;
 * tiles of 64 x 32 halves of A and B are double-buffered in shared memory (2 x 2 x 64 x 40 x 2 = 20 KiB dynamic). */
enum { DEMO_K = 32, DEMO_LD = 40 };
static __device__ void demo_tile(half *dst, const half *src, int ld, int k0) {
    for (int i = threadIdx.x; i < 64 * DEMO_K / 8; i += blockDim.x) {
        int row = i / (DEMO_K / 8), col = i % (DEMO_K / 8) * 8;
        cp_async16(dst + row * DEMO_LD + col, src + (size_t)row * ld + k0 + col);
    }
}
static __global__ void demo_gemm_k(float *c, const half *a, const half *b, int n, int k) {
    using namespace nvcuda;
    SMEM_DYN(half, tiles);
    const half *ar = a + (size_t)blockIdx.y * 64 * k, *br = b + (size_t)blockIdx.x * 64 * k;
    auto tile = [&](int which, int slot) { return tiles + (which * 2 + slot) * 64 * DEMO_LD; };
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[4];
    for (int j = 0; j < 4; j++) wmma::fill_fragment(acc[j], 0.0f);
    int warp = threadIdx.x / 32;
    demo_tile(tile(0, 0), ar, k, 0);
    demo_tile(tile(1, 0), br, k, 0);
    cp_async_commit();
    for (int k0 = 0; k0 < k; k0 += DEMO_K) {
        int slot = k0 / DEMO_K & 1;
        if (k0 + DEMO_K < k) {
            demo_tile(tile(0, slot ^ 1), ar, k, k0 + DEMO_K);
            demo_tile(tile(1, slot ^ 1), br, k, k0 + DEMO_K);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        for (int kk = 0; kk < DEMO_K; kk += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
            wmma::load_matrix_sync(fa, tile(0, slot) + warp * 16 * DEMO_LD + kk, DEMO_LD);
            for (int j = 0; j < 4; j++) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
                wmma::load_matrix_sync(fb, tile(1, slot) + j * 16 * DEMO_LD + kk, DEMO_LD);
                wmma::mma_sync(acc[j], fa, fb, acc[j]);
            }
        }
        __syncthreads(); /* the next round overwrites this slot's sibling, the one after it this slot */
    }
    float *cr = c + ((size_t)blockIdx.y * 64 + warp * 16) * n + blockIdx.x * 64;
    for (int j = 0; j < 4; j++) wmma::store_matrix_sync(cr + j * 16, acc[j], n, wmma::mem_row_major);
}

/* D[16, 8] = A[16, 16] B[8, 16]^T by one mma, operands through ldmatrix. */
static __global__ void demo_mma_k(float *d, const half *a, const half *b) {
#if GPU_ARCH >= 800
    SMEM_ARRAY(half, sa, [16][16]);
    SMEM_ARRAY(half, sb, [8][16]);
    int l = threadIdx.x;
    for (int i = l; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (int i = l; i < 128; i += 32) sb[i / 16][i % 16] = b[i];
    __syncwarp();
    uint32_t ra[4], rb[2];
    float r[4] = {0, 0, 0, 0};
    ldmatrix_x4(ra, &sa[l % 16][l / 16 * 8]);
    ldmatrix_x2(rb, &sb[l % 8][l / 8 % 2 * 8]);
    mma_f16_16816(r, ra, rb);
    int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = r[i];
#else
    int l = threadIdx.x;
    for (int i = l; i < 128; i += 32) {
        float s = 0;
        for (int k = 0; k < 16; k++) s += __half2float(a[i / 8 * 16 + k]) * __half2float(b[i % 8 * 16 + k]);
        d[i] = s;
    }
#endif
}

cudaError_t demo_rmsnorm(float *d_y, const float *d_x, const float *d_w, int rows, int dim, float eps, cudaStream_t st) {
    GPU_COST(8.0 * rows * dim, 3.0 * rows * dim, GPU_UNIT_F32);
    return GPU_LAUNCH(demo_rmsnorm_k, dim3(rows), dim3(256), 0, st, d_y, d_x, d_w, dim, eps);
}

cudaError_t demo_gemm(float *d_c, const void *d_a, const void *d_b, int m, int n, int k, cudaStream_t st) {
    GPU_COST(2.0 * k * (m + n) + 4.0 * m * n, 2.0 * m * n * k, GPU_UNIT_TENSOR);
    return GPU_LAUNCH(demo_gemm_k, dim3(n / 64, m / 64), dim3(128), 4 * 64 * DEMO_LD * sizeof(half), st, d_c,
                      static_cast<const half *>(d_a), static_cast<const half *>(d_b), n, k);
}

cudaError_t demo_mma(float *d_d, const void *d_a, const void *d_b, cudaStream_t st) {
    GPU_COST(1280, 4096, GPU_UNIT_TENSOR);
    return GPU_LAUNCH(demo_mma_k, dim3(1), dim3(32), 0, st, d_d, static_cast<const half *>(d_a), static_cast<const half *>(d_b));
}
