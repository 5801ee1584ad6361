/* plan_search.c: the best placement for decode. A linear program over the totals of each place (plan.h) gives the start, a
 * search over whole pages, rows and layers with the time of the real layers goes on from there. Prefill comes after:
 * plan_prefill.c. */
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "offload/lp.h"
#include "offload/plan_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What is chosen, in whole numbers; every class is spread evenly over the layers that are free to have it. */
enum knob { KV_CPU, KV_STREAM, FF_CPU, FF_STREAM, EX_CPU, MIX_CPU, MIX_STREAM, N_BIN, /* in pages, PLAN_ROWS, experts, mixers */
            KV_LAYERS = N_BIN, FF_LAYERS, EX_LAYERS, /* layers that the CPU takes part in */
            HEAD_CPU, N_KNOB };
struct knobs {
    int64_t v[N_KNOB];
};

struct search {
    const struct plan_work *w;
    const struct plan_rates *r;
    struct plan_pins pins;
    struct plan_phase *ph;       /* the phase under construction; everything that is not free is set in `base` */
    struct plan_phase *base;
    size_t vram_cap, host_cap;   /* host: what may be outside VRAM */
    int *kv, *ff, *ex, *mix;     /* [n_...] free layers; mix: Gated DeltaNet first, whose KV is none */
    int n_kv, n_ff, n_ex, n_mix, n_mix_delta;
    int ring;                    /* slots */
    int64_t kv_pages, ff_quanta, ex_count; /* per layer: of the smallest */
    int64_t kv_host;             /* pages per layer that must be outside; -1: free */
    double page_bytes, quantum_bytes, expert_bytes, mixer_bytes; /* averages */
    double low_share;
    bool head_free;
    bool mixers_stay;            /* the rest is enough: they are not tried */
    double best_s;
    struct knobs best;
    long evals;
};

/* Share of `total` that item i of n gets, as even as whole numbers can be. */
static int64_t spread(int64_t total, int i, int n) { return (i + 1) * total / n - i * total / n; }

/* --- placement of knobs ----------------------------------------------------------------------------------------------------- */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Mixers outside VRAM: of the first kind first. */
static void place_mixers(struct search *s, const struct knobs *k) {
    int64_t out = k->v[MIX_CPU] + k->v[MIX_STREAM];
    int lists[2][2] = {{0, s->n_mix_delta}, {s->n_mix_delta, s->n_mix}};
    for (int part = 0, seen = 0; part < 2; part++) {
        int from = lists[part][0], n = lists[part][1] - from;
        int64_t here = out < n ? out : n;
        for (int i = 0; i < n; i++) {
            if (!spread(here, i, n)) continue;
            struct plan_layer *p = &s->ph->layers[s->mix[from + i]];
            bool cpu = spread(k->v[MIX_CPU], seen++, (int)(k->v[MIX_CPU] + k->v[MIX_STREAM])) > 0;
            const struct plan_work_layer *l = &s->w->layers[s->mix[from + i]];
            p->mixer = cpu ? PLAN_CPU : PLAN_STREAM;
            if (l->n_expert) p->ffn = p->mixer; /* the small rest goes along */
            if (!cpu) continue;
            if (l->delta) p->state = PLAN_CPU;
            if (l->kv_pages) p->kv_pages[PLAN_CPU] = l->kv_pages, p->kv_pages[PLAN_VRAM] = p->kv_pages[PLAN_STREAM] = 0;
        }
        out -= here;
    }
}

/* CPU's share over k of the n layers, streamed over all of them or, where that is too much, over the others.
 * Calls set(layer, cpu, stream); false: a layer would have more than `each`. */
static bool place_class(struct search *s, const int *layers, int n, int64_t each, int64_t cpu, int64_t stream, int64_t k,
                        void (*set)(struct search *, int, int64_t, int64_t)) {
    if (!cpu && !stream) return true;
    if (!n) return false;
    if (k > n) k = n;
    if (cpu && k < ceil_div(cpu, each)) k = ceil_div(cpu, each);
    if (k > n) return false;
    bool all = cpu == 0 || ceil_div(cpu, k > 0 ? k : 1) + ceil_div(stream, n) <= each;
    if (!all && k < n && ceil_div(stream, n - k) > each) return false;
    if (!all && k == n) return false;
    for (int i = 0, in = 0, other = 0; i < n; i++) {
        bool mine = cpu && spread(k, i, n) > 0;
        int64_t c = mine ? spread(cpu, in++, (int)k) : 0;
        int64_t st = all ? spread(stream, i, n) : mine ? 0 : spread(stream, other++, (int)(n - k));
        if (c + st > each) return false;
        set(s, layers[i], c, st);
    }
    return true;
}

static void set_kv(struct search *s, int il, int64_t cpu, int64_t stream) {
    struct plan_layer *p = &s->ph->layers[il];
    if (p->mixer == PLAN_CPU) return;
    if (s->kv_host >= 0) stream = s->kv_host - cpu; /* as pinned, in every layer */
    p->kv_pages[PLAN_CPU] = (int32_t)cpu;
    p->kv_pages[PLAN_STREAM] = (int32_t)stream;
    p->kv_pages[PLAN_VRAM] = s->w->layers[il].kv_pages - (int32_t)(cpu + stream);
}

