/* engine.c: an opened model with its weights, and sessions on it: what may be evaluated when, and going back. Passes are
 * executed by run.c. */
#include "offload/engine.h"

#include "core/decoder.h"
#include "core/gguf.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/shape.h"
#include "core/synth.h"
#include "core/state.h"
#include "cpu/pool.h"
#include "gpu/gpu.h"
#include "offload/clock.h"
#include "offload/run.h"
#include "offload/kernel_check.h"
#include "offload/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct engine {
    struct gguf *gguf;
    struct model model;
    bool model_ok;
    struct topo *topo;
    struct tokenizer *tok;
    struct home *home;
    struct plan *placed;     /* ?the plan with a GPU that the weights were loaded for */
    struct gpu *gpu;         /* ? */
    struct gpu_arena *arena; /* ? */
    int device;              /* number of the card */
    bool in_use;             /* by a session that has the rest of the arena */
    double load_s;
};

struct session {
    struct engine *engine;
    struct plan plan;
    struct run *run;
    struct kv *kv;     /* of the run: positions */
    bool state;        /* the model has a recurrent state */
    int64_t saved_n;   /* position of its copy, -1: nothing is saved */
    bool marked;       /* by session_mark: passes do not replace it */
    bool lost;         /* a pass failed half way and the state, or a window, is of no position */
    float *rope_freqs; /* ?[n_rot/2] */
};

static void unload(struct engine *e) {
    home_close(e->home);
    gpu_arena_close(e->arena);
    gpu_close(e->gpu);
    free(e->placed);
    e->home = NULL, e->arena = NULL, e->gpu = NULL, e->placed = NULL;
}

/* Takes g. */
static int open_gguf(struct engine **out, struct gguf *g, const struct rope_user *rope) {
    struct engine *e = calloc(1, sizeof *e);
    if (!e) {
        gguf_close(g);
        return err_set(ERR_NOMEM, "engine: out of memory");
    }
    e->gguf = g;
    int rc = model_open(&e->model, e->gguf);
    e->model_ok = !rc;
    if (!rc && rope) rc = rope_override(&e->model.ropes[0], rope);
    if (!rc) rc = topo_open(&e->topo);
    if (rc) {
        engine_close(e);
        return rc;
    }
    *out = e;
    return 0;
}

int engine_open(struct engine **out, const char *path, const struct rope_user *rope) {
    struct gguf *g;
    int rc = gguf_open(&g, path);
    return rc ? rc : open_gguf(out, g, rope);
}

int engine_open_shape(struct engine **out, const char *shape, const struct rope_user *rope) {
    const struct shape *s;
    enum mix mix;
    struct gguf *g;
    int rc = shape_parse(&s, &mix, shape);
    if (!rc) rc = synth_gguf(&g, s, mix, 1);
    return rc ? rc : open_gguf(out, g, rope);
}

void engine_close(struct engine *e) {
    if (!e) return;
    unload(e);
    tokenizer_close(e->tok);
    topo_close(e->topo);
    if (e->model_ok) model_close(&e->model);
    gguf_close(e->gguf);
    free(e);
}

const struct gguf *engine_gguf(const struct engine *e) { return e->gguf; }
const struct model *engine_model(const struct engine *e) { return &e->model; }
const struct topo *engine_topo(const struct engine *e) { return e->topo; }
double engine_load_s(const struct engine *e) { return e->load_s; }

int engine_use_mtp(struct engine *e) {
    if (e->home) return err_set(ERR_ARG, "engine: the weights are loaded already");
    return model_use_mtp(&e->model);
}

int engine_tokenizer(struct engine *e, const struct tokenizer **out) {
    int rc = e->tok ? 0 : tokenizer_from_gguf(&e->tok, e->gguf);
    if (rc) return rc;
    if (tokenizer_n_vocab(e->tok) > e->model.n_vocab)
        return err_set(ERR_FORMAT, "the tokenizer has %d tokens, the model's matrices only %d rows", tokenizer_n_vocab(e->tok), e->model.n_vocab);
    *out = e->tok;
    return 0;
}

