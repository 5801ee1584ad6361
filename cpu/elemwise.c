/* elemwise.c: norms, rotation, activations, residuals, routing. Work of a few tokens runs on the driver thread, since
 * waking the pool would cost more than it saves; longer runs are split by rows. */
#include "core/err.h"
#include "cpu/impl.h"
#include "cpu/kern_elem.h"

#include <math.h>
#include <string.h>

enum { SERIAL_ELEMS = 16384, TASK_ELEMS = 32768 };

struct rows_job {
    void (*one)(const struct rows_job *j, int64_t row);
    int64_t n_row, per_task;
    const struct kern_elem *k;
    const void *args;
};

static void rows_task(void *arg, int task, int worker) {
    (void)worker;
    const struct rows_job *j = arg;
    int64_t end = (task + 1) * j->per_task;
    if (end > j->n_row) end = j->n_row;
    for (int64_t r = task * j->per_task; r < end; r++) j->one(j, r);
}

/* one(row) for each row of `width` elements. */
static int for_rows(struct ops *o, void (*one)(const struct rows_job *, int64_t), const void *args, int64_t n_row, int64_t width) {
    struct cpu *c = (struct cpu *)o;
    struct rows_job j = {.one = one, .n_row = n_row, .k = c->elem, .args = args};
    if (n_row * width <= SERIAL_ELEMS) {
        for (int64_t r = 0; r < n_row; r++) one(&j, r);
        return 0;
    }
    j.per_task = TASK_ELEMS / width;
    if (j.per_task < 1) j.per_task = 1;
    pool_run(c->pool, rows_task, &j, (int)((n_row + j.per_task - 1) / j.per_task));
    return 0;
}

struct norm_args {
    float *y;
    const float *x, *w;
    int dim;
    float eps;
};

static void norm_row(const struct rows_job *j, int64_t r) {
    const struct norm_args *a = j->args;
    j->k->rmsnorm(a->y + r * a->dim, a->x + r * a->dim, a->w, a->dim, a->eps);
}

static int op_rmsnorm(struct ops *o, float *y, const float *x, const float *w, int64_t n_row, int dim, float eps) {
    struct norm_args a = {y, x, w, dim, eps};
    return for_rows(o, norm_row, &a, n_row, dim);
}

/* Flat arrays are cut into pieces of this many elements, so that the pool can share them. */
enum { PIECE = 4096 };

struct flat_args {
    float *y;
    const float *a, *b;
    int64_t n;
    enum act act;
    float cap;
};

static int64_t piece_len(const struct flat_args *f, int64_t r) { return f->n - r * PIECE < PIECE ? f->n - r * PIECE : PIECE; }

static void add_piece(const struct rows_job *j, int64_t r) {
    const struct flat_args *f = j->args;
    j->k->add(f->y + r * PIECE, f->a + r * PIECE, piece_len(f, r));
}

static void glu_piece(const struct rows_job *j, int64_t r) {
    const struct flat_args *f = j->args;
    j->k->glu(f->y + r * PIECE, f->a + r * PIECE, f->b + r * PIECE, piece_len(f, r), f->act);
}

static void softcap_piece(const struct rows_job *j, int64_t r) {
    const struct flat_args *f = j->args;
    j->k->softcap(f->y + r * PIECE, piece_len(f, r), f->cap);
}

static int flat(struct ops *o, void (*one)(const struct rows_job *, int64_t), const struct flat_args *f) {
    return for_rows(o, one, f, (f->n + PIECE - 1) / PIECE, PIECE);
}

static int op_add(struct ops *o, float *x, const float *d, int64_t n) {
    return flat(o, add_piece, &(struct flat_args){.y = x, .a = d, .n = n});
}

static int op_glu(struct ops *o, float *y, const float *gate, const float *up, int64_t n, enum act act) {
    return flat(o, glu_piece, &(struct flat_args){.y = y, .a = gate, .b = up, .n = n, .act = act});
}

struct gated_args {
    float *x;
    const float *d, *gate;
    int64_t dim;
};

static void gated_row(const struct rows_job *j, int64_t t) {
    const struct gated_args *a = j->args;
    j->k->add_gated(a->x + t * a->dim, a->d + t * a->dim, a->gate[t], a->dim);
}

static int op_add_gated(struct ops *o, float *x, const float *d, const float *gate, int n_tok, int64_t dim) {
    struct gated_args a = {x, d, gate, dim};
    return for_rows(o, gated_row, &a, n_tok, dim);
}

