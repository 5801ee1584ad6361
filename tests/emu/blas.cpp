/* blas.cpp: the cuBLAS subset. C = alpha op(A) op(B) + beta C, column-major, computed in f32 (int32 for int8) whatever the
 * compute type says, as an operation of the handle's stream. A handle takes 8 MiB of device memory, as the real one takes
 * some. alpha and beta are read at the call (host pointer mode only). */
#include "runtime.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

struct cublasContext { cudaStream_t stream; void *own; };

struct matrix { char *p; cudaDataType type; int rows, cols, ld; long long stride; };

static size_t elem(cudaDataType t) { return t == CUDA_R_8I ? 1 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 4; }
static size_t extent(const matrix &m, int count) {
    if (!m.rows || !m.cols || !count) return 0;
    return ((size_t)m.stride * (size_t)(count - 1) + (size_t)m.ld * (size_t)(m.cols - 1) + (size_t)m.rows) * elem(m.type);
}

static float get(const char *p, cudaDataType t, size_t i) {
    switch (t) {
    case CUDA_R_16F: return (float)reinterpret_cast<const half *>(p)[i];
    case CUDA_R_16BF: return (float)reinterpret_cast<const nv_bfloat16 *>(p)[i];
    case CUDA_R_8I: return (float)reinterpret_cast<const int8_t *>(p)[i];
    case CUDA_R_32I: return (float)reinterpret_cast<const int32_t *>(p)[i];
    default: return reinterpret_cast<const float *>(p)[i];
    }
}
static void put(char *p, cudaDataType t, size_t i, float v) {
    switch (t) {
    case CUDA_R_16F: reinterpret_cast<half *>(p)[i] = half(v); break;
    case CUDA_R_16BF: reinterpret_cast<nv_bfloat16 *>(p)[i] = nv_bfloat16(v); break;
    default: reinterpret_cast<float *>(p)[i] = v;
    }
}

/* op(x) as [rows, cols] row-major floats of T. */
template <class T> static std::vector<T> gather(const matrix &x, const char *p, bool trans) {
    int rows = trans ? x.cols : x.rows, cols = trans ? x.rows : x.cols;
    std::vector<T> v((size_t)rows * (size_t)cols);
    for (int c = 0; c < x.cols; c++)
        for (int r = 0; r < x.rows; r++) {
            float e = get(p, x.type, (size_t)c * (size_t)x.ld + (size_t)r);
            v[trans ? (size_t)c * (size_t)cols + (size_t)r : (size_t)r * (size_t)cols + (size_t)c] = (T)e;
        }
    return v;
}

template <class T> static void multiply(const matrix &a, bool ta, const matrix &b, bool tb, const matrix &c, int k, int count,
                                        double alpha, double beta) {
    for (int i = 0; i < count; i++) {
        std::vector<T> x = gather<T>(a, a.p + (size_t)(i * a.stride) * elem(a.type), ta);   /* [m, k] */
        std::vector<T> y = gather<T>(b, b.p + (size_t)(i * b.stride) * elem(b.type), !tb);  /* [n, k] */
        char *out = c.p + (size_t)(i * c.stride) * elem(c.type);
        for (int col = 0; col < c.cols; col++)
            for (int row = 0; row < c.rows; row++) {
                const T *u = &x[(size_t)row * (size_t)k], *v = &y[(size_t)col * (size_t)k];
                T part[8] = {};
                int j = 0;
                for (; j + 8 <= k; j += 8)
                    for (int l = 0; l < 8; l++) part[l] += u[j + l] * v[j + l];
                T s = 0;
                for (int l = 0; l < 8; l++) s += part[l];
                for (; j < k; j++) s += u[j] * v[j];
                size_t at = (size_t)col * (size_t)c.ld + (size_t)row;
                if (c.type == CUDA_R_32I) {
                    int32_t *p = reinterpret_cast<int32_t *>(out) + at;
                    *p = (int32_t)alpha * (int32_t)s + (beta != 0 ? (int32_t)beta * *p : 0);
                } else {
                    float old = beta != 0 ? (float)beta * get(out, c.type, at) : 0.0f;
                    put(out, c.type, at, (float)alpha * (float)s + old);
                }
            }
    }
}

static cublasStatus_t status(cudaError_t e) {
    return !e                             ? CUBLAS_STATUS_SUCCESS
           : e == cudaErrorMemoryAllocation ? CUBLAS_STATUS_ALLOC_FAILED
           : e == cudaErrorInvalidValue     ? CUBLAS_STATUS_INVALID_VALUE
                                            : CUBLAS_STATUS_EXECUTION_FAILED;
}

static bool place(matrix *m, int count, const void *p) {
    mem_kind k;
    return memory_resolve(p, extent(*m, count), &k, &m->p) && k == MEM_DEVICE;
}

