/* delta.c: Gated DeltaNet layers: convolution and norms by head, then the rule by value head (and by rows of S where there
 * are fewer heads than threads), then the gated norm. Every part is cut along independent sums, so no cut changes a bit. */
#include "core/err.h"
#include "core/mem.h"
#include "cpu/impl.h"
#include "cpu/kern_delta.h"
#include "cpu/kern_elem.h"

#include <math.h>

enum {
    /* Chunks need hardly less arithmetic than steps that keep rows of S in the cache, and transpose S twice: they win 15 %
     * from here on, and lose below 128. Shorter passes give the same bits as one token after the other. */
    MANY_TOKENS = 256,
    NORM_ELEMS = 8192 /* of a task of the gated norm */
};

struct delta_state {
    const struct kern_delta *kern;
    struct delta_chunk *chunks; /* one per worker */
    float *gates;               /* [n_thread, 2, n_tok] ln decay and beta of one head */
};

struct delta_job {
    struct cpu *c;
    const struct delta_args *a;
    int64_t channels;
    int n_slice; /* tasks per value head */
};

/* One head of q, k or v: all its channels through all tokens. */
static void conv_task(void *arg, int head, int worker) {
    (void)worker;
    const struct delta_job *j = arg;
    const struct delta_args *a = j->a;
    const struct kern_delta *kern = j->c->delta->kern;
    int dim = a->shape.dim, n_key = a->shape.n_key;
    int64_t c0 = (int64_t)head * dim;
    for (int c = 0; c < dim; c += 16) kern->conv(a->u, a->last, a->conv, j->channels, c0 + c, a->n_tok);
    if (head >= 2 * n_key) return;
    float scale = head < n_key ? 1 / sqrtf((float)dim) : 1;
    for (int t = 0; t < a->n_tok; t++) {
        float *x = a->u + t * j->channels + c0;
        kern->unit(x, x, dim, scale, a->eps);
    }
}

static float softplus(float y) { return y > 20 ? y : log1pf(expf(y)); }

static void rule_task(void *arg, int task, int worker) {
    const struct delta_job *j = arg;
    const struct delta_args *a = j->a;
    const struct delta_shape *s = &a->shape;
    struct delta_state *d = j->c->delta;
    int head = task / j->n_slice, n_row = s->dim / j->n_slice, row = task % j->n_slice * n_row;
    int64_t key = (int64_t)delta_key_head(s, head) * s->dim, out = (int64_t)head * s->dim + row;
    float *g = d->gates + (int64_t)worker * 2 * j->c->opts.limits.n_tok, *beta = g + a->n_tok;
    for (int t = 0; t < a->n_tok; t++) {
        int64_t i = (int64_t)t * s->n_value + head;
        g[t] = a->rate[head] * softplus(a->a[i] + a->dt[head]);
        beta[t] = 1 / (1 + expf(-a->b[i]));
    }
    struct delta_rows r = {.s = a->s + ((int64_t)head * s->dim + row) * s->dim, .o = a->y + out, .q = a->u + key,
                           .k = a->u + (int64_t)s->n_key * s->dim + key, .v = a->u + 2 * (int64_t)s->n_key * s->dim + out,
                           .g = g, .beta = beta, .o_step = (int64_t)s->n_value * s->dim, .u_step = j->channels,
                           .n_tok = a->n_tok, .n_row = n_row, .dim = s->dim};
    if (a->n_tok < MANY_TOKENS)
        d->kern->steps(&r);
    else
        d->kern->chunks(&r, &d->chunks[worker]);
}

static void norm_task(void *arg, int task, int worker) {
    (void)worker;
    const struct delta_job *j = arg;
    const struct delta_args *a = j->a;
    int dim = a->shape.dim, per = NORM_ELEMS / dim;
    int64_t n = (int64_t)a->n_tok * a->shape.n_value, first = (int64_t)task * per, end = first + per < n ? first + per : n;
    for (int64_t h = first; h < end; h++) {
        float *y = a->y + h * dim;
        j->c->elem->rmsnorm(y, y, a->norm, dim, a->eps);
        j->c->elem->glu(y, a->z + h * dim, y, dim, ACT_SILU);
    }
}

static int op_delta(struct ops *o, const struct delta_args *a) {
    struct cpu *c = (struct cpu *)o;
    const struct delta_shape *s = &a->shape, *l = &c->opts.limits.delta;
    if (a->n_tok < 1 || a->n_tok > c->opts.limits.n_tok || !l->n_value || s->dim != l->dim || s->n_conv != DELTA_CONV ||
        s->n_key < 1 || s->n_value < s->n_key || s->n_value % s->n_key)
        return err_set(ERR_ARG, "delta: %d tokens, %d key and %d value heads of %d (opened for %d tokens, heads of %d)", a->n_tok,
                       s->n_key, s->n_value, s->dim, c->opts.limits.n_tok, l->dim);
    struct delta_job j = {.c = c, .a = a, .channels = delta_conv_dim(s), .n_slice = 1};
    while (j.n_slice * s->n_value < c->opts.n_thread && s->dim % (32 * j.n_slice) == 0) j.n_slice *= 2;
    pool_run(c->pool, conv_task, &j, 2 * s->n_key + s->n_value);
    pool_run(c->pool, rule_task, &j, s->n_value * j.n_slice);
    int per = NORM_ELEMS / s->dim;
    pool_run(c->pool, norm_task, &j, (int)(((int64_t)a->n_tok * s->n_value + per - 1) / per));
    return 0;
}

static size_t chunks_bytes(const struct cpu_opts *o) { return size_mul3((size_t)o->n_thread, sizeof(struct delta_chunk), 1); }

static size_t gates_bytes(const struct cpu_opts *o) {
    return size_mul3((size_t)o->n_thread, 2 * (size_t)o->limits.n_tok, sizeof(float));
}

size_t delta_scratch_bytes(const struct cpu_opts *o) {
    return o->limits.delta.n_value ? sizeof(struct delta_state) + chunks_bytes(o) + gates_bytes(o) : 0;
}

int delta_open(struct cpu *c) {
    const struct delta_shape *s = &c->opts.limits.delta;
    c->ops.delta = op_delta;
    if (!s->n_value) return 0;
    if (s->dim < 16 || s->dim % 16 || s->dim > DELTA_MAX_DIM)
        return err_set(ERR_ARG, "delta: heads of %d are not a multiple of 16 up to %d", s->dim, DELTA_MAX_DIM);
    struct delta_state *d = c->delta = mem_alloc(sizeof *d, 64, "delta");
    if (!d) return ERR_NOMEM;
    d->kern = kern_delta_pick(c->opts.isa);
    d->chunks = mem_alloc(chunks_bytes(&c->opts), 64, "delta chunks");
    d->gates = mem_alloc(gates_bytes(&c->opts), 64, "delta gates");
    return d->chunks && d->gates ? 0 : ERR_NOMEM;
}

void delta_close(struct cpu *c) {
    if (!c->delta) return;
    mem_free(c->delta->chunks);
    mem_free(c->delta->gates);
    mem_free(c->delta);
    c->delta = NULL;
}