void engine_use_gpu(struct engine *e, int index) { e->device = index; }

/* One arena for both phases: the larger. */
static int open_gpu(struct engine *e, const struct plan *p) {
    e->placed = malloc(sizeof *e->placed);
    if (!e->placed) return err_set(ERR_NOMEM, "engine: out of memory");
    *e->placed = *p;
    int rc = gpu_open(&e->gpu, e->device);
    return rc ? rc : gpu_arena_open(&e->arena, e->gpu, plan_arena_bytes(p));
}

int engine_load(struct engine *e, const struct plan *p, progress_fn progress, void *arg, const volatile sig_atomic_t *stop) {
    if (e->home) return err_set(ERR_ARG, "the weights are already loaded");
    double t = clock_s();
    struct pool *pool;
    int rc = pool_open(&pool, p->n_thread, NULL, 0);
    if (rc) return rc;
    if (p->gpu) rc = open_gpu(e, p);
    if (!rc) rc = home_open(&e->home, &e->model, p, e->gpu, e->arena);
    if (!rc) rc = home_load(e->home, e->gguf, pool, progress, arg, stop);
    pool_close(pool);
    if (rc) unload(e);
    e->load_s = clock_s() - t;
    return rc;
}

int engine_check_kernels(const struct engine *e, enum isa isa) {
    if (!e->home) return err_set(ERR_ARG, "engine: load the weights first");
    return kernel_check(&e->model, home_weights(e->home), isa);
}

size_t engine_pageable_bytes(const struct engine *e) { return e->home ? home_pageable_bytes(e->home) : 0; }

int session_kv_spec(struct kv_spec *spec, struct kv_shape **shapes, const struct model *m, const struct plan *p) {
    *shapes = calloc((size_t)m->n_block, sizeof **shapes);
    if (!*shapes) return err_set(ERR_NOMEM, "session: out of memory");
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        (*shapes)[il] = (struct kv_shape){l->n_kv, l->head_dim_k, l->head_dim_v, l->window};
    }
    *spec = (struct kv_spec){m->n_block, *shapes, p->n_ctx, p->chunk_tokens, p->type_k, p->type_v, NULL};
    return 0;
}

struct cpu_opts session_cpu_opts(const struct model *m, const struct plan *p) {
    struct cpu_opts o = {.n_thread = p->n_thread, .isa = p->isa};
    decoder_limits(&o.limits, m, p->chunk_tokens, p->n_ctx);
    return o;
}

size_t session_scratch_bytes(const struct model *m, const struct plan *p) {
    struct cpu_opts o = session_cpu_opts(m, p);
    size_t dec = decoder_scratch_bytes(m, p->chunk_tokens, p->chunk_tokens), cpu = cpu_scratch_bytes(&o), sum;
    size_t x = size_mul3((size_t)p->chunk_tokens, (size_t)m->dim, sizeof(float));
    size_t logits = size_mul3((size_t)p->logits_rows, (size_t)m->n_vocab, sizeof(float));
    bool ok = size_add(&sum, dec, cpu) && size_add(&sum, sum, x) && size_add(&sum, sum, logits);
    return ok ? sum : SIZE_MAX;
}

/* The divisors of rotary frequencies that the file carries, the long or the short ones by the configured context. */
static int read_rope_freqs(struct session *s) {
    const struct model *m = &s->engine->model;
    const struct tensor *t = &m->rope_freqs;
    if (m->ropes[0].scaling == ROPE_SCALING_LONGROPE)
        t = s->plan.n_ctx > m->ropes[0].n_ctx_orig ? &m->rope_long : &m->rope_short;
    if (!t->bytes) return 0;
    s->rope_freqs = calloc((size_t)(t->rows * t->cols), sizeof(float));
    if (!s->rope_freqs) return err_set(ERR_NOMEM, "session: out of memory");
    return home_read_vector(s->engine->gguf, t, s->rope_freqs);
}

