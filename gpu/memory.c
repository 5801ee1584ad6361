/* memory.c: the arena in device memory, page-locked host memory, copies. See gpu.h. */
#include "core/err.h"
#include "core/mem.h"
#include "gpu/impl.h"

#include <stdlib.h>

struct gpu_arena {
    struct gpu *g;
    unsigned char *d_base;
    size_t bytes, used;
};

int gpu_arena_open(struct gpu_arena **out, struct gpu *g, size_t bytes) {
    if (g->lost) return gpu_is_lost(g);
    if (bytes == 0) return err_set(ERR_ARG, "GPU %d: an arena of 0 bytes", g->index);
    int rc = 0;
    struct gpu_arena *a = calloc(1, sizeof *a);
    if (!a) return err_set(ERR_NOMEM, "GPU %d: out of host memory", g->index);
    a->g = g;
    GPU_TRY(g, cudaMalloc((void **)&a->d_base, bytes), bytes);
    a->bytes = bytes;
    *out = a;
    return 0;
out:
    gpu_arena_close(a);
    return rc;
}

void gpu_arena_close(struct gpu_arena *a) {
    if (!a) return;
    if (a->d_base) (void)cudaFree(a->d_base);
    (void)cudaGetLastError();
    free(a);
}

int gpu_alloc(void **d_p, struct gpu_arena *a, size_t bytes, const char *what) {
    size_t need;
    if (a->g->lost) return gpu_is_lost(a->g);
    if (!size_align_up(&need, bytes ? bytes : 1, GPU_ALIGN) || need > a->bytes - a->used)
        return err_set(ERR_BUDGET, "GPU %d: %s of %zu bytes: %zu of the arena's %zu are left", a->g->index, what, bytes,
                       a->bytes - a->used, a->bytes);
    *d_p = a->d_base + a->used;
    a->used += need;
    gpu_piece_add(*d_p, bytes ? bytes : 1);
    return 0;
}

void gpu_arena_release(struct gpu_arena *a, size_t mark) {
    if (mark >= a->used) return;
    if (!a->g->lost) gpu_pieces_del(a->d_base + mark, a->used - mark); /* a lost device has not run what was queued */
    a->used = mark;
}

size_t gpu_arena_used(const struct gpu_arena *a) { return a->used; }

int gpu_pin(struct gpu *g, void *p, size_t bytes) {
    int rc = 0;
    if (g->lost) return gpu_is_lost(g);
    GPU_TRY(g, cudaHostRegister(p, bytes, cudaHostRegisterPortable), bytes);
out:
    return rc;
}

void gpu_unpin(struct gpu *g, void *p) {
    (void)g;
    (void)cudaHostUnregister(p);
    (void)cudaGetLastError();
}

int gpu_host_alloc(void **p, struct gpu *g, size_t bytes) {
    int rc = 0;
    if (g->lost) return gpu_is_lost(g);
    GPU_TRY(g, cudaHostAlloc(p, bytes, cudaHostAllocPortable), bytes);
out:
    return rc;
}

int gpu_mapped_alloc(void **p, void **d_p, struct gpu *g, size_t bytes) {
    int rc = 0;
    void *host = NULL;
    if (g->lost) return gpu_is_lost(g);
    GPU_TRY(g, cudaHostAlloc(&host, bytes, cudaHostAllocPortable | cudaHostAllocMapped), bytes);
    GPU_TRY(g, cudaHostGetDevicePointer(d_p, host, 0), bytes);
    *p = host;
    return 0;
out:
    if (host) gpu_host_free(g, host);
    return rc;
}

void gpu_host_free(struct gpu *g, void *p) {
    (void)g;
    if (p) (void)cudaFreeHost(p);
    (void)cudaGetLastError();
}

static int copy(struct gpu_stream *s, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
    int rc = 0;
    if (s->g->lost) return gpu_is_lost(s->g);
    if (bytes) GPU_TRY(s->g, cudaMemcpyAsync(dst, src, bytes, kind, s->s), bytes);
out:
    return rc;
}

int gpu_copy_in(struct gpu_stream *s, void *d_dst, const void *src, size_t bytes) {
    return copy(s, d_dst, src, bytes, cudaMemcpyHostToDevice);
}
int gpu_copy_out(struct gpu_stream *s, void *dst, const void *d_src, size_t bytes) {
    return copy(s, dst, d_src, bytes, cudaMemcpyDeviceToHost);
}
int gpu_copy_on(struct gpu_stream *s, void *d_dst, const void *d_src, size_t bytes) {
    return copy(s, d_dst, d_src, bytes, cudaMemcpyDeviceToDevice);
}

int gpu_fill(struct gpu_stream *s, void *d_dst, int byte, size_t bytes) {
    int rc = 0;
    if (s->g->lost) return gpu_is_lost(s->g);
    if (bytes) GPU_TRY(s->g, cudaMemsetAsync(d_dst, byte, bytes, s->s), bytes);
out:
    return rc;
}
