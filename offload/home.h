/* home.h: owns the bytes of the weights on the host: one arena, matrices in strips (core/strip.h), vectors as f32.
 * home_load fills it from the file; afterwards it is read-only and any thread may read it. */
#ifndef LH_OFFLOAD_HOME_H
#define LH_OFFLOAD_HOME_H

#include "core/decoder.h"

#include <signal.h>
#include <stdbool.h>

struct gguf;
struct home;
struct pool;

/* Bytes of the arena for all weights of a model: what home_open allocates, the sum of tensor_home_bytes (core/unit.h)
 * over everything but the RoPE divisors, which a session holds. SIZE_MAX: overflow. */
size_t home_bytes(const struct model *m);

/* Allocates (without touching) and lays out the arena. m is borrowed and must outlive the home. ERR_NOMEM. */
int home_open(struct home **out, const struct model *m);
void home_close(struct home *h);

/* Addresses for a decoder; owned by the home, complete after home_open. */
const struct weights *home_weights(const struct home *h);

/* done and total in bytes of the file; called on the driver thread, some ten times a second. */
typedef void (*progress_fn)(void *arg, double done, double total);

/* Reads all weights with the pool's threads, each packing what it read. stop: ?set by a signal handler.
 * ERR_IO: the file failed or became shorter; ERR_INTERRUPTED. */
int home_load(struct home *h, const struct gguf *g, struct pool *pool, progress_fn progress, void *arg,
              const volatile sig_atomic_t *stop);

/* Reads one vector tensor as f32 into dst [t->cols]. */
int home_read_vector(const struct gguf *g, const struct tensor *t, float *dst);

#endif
