/* experts.c: the expert FFN. Choices (token, expert) are sorted by expert; a batch of them, as many as scratch holds, goes
 * through gate and up of all its experts in one run of the pool, then the activation, then down. A token's experts are
 * added up in the order of their numbers, so its result does not depend on the other tokens or on the batches. */
#include "cpu/matmul.h"

#include "core/err.h"
#include "core/mem.h"

#include <string.h>

enum { SLICE = 256 /* elements of the sum per task */ };

struct experts_state {
    int cap;                  /* choices per batch */
    int32_t *first;           /* [n_expert + 1] first choice of each expert in `choice` */
    int32_t *choice;          /* [tokens of a chunk * used] token * n_used + k, by expert */
    int32_t *token;           /* [tokens of a chunk * used] the token of each */
    float *x;                 /* [cap, cols + 1] prepared inputs, first of gate and up, then of down */
    float *gate, *up;         /* [cap, cols + 1]; `up` takes the output of down as well */
    struct product *products; /* [2 * min(cap, n_expert)] */
    struct prepare *prepares; /* [min(cap, n_expert)] */
    void *memory;
};

/* Where each array lies in the one block of scratch. */
struct arrays {
    size_t first, choice, token, x, gate, up, products, prepares, bytes;
    int cap;
};

static bool place(size_t *at, size_t *end, size_t n, size_t each) {
    *at = *end;
    return size_add(end, *end, size_mul3(n, each, 1)) && size_align_up(end, *end, 64);
}

static bool place_arrays(struct arrays *a, const struct ops_limits *l) {
    *a = (struct arrays){0};
    if (l->n_expert <= 0) return true;
    int n_tok = l->n_tok < MATMUL_TOKENS ? l->n_tok : MATMUL_TOKENS, used = l->n_expert_used;
    a->cap = n_tok > used ? n_tok : used;
    size_t choices = (size_t)n_tok * (size_t)used;
    size_t row = (size_t)l->cols + 1, cap = (size_t)a->cap,
           runs = (size_t)(a->cap < l->n_expert ? a->cap : l->n_expert);
    size_t *end = &a->bytes;
    return place(&a->first, end, (size_t)l->n_expert + 1, sizeof(int32_t)) &&
           place(&a->choice, end, choices, sizeof(int32_t)) && place(&a->token, end, choices, sizeof(int32_t)) &&
           place(&a->x, end, cap, row * sizeof(float)) && place(&a->gate, end, cap, row * sizeof(float)) &&
           place(&a->up, end, cap, row * sizeof(float)) && place(&a->products, end, 2 * runs, sizeof(struct product)) &&
           place(&a->prepares, end, runs, sizeof(struct prepare));
}

size_t experts_scratch_bytes(const struct cpu_opts *o) {
    struct arrays a;
    return place_arrays(&a, &o->limits) ? a.bytes + sizeof(struct experts_state) : SIZE_MAX;
}

static bool is_held(const struct experts_args *a, int e) { return !a->n_held || (e >= a->first && e < a->first + a->n_held); }

/* Choices sorted by expert, within an expert by token; those of experts that are not held are left out. */
static int sort_choices(struct experts_state *s, const struct experts_args *a, int t0, int n_tok) {
    const int32_t *ids = a->ids + (int64_t)t0 * a->n_used;
    int n = n_tok * a->n_used;
    memset(s->first, 0, ((size_t)a->n_expert + 1) * sizeof *s->first);
    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= a->n_expert)
            return err_set(ERR_ARG, "experts: expert %d of %d was chosen", ids[i], a->n_expert);
        s->first[ids[i] + 1] += is_held(a, ids[i]);
    }
    for (int e = 0; e < a->n_expert; e++) s->first[e + 1] += s->first[e];
    for (int i = 0; i < n; i++) {
        if (!is_held(a, ids[i])) continue;
        int32_t at = s->first[ids[i]]++; /* moves each start to the next one's, put back below */
        s->choice[at] = t0 * a->n_used + i;
        s->token[at] = t0 + i / a->n_used;
    }
    for (int e = a->n_expert; e > 0; e--) s->first[e] = s->first[e - 1];
    s->first[0] = 0;
    return 0;
}

