/* decoder.c: see decoder.h. */
#include "core/decoder.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/rope.h"
#include "core/state.h"

#include <stdlib.h>

/* Largest over the layers of what scratch depends on, in elements per token. */
struct widths {
    int64_t q, k, v, o, z, ff;
};

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

static struct widths widths_of(const struct model *m) {
    struct widths w = {.ff = m->n_ff_shared};
    if (m->delta.n_value) {
        w.q = delta_conv_dim(&m->delta);
        w.o = w.z = (int64_t)m->delta.n_value * m->delta.dim;
    }
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        w.q = max64(w.q, (int64_t)l->n_head * l->head_dim_k);
        w.k = max64(w.k, (int64_t)l->n_kv * l->head_dim_k);
        w.v = max64(w.v, (int64_t)l->n_kv * l->head_dim_v);
        w.o = max64(w.o, (int64_t)l->n_head * l->head_dim_v);
        if (l->t[LT_ATTN_GATE].bytes) w.z = max64(w.z, (int64_t)l->n_head * l->head_dim_k);
        if (l->ffn == FFN_DENSE) w.ff = max64(w.ff, l->n_ff);
    }
    return w;
}

/* Hands out pieces of the scratch; with base NULL it only adds up. */
struct carver {
    char *base;
    size_t used;
    bool overflow;
};

static void *carve(struct carver *c, int64_t rows, int64_t per_row) {
    size_t bytes = size_mul3((size_t)rows, (size_t)per_row, 4), start = c->used;
    if (bytes == SIZE_MAX || !size_align_up(&bytes, bytes, 64) || !size_add(&c->used, c->used, bytes)) c->overflow = true;
    return c->base && bytes ? c->base + start : NULL;
}

static void carve_all(struct decoder *d, struct carver *c, const struct model *m, int chunk, int pass) {
    struct widths w = widths_of(m);
    for (int r = 0; r < m->n_rope; r++) d->cs[r] = carve(c, pass, m->ropes[r].n_rot);
    d->h = carve(c, chunk, m->dim);
    d->q = d->part = carve(c, chunk, max64(w.q, m->dim));
    d->k = carve(c, chunk, w.k);
    d->v = carve(c, chunk, w.v);
    d->o = carve(c, chunk, w.o);
    d->z = carve(c, chunk, w.z);
    d->alpha = carve(c, chunk, m->delta.n_value);
    d->beta = carve(c, chunk, m->delta.n_value);
    d->d = carve(c, chunk, m->dim);
    d->gate = carve(c, chunk, w.ff);
    d->up = carve(c, chunk, w.ff);
    d->router = carve(c, chunk, m->n_expert);
    d->expert_w = carve(c, chunk, m->n_expert_used);
    d->expert_ids = carve(c, chunk, m->n_expert_used);
    d->shared_gate = carve(c, chunk, m->n_ff_shared > 0);
    bool mtp = m->n_block > m->n_layer;
    d->pair = carve(c, mtp ? 2 * (int64_t)chunk : 0, m->dim);
    d->joined = carve(c, mtp ? 2 * (int64_t)chunk : 0, m->dim);
    d->states = carve(c, mtp ? (int64_t)chunk + 3 : 0, m->dim);
    d->draft = carve(c, mtp, m->n_vocab);
}

size_t decoder_scratch_bytes(const struct model *m, int chunk, int pass) {
    struct decoder d;
    struct carver c = {0};
    carve_all(&d, &c, m, chunk, pass);
    return c.overflow ? SIZE_MAX : c.used;
}

void decoder_limits(struct ops_limits *out, const struct model *m, int chunk, int64_t n_ctx) {
    *out = (struct ops_limits){.n_tok = chunk, .cols = m->dim, .rows = m->n_vocab, .n_ctx = n_ctx,
                               .n_expert = m->n_expert, .n_expert_used = m->n_expert_used, .delta = m->delta};
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        if (l->n_head > out->n_head) out->n_head = l->n_head;
        if (l->n_kv > out->n_kv) out->n_kv = l->n_kv;
        if (l->head_dim_k > out->head_dim) out->head_dim = l->head_dim_k;
        if (l->head_dim_v > out->head_dim) out->head_dim = l->head_dim_v;
        for (int t = 0; t < LT_COUNT; t++) {
            if (!l->t[t].bytes || layer_tensor_is_vector(t)) continue;
            out->cols = max64(out->cols, l->t[t].cols);
            out->rows = max64(out->rows, l->t[t].rows);
        }
    }
}

