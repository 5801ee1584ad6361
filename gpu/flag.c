/* flag.c: hand-over between the streams of a card and threads of the CPU: flags in mapped memory, functions that a stream calls.
 * See gpu.h. Nothing but this file and its users' payload lies in mapped memory, and nothing else polls it. */
#include "core/err.h"
#include "gpu/impl.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

typedef CUresult (*batch_fn)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

enum { FLAG_BYTES = 128 }; /* a flag has two lines of the host's caches to itself: what is fetched ahead comes in pairs */

struct gpu_flags {
    struct gpu *g;
    unsigned char *base, *d_base;
    int n;
    batch_fn batch; /* the driver's stream memory operations: nothing links against the driver */
};

/* ERR_UNSUPPORTED: the driver has none. */
static int find_batch(struct gpu_flags *f) {
    enum cudaDriverEntryPointQueryResult found;
    void *fn = NULL;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &fn, 11070, cudaEnableDefault, &found);
#elif CUDART_VERSION >= 12000
    cudaError_t e = cudaGetDriverEntryPoint("cuStreamBatchMemOp", &fn, cudaEnableDefault, &found);
#else
    cudaError_t e = cudaGetDriverEntryPoint("cuStreamBatchMemOp", &fn, cudaEnableDefault);
    found = e == cudaSuccess ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
#endif
    if (e != cudaSuccess && e != cudaErrorSymbolNotFound) return gpu_failed(f->g, e, "cudaGetDriverEntryPoint(cuStreamBatchMemOp)", 0);
    (void)cudaGetLastError();
    if (e != cudaSuccess || found != cudaDriverEntryPointSuccess || !fn)
        return err_set(ERR_UNSUPPORTED, "GPU %d: its driver has no stream memory operations: hand over by events", f->g->index);
    memcpy(&f->batch, &fn, sizeof fn);
    return 0;
}

int gpu_flags_open(struct gpu_flags **out, struct gpu *g, int n) {
    if (g->lost) return gpu_is_lost(g);
    if (n < 1 || n > GPU_MAX_FLAGS) return err_set(ERR_ARG, "GPU %d: %d flags, must be 1..%d", g->index, n, GPU_MAX_FLAGS);
    int rc = 0;
    struct gpu_flags *f = calloc(1, sizeof *f);
    if (!f) return err_set(ERR_NOMEM, "GPU %d: out of host memory", g->index);
    f->g = g;
    f->n = n;
    rc = find_batch(f);
    if (!rc) rc = gpu_mapped_alloc((void **)&f->base, (void **)&f->d_base, g, (size_t)n * FLAG_BYTES);
    if (rc) {
        gpu_flags_close(f);
        return rc;
    }
    memset(f->base, 0, (size_t)n * FLAG_BYTES);
    *out = f;
    return 0;
}

void gpu_flags_close(struct gpu_flags *f) {
    if (!f) return;
    if (f->base) gpu_host_free(f->g, f->base);
    free(f);
}

static uint32_t *host_word(const struct gpu_flags *f, int i) { return (uint32_t *)(void *)(f->base + (size_t)i * FLAG_BYTES); }
static CUdeviceptr device_word(const struct gpu_flags *f, int i) {
    return (CUdeviceptr)(uintptr_t)(f->d_base + (size_t)i * FLAG_BYTES);
}

static int enqueue(struct gpu_flags *f, CUstreamBatchMemOpParams *op, unsigned n, struct gpu_stream *s) {
    if (f->g->lost) return gpu_is_lost(f->g);
    CUresult r = f->batch((CUstream)s->s, n, op, 0);
    if (r == CUDA_SUCCESS) return 0;
    if (r == CUDA_ERROR_NOT_SUPPORTED)
        return err_set(ERR_UNSUPPORTED, "GPU %d: its driver refuses stream memory operations: hand over by events", f->g->index);
    return gpu_failed(f->g, (cudaError_t)r, "cuStreamBatchMemOp", 0); /* the same numbers */
}

static CUstreamBatchMemOpParams write_op(const struct gpu_flags *f, int i, uint32_t value) {
    CUstreamBatchMemOpParams op = {0};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = device_word(f, i);
    op.writeValue.value = value;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT; /* after all memory traffic of the stream before it */
    return op;
}

int gpu_flag_signal(struct gpu_flags *f, int i, uint32_t value, struct gpu_stream *s) {
    CUstreamBatchMemOpParams op = write_op(f, i, value);
    return enqueue(f, &op, 1, s);
}

int gpu_flag_wait(struct gpu_flags *f, int i, uint32_t value, enum gpu_flag_after after, struct gpu_stream *s) {
    CUstreamBatchMemOpParams op[2] = {{0}};
    op[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op[0].waitValue.address = device_word(f, i);
    op[0].waitValue.value = value;
    op[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    op[1] = write_op(f, i, 0);
    return enqueue(f, op, after == GPU_FLAG_RESET ? 2 : 1, s);
}

void gpu_flag_host_signal(struct gpu_flags *f, int i, uint32_t value) { gpu_host_flag_store(host_word(f, i), value); }
void gpu_flag_host_wait(const struct gpu_flags *f, int i, uint32_t value) { gpu_host_flag_wait(host_word(f, i), value); }
bool gpu_flag_host_seen(const struct gpu_flags *f, int i, uint32_t value) {
    return (int32_t)(gpu_host_flag_load(host_word(f, i)) - value) >= 0;
}

int gpu_call_host(struct gpu_stream *s, void (*fn)(void *), void *arg) {
    int rc = 0;
    if (s->g->lost) return gpu_is_lost(s->g);
    GPU_TRY(s->g, cudaLaunchHostFunc(s->s, fn, arg), 0);
out:
    return rc;
}
