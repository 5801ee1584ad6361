/* gpu_dev.h: a device with its operations, for tests of the GPU back end, and copies to and from it. Include after
 * tests/support.h, in programs built with LH_GPU. */
#ifndef LH_TESTS_GPU_DEV_H
#define LH_TESTS_GPU_DEV_H

#include "gpu/gpu.h"
#include "tests/gpu_orders.h"

/* One stream, and the operations opened for some limits. */
struct dev {
    struct gpu *g;
    struct gpu_arena *arena;
    struct gpu_stream *stream;
    struct gpu_ops *ops;
    struct ops *t;
    size_t mark; /* of the arena: what is carved for a case goes after it */
};

static inline void dev_open(struct dev *d, const struct ops_limits *l, size_t data_bytes) {
    ok(gpu_open(&d->g, 0));
    ok(gpu_arena_open(&d->arena, d->g, data_bytes + gpu_ops_scratch_bytes(l)));
    ok(gpu_stream_open(&d->stream, d->g));
    ok(gpu_ops_open(&d->ops, d->g, d->arena, d->stream, l));
    d->t = gpu_ops_table(d->ops);
    d->mark = gpu_arena_used(d->arena);
}

static inline void dev_close(struct dev *d) {
    gpu_ops_close(d->ops);
    gpu_stream_close(d->stream);
    gpu_arena_close(d->arena);
    gpu_close(d->g);
}

/* Copies from and to plain host memory, done when they return. */
static inline void dev_write(struct dev *d, void *d_dst, const void *src, size_t bytes) {
    void *pinned;
    ok(gpu_host_alloc(&pinned, d->g, bytes));
    memcpy(pinned, src, bytes);
    ok(gpu_copy_in(d->stream, d_dst, pinned, bytes));
    ok(gpu_stream_sync(d->stream));
    gpu_host_free(d->g, pinned);
}

static inline void dev_read(struct dev *d, void *dst, const void *d_src, size_t bytes) {
    void *pinned;
    ok(gpu_host_alloc(&pinned, d->g, bytes));
    ok(gpu_copy_out(d->stream, pinned, d_src, bytes));
    ok(gpu_stream_sync(d->stream));
    memcpy(dst, pinned, bytes);
    gpu_host_free(d->g, pinned);
}

/* Device memory for the case at hand, a copy of src or (NULL) NaN. */
static inline void *dev_new(struct dev *d, const void *src, size_t bytes) {
    void *p, *gap;
    ok(gpu_alloc(&p, d->arena, bytes, "test data"));
    ok(gpu_alloc(&gap, d->arena, 1, "a gap behind it")); /* no kernel is given its address */
    if (src) dev_write(d, p, src, bytes);
    else ok(gpu_fill(d->stream, p, 0xff, bytes));
    return p;
}

static inline void dev_next_case(struct dev *d) {
    ok(gpu_stream_sync(d->stream));
    gpu_arena_release(d->arena, d->mark);
}

#endif
