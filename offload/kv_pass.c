/* kv_pass.c: kv_put and attention of a KV store.
 *
 * Order on the device: one compute stream, a stream for copies to host memory, one for copies to VRAM, and events between
 * them. The host waits only for what the CPU needs: q, and, once per page, the copy of a page that it attends for the first
 * time. Host memory that the CPU writes (its result) is read by what is enqueued before the next q is asked for. */
#include "core/clock.h"
#include "core/err.h"
#include "cpu/cpu.h"
#include "offload/kv_store_impl.h"

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

int64_t store_first(const struct store_layer *l, int64_t pos0, int n) {
    if (l->landing) return pos0 / KV_PAGE;
    return max_i64(0, (pos0 + n - 1) / KV_PAGE + 1 - l->n_ring);
}

int64_t store_streamed(const struct kv_store *s, int il, int64_t lo, int64_t first, bool few) {
    const struct store_layer *l = &s->layers[il];
    int64_t n = few && l->outside ? (first * l->streamed + l->outside / 2) / l->outside : first; /* as plan_kv_pages */
    return max_i64(lo, min_i64(n, first));
}

static int64_t window_page(int64_t window, int64_t pos0) {
    return (window && pos0 + 1 > window ? pos0 + 1 - window : 0) / KV_PAGE;
}

static int check_range(const struct kv_store *s, int il, int64_t pos0, int n_tok) {
    if (il < 0 || il >= s->host.n_layer || !s->host.layers[il].n_kv) return err_set(ERR_ARG, "layer %d has no KV cache", il);
    if (!s->layers[il].mine) return err_set(ERR_ARG, "layer %d: the plan has its attention on the CPU", il);
    if (pos0 < 0 || n_tok < 1 || pos0 > s->host.n_ctx - n_tok)
        return err_set(ERR_ARG, "positions %lld..%lld are outside the context of %lld", (long long)pos0, (long long)pos0 + n_tok - 1,
                       (long long)s->host.n_ctx);
    return 0;
}

/* --- kv_put -------------------------------------------------------------------------------------------------------------- */

void store_cut(struct kv_store *s, int il, int64_t pos0) {
    struct store_layer *l = &s->layers[il];
    l->rewritten = l->rewritten || l->host_end > pos0;
    l->end = min_i64(l->end, pos0);
    l->host_end = min_i64(l->host_end, pos0);
    l->synced = min_i64(l->synced, pos0);
    stage_cut(s, il, pos0 / KV_PAGE);
}

/* The slots of pages from `pos0` up to the last may be written: nothing that is copied out of them is on its way. */
static int take_slots(struct kv_store *s, int il, int64_t pos0, int n_tok) {
    struct store_layer *l = &s->layers[il];
    if (l->landing) return gpu_stream_wait(s->o.compute, s->landed);
    if (pages_of(pos0 + n_tok) == pages_of(pos0) && !l->rewritten) return 0; /* no new page */
    return gpu_stream_wait(s->o.compute, l->spilled);
}

/* Pages that have become full go to host memory, and from a landing place all that were touched. */
static int spill(struct kv_store *s, int il) {
    struct store_layer *l = &s->layers[il];
    int64_t ready = l->landing ? l->end : l->end / KV_PAGE * KV_PAGE;
    if (!s->host.layers[il].ring) ready = min_i64(ready, l->host_pages * KV_PAGE);
    if (!l->host_pages || ready <= l->host_end) return 0;
    TRY(store_behind(s, s->out, s->o.compute));
    /* What is overwritten may be on its way to VRAM. */
    if (s->host.layers[il].ring || l->rewritten) TRY(store_behind(s, s->out, s->in));
    l->rewritten = false;
    TRY(store_copy(s, STORE_OUT, il, l->d_ring, l->n_ring, l->host_end / KV_PAGE, pages_of(ready)));
    TRY(gpu_event_record(l->spilled, s->out));
    if (l->landing) TRY(gpu_event_record(s->landed, s->out));
    l->host_end = ready;
    return 0;
}

