/* gpu.h: the GPU back end for the rest of the program: device, memory, streams, events, the operations table. No CUDA type.
 *
 * Device addresses are plain pointers named d_...: the host never follows them. A device, its arena and its streams belong
 * to one driver thread. Functions return 0 or a negative enum err; the sentence names the call, the sizes and the free
 * device memory. Not enough memory is ERR_BUDGET and leaves nothing behind. After an error that a device does not recover
 * from (a fault in a kernel, a lost card) every call returns ERR_DEVICE at once, and closing still works.
 * Closers accept NULL and half-made objects. gpu/none.c has the same functions for a build without CUDA. */
#ifndef LH_GPU_GPU_H
#define LH_GPU_GPU_H

#include "core/ops.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gpu;
struct gpu_arena;
struct gpu_stream;
struct gpu_event;
struct gpu_flags;
struct gpu_graph;
struct gpu_ops;

/* --- device ------------------------------------------------------------------------------------------------------------- */

struct gpu_info {
    char name[256];
    char pci[32];          /* domain:bus:device.function */
    int sm;                /* 10 * major + minor of the compute capability */
    int n_sm;              /* multiprocessors */
    int copy_engines;      /* copies that run beside kernels: 1 or 2 */
    int driver, runtime;   /* CUDA versions, 1000 * major + 10 * minor */
    size_t vram_bytes;     /* of the card */
    size_t l2_bytes;
    size_t smem_bytes;     /* most shared memory of a block */
    bool map_host;         /* pinned memory has device addresses */
};

/* Whether this build has a GPU back end. */
bool gpu_built(void);

/* *n = cards that the driver shows. 0 without a driver or card: that is no error. ERR_DEVICE: there is a driver and it does
 * not work with this program (too old: says which version is needed, and that -dev none runs on the CPU). */
int gpu_count(int *n);

/* What a card is, without opening it: no context, no device memory taken. ERR_ARG: no such card. */
int gpu_look(struct gpu_info *out, int index);

/* ERR_DEVICE: as above, or a chip that the kernels were not built for (says which architecture is missing). */
int gpu_open(struct gpu **out, int index);
void gpu_close(struct gpu *g);
const struct gpu_info *gpu_info(const struct gpu *g);
/* Device memory that is free now, for all programs. */
int gpu_mem_free(struct gpu *g, size_t *bytes);

/* --- memory ------------------------------------------------------------------------------------------------------------- */

/* One allocation that everything else is carved from. */
int gpu_arena_open(struct gpu_arena **out, struct gpu *g, size_t bytes);
void gpu_arena_close(struct gpu_arena *a);
/* Bytes rounded up to GPU_ALIGN, in order, never moved. ERR_BUDGET: the arena is full. */
enum { GPU_ALIGN = 256 };
int gpu_alloc(void **d_p, struct gpu_arena *a, size_t bytes, const char *what);
/* Forgets everything that was carved after the mark (a value of gpu_arena_used): two phases share an arena. The device must be
 * done with it: what is carved next may be used on another stream. */
void gpu_arena_release(struct gpu_arena *a, size_t mark);
size_t gpu_arena_used(const struct gpu_arena *a);

/* Page-locks host memory that exists (whole pages), so that copies are asynchronous. */
int gpu_pin(struct gpu *g, void *p, size_t bytes);
void gpu_unpin(struct gpu *g, void *p);
/* New page-locked host memory. */
int gpu_host_alloc(void **p, struct gpu *g, size_t bytes);
void gpu_host_free(struct gpu *g, void *p);

/* The same, with an address for kernels: what the CPU and kernels hand each other. Freed by gpu_host_free. */
int gpu_mapped_alloc(void **p, void **d_p, struct gpu *g, size_t bytes);

/* Copies in stream order. Host memory must be pinned and must not change (in) or be read (out) before the stream got there. */
int gpu_copy_in(struct gpu_stream *s, void *d_dst, const void *src, size_t bytes);
int gpu_copy_out(struct gpu_stream *s, void *dst, const void *d_src, size_t bytes);
int gpu_copy_on(struct gpu_stream *s, void *d_dst, const void *d_src, size_t bytes);
int gpu_fill(struct gpu_stream *s, void *d_dst, int byte, size_t bytes);

/* --- order and time ------------------------------------------------------------------------------------------------------ */

int gpu_stream_open(struct gpu_stream **out, struct gpu *g);
void gpu_stream_close(struct gpu_stream *s);
int gpu_stream_sync(struct gpu_stream *s); /* the host waits */

enum gpu_event_kind { GPU_EVENT_ORDER, GPU_EVENT_TIMED };
int gpu_event_open(struct gpu_event **out, struct gpu *g, enum gpu_event_kind kind);
void gpu_event_close(struct gpu_event *e);
int gpu_event_record(struct gpu_event *e, struct gpu_stream *s);
int gpu_stream_wait(struct gpu_stream *s, struct gpu_event *e); /* the stream waits, on the device */
int gpu_event_sync(struct gpu_event *e);                        /* the host waits */
int gpu_event_done(struct gpu_event *e, bool *done);
/* Seconds between two recorded events of kind TIMED that the host has waited for. */
int gpu_event_seconds(double *s, struct gpu_event *from, struct gpu_event *to);

/* --- hand-over between streams and threads of the CPU --------------------------------------------------------------------- */

/* Flags 0 .. n - 1, words in mapped memory, all 0. A flag is signalled with growing values from 1 to INT32_MAX, and a wait is
 * for at least a value; 0 resets it, when nobody waits. What the signaller wrote before to mapped memory is
 * there for who waited. Host calls are for any thread. A wait that nobody ends hangs the stream, or the thread.
 * ERR_UNSUPPORTED: the driver has no stream memory operations; events do the same, slower. */
enum { GPU_MAX_FLAGS = 4096 };
enum gpu_flag_after { GPU_FLAG_KEEP, GPU_FLAG_RESET }; /* RESET: back to 0 by the wait itself, as a replayed graph needs it */
int gpu_flags_open(struct gpu_flags **out, struct gpu *g, int n);
void gpu_flags_close(struct gpu_flags *f);
int gpu_flag_signal(struct gpu_flags *f, int i, uint32_t value, struct gpu_stream *s);
int gpu_flag_wait(struct gpu_flags *f, int i, uint32_t value, enum gpu_flag_after after, struct gpu_stream *s);
void gpu_flag_host_signal(struct gpu_flags *f, int i, uint32_t value);
void gpu_flag_host_wait(const struct gpu_flags *f, int i, uint32_t value); /* spins */
bool gpu_flag_host_seen(const struct gpu_flags *f, int i, uint32_t value);

/* The stream calls fn(arg) in its order, on a thread of the driver's. fn calls nothing of the device. */
int gpu_call_host(struct gpu_stream *s, void (*fn)(void *), void *arg);

/* Between begin and end calls on the stream are recorded instead of run; a launch runs them all. Only this thread may work on
 * the stream meanwhile, and nothing in between may wait for it. After a failure the stream is as before. */
int gpu_graph_begin(struct gpu_stream *s);
int gpu_graph_end(struct gpu_graph **out, struct gpu_stream *s);
int gpu_graph_launch(struct gpu_graph *q, struct gpu_stream *s);
void gpu_graph_close(struct gpu_graph *q);

/* --- what the card can do -------------------------------------------------------------------------------------------------- */

/* *s = seconds of a product of f16 matrices [m, k] x [k, n] with f32 sums by cuBLAS, mean of `reps` after one that is not
 * timed. Takes its matrices from the arena and gives them back. */
int gpu_probe_gemm(double *s, struct gpu_arena *a, struct gpu_stream *st, int m, int n, int k, int reps);

/* --- operations ---------------------------------------------------------------------------------------------------------- */

/* The table of core/ops.h: each operation is enqueued on the stream and returns. Pointers are device addresses, except host
 * arrays that core/ops.h names, which may change as soon as the call has returned. `kv` is a host record whose layers'
 * bases are device addresses. Scratch comes from the arena: gpu_ops_scratch_bytes for these limits.
 * When calls may have PREFILL_MIN_TOK tokens (gpu/sizes.h), opening also creates a cuBLAS handle, which takes device memory of its
 * own, outside the arena: ERR_BUDGET when there is none. No call allocates. The same calls give the same bits.
 * ERR_UNSUPPORTED: heads wider than GPU_MAX_HEAD_DIM. */
enum { GPU_MAX_HEAD_DIM = 256 };
size_t gpu_ops_scratch_bytes(const struct ops_limits *l);
int gpu_ops_open(struct gpu_ops **out, struct gpu *g, struct gpu_arena *a, struct gpu_stream *s, const struct ops_limits *l);
void gpu_ops_close(struct gpu_ops *o);
struct ops *gpu_ops_table(struct gpu_ops *o);
/* Waits for the stream. ERR_NUMERIC: since the last call a key or value could not be stored, or attention gave a NaN or an
 * infinity (names the smallest position). ERR_ARG: an expert that does not exist was chosen. */
int gpu_ops_check(struct gpu_ops *o);

/* --- KV in several places ------------------------------------------------------------------------------------------------ */

/* Functions that take the place of the table's kv_put and attn: offload/kv_store.c, which builds them from the calls below.
 * NULL: the table's own again. *h is copied. */
struct gpu_kv_hook {
    void *arg;
    int (*put)(void *arg, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v);
    int (*attn)(void *arg, const struct attn_args *a);
};
void gpu_ops_hook(struct gpu_ops *o, const struct gpu_kv_hook *h);

/* Pages first .. end of a layer in VRAM: page p is at d_base + p % n_slot * page_bytes. */
struct gpu_pages {
    void *d_base;
    int64_t n_slot, first, end;
};

struct kv_layer;

/* kv_put of a layer into these pages. What the layer's record says of its own place is not used. */
int gpu_pages_put(struct gpu_ops *o, const struct kv_layer *l, const struct gpu_pages *to, int64_t pos0, int n_tok, const float *k,
                  const float *v);

/* Attention of a call piece by piece: begin, the pieces, end. Each piece is enqueued where it is named, so that events may lie
 * between them; they are merged in that order, and the same pieces give the same bits. Which pages there are is the caller's
 * business: what no piece has is not attended to. a->kv is not used; *a and *l are copied.
 * A few tokens (GPU_PAGES_FEW): pieces in any order, and one partial result from elsewhere. Many: pieces in order of position;
 * the last one says so. */
enum gpu_pages_way { GPU_PAGES_FEW, GPU_PAGES_MANY };
enum { GPU_PAGES_FEW_TOKENS = 32 }; /* at most */
int gpu_pages_begin(struct gpu_ops *o, const struct kv_layer *l, const struct attn_args *a, enum gpu_pages_way way);
enum gpu_pages_turn { GPU_PAGES_MORE, GPU_PAGES_LAST };
int gpu_pages_attend(struct gpu_ops *o, const struct gpu_pages *p, enum gpu_pages_turn turn);
/* d_part [n_tok, n_head, head_dim_v + 2]: o not divided by l and not rotated back, m of scores in units of log2, l. It is read
 * by what end enqueues, and may be mapped host memory. */
int gpu_pages_add(struct gpu_ops *o, const float *d_part);
int gpu_pages_end(struct gpu_ops *o);

#endif
