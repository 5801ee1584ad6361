/* kv_store.c: memory and phases of a KV store, and copies between its places. See kv_store.h. */
#include "core/err.h"
#include "core/mem.h"
#include "offload/kv_store_impl.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OS_PAGE = 4096 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

/* --- what a phase takes -------------------------------------------------------------------------------------------------- */

int64_t kv_store_ring_pages(const struct plan_phase *phase) { return (phase->chunk_tokens + KV_PAGE - 2) / KV_PAGE + 1; }

static bool is_mine(const struct kv_layer *g, const struct plan_layer *p) { return g->n_kv && p->mixer != PLAN_CPU; }

bool kv_store_lands(int64_t n_slot, const struct plan_layer *p, const struct plan_phase *phase) {
    return n_slot && p->mixer != PLAN_CPU && p->kv_pages[PLAN_VRAM] < min_i64(kv_store_ring_pages(phase), n_slot);
}

static bool is_landing(const struct kv_layer *g, const struct plan_layer *p, const struct plan_phase *phase) {
    return g->n_kv && kv_store_lands(g->n_slot, p, phase);
}

static size_t landing_page(const struct kv_layer *layers, int n_layer, const struct plan_phase *phase) {
    size_t most = 0;
    for (int il = 0; il < n_layer; il++)
        if (is_landing(&layers[il], &phase->layers[il], phase) && layers[il].page_bytes > most) most = layers[il].page_bytes;
    return most;
}

static void add(size_t *sum, size_t bytes) {
    if (!size_align_up(&bytes, bytes, GPU_ALIGN) || !size_add(sum, *sum, bytes)) *sum = SIZE_MAX;
}

size_t kv_store_vram_bytes(const struct kv_layer *layers, int n_layer, const struct plan_phase *phase) {
    size_t sum = 0;
    for (int il = 0; il < n_layer; il++) {
        const struct plan_layer *p = &phase->layers[il];
        if (is_mine(&layers[il], p) && !is_landing(&layers[il], p, phase))
            add(&sum, size_mul3((size_t)p->kv_pages[PLAN_VRAM], layers[il].page_bytes, 1));
    }
    add(&sum, size_mul3((size_t)kv_store_ring_pages(phase), landing_page(layers, n_layer, phase), 1));
    add(&sum, size_mul3((size_t)phase->stage_slots, phase->stage_slot_bytes, 1));
    return sum;
}

/* --- copies -------------------------------------------------------------------------------------------------------------- */

/* One copy takes memory that is page-locked by one call, or not at all. */
static int copy_bytes(struct kv_store *s, enum store_way way, int il, unsigned char *d, unsigned char *host, size_t bytes) {
    const struct store_layer *l = &s->layers[il];
    const unsigned char *base = s->host.layers[il].base;
    *(way == STORE_IN ? &s->stats.in_bytes : &s->stats.out_bytes) += (double)bytes;
    while (bytes) {
        size_t at = (size_t)(host - base), n = bytes;
        if (at < l->pinned) {
            size_t end = (at / KV_STORE_PIN_BYTES + 1) * KV_STORE_PIN_BYTES;
            if (end > l->pinned) end = l->pinned;
            if (n > end - at) n = end - at;
        }
        TRY(way == STORE_IN ? gpu_copy_in(s->in, d, host, n) : gpu_copy_out(s->out, host, d, n));
        d += n, host += n, bytes -= n;
    }
    return 0;
}

int store_copy(struct kv_store *s, enum store_way way, int il, unsigned char *d_base, int64_t n_slot, int64_t a, int64_t b) {
    const struct kv_layer *g = &s->host.layers[il];
    for (int64_t p = a, n; p < b; p += n) { /* as much as lies together on both sides */
        n = min_i64(b - p, n_slot - p % n_slot);
        if (g->ring) n = min_i64(n, g->n_slot - p % g->n_slot);
        TRY(copy_bytes(s, way, il, d_base + (size_t)(p % n_slot) * g->page_bytes, kv_page(&s->host, il, p * KV_PAGE),
                       (size_t)n * g->page_bytes));
    }
    return 0;
}