int store_put(void *arg, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v) {
    struct kv_store *s = arg;
    (void)kv;
    TRY(check_range(s, il, pos0, n_tok));
    struct store_layer *l = &s->layers[il];
    int64_t end = pages_of(pos0 + n_tok), want = store_first(l, pos0, n_tok);
    if (pos0 > l->end)
        return err_set(ERR_ARG, "layer %d: position %lld is not the next one: %lld are stored", il, (long long)pos0, (long long)l->end);
    if (end - pos0 / KV_PAGE > l->n_ring)
        return err_set(ERR_ARG, "layer %d: %d tokens in one call, but the plan has VRAM for %lld pages of new ones", il, n_tok, (long long)l->n_ring);
    if (pos0 < l->end) store_cut(s, il, pos0);
    if (l->landing || l->end == 0) l->first = INT64_MAX; /* others have used the place since */
    TRY(store_bring_back(s, il, want));
    TRY(take_slots(s, il, pos0, n_tok));
    /* Without host memory there may be fewer: a window's ring after going back. */
    l->first = l->host_pages ? want : min_i64(max_i64(l->first, want), pos0 / KV_PAGE);
    struct gpu_pages to = {.d_base = l->d_ring, .n_slot = l->n_ring, .first = l->first, .end = end};
    TRY(gpu_pages_put(s->ops, &s->host.layers[il], &to, pos0, n_tok, k, v));
    l->end = pos0 + n_tok;
    int rc = spill(s, il);
    if (rc) store_cut(s, il, pos0); /* the call is repeated as a whole, or not at all */
    return rc;
}

/* --- hand-over ----------------------------------------------------------------------------------------------------------- */

enum { ASKED, ANSWERED, N_FLAG };
enum { POLLS = 2000 }; /* between two looks at whether the device still works */

/* q goes to the CPU. */
static int ask(struct kv_store *s, const float *q, int64_t n) {
    const int32_t row = 0;
    struct ops *t = gpu_ops_table(s->ops);
    if (s->flags && s->turn == INT32_MAX) { /* nobody waits once the stream is done */
        TRY(gpu_stream_sync(s->o.compute));
        gpu_flag_host_signal(s->flags, ASKED, 0);
        gpu_flag_host_signal(s->flags, ANSWERED, 0);
        s->turn = 0;
    }
    TRY(t->gather(t, s->d_ask, q, &row, 1, n));
    TRY(gpu_event_record(s->asked, s->o.compute));
    if (!s->flags) return 0;
    TRY(gpu_flag_signal(s->flags, ASKED, s->turn + 1, s->o.compute));
    s->turn++;
    return 0;
}

/* The host waits until q is there. */
static int wait_asked(struct kv_store *s) {
    bool done;
    if (!s->flags) return gpu_event_sync(s->asked);
    for (int i = 1; !gpu_flag_host_seen(s->flags, ASKED, s->turn); i++)
        if (i % POLLS == 0) TRY(gpu_event_done(s->asked, &done));
    return 0;
}

/* --- attention ----------------------------------------------------------------------------------------------------------- */

/* What a call attends to: pages lo .. streamed .. first .. end by place: streamed, CPU, VRAM. */
struct split {
    int64_t lo, streamed, first, end;
};

static int attend_cpu(struct kv_store *s, const struct attn_args *a, const struct split *p) {
    struct store_layer *l = &s->layers[a->il];
    const struct kv_layer *g = &s->host.layers[a->il];
    struct attn_args c = *a;
    c.kv = &s->host;
    c.q = s->ask;
    c.o = NULL;
    if (p->first * KV_PAGE > l->synced) {
        TRY(gpu_event_sync(l->spilled));
        l->synced = l->host_end;
    }
    TRY(wait_asked(s));
    double positions = (double)(p->first - p->streamed) * KV_PAGE, bytes = (double)(p->first - p->streamed) * (double)g->page_bytes;
    TRY(cpu_attn_pages(s->o.cpu, &c, p->streamed, p->first, s->answer));
    clock_work(bytes, 2 * positions * a->n_tok * a->n_head * (g->head_dim_k + g->head_dim_v));
    s->stats.cpu_bytes += bytes;
    return 0;
}

static int attend_streamed(struct kv_store *s, const struct attn_args *a, const struct split *p, bool last) {
    int64_t cap = p->streamed > p->lo ? stage_cap(s, a->il) : 1;
    struct stage_place at = {.pos0 = s->now.pos0, .n = s->now.n, .il = a->il,
                             .chunk = (int)((a->pos0 - s->now.pos0) / s->ph->chunk_tokens)};
    if (cap < 1) return err_set(ERR_ARG, "KV: a page of layer %d is larger than a slot for streamed pages", a->il);
    for (int64_t from = p->lo, to; from < p->streamed; from = to) {
        struct gpu_pages in_slot;
        int slot;
        at.k = from / cap;
        to = min_i64(p->streamed, (at.k + 1) * cap);
        TRY(stage_get(s, &at, from, to, &in_slot, &slot));
        TRY(gpu_pages_attend(s->ops, &in_slot, last && to == p->streamed ? GPU_PAGES_LAST : GPU_PAGES_MORE));
        TRY(stage_done(s, slot));
        TRY(stage_ahead(s));
    }
    return 0;
}

static int attend_vram(struct kv_store *s, const struct attn_args *a, const struct split *p, enum gpu_pages_turn turn) {
    const struct store_layer *l = &s->layers[a->il];
    struct gpu_pages here = {.d_base = l->d_ring, .n_slot = l->n_ring, .first = max_i64(p->first, p->lo), .end = p->end};
    return gpu_pages_attend(s->ops, &here, turn);
}