static void set_ff(struct search *s, int il, int64_t cpu, int64_t stream) {
    struct plan_layer *p = &s->ph->layers[il];
    const struct plan_work_layer *l = &s->w->layers[il];
    int left = l->n_ff;
    p->ff_rows[PLAN_STREAM] = l->n_quanta == 1 ? (stream ? left : 0) : (int32_t)stream * PLAN_ROWS;
    p->ff_rows[PLAN_CPU] = l->n_quanta == 1 ? (cpu ? left : 0) : (int32_t)cpu * PLAN_ROWS;
    if (l->n_quanta > 1 && cpu + stream == l->n_quanta) /* the rest that is no whole PLAN_ROWS goes along */
        p->ff_rows[cpu ? PLAN_CPU : PLAN_STREAM] += l->n_ff % PLAN_ROWS;
    p->ff_rows[PLAN_VRAM] = left - p->ff_rows[PLAN_CPU] - p->ff_rows[PLAN_STREAM];
    p->ffn = p->ff_rows[PLAN_VRAM] ? PLAN_VRAM : cpu ? PLAN_CPU : PLAN_STREAM;
}

static void set_ex(struct search *s, int il, int64_t cpu, int64_t stream) {
    struct plan_layer *p = &s->ph->layers[il];
    (void)stream;
    p->experts[PLAN_CPU] = (int16_t)cpu;
    p->experts[PLAN_VRAM] = (int16_t)(s->w->layers[il].n_expert - cpu);
}

static bool build(struct search *s, const struct knobs *k) {
    memcpy(s->ph->layers, s->base->layers, sizeof s->ph->layers[0] * (size_t)s->w->n_layer);
    s->ph->head = k->v[HEAD_CPU] ? PLAN_CPU : s->base->head;
    for (int i = 0; i < N_KNOB; i++)
        if (k->v[i] < 0) return false;
    if (k->v[MIX_CPU] + k->v[MIX_STREAM] > s->n_mix) return false;
    bool pinned = s->kv_host >= 0;
    if (pinned && k->v[KV_CPU] + k->v[KV_STREAM] != s->kv_host * s->n_kv) return false;
    if (!place_class(s, s->kv, s->n_kv, pinned ? s->kv_host + 1 : s->kv_pages, k->v[KV_CPU], k->v[KV_STREAM], pinned ? s->n_kv : k->v[KV_LAYERS], set_kv))
        return false;
    int64_t ff_cpu = k->v[FF_CPU], ff_layers = k->v[FF_LAYERS];
    if (s->w->r.pins & PLAN_NO_SPLIT) ff_layers = 0, ff_cpu = s->ff_quanta ? ceil_div(ff_cpu, s->ff_quanta) * s->ff_quanta : 0;
    if (!place_class(s, s->ff, s->n_ff, s->ff_quanta, ff_cpu, k->v[FF_STREAM], ff_layers, set_ff)) return false;
    if (!place_class(s, s->ex, s->n_ex, s->ex_count, k->v[EX_CPU], 0, k->v[EX_LAYERS], set_ex)) return false;
    if (k->v[MIX_CPU] + k->v[MIX_STREAM]) place_mixers(s, k);
    s->ph->ring_wanted = s->ring;
    s->ph->stage_wanted = PLAN_STAGE_SLOTS;
    s->ph->stage_whole = true;
    plan_ring(s->ph, s->w);
    return true;
}

/* --- sizes of a placement --------------------------------------------------------------------------------------------------- */

/* Outside VRAM, as if prefill had the same in it; plan_prefill needs the exact table. */
static size_t outside_bytes(const struct search *s) {
    size_t sum = s->ph->head == PLAN_CPU ? s->w->head.bytes : 0;
    for (int il = 0; il < s->w->n_layer; il++) {
        const struct plan_work_layer *l = &s->w->layers[il];
        const struct plan_layer *p = &s->ph->layers[il];
        size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
        plan_ff_bytes(ff, l, p->ff_rows);
        plan_expert_bytes(ex, l, p->experts);
        sum += ff[PLAN_CPU] + ff[PLAN_STREAM] + ex[PLAN_CPU] + ex[PLAN_STREAM];
        if (p->mixer != PLAN_VRAM) sum += l->mixer.bytes;
        if (p->ffn != PLAN_VRAM) sum += l->rest.bytes;
        if (p->state == PLAN_CPU) sum += 2 * l->state_bytes;
        sum += (size_t)(p->kv_pages[PLAN_CPU] + p->kv_pages[PLAN_STREAM]) * l->page_bytes;
    }
    return sum;
}

static size_t vram_bytes(struct search *s) {
    plan_vram_table(&s->ph->vram, s->w, s->ph);
    return s->ph->vram.sum;
}

static bool fits(struct search *s) { return vram_bytes(s) <= s->vram_cap && outside_bytes(s) <= s->host_cap; }

static bool share_kept(const struct search *s, const struct knobs *k) {
    if (!(s->w->r.pins & PLAN_PIN_KV_SHARE)) return true;
    double out = (double)(k->v[KV_CPU] + k->v[KV_STREAM]);
    return fabs((double)k->v[KV_CPU] - s->w->r.kv_cpu_share * out) <= 1;
}

