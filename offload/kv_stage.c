/* kv_stage.c: streamed pages of a KV store: batches of host pages in VRAM slots, copied ahead of use in the order in which
 * passes will ask for them. What that order will be is a guess from the pass under way: a wrong one costs time only, because
 * what is attended to is decided by the plan, and a batch is brought up to date when it is asked for. */
#include "core/err.h"
#include "offload/kv_store_impl.h"

int64_t stage_cap(const struct kv_store *s, int il) { return (int64_t)(s->slot_bytes / s->host.layers[il].page_bytes); }

/* --- the order of batches ------------------------------------------------------------------------------------------------ */

/* Streamed pages lo .. end of the chunk at p. */
static int64_t range(const struct kv_store *s, const struct stage_place *p, int64_t *lo) {
    int64_t done = (int64_t)p->chunk * s->ph->chunk_tokens, pos = p->pos0 + done, window = s->host.layers[p->il].window;
    int n = (int)min_i64(p->n - done, s->ph->chunk_tokens);
    *lo = (window && pos + 1 > window ? pos + 1 - window : 0) / KV_PAGE;
    return store_streamed(s, p->il, *lo, store_first(&s->layers[p->il], pos, n), n <= PLAN_DECODE_TOKENS);
}

/* The batch after *p: pages a .. b. false: none. */
static bool next_batch(const struct kv_store *s, struct stage_place *p, int64_t *a, int64_t *b) {
    for (int rounds = 0; rounds < 2;) {
        if (p->il >= 0 && s->layers[p->il].mine && s->layers[p->il].outside) {
            int64_t lo, end = range(s, p, &lo), cap = stage_cap(s, p->il), k = max_i64(p->k + 1, lo / cap);
            if (k * cap < end) {
                p->k = k;
                *a = max_i64(lo, k * cap);
                *b = min_i64(end, (k + 1) * cap);
                return true;
            }
            p->k = -1;
            if (++p->chunk * (int64_t)s->ph->chunk_tokens < p->n) continue;
        }
        p->k = -1;
        p->chunk = 0;
        if (++p->il < s->host.n_layer) continue;
        rounds++;
        p->il = -1;
        p->pos0 += p->n;
        if (p->pos0 >= s->host.n_ctx) return false;
        p->n = (int)min_i64(p->n, s->host.n_ctx - p->pos0);
    }
    return false;
}

/* --- slots --------------------------------------------------------------------------------------------------------------- */

static bool holds(const struct kv_store *s, const struct stage_slot *t, int il, int64_t a) {
    return t->il == il && t->a / stage_cap(s, il) == a / stage_cap(s, il);
}

static int find_slot(const struct kv_store *s, int il, int64_t a) {
    for (int i = 0; i < s->n_slot; i++)
        if (holds(s, &s->slots[i], il, a)) return i;
    return -1;
}

/* Copies what slot t lacks of pages a .. b. */
static int fill(struct kv_store *s, struct stage_slot *t, int il, int64_t a, int64_t b) {
    bool more = holds(s, t, il, a) && t->a <= a;
    int64_t from = more ? t->b : a, start = more ? t->a : a;
    if (from >= b) return 0;
    int rc = 0;
    /* What lies behind the pages of a slot has not been read since they came, unless it was cut. */
    if (!more || t->cut) rc = gpu_stream_wait(s->in, t->free);
    t->il = -1;
    if (!rc) rc = gpu_stream_wait(s->in, s->layers[il].spilled);
    if (!rc) rc = store_copy(s, STORE_IN, il, t->d, stage_cap(s, il), from, b);
    if (!rc) rc = gpu_event_record(t->ready, s->in);
    if (rc) return rc;
    *t = (struct stage_slot){.d = t->d, .il = il, .a = start, .b = b, .wanted = t->wanted, .ready = t->ready, .free = t->free};
    return 0;
}

int stage_ahead(struct kv_store *s) {
    while (s->n_slot && s->n_queue < KV_STORE_AHEAD) {
        struct stage_place p = s->n_queue ? s->tail : s->now;
        int64_t a, b;
        if (!next_batch(s, &p, &a, &b)) return 0;
        b = min_i64(b, s->layers[p.il].host_end / KV_PAGE); /* the rest is not in host memory yet */
        int i = find_slot(s, p.il, a);
        if (i < 0) {
            i = s->turn_slot;
            if (s->slots[i].wanted || a >= b) return 0;
            s->turn_slot = (i + 1) % s->n_slot;
        } else if (s->slots[i].a > a && s->slots[i].wanted) {
            return 0;
        }
        int rc = fill(s, &s->slots[i], p.il, a, b);
        if (rc) return rc;
        s->slots[i].wanted++;
        s->queue[s->n_queue++] = (struct stage_want){p.il, i, a};
        s->tail = p;
    }
    return 0;
}

/* The slot for a batch: the one that the queue has for it; else what was copied ahead is given up. */
static int choose(struct kv_store *s, int il, int64_t a) {
    if (s->n_queue && s->queue[0].il == il && s->queue[0].a / stage_cap(s, il) == a / stage_cap(s, il)) {
        int slot = s->queue[0].slot;
        for (int i = 1; i < s->n_queue; i++) s->queue[i - 1] = s->queue[i];
        s->n_queue--;
        s->slots[slot].wanted--;
        return slot;
    }
    s->n_queue = 0;
    for (int i = 0; i < s->n_slot; i++) s->slots[i].wanted = 0;
    s->stats.misses++;
    int slot = find_slot(s, il, a);
    if (slot >= 0) return slot;
    slot = s->turn_slot;
    s->turn_slot = (slot + 1) % s->n_slot;
    return slot;
}

int stage_get(struct kv_store *s, const struct stage_place *at, int64_t a, int64_t b, struct gpu_pages *out, int *slot) {
    if (!s->n_slot) return err_set(ERR_ARG, "KV: layer %d has pages to stream and the plan no room to stream them to", at->il);
    *slot = choose(s, at->il, a);
    struct stage_slot *t = &s->slots[*slot];
    s->now = *at;
    int rc = fill(s, t, at->il, a, b);
    if (!rc) rc = gpu_stream_wait(s->o.compute, t->ready);
    *out = (struct gpu_pages){.d_base = t->d, .n_slot = stage_cap(s, at->il), .first = a, .end = b};
    return rc;
}

int stage_done(struct kv_store *s, int slot) { return gpu_event_record(s->slots[slot].free, s->o.compute); }

void stage_reset(struct kv_store *s) {
    s->n_queue = s->turn_slot = 0;
    for (int i = 0; i < s->n_slot; i++) s->slots[i].il = -1, s->slots[i].wanted = 0;
}

void stage_cut(struct kv_store *s, int il, int64_t page) {
    for (int i = 0; i < s->n_slot; i++) {
        struct stage_slot *t = &s->slots[i];
        if (t->il != il || t->b <= page) continue;
        t->b = page;
        t->cut = true;
        if (t->b <= t->a) t->il = -1;
    }
}
