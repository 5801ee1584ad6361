/* demo_host.c: host code in C against the shadow headers, as gpu/'s is: a step that asks the host in its middle, captured as
 * a graph and replayed. */
#include "tests/emu/demo.h"

#include "gpu/compat.h"

#include <cublas_v2.h>
#include <cuda.h>

typedef CUresult (*batch_fn)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

/* h_ask and h_answer [dim] and flag [2] are mapped memory; flag[0]: asked, flag[1]: answered. */
static cudaError_t queue_step(float *d_x, const float *d_w, int dim, float *h_ask, float *h_answer, uint32_t *flag,
                              cudaStream_t st, batch_fn batch) {
    CUstreamBatchMemOpParams op[3] = {0};
    cudaError_t e = demo_rmsnorm(h_ask, d_x, d_w, 1, dim, 0.0f, st);
    if (e) return e;
    op[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op[0].writeValue.address = (CUdeviceptr)(uintptr_t)&flag[0];
    op[0].writeValue.value = 1;
    if (batch((CUstream)st, 1, op, 0)) return cudaErrorUnknown;
    op[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    op[1].waitValue.address = (CUdeviceptr)(uintptr_t)&flag[1];
    op[1].waitValue.value = 1;
    op[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    op[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32; /* reset, in the same node as the wait */
    op[2].writeValue.address = op[1].waitValue.address;
    if (batch((CUstream)st, 2, op + 1, 0)) return cudaErrorUnknown;
    return demo_rmsnorm(d_x, h_answer, d_w, 1, dim, 0.0f, st);
}

int demo_host_steps(float *d_x, const float *d_w, int dim, float *h_ask, float *h_answer, uint32_t *flag, int n_step) {
    cudaStream_t st = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    void *batch = NULL;
    enum cudaDriverEntryPointQueryResult found;
    int bad = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &batch, 12000, cudaEnableDefault, &found) ||
              cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking) ||
              cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal);
    if (bad) return -1;
    bad = queue_step(d_x, d_w, dim, h_ask, h_answer, flag, st, (batch_fn)batch) != cudaSuccess;
    bad = cudaStreamEndCapture(st, &graph) || bad;
    bad = bad || cudaGraphInstantiateWithFlags(&exec, graph, 0);
    for (int i = 0; i < n_step && !bad; i++) {
        bad = cudaGraphLaunch(exec, st) != cudaSuccess;
        if (bad) break;
        gpu_host_flag_wait(&flag[0], 1);
        for (int j = 0; j < dim; j++) h_answer[j] = 3.0f * h_ask[j] + 1.0f;
        gpu_host_flag_store(&flag[0], 0);
        gpu_host_flag_store(&flag[1], 1);
    }
    bad = cudaStreamSynchronize(st) || bad;
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    cudaStreamDestroy(st);
    return bad ? -1 : 0;
}
