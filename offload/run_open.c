/* run_open.c: what a run is made of, and how it changes from one phase to the other. See run.h.
 *
 * The arena, from its start: weights that both phases keep (the home's), KV (kv_store.c) and state that both phases keep, then
 * what the phase has for itself. When the phase changes, KV and state that leave VRAM are copied to the host, the rest of the
 * arena is carved anew, and what comes in is copied from the host. */
#include "core/err.h"
#include "core/mem.h"
#include "offload/run_impl.h"
#include "offload/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- what a plan says ---------------------------------------------------------------------------------------------------- */

static bool same_layer(const struct plan_layer *a, const struct plan_layer *b) {
    bool same = a->mixer == b->mixer && a->ffn == b->ffn && a->state == b->state;
    for (int p = 0; p < PLAN_PLACES; p++)
        same = same && a->experts[p] == b->experts[p] && a->ff_rows[p] == b->ff_rows[p] && a->kv_pages[p] == b->kv_pages[p];
    return same;
}

static bool phases_alike(const struct plan *p, const struct model *m) {
    const struct plan_phase *a = &p->phase[PLAN_PREFILL], *b = &p->phase[PLAN_DECODE];
    bool same = a->embed == b->embed && a->head == b->head && a->chunk_tokens == b->chunk_tokens && a->pass_tokens == b->pass_tokens &&
                a->ring_slots == b->ring_slots && a->ring_slot_bytes == b->ring_slot_bytes;
    for (int il = 0; il < m->n_block && same; il++) same = same_layer(&a->layers[il], &b->layers[il]);
    return same;
}

/* Does the CPU compute in a phase? (Looking up embeddings does not count.) */
static bool cpu_computes(const struct parts *ps, int phase) {
    for (int i = 0; i < ps->n; i++)
        if (ps->v[i].kind != PART_EMBED && ps->v[i].place[phase] == PLAN_CPU) return true;
    return false;
}

static int state_place(const struct plan *p, int phase, int il) {
    return !p->gpu || p->phase[phase].layers[il].mixer == PLAN_CPU ? PLAN_CPU : PLAN_VRAM;
}

int run_chunk(const struct run *r) { return r->has_gpu ? r->plan.phase[r->phase].chunk_tokens : r->plan.chunk_tokens; }
int run_pass_tokens(const struct run *r) {
    return !r->has_gpu ? r->plan.chunk_tokens : r->phase < 0 ? 0 : r->plan.phase[r->phase].pass_tokens;
}
enum plan_place run_place(const struct run *r, const struct part *p) { return r->has_gpu ? p->place[r->phase] : PLAN_CPU; }

enum plan_phase_id run_phase(const struct run *r, int n) {
    return r->one_phase || n <= r->plan.phase[PLAN_DECODE].pass_tokens ? PLAN_DECODE : PLAN_PREFILL;
}

bool run_spoils(const struct run *r, int n) {
    bool ring = false;
    for (int il = 0; il < r->m->n_block; il++) ring = ring || r->cpu.kv->layers[il].ring;
    return ring && n > r->plan.chunk_tokens;
}

/* --- sizes --------------------------------------------------------------------------------------------------------------- */

static void add_to(size_t *sum, size_t bytes) {
    if (bytes && (!size_align_up(&bytes, bytes, GPU_ALIGN) || !size_add(sum, *sum, bytes))) *sum = SIZE_MAX;
}

static size_t x_bytes(const struct model *m, int n) { return size_mul3((size_t)n, (size_t)m->dim, sizeof(float)); }
static size_t logits_bytes(const struct model *m, const struct plan *p) { return size_mul3((size_t)p->logits_rows, (size_t)m->n_vocab, sizeof(float)); }