/* The arena is exactly what the plan has, so its weights and sessions belong together. */
static int check_placed(const struct engine *e, const struct plan *p) {
    if (!e->home) return err_set(ERR_ARG, "session: load the weights first");
    if (p->gpu != (e->placed != NULL) || (p->gpu && memcmp(p->phase, e->placed->phase, sizeof p->phase)))
        return err_set(ERR_ARG, "session: the weights were loaded for another plan");
    if (p->gpu && e->in_use) return err_set(ERR_ARG, "session: another one has the GPU's memory; close it first");
    return 0;
}

int session_open(struct session **out, struct engine *e, const struct plan *p) {
    int rc = check_placed(e, p);
    if (rc) return rc;
    struct session *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "session: out of memory");
    s->engine = e;
    s->plan = *p;
    s->saved_n = -1;
    rc = read_rope_freqs(s);
    struct run_opts o = {.model = &e->model, .plan = p, .home = e->home, .gpu = e->gpu, .arena = e->arena, .topo = e->topo, .rope_freqs = s->rope_freqs};
    if (!rc) rc = run_open(&s->run, &o);
    if (rc) {
        session_close(s);
        return rc;
    }
    e->in_use = p->gpu;
    s->kv = run_kv(s->run);
    s->state = run_has_state(s->run);
    *out = s;
    return 0;
}

void session_close(struct session *s) {
    if (!s) return;
    if (s->run) s->engine->in_use = false;
    run_close(s->run);
    free(s->rope_freqs);
    free(s);
}

static int save_state(struct session *s) {
    int rc = run_state(s->run, RUN_SAVE);
    s->saved_n = rc ? -1 : s->kv->n;
    return rc;
}

/* Recurrent state is saved before passes that are long compared to the copy. Others are not interrupted half way. */
static bool pass_saves(const struct session *s, int n) { return s->state && n > 1 && !s->marked; }

/* After a failed pass. */
static void take_back(struct session *s, int n) {
    s->lost = (s->state && s->saved_n != s->kv->n) || run_spoils(s->run, n);
    if (s->state && s->saved_n == s->kv->n && run_state(s->run, RUN_RESTORE)) s->lost = true;
}

/* One pass of n <= run_pass_tokens tokens. On failure the KV is as before. */
static int one_pass(struct session *s, const int32_t *ids, int n, enum session_logits want, const struct session_hooks *h) {
    int64_t pos0 = s->kv->n;
    int rc = pass_saves(s, n) ? save_state(s) : 0;
    if (rc) return rc;
    struct run_want w = {.head = want != LOGITS_NONE, .stop = h->stop, .whole = s->state && s->saved_n != s->kv->n};
    rc = run_pass(s->run, ids, n, &w);
    if (!rc) rc = kv_advance(s->kv, n);
    if (rc) {
        char text[1024];
        snprintf(text, sizeof text, "%s", err_text());
        take_back(s, n);
        return err_set(rc, "%s", text);
    }
    return w.head ? run_head(s->run, want == LOGITS_ALL ? 0 : n - 1, n, pos0, h->logits, h->arg) : 0;
}

int session_eval(struct session *s, const int32_t *ids, int n, enum session_logits want, const struct session_hooks *hooks) {
    static const struct session_hooks none;
    const struct session_hooks *h = hooks ? hooks : &none;
    if (n < 1) return err_set(ERR_ARG, "nothing to evaluate: %d tokens", n);
    if (n > s->plan.n_ctx - s->kv->n)
        return err_set(ERR_ARG, "%d tokens after %lld exceed the context of %lld", n, (long long)s->kv->n, (long long)s->plan.n_ctx);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->engine->model.n_vocab)
            return err_set(ERR_ARG, "token id %d is outside of the vocabulary (0..%d)", ids[i], s->engine->model.n_vocab - 1);
    if (s->lost)
        return err_set(ERR_ARG, "an evaluation failed half way through position %lld: truncate to %lld first", (long long)s->kv->n,
                       (long long)session_nearest(s, s->kv->n));
    int rc = run_enter(s->run, run_phase(s->run, n));
    if (rc) return rc;
    if (h->progress) h->progress(h->arg, 0, n);
    for (int done = 0, most = run_pass_tokens(s->run); done < n;) {
        int now = n - done < most ? n - done : most;
        bool last = done + now == n;
        rc = one_pass(s, ids + done, now, want == LOGITS_ALL || last ? want : LOGITS_NONE, h);
        if (rc) return rc;
        done += now;
        if (h->progress) h->progress(h->arg, done, n);
    }
    return 0;
}

