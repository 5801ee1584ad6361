/* plan_prefill.c: the phase of prefill for a given phase of decode. Hidden states, staging and ring take room from what
 * decode keeps in VRAM: tries lengths of chunk and pass, and which of KV and weights make that room. Then adds up host
 * memory, which has what is outside VRAM in either phase. */
#include "core/mem.h"
#include "offload/plan_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PASS = 16384, SAMPLES = 24, ROUNDS = 12 };

/* Of what makes room: all KV first, half of it, or weights first. */
enum { N_SHARE = 3, N_SLOTS = 5 };
static const double kv_shares[N_SHARE] = {1, 0.5, 0};

/* Ring and staging from the best to the smallest: KV in whole layers, two or one, or in pieces. */
static const struct slots {
    int ring, stage;
    bool whole;
} slots[N_SLOTS] = {{PLAN_RING_SLOTS, 2, true}, {2, 1, true}, {PLAN_RING_SLOTS, 2, false}, {2, 2, false}, {1, 1, false}};

struct prefill {
    struct plan *p;
    const struct plan_work *w;
    const struct plan_rates *r;
    struct plan_phase *try, *best;
    double best_s;
    bool keep_head;
};

/* What decode has on the CPU is streamed. */
static void from_decode(struct plan_phase *to, const struct plan_phase *dec, const struct plan_work *w) {
    memcpy(to->layers, dec->layers, sizeof to->layers[0] * (size_t)w->n_layer);
    to->embed = dec->embed;
    to->head = dec->head;
    for (int il = 0; il < w->n_layer; il++) {
        struct plan_layer *l = &to->layers[il];
        if (l->mixer == PLAN_CPU) l->mixer = PLAN_STREAM;
        if (l->ffn == PLAN_CPU) l->ffn = PLAN_STREAM;
        l->state = PLAN_VRAM;
        l->ff_rows[PLAN_STREAM] += l->ff_rows[PLAN_CPU];
        l->experts[PLAN_STREAM] = (int16_t)(l->experts[PLAN_STREAM] + l->experts[PLAN_CPU]);
        l->kv_pages[PLAN_STREAM] += l->kv_pages[PLAN_CPU];
        l->ff_rows[PLAN_CPU] = 0;
        l->experts[PLAN_CPU] = 0;
        l->kv_pages[PLAN_CPU] = 0;
    }
}

static size_t sum_of(struct prefill *f) {
    plan_ring(f->try, f->w);
    plan_vram_table(&f->try->vram, f->w, f->try);
    return f->try->vram.sum;
}

/* --- making room ------------------------------------------------------------------------------------------------------------- */

static bool pages_go(const struct plan_work_layer *l) { return l->kv_pages && !l->window; }

/* Pages that may still leave VRAM without going below `keep` of those that decode has there. */
static int64_t pages_left(const struct prefill *f, double share) {
    int64_t n = 0;
    for (int il = 0; il < f->w->n_layer; il++) {
        if (!pages_go(&f->w->layers[il])) continue;
        int64_t keep = (int64_t)((1 - share) * f->p->phase[PLAN_DECODE].layers[il].kv_pages[PLAN_VRAM]);
        int64_t here = f->try->layers[il].kv_pages[PLAN_VRAM] - keep;
        if (here > 0) n += here;
    }
    return n;
}

static bool drop_pages(struct prefill *f, size_t excess, double share) {
    double bytes = 0;
    int n = 0;
    int64_t left = pages_left(f, share);
    if (left <= 0) return false;
    for (int il = 0; il < f->w->n_layer; il++)
        if (pages_go(&f->w->layers[il])) bytes += (double)f->w->layers[il].page_bytes, n++;
    int64_t want = (int64_t)ceil((double)excess * n / bytes);
    double part = want >= left ? 1 : (double)want / (double)left;
    for (int il = 0; il < f->w->n_layer; il++) {
        struct plan_layer *l = &f->try->layers[il];
        if (!pages_go(&f->w->layers[il])) continue;
        int64_t keep = (int64_t)((1 - share) * f->p->phase[PLAN_DECODE].layers[il].kv_pages[PLAN_VRAM]);
        int64_t here = l->kv_pages[PLAN_VRAM] - keep, go = here > 0 ? (int64_t)ceil((double)here * part) : 0;
        l->kv_pages[PLAN_VRAM] -= (int32_t)go;
        l->kv_pages[PLAN_STREAM] += (int32_t)go;
    }
    return true;
}