static bool allowed(const struct search *s, const struct knobs *k) {
    unsigned pins = s->w->r.pins;
    if ((pins & PLAN_NO_STREAM) && (k->v[KV_STREAM] || k->v[FF_STREAM] || k->v[MIX_STREAM])) return false;
    if ((pins & PLAN_NO_CPU) && (k->v[KV_CPU] || k->v[FF_CPU] || k->v[EX_CPU] || k->v[MIX_CPU] || k->v[HEAD_CPU])) return false;
    return share_kept(s, k) && (s->head_free || !k->v[HEAD_CPU]);
}

/* Takes the knobs if they are better than the best. */
static bool consider(struct search *s, const struct knobs *k) {
    struct plan_step t, low;
    s->evals++;
    if (!allowed(s, k) || !build(s, k) || !fits(s)) return false;
    plan_decode_step(&t, s->w, s->r, s->ph, s->w->r.depth);
    plan_decode_step(&low, s->w, s->r, s->ph, s->w->r.depth / PLAN_LOW);
    double t_s = t.s + s->low_share * low.s;
    if (t_s >= s->best_s) return false;
    s->best_s = t_s;
    s->best = *k;
    return true;
}

/* --- start: enough outside VRAM ----------------------------------------------------------------------------------------------- */

static int64_t limit_of(const struct search *s, int bin) {
    switch (bin) {
    case KV_CPU: case KV_STREAM: return s->kv_pages * s->n_kv;
    case FF_CPU: case FF_STREAM: return s->ff_quanta * s->n_ff;
    case EX_CPU: return s->ex_count * s->n_ex;
    default: return s->mixers_stay ? 0 : s->n_mix;
    }
}

static double unit_bytes(const struct search *s, int bin) {
    switch (bin) {
    case KV_CPU: case KV_STREAM: return s->page_bytes;
    case FF_CPU: case FF_STREAM: return s->quantum_bytes;
    case EX_CPU: return s->expert_bytes;
    default: return s->mixer_bytes;
    }
}

static void all_layers(const struct search *s, struct knobs *k) {
    k->v[KV_LAYERS] = s->n_kv;
    k->v[FF_LAYERS] = s->n_ff;
    k->v[EX_LAYERS] = s->n_ex;
}

/* KV that must be outside, by the pins. */
static void required(const struct search *s, struct knobs *k) {
    if (s->kv_host < 0) return;
    int64_t out = s->kv_host * s->n_kv;
    double share = s->w->r.pins & PLAN_PIN_KV_SHARE ? s->w->r.kv_cpu_share : s->w->r.pins & PLAN_NO_CPU ? 0 : 1;
    k->v[KV_CPU] = (int64_t)llround((double)out * share);
    k->v[KV_STREAM] = out - k->v[KV_CPU];
}

/* More in this bin until VRAM is enough, or the bin is full. */
static bool fill_bin(struct search *s, struct knobs *k, int bin) {
    struct knobs was = *k;
    int64_t lo = k->v[bin], hi = limit_of(s, bin);
    if (bin == KV_STREAM || bin == KV_CPU) hi -= k->v[bin == KV_CPU ? KV_STREAM : KV_CPU];
    if (bin == FF_STREAM || bin == FF_CPU) hi -= k->v[bin == FF_CPU ? FF_STREAM : FF_CPU];
    if (bin == MIX_STREAM || bin == MIX_CPU) hi -= k->v[bin == MIX_CPU ? MIX_STREAM : MIX_CPU];
    if (s->kv_host >= 0 && bin <= KV_STREAM) return false;
    if (hi <= lo) return false;
    k->v[bin] = hi;
    while (hi > lo && !(allowed(s, k) && build(s, k))) k->v[bin] = --hi; /* what every layer can have */
    if (hi <= lo) {
        *k = was;
        return false;
    }
    if (vram_bytes(s) > s->vram_cap) return false; /* all of it, and more */
    while (lo < hi) { /* the least that is enough */
        int64_t mid = lo + (hi - lo) / 2;
        k->v[bin] = mid;
        if (allowed(s, k) && build(s, k) && vram_bytes(s) <= s->vram_cap)
            hi = mid;
        else
            lo = mid + 1;
    }
    k->v[bin] = hi;
    return true;
}

/* Moves out of VRAM what is needed, in this order. */
static bool make_room(struct search *s, struct knobs *k, const int *order, int n) {
    if (allowed(s, k) && build(s, k) && vram_bytes(s) <= s->vram_cap) return true;
    for (int i = 0; i < n; i++)
        if (order[i] == HEAD_CPU) {
            k->v[HEAD_CPU] = s->head_free && !(s->w->r.pins & PLAN_NO_CPU);
            if (build(s, k) && vram_bytes(s) <= s->vram_cap) return true;
        } else if (fill_bin(s, k, order[i])) {
            return true;
        }
    return false;
}

/* With a pinned share both kinds of KV grow together. */
static bool make_room_shared(struct search *s, struct knobs *k) {
    int64_t lo = 0, hi = s->kv_pages * s->n_kv;
    double share = s->w->r.kv_cpu_share;
    for (; lo < hi;) {
        int64_t mid = lo + (hi - lo) / 2;
        k->v[KV_CPU] = (int64_t)llround((double)mid * share);
        k->v[KV_STREAM] = mid - k->v[KV_CPU];
        if (build(s, k) && vram_bytes(s) <= s->vram_cap)
            hi = mid;
        else
            lo = mid + 1;
    }
    k->v[KV_CPU] = (int64_t)llround((double)hi * share);
    k->v[KV_STREAM] = hi - k->v[KV_CPU];
    return build(s, k) && vram_bytes(s) <= s->vram_cap;
}