int run_vram_bytes(size_t *bytes, const struct model *m, const struct plan *p, enum plan_phase_id phase) {
    const struct plan_phase *ph = &p->phase[phase];
    struct parts ps;
    struct kv_spec spec;
    struct kv_shape *shapes = NULL;
    struct kv_layer *layers = calloc((size_t)m->n_block, sizeof *layers);
    struct state *state = NULL;
    struct ops_limits l;
    size_t kv, sum = 0;
    int rc = parts_open(&ps, m, p);
    if (!rc && !layers) rc = err_set(ERR_NOMEM, "run: out of memory");
    if (!rc) rc = session_kv_spec(&spec, &shapes, m, p);
    if (!rc) rc = kv_plan(layers, &kv, &spec);
    if (!rc) rc = state_open_part(&state, m, NULL);
    for (int i = 0; i < ps.n && !rc; i++)
        if (ps.v[i].place[phase] == PLAN_VRAM) add_to(&sum, part_run(&ps, i));
    if (!rc) add_to(&sum, kv_store_vram_bytes(layers, m->n_block, ph));
    for (int il = 0; il < m->n_block && !rc; il++) {
        if (il >= m->n_layer || state->at[il] == STATE_NONE || state_place(p, phase, il) != PLAN_VRAM) continue;
        add_to(&sum, state->layer_bytes);
        add_to(&sum, state->layer_bytes);
    }
    decoder_limits(&l, m, ph->chunk_tokens, p->n_ctx);
    add_to(&sum, decoder_scratch_bytes(m, ph->chunk_tokens, ph->pass_tokens));
    add_to(&sum, gpu_ops_scratch_bytes(&l));
    add_to(&sum, logits_bytes(m, p));
    add_to(&sum, x_bytes(m, ph->pass_tokens));
    add_to(&sum, size_mul3((size_t)ph->ring_slots, ph->ring_slot_bytes, 1));
    state_close(state);
    free(layers);
    free(shapes);
    if (ps.memory) parts_close(&ps);
    *bytes = sum;
    return rc;
}

/* --- host ---------------------------------------------------------------------------------------------------------------- */

/* Host memory that copies take part in is page-locked. */
static int host_alloc(struct run *r, void *out, size_t bytes, const char *what) {
    void **p = out;
    if (bytes == SIZE_MAX) return err_set(ERR_NOMEM, "%s: the size overflows", what);
    if (r->has_gpu) return gpu_host_alloc(p, r->o.gpu, bytes ? bytes : 1);
    *p = mem_alloc(bytes, 64, what);
    return *p ? 0 : ERR_NOMEM;
}

static void host_free(struct run *r, void *p) {
    if (r->has_gpu)
        gpu_host_free(r->o.gpu, p);
    else
        mem_free(p);
}

/* Tokens that the CPU's decoder takes: as many as a phase in which it computes. */
static void cpu_sizes(struct run *r) {
    r->cpu_chunk = r->cpu_pass = r->plan.chunk_tokens;
    if (r->has_gpu) r->cpu_chunk = r->cpu_pass = r->plan.n_ctx < PLAN_DECODE_TOKENS ? (int)r->plan.n_ctx : PLAN_DECODE_TOKENS; /* kv_store's calls */
    for (int ph = 0; ph < PLAN_PHASES && r->has_gpu; ph++) {
        if (!cpu_computes(r->parts, ph)) continue;
        const struct plan_phase *p = &r->plan.phase[ph];
        if (p->chunk_tokens > r->cpu_chunk) r->cpu_chunk = p->chunk_tokens;
        if (p->pass_tokens > r->cpu_pass) r->cpu_pass = p->pass_tokens;
    }
}

static int open_cpu(struct run *r) {
    struct plan p = r->plan;
    p.chunk_tokens = r->cpu_chunk;
    struct cpu_opts o = session_cpu_opts(r->m, &p);
    r->cores = calloc((size_t)p.n_thread, sizeof *r->cores);
    if (!r->cores) return err_set(ERR_NOMEM, "session: out of memory");
    o.n_core = topo_pick_cores(r->o.topo, p.n_thread, r->cores);
    /* More threads than cores: let the system move them. */
    o.cores = o.n_core >= p.n_thread ? r->cores : NULL;
    if (!o.cores) o.n_core = 0;
    int rc = cpu_open(&r->cpu_end, &o);
    if (!rc) r->cpu.ops = cpu_ops(r->cpu_end);
    return rc;
}