/* Matrix of expert e in a stack. */
static struct mat expert_mat(const struct mat *stack, size_t bytes, int e) { /* the e-th that is held */
    struct mat m = *stack;
    m.data = (const uint8_t *)stack->data + (size_t)e * bytes;
    return m;
}

struct sum_job {
    const struct experts_state *s;
    const struct experts_args *a;
    int64_t dim;
    int begin, end; /* choices of the batch */
};

static void sum_task(void *arg, int task, int worker) {
    (void)worker;
    const struct sum_job *j = arg;
    int64_t lo = (int64_t)task * SLICE, hi = lo + SLICE < j->dim ? lo + SLICE : j->dim;
    for (int i = j->begin; i < j->end; i++) {
        float w = j->a->weight[j->s->choice[i]];
        const float *out = j->s->up + (i - j->begin) * j->dim;
        float *y = j->a->y + j->s->token[i] * j->dim;
        for (int64_t d = lo; d < hi; d++) y[d] += w * out[d];
    }
}

struct stack_bytes {
    size_t gate, up, down; /* of one expert */
};

/* Choices begin..end-1, all within scratch. */
static int run_batch(struct cpu *c, const struct experts_args *a, const struct stack_bytes *b, int begin, int end) {
    struct experts_state *s = c->matmul->experts;
    const int64_t dim = a->gate.cols, n_ff = a->gate.rows;
    size_t in_bytes = matmul_token_bytes(a->gate.type, dim), mid_bytes = matmul_token_bytes(a->down.type, n_ff);
    int n = 0, e = 0;
    for (int i = begin, next; i < end; i = next, n++) {
        while (s->first[e + 1] <= i) e++;
        next = s->first[e + 1] < end ? s->first[e + 1] : end;
        void *x = (uint8_t *)s->x + (size_t)(i - begin) * in_bytes;
        s->prepares[n] = (struct prepare){x, a->x, s->token + i, dim, next - i, a->gate.type};
        s->products[2 * n] = (struct product){
            .w = expert_mat(&a->gate, b->gate, e - a->first), .x = x, .n_tok = next - i, .y = s->gate + (i - begin) * n_ff};
        s->products[2 * n + 1] = (struct product){
            .w = expert_mat(&a->up, b->up, e - a->first), .x = x, .n_tok = next - i, .y = s->up + (i - begin) * n_ff};
    }
    prepare_run(c, s->prepares, n);
    int rc = products_run(c, s->products, 2 * n);
    if (!rc) rc = c->ops.glu(&c->ops, s->gate, s->gate, s->up, (end - begin) * n_ff, a->act);
    if (rc) return rc;
    n = 0, e = 0;
    for (int i = begin, next; i < end; i = next, n++) {
        while (s->first[e + 1] <= i) e++;
        next = s->first[e + 1] < end ? s->first[e + 1] : end;
        void *x = (uint8_t *)s->x + (size_t)(i - begin) * mid_bytes;
        s->prepares[n] = (struct prepare){x, s->gate + (i - begin) * n_ff, NULL, n_ff, next - i, a->down.type};
        s->products[n] = (struct product){
            .w = expert_mat(&a->down, b->down, e - a->first), .x = x, .n_tok = next - i, .y = s->up + (i - begin) * dim};
    }
    prepare_run(c, s->prepares, n);
    rc = products_run(c, s->products, n);
    struct sum_job j = {s, a, dim, begin, end};
    if (!rc) pool_run(c->pool, sum_task, &j, (int)((dim + SLICE - 1) / SLICE));
    return rc;
}