int store_behind(struct kv_store *s, struct gpu_stream *waits, struct gpu_stream *of) {
    TRY(gpu_event_record(s->point, of));
    return gpu_stream_wait(waits, s->point);
}

/* Pages a .. b of the ring from host memory. */
static int bring(struct kv_store *s, int il, int64_t a, int64_t b) {
    struct store_layer *l = &s->layers[il];
    TRY(store_behind(s, s->in, s->o.compute));
    TRY(gpu_stream_wait(s->in, l->landing ? s->landed : l->spilled));
    TRY(store_copy(s, STORE_IN, il, l->d_ring, l->n_ring, a, b));
    return store_behind(s, s->o.compute, s->in);
}

int store_bring_back(struct kv_store *s, int il, int64_t want) {
    struct store_layer *l = &s->layers[il];
    int64_t end = min_i64(l->first, pages_of(l->end));
    if (want >= end || !l->host_pages) return 0;
    if (min_i64(end * KV_PAGE, l->end) > l->host_end)
        return err_set(ERR_DEVICE, "layer %d: positions %lld..%lld were lost by an earlier failure", il, (long long)l->host_end,
                       (long long)min_i64(end * KV_PAGE, l->end) - 1);
    TRY(bring(s, il, want, end));
    l->first = want;
    return 0;
}

static int wait_all(struct kv_store *s) {
    TRY(gpu_stream_sync(s->o.compute));
    TRY(gpu_stream_sync(s->out));
    return gpu_stream_sync(s->in);
}

/* --- phases -------------------------------------------------------------------------------------------------------------- */

/* Host memory behind what the plan counts goes back to the system. */
static void drop_surplus(struct kv_store *s, int il) {
    struct store_layer *l = &s->layers[il];
    const struct kv_layer *g = &s->host.layers[il];
    size_t from = align_up((size_t)l->host_pages * g->page_bytes, OS_PAGE), to = g->bytes / OS_PAGE * OS_PAGE;
    if (from < to) madvise(g->base + from, to - from, MADV_DONTNEED);
    if (!g->ring) l->host_end = min_i64(l->host_end, l->host_pages * KV_PAGE);
    else if (!l->host_pages) l->host_end = 0;
    l->synced = l->host_end;
}

/* Everything is in host memory: the ring gets the newest pages. */
static int fill_ring(struct kv_store *s, int il) {
    struct store_layer *l = &s->layers[il];
    int64_t end = pages_of(l->end), want = max_i64(0, end - l->n_ring);
    l->first = INT64_MAX;
    if (l->landing || end == 0) return 0;
    TRY(bring(s, il, want, end));
    TRY(gpu_stream_sync(s->in));
    l->first = want;
    drop_surplus(s, il);
    return 0;
}

static int carve(struct kv_store *s) {
    const struct plan_phase *ph = s->ph;
    void *p;
    s->landing_page_bytes = landing_page(s->host.layers, s->host.n_layer, ph);
    s->landing_pages = kv_store_ring_pages(ph);
    s->n_slot = ph->stage_slots;
    s->slot_bytes = ph->stage_slot_bytes;
    if (s->landing_page_bytes) {
        TRY(gpu_alloc(&p, s->o.arena, (size_t)s->landing_pages * s->landing_page_bytes, "new pages of KV"));
        s->d_landing = p;
    }
    for (int il = 0; il < s->host.n_layer; il++) {
        struct store_layer *l = &s->layers[il];
        const struct plan_layer *pl = &ph->layers[il];
        const struct kv_layer *g = &s->host.layers[il];
        l->mine = is_mine(g, pl);
        l->landing = is_landing(g, pl, ph);
        l->outside = g->n_kv ? g->n_slot - pl->kv_pages[PLAN_VRAM] : 0;
        l->streamed = pl->kv_pages[PLAN_STREAM];
        l->n_ring = l->landing ? s->landing_pages : pl->kv_pages[PLAN_VRAM];
        l->d_ring = l->landing ? s->d_landing : l->d_kept;
        if (!l->mine || l->d_ring) continue;
        TRY(gpu_alloc(&p, s->o.arena, (size_t)l->n_ring * g->page_bytes, "KV"));
        l->d_ring = p;
    }
    if (!s->n_slot) return 0;
    TRY(gpu_alloc(&p, s->o.arena, (size_t)s->n_slot * s->slot_bytes, "slots for streamed KV"));
    for (int i = 0; i < s->n_slot; i++) s->slots[i].d = (unsigned char *)p + (size_t)i * s->slot_bytes;
    return 0;
}