/* Without a GPU pages in host memory, with one the store's; for which the CPU's back end is there already. */
static int open_kv(struct run *r) {
    const struct model *m = r->m;
    struct ops_limits l;
    struct kv_spec spec;
    struct kv_shape *shapes;
    decoder_limits(&l, m, 1, r->plan.n_ctx);
    int rc = session_kv_spec(&spec, &shapes, m, &r->plan);
    struct kv_store_opts o = {.spec = &spec, .phases = r->plan.phase, .n_head = l.n_head, .head_dim = l.head_dim, .gpu = r->o.gpu,
                              .arena = r->o.arena, .compute = r->stream, .cpu = r->cpu_end};
    if (!rc) rc = r->has_gpu ? kv_store_open(&r->store, &o) : kv_open(&r->cpu.kv, &spec);
    free(shapes);
    if (rc || !r->has_gpu) return rc;
    r->cpu.kv = kv_store_host(r->store);
    r->gpu.kv = kv_store_device(r->store);
    return 0;
}

static bool has_state_layer(const struct run *r, int il) { return il < r->m->n_layer && r->m->layers[il].mixer == MIXER_DELTA; }

/* Is the layer's state on the host in a phase at least? */
static bool host_state(const struct run *r, int il) {
    return state_place(&r->plan, PLAN_PREFILL, il) == PLAN_CPU || state_place(&r->plan, PLAN_DECODE, il) == PLAN_CPU;
}

static int open_host_state(struct run *r, struct state **out, const bool *held) {
    int rc = state_open_part(out, r->m, held);
    if (rc || !(*out)->bytes) return rc;
    (*out)->base = mem_alloc((*out)->bytes, 64, "recurrent state");
    return (*out)->base ? 0 : ERR_NOMEM;
}

static int open_state(struct run *r) {
    bool held[MODEL_MAX_LAYER], any = false;
    for (int il = 0; il < r->m->n_layer; il++) {
        held[il] = has_state_layer(r, il) && host_state(r, il);
        any = any || held[il];
    }
    if (!any) return 0;
    int rc = open_host_state(r, &r->cpu.state, held);
    return rc ? rc : open_host_state(r, &r->cpu.saved, held);
}

static int open_host(struct run *r) {
    const struct model *m = r->m;
    int pass = r->cpu_pass;
    for (int ph = 0; ph < PLAN_PHASES && r->has_gpu; ph++)
        if (r->plan.phase[ph].pass_tokens > pass) pass = r->plan.phase[ph].pass_tokens;
    r->cpu.w = home_weights(r->o.home);
    int rc = host_alloc(r, &r->cpu.scratch, decoder_scratch_bytes(m, r->cpu_chunk, r->cpu_pass), "scratch");
    if (!rc) rc = host_alloc(r, &r->cpu.x, x_bytes(m, pass), "hidden states");
    if (!rc && r->has_gpu) rc = host_alloc(r, &r->gpu_sum, x_bytes(m, r->cpu_chunk), "summands");
    if (!rc) rc = host_alloc(r, &r->cpu.logits, logits_bytes(m, &r->plan), "logits");
    if (!rc)
        rc = decoder_open(&r->cpu.d, m, r->cpu.ops, r->cpu.w, r->cpu.kv, r->cpu.state, r->cpu_chunk, r->cpu_pass, r->plan.n_ctx,
                          r->o.rope_freqs, r->cpu.scratch);
    r->last = r->cpu.logits;
    return rc;
}

/* --- VRAM that both phases keep ------------------------------------------------------------------------------------------ */

/* Phases in which a layer's state is in VRAM, a bit each. */
static int vram_phases(const struct run *r, int il) {
    int n = 0;
    for (int ph = 0; ph < PLAN_PHASES; ph++) n |= (state_place(&r->plan, ph, il) == PLAN_VRAM) << ph;
    return n;
}
enum { BOTH = 1 << PLAN_PREFILL | 1 << PLAN_DECODE };

/* A layer's state and its copy; offsets count from the first one that was carved. */
static int carve_state(struct run *r, int il) {
    struct state *both[] = {r->gpu.state, r->gpu.saved};
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) {
        void *d;
        rc = gpu_alloc(&d, r->o.arena, both[i]->layer_bytes, "recurrent state");
        if (rc) break;
        if (!both[i]->base) both[i]->base = d;
        both[i]->at[il] = (size_t)((char *)d - both[i]->base);
        rc = gpu_fill(r->stream, d, 0, both[i]->layer_bytes);
    }
    return rc;
}

