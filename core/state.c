/* state.c: see state.h. */
#include "core/state.h"

#include "core/err.h"
#include "core/mem.h"

#include <stdlib.h>
#include <string.h>

static int n_parts(const struct model *m) {
    int n = 0;
    for (int il = 0; il < m->n_layer; il++) n += m->layers[il].mixer == MIXER_DELTA;
    return n;
}

static size_t last_bytes(const struct delta_shape *d) {
    return (size_t)(d->n_conv - 1) * (size_t)delta_conv_dim(d) * sizeof(float);
}

static size_t s_bytes(const struct delta_shape *d) {
    return (size_t)d->n_value * (size_t)d->dim * (size_t)d->dim * sizeof(float);
}

size_t state_bytes(const struct model *m) {
    size_t bytes;
    if (!m->delta.n_value) return 0;
    return size_mul(&bytes, (size_t)n_parts(m), last_bytes(&m->delta) + s_bytes(&m->delta)) ? bytes : SIZE_MAX;
}

int state_open_part(struct state **out, const struct model *m, const bool *held) {
    struct state *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "state: out of memory");
    *s = (struct state){.n_layer = m->n_layer, .last_bytes = last_bytes(&m->delta), .at = calloc((size_t)m->n_layer, sizeof *s->at)};
    s->layer_bytes = s->last_bytes + s_bytes(&m->delta);
    if (!s->at) {
        state_close(s);
        return err_set(ERR_NOMEM, "state: out of memory");
    }
    for (int il = 0; il < m->n_layer; il++) {
        s->at[il] = STATE_NONE;
        if (m->layers[il].mixer != MIXER_DELTA || (held && !held[il])) continue;
        s->at[il] = s->bytes;
        if (!size_add(&s->bytes, s->bytes, s->layer_bytes)) s->bytes = SIZE_MAX;
    }
    *out = s;
    return 0;
}

int state_open(struct state **out, const struct model *m) {
    struct state *s;
    int rc = state_open_part(&s, m, NULL);
    if (rc) return rc;
    s->base = mem_alloc(s->bytes, 64, "recurrent state");
    if (!s->base) {
        state_close(s);
        return ERR_NOMEM;
    }
    *out = s;
    return 0;
}

void state_close(struct state *s) {
    if (!s) return;
    mem_free(s->base);
    free(s->at);
    free(s);
}

void state_reset(struct state *s) { memset(s->base, 0, s->bytes); }

void state_copy(struct state *dst, const struct state *src) { memcpy(dst->base, src->base, src->bytes); }

/* About N(0, 1): the sum of eight 8-bit uniforms, the same on every machine. */
static float normal(uint64_t *seed) {
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    int sum = 0;
    for (int i = 0; i < 8; i++) sum += (int)(z >> (8 * i) & 255);
    return ((float)sum - 1020.0f) * (1.0f / 209.0f);
}

void state_fill_synthetic(struct state *s, uint64_t seed) {
    for (int il = 0; il < s->n_layer; il++) {
        if (s->at[il] == STATE_NONE) continue;
        float *last = state_last(s, il), *matrix = state_s(s, il);
        size_t n_last = s->last_bytes / sizeof(float), n = (s->layer_bytes - s->last_bytes) / sizeof(float);
        for (size_t i = 0; i < n_last; i++) last[i] = normal(&seed);
        /* Keys have length 1 and about a hundred elements, values are about 1. */
        for (size_t i = 0; i < n; i++) matrix[i] = 0.1f * normal(&seed);
    }
}