int decoder_open(struct decoder **out, const struct model *m, struct ops *ops, const struct weights *w, struct kv *kv,
                 struct state *state, int chunk, int pass, int64_t n_ctx, const float *rope_freqs, void *scratch) {
    if (chunk < 1 || pass < chunk) return err_set(ERR_ARG, "decoder: chunk %d, pass %d: need 1 <= chunk <= pass", chunk, pass);
    struct decoder *d = calloc(1, sizeof *d);
    if (!d) return err_set(ERR_NOMEM, "decoder: out of memory");
    *d = (struct decoder){.model = m, .ops = ops, .w = w, .kv = kv, .state = state, .chunk = chunk, .pass = pass, .kept_pos = -1};
    struct carver c = {.base = scratch};
    carve_all(d, &c, m, chunk, pass);
    d->join = malloc(2 * (size_t)chunk * sizeof *d->join);
    int rc = d->join ? 0 : err_set(ERR_NOMEM, "decoder: out of memory");
    for (int r = 0; r < m->n_rope && !rc; r++) {
        d->inv_freq[r] = malloc((size_t)(m->ropes[r].n_rot / 2) * sizeof(double));
        if (!d->inv_freq[r])
            rc = err_set(ERR_NOMEM, "decoder: out of memory");
        else
            rc = rope_frequencies(d->inv_freq[r], &d->mscale[r], &m->ropes[r], rope_freqs, n_ctx);
    }
    if (rc) {
        decoder_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

void decoder_close(struct decoder *d) {
    if (!d) return;
    free(d->inv_freq[0]);
    free(d->inv_freq[1]);
    free(d->join);
    free(d);
}

int decoder_begin(struct decoder *d, int64_t pos0, int n_tok) {
    if (n_tok < 1 || n_tok > d->pass) return err_set(ERR_ARG, "decoder: %d tokens in a pass of at most %d", n_tok, d->pass);
    d->pos0 = pos0;
    for (int r = 0; r < d->model->n_rope; r++) {
        int rc = d->ops->rope_table(d->ops, d->cs[r], d->inv_freq[r], d->model->ropes[r].n_rot / 2, d->mscale[r], pos0, n_tok);
        if (rc) return rc;
    }
    return 0;
}

static struct mat mat_of(const struct tensor *t, const void *data) {
    return (struct mat){.data = data, .type = t->type, .rows = t->rows, .cols = t->cols};
}

int decoder_embed(struct decoder *d, float *x, const int32_t *ids, int n) {
    struct mat embd = mat_of(&d->model->embd, d->w->embd);
    return d->ops->embed(d->ops, x, &embd, ids, n, d->model->embd_scale);
}

/* One product y = W x + bias with tensor t of layer il. */
static int product(struct decoder *d, int il, float *y, enum layer_tensor t, enum layer_tensor bias, const float *x, int n) {
    const struct layer *l = &d->model->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct mat w = mat_of(&l->t[t], at[t]);
    struct matmul mm = {.x = x, .cols = w.cols, .n_tok = n, .n = 1, .out = {{&w, y, bias == LT_COUNT ? NULL : at[bias]}}};
    return d->ops->matmul(d->ops, &mm);
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

/* x += RMSNorm?(d). */
static int add_part(struct decoder *d, int il, float *x, enum layer_tensor post_norm, int n) {
    const struct model *m = d->model;
    struct ops *o = d->ops;
    if (m->layers[il].t[post_norm].bytes)
        TRY(o->rmsnorm(o, d->d, d->d, d->w->layers[il].at[post_norm], n, m->dim, m->eps));
    return o->add(o, x, d->d, (int64_t)n * m->dim);
}

static int attn_mixer(struct decoder *d, int il, float *x, int t0, int n) {
    const struct model *m = d->model;
    const struct layer *l = &m->layers[il];
    const void *const *at = d->w->layers[il].at;
    const struct rope *r = &m->ropes[l->rope];
    struct ops *o = d->ops;
    int64_t pos0 = d->pos0 + t0;
    const float *cs = d->cs[l->rope] ? d->cs[l->rope] + (size_t)t0 * (size_t)r->n_rot : NULL;

    TRY(o->rmsnorm(o, d->h, x, at[LT_ATTN_NORM], n, m->dim, m->eps));
    struct mat wq = mat_of(&l->t[LT_ATTN_Q], at[LT_ATTN_Q]), wk = mat_of(&l->t[LT_ATTN_K], at[LT_ATTN_K]),
               wv = mat_of(&l->t[LT_ATTN_V], at[LT_ATTN_V]);
    struct mat wg = mat_of(&l->t[LT_ATTN_GATE], at[LT_ATTN_GATE]);
    bool gated = l->t[LT_ATTN_GATE].bytes;
    struct matmul qkv = {.x = d->h, .cols = m->dim, .n_tok = n, .n = gated ? 4 : 3,
                         .out = {{&wq, d->q, at[LT_ATTN_Q_BIAS]}, {&wk, d->k, at[LT_ATTN_K_BIAS]}, {&wv, d->v, at[LT_ATTN_V_BIAS]},
                                 {&wg, d->z, NULL}}};
    TRY(o->matmul(o, &qkv));
    struct rope_args rq = {.x = d->q, .n_tok = n, .n_head = l->n_head, .head_dim = l->head_dim_k, .norm = at[LT_ATTN_Q_NORM],
                           .eps = m->eps, .cs = cs, .n_rot = r->n_rot, .pairing = r->pairing};
    struct rope_args rk = rq;
    rk.x = d->k;
    rk.n_head = l->n_kv;
    rk.norm = at[LT_ATTN_K_NORM];
    TRY(o->rope(o, &rq));
    TRY(o->rope(o, &rk));
    TRY(o->kv_put(o, d->kv, il, pos0, n, d->k, d->v));
    struct attn_args a = {.o = d->o, .q = d->q, .kv = d->kv, .il = il, .pos0 = pos0, .n_tok = n, .n_head = l->n_head,
                          .scale = m->attn_scale, .window = l->window};
    TRY(o->attn(o, &a));
    if (gated) TRY(o->glu(o, d->o, d->z, d->o, (int64_t)n * l->n_head * l->head_dim_v, ACT_SIGMOID));
    TRY(product(d, il, d->d, LT_ATTN_OUT, LT_ATTN_OUT_BIAS, d->o, n));
    return add_part(d, il, x, LT_POST_ATTN_NORM, n);
}

static int delta_mixer(struct decoder *d, int il, float *x, int n) {
    const struct model *m = d->model;
    const struct layer *l = &m->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct ops *o = d->ops;
    TRY(o->rmsnorm(o, d->h, x, at[LT_ATTN_NORM], n, m->dim, m->eps));
    struct mat qkv = mat_of(&l->t[LT_DELTA_QKV], at[LT_DELTA_QKV]), z = mat_of(&l->t[LT_DELTA_Z], at[LT_DELTA_Z]),
               beta = mat_of(&l->t[LT_DELTA_BETA], at[LT_DELTA_BETA]), alpha = mat_of(&l->t[LT_DELTA_ALPHA], at[LT_DELTA_ALPHA]);
    struct matmul in = {.x = d->h, .cols = m->dim, .n_tok = n, .n = 4,
                        .out = {{&qkv, d->q, NULL}, {&z, d->z, NULL}, {&beta, d->beta, NULL}, {&alpha, d->alpha, NULL}}};
    TRY(o->matmul(o, &in));
    struct delta_args a = {.y = d->o, .u = d->q, .z = d->z, .b = d->beta, .a = d->alpha, .conv = at[LT_DELTA_CONV],
                           .dt = at[LT_DELTA_DT], .rate = at[LT_DELTA_RATE], .norm = at[LT_DELTA_NORM],
                           .last = d->state ? state_last(d->state, il) : NULL, .s = d->state ? state_s(d->state, il) : NULL,
                           .shape = m->delta, .n_tok = n, .eps = m->eps};
    TRY(o->delta(o, &a));
    TRY(product(d, il, d->d, LT_DELTA_OUT, LT_COUNT, d->o, n));
    return o->add(o, x, d->d, (int64_t)n * m->dim);
}

int decoder_mixer(struct decoder *d, int il, float *x, int t0, int n) {
    return d->model->layers[il].mixer == MIXER_DELTA ? delta_mixer(d, il, x, n) : attn_mixer(d, il, x, t0, n);
}

static const float *from_row(const void *bias, int64_t row0) { return bias ? (const float *)bias + row0 : NULL; }

/* The bias of down comes with the first row. */
static int dense_part(struct decoder *d, int il, float *y, const struct ffn_part *p, int n) {
    const struct layer *l = &d->model->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct ops *o = d->ops;
    struct mat gate = mat_of(&l->t[LT_FFN_GATE], p->gate), up = mat_of(&l->t[LT_FFN_UP], p->up),
               down = mat_of(&l->t[LT_FFN_DOWN], p->down);
    gate.rows = up.rows = down.cols = p->rows;
    struct matmul gu = {.x = d->h, .cols = gate.cols, .n_tok = n, .n = 2,
                        .out = {{&gate, d->gate, from_row(at[LT_FFN_GATE_BIAS], p->row0)},
                                {&up, d->up, from_row(at[LT_FFN_UP_BIAS], p->row0)}}};
    TRY(o->matmul(o, &gu));
    TRY(o->glu(o, d->gate, d->gate, d->up, (int64_t)n * p->rows, d->model->act));
    struct matmul out = {.x = d->gate, .cols = p->rows, .n_tok = n, .n = 1,
                         .out = {{&down, y, p->row0 ? NULL : at[LT_FFN_DOWN_BIAS]}}};
    return o->matmul(o, &out);
}

static int expert_part(struct decoder *d, int il, float *y, const struct ffn_part *p, int n) {
    const struct model *m = d->model;
    const struct layer *l = &m->layers[il];
    struct ops *o = d->ops;
    struct experts_args e = {.y = y, .x = d->h, .ids = d->expert_ids, .weight = d->expert_w, .n_tok = n,
                             .n_used = m->n_expert_used, .n_expert = m->n_expert, .first = p->expert0, .n_held = p->n_expert, .act = m->act,
                             .gate = mat_of(&l->t[LT_MOE_GATE], p->gate),
                             .up = mat_of(&l->t[LT_MOE_UP], p->up),
                             .down = mat_of(&l->t[LT_MOE_DOWN], p->down)};
    return o->experts(o, &e);
}

/* x += sigma(gate x) * FFN(x), the expert of every token. Its products take the place of d->d: after the others' sum. */
static int shared_ffn(struct decoder *d, int il, float *x, int n) {
    const struct model *m = d->model;
    const struct layer *l = &m->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct ops *o = d->ops;
    struct mat gate = mat_of(&l->t[LT_SHARED_GATE], at[LT_SHARED_GATE]), up = mat_of(&l->t[LT_SHARED_UP], at[LT_SHARED_UP]),
               router = mat_of(&l->t[LT_SHARED_ROUTER], at[LT_SHARED_ROUTER]);
    struct matmul gu = {.x = d->h, .cols = m->dim, .n_tok = n, .n = 3,
                        .out = {{&gate, d->gate, NULL}, {&up, d->up, NULL}, {&router, d->shared_gate, NULL}}};
    TRY(o->matmul(o, &gu));
    TRY(o->glu(o, d->gate, d->gate, d->up, (int64_t)n * m->n_ff_shared, m->act));
    TRY(product(d, il, d->d, LT_SHARED_DOWN, LT_COUNT, d->gate, n));
    return o->add_gated(o, x, d->d, d->shared_gate, n, m->dim);
}

int decoder_ffn_in(struct decoder *d, int il, const float *x, int n) {
    const struct model *m = d->model;
    struct ops *o = d->ops;
    TRY(o->rmsnorm(o, d->h, x, d->w->layers[il].at[LT_FFN_NORM], n, m->dim, m->eps));
    if (m->layers[il].ffn != FFN_EXPERTS) return 0;
    TRY(product(d, il, d->router, LT_MOE_ROUTER, LT_COUNT, d->h, n));
    return o->route(o, d->expert_ids, d->expert_w, d->router, n, m->n_expert, m->n_expert_used, m->expert_normalise);
}

int decoder_ffn_part(struct decoder *d, int il, float *y, const struct ffn_part *p, int n) {
    return d->model->layers[il].ffn == FFN_EXPERTS ? expert_part(d, il, y, p, n) : dense_part(d, il, y, p, n);
}

int decoder_ffn_out(struct decoder *d, int il, float *x, int n) {
    TRY(add_part(d, il, x, LT_POST_FFN_NORM, n));
    return d->model->n_ff_shared ? shared_ffn(d, il, x, n) : 0;
}

int decoder_ffn(struct decoder *d, int il, float *x, int t0, int n) {
    (void)t0; /* no position enters an FFN */
    const struct layer *l = &d->model->layers[il];
    const void *const *at = d->w->layers[il].at;
    bool dense = l->ffn != FFN_EXPERTS;
    struct ffn_part all = {.rows = l->n_ff, .n_expert = d->model->n_expert, .gate = at[dense ? LT_FFN_GATE : LT_MOE_GATE],
                           .up = at[dense ? LT_FFN_UP : LT_MOE_UP], .down = at[dense ? LT_FFN_DOWN : LT_MOE_DOWN]};
    TRY(decoder_ffn_in(d, il, x, n));
    TRY(decoder_ffn_part(d, il, d->d, &all, n));
    return decoder_ffn_out(d, il, x, n);
}

int decoder_norm(struct decoder *d, float *h, const float *x, int n) {
    return d->ops->rmsnorm(d->ops, h, x, d->w->out_norm, n, d->model->dim, d->model->eps);
}

/* logits of normed states. */
static int head_product(struct decoder *d, float *logits, const float *h, int n) {
    const struct model *m = d->model;
    struct ops *o = d->ops;
    struct mat out = mat_of(m->out.bytes ? &m->out : &m->embd, d->w->out);
    struct matmul mm = {.x = h, .cols = m->dim, .n_tok = n, .n = 1, .out = {{&out, logits, d->w->out_bias}}};
    TRY(o->matmul(o, &mm));
    if (m->logit_softcap > 0) TRY(o->softcap(o, logits, (int64_t)n * m->n_vocab, m->logit_softcap));
    return 0;
}

int decoder_head(struct decoder *d, float *logits, const float *x, int n) {
    TRY(decoder_norm(d, d->h, x, n));
    return head_product(d, logits, d->h, n);
}

/* x [n, dim] = MTP_PROJ [RMSNorm(embedding); RMSNorm(h)]. */
static int mtp_input(struct decoder *d, int il, float *x, const float *h, const int32_t *ids, int n) {
    const struct model *m = d->model;
    const struct layer *l = &m->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct ops *o = d->ops;
    float *e = d->pair, *hh = d->pair ? d->pair + (size_t)n * (size_t)m->dim : NULL;
    bool own = l->t[LT_MTP_EMBD].bytes;
    struct mat embd = own ? mat_of(&l->t[LT_MTP_EMBD], at[LT_MTP_EMBD]) : mat_of(&m->embd, d->w->embd);
    TRY(o->embed(o, e, &embd, ids, n, m->embd_scale));
    TRY(o->rmsnorm(o, e, e, at[LT_MTP_EMBD_NORM], n, m->dim, m->eps));
    TRY(o->rmsnorm(o, hh, h, at[LT_MTP_H_NORM], n, m->dim, m->eps));
    for (int t = 0; t < n; t++) d->join[2 * t] = t, d->join[2 * t + 1] = n + t;
    TRY(o->gather(o, d->joined, d->pair, d->join, 2 * n, m->dim));
    return product(d, il, x, LT_MTP_PROJ, LT_COUNT, d->joined, n);
}

int decoder_mtp(struct decoder *d, int i, float *logits, float *h_out, const float *h, const int32_t *ids, int t0, int n) {
    const struct model *m = d->model;
    int il = m->n_layer + i;
    if (i < 0 || il >= m->n_block) return err_set(ERR_ARG, "decoder: block %d for multi-token prediction is not loaded", i);
    const struct layer *l = &m->layers[il];
    const void *const *at = d->w->layers[il].at;
    struct ops *o = d->ops;
    float *x = h_out; /* the residual stream of the block, until it is normed */
    TRY(mtp_input(d, il, x, h, ids, n));
    TRY(decoder_mixer(d, il, x, t0, n));
    TRY(decoder_ffn(d, il, x, t0, n));
    TRY(o->rmsnorm(o, h_out, x, at[LT_MTP_OUT_NORM] ? at[LT_MTP_OUT_NORM] : d->w->out_norm, n, m->dim, m->eps));
    if (!l->t[LT_MTP_OUT].bytes) return head_product(d, logits, h_out, n);
    return product(d, il, logits, LT_MTP_OUT, LT_COUNT, h_out, n);
}

/* --- along a text -------------------------------------------------------------------------------------------------------- */

static float *state_row(const struct decoder *d, int row) { return d->states + (int64_t)row * d->model->dim; }

/* Row of the normed state of a position, -1: not known. */
static int row_of(const struct decoder *d, int64_t pos) {
    if (pos >= d->states_pos + d->states_first && pos < d->states_pos + d->n_states) return (int)(pos - d->states_pos);
    return pos >= 0 && pos == d->kept_pos ? d->chunk + 1 : -1;
}

static int copy_row(struct decoder *d, int to, int32_t from) {
    return to == from ? 0 : d->ops->gather(d->ops, state_row(d, to), d->states, &from, 1, d->model->dim);
}

int decoder_follow(struct decoder *d, const float *x, const int32_t *ids, int64_t pos0, int n) {
    int from = row_of(d, pos0 - 1), unknown = from < 0, rows = n - unknown, il = d->model->n_layer;
    if (!unknown) TRY(copy_row(d, 0, from));
    d->n_states = 0;
    TRY(decoder_norm(d, state_row(d, 1), x, n));
    if (rows) {
        TRY(decoder_begin(d, pos0 - 1 + unknown, rows));
        TRY(mtp_input(d, il, d->pair, state_row(d, unknown), ids + unknown, rows));
        TRY(decoder_mixer(d, il, d->pair, 0, rows));
    }
    d->states_pos = pos0 - 1, d->states_first = unknown, d->n_states = n + 1;
    return 0;
}

int decoder_keep(struct decoder *d, int64_t pos) {
    int from = row_of(d, pos - 1);
    d->kept_pos = from < 0 ? -1 : pos - 1;
    return from < 0 ? 0 : copy_row(d, d->chunk + 1, from);
}

void decoder_forget(struct decoder *d) { d->n_states = 0, d->kept_pos = -1; }

int decoder_draft(struct decoder *d, int32_t id, int64_t pos, int k) {
    int last = d->chunk + 2, from = k ? last : row_of(d, pos - 1);
    if (from < 0)
        return err_set(ERR_ARG, "drafting: the hidden state of position %lld is not known; evaluate a token first", (long long)pos - 1);
    TRY(decoder_begin(d, pos - 1 + k, 1));
    return decoder_mtp(d, 0, d->draft, state_row(d, last), state_row(d, from), &id, 0, 1);
}
