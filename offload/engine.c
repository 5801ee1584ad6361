/* engine.c: an opened model, and sessions on it: the one pass loop. */
#include "offload/engine.h"

#include "core/decoder.h"
#include "core/gguf.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/shape.h"
#include "core/synth.h"
#include "core/state.h"
#include "cpu/pool.h"
#include "offload/clock.h"
#include "offload/session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct engine {
    struct gguf *gguf;
    struct model model;
    bool model_ok;
    struct topo *topo;
    struct tokenizer *tok;
    struct home *home;
    double load_s;
};

struct session {
    struct engine *engine;
    struct plan plan;
    struct cpu *cpu;
    struct kv *kv;
    struct state *state, *saved; /* NULL for models without; saved: the state at position saved_n */
    int64_t saved_n;             /* -1: nothing is saved */
    bool marked;                 /* by session_mark: passes do not replace it */
    bool lost;                   /* a pass failed half way and `state` is of no position */
    struct decoder *decoder;
    float *rope_freqs; /* ?[n_rot/2] */
    void *scratch;     /* of the decoder */
    float *x;          /* [chunk_tokens, dim] */
    float *logits;     /* [logits_rows, n_vocab]; the last row evaluated is at `last` */
    float *last;
    int *cores;
};

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
    home_close(e->home);
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

int engine_load(struct engine *e, int n_thread, progress_fn progress, void *arg, const volatile sig_atomic_t *stop) {
    if (e->home) return err_set(ERR_ARG, "the weights are already loaded");
    double t = clock_s();
    struct pool *pool;
    int rc = pool_open(&pool, n_thread, NULL, 0);
    if (rc) return rc;
    rc = home_open(&e->home, &e->model);
    if (!rc) rc = home_load(e->home, e->gguf, pool, progress, arg, stop);
    pool_close(pool);
    if (rc) {
        home_close(e->home);
        e->home = NULL;
    }
    e->load_s = clock_s() - t;
    return rc;
}

int session_kv_spec(struct kv_spec *spec, struct kv_shape **shapes, const struct model *m, const struct plan *p) {
    *shapes = calloc((size_t)m->n_block, sizeof **shapes);
    if (!*shapes) return err_set(ERR_NOMEM, "session: out of memory");
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        (*shapes)[il] = (struct kv_shape){l->n_kv, l->head_dim_k, l->head_dim_v, l->window};
    }
    *spec = (struct kv_spec){m->n_block, *shapes, p->n_ctx, p->chunk_tokens, p->type_k, p->type_v};
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

static int open_cpu(struct session *s) {
    struct cpu_opts o = session_cpu_opts(&s->engine->model, &s->plan);
    s->cores = calloc((size_t)s->plan.n_thread, sizeof *s->cores);
    if (!s->cores) return err_set(ERR_NOMEM, "session: out of memory");
    o.n_core = topo_pick_cores(s->engine->topo, s->plan.n_thread, s->cores);
    /* More threads than cores: let the system move them. */
    o.cores = o.n_core >= s->plan.n_thread ? s->cores : NULL;
    if (!o.cores) o.n_core = 0;
    return cpu_open(&s->cpu, &o);
}

static int open_kv(struct session *s) {
    struct kv_spec spec;
    struct kv_shape *shapes;
    int rc = session_kv_spec(&spec, &shapes, &s->engine->model, &s->plan);
    if (!rc) rc = kv_open(&s->kv, &spec);
    free(shapes);
    return rc;
}

static int open_state(struct session *s) {
    const struct model *m = &s->engine->model;
    s->saved_n = -1;
    if (!state_bytes(m)) return 0;
    int rc = state_open(&s->state, m);
    return rc ? rc : state_open(&s->saved, m);
}

int session_open(struct session **out, struct engine *e, const struct plan *p) {
    if (!e->home) return err_set(ERR_ARG, "session: load the weights first");
    struct session *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "session: out of memory");
    s->engine = e;
    s->plan = *p;
    const struct model *m = &e->model;
    int rc = open_kv(s);
    if (!rc) rc = open_state(s);
    if (!rc) rc = open_cpu(s);
    if (!rc) rc = read_rope_freqs(s);
    if (!rc && !(s->scratch = mem_alloc(decoder_scratch_bytes(m, p->chunk_tokens, p->chunk_tokens), 64, "scratch"))) rc = ERR_NOMEM;
    if (!rc && !(s->x = mem_alloc(size_mul3((size_t)p->chunk_tokens, (size_t)m->dim, sizeof(float)), 64, "hidden states"))) rc = ERR_NOMEM;
    if (!rc && !(s->logits = mem_alloc(size_mul3((size_t)p->logits_rows, (size_t)m->n_vocab, sizeof(float)), 64, "logits"))) rc = ERR_NOMEM;
    if (!rc)
        rc = decoder_open(&s->decoder, m, cpu_ops(s->cpu), home_weights(e->home), s->kv, s->state, p->chunk_tokens, p->chunk_tokens,
                          p->n_ctx, s->rope_freqs, s->scratch);
    if (rc) {
        session_close(s);
        return rc;
    }
    s->last = s->logits;
    *out = s;
    return 0;
}

void session_close(struct session *s) {
    if (!s) return;
    decoder_close(s->decoder);
    mem_free(s->logits);
    mem_free(s->x);
    mem_free(s->scratch);
    free(s->rope_freqs);
    cpu_close(s->cpu);
    state_close(s->saved);
    state_close(s->state);
    kv_close(s->kv);
    free(s->cores);
    free(s);
}