static bool start(struct search *s, struct knobs *k) {
    static const int cpu[] = {KV_CPU, FF_CPU, EX_CPU, MIX_STREAM, MIX_CPU, HEAD_CPU};
    static const int link[] = {KV_STREAM, FF_STREAM, MIX_STREAM};
    static const int weights[] = {FF_CPU, EX_CPU, MIX_CPU, HEAD_CPU};
    memset(k, 0, sizeof *k);
    all_layers(s, k);
    required(s, k);
    if ((s->w->r.pins & PLAN_PIN_KV_SHARE) && s->kv_host < 0) {
        if (make_room_shared(s, k)) return true;
        return make_room(s, k, weights, 4);
    }
    if (s->w->r.pins & PLAN_NO_CPU) return make_room(s, k, link, 3);
    return make_room(s, k, cpu, 6);
}

/* --- linear program ------------------------------------------------------------------------------------------------------------ */

/* In GB and milliseconds, so that numbers are near one. */
enum var { V_KC, V_KS, V_KJ, V_KT, V_KZ, V_FC, V_FS, V_FJ, V_FT, V_FZ, V_EC, V_EJ, V_ET, V_EZ, V_MC, V_MS, V_MT, V_XP, V_XW, V_T, N_VAR }; /* XP: streamed bytes that are not page-locked; XW: copied while the CPU works */

/* A class: its free bytes in all, layers, and milliseconds per GB on either side. */
struct mass {
    double gb, layers, gpu_ms, cpu_ms;
};

static void add_mass(struct mass *m, double bytes, double gpu_s, double cpu_s) {
    m->gb += bytes * 1e-9;
    m->layers++;
    m->gpu_ms += gpu_s * 1e3;
    m->cpu_ms += cpu_s * 1e3;
}

static void per_gb(struct mass *m) {
    if (m->gb <= 0) return;
    m->gpu_ms /= m->gb;
    m->cpu_ms /= m->gb;
}

static void none_of(struct lp *p, int var) {
    int r = lp_row(p, LP_LE, 0);
    p->a[r][var] = 1;
}

/* A class whose layers may be shared: c bytes to the CPU in j of its layers, window z, CPU's time t. Adds
 * rows and the time, without what the class takes when all of it is in VRAM. */
static void lp_class(struct lp *p, const struct mass *m, const struct search *s, int t_row, int c, int st, int j, int t, int z) {
    double each = m->layers > 0 ? m->gb / m->layers : 0, h = s->r->handover_s * 1e3;
    int r = lp_row(p, LP_LE, m->gb);
    p->a[r][c] = 1;
    if (st >= 0) p->a[r][st] = 1;
    r = lp_row(p, LP_LE, 0);
    p->a[r][c] = 1, p->a[r][j] = -each;
    r = lp_row(p, LP_LE, m->layers);
    p->a[r][j] = 1;
    r = lp_row(p, LP_LE, 0);
    p->a[r][c] = m->cpu_ms, p->a[r][t] = -1;
    r = lp_row(p, LP_LE, 0);
    p->a[r][t] = 1, p->a[r][z] = -1;
    r = lp_row(p, LP_LE, 0); /* the GPU's part of the shared layers */
    p->a[r][j] = m->gpu_ms * each, p->a[r][c] = -m->gpu_ms, p->a[r][z] = -1;
    p->a[t_row][z] += 1;
    p->a[t_row][j] += h - m->gpu_ms * each;
    if (s->w->r.pins & PLAN_NO_CPU) none_of(p, c);
    if (st >= 0 && (s->w->r.pins & PLAN_NO_STREAM)) none_of(p, st);
    if (c == V_FC && (s->w->r.pins & PLAN_NO_SPLIT)) { /* a layer is on the CPU as a whole */
        r = lp_row(p, LP_EQ, 0);
        p->a[r][c] = 1, p->a[r][j] = -each;
    }
}

static void masses(const struct search *s, struct mass *kv, struct mass *ff, struct mass *ex, struct mass *mix) {
    const struct plan_work *w = s->w;
    for (int i = 0; i < s->n_kv; i++) {
        const struct plan_work_layer *l = &w->layers[s->kv[i]];
        double pages = (double)s->kv_pages, bytes = pages * (double)l->page_bytes;
        add_mass(kv, bytes, plan_page_gpu_s(s->r, l) * pages, plan_page_cpu_s(s->r, l) * pages);
    }
    for (int i = 0; i < s->n_ff; i++) {
        const struct plan_piece *p = &w->layers[s->ff[i]].ff;
        add_mass(ff, (double)p->bytes, plan_gpu_s(s->r, p), plan_cpu_s(s->r, p));
    }
    for (int i = 0; i < s->n_ex; i++) {
        const struct plan_piece *p = &w->layers[s->ex[i]].experts;
        add_mass(ex, (double)p->bytes, plan_gpu_s(s->r, p), plan_cpu_s(s->r, p));
    }
    for (int i = 0; i < s->n_mix; i++) {
        const struct plan_work_layer *l = &w->layers[s->mix[i]];
        double state = 2 * (double)l->state_bytes;
        add_mass(mix, (double)l->mixer.bytes, plan_gpu_s(s->r, &l->mixer) + state / s->r->matvec,
                 plan_cpu_s(s->r, &l->mixer) + state / s->r->cpu);
    }
    per_gb(kv), per_gb(ff), per_gb(ex), per_gb(mix);
}

