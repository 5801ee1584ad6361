/* timeline.c: the schedule of a pass, event by event. Drawing is in timeline_draw.c. */
#include "offload/timeline.h"

#include "core/err.h"
#include "offload/plan_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PASSES = 6 }; /* the first ones fill ring and staging */
static const double nothing = 1e-15;

/* A step of a pass: both sides work on it, the next begins when both are done. */
struct stage {
    enum timeline_kind kind;
    int il;
    double fixed_s;             /* before it: launches, hand-over */
    double gpu_s, late_s;       /* late: on what was copied, after the copies that it needs */
    double cpu_bytes, cpu_rate; /* read at most at this rate */
    int copy[2];                /* of struct copy, -1: none: weights, KV */
    bool flow;                  /* KV in pieces: copied while it is used */
};

struct copy {
    enum timeline_kind kind;
    int il, stage;
    double bytes;
    bool kv;                    /* in staging, else in the ring */
};

struct sim {
    const struct plan_work *w;
    const struct plan_phase *ph;
    struct plan_rates r;
    struct stage *stages;       /* [n_stage] */
    struct copy *copies;        /* [n_copy], in the order of use */
    int n_stage, n_copy;
    double rate;                /* of copies */
    /* While it runs. Copies are numbered through all passes. */
    double now;
    int64_t at, next[2], used[2]; /* being copied; the next of ring and staging, and slots that were given back: both counted */
    double copied, copy_start;  /* of it */
    bool copying;
    bool *done;                 /* [PASSES * n_copy] */
    struct timeline *t;         /* of the last pass; NULL before */
    double origin;
};

/* --- stages ------------------------------------------------------------------------------------------------------------------- */

static struct stage *stage(struct sim *s, enum timeline_kind kind, int il) {
    struct stage *st = &s->stages[s->n_stage++];
    *st = (struct stage){.kind = kind, .il = il, .copy = {-1, -1}};
    return st;
}

static void needs(struct sim *s, struct stage *st, bool kv, double bytes) {
    if (bytes <= 0) return;
    st->copy[kv] = s->n_copy;
    s->copies[s->n_copy++] = (struct copy){kv ? TIMELINE_KV : st->kind, st->il, (int)(st - s->stages), bytes, kv};
}

static void on_cpu(struct stage *st, double seconds, double bytes) {
    st->cpu_bytes = bytes > 0 ? bytes : 0;
    st->cpu_rate = seconds > 0 ? bytes / seconds : 0;
}

/* The part of a piece that the CPU has, and that which is copied. */
static void split(struct sim *s, struct stage *st, const struct plan_piece *p, double cpu, double copied) {
    double all = plan_gpu_s(&s->r, p), bytes = (double)p->bytes * copied;
    st->gpu_s += all * (1 - cpu - copied);
    st->late_s += all * copied + bytes / s->r.vram;
    if (cpu > 0) on_cpu(st, plan_cpu_s(&s->r, p) * cpu, p->read * cpu);
}

/* Half a hand-over where the hidden state changes sides, a whole one where both work. */
static void hand_over(struct sim *s, bool *there, bool cpu, bool both, struct stage *st) {
    if (both)
        st->fixed_s += s->r.handover_s;
    else if (cpu != *there)
        st->fixed_s += s->r.handover_s / 2;
    *there = cpu && !both;
}

static void decode_mixer(struct sim *s, int il, int64_t depth, bool *there) {
    const struct plan_work_layer *l = &s->w->layers[il];
    const struct plan_layer *p = &s->ph->layers[il];
    struct stage *st = stage(s, TIMELINE_MIXER, il);
    bool cpu = p->mixer == PLAN_CPU;
    double state = 2 * (double)l->state_bytes;
    int64_t pages[PLAN_PLACES];
    st->fixed_s = l->calls * s->r.launch_s;
    hand_over(s, there, cpu, false, st);
    if (cpu) {
        on_cpu(st, plan_cpu_s(&s->r, &l->mixer) + (l->delta ? state / s->r.cpu : 0), l->mixer.read + state);
    } else {
        split(s, st, &l->mixer, 0, p->mixer == PLAN_STREAM);
        if (l->delta) st->gpu_s += state / s->r.matvec;
        if (p->mixer == PLAN_STREAM) needs(s, st, false, (double)l->mixer.bytes);
    }
    if (!l->kv_pages) return;
    plan_kv_pages(pages, p, depth);
    st = stage(s, TIMELINE_ATTN, il);
    double page = plan_page_gpu_s(&s->r, l), copied = (double)pages[PLAN_STREAM] * (double)l->page_bytes;
    if (pages[PLAN_CPU]) on_cpu(st, plan_page_cpu_s(&s->r, l) * (double)pages[PLAN_CPU], (double)pages[PLAN_CPU] * (double)l->page_bytes);
    if (pages[PLAN_CPU] && !cpu) hand_over(s, there, true, true, st);
    st->gpu_s = page * (double)pages[PLAN_VRAM];
    st->late_s = page * (double)pages[PLAN_STREAM] + copied / s->r.vram;
    needs(s, st, true, copied);
}

static void decode_ffn(struct sim *s, int il, bool *there) {
    const struct plan_work_layer *l = &s->w->layers[il];
    const struct plan_layer *p = &s->ph->layers[il];
    size_t bytes[PLAN_PLACES];
    struct stage *st = stage(s, TIMELINE_FFN, il);
    if (l->n_ff) {
        plan_ff_bytes(bytes, l, p->ff_rows);
        double all = (double)l->ff.bytes, cpu = (double)bytes[PLAN_CPU] / all;
        hand_over(s, there, cpu > 0, cpu > 0 && cpu < 1, st);
        split(s, st, &l->ff, cpu, (double)bytes[PLAN_STREAM] / all);
        needs(s, st, false, (double)bytes[PLAN_STREAM]);
        return;
    }
    hand_over(s, there, p->ffn == PLAN_CPU, false, st);
    split(s, st, &l->rest, p->ffn == PLAN_CPU, p->ffn == PLAN_STREAM);
    if (p->ffn == PLAN_STREAM) needs(s, st, false, (double)l->rest.bytes);
    if (!l->n_expert) return;
    double cpu = (double)p->experts[PLAN_CPU] / l->n_expert;
    st = stage(s, TIMELINE_FFN, il);
    hand_over(s, there, cpu > 0, cpu > 0 && cpu < 1, st);
    split(s, st, &l->experts, cpu, 0);
}

static void decode_stages(struct sim *s, int64_t depth) {
    bool there = false;
    for (int il = 0; il < s->w->n_layer; il++) {
        decode_mixer(s, il, depth, &there);
        decode_ffn(s, il, &there);
    }
    struct stage *st = stage(s, TIMELINE_HEAD, -1);
    bool cpu = s->ph->head == PLAN_CPU;
    hand_over(s, &there, cpu, false, st);
    st->fixed_s += s->w->calls * s->r.launch_s;
    if (!cpu) st->fixed_s += 2 * s->r.copy_s + 4.0 * s->w->m->n_vocab * s->r.n_tok / s->r.d2h;
    split(s, st, &s->w->head, cpu, 0);
}

/* The GPU's time of a pass goes to the layers by their operations. */
static void prefill_stages(struct sim *s, int64_t pos, int n) {
    const struct plan_work *w = s->w;
    int chunks = (n + s->ph->chunk_tokens - 1) / s->ph->chunk_tokens;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        const struct plan_layer *p = &s->ph->layers[il];
        size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
        int64_t pages[PLAN_PLACES];
        plan_ff_bytes(ff, l, p->ff_rows);
        plan_expert_bytes(ex, l, p->experts);
        plan_kv_pages(pages, p, pos + n);
        double mid = (double)pos + n / 2.0, seen = l->window && mid > (double)l->window ? (double)l->window : mid;
        struct stage *st = stage(s, TIMELINE_MIXER, il);
        st->late_s = (l->mixer.flops + l->delta_flops) * n / s->r.gemm + (double)l->mixer.bytes * chunks / s->r.matvec;
        if (p->mixer == PLAN_STREAM) needs(s, st, false, (double)l->mixer.bytes);
        if (l->kv_pages) {
            st = stage(s, TIMELINE_ATTN, il);
            st->late_s = l->attn_flops * n * seen / s->r.attn_prefill;
            st->flow = !s->ph->stage_whole;
            needs(s, st, true, (double)pages[PLAN_STREAM] * (double)l->page_bytes * (s->ph->stage_whole ? 1 : chunks));
        }
        st = stage(s, TIMELINE_FFN, il);
        st->late_s = (l->rest.flops + l->ff.flops + l->experts.flops) * n / s->r.gemm +
                     (double)(l->rest.bytes + l->ff.bytes + l->experts.bytes) * chunks / s->r.matvec;
        double launches = l->calls * chunks * s->r.launch_s;
        if (st->late_s < launches) st->late_s = launches;
        needs(s, st, false, (double)(ff[PLAN_STREAM] + ex[PLAN_STREAM]) + (p->ffn == PLAN_STREAM ? (double)l->rest.bytes : 0));
    }
}

/* --- running ------------------------------------------------------------------------------------------------------------------- */

static void event(struct sim *s, enum timeline_lane lane, enum timeline_kind kind, int il, double start, double bytes) {
    struct timeline *t = s->t;
    if (!t || s->now - start < nothing) return;
    t->events[t->n_event++] = (struct timeline_event){lane, kind, il, start - s->origin, s->now - s->origin, bytes};
    double from = start > s->origin ? start : s->origin;
    t->busy_s[lane] += s->now - from;
    if (lane == LANE_H2D) t->use[kind].copy_s += s->now - from;
    if (lane == LANE_GPU) t->use[kind].gpu_s += s->now - from;
    if (lane == LANE_CPU) t->use[kind].cpu_s += s->now - from;
}

static const struct copy *copy_at(const struct sim *s, int64_t i) { return &s->copies[i % s->n_copy]; }

/* Copy number i of its kind (ring or staging), counted through all passes; -1: there are no more. */
static int64_t copy_number(const struct sim *s, bool kv, int64_t i) {
    int per_pass = 0;
    for (int c = 0; c < s->n_copy; c++) per_pass += s->copies[c].kv == kv;
    if (!per_pass || i >= (int64_t)PASSES * per_pass) return -1;
    for (int c = 0, n = 0; c < s->n_copy; c++)
        if (s->copies[c].kv == kv && n++ == i % per_pass) return i / per_pass * s->n_copy + c;
    return -1;
}

/* Of the next copies for ring and staging, that which is needed first and has a slot. */
static void start_copy(struct sim *s) {
    int64_t best = -1;
    if (s->copying) return;
    for (int kv = 0; kv < 2; kv++) {
        int64_t i = copy_number(s, kv, s->next[kv]);
        if (i < 0 || s->next[kv] - s->used[kv] >= (kv ? s->ph->stage_slots : s->ph->ring_slots)) continue;
        if (best < 0 || i < best) best = i;
    }
    if (best < 0) return;
    s->at = best;
    s->next[copy_at(s, best)->kv]++;
    s->copying = true;
    s->copied = 0;
    s->copy_start = s->now;
}

/* Time goes on by dt, at most to the end of the copy under way. Copies come first; the CPU
 * has what they leave of DRAM. */
static double step(struct sim *s, double cpu_rate, double *cpu_left, double most) {
    double dt = most, copy = s->copying ? s->rate : 0, cpu = *cpu_left > 0 ? cpu_rate : 0;
    if (cpu > s->r.dram - copy) cpu = s->r.dram - copy;
    if (*cpu_left > 0 && cpu < 1) cpu = 1; /* a link as fast as DRAM */
    if (*cpu_left > 0 && cpu > 0 && *cpu_left / cpu < dt) dt = *cpu_left / cpu;
    if (s->copying) {
        double left = (copy_at(s, s->at)->bytes - s->copied) / copy;
        if (left < dt) dt = left;
    }
    s->now += dt;
    if (*cpu_left > 0) *cpu_left = *cpu_left - cpu * dt > *cpu_left * 1e-12 ? *cpu_left - cpu * dt : 0;
    if (s->copying) {
        const struct copy *c = copy_at(s, s->at);
        s->copied += copy * dt;
        if (s->copied >= c->bytes * (1 - 1e-12)) {
            event(s, LANE_H2D, c->kind, c->il, s->copy_start, c->bytes);
            s->done[s->at] = true;
            s->copying = false;
            start_copy(s);
        }
    }
    return dt;
}

static bool ready(const struct sim *s, const struct stage *st, int pass, bool even_flow) {
    for (int i = 0; i < 2; i++)
        if (st->copy[i] >= 0 && (even_flow || !st->flow) && !s->done[(int64_t)pass * s->n_copy + st->copy[i]]) return false;
    return true;
}

static void run_stage(struct sim *s, const struct stage *st, int pass) {
    double none = 0, gpu = st->gpu_s, late = st->late_s, cpu = st->cpu_bytes, began, cpu_began, waited = 0, cpu_over = 0;
    double gpu_busy = 0, fixed = st->fixed_s;
    start_copy(s);
    while (fixed > nothing) fixed -= step(s, 0, &none, fixed);
    began = cpu_began = s->now;
    bool cpu_open = cpu > 0;
    for (;;) {
        bool may = ready(s, st, pass, false), gpu_works = gpu > nothing || (late > nothing && may), cpu_works = cpu > 0;
        if (!gpu_works && cpu <= 0 && ready(s, st, pass, true)) break;
        double dt = step(s, st->cpu_rate, &cpu, gpu > nothing ? gpu : gpu_works ? late : INFINITY);
        if (!isfinite(dt)) break; /* nothing is under way: a slot that never comes back would be a broken plan */
        if (gpu > nothing)
            gpu -= dt, gpu_busy += dt;
        else if (gpu_works)
            late -= dt, gpu_busy += dt;
        else if (cpu_works)
            cpu_over += dt;
        else
            waited += dt;
        if (cpu_open && cpu <= 0) {
            event(s, LANE_CPU, st->kind, st->il, cpu_began, st->cpu_bytes);
            cpu_open = false;
        }
    }
    for (int i = 0; i < 2; i++)
        if (st->copy[i] >= 0) s->used[i]++;
    if (!s->t) return;
    if (gpu_busy > 0) { /* drawn as one block from its start; waiting shows as a gap at the end */
        double end = s->now;
        s->now = began + gpu_busy < end ? began + gpu_busy : end;
        event(s, LANE_GPU, st->kind, st->il, began, 0);
        s->now = end;
    }
    s->t->use[st->kind].exposed_s += waited;
    s->t->use[st->kind].cpu_exposed_s += cpu_over;
    s->t->exposed_s += waited;
}

static int run(struct sim *s, struct timeline *t) {
    double last = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        double from = s->now;
        if (pass == PASSES - 1) s->t = t, s->origin = from;
        for (int i = 0; i < s->n_stage; i++) run_stage(s, &s->stages[i], pass);
        last = s->now - from;
    }
    t->step_s = last;
    t->hidden_s = t->busy_s[LANE_H2D] > t->exposed_s ? t->busy_s[LANE_H2D] - t->exposed_s : 0;
    return 0;
}

int timeline_of(struct timeline **out, const struct plan *p, const struct plan_work *w, enum plan_phase_id phase) {
    if (!p->gpu || !w->r.machine) return err_set(ERR_ARG, "timeline: the plan is for a machine without a GPU");
    size_t n = 4 * (size_t)w->n_layer + 4;
    struct sim s = {.w = w, .ph = &p->phase[phase], .stages = calloc(n, sizeof *s.stages), .copies = calloc(n, sizeof *s.copies),
                    .done = calloc(PASSES * n, sizeof *s.done)};
    struct timeline *t = calloc(1, sizeof *t);
    if (t) t->events = calloc(4 * n, sizeof *t->events);
    int rc = s.stages && s.copies && s.done && t && t->events ? 0 : err_set(ERR_NOMEM, "timeline: out of memory");
    if (!rc) {
        plan_rates_of(&s.r, w);
        int64_t pos = (p->prompt - s.ph->pass_tokens) / 2 / s.ph->pass_tokens * s.ph->pass_tokens;
        if (pos < 0) pos = 0;
        int64_t left = p->prompt - pos;
        int tokens = left < s.ph->pass_tokens ? (int)left : s.ph->pass_tokens;
        if (phase == PLAN_DECODE)
            decode_stages(&s, p->depth);
        else
            prefill_stages(&s, pos, tokens);
        double bytes = 0;
        for (int i = 0; i < s.n_copy; i++) bytes += s.copies[i].bytes;
        double of = phase == PLAN_DECODE ? bytes : (double)p->pinned_bytes;
        s.rate = bytes > 0 ? bytes / plan_copy_s(&s.r, bytes, of) : s.r.link;
        rc = run(&s, t);
        if (phase == PLAN_DECODE)
            snprintf(t->title, sizeof t->title, "decode of %d token%s at %lld", s.r.n_tok, s.r.n_tok > 1 ? "s" : "", (long long)p->depth);
        else
            snprintf(t->title, sizeof t->title, "prefill, %d tokens from %lld", tokens, (long long)pos);
    }
    free(s.stages);
    free(s.copies);
    free(s.done);
    if (rc)
        timeline_close(t);
    else
        *out = t;
    return rc;
}

int timeline_open(struct timeline **out, const struct plan *p, const struct model *m, const struct plan_request *r, enum plan_phase_id phase) {
    struct plan_work w;
    int rc = plan_work_of(&w, p, m, r);
    if (rc) return rc;
    rc = timeline_of(out, p, &w, phase);
    plan_work_close(&w);
    return rc;
}

void timeline_close(struct timeline *t) {
    if (!t) return;
    free(t->events);
    free(t);
}