/* The VRAM parts of a layer, one after the other: experts, FFN, mixer. Returns the bytes that leave. */
static size_t drop_part(struct prefill *f, int il, int what) {
    const struct plan_work_layer *l = &f->w->layers[il];
    struct plan_layer *p = &f->try->layers[il];
    size_t bytes[PLAN_PLACES];
    if (what == 0 && p->experts[PLAN_VRAM]) {
        plan_expert_bytes(bytes, l, p->experts);
        p->experts[PLAN_STREAM] = (int16_t)l->n_expert;
        p->experts[PLAN_VRAM] = 0;
        return bytes[PLAN_VRAM];
    }
    if (what == 1 && p->ff_rows[PLAN_VRAM]) {
        plan_ff_bytes(bytes, l, p->ff_rows);
        p->ff_rows[PLAN_STREAM] = l->n_ff;
        p->ff_rows[PLAN_VRAM] = 0;
        p->ffn = PLAN_STREAM;
        return bytes[PLAN_VRAM] + l->rest.bytes;
    }
    if (what == 2 && p->mixer == PLAN_VRAM) {
        p->mixer = PLAN_STREAM;
        return l->mixer.bytes;
    }
    return 0;
}

static bool drop_weights(struct prefill *f, size_t excess) {
    if (!f->keep_head && f->try->head == PLAN_VRAM) { /* computed once, after the last pass */
        f->try->head = PLAN_STREAM;
        return true;
    }
    for (int what = 0; what < 3; what++) {
        int n = 0, first = -1;
        size_t part = 0;
        for (int il = 0; il < f->w->n_layer; il++) {
            const struct plan_layer *p = &f->try->layers[il];
            bool has = what == 0 ? p->experts[PLAN_VRAM] > 0 : what == 1 ? p->ff_rows[PLAN_VRAM] > 0 : p->mixer == PLAN_VRAM;
            if (!has) continue;
            if (first < 0) first = il;
            n++;
        }
        if (!n) continue;
        struct plan_layer was = f->try->layers[first];
        part = drop_part(f, first, what);
        f->try->layers[first] = was;
        int64_t want = part ? (int64_t)((excess + part - 1) / part) : n;
        if (want > n) want = n;
        for (int il = 0, i = 0; il < f->w->n_layer; il++) { /* evenly over the layers that have one */
            const struct plan_layer *p = &f->try->layers[il];
            bool has = what == 0 ? p->experts[PLAN_VRAM] > 0 : what == 1 ? p->ff_rows[PLAN_VRAM] > 0 : p->mixer == PLAN_VRAM;
            if (!has) continue;
            if ((i + 1) * want / n > i * want / n) drop_part(f, il, what);
            i++;
        }
        return true;
    }
    return false;
}

static bool make_room(struct prefill *f, double kv_share) {
    size_t cap = f->try->vram.limit, sum;
    for (int i = 0; i < ROUNDS; i++) {
        if ((sum = sum_of(f)) <= cap) return true;
        if (drop_pages(f, sum - cap, kv_share)) continue;
        if (drop_weights(f, sum - cap)) continue;
        if (!drop_pages(f, sum - cap, 1)) return false;
    }
    return sum_of(f) <= cap;
}

/* --- choosing ------------------------------------------------------------------------------------------------------------------ */

