/* plan_time.c: how long a placement takes, from the rates of a machine. See plan.h for the formulas and plan_work.h. */
#include "core/kv.h"
#include "core/quant.h"
#include "offload/plan_work.h"

#include <math.h>

#define GIGA 1e9

/* Measured shares by which small batches slow GPU kernels per further token, and what the CPU gains: integer products of
 * quantised K, and rows that share a tile of K and V. */
static const double gpu_batch_weights = 0.07, gpu_batch_attn = 0.05, cpu_quant_gain = 1.6, cpu_rows_gain = 1.5;

static double at_most(double a, double b) { return a < b ? a : b; }
static double at_least(double a, double b) { return a > b ? a : b; }

void plan_rates_of(struct plan_rates *out, const struct plan_work *w) {
    const struct machine *m = w->r.machine;
    int n = w->r.decode_tokens > 1 ? w->r.decode_tokens : 1;
    bool quant = w->r.type_k == QT_Q8_0 || w->r.type_k == QT_Q4_0;
    *out = (struct plan_rates){.n_tok = n, .cpu = m->host.dram_gbps * m->host.cpu_share * GIGA, .cpu_ops = m->cpu.matvec_gops * GIGA,
                               .cpu_attn_flops = m->cpu.attn_gflops * GIGA * (quant ? cpu_quant_gain : 1) * (n >= 4 ? cpu_rows_gain : 1)};
    out->dram = at_least(m->host.dram_with_dma_gbps * GIGA, out->cpu);
    if (!m->has_gpu) return;
    out->vram = m->gpu.vram_gbps * GIGA;
    out->matvec = out->vram * m->gpu.matvec_share / (1 + gpu_batch_weights * (n - 1));
    out->attn = out->vram * m->gpu.attn_share / (1 + gpu_batch_attn * (n - 1));
    out->link = at_most(m->link.h2d_gbps * GIGA, out->dram);
    out->link_pageable = at_most(m->link.pageable_gbps * GIGA, out->link);
    out->locked = m->host.memlock_bytes >= 0 ? m->host.memlock_bytes : INFINITY;
    out->slowed_s = at_least(0, 1 - (out->dram - out->link) / out->cpu) / out->link;
    out->d2h = at_most(m->link.d2h_gbps * GIGA, out->dram);
    out->handover_s = m->cpu.handover_us * 1e-6;
    out->launch_s = m->gpu.graph_launch_us * 1e-6;
    out->copy_s = m->link.copy_latency_us * 1e-6;
    out->gemm = m->gpu.gemm_tflops * 1e12;
    out->attn_prefill = m->gpu.attn_tflops * 1e12;
}

double plan_copy_s(const struct plan_rates *r, double bytes, double n) {
    double pageable = n > r->locked ? 1 - r->locked / n : 0;
    return bytes * ((1 - pageable) / r->link + pageable / r->link_pageable);
}

/* --- parts -------------------------------------------------------------------------------------------------------------------- */

double plan_gpu_s(const struct plan_rates *r, const struct plan_piece *p) { return p->read / r->matvec; }

double plan_cpu_s(const struct plan_rates *r, const struct plan_piece *p) {
    double rate = p->cpu_gbps > 0 ? at_most(p->cpu_gbps * GIGA, r->dram) : r->cpu;
    return at_least(p->read / rate, p->flops * r->n_tok / r->cpu_ops);
}

double plan_page_gpu_s(const struct plan_rates *r, const struct plan_work_layer *l) { return (double)l->page_bytes / r->attn; }

double plan_page_cpu_s(const struct plan_rates *r, const struct plan_work_layer *l) {
    double rate = l->attn_cpu_gbps > 0 ? at_most(l->attn_cpu_gbps * GIGA, r->dram) : r->cpu;
    return at_least((double)l->page_bytes / rate, KV_PAGE * l->attn_flops * r->n_tok / r->cpu_attn_flops);
}

static double state_s(const struct plan_work_layer *l, double rate) { return 2 * (double)l->state_bytes / rate; }

/* --- decode ------------------------------------------------------------------------------------------------------------------- */

/* What is added up over the layers. */
struct sums {
    const struct plan_rates *r;
    double slow;                   /* how much longer the CPU takes for everything, since copies read DRAM too */
    double t0;                     /* windows, one after the other */
    double window;                 /* of it: windows in which the CPU works */
    double gpu_s, cpu_s, fixed_s;
    double cpu_long;               /* of the windows: where the CPU is the longer side */
    double cpu_bytes, link_bytes, vram_bytes;
    double cpu_by_ops;             /* of cpu_s: bound by arithmetic */
    bool on_cpu;                   /* where the hidden state is */
    double quiet_s;                /* at the end: no slot is given back, copies get no further than the slots */
    double ahead;                  /* bytes of these, which are half full by then */
};

static void on_gpu(struct sums *s, double seconds) {
    s->t0 += seconds;
    s->gpu_s += seconds;
}

static void fixed(struct sums *s, double seconds) {
    s->t0 += seconds;
    s->fixed_s += seconds;
}

/* The hidden state goes to the side that works next. */
static void move(struct sums *s, bool to_cpu) {
    if (to_cpu != s->on_cpu) fixed(s, s->r->handover_s / 2);
    s->on_cpu = to_cpu;
}

static void on_cpu(struct sums *s, double alone_s, double bytes) {
    double seconds = alone_s * s->slow;
    s->t0 += seconds;
    s->window += seconds;
    s->cpu_long += seconds;
    s->cpu_s += seconds;
    s->cpu_bytes += bytes;
    if (alone_s > bytes / s->r->cpu * 1.001) s->cpu_by_ops += seconds;
}

/* Both at once. */
static void side_by_side(struct sums *s, double gpu, double alone_s, double bytes) {
    double cpu = alone_s * s->slow, both = at_least(gpu, cpu);
    s->t0 += both;
    s->window += both;
    s->gpu_s += gpu;
    s->cpu_s += cpu;
    s->cpu_bytes += bytes;
    if (cpu >= gpu) s->cpu_long += cpu;
    if (alone_s > bytes / s->r->cpu * 1.001) s->cpu_by_ops += cpu;
    fixed(s, s->r->handover_s);
}

static void add_mixer(struct sums *s, const struct plan_work_layer *l, const struct plan_layer *p, int64_t depth) {
    const struct plan_rates *r = s->r;
    int64_t pages[PLAN_PLACES];
    bool cpu = p->mixer == PLAN_CPU;
    move(s, cpu);
    if (cpu) {
        on_cpu(s, plan_cpu_s(r, &l->mixer), l->mixer.read);
        if (l->delta) on_cpu(s, state_s(l, r->cpu), 2 * (double)l->state_bytes);
    } else {
        on_gpu(s, plan_gpu_s(r, &l->mixer));
        if (l->delta) on_gpu(s, state_s(l, r->matvec));
        s->vram_bytes += l->mixer.read + (l->delta ? 2 * (double)l->state_bytes : 0);
        if (p->mixer == PLAN_STREAM) s->link_bytes += (double)l->mixer.bytes;
    }
    if (!l->kv_pages) return;
    plan_kv_pages(pages, p, depth);
    double here = plan_page_cpu_s(r, l) * (double)pages[PLAN_CPU], bytes = (double)pages[PLAN_CPU] * (double)l->page_bytes;
    double there = plan_page_gpu_s(r, l) * (double)(pages[PLAN_VRAM] + pages[PLAN_STREAM]);
    s->link_bytes += (double)pages[PLAN_STREAM] * (double)l->page_bytes;
    s->vram_bytes += (double)(pages[PLAN_VRAM] + pages[PLAN_STREAM]) * (double)l->page_bytes;
    if (cpu)
        on_cpu(s, here, bytes);
    else if (pages[PLAN_CPU])
        side_by_side(s, there, here, bytes);
    else
        on_gpu(s, there);
}

/* The part `share` of a piece that the CPU has, beside what the GPU has of it. */
static void add_split(struct sums *s, const struct plan_piece *p, double cpu, double gpu) {
    double there = plan_gpu_s(s->r, p) * gpu, here = plan_cpu_s(s->r, p) * cpu;
    s->vram_bytes += p->read * gpu;
    if (gpu <= 0 && cpu > 0) {
        move(s, true);
        on_cpu(s, here, p->read * cpu);
        return;
    }
    move(s, false);
    if (cpu > 0)
        side_by_side(s, there, here, p->read * cpu);
    else
        on_gpu(s, there);
}

static void add_ffn(struct sums *s, const struct plan_work_layer *l, const struct plan_layer *p) {
    size_t bytes[PLAN_PLACES];
    if (l->n_ff) {
        plan_ff_bytes(bytes, l, p->ff_rows);
        double all = (double)l->ff.bytes;
        add_split(s, &l->ff, (double)bytes[PLAN_CPU] / all, 1 - (double)bytes[PLAN_CPU] / all);
        s->link_bytes += (double)bytes[PLAN_STREAM];
        return;
    }
    move(s, p->ffn == PLAN_CPU);
    if (p->ffn == PLAN_CPU) {
        on_cpu(s, plan_cpu_s(s->r, &l->rest), l->rest.read);
    } else {
        on_gpu(s, plan_gpu_s(s->r, &l->rest));
        s->vram_bytes += l->rest.read;
        if (p->ffn == PLAN_STREAM) s->link_bytes += (double)l->rest.bytes;
    }
    if (l->n_expert) add_split(s, &l->experts, (double)p->experts[PLAN_CPU] / l->n_expert, 1 - (double)p->experts[PLAN_CPU] / l->n_expert);
}

static enum plan_bound bound_of(const struct sums *s, double total, double copy) {
    if (copy > 0 && total <= copy * 1.0001) return PLAN_BY_LINK;
    if (s->slow > 1 && s->cpu_s > total / 2) return PLAN_BY_DRAM;
    if (s->cpu_long > total / 2) return s->cpu_by_ops > s->cpu_s / 2 ? PLAN_BY_CPU : PLAN_BY_DRAM;
    return s->fixed_s > total / 2 ? PLAN_BY_LAUNCH : PLAN_BY_VRAM;
}

static void walk(struct sums *s, const struct plan_work *w, const struct plan_phase *ph, int64_t depth) {
    const struct plan_rates *r = s->r;
    int calls = w->calls;
    for (int il = 0; il < w->n_layer; il++) {
        add_mixer(s, &w->layers[il], &ph->layers[il], depth);
        add_ffn(s, &w->layers[il], &ph->layers[il]);
        calls += w->layers[il].calls;
    }
    s->quiet_s = ph->head == PLAN_CPU ? plan_cpu_s(r, &w->head) : plan_gpu_s(r, &w->head);
    s->ahead = ((double)ph->ring_slots * (double)ph->ring_slot_bytes + (double)ph->stage_slots * (double)ph->stage_slot_bytes) / 2;
    move(s, ph->head == PLAN_CPU);
    if (ph->head == PLAN_CPU) {
        on_cpu(s, plan_cpu_s(r, &w->head), w->head.read);
    } else {
        on_gpu(s, plan_gpu_s(r, &w->head));
        s->vram_bytes += w->head.read;
        fixed(s, 2 * r->copy_s + 4.0 * w->m->n_vocab * r->n_tok / r->d2h); /* embedding in, logits out */
    }
    fixed(s, calls * r->launch_s);
    if (s->link_bytes > 0) on_gpu(s, s->link_bytes / r->vram); /* written before it is read */
}

static void finish(struct plan_step *out, const struct sums *s) {
    const struct plan_rates *r = s->r;
    double copy = s->link_bytes > 0 ? plan_copy_s(r, s->link_bytes, s->link_bytes) : 0;
    double least = copy > 0 ? copy + at_least(0, s->quiet_s - s->ahead / r->link) : 0, t = at_least(s->t0, least);
    *out = (struct plan_step){.s = t, .gpu_s = s->gpu_s, .cpu_s = s->cpu_s, .fixed_s = s->fixed_s, .cpu_bytes = s->cpu_bytes,
                              .link_s = copy, .link_bytes = s->link_bytes, .vram_bytes = s->vram_bytes};
    out->bound = bound_of(s, t, least);
}

void plan_decode_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t depth) {
    struct sums s = {.r = r, .slow = 1};
    walk(&s, w, ph, depth);
    double meanwhile = s.link_bytes - r->link * (s.t0 - s.window); /* copied while the CPU works */
    if (meanwhile > 0 && s.cpu_s > 0 && r->slowed_s > 0) {
        double most = r->dram > r->link ? r->cpu / (r->dram - r->link) : INFINITY; /* copies all the time */
        s = (struct sums){.r = r, .slow = at_most(1 + r->slowed_s * meanwhile / s.cpu_s, most)};
        walk(&s, w, ph, depth);
    }
    finish(out, &s);
}

void plan_cpu_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, int64_t depth) {
    struct sums s = {.r = r, .slow = 1, .on_cpu = true};
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        int64_t pages = (depth + KV_PAGE - 1) / KV_PAGE;
        if (pages > l->kv_pages) pages = l->kv_pages;
        const struct plan_piece *parts[] = {&l->mixer, &l->rest, &l->ff, &l->experts};
        for (int i = 0; i < 4; i++) on_cpu(&s, plan_cpu_s(r, parts[i]), parts[i]->read);
        if (l->delta) on_cpu(&s, state_s(l, r->cpu), 2 * (double)l->state_bytes);
        if (pages) on_cpu(&s, plan_page_cpu_s(r, l) * (double)pages, (double)pages * (double)l->page_bytes);
    }
    on_cpu(&s, plan_cpu_s(r, &w->head), w->head.read);
    finish(out, &s);
}

/* --- prefill ------------------------------------------------------------------------------------------------------------------ */

static double attn_flops(const struct plan_work_layer *l, int64_t pos, int n) {
    double mid = (double)pos + n / 2.0, seen = l->window && mid > (double)l->window ? (double)l->window : mid;
    return l->attn_flops * n * seen;
}

/* Weights and KV of a layer that are outside VRAM, in bytes. */
static double streamed_weights(const struct plan_work_layer *l, const struct plan_layer *p) {
    size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
    plan_ff_bytes(ff, l, p->ff_rows);
    plan_expert_bytes(ex, l, p->experts);
    double b = (double)(ff[PLAN_STREAM] + ex[PLAN_STREAM]);
    if (p->mixer == PLAN_STREAM) b += (double)l->mixer.bytes;
    if (p->ffn == PLAN_STREAM) b += (double)l->rest.bytes;
    return b;
}

void plan_prefill_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t pos, int n,
                       double outside) {
    int chunks = (n + ph->chunk_tokens - 1) / ph->chunk_tokens, calls = w->calls;
    double weights = 0, kv = 0, attn_s = 0, read = 0;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        const struct plan_layer *p = &ph->layers[il];
        int64_t pages[PLAN_PLACES];
        plan_kv_pages(pages, p, pos + n);
        weights += streamed_weights(l, p);
        kv += (double)pages[PLAN_STREAM] * (double)l->page_bytes * (ph->stage_whole ? 1 : chunks);
        attn_s += attn_flops(l, pos, n) / r->attn_prefill;
        read += (double)(l->mixer.bytes + l->rest.bytes + l->ff.bytes + l->experts.bytes);
        calls += l->calls;
    }
    double linear_s = w->linear_flops * n / r->gemm + read * chunks / r->matvec;
    linear_s = at_least(linear_s, calls * chunks * r->launch_s);
    double compute = linear_s + attn_s, copy = plan_copy_s(r, weights + kv, outside);
    /* A single slot is refilled only after the attention that reads it. */
    double t = at_least(compute, copy);
    if (ph->stage_slots == 1 && kv > 0) t = at_least(t, attn_s + plan_copy_s(r, kv, outside));
    if (ph->ring_slots == 1) t = at_least(t, compute + plan_copy_s(r, weights, outside));
    *out = (struct plan_step){.s = t, .gpu_s = compute, .link_s = copy, .link_bytes = weights + kv,
                              .bound = copy >= compute ? PLAN_BY_LINK : linear_s == calls * chunks * r->launch_s ? PLAN_BY_LAUNCH : PLAN_BY_GPU};
}

/* The last token's output. */
static double head_s(const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, double outside) {
    return ph->head == PLAN_STREAM ? plan_copy_s(r, (double)w->head.bytes, outside) : plan_gpu_s(r, &w->head);
}

double plan_prefill_s(enum plan_bound *bound, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t prompt,
                      double outside, int samples) {
    double t = 0, by[PLAN_BY_LAUNCH + 1] = {0};
    int64_t n_pass = (prompt + ph->pass_tokens - 1) / ph->pass_tokens, n = n_pass < samples ? n_pass : samples;
    for (int64_t i = 0; i < n; i++) { /* the pass in the middle of each part */
        int64_t pass = (2 * i + 1) * n_pass / (2 * n), pos = pass * ph->pass_tokens, left = prompt - pos;
        struct plan_step s;
        plan_prefill_step(&s, w, r, ph, pos, left < ph->pass_tokens ? (int)left : ph->pass_tokens, outside);
        t += s.s * (double)n_pass / (double)n;
        by[s.bound] += s.s;
    }
    *bound = PLAN_BY_GPU;
    for (int b = 0; b <= PLAN_BY_LAUNCH; b++)
        if (by[b] > by[*bound]) *bound = (enum plan_bound)b;
    return t + head_s(w, r, ph, outside);
}

double plan_cpu_prefill_s(const struct plan_work *w, const struct plan_rates *r, int64_t prompt) {
    double attn = 0;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        double seen = l->window && prompt / 2 > l->window ? (double)l->window : (double)prompt / 2;
        attn += l->attn_flops * (double)prompt * seen;
    }
    return w->linear_flops * (double)prompt / r->cpu_ops + attn / (r->cpu_attn_flops * cpu_rows_gain);
}

const char *plan_place_name(enum plan_place p) {
    static const char *const names[] = {"vram", "cpu", "streamed"};
    return names[p];
}

const char *plan_bound_name(enum plan_bound b) {
    static const char *const names[] = {"VRAM bandwidth", "host memory bandwidth", "link bandwidth", "CPU arithmetic", "GPU arithmetic",
                                        "launches and hand-overs"};
    return names[b];
}