int kv_store_enter(struct kv_store *s, enum plan_phase_id phase, struct gpu_ops *ops) {
    if (s->phase >= 0) return err_set(ERR_ARG, "KV store: a phase is entered already");
    s->ph = &s->o.phases[phase];
    TRY(carve(s));
    stage_reset(s);
    for (int il = 0; il < s->host.n_layer; il++) {
        struct store_layer *l = &s->layers[il];
        if (l->mine && !l->keep) TRY(fill_ring(s, il));
    }
    s->ops = ops;
    s->phase = (int)phase;
    s->now = (struct stage_place){.il = -1, .k = -1};
    gpu_ops_hook(ops, &(struct gpu_kv_hook){.arg = s, .put = store_put, .attn = store_attn});
    return 0;
}

/* What only a ring has that will not stay. */
static int evacuate(struct kv_store *s, int il) {
    struct store_layer *l = &s->layers[il];
    if (!l->mine || l->keep || l->landing || l->end <= l->host_end) return 0;
    TRY(store_behind(s, s->out, s->o.compute));
    TRY(store_copy(s, STORE_OUT, il, l->d_ring, l->n_ring, max_i64(l->host_end / KV_PAGE, l->first), pages_of(l->end)));
    l->host_end = l->end;
    return 0;
}

int kv_store_leave(struct kv_store *s) {
    if (s->phase < 0) return 0;
    gpu_ops_hook(s->ops, NULL);
    s->phase = -1;
    int rc = 0;
    for (int il = 0; il < s->host.n_layer && !rc; il++) rc = evacuate(s, il);
    TRY(rc);
    TRY(wait_all(s));
    for (int il = 0; il < s->host.n_layer; il++) {
        struct store_layer *l = &s->layers[il];
        l->synced = l->host_end;
        if (!l->mine) l->end = l->host_end = l->synced = s->host.n; /* the CPU wrote it */
        if (!l->keep) l->d_ring = NULL;
    }
    return 0;
}

int kv_store_fill_synthetic(struct kv_store *s, int64_t n, uint64_t seed) {
    if (s->phase < 0) return err_set(ERR_ARG, "KV store: no phase was entered");
    TRY(wait_all(s));
    stage_reset(s);
    for (int il = 0; il < s->host.n_layer; il++) {
        struct store_layer *l = &s->layers[il];
        struct kv one = {.n_layer = 1, .layers = &s->host.layers[il], .n_ctx = s->host.n_ctx};
        if (!s->host.layers[il].n_kv) continue;
        TRY(kv_fill_synthetic(&one, n, seed + (uint64_t)il * 0x632be59bd9b4e019u)); /* as it seeds its layers */
        l->end = l->host_end = l->synced = n;
        if (l->mine) TRY(fill_ring(s, il));
    }
    s->host.n = s->host.n_high = n;
    s->now = (struct stage_place){.il = -1, .k = -1};
    return 0;
}

/* --- open and close ------------------------------------------------------------------------------------------------------ */