/* Host memory of both phases: one table. Returns the most that is in use at once. */
static size_t host_of(struct plan_table *t, size_t *pinned, const struct prefill *f, const struct plan_phase *pre) {
    *t = (struct plan_table){.runtime = f->p->runtime_bytes, .limit = f->p->host_limit, .scratch = plan_host_scratch(f->w, pre->pass_tokens)};
    plan_host_table(t, pinned, f->w, pre, &f->p->phase[PLAN_DECODE]);
    size_t load = t->weights + f->p->load_bytes + f->p->runtime_bytes; /* before there is KV and scratch */
    return t->sum > load ? t->sum : load;
}

/* One way to do it. */
static void consider(struct prefill *f, int chunk, int pass, const struct slots *k, double kv_share) {
    struct plan_phase *t = f->try;
    enum plan_bound bound;
    size_t pinned;
    const struct plan_table *limits = &f->p->phase[PLAN_DECODE].vram;
    from_decode(t, &f->p->phase[PLAN_DECODE], f->w);
    t->chunk_tokens = chunk;
    t->pass_tokens = pass;
    t->stage_whole = k->whole;
    t->stage_wanted = k->stage;
    t->ring_wanted = k->ring;
    t->n_thread = f->w->r.n_thread;
    t->vram = (struct plan_table){.runtime = limits->runtime, .headroom = limits->headroom, .limit = limits->limit,
                                  .scratch = plan_gpu_scratch(f->w, chunk, pass), .hidden = plan_gpu_hidden(f->w, pass)};
    if (!make_room(f, kv_share)) return;
    if (host_of(&t->host, &pinned, f, t) > f->p->host_limit) return;
    double s = plan_prefill_s(&bound, f->w, f->r, t, f->w->r.prompt, (double)pinned, SAMPLES);
    if (!k->whole) s *= 1.01; /* crosses the link again for every chunk: not for a small gain */
    s += plan_copy_s(f->r, (double)plan_rehome_bytes(f->w, t, &f->p->phase[PLAN_DECODE]), (double)pinned);
    if (s >= f->best_s * (1 - 1e-6)) return;
    f->best_s = s;
    f->try = f->best;
    f->best = t;
}

static void all_ways(struct prefill *f, enum plan_effort effort) {
    const struct plan_request *r = &f->w->r;
    int least = r->n_ctx < PLAN_DECODE_TOKENS ? (int)r->n_ctx : PLAN_DECODE_TOKENS, most = r->chunk_tokens;
    int longest = r->prompt < MAX_PASS ? (int)r->prompt : MAX_PASS;
    if (f->w->chunk_fixed || most < least) least = most;
    if (effort == PLAN_FITS) most = least;
    for (int chunk = most; chunk; chunk = chunk == least ? 0 : chunk / 2 < least ? least : chunk / 2) {
        int end = r->pass_tokens ? r->pass_tokens : effort == PLAN_FITS || longest < chunk ? chunk : longest;
        for (int pass = r->pass_tokens ? end : chunk; pass; pass = pass >= end ? 0 : pass <= end / 2 ? 2 * pass : end)
            for (int i = 0; i < N_SLOTS; i++)
                for (int v = 0; v < N_SHARE; v++) consider(f, chunk, pass, &slots[i], kv_shares[v]);
    }
}

bool plan_prefill(struct plan *p, const struct plan_work *w, const struct plan_rates *r, enum plan_effort effort) {
    struct plan_phase *two = calloc(2, sizeof *two);
    struct prefill f = {.p = p, .w = w, .r = r, .try = two, .best = two ? two + 1 : NULL, .best_s = INFINITY, .keep_head = w->r.logits_rows > 1};
    if (!two) return false;
    all_ways(&f, effort);
    bool ok = f.best_s < INFINITY;
    if (ok) {
        struct plan_phase *pre = &p->phase[PLAN_PREFILL], *dec = &p->phase[PLAN_DECODE];
        *pre = *f.best;
        p->host_bytes = host_of(&pre->host, &p->pinned_bytes, &f, pre);
        dec->host = pre->host;
        p->rehome_bytes = plan_rehome_bytes(w, pre, dec);
    }
    free(two);
    return ok;
}
