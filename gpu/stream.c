/* stream.c: streams, events and time on the device. See gpu.h. */
#include "core/err.h"
#include "gpu/impl.h"

#include <stdlib.h>

int gpu_stream_open(struct gpu_stream **out, struct gpu *g) {
    if (g->lost) return gpu_is_lost(g);
    int rc = 0;
    struct gpu_stream *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "GPU %d: out of host memory", g->index);
    s->g = g;
    GPU_TRY(g, cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking), 0);
    *out = s;
    return 0;
out:
    gpu_stream_close(s);
    return rc;
}

void gpu_stream_close(struct gpu_stream *s) {
    if (!s) return;
    if (s->s) (void)cudaStreamDestroy(s->s);
    (void)cudaGetLastError();
    free(s);
}

int gpu_stream_sync(struct gpu_stream *s) {
    int rc = 0;
    if (s->g->lost) return gpu_is_lost(s->g);
    GPU_TRY(s->g, cudaStreamSynchronize(s->s), 0);
out:
    return rc;
}

int gpu_event_open(struct gpu_event **out, struct gpu *g, enum gpu_event_kind kind) {
    if (g->lost) return gpu_is_lost(g);
    int rc = 0;
    struct gpu_event *e = calloc(1, sizeof *e);
    if (!e) return err_set(ERR_NOMEM, "GPU %d: out of host memory", g->index);
    e->g = g;
    GPU_TRY(g, cudaEventCreateWithFlags(&e->e, kind == GPU_EVENT_TIMED ? cudaEventDefault : cudaEventDisableTiming), 0);
    *out = e;
    return 0;
out:
    gpu_event_close(e);
    return rc;
}

void gpu_event_close(struct gpu_event *e) {
    if (!e) return;
    if (e->e) (void)cudaEventDestroy(e->e);
    (void)cudaGetLastError();
    free(e);
}

int gpu_event_record(struct gpu_event *e, struct gpu_stream *s) {
    int rc = 0;
    if (e->g->lost) return gpu_is_lost(e->g);
    GPU_TRY(e->g, cudaEventRecord(e->e, s->s), 0);
out:
    return rc;
}

int gpu_stream_wait(struct gpu_stream *s, struct gpu_event *e) {
    int rc = 0;
    if (e->g->lost) return gpu_is_lost(e->g);
    GPU_TRY(e->g, cudaStreamWaitEvent(s->s, e->e, cudaEventWaitDefault), 0);
out:
    return rc;
}

int gpu_event_sync(struct gpu_event *e) {
    int rc = 0;
    if (e->g->lost) return gpu_is_lost(e->g);
    GPU_TRY(e->g, cudaEventSynchronize(e->e), 0);
out:
    return rc;
}

int gpu_event_done(struct gpu_event *e, bool *done) {
    int rc = 0;
    *done = false;
    if (e->g->lost) return gpu_is_lost(e->g);
    cudaError_t err = cudaEventQuery(e->e);
    *done = err == cudaSuccess;
    if (err == cudaErrorNotReady) (void)cudaGetLastError();
    else GPU_TRY(e->g, err, 0);
out:
    return rc;
}

int gpu_event_seconds(double *s, struct gpu_event *from, struct gpu_event *to) {
    int rc = 0;
    float ms = 0;
    if (from->g->lost) return gpu_is_lost(from->g);
    GPU_TRY(from->g, cudaEventElapsedTime(&ms, from->e, to->e), 0);
    *s = (double)ms / 1e3;
out:
    return rc;
}