/* Mixers leave VRAM only where KV and FFN are not enough: the KV of a layer would go with its mixer. */
enum mixers { MIXERS_STAY, MIXERS_CPU, MIXERS_ANY };

/* The place of the head, and that of mixers, are fixed by the caller. false: no solution. */
static bool linear(struct search *s, struct knobs *k, bool head_cpu, enum mixers mixers) {
    struct mass kv = {0}, ff = {0}, ex = {0}, mix = {0};
    struct knobs none = {.v = {[HEAD_CPU] = head_cpu}};
    struct plan_step base;
    double x[LP_VARS];
    masses(s, &kv, &ff, &ex, &mix);
    all_layers(s, &none);
    int64_t forced = s->kv_host;
    s->kv_host = -1;
    bool built = build(s, &none);
    s->kv_host = forced;
    if (!built) return false;
    plan_decode_step(&base, s->w, s->r, s->ph, s->w->r.depth);
    double fixed_vram = (double)vram_bytes(s) * 1e-9 - kv.gb - ff.gb - ex.gb - mix.gb;
    double slot = mixers == MIXERS_ANY ? s->ring * s->mixer_bytes * 1e-9 : 0;
    double room = (double)s->vram_cap * 1e-9 - fixed_vram - slot, host = ((double)s->host_cap - (double)outside_bytes(s)) * 1e-9;
    double h = s->r->handover_s * 1e3, bp = s->r->link * 1e-12, bv = s->r->vram * 1e-12; /* GB per ms */
    struct lp p = {.n = N_VAR};
    p.c[V_T] = 1;
    for (int v = 0; v < V_T; v++) p.c[v] = 1e-9;
    p.c[V_FC] = s->low_share * ff.cpu_ms, p.c[V_EC] = s->low_share * ex.cpu_ms, p.c[V_MC] = s->low_share * mix.cpu_ms;
    p.c[V_FS] = p.c[V_MS] = s->low_share / bp; /* at a low depth weights cost the same */
    int t_row = lp_row(&p, LP_LE, -base.s * 1e3); /* base + changes - T <= 0 */
    lp_class(&p, &kv, s, t_row, V_KC, V_KS, V_KJ, V_KT, V_KZ);
    lp_class(&p, &ff, s, t_row, V_FC, V_FS, V_FJ, V_FT, V_FZ);
    lp_class(&p, &ex, s, t_row, V_EC, -1, V_EJ, V_ET, V_EZ);
    int r = lp_row(&p, LP_LE, mix.gb);
    p.a[r][V_MC] = p.a[r][V_MS] = 1;
    r = lp_row(&p, LP_LE, 0);
    p.a[r][V_MC] = mix.cpu_ms, p.a[r][V_MT] = -1;
    p.a[t_row][V_MT] += 1;
    p.a[t_row][V_MC] += (mix.gb > 0 ? h * mix.layers / mix.gb : 0) - mix.gpu_ms;
    p.a[t_row][V_KS] += 1 / bv, p.a[t_row][V_FS] += 1 / bv, p.a[t_row][V_MS] += 1 / bv;
    p.a[t_row][V_T] = -1;
    r = lp_row(&p, LP_LE, -bp * 1e3 * (head_cpu ? plan_cpu_s(s->r, &s->w->head) : plan_gpu_s(s->r, &s->w->head))); /* link, which stands still meanwhile */
    p.a[r][V_KS] = p.a[r][V_FS] = p.a[r][V_MS] = 1, p.a[r][V_T] = -bp;
    p.a[r][V_XP] = s->r->link / s->r->link_pageable - 1;
    if (isfinite(s->r->locked)) {
        r = lp_row(&p, LP_LE, s->r->locked * 1e-9);
        p.a[r][V_KS] = p.a[r][V_FS] = p.a[r][V_MS] = 1, p.a[r][V_XP] = -1;
    }
    /* X - Bp (T - tc) <= XW, and the CPU's windows in all have room for what it does and is slowed by */
    r = lp_row(&p, LP_LE, -bp * base.cpu_s * 1e3);
    p.a[r][V_KS] = p.a[r][V_FS] = p.a[r][V_MS] = 1;
    p.a[r][V_KT] = p.a[r][V_FT] = p.a[r][V_ET] = p.a[r][V_MT] = bp;
    p.a[r][V_T] = -bp, p.a[r][V_XW] = -1;
    r = lp_row(&p, LP_LE, 0);
    p.a[r][V_KC] = kv.cpu_ms, p.a[r][V_FC] = ff.cpu_ms, p.a[r][V_EC] = ex.cpu_ms, p.a[r][V_MC] = mix.cpu_ms;
    p.a[r][V_KT] = p.a[r][V_FT] = p.a[r][V_ET] = p.a[r][V_MT] = -1;
    p.a[r][V_XW] = s->r->slowed_s * 1e12;
    r = lp_row(&p, LP_GE, kv.gb + ff.gb + ex.gb + mix.gb - room); /* VRAM: so much must leave, slots included */
    p.a[r][V_KC] = p.a[r][V_FC] = p.a[r][V_EC] = p.a[r][V_MC] = p.a[r][V_MS] = 1;
    p.a[r][V_KS] = 1 - (kv.layers > 0 ? PLAN_STAGE_SLOTS / kv.layers : 0);
    p.a[r][V_FS] = 1 - (ff.layers > 0 ? s->ring / ff.layers : 0);
    r = lp_row(&p, LP_LE, host);
    p.a[r][V_KC] = p.a[r][V_KS] = p.a[r][V_FC] = p.a[r][V_FS] = p.a[r][V_EC] = p.a[r][V_MC] = p.a[r][V_MS] = 1;
    if (mixers != MIXERS_ANY || (s->w->r.pins & PLAN_NO_STREAM)) none_of(&p, V_MS);
    if (mixers == MIXERS_STAY || (s->w->r.pins & PLAN_NO_CPU)) none_of(&p, V_MC);
    if (s->kv_host >= 0) {
        r = lp_row(&p, LP_EQ, (double)s->kv_host * s->n_kv * s->page_bytes * 1e-9);
        p.a[r][V_KC] = p.a[r][V_KS] = 1;
    }
    if (s->w->r.pins & PLAN_PIN_KV_SHARE) {
        r = lp_row(&p, LP_EQ, 0);
        p.a[r][V_KC] = 1 - s->w->r.kv_cpu_share, p.a[r][V_KS] = -s->w->r.kv_cpu_share;
    }
    if (lp_solve(x, &p) != LP_SOLVED) return false;
    *k = none;
    const int from[] = {V_KC, V_KS, V_FC, V_FS, V_EC, V_MC, V_MS};
    for (int b = 0; b < N_BIN; b++) {
        double u = unit_bytes(s, b);
        k->v[b] = u > 0 ? (int64_t)llround(x[from[b]] * 1e9 / u) : 0;
    }
    k->v[KV_LAYERS] = (int64_t)ceil(x[V_KJ] - 1e-6);
    k->v[FF_LAYERS] = (int64_t)ceil(x[V_FJ] - 1e-6);
    k->v[EX_LAYERS] = (int64_t)ceil(x[V_EJ] - 1e-6);
    return true;
}