static int open_kept(struct run *r) {
    const struct model *m = r->m;
    int rc = 0;
    r->w.layers = calloc((size_t)m->n_block, sizeof *r->w.layers);
    if (!r->w.layers) return err_set(ERR_NOMEM, "session: out of memory");
    r->gpu.w = &r->w;
    bool none[MODEL_MAX_LAYER] = {false};
    if (state_bytes(m)) {
        rc = state_open_part(&r->gpu.state, m, none);
        if (!rc) rc = state_open_part(&r->gpu.saved, m, none);
    }
    for (int il = 0; il < m->n_block && !rc; il++) {
        if (has_state_layer(r, il) && vram_phases(r, il) == BOTH) rc = carve_state(r, il);
    }
    r->mark = gpu_arena_used(r->o.arena);
    return rc;
}

/* --- what changes places ------------------------------------------------------------------------------------------------- */

enum direction { COPY_OUT, COPY_IN };

static int move_bytes(struct run *r, enum direction to, void *d, void *host, size_t bytes) {
    return to == COPY_IN ? gpu_copy_in(r->stream, d, host, bytes) : gpu_copy_out(r->stream, host, d, bytes);
}

static int move_state(struct run *r, enum direction to, int il) {
    struct state *g[] = {r->gpu.state, r->gpu.saved}, *c[] = {r->cpu.state, r->cpu.saved};
    int rc = 0;
    for (int i = 0; i < 2 && !rc; i++) rc = move_bytes(r, to, g[i]->base + g[i]->at[il], c[i]->base + c[i]->at[il], c[i]->layer_bytes);
    return rc;
}

/* State that this phase alone has in VRAM. */
static int move_all(struct run *r, enum direction to, int phase) {
    int rc = 0;
    for (int il = 0; il < r->m->n_block && !rc; il++) {
        if (!has_state_layer(r, il) || vram_phases(r, il) != 1 << phase) continue;
        if (to == COPY_IN) rc = carve_state(r, il);
        if (!rc) rc = move_state(r, to, il);
    }
    int sync = gpu_stream_sync(r->stream);
    return rc ? rc : sync;
}

/* --- loads of the pipe --------------------------------------------------------------------------------------------------- */

/* The loads of a unit while they are put together. */
struct packer {
    struct run *r;
    size_t slot_bytes, used; /* of the load under way */
    int n_piece;
};

static void pack_part(struct packer *k, struct unit_loads *u, int part) {
    struct run *r = k->r;
    const struct part *p = &r->parts->v[part];
    if (p->place[r->phase] != PLAN_STREAM || !p->bytes) return;
    if (!u->n || k->used + p->bytes > k->slot_bytes) {
        r->loads[r->n_load++] = (struct pipe_load){.pieces = r->pieces + k->n_piece};
        u->n++;
        k->used = 0;
    }
    struct pipe_load *l = &r->loads[r->n_load - 1];
    r->load_of[part] = r->n_load - 1;
    r->in_load[part] = k->used;
    const char *src = home_host(r->o.home, part);
    for (size_t left = p->bytes, n; left; left -= n, src += n, k->used += n) {
        bool pinned;
        n = home_run(r->o.home, src, left, &pinned);
        r->pieces[k->n_piece++] = (struct pipe_piece){.src = src, .at = k->used, .bytes = n, .pinned = pinned};
        l->n_piece++;
    }
}

static int alloc_loads(struct run *r) {
    size_t pieces = 0, parts = (size_t)r->parts->n, layers = (size_t)r->m->n_layer;
    for (int i = 0; i < r->parts->n; i++) pieces += r->parts->v[i].bytes / HOME_PIN_BYTES + 3;
    r->pieces = calloc(pieces, sizeof *r->pieces);
    r->loads = calloc(parts, sizeof *r->loads);
    r->load_at = calloc(parts, sizeof *r->load_at);
    r->load_of = calloc(parts, sizeof *r->load_of);
    r->in_load = calloc(parts, sizeof *r->in_load);
    r->mixer = calloc(layers, sizeof *r->mixer);
    r->ffn = calloc(layers, sizeof *r->ffn);
    bool ok = r->pieces && r->loads && r->load_at && r->load_of && r->in_load && r->mixer && r->ffn;
    return ok ? 0 : err_set(ERR_NOMEM, "session: out of memory");
}

