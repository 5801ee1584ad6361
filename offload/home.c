/* home.c: lays out homes. How they are filled is in load.c. */
#include "core/err.h"
#include "core/mem.h"
#include "core/unit.h"
#include "gpu/gpu.h"
#include "offload/home_impl.h"

#include <stdlib.h>
#include <string.h>

size_t home_bytes(const struct model *m) {
    struct parts ps;
    size_t sum = 0;
    if (parts_open(&ps, m, NULL)) return SIZE_MAX;
    for (int i = 0; i < ps.n; i++)
        if (sum == SIZE_MAX || !size_add(&sum, sum, ps.v[i].bytes)) sum = SIZE_MAX;
    parts_close(&ps);
    return sum;
}

/* --- addresses ----------------------------------------------------------------------------------------------------------- */

void part_bind(struct weights *w, const struct part *p, const void *base) {
    for (int i = 0; i < p->n_tensor; i++) {
        const struct part_tensor *t = &p->tensors[i];
        const void *at = base ? (const char *)base + t->offset : NULL;
        switch (t->id) {
        case PT_EMBD: w->embd = at; break;
        case PT_OUT: w->out = at; break;
        case PT_OUT_NORM: w->out_norm = at; break;
        case PT_OUT_BIAS: w->out_bias = at; break;
        default: w->layers[p->il].at[t->id] = at;
        }
    }
}

void part_ffn(struct ffn_part *f, const struct part *p, const void *base) {
    const char *b = base;
    *f = (struct ffn_part){.row0 = p->row0, .rows = p->rows, .expert0 = p->expert0, .n_expert = p->n_expert,
                           .gate = b + p->tensors[0].offset, .up = b + p->tensors[1].offset, .down = b + p->tensors[2].offset};
}

static bool is_run(const struct part *p) { return p->kind == PART_ROWS || p->kind == PART_EXPERTS; }

static void bind_host(struct home *h) {
    for (int i = 0; i < h->parts.n; i++) {
        const struct part *p = &h->parts.v[i];
        bool split = is_run(p) && h->parts.layers[p->il].n_ffn > 1;
        if (h->at[i].host && !split) part_bind(&h->weights, p, h->at[i].host);
    }
    if (h->parts.embed == h->parts.head) h->weights.embd = h->weights.out;
}

/* --- host memory --------------------------------------------------------------------------------------------------------- */

/* Copies to VRAM read it. */
static bool is_copied(const struct part *p) {
    for (int ph = 0; ph < PLAN_PHASES; ph++)
        if (p->place[ph] != PLAN_CPU) return true;
    return false;
}

/* Parts that are copied lie in front of the others, in the order of the pass. */
static int lay_out(struct home *h) {
    size_t sum = 0;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < h->parts.n; i++) {
            const struct part *p = &h->parts.v[i];
            if (!p->on_host || is_copied(p) != (round == 0)) continue;
            h->at[i].offset = sum;
            if (!size_add(&sum, sum, p->bytes)) return err_set(ERR_FORMAT, "the sizes of this model's tensors overflow 64 bits");
        }
        if (round == 0) h->copied = sum;
    }
    h->bytes = sum;
    return 0;
}

/* What cannot be locked stays as it is; after a refusal there is no point in asking again. */
static void pin(struct home *h) {
    size_t pages = align_up(h->copied, 4096);
    while (h->pinned < pages) {
        size_t n = pages - h->pinned < HOME_PIN_BYTES ? pages - h->pinned : HOME_PIN_BYTES;
        if (gpu_pin(h->gpu, h->arena + h->pinned, n)) return;
        h->pinned += n;
    }
}

static int open_host(struct home *h) {
    int rc = lay_out(h);
    if (rc || !h->bytes) return rc;
    /* Whole pages where they are locked. */
    h->arena = mem_alloc(h->copied ? align_up(h->bytes, 4096) : h->bytes, h->copied ? 4096 : 64, "weights");
    if (!h->arena) return ERR_NOMEM;
    for (int i = 0; i < h->parts.n; i++)
        if (h->parts.v[i].on_host) h->at[i].host = h->arena + h->at[i].offset;
    if (h->copied) pin(h);
    return 0;
}