static int check_draft(const struct session *s, int32_t id, int n) {
    const struct model *m = &s->engine->model;
    if (m->n_block == m->n_layer)
        return err_set(ERR_ARG, m->n_mtp ? "drafting: the block for multi-token prediction is not loaded (engine_use_mtp)"
                                         : "drafting: this model has no block for multi-token prediction");
    if (n < 1 || n > s->plan.n_ctx - s->kv->n)
        return err_set(ERR_ARG, "drafting: %d tokens after %lld, the context has %lld", n, (long long)s->kv->n, (long long)s->plan.n_ctx);
    if (id < 0 || id >= m->n_vocab) return err_set(ERR_ARG, "token id %d is outside of the vocabulary (0..%d)", id, m->n_vocab - 1);
    return s->lost ? err_set(ERR_ARG, "an evaluation failed half way: there is no state to draft from") : 0;
}

static int32_t most_likely(const float *logits, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

int session_draft(struct session *s, int32_t *out, int32_t id, int n, const struct session_hooks *h) {
    int rc = check_draft(s, id, n);
    for (int k = 0; k < n && !rc; k++) {
        const float *logits;
        rc = run_draft(s->run, &logits, k ? out[k - 1] : id, k);
        if (rc) break;
        out[k] = most_likely(logits, s->engine->model.n_vocab);
        if (h && h->logits) rc = h->logits(h->arg, s->kv->n + k + 1, logits);
    }
    return rc;
}

const float *session_logits(const struct session *s) { return run_logits(s->run); }

int64_t session_pos(const struct session *s) { return s->kv->n; }

int64_t session_nearest(const struct session *s, int64_t pos) {
    int64_t n = s->kv->n;
    if (pos > n) pos = n;
    if (s->lost && !s->state) pos = 0;
    if (s->state && (pos < n || s->lost)) pos = s->saved_n >= 0 && s->saved_n <= pos ? s->saved_n : 0;
    return kv_can_truncate(s->kv, pos) ? pos : 0;
}

int session_truncate(struct session *s, int64_t pos) {
    bool moves = s->state && (pos != s->kv->n || s->lost);
    if (moves && pos > 0 && pos < s->kv->n && pos != s->saved_n)
        return err_set(ERR_ARG, "cannot roll back to position %lld: the recurrent state of this model goes back to %lld only",
                       (long long)pos, (long long)session_nearest(s, pos));
    if (s->lost && !s->state && pos > 0)
        return err_set(ERR_ARG, "cannot roll back to position %lld: a failed evaluation has overwritten a window; only 0 is left", (long long)pos);
    int rc = kv_truncate(s->kv, pos);
    if (!rc && moves) rc = run_state(s->run, pos == s->saved_n ? RUN_RESTORE : RUN_RESET);
    if (rc) return rc;
    if (moves && s->saved_n > pos) s->saved_n = -1, s->marked = false;
    s->lost = false;
    return 0;
}

int session_mark(struct session *s) {
    if (s->lost) return err_set(ERR_ARG, "an evaluation failed half way: there is no state to keep");
    int rc = s->state ? save_state(s) : 0;
    s->marked = s->state && !rc;
    return rc;
}

int session_fill_synthetic(struct session *s, int64_t n, uint64_t seed) {
    int rc = run_fill_synthetic(s->run, n, seed);
    if (rc) return rc;
    s->saved_n = -1;
    s->marked = s->lost = false;
    return 0;
}

void session_stats(const struct session *s, struct run_stats *stats) { run_stats_get(s->run, stats); }

void session_rest(struct session *s) { run_rest(s->run); }