static void free_loads(struct run *r) {
    free(r->pieces), free(r->loads), free(r->load_at), free(r->load_of), free(r->in_load), free(r->mixer), free(r->ffn);
    r->pieces = NULL, r->loads = NULL, r->load_at = NULL, r->load_of = NULL, r->in_load = NULL, r->mixer = NULL, r->ffn = NULL;
    r->n_load = 0;
    r->head = (struct unit_loads){0};
}

static int check_unit(const struct run *r, const struct unit_loads *u, const char *what, int il) {
    int slots = r->plan.phase[r->phase].ring_slots;
    if (u->n <= slots) return 0;
    return err_set(ERR_ARG, "plan: the %s of layer %d is streamed in %d loads, the ring has %d slots of %zu bytes", what, il, u->n, slots,
                   r->plan.phase[r->phase].ring_slot_bytes);
}

static int open_loads(struct run *r) {
    struct packer k = {.r = r, .slot_bytes = r->plan.phase[r->phase].ring_slot_bytes};
    int rc = alloc_loads(r);
    if (rc) return rc;
    for (int i = 0; i < r->parts->n; i++) r->load_of[i] = -1;
    for (int il = 0; il < r->m->n_layer && !rc; il++) {
        const struct part_layer *l = &r->parts->layers[il];
        r->mixer[il].first = r->n_load;
        pack_part(&k, &r->mixer[il], l->mixer);
        r->ffn[il].first = r->n_load;
        pack_part(&k, &r->ffn[il], l->rest);
        for (int i = l->ffn; i < l->ffn + l->n_ffn; i++) pack_part(&k, &r->ffn[il], i);
        rc = check_unit(r, &r->ffn[il], "FFN", il);
    }
    r->head.first = r->n_load;
    pack_part(&k, &r->head, r->parts->head);
    return rc;
}

/* --- phases -------------------------------------------------------------------------------------------------------------- */

static int carve(struct run *r, void *out, size_t bytes, const char *what) {
    void **d = out;
    if (bytes == SIZE_MAX) return err_set(ERR_BUDGET, "%s: the size overflows", what);
    return gpu_alloc(d, r->o.arena, bytes, what);
}

/* Addresses of everything that does not move within the phase; FFNs are reached by part. */
static void bind_weights(struct run *r) {
    memset(r->w.layers, 0, (size_t)r->m->n_block * sizeof *r->w.layers);
    for (int i = 0; i < r->parts->n; i++) {
        const struct part *p = &r->parts->v[i];
        if (p->kind == PART_ROWS || p->kind == PART_EXPERTS) continue;
        part_bind(&r->w, p, p->place[r->phase] == PLAN_VRAM ? home_device(r->o.home, i) : NULL);
    }
    if (r->parts->embed == r->parts->head) r->w.embd = r->w.out;
}

static int leave(struct run *r) {
    int rc = kv_store_leave(r->store); /* before the operations go */
    if (r->pipe) {
        struct pipe_stats s;
        pipe_stats_get(r->pipe, &s);
        int settled = pipe_settle(r->pipe);
        if (!rc) rc = settled;
        r->streamed += s.bytes;
        r->pageable += s.pageable_bytes;
    }
    pipe_close(r->pipe);
    decoder_close(r->gpu.d);
    gpu_ops_close(r->ops);
    r->pipe = NULL, r->gpu.d = NULL, r->ops = NULL;
    free_loads(r);
    home_leave(r->o.home);
    gpu_arena_release(r->o.arena, r->mark);
    r->phase = -1;
    return rc;
}