size_t home_run(const struct home *h, const void *p, size_t bytes, bool *pinned) {
    size_t at = (size_t)((const char *)p - h->arena), end = h->bytes;
    *pinned = at < h->pinned;
    if (*pinned) end = (at / HOME_PIN_BYTES + 1) * HOME_PIN_BYTES < h->pinned ? (at / HOME_PIN_BYTES + 1) * HOME_PIN_BYTES : h->pinned;
    return bytes < end - at ? bytes : end - at;
}

size_t home_pageable_bytes(const struct home *h) { return h->copied > h->pinned ? h->copied - h->pinned : 0; }

/* --- VRAM ---------------------------------------------------------------------------------------------------------------- */

/* Groups of experts follow each other in the piece that the first of them takes. */
static int carve(struct home *h, int i) {
    size_t bytes = part_run(&h->parts, i);
    if (bytes) return gpu_alloc(&h->at[i].d, h->arena_d, bytes, "weights");
    h->at[i].d = (char *)h->at[i - 1].d + h->parts.v[i - 1].bytes;
    return 0;
}

static int open_device(struct home *h) {
    int rc = 0;
    for (int i = 0; i < h->parts.n && !rc; i++)
        if (part_fixed(&h->parts.v[i]) && h->parts.v[i].bytes) rc = carve(h, i);
    return rc;
}

static int copy_in(struct home *h, struct gpu_stream *s, char *d, const char *src, size_t bytes) {
    int rc = 0;
    while (bytes && !rc) {
        bool pinned;
        size_t n = home_run(h, src, bytes, &pinned);
        rc = gpu_copy_in(s, d, src, n); /* pageable: the driver copies it before it returns */
        d += n, src += n, bytes -= n;
    }
    return rc;
}

int home_enter(struct home *h, enum plan_phase_id phase, struct gpu_stream *s) {
    int rc = 0;
    for (int i = 0; i < h->parts.n && !rc; i++) {
        const struct part *p = &h->parts.v[i];
        if (part_fixed(p) || p->place[phase] != PLAN_VRAM || !p->bytes) continue;
        rc = carve(h, i);
        if (!rc) rc = copy_in(h, s, h->at[i].d, h->at[i].host, p->bytes);
    }
    if (rc) home_leave(h);
    return rc;
}

void home_leave(struct home *h) {
    for (int i = 0; i < h->parts.n; i++)
        if (!part_fixed(&h->parts.v[i])) h->at[i].d = NULL;
}

/* --- open and close ------------------------------------------------------------------------------------------------------ */

int home_open(struct home **out, const struct model *m, const struct plan *p, struct gpu *g, struct gpu_arena *a) {
    struct home *h = calloc(1, sizeof *h);
    if (!h) return err_set(ERR_NOMEM, "home: out of memory");
    h->model = m;
    h->gpu = g;
    h->arena_d = a;
    h->mark = a ? gpu_arena_used(a) : 0;
    int rc = parts_open(&h->parts, m, p);
    if (!rc) {
        h->at = calloc((size_t)h->parts.n, sizeof *h->at);
        h->weights.layers = calloc((size_t)m->n_block, sizeof *h->weights.layers);
        if (!h->at || !h->weights.layers) rc = err_set(ERR_NOMEM, "home: out of memory");
    }
    if (!rc && a) rc = open_device(h);
    if (!rc) rc = open_host(h);
    if (rc) {
        home_close(h);
        return rc;
    }
    bind_host(h);
    *out = h;
    return 0;
}

void home_close(struct home *h) {
    if (!h) return;
    for (size_t at = 0; at < h->pinned; at += HOME_PIN_BYTES) gpu_unpin(h->gpu, h->arena + at);
    mem_free(h->arena);
    if (h->arena_d) gpu_arena_release(h->arena_d, h->mark);
    free(h->weights.layers);
    free(h->at);
    parts_close(&h->parts);
    free(h);
}

const struct parts *home_parts(const struct home *h) { return &h->parts; }
const void *home_host(const struct home *h, int i) { return h->at[i].host; }
const void *home_device(const struct home *h, int i) { return h->at[i].d; }
const struct weights *home_weights(const struct home *h) { return &h->weights; }