/* --- improving ------------------------------------------------------------------------------------------------------------------ */

static int64_t units(const struct search *s, int bin, double bytes) {
    double u = unit_bytes(s, bin);
    int64_t n = u > 0 ? (int64_t)llround(bytes / u) : 0;
    return n > 0 ? n : 1;
}

/* All moves of about so many bytes: into a bin, out of it, from one to another. Takes what is better at once. */
static bool try_moves(struct search *s, double bytes) {
    bool better = false;
    for (int a = 0; a < N_BIN; a++) {
        if (!limit_of(s, a)) continue;
        int64_t da = units(s, a, bytes);
        for (int sign = -1; sign <= 1; sign += 2) {
            struct knobs k = s->best;
            k.v[a] += sign * da;
            better |= consider(s, &k);
        }
        for (int b = 0; b < N_BIN; b++) {
            if (b == a || !limit_of(s, b)) continue;
            struct knobs k = s->best;
            k.v[a] += da;
            k.v[b] -= units(s, b, (double)da * unit_bytes(s, a));
            if (k.v[b] < 0) k.v[b] = 0;
            better |= consider(s, &k);
        }
    }
    return better;
}

static bool try_layers(struct search *s, int64_t step) {
    bool better = false;
    for (int a = KV_LAYERS; a <= EX_LAYERS; a++)
        for (int sign = -1; sign <= 1; sign += 2) {
            struct knobs k = s->best;
            int n = a == KV_LAYERS ? s->n_kv : a == FF_LAYERS ? s->n_ff : s->n_ex;
            k.v[a] += sign * step;
            if (k.v[a] < 1 || k.v[a] > n) continue;
            better |= consider(s, &k);
            int bin = a == KV_LAYERS ? KV_CPU : a == FF_LAYERS ? FF_CPU : EX_CPU;
            k.v[bin] = s->best.v[bin] * k.v[a] / (s->best.v[a] ? s->best.v[a] : 1); /* the same share of each */
            better |= consider(s, &k);
        }
    return better;
}

/* One class at eighths of all that there is. */
static bool try_shares(struct search *s) {
    bool better = false;
    for (int b = 0; b < N_BIN; b++)
        for (int i = 0; i <= 8 && limit_of(s, b); i++) {
            struct knobs k = s->best;
            k.v[b] = limit_of(s, b) * i / 8;
            better |= consider(s, &k);
        }
    return better;
}

static bool try_head(struct search *s) {
    struct knobs k = s->best;
    k.v[HEAD_CPU] = !k.v[HEAD_CPU];
    bool better = consider(s, &k);
    for (int b = 0; b < N_BIN && k.v[HEAD_CPU]; b++) { /* what it makes room for */
        struct knobs q = k;
        q.v[b] -= limit_of(s, b) ? units(s, b, (double)s->w->head.bytes) : 0;
        if (q.v[b] >= 0) better |= consider(s, &q);
    }
    return better;
}