static int enter(struct run *r, enum plan_phase_id phase) {
    const struct model *m = r->m;
    const struct plan_phase *p = &r->plan.phase[phase];
    struct ops_limits limits;
    void *ring;
    r->phase = (int)phase;
    int rc = home_enter(r->o.home, phase, r->stream);
    if (!rc) rc = move_all(r, COPY_IN, r->phase);
    decoder_limits(&limits, m, p->chunk_tokens, r->plan.n_ctx);
    if (!rc) rc = gpu_ops_open(&r->ops, r->o.gpu, r->o.arena, r->stream, &limits);
    if (!rc) r->gpu.ops = gpu_ops_table(r->ops);
    if (!rc) rc = kv_store_enter(r->store, phase, r->ops);
    if (!rc) rc = carve(r, &r->gpu.scratch, decoder_scratch_bytes(m, p->chunk_tokens, p->pass_tokens), "scratch");
    if (!rc) rc = carve(r, &r->gpu.logits, logits_bytes(m, &r->plan), "logits");
    if (!rc) rc = carve(r, &r->gpu.x, x_bytes(m, p->pass_tokens), "hidden states");
    if (!rc) bind_weights(r);
    if (!rc)
        rc = decoder_open(&r->gpu.d, m, r->gpu.ops, r->gpu.w, r->gpu.kv, r->gpu.state, p->chunk_tokens, p->pass_tokens, r->plan.n_ctx,
                          r->o.rope_freqs, r->gpu.scratch);
    if (!rc) rc = open_loads(r);
    if (!rc && r->n_load) {
        rc = carve(r, &ring, size_mul3((size_t)p->ring_slots, p->ring_slot_bytes, 1), "ring");
        if (!rc)
            rc = pipe_open(&r->pipe, r->o.gpu, r->stream, ring, p->ring_slots, p->ring_slot_bytes, r->loads, r->n_load, r->head.n);
    }
    return rc;
}

/* What was said first counts. */
static int give_up(struct run *r, int rc) {
    char text[1024];
    snprintf(text, sizeof text, "%s", err_text());
    (void)leave(r);
    return err_set(rc, "%s", text);
}

int run_enter(struct run *r, enum plan_phase_id phase) {
    if (!r->has_gpu || r->phase == (int)phase) return 0;
    int rc = 0;
    if (r->phase >= 0) {
        rc = gpu_stream_sync(r->stream);
        if (!rc) rc = move_all(r, COPY_OUT, r->phase);
        r->switches++;
        int left = leave(r);
        if (!rc) rc = left;
    }
    if (!rc) rc = enter(r, phase);
    return rc && r->phase >= 0 ? give_up(r, rc) : rc;
}

/* --- state --------------------------------------------------------------------------------------------------------------- */

static int gpu_state(struct run *r, enum run_state what) {
    struct state *s = r->gpu.state, *saved = r->gpu.saved;
    int rc = 0;
    for (int il = 0; il < r->m->n_layer && s && !rc; il++) {
        if (!has_state_layer(r, il) || !(vram_phases(r, il) & 1 << r->phase)) continue;
        char *now = s->base + s->at[il], *kept = saved->base + saved->at[il];
        if (what == RUN_SAVE) rc = gpu_copy_on(r->stream, kept, now, s->layer_bytes);
        if (what == RUN_RESTORE) rc = gpu_copy_on(r->stream, now, kept, s->layer_bytes);
        if (what == RUN_RESET) rc = gpu_fill(r->stream, now, 0, s->layer_bytes);
    }
    return rc;
}

int run_state(struct run *r, enum run_state what) {
    struct state *s = r->cpu.state;
    if (s && what == RUN_SAVE) state_copy(r->cpu.saved, s);
    if (s && what == RUN_RESTORE) state_copy(s, r->cpu.saved);
    if (s && what == RUN_RESET) state_reset(s);
    if (run_follows(r) && what == RUN_SAVE) {
        int rc = decoder_keep(r->cpu.d, r->cpu.kv->n);
        if (rc) return rc;
    }
    return r->has_gpu && r->phase >= 0 ? gpu_state(r, what) : 0;
}

int run_fill_synthetic(struct run *r, int64_t n, uint64_t seed) {
    if (r->has_gpu && run_has_state(r))
        return err_set(ERR_UNSUPPORTED, "a recurrent state without a prefill is not made on a GPU yet; -dev none runs on the CPU");
    int rc = r->has_gpu ? kv_store_fill_synthetic(r->store, n, seed) : kv_fill_synthetic(r->cpu.kv, n, seed);
    if (!rc && r->cpu.state) state_fill_synthetic(r->cpu.state, seed);
    decoder_forget(r->cpu.d);
    return rc;
}

