/* plan_why.c: what decided a plan, in a few sentences. */
#include "offload/plan_work.h"

#include <stdarg.h>
#include <stdio.h>

#define GB 1e-9

struct sums {
    double kv[PLAN_PLACES], ff[PLAN_PLACES], experts[PLAN_PLACES], mixers[PLAN_PLACES];
    int kv_layers, ff_layers; /* that the CPU takes part in */
};

static void add_up(struct sums *s, const struct plan_work *w, const struct plan_phase *ph) {
    *s = (struct sums){.kv_layers = 0};
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        const struct plan_layer *p = &ph->layers[il];
        size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
        plan_ff_bytes(ff, l, p->ff_rows);
        plan_expert_bytes(ex, l, p->experts);
        for (int q = 0; q < PLAN_PLACES; q++) {
            s->kv[q] += (double)p->kv_pages[q] * (double)l->page_bytes * GB;
            s->ff[q] += (double)ff[q] * GB;
            s->experts[q] += (double)ex[q] * GB;
        }
        s->mixers[p->mixer] += (double)l->mixer.bytes * GB;
        s->kv_layers += p->kv_pages[PLAN_CPU] > 0;
        s->ff_layers += p->ff_rows[PLAN_CPU] > 0 || p->experts[PLAN_CPU] > 0;
    }
}

static void say(struct plan *p, int *n, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void say(struct plan *p, int *n, const char *fmt, ...) {
    va_list ap;
    if (*n >= PLAN_WHY) return;
    va_start(ap, fmt);
    vsnprintf(p->why[(*n)++], sizeof p->why[0], fmt, ap);
    va_end(ap);
}

void plan_explain(struct plan *p, const struct plan_work *w) {
    const struct plan_phase *pre = &p->phase[PLAN_PREFILL], *dec = &p->phase[PLAN_DECODE];
    struct sums d, f;
    int n = 0;
    add_up(&d, w, dec);
    add_up(&f, w, pre);
    double weights = d.ff[PLAN_CPU] + d.ff[PLAN_STREAM] + d.experts[PLAN_CPU] + d.mixers[PLAN_CPU] + d.mixers[PLAN_STREAM];
    double kv = d.kv[PLAN_CPU] + d.kv[PLAN_STREAM];
    if (kv + weights <= 0) say(p, &n, "all layers and all KV are in VRAM");
    if (d.kv[PLAN_CPU] > 0)
        say(p, &n, "%.2f GB of KV attended by the CPU where it lies, in %d layers%s: moving queries costs less than moving pages, and the GPU "
                   "attends the rest meanwhile", d.kv[PLAN_CPU], d.kv_layers, weights < kv ? "; KV before FFN because it costs nothing before the "
                   "context is full" : "");
    if (d.ff[PLAN_CPU] + d.experts[PLAN_CPU] > 0)
        say(p, &n, "%.2f GB of FFN on the CPU in %d layers: it reads its rows while the GPU reads its own", d.ff[PLAN_CPU] + d.experts[PLAN_CPU],
            d.ff_layers);
    if (d.mixers[PLAN_CPU] + d.mixers[PLAN_STREAM] > 0)
        say(p, &n, "%.2f GB of attention weights outside VRAM: KV and FFN alone do not make enough room", d.mixers[PLAN_CPU] + d.mixers[PLAN_STREAM]);
    if (p->decode.link_bytes > 0)
        say(p, &n, "%.2f GB streamed per token beside that: the link would be idle, and DRAM has more than the CPU takes", p->decode.link_bytes * GB);
    double streamed = f.ff[PLAN_STREAM] + f.experts[PLAN_STREAM] + f.mixers[PLAN_STREAM];
    if (streamed + f.kv[PLAN_STREAM] > 0)
        say(p, &n, "prefill streams %.2f GB of weights and at most %.2f GB of KV per pass of %d tokens, and is bound by %s", streamed,
            f.kv[PLAN_STREAM] * (pre->stage_whole ? 1 : (pre->pass_tokens + pre->chunk_tokens - 1) / pre->chunk_tokens), pre->pass_tokens,
            plan_bound_name(p->prefill_bound));
}
