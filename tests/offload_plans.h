/* offload_plans.h: plans made by chance, for tests of what carries them out. Include after tests/support.h. */
#ifndef LH_TESTS_OFFLOAD_PLANS_H
#define LH_TESTS_OFFLOAD_PLANS_H

#include "core/kv.h"
#include "offload/part.h"
#include "offload/run.h"
#include "offload/session.h"

#include <stdlib.h>
#include <string.h>

/* What may differ from everything in VRAM. */
enum plan_kind {
    PLAN_ALL_VRAM,
    PLAN_LAYERS,     /* some layers, or the output, wholly on the CPU */
    PLAN_ANY,        /* every part anywhere, both phases alike */
    PLAN_TWO_PHASES, /* prefill places parts differently */
};

static inline size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static inline int pick(uint64_t *s, int n) { return (int)(test_rand(s) % (uint64_t)n); }

/* `all` things in up to three parts that are multiples of step. */
static inline void split_random(int64_t out[PLAN_PLACES], int64_t all, int step, uint64_t *s) {
    int64_t n = all / step, a = pick(s, (int)n + 1), b = pick(s, (int)n + 1);
    if (!pick(s, 3)) a = b = pick(s, 2) ? 0 : n; /* whole */
    if (a > b) {
        int64_t t = a;
        a = b, b = t;
    }
    out[PLAN_VRAM] = a * step;
    out[PLAN_CPU] = (b - a) * step;
    out[PLAN_STREAM] = all - b * step;
}

static inline void layer_random(struct plan_layer *d, const struct model *m, const struct layer *l, int64_t pages, enum plan_kind kind, uint64_t *s) {
    bool any = kind >= PLAN_ANY, cpu = kind == PLAN_LAYERS && pick(s, 2);
    int64_t n[PLAN_PLACES] = {0}, all = l->ffn == FFN_DENSE ? l->n_ff : m->n_expert;
    n[cpu ? PLAN_CPU : PLAN_VRAM] = all;
    if (any) split_random(n, all, l->ffn == FFN_DENSE ? 16 : 1, s);
    d->mixer = (uint8_t)(any ? pick(s, PLAN_PLACES) : cpu ? PLAN_CPU : PLAN_VRAM);
    d->ffn = (uint8_t)(n[0] ? PLAN_VRAM : n[1] ? PLAN_CPU : PLAN_STREAM);
    if (any && l->ffn == FFN_EXPERTS) d->ffn = (uint8_t)pick(s, PLAN_PLACES);
    d->state = d->mixer == PLAN_CPU ? PLAN_CPU : PLAN_VRAM;
    for (int p = 0; p < PLAN_PLACES; p++) {
        if (l->ffn == FFN_DENSE) d->ff_rows[p] = (int32_t)n[p];
        else d->experts[p] = (int16_t)n[p];
    }
    d->kv_pages[d->mixer == PLAN_CPU ? PLAN_CPU : any ? pick(s, PLAN_PLACES) : PLAN_VRAM] = (int32_t)pages;
    if (!any || pages < 2 || d->mixer == PLAN_CPU || l->window) return;
    memset(d->kv_pages, 0, sizeof d->kv_pages); /* newest pages in VRAM */
    for (int64_t i = 0; i < pages; i++) d->kv_pages[pick(s, PLAN_PLACES)]++;
}

/* What prefill may do to a layer of decode: stream what the CPU has, and parts of VRAM. */
static inline void prefill_random(struct plan_layer *f, const struct plan_layer *d, const struct layer *l, int64_t pages, uint64_t *s) {
    int64_t v = l->ffn == FFN_DENSE ? d->ff_rows[PLAN_VRAM] : d->experts[PLAN_VRAM];
    int64_t all = v + (l->ffn == FFN_DENSE ? d->ff_rows[1] + d->ff_rows[2] : d->experts[1] + d->experts[2]);
    *f = (struct plan_layer){.mixer = d->mixer == PLAN_VRAM && pick(s, 2) ? PLAN_VRAM : PLAN_STREAM, .state = PLAN_VRAM};
    f->ffn = d->ffn == PLAN_VRAM && pick(s, 2) ? PLAN_VRAM : PLAN_STREAM;
    if (pick(s, 2)) v = 0;
    if (l->ffn == FFN_DENSE) f->ff_rows[PLAN_VRAM] = (int32_t)v, f->ff_rows[PLAN_STREAM] = (int32_t)(all - v);
    else f->experts[PLAN_VRAM] = (int16_t)v, f->experts[PLAN_STREAM] = (int16_t)(all - v);
    int64_t here = l->window && pages ? pages * pick(s, 2) : pick(s, (int)pages + 1);
    f->kv_pages[PLAN_VRAM] = (int32_t)here;
    f->kv_pages[PLAN_STREAM] = (int32_t)(pages - here);
}