static int check_plan(const struct kv_store *s) {
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        const struct plan_phase *phase = &s->o.phases[ph];
        if (phase->chunk_tokens < 1) return err_set(ERR_ARG, "the plan has calls of %d tokens", phase->chunk_tokens);
        for (int il = 0; il < s->host.n_layer; il++) {
            const struct plan_layer *p = &phase->layers[il];
            const struct kv_layer *g = &s->host.layers[il];
            if (!g->n_kv) continue;
            int64_t v = p->kv_pages[PLAN_VRAM], c = p->kv_pages[PLAN_CPU], t = p->kv_pages[PLAN_STREAM];
            if (v < 0 || c < 0 || t < 0 || v + c + t != g->n_slot)
                return err_set(ERR_ARG, "the plan has %lld + %lld + %lld pages for layer %d, which has %lld", (long long)v, (long long)c,
                               (long long)t, il, (long long)g->n_slot);
            if (g->window && v != 0 && (v != g->n_slot || c || t))
                return err_set(ERR_ARG, "the plan divides the KV of layer %d, which has a window of %lld", il, (long long)g->window);
            if (t && is_mine(g, p) && (phase->stage_slots < 1 || phase->stage_slot_bytes < g->page_bytes))
                return err_set(ERR_ARG, "the plan streams KV of layer %d, whose pages of %zu bytes need slots: it has %d of %zu", il,
                               g->page_bytes, phase->stage_slots, phase->stage_slot_bytes);
        }
    }
    return 0;
}

static int open_layer(struct kv_store *s, int il) {
    struct kv_layer *g = &s->host.layers[il];
    struct store_layer *l = &s->layers[il];
    if (!g->n_kv) return 0;
    const struct plan_layer *p[PLAN_PHASES];
    bool mine = true, landing = false;
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        p[ph] = &s->o.phases[ph].layers[il];
        l->host_pages = max_i64(l->host_pages, g->n_slot - p[ph]->kv_pages[PLAN_VRAM]);
        mine = mine && is_mine(g, p[ph]);
        if (is_landing(g, p[ph], &s->o.phases[ph])) {
            landing = true;
            l->host_pages = g->n_slot; /* all of them pass through host memory */
        }
    }
    l->keep = mine && !landing && p[PLAN_PREFILL]->kv_pages[PLAN_VRAM] == p[PLAN_DECODE]->kv_pages[PLAN_VRAM];
    l->first = INT64_MAX;
    g->base = mem_alloc(align_up(g->bytes, OS_PAGE), OS_PAGE, "KV cache");
    if (!g->base) return ERR_NOMEM;
    size_t lock = align_up((size_t)l->host_pages * g->page_bytes, OS_PAGE);
    while (l->pinned < lock) {
        size_t n = lock - l->pinned < KV_STORE_PIN_BYTES ? lock - l->pinned : KV_STORE_PIN_BYTES;
        if (gpu_pin(s->o.gpu, g->base + l->pinned, n)) break; /* stays pageable */
        l->pinned += n;
    }
    s->stats.pageable_bytes += lock - l->pinned;
    if (l->keep) {
        void *d;
        TRY(gpu_alloc(&d, s->o.arena, (size_t)p[PLAN_DECODE]->kv_pages[PLAN_VRAM] * g->page_bytes, "KV"));
        l->d_kept = d;
    }
    return gpu_event_open(&l->spilled, s->o.gpu, GPU_EVENT_ORDER);
}

static int open_handover(struct kv_store *s) {
    size_t rows = (size_t)PLAN_DECODE_TOKENS * (size_t)s->o.n_head, dim = (size_t)s->o.head_dim;
    TRY(gpu_event_open(&s->asked, s->o.gpu, GPU_EVENT_ORDER));
    TRY(gpu_mapped_alloc((void **)&s->ask, (void **)&s->d_ask, s->o.gpu, size_mul3(rows, dim, sizeof(float))));
    TRY(gpu_mapped_alloc((void **)&s->answer, (void **)&s->d_answer, s->o.gpu, size_mul3(rows, dim + 2, sizeof(float))));
    if (s->o.handover == KV_STORE_EVENTS) return 0;
    int rc = gpu_flags_open(&s->flags, s->o.gpu, 2);
    if (rc == ERR_UNSUPPORTED) rc = 0; /* events do the same, slower */
    s->stats.flags = s->flags != NULL;
    return rc;
}

static int open_slots(struct kv_store *s) {
    int n = 0;
    for (int ph = 0; ph < PLAN_PHASES; ph++)
        if (s->o.phases[ph].stage_slots > n) n = s->o.phases[ph].stage_slots;
    s->slots = calloc((size_t)n + 1, sizeof *s->slots);
    if (!s->slots) return err_set(ERR_NOMEM, "KV store: out of memory");
    for (int i = 0; i < n; i++) {
        s->open_slots = i + 1;
        TRY(gpu_event_open(&s->slots[i].ready, s->o.gpu, GPU_EVENT_ORDER));
        TRY(gpu_event_open(&s->slots[i].free, s->o.gpu, GPU_EVENT_ORDER));
    }
    return 0;
}