static int check_experts(const struct cpu *c, const struct experts_args *a, struct stack_bytes *b) {
    const struct ops_limits *l = &c->opts.limits;
    if (a->first < 0 || a->n_held < 0 || a->first > a->n_expert - a->n_held || (!a->n_held && a->first))
        return err_set(ERR_ARG, "experts: %d from number %d on of %d are held", a->n_held, a->first, a->n_expert);
    if (a->n_tok < 0 || a->n_tok > l->n_tok || a->n_expert < 1 || a->n_expert > l->n_expert || a->n_used < 1 ||
        a->n_used > l->n_expert_used)
        return err_set(ERR_ARG, "experts: %d tokens, %d of %d experts (opened for %d, %d of %d)", a->n_tok, a->n_used,
                       a->n_expert, l->n_tok, l->n_expert_used, l->n_expert);
    struct strip_layout gate, up, down;
    if (!strip_layout(&gate, a->gate.type, a->gate.rows, a->gate.cols) ||
        !strip_layout(&up, a->up.type, a->up.rows, a->up.cols) ||
        !strip_layout(&down, a->down.type, a->down.rows, a->down.cols) || a->up.rows != a->gate.rows ||
        a->up.cols != a->gate.cols || a->down.cols != a->gate.rows || a->down.rows != a->gate.cols ||
        a->gate.cols > l->cols || a->gate.rows > l->cols)
        return err_set(ERR_ARG,
                       "experts: gate [%lld, %lld], up [%lld, %lld], down [%lld, %lld] (opened for %lld inputs)",
                       (long long)a->gate.rows, (long long)a->gate.cols, (long long)a->up.rows, (long long)a->up.cols,
                       (long long)a->down.rows, (long long)a->down.cols, (long long)l->cols);
    if (matmul_is_plain(a->gate.type) != matmul_is_plain(a->up.type))
        return err_set(ERR_ARG, "experts: gate is %s and up is %s", quant_name(a->gate.type), quant_name(a->up.type));
    *b = (struct stack_bytes){gate.bytes, up.bytes, down.bytes};
    return 0;
}

static int op_experts(struct ops *o, const struct experts_args *a) {
    struct cpu *c = (struct cpu *)o;
    struct experts_state *s = c->matmul->experts;
    struct stack_bytes b = {0};
    int rc = check_experts(c, a, &b);
    if (rc) return rc;
    memset(a->y, 0, (size_t)a->n_tok * (size_t)a->gate.cols * sizeof *a->y);
    for (int t = 0; t < a->n_tok; t += c->matmul->n_tok) {
        int n_tok = a->n_tok - t < c->matmul->n_tok ? a->n_tok - t : c->matmul->n_tok;
        rc = sort_choices(s, a, t, n_tok);
        int n = rc ? 0 : s->first[a->n_expert];
        for (int i = 0; i < n && !rc; i += s->cap) rc = run_batch(c, a, &b, i, i + s->cap < n ? i + s->cap : n);
        if (rc) return rc;
    }
    return 0;
}

int experts_open(struct cpu *c, struct matmul_state *m) {
    struct arrays a;
    if (!place_arrays(&a, &c->opts.limits)) return err_set(ERR_NOMEM, "experts: scratch overflows");
    struct experts_state *s = mem_alloc(sizeof *s, 64, "experts");
    if (!s) return ERR_NOMEM;
    m->experts = s;
    c->ops.experts = op_experts;
    if (!a.bytes) return 0;
    uint8_t *p = s->memory = mem_alloc(a.bytes, 64, "expert activations");
    if (!p) return ERR_NOMEM;
    s->cap = a.cap;
    s->first = (int32_t *)(void *)(p + a.first);
    s->choice = (int32_t *)(void *)(p + a.choice);
    s->token = (int32_t *)(void *)(p + a.token);
    s->x = (float *)(void *)(p + a.x);
    s->gate = (float *)(void *)(p + a.gate);
    s->up = (float *)(void *)(p + a.up);
    s->products = (struct product *)(void *)(p + a.products);
    s->prepares = (struct prepare *)(void *)(p + a.prepares);
    return 0;
}

void experts_close(struct matmul_state *m) {
    if (!m->experts) return;
    mem_free(m->experts->memory);
    mem_free(m->experts);
    m->experts = NULL;
}
