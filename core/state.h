/* state.h: recurrent state of one sequence: what the Gated DeltaNet layers of a model carry from token to token, beside the
 * KV of its attention layers. Its size does not depend on the context. It cannot be shortened like KV: to go back, a copy
 * taken before is copied back, bit for bit.
 * Layout per layer that has one: last [DELTA_CONV - 1, conv_dim] f32, then s [n_value, dim of v, dim of k] f32 (struct
 * delta_args of core/ops.h). Not thread-safe; layers may be updated by different threads. */
#ifndef LH_CORE_STATE_H
#define LH_CORE_STATE_H

#include "core/model.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STATE_NONE SIZE_MAX
struct state {
    int n_layer;
    size_t *at;         /* [n_layer] offset of the layer's part from base, STATE_NONE: it has none here; owned */
    size_t last_bytes;  /* of the inputs of the convolution, in front of each part */
    size_t layer_bytes; /* of a part */
    size_t bytes;       /* of all parts: exactly what is allocated */
    char *base;         /* host or device address; NULL in a plan */
};

/* Bytes for one sequence; 0: the model has no such layers. SIZE_MAX: overflow. */
size_t state_bytes(const struct model *m);

/* Allocates it in host memory, all zero: the state before the first token. ERR_NOMEM. */
int state_open(struct state **out, const struct model *m);
/* The same for some layers, those with held[il], without memory: base stays NULL, for the caller to set and to take back. The
 * caller may also move the layers' offsets. */
int state_open_part(struct state **out, const struct model *m, const bool *held);
void state_close(struct state *s);

/* Back to the state before the first token. */
void state_reset(struct state *s);
/* dst = src, of the same model. */
void state_copy(struct state *dst, const struct state *src);
/* As after many tokens: random numbers of the size that they have, the same bits for the same seed. For benchmarks. */
void state_fill_synthetic(struct state *s, uint64_t seed);

/* Parts of layer il, NULL in a plan. The layer has a state. */
static inline float *state_last(const struct state *s, int il) {
    return s->base ? (float *)(void *)(s->base + s->at[il]) : NULL;
}
static inline float *state_s(const struct state *s, int il) {
    return s->base ? (float *)(void *)(s->base + s->at[il] + s->last_bytes) : NULL;
}

#endif