/* Totals that give every layer the same: others wait for the layers with one more. */
static bool try_even(struct search *s) {
    static const int classes[][2] = {{KV_CPU, KV_LAYERS}, {FF_CPU, FF_LAYERS}, {EX_CPU, EX_LAYERS}};
    bool better = false;
    for (int c = 0; c < 3; c++) {
        int bin = classes[c][0];
        int64_t n = s->best.v[classes[c][1]], v = s->best.v[bin];
        for (int up = 0; up < 2 && n > 1 && v; up++) {
            struct knobs k = s->best;
            k.v[bin] = (v / n + up) * n;
            better |= consider(s, &k);
            for (int b = 0; b < N_BIN; b++) {
                if (b == bin || !limit_of(s, b)) continue;
                struct knobs q = k;
                q.v[b] += (int64_t)llround((double)(v - k.v[bin]) * unit_bytes(s, bin) / unit_bytes(s, b));
                better |= consider(s, &q);
            }
        }
    }
    return better;
}

static void improve(struct search *s) {
    double smallest = INFINITY, most = 0;
    for (int b = 0; b < N_BIN; b++) {
        if (!limit_of(s, b)) continue;
        double u = unit_bytes(s, b), all = u * (double)limit_of(s, b);
        if (u > 0 && u < smallest) smallest = u;
        if (all > most) most = all;
    }
    for (double bytes = most / 8; bytes > smallest / 2; bytes /= 2)
        for (int i = 0; i < 8 && try_moves(s, bytes); i++) {}
    try_head(s);
    try_shares(s);
    for (int64_t step = s->w->n_layer / 4 + 1; step > 0; step /= 2)
        for (int i = 0; i < 4 && try_layers(s, step); i++) {}
    for (int i = 0; i < 4 && try_even(s); i++) {}
    for (double bytes = 64 * smallest; bytes > smallest / 2; bytes /= 2)
        for (int i = 0; i < 8 && try_moves(s, bytes); i++) {}
    for (int i = 0; i < 4 && try_even(s); i++) {}
}

/* --- set up ----------------------------------------------------------------------------------------------------------------------- */

/* Where everything is that is not free; what is free starts in VRAM. */
static void set_base(struct search *s) {
    const struct plan_work *w = s->w;
    *s->base = *s->ph;
    s->base->head = s->pins.head == PLAN_FREE ? PLAN_VRAM : s->pins.head;
    s->head_free = s->pins.head == PLAN_FREE;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_pin_layer *pin = &s->pins.layers[il];
        const struct plan_work_layer *l = &w->layers[il];
        struct plan_layer *p = &s->base->layers[il];
        memset(p, 0, sizeof *p);
        p->mixer = pin->mixer == PLAN_FREE ? PLAN_VRAM : pin->mixer;
        p->ffn = l->n_ff ? (pin->ff == PLAN_FREE ? PLAN_VRAM : pin->ff) : pin->rest == PLAN_FREE ? PLAN_VRAM : pin->rest;
        p->state = p->mixer == PLAN_CPU ? PLAN_CPU : PLAN_VRAM;
        if (l->n_ff) p->ff_rows[p->ffn] = l->n_ff;
        if (l->n_expert) {
            p->experts[PLAN_CPU] = pin->experts_cpu > 0 ? pin->experts_cpu : 0;
            p->experts[PLAN_VRAM] = (int16_t)(l->n_expert - p->experts[PLAN_CPU]);
        }
        bool host = p->mixer == PLAN_CPU || pin->kv == PLAN_CPU || (l->window && (w->r.pins & PLAN_PIN_KV_HOST));
        p->kv_pages[host ? PLAN_CPU : PLAN_VRAM] = l->kv_pages;
        if (l->kv_pages && !host && !l->window) s->kv[s->n_kv++] = il;
        if (l->n_ff && pin->ff == PLAN_FREE) s->ff[s->n_ff++] = il;
        if (l->n_expert && pin->experts_cpu < 0) s->ex[s->n_ex++] = il;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int il = 0; il < w->n_layer; il++)
            if (s->pins.layers[il].mixer == PLAN_FREE && w->layers[il].delta == !pass) s->mix[s->n_mix++] = il;
        if (!pass) s->n_mix_delta = s->n_mix;
    }
}

static double mean(double sum, int n) { return n ? sum / n : 0; }

static void measure(struct search *s) {
    const struct plan_work *w = s->w;
    double page = 0, quantum = 0, expert = 0, mixer = 0;
    s->kv_pages = s->ff_quanta = s->ex_count = INT64_MAX;
    for (int i = 0; i < s->n_kv; i++) {
        const struct plan_work_layer *l = &w->layers[s->kv[i]];
        page += (double)l->page_bytes;
        if (l->kv_pages < s->kv_pages) s->kv_pages = l->kv_pages;
    }
    for (int i = 0; i < s->n_ff; i++) {
        const struct plan_work_layer *l = &w->layers[s->ff[i]];
        quantum += (double)l->quantum_bytes;
        if (l->n_quanta < s->ff_quanta) s->ff_quanta = l->n_quanta;
    }
    for (int i = 0; i < s->n_ex; i++) {
        const struct plan_work_layer *l = &w->layers[s->ex[i]];
        expert += (double)l->experts.bytes / l->n_expert;
        if (l->n_expert < s->ex_count) s->ex_count = l->n_expert;
    }
    for (int i = 0; i < s->n_mix; i++) mixer += (double)w->layers[s->mix[i]].mixer.bytes;
    if (!s->n_kv) s->kv_pages = 0;
    if (!s->n_ff) s->ff_quanta = 0;
    if (!s->n_ex) s->ex_count = 0;
    s->page_bytes = mean(page, s->n_kv);
    s->quantum_bytes = mean(quantum, s->n_ff);
    s->expert_bytes = mean(expert, s->n_ex);
    s->mixer_bytes = mean(mixer, s->n_mix);
    s->kv_host = -1;
    if (w->r.pins & (PLAN_PIN_KV_HOST | PLAN_PIN_KV_TOKENS)) {
        int64_t keep = w->r.pins & PLAN_PIN_KV_HOST ? 0 : (w->r.kv_vram_tokens + KV_PAGE - 1) / KV_PAGE;
        s->kv_host = s->kv_pages > keep ? s->kv_pages - keep : 0;
    }
}