static inline void layers_of(struct kv_layer layers[64], const struct model *m, const struct plan *p) {
    struct kv_spec spec;
    struct kv_shape *shapes;
    size_t all;
    assert_true(m->n_block <= 64);
    ok(session_kv_spec(&spec, &shapes, m, p));
    ok(kv_plan(layers, &all, &spec));
    free(shapes);
}

/* Slots for streamed KV: a layer's, or pages of it. */
static inline void stage_random(struct plan *p, const struct model *m, int phase, uint64_t *s) {
    struct plan_phase *ph = &p->phase[phase];
    struct kv_layer layers[64];
    size_t most = 0, page = 0;
    layers_of(layers, m, p);
    for (int il = 0; il < m->n_block; il++) {
        if (!ph->layers[il].kv_pages[PLAN_STREAM]) continue;
        most = larger(most, (size_t)ph->layers[il].kv_pages[PLAN_STREAM] * layers[il].page_bytes);
        page = larger(page, layers[il].page_bytes);
    }
    ph->stage_whole = !page || pick(s, 2);
    ph->stage_slots = page ? 1 + pick(s, 3) : 0;
    ph->stage_slot_bytes = ((ph->stage_whole ? most : page) + 255) / 256 * 256;
}

/* A ring for the phase's units: slots that hold one whole, or single parts and then as many slots as a unit has. */
static inline void ring_random(struct plan *p, const struct model *m, int phase, uint64_t *s) {
    struct parts ps;
    size_t part = 0, unit = 0;
    int loads = 1;
    p->phase[phase].ring_slot_bytes = SIZE_MAX / 2; /* the other phase decides into which groups experts go: all, or single ones */
    ok(parts_open(&ps, m, p));
    for (int i = 0; i < ps.n; i++)
        if (ps.v[i].place[phase] == PLAN_STREAM) part = larger(part, ps.v[i].bytes);
    for (int il = 0; il < m->n_block; il++) {
        size_t sum = 0;
        int n = 0;
        const struct part_layer *l = &ps.layers[il];
        for (int i = l->rest; i < l->ffn + l->n_ffn; i++) {
            if (ps.v[i].place[phase] != PLAN_STREAM) continue;
            sum += ps.v[i].bytes;
            n++;
        }
        unit = larger(unit, sum);
        if (n > loads) loads = n;
    }
    parts_close(&ps);
    struct plan_phase *ph = &p->phase[phase];
    bool whole = pick(s, 2);
    ph->ring_slots = !part ? 0 : whole ? 1 + pick(s, 4) : loads + pick(s, 3);
    ph->ring_slot_bytes = (larger(part, whole ? unit : 0) + 255) / 256 * 256;
    stage_random(p, m, phase, s);
}

/* A plan with a GPU from one without. */
static inline void plan_random(struct plan *p, const struct model *m, const struct plan *cpu, uint64_t seed, enum plan_kind kind) {
    uint64_t s = seed * 2654435761u + 12345;
    *p = *cpu;
    p->gpu = true;
    struct plan_phase *d = &p->phase[PLAN_DECODE], *f = &p->phase[PLAN_PREFILL];
    bool tied = !m->out.bytes;
    struct kv_layer kv[64];
    layers_of(kv, m, p);
    d->head = (uint8_t)(kind == PLAN_ALL_VRAM ? PLAN_VRAM : kind == PLAN_LAYERS ? pick(&s, 2) : pick(&s, PLAN_PLACES));
    d->embed = (uint8_t)(tied ? (d->head == PLAN_VRAM ? PLAN_VRAM : PLAN_CPU) : pick(&s, 2));
    d->chunk_tokens = 1 + pick(&s, 4);
    d->pass_tokens = d->chunk_tokens + pick(&s, 3);
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        int64_t pages = kv[il].n_slot;
        memset(&d->layers[il], 0, sizeof d->layers[il]);
        layer_random(&d->layers[il], m, l, pages, kind, &s);
    }
    *f = *d;
    if (kind == PLAN_TWO_PHASES) {
        f->chunk_tokens = 1 + pick(&s, p->chunk_tokens);
        f->pass_tokens = f->chunk_tokens + pick(&s, 9);
        if (d->head == PLAN_CPU || pick(&s, 2)) f->head = PLAN_STREAM;
        if (tied) f->embed = f->head == PLAN_VRAM ? PLAN_VRAM : PLAN_CPU;
        for (int il = 0; il < m->n_block; il++) {
            const struct layer *l = &m->layers[il];
            prefill_random(&f->layers[il], &d->layers[il], l, kv[il].n_slot, &s);
        }
    }
    uint64_t rings = s; /* alike in both phases where they are alike */
    ring_random(p, m, PLAN_DECODE, &s);
    if (kind != PLAN_TWO_PHASES) s = rings;
    ring_random(p, m, PLAN_PREFILL, &s);
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        ok(run_vram_bytes(&p->phase[ph].vram.sum, m, p, (enum plan_phase_id)ph));
        p->phase[ph].vram.limit = p->phase[ph].vram.sum;
    }
}

#endif