/* Everything behind the hand-over of q. By flags the rest is enqueued before the CPU starts, and its result is waited for on
 * the device: then the host must answer whatever happens. */
static int finish_few(struct kv_store *s, const struct attn_args *a, const struct split *p) {
    bool cpu = p->streamed < p->first;
    TRY(attend_vram(s, a, p, GPU_PAGES_MORE));
    TRY(attend_streamed(s, a, p, false));
    if (!cpu) return gpu_pages_end(s->ops);
    TRY(gpu_pages_add(s->ops, s->d_answer));
    if (!s->flags) {
        TRY(attend_cpu(s, a, p));
        return gpu_pages_end(s->ops);
    }
    TRY(gpu_flag_wait(s->flags, ANSWERED, s->turn, GPU_FLAG_KEEP, s->o.compute));
    int rc = gpu_pages_end(s->ops);
    if (!rc) rc = attend_cpu(s, a, p);
    gpu_flag_host_signal(s->flags, ANSWERED, s->turn);
    return rc;
}

static int attn_few(struct kv_store *s, const struct attn_args *a, const struct split *p) {
    const struct kv_layer *g = &s->host.layers[a->il];
    if (p->streamed < p->first) {
        int64_t n = (int64_t)a->n_tok * a->n_head * g->head_dim_k;
        if (a->n_head > s->o.n_head || g->head_dim_k > s->o.head_dim || g->head_dim_v > s->o.head_dim)
            return err_set(ERR_ARG, "layer %d: %d heads of %d/%d dims, the KV store was opened for %d of %d", a->il, a->n_head, g->head_dim_k,
                           g->head_dim_v, s->o.n_head, s->o.head_dim);
        TRY(ask(s, a->q, n));
    }
    TRY(gpu_pages_begin(s->ops, g, a, GPU_PAGES_FEW));
    return finish_few(s, a, p);
}

static int attn_many(struct kv_store *s, const struct attn_args *a, const struct split *p) {
    TRY(gpu_pages_begin(s->ops, &s->host.layers[a->il], a, GPU_PAGES_MANY));
    TRY(attend_streamed(s, a, p, false));
    TRY(attend_vram(s, a, p, GPU_PAGES_LAST));
    return gpu_pages_end(s->ops);
}

int store_attn(void *arg, const struct attn_args *a) {
    struct kv_store *s = arg;
    TRY(check_range(s, a->il, a->pos0, a->n_tok));
    struct store_layer *l = &s->layers[a->il];
    const struct kv_layer *g = &s->host.layers[a->il];
    if (a->pos0 + a->n_tok > l->end)
        return err_set(ERR_ARG, "layer %d: attention at position %lld, %lld are stored", a->il, (long long)a->pos0 + a->n_tok - 1,
                       (long long)l->end);
    if (a->window < 0 || (g->ring && (a->window == 0 || a->window > g->window)))
        return err_set(ERR_ARG, "attention of layer %d asks for a window of %lld, its KV cache keeps %lld", a->il, (long long)a->window,
                       (long long)g->window);
    if (a->pos0 < s->now.pos0 || a->pos0 + a->n_tok > s->now.pos0 + s->now.n) TRY(kv_store_begin(s, a->pos0, a->n_tok));
    struct split p = {.lo = window_page(a->window, a->pos0), .first = l->first, .end = pages_of(a->pos0 + a->n_tok)};
    p.streamed = store_streamed(s, a->il, p.lo, p.first, a->n_tok <= PLAN_DECODE_TOKENS);
    if (p.first > p.lo && (p.first * KV_PAGE > l->host_end || !l->host_pages))
        return err_set(ERR_ARG, "layer %d: positions before %lld are no longer there", a->il, (long long)p.first * KV_PAGE);
    if (p.first < p.lo) p.first = p.lo;
    if (p.first >= p.end) return err_set(ERR_ARG, "layer %d: position %lld is no longer in VRAM", a->il, (long long)a->pos0);
    return a->n_tok <= GPU_PAGES_FEW_TOKENS ? attn_few(s, a, &p) : attn_many(s, a, &p);
}

int kv_store_begin(struct kv_store *s, int64_t pos0, int n) {
    s->now = (struct stage_place){.pos0 = pos0, .n = n, .il = -1, .k = -1};
    if (s->phase < 0) return err_set(ERR_ARG, "KV store: no phase was entered");
    /* What was copied ahead for this pass stays if the guess was right, but for the places in it. */
    if (s->n_queue && (s->tail.pos0 != pos0 || s->tail.n != n)) {
        s->n_queue = 0;
        for (int i = 0; i < s->n_slot; i++) s->slots[i].wanted = 0;
    }
    return stage_ahead(s);
}