/* The solution in whole numbers: rounded, and with the same number for every layer. */
static void from_linear(struct search *s, const struct knobs *start) {
    static const int order[] = {KV_CPU, FF_CPU, EX_CPU, KV_STREAM, FF_STREAM, MIX_STREAM, MIX_CPU};
    static const int classes[][2] = {{KV_CPU, KV_LAYERS}, {FF_CPU, FF_LAYERS}, {EX_CPU, EX_LAYERS}};
    for (int i = 0; i < 7; i++) {
        struct knobs k = *start;
        if (i) {
            int64_t *v = &k.v[classes[(i - 1) / 2][0]], n = k.v[classes[(i - 1) / 2][1]];
            if (!*v || n < 2) continue;
            *v = (*v / n + (i - 1) % 2) * n;
        }
        if (make_room(s, &k, order, 7)) consider(s, &k);
    }
}

/* From one start to the best near it; keeps the better one of that and what was there. */
static void climb(struct search *s, const struct knobs *start) {
    struct knobs best = s->best;
    double best_s = s->best_s;
    s->best_s = INFINITY;
    from_linear(s, start);
    if (s->best_s < best_s * 1.5) improve(s);
    if (s->best_s < best_s) return;
    s->best = best;
    s->best_s = best_s;
}

static void search_best(struct search *s) {
    struct knobs k;
    for (int mixers = MIXERS_STAY; mixers <= MIXERS_ANY; mixers++) {
        bool found = false;
        for (int head = 0; head <= (int)s->head_free; head++) {
            if (!linear(s, &k, head, (enum mixers)mixers)) continue;
            found = true;
            s->mixers_stay = mixers == MIXERS_STAY;
            climb(s, &k);
            all_layers(s, &k);
            climb(s, &k);
            k.v[KV_LAYERS] = k.v[FF_LAYERS] = k.v[EX_LAYERS] = 1; /* as few as can hold it */
            climb(s, &k);
        }
        if (found) break;
    }
}

static int alloc(struct search *s) {
    size_t n = (size_t)s->w->n_layer;
    s->base = calloc(1, sizeof *s->base);
    s->kv = calloc(4 * n, sizeof *s->kv);
    if (!s->base || !s->kv) return err_set(ERR_NOMEM, "plan: out of memory");
    s->ff = s->kv + n;
    s->ex = s->ff + n;
    s->mix = s->ex + n;
    return 0;
}

/* Decode with at most host_cap outside VRAM. */
static bool solve(struct search *s, enum plan_effort effort) {
    struct knobs k;
    s->best_s = INFINITY;
    if (!start(s, &k)) return false;
    s->best = k;
    if (!consider(s, &k)) return false;
    if (effort == PLAN_BEST) search_best(s);
    return build(s, &s->best) && fits(s);
}

int plan_search(struct plan *p, const struct plan_work *w, enum plan_effort effort) {
    struct plan_rates r;
    struct search *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "plan: out of memory");
    *s = (struct search){.w = w, .r = &r, .ph = &p->phase[PLAN_DECODE], .low_share = plan_low_share(&w->r)};
    plan_rates_of(&r, w);
    int rc = plan_pins_read(&s->pins, w);
    if (!rc) rc = alloc(s);
    if (rc) goto out;
    set_base(s);
    measure(s);
    /* Copies go on while the CPU attends, and are used by all the layers up to the next attention. */
    s->ring = PLAN_RING_SLOTS + (s->n_kv ? (w->n_layer - 1) / s->n_kv : 0);
    struct plan_phase *dec = s->ph;
    dec->vram.scratch = plan_gpu_scratch(w, dec->chunk_tokens, dec->pass_tokens);
    dec->vram.hidden = plan_gpu_hidden(w, dec->pass_tokens);
    s->vram_cap = dec->vram.limit;
    size_t host = p->runtime_bytes + plan_host_scratch(w, dec->pass_tokens) + w->embed.bytes;
    s->host_cap = p->host_limit > host ? p->host_limit - host : 0;
    /* Prefill needs more VRAM for other things than pages: they are outside while it lasts. */
    bool ok = solve(s, effort) && plan_prefill(p, w, &r, effort);
    for (double share = 1; !ok && effort == PLAN_BEST && share < 1e3; share *= 10) { /* weights in VRAM need no room in prefill */
        s->low_share = share;
        ok = solve(s, effort) && plan_prefill(p, w, &r, effort);
    }
    if (!ok && effort == PLAN_BEST) ok = solve(s, PLAN_FITS) && plan_prefill(p, w, &r, PLAN_BEST);
    if (!ok) rc = PLAN_TOO_BIG;
out:
    free(s->base);
    free(s->kv);
    free(s);
    return rc;
}