/* A sum with a NaN or an infinity in it is not finite; a finite f32 sum of x*0 is 0. */
static bool finite_row(const float *x, int64_t n) {
    float s = 0;
    for (int64_t i = 0; i < n; i++) s += x[i] * 0.0f;
    return s == 0;
}

static int emit_logits(struct session *s, int n, enum session_logits want, const struct session_hooks *h, int64_t pos0) {
    const struct model *m = &s->engine->model;
    int first = want == LOGITS_ALL ? 0 : n - 1;
    for (int t = first; t < n; t += s->plan.logits_rows) {
        int rows = n - t < s->plan.logits_rows ? n - t : s->plan.logits_rows;
        int rc = decoder_head(s->decoder, s->logits, s->x + (int64_t)t * m->dim, rows);
        if (rc) return rc;
        for (int r = 0; r < rows; r++) {
            s->last = s->logits + (int64_t)r * m->n_vocab;
            if (!finite_row(s->last, m->n_vocab))
                return err_set(ERR_NUMERIC, "the logits of position %lld are not finite", (long long)(pos0 + t + r));
            if (h->logits && (rc = h->logits(h->arg, pos0 + t + r, s->last))) return rc;
        }
    }
    return 0;
}

static void save_state(struct session *s) {
    state_copy(s->saved, s->state);
    s->saved_n = s->kv->n;
}

/* Recurrent state is saved before passes that are long compared to the copy. Others are not interrupted half way. */
static bool pass_saves(const struct session *s, int n) { return s->state && n > 1 && !s->marked; }

/* After a failed pass. */
static void take_back(struct session *s) {
    s->lost = s->state && s->saved_n != s->kv->n;
    if (s->state && !s->lost) state_copy(s->state, s->saved);
}

/* The layers of one pass. */
static int run_layers(struct session *s, int n, const struct session_hooks *h) {
    const struct model *m = &s->engine->model;
    bool whole = s->state && s->saved_n != s->kv->n;
    int rc = 0;
    for (int il = 0; il < m->n_layer && !rc; il++) {
        if (h->stop && *h->stop && (il == 0 || !whole)) return err_set(ERR_INTERRUPTED, "interrupted");
        rc = decoder_mixer(s->decoder, il, s->x, 0, n);
        if (!rc) rc = decoder_ffn(s->decoder, il, s->x, 0, n);
        if (!rc && !finite_row(s->x + (int64_t)(n - 1) * m->dim, m->dim))
            rc = err_set(ERR_NUMERIC, "layer %d: the hidden state of position %lld is not finite", il, (long long)(s->kv->n + n - 1));
    }
    return rc;
}

/* One pass of n <= chunk_tokens tokens. On failure the KV is as before. */
static int run_pass(struct session *s, const int32_t *ids, int n, enum session_logits want, const struct session_hooks *h) {
    int64_t pos0 = s->kv->n;
    if (pass_saves(s, n)) save_state(s);
    int rc = decoder_begin(s->decoder, pos0, n);
    if (!rc) rc = decoder_embed(s->decoder, s->x, ids, n);
    if (!rc) rc = run_layers(s, n, h);
    if (!rc) rc = kv_advance(s->kv, n);
    if (rc) take_back(s);
    if (!rc && want != LOGITS_NONE) rc = emit_logits(s, n, want, h, pos0);
    return rc;
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
    if (h->progress) h->progress(h->arg, 0, n);
    for (int done = 0; done < n;) {
        int now = n - done < s->plan.chunk_tokens ? n - done : s->plan.chunk_tokens;
        bool last = done + now == n;
        int rc = run_pass(s, ids + done, now, want == LOGITS_ALL || last ? want : LOGITS_NONE, h);
        if (rc) return rc;
        done += now;
        if (h->progress) h->progress(h->arg, done, n);
    }
    return 0;
}

const float *session_logits(const struct session *s) { return s->last; }

int64_t session_pos(const struct session *s) { return s->kv->n; }

int64_t session_nearest(const struct session *s, int64_t pos) {
    int64_t n = s->kv->n;
    if (pos > n) pos = n;
    if (s->state && (pos < n || s->lost)) pos = s->saved_n >= 0 && s->saved_n <= pos ? s->saved_n : 0;
    return kv_can_truncate(s->kv, pos) ? pos : 0;
}

int session_truncate(struct session *s, int64_t pos) {
    bool moves = s->state && (pos != s->kv->n || s->lost);
    if (moves && pos > 0 && pos < s->kv->n && pos != s->saved_n)
        return err_set(ERR_ARG, "cannot roll back to position %lld: the recurrent state of this model goes back to %lld only",
                       (long long)pos, (long long)session_nearest(s, pos));
    int rc = kv_truncate(s->kv, pos);
    if (rc || !moves) return rc;
    if (pos == s->saved_n)
        state_copy(s->state, s->saved);
    else
        state_reset(s->state);
    if (s->saved_n > pos) s->saved_n = -1, s->marked = false;
    s->lost = false;
    return 0;
}

int session_mark(struct session *s) {
    if (s->lost) return err_set(ERR_ARG, "an evaluation failed half way: there is no state to keep");
    if (s->state) save_state(s);
    s->marked = s->state != NULL;
    return 0;
}

int session_fill_synthetic(struct session *s, int64_t n, uint64_t seed) {
    int rc = kv_fill_synthetic(s->kv, n, seed);
    if (rc || !s->state) return rc;
    state_fill_synthetic(s->state, seed);
    s->saved_n = -1;
    s->marked = s->lost = false;
    return 0;
}

void session_rest(struct session *s) { pool_rest(cpu_pool(s->cpu)); }
