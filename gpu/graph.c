/* graph.c: work of a stream recorded once and launched many times. See gpu.h. */
#include "core/err.h"
#include "gpu/impl.h"

#include <stdlib.h>

struct gpu_graph {
    struct gpu *g;
    cudaGraphExec_t exec;
};

int gpu_graph_begin(struct gpu_stream *s) {
    int rc = 0;
    if (s->g->lost) return gpu_is_lost(s->g);
    /* other threads may allocate meanwhile */
    GPU_TRY(s->g, cudaStreamBeginCapture(s->s, cudaStreamCaptureModeThreadLocal), 0);
out:
    return rc;
}

int gpu_graph_end(struct gpu_graph **out, struct gpu_stream *s) {
    int rc = 0;
    cudaGraph_t recorded = NULL;
    struct gpu_graph *q = calloc(1, sizeof *q);
    if (q) q->g = s->g;
    /* without memory, and with a lost device, as well: the stream must work again, or at least close */
    GPU_TRY(s->g, cudaStreamEndCapture(s->s, &recorded), 0);
    if (s->g->lost) {
        rc = gpu_is_lost(s->g);
        goto out;
    }
    if (!q) rc = err_set(ERR_NOMEM, "GPU %d: out of host memory", s->g->index);
    else GPU_TRY(s->g, cudaGraphInstantiateWithFlags(&q->exec, recorded, 0), 0);
out:
    if (recorded) (void)cudaGraphDestroy(recorded);
    if (rc) {
        gpu_graph_close(q);
        return rc;
    }
    *out = q;
    return 0;
}

int gpu_graph_launch(struct gpu_graph *q, struct gpu_stream *s) {
    int rc = 0;
    if (q->g->lost) return gpu_is_lost(q->g);
    GPU_TRY(q->g, cudaGraphLaunch(q->exec, s->s), 0);
out:
    return rc;
}

void gpu_graph_close(struct gpu_graph *q) {
    if (!q) return;
    if (q->exec) (void)cudaGraphExecDestroy(q->exec);
    (void)cudaGetLastError();
    free(q);
}