static int open_all(struct kv_store *s, const struct kv_spec *spec) {
    s->host.layers = calloc((size_t)spec->n_layer + 1, sizeof *s->host.layers);
    s->device.layers = calloc((size_t)spec->n_layer + 1, sizeof *s->device.layers);
    s->layers = calloc((size_t)spec->n_layer + 1, sizeof *s->layers);
    if (!s->host.layers || !s->device.layers || !s->layers) return err_set(ERR_NOMEM, "KV store: out of memory");
    TRY(kv_plan(s->host.layers, &s->host.bytes, spec));
    s->host.n_layer = spec->n_layer;
    s->host.n_ctx = spec->n_ctx;
    TRY(check_plan(s));
    struct kv_layer *layers = s->device.layers;
    s->device = s->host;
    s->device.layers = memcpy(layers, s->host.layers, (size_t)spec->n_layer * sizeof *layers);
    TRY(gpu_stream_open(&s->in, s->o.gpu));
    TRY(gpu_stream_open(&s->out, s->o.gpu));
    TRY(gpu_event_open(&s->point, s->o.gpu, GPU_EVENT_ORDER));
    TRY(gpu_event_open(&s->landed, s->o.gpu, GPU_EVENT_ORDER));
    TRY(open_slots(s));
    TRY(open_handover(s));
    for (int il = 0; il < spec->n_layer; il++) TRY(open_layer(s, il));
    return 0;
}

int kv_store_open(struct kv_store **out, const struct kv_store_opts *o) {
    struct kv_store *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "KV store: out of memory");
    s->o = *o;
    s->o.spec = NULL;
    s->phase = -1;
    s->now = (struct stage_place){.il = -1, .k = -1};
    size_t mark = gpu_arena_used(o->arena);
    int rc = o->spec->n_layer >= 0 && o->spec->n_layer <= MODEL_MAX_LAYER ? open_all(s, o->spec)
                                                                            : err_set(ERR_ARG, "KV store: %d layers", o->spec->n_layer);
    if (rc) {
        gpu_arena_release(o->arena, mark);
        kv_store_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void kv_store_close(struct kv_store *s) {
    if (!s) return;
    if (s->phase >= 0) gpu_ops_hook(s->ops, NULL);
    /* Copies may be on their way to or from memory that is given back here. */
    if (s->out) gpu_stream_sync(s->out);
    if (s->in) gpu_stream_sync(s->in);
    if (s->in) gpu_stream_sync(s->o.compute);
    for (int il = 0; il < s->host.n_layer; il++) {
        struct store_layer *l = &s->layers[il];
        for (size_t at = 0; at < l->pinned; at += KV_STORE_PIN_BYTES) gpu_unpin(s->o.gpu, s->host.layers[il].base + at);
        gpu_event_close(l->spilled);
        mem_free(s->host.layers[il].base);
    }
    for (int i = 0; i < s->open_slots; i++) {
        gpu_event_close(s->slots[i].ready);
        gpu_event_close(s->slots[i].free);
    }
    gpu_flags_close(s->flags);
    if (s->ask) gpu_host_free(s->o.gpu, s->ask);
    if (s->answer) gpu_host_free(s->o.gpu, s->answer);
    gpu_event_close(s->asked);
    gpu_event_close(s->landed);
    gpu_event_close(s->point);
    gpu_stream_close(s->in);
    gpu_stream_close(s->out);
    free(s->slots);
    free(s->layers);
    free(s->host.layers);
    free(s->device.layers);
    free(s);
}

struct kv *kv_store_host(struct kv_store *s) { return &s->host; }
struct kv *kv_store_device(struct kv_store *s) { return &s->device; }
void kv_store_stats_get(const struct kv_store *s, struct kv_store_stats *out) { *out = s->stats; }