static cublasStatus_t gemm(cublasHandle_t h, bool ta, bool tb, int m, int n, int k, double alpha, const void *pa, matrix a,
                           const void *pb, matrix b, double beta, void *pc, matrix c, int count) {
    api call("cublasGemm", launch_s(), cudaErrorUnknown);
    if (call.err) return status(call.err);
    if (!h || !stream_valid(h->stream)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || count < 0 || a.ld < std::max(1, a.rows) || b.ld < std::max(1, b.rows) || c.ld < std::max(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!m || !n || !count) return CUBLAS_STATUS_SUCCESS;
    if (!place(&a, count, pa) || !place(&b, count, pb) || !place(&c, count, pc))
        emu_report("cuBLAS: an operand is not inside device memory: A %p, B %p, C %p (m %d, n %d, k %d, ld %d %d %d)", pa, pb, pc,
                   m, n, k, a.ld, b.ld, c.ld);
    op_ref o = op_new(OP_KERNEL, "cublas gemm", h->stream);
    double flops = 2.0 * m * n * k * count;
    o->bytes = (double)(extent(a, count) + extent(b, count) + extent(c, count));
    o->eng = ENGINE_COMPUTE;
    o->dur = vt_kernel_s(o->bytes, flops, a.type == CUDA_R_32F ? EMU_F32 : EMU_TENSOR);
    o->gap = rt().machine.gap_us * 1e-6;
    rt().stats.launches++;
    rt().stats.cost_bytes += o->bytes;
    rt().stats.cost_flops += flops;
    if (!rt().dry)
        o->body = [=] {
            if (a.type == CUDA_R_8I)
                multiply<int32_t>(a, ta, b, tb, c, k, count, alpha, beta);
            else
                multiply<float>(a, ta, b, tb, c, k, count, alpha, beta);
            tsan_read(a.p, extent(a, count));
            tsan_read(b.p, extent(b, count));
            tsan_write(c.p, extent(c, count));
        };
    return status(op_enqueue(o));
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType at, int lda, long long sa, const void *b,
                                          cudaDataType bt, int ldb, long long sb, const void *beta, void *c, cudaDataType ct, int ldc,
                                          long long sc, int count, cublasComputeType_t compute, cublasGemmAlgo_t) {
    bool ints = compute == CUBLAS_COMPUTE_32I;
    if (at != bt || ints != (at == CUDA_R_8I) || ints != (ct == CUDA_R_32I) || (ints && ((lda | ldb) % 4 || device_sm() < 72)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (at == CUDA_R_16BF && device_sm() < 80) return CUBLAS_STATUS_ARCH_MISMATCH;
    double al, be; /* of the compute type: half for COMPUTE_16F */
    if (ints)
        al = *static_cast<const int32_t *>(alpha), be = *static_cast<const int32_t *>(beta);
    else if (compute == CUBLAS_COMPUTE_16F)
        al = (float)*static_cast<const half *>(alpha), be = (float)*static_cast<const half *>(beta);
    else
        al = *static_cast<const float *>(alpha), be = *static_cast<const float *>(beta);
    bool tra = ta != CUBLAS_OP_N, trb = tb != CUBLAS_OP_N;
    matrix ma = {nullptr, at, tra ? k : m, tra ? m : k, lda, sa}, mb = {nullptr, bt, trb ? n : k, trb ? k : n, ldb, sb};
    return gemm(h, tra, trb, m, n, k, al, a, ma, b, mb, be, c, {nullptr, ct, m, n, ldc, sc}, count);
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
                            const void *a, cudaDataType at, int lda, const void *b, cudaDataType bt, int ldb, const void *beta,
                            void *c, cudaDataType ct, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1, compute, algo);
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                              const float *alpha, const float *a, int lda, const float *b, int ldb, const float *beta, float *c,
                              int ldc) {
    return cublasGemmEx(h, ta, tb, m, n, k, alpha, a, CUDA_R_32F, lda, b, CUDA_R_32F, ldb, beta, c, CUDA_R_32F, ldc,
                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *h) {
    api call("cublasCreate", 100e-6, cudaErrorMemoryAllocation);
    *h = nullptr;
    if (call.err) return call.err == cudaErrorMemoryAllocation ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_NOT_INITIALIZED;
    void *own = memory_alloc(8 << 20);
    if (!own) return CUBLAS_STATUS_ALLOC_FAILED;
    *h = new cublasContext{nullptr, own};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    api call("cublasDestroy", 10e-6, cudaErrorUnknown);
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    memory_free(h->own);
    delete h;
    return status(call.err);
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t st) {
    api call("cublasSetStream", 0, cudaErrorUnknown);
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (call.err) return status(call.err);
    h->stream = st;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *p, size_t bytes) {
    api call("cublasSetWorkspace", 0, cudaErrorUnknown);
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (call.err) return status(call.err);
    mem_kind k;
    char *s;
    return !bytes || (memory_resolve(p, bytes, &k, &s) && k == MEM_DEVICE) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t) { return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED; }
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) {
    return !h ? CUBLAS_STATUS_NOT_INITIALIZED : mode == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t h, int *version) {
    *version = 130000;
    return h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
const char *cublasGetStatusName(cublasStatus_t s) {
    switch (s) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_EXECUTION_FAILED";
    }
}
const char *cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }
