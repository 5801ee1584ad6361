/* home.h: owns the bytes of the weights: in host memory, matrices in strips (core/strip.h) and vectors as f32, and those that
 * a plan keeps in VRAM. home_load fills it from the file; afterwards the host's bytes are read-only and any thread may read
 * them. What the GPU is concerned with belongs to the driver thread.
 *
 * Host memory that copies read is page-locked in pieces of HOME_PIN_BYTES; what the system refuses to lock stays pageable
 * and is copied through a small locked buffer (home_pageable_bytes; the pipe and home_enter do it). */
#ifndef LH_OFFLOAD_HOME_H
#define LH_OFFLOAD_HOME_H

#include "core/decoder.h"
#include "offload/part.h"

#include <signal.h>
#include <stdbool.h>

struct gguf;
struct gpu;
struct gpu_arena;
struct gpu_stream;
struct home;
struct pool;

enum { HOME_PIN_BYTES = 256 << 20, HOME_BOUNCE_BYTES = 32 << 20 };

/* Bytes of the arena for all weights of a model: what home_open allocates without a GPU, the sum of tensor_home_bytes
 * (core/unit.h) over everything but the RoPE divisors, which a session holds. SIZE_MAX: overflow. */
size_t home_bytes(const struct model *m);

/* Lays out and allocates (without touching) what is on the host, and carves from the arena what is in VRAM in both phases.
 * m, g, a are borrowed and must outlive the home. p: ?the plan; without it, or when it has no GPU, everything is on the host
 * and g and a are not used. ERR_NOMEM, ERR_BUDGET, ERR_ARG (a plan that cannot be kept): leave nothing behind. */
int home_open(struct home **out, const struct model *m, const struct plan *p, struct gpu *g, struct gpu_arena *a);
void home_close(struct home *h);

/* done and total in bytes of the file; called on the driver thread, some ten times a second. */
typedef void (*progress_fn)(void *arg, double done, double total);

/* Reads all weights with the pool's threads, each packing what it read. What goes to VRAM takes two page-locked buffers of
 * HOME_BOUNCE_BYTES meanwhile. stop: ?set by a signal handler. ERR_IO: the file failed or became shorter; ERR_INTERRUPTED. */
int home_load(struct home *h, const struct gguf *g, struct pool *pool, progress_fn progress, void *arg,
              const volatile sig_atomic_t *stop);

/* Carves the parts that are in VRAM in this phase only and copies them from the host, in stream order; pageable ones by way
 * of the host's waiting. Whoever releases the arena calls home_leave first. */
int home_enter(struct home *h, enum plan_phase_id phase, struct gpu_stream *s);
void home_leave(struct home *h);

const struct parts *home_parts(const struct home *h);
/* Where part i lies: NULL where it has no such home (now). */
const void *home_host(const struct home *h, int i);
const void *home_device(const struct home *h, int i);
/* Host addresses of all that is on the host; FFNs that are split only by part. Owned by the home, complete after home_open. */
const struct weights *home_weights(const struct home *h);

/* Puts the addresses of a part's tensors that begin at base into w, or of a run of an FFN into *f. */
void part_bind(struct weights *w, const struct part *p, const void *base);
void part_ffn(struct ffn_part *f, const struct part *p, const void *base);

/* How many of `bytes` from host address p on are locked alike, so that one copy may take them. */
size_t home_run(const struct home *h, const void *p, size_t bytes, bool *pinned);
size_t home_pageable_bytes(const struct home *h);

/* Reads one vector tensor as f32 into dst [t->cols]. */
int home_read_vector(const struct gguf *g, const struct tensor *t, float *dst);

#endif