/* --- open and close ------------------------------------------------------------------------------------------------------ */

static int check_phases(const struct run *r) {
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        const struct plan_phase *p = &r->plan.phase[ph];
        if (p->chunk_tokens < 1 || p->pass_tokens < p->chunk_tokens)
            return err_set(ERR_ARG, "plan: passes of %d tokens in chunks of %d", p->pass_tokens, p->chunk_tokens);
        if (p->ring_slots < 0 || p->ring_slot_bytes % GPU_ALIGN)
            return err_set(ERR_ARG, "plan: a ring of %d slots of %zu bytes (must be a multiple of %d)", p->ring_slots, p->ring_slot_bytes, GPU_ALIGN);
    }
    return 0;
}

static int open_gpu(struct run *r) {
    int rc = gpu_event_open(&r->handed, r->o.gpu, GPU_EVENT_ORDER);
    if (!rc) rc = open_kept(r);
    /* Decode is tried as well: what does not fit is said now. */
    if (!rc) rc = run_enter(r, PLAN_DECODE);
    if (!rc && !r->one_phase) rc = run_enter(r, PLAN_PREFILL);
    r->switches = 0;
    return rc;
}

int run_open(struct run **out, const struct run_opts *o) {
    struct run *r = calloc(1, sizeof *r);
    if (!r) return err_set(ERR_NOMEM, "session: out of memory");
    *r = (struct run){.o = *o, .plan = *o->plan, .m = o->model, .parts = home_parts(o->home), .has_gpu = o->plan->gpu, .phase = -1};
    r->one_phase = !r->has_gpu || phases_alike(o->plan, o->model);
    r->mark_open = r->has_gpu ? gpu_arena_used(o->arena) : 0;
    for (int ph = 0; ph < PLAN_PHASES; ph++) /* a ring of a window's pages was sized for so many */
        if (r->plan.phase[ph].chunk_tokens > r->plan.chunk_tokens) r->plan.phase[ph].chunk_tokens = r->plan.chunk_tokens;
    int rc = r->has_gpu ? check_phases(r) : 0;
    cpu_sizes(r);
    if (!rc) rc = open_cpu(r);
    if (!rc && r->has_gpu) rc = gpu_stream_open(&r->stream, o->gpu);
    if (!rc) rc = open_kv(r);
    if (!rc) rc = open_state(r);
    if (!rc) rc = open_host(r);
    if (!rc && r->has_gpu) rc = open_gpu(r);
    if (rc) {
        run_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

static void close_state(struct state *s, bool device) {
    if (s && device) s->base = NULL; /* the arena's */
    state_close(s);
}

void run_close(struct run *r) {
    if (!r) return;
    if (r->stream) gpu_stream_sync(r->stream);
    if (r->phase >= 0) (void)leave(r);
    kv_store_close(r->store);
    gpu_event_close(r->handed);
    gpu_stream_close(r->stream);
    if (r->has_gpu) gpu_arena_release(r->o.arena, r->mark_open);
    close_state(r->gpu.state, true);
    close_state(r->gpu.saved, true);
    free(r->w.layers);
    decoder_close(r->cpu.d);
    host_free(r, r->cpu.logits);
    host_free(r, r->gpu_sum);
    host_free(r, r->cpu.x);
    host_free(r, r->cpu.scratch);
    cpu_close(r->cpu_end);
    close_state(r->cpu.state, false);
    close_state(r->cpu.saved, false);
    if (!r->has_gpu) kv_close(r->cpu.kv);
    free(r->cores);
    free(r);
}

void run_stats_get(const struct run *r, struct run_stats *s) {
    *s = (struct run_stats){.streamed_bytes = r->streamed, .pageable_bytes = r->pageable, .switches = r->switches};
    if (r->store) {
        struct kv_store_stats kv;
        kv_store_stats_get(r->store, &kv);
        s->kv_pageable_bytes = kv.pageable_bytes;
        s->flags = kv.flags;
    }
    if (!r->pipe) return;
    struct pipe_stats p;
    pipe_stats_get(r->pipe, &p);
    s->streamed_bytes += p.bytes;
    s->pageable_bytes += p.pageable_bytes;
}
