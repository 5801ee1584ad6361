/* cost.c: see cost.h. */
#include "core/cost.h"

#include "core/kv.h"
#include "core/quant.h"
#include "core/strip.h"

static struct cost *cost_of(struct ops *o) { return (struct cost *)o; }

static int act(struct ops *o, double elems) {
    cost_of(o)->act_bytes += 4 * elems;
    cost_of(o)->calls++;
    return 0;
}

static double home_bytes(const struct mat *w) {
    struct strip_layout l;
    return strip_layout(&l, w->type, w->rows, w->cols) ? (double)l.bytes : 0;
}

static int embed(struct ops *o, float *x, const struct mat *w, const int32_t *ids, int n_tok, float scale) {
    (void)x, (void)ids, (void)scale;
    cost_of(o)->weight_bytes += home_bytes(w) / (double)w->rows * n_tok;
    return act(o, (double)n_tok * (double)w->cols);
}

static int rmsnorm(struct ops *o, float *y, const float *x, const float *w, int64_t n_row, int dim, float eps) {
    (void)y, (void)x, (void)w, (void)eps;
    return act(o, 2.0 * (double)n_row * dim + dim);
}

static int add(struct ops *o, float *x, const float *d, int64_t n) {
    (void)x, (void)d;
    return act(o, 3.0 * (double)n);
}

static int matmul(struct ops *o, const struct matmul *m) {
    struct cost *c = cost_of(o);
    for (int i = 0; i < m->n; i++) {
        const struct mat *w = m->out[i].w;
        c->weight_bytes += home_bytes(w);
        c->matmul_flops += 2.0 * (double)w->rows * (double)w->cols * m->n_tok;
        c->act_bytes += 4.0 * (double)w->rows * m->n_tok;
    }
    return act(o, (double)m->cols * m->n_tok);
}

static int rope_table(struct ops *o, float *cs, const double *f, int n_pair, float mscale, int64_t pos0, int n_tok) {
    (void)cs, (void)f, (void)mscale, (void)pos0;
    return act(o, 2.0 * n_pair * n_tok);
}

static int rope(struct ops *o, const struct rope_args *a) {
    return act(o, 2.0 * a->n_tok * a->n_head * a->head_dim + (double)a->n_tok * a->n_rot);
}

static int kv_put(struct ops *o, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v) {
    (void)pos0, (void)k, (void)v;
    cost_of(o)->kv_write_bytes += kv_bytes_per_token(kv, il) * n_tok;
    return act(o, (double)n_tok * kv_dims(kv, il));
}

static int attn(struct ops *o, const struct attn_args *a) {
    struct cost *c = cost_of(o);
    int64_t last = a->pos0 + a->n_tok, first = a->window && a->pos0 >= a->window ? a->pos0 - a->window + 1 : 0;
    double visible = 0; /* summed over the queries */
    for (int t = 0; t < a->n_tok; t++) {
        int64_t n = a->pos0 + t + 1;
        visible += (double)(a->window && n > a->window ? a->window : n);
    }
    c->kv_read_bytes += kv_bytes_per_token(a->kv, a->il) * (double)(last - first);
    c->attn_flops += 2.0 * visible * a->n_head * kv_head_dims(a->kv, a->il);
    return act(o, (double)a->n_tok * a->n_head * kv_head_dims(a->kv, a->il));
}

static int delta(struct ops *o, const struct delta_args *a) {
    struct cost *c = cost_of(o);
    const struct delta_shape *s = &a->shape;
    double inner = (double)s->n_value * s->dim, s_elems = inner * s->dim, conv = (double)delta_conv_dim(s);
    c->state_bytes += 2 * 4 * (s_elems + (s->n_conv - 1) * conv);
    c->delta_flops += 8 * s_elems * a->n_tok;
    return act(o, a->n_tok * (2 * conv + 2 * inner + 2.0 * s->n_value) + s->n_conv * conv);
}

static int add_gated(struct ops *o, float *x, const float *d, const float *gate, int n_tok, int64_t dim) {
    (void)x, (void)d, (void)gate;
    return act(o, n_tok * (3.0 * (double)dim + 1));
}

static int glu(struct ops *o, float *y, const float *gate, const float *up, int64_t n, enum act kind) {
    (void)y, (void)gate, (void)up, (void)kind;
    return act(o, 3.0 * (double)n);
}

static int route(struct ops *o, int32_t *ids, float *w, const float *logits, int n_tok, int n_expert, int n_used, bool norm) {
    (void)ids, (void)w, (void)logits, (void)norm;
    return act(o, (double)n_tok * (n_expert + 2.0 * n_used));
}

static int experts(struct ops *o, const struct experts_args *a) {
    struct cost *c = cost_of(o);
    double one = home_bytes(&a->gate) + home_bytes(&a->up) + home_bytes(&a->down);
    double held = a->n_held ? a->n_held : a->n_expert, touched = (double)a->n_used * a->n_tok * held / a->n_expert;
    c->weight_bytes += one * (touched < held ? touched : held);
    c->matmul_flops += 6.0 * (double)a->gate.rows * (double)a->gate.cols * touched;
    return act(o, 2.0 * a->n_tok * (double)a->gate.cols + 3.0 * touched * (double)a->gate.rows);
}

static int gather(struct ops *o, float *y, const float *x, const int32_t *rows, int n, int64_t dim) {
    (void)y, (void)x, (void)rows;
    return act(o, 2.0 * n * (double)dim);
}

static int softcap(struct ops *o, float *x, int64_t n, float cap) {
    (void)x, (void)cap;
    return act(o, 2.0 * (double)n);
}

void cost_open(struct cost *c) {
    *c = (struct cost){.ops = {.name = "cost", .embed = embed, .rmsnorm = rmsnorm, .add = add, .matmul = matmul,
                               .rope_table = rope_table, .rope = rope, .kv_put = kv_put, .attn = attn, .delta = delta, .glu = glu,
                               .route = route, .experts = experts, .add_gated = add_gated, .gather = gather, .softcap = softcap}};
}

void cost_reset(struct cost *c) { cost_open(c); }