static int op_softcap(struct ops *o, float *x, int64_t n, float cap) {
    return flat(o, softcap_piece, &(struct flat_args){.y = x, .n = n, .cap = cap});
}

struct table_args {
    float *cs;
    const double *inv_freq;
    int n_pair;
    float mscale;
    int64_t pos0;
};

static void table_row(const struct rows_job *j, int64_t t) {
    const struct table_args *a = j->args;
    float *cs = a->cs + t * a->n_pair * 2;
    for (int i = 0; i < a->n_pair; i++) {
        double angle = (double)(a->pos0 + t) * a->inv_freq[i];
        cs[2 * i] = (float)(a->mscale * cos(angle));
        cs[2 * i + 1] = (float)(a->mscale * sin(angle));
    }
}

static int op_rope_table(struct ops *o, float *cs, const double *inv_freq, int n_pair, float mscale, int64_t pos0, int n_tok) {
    struct table_args a = {cs, inv_freq, n_pair, mscale, pos0};
    return for_rows(o, table_row, &a, n_tok, 40 * (int64_t)n_pair); /* a sine costs tens of flops */
}

static void rope_token(const struct rows_job *j, int64_t t) {
    const struct rope_args *a = j->args;
    const float *cs = a->cs + t * a->n_rot;
    for (int h = 0; h < a->n_head; h++) {
        float *x = a->x + (t * a->n_head + h) * a->head_dim;
        if (a->norm) j->k->rmsnorm(x, x, a->norm, a->head_dim, a->eps);
        j->k->rotate(x, cs, a->n_rot / 2, a->pairing);
    }
}

static int op_rope(struct ops *o, const struct rope_args *a) {
    return for_rows(o, rope_token, a, a->n_tok, (int64_t)a->n_head * a->head_dim);
}

struct route_args {
    int32_t *ids;
    float *weight;
    const float *logits;
    int n_expert, n_used;
    bool normalise;
};

static void route_token(const struct rows_job *j, int64_t t) {
    const struct route_args *a = j->args;
    const float *l = a->logits + t * a->n_expert;
    int32_t *ids = a->ids + t * a->n_used;
    float *w = a->weight + t * a->n_used;
    /* Selection by insertion: n_used is small. Equal logits keep the lower id first. */
    for (int n = 0, e = 0; e < a->n_expert; e++) {
        if (n == a->n_used && !(l[e] > l[ids[n - 1]])) continue;
        int at = n < a->n_used ? n++ : n - 1;
        for (; at > 0 && l[e] > l[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = e;
    }
    double all = 0, chosen = 0, top = l[ids[0]];
    for (int e = 0; e < a->n_expert; e++) all += exp(l[e] - top);
    for (int i = 0; i < a->n_used; i++) chosen += exp(l[ids[i]] - top);
    for (int i = 0; i < a->n_used; i++) w[i] = (float)(exp(l[ids[i]] - top) / (a->normalise ? chosen : all));
}

static int op_route(struct ops *o, int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used,
                    bool normalise) {
    if (n_used < 1 || n_used > n_expert) return err_set(ERR_ARG, "route: %d of %d experts", n_used, n_expert);
    struct route_args a = {ids, weight, logits, n_expert, n_used, normalise};
    return for_rows(o, route_token, &a, n_tok, 20 * (int64_t)n_expert);
}

static int op_gather(struct ops *o, float *y, const float *x, const int32_t *rows, int n, int64_t dim) {
    (void)o;
    for (int i = 0; i < n; i++) memcpy(y + i * dim, x + rows[i] * dim, (size_t)dim * sizeof *y);
    return 0;
}

size_t elem_scratch_bytes(const struct cpu_opts *o) { return (void)o, 0; }

int elem_open(struct cpu *c) {
    c->elem = kern_elem_pick(c->opts.isa);
    c->ops.rmsnorm = op_rmsnorm;
    c->ops.add = op_add;
    c->ops.glu = op_glu;
    c->ops.add_gated = op_add_gated;
    c->ops.softcap = op_softcap;
    c->ops.rope_table = op_rope_table;
    c->ops.rope = op_rope;
    c->ops.route = op_route;
    c->ops.gather = op_gather;
    return 0;
}

void elem_close(struct cpu *c) { (void)c; }
