/* attn.c: attention and KV writes of the CPU back end: cuts the work into tasks, gives each worker its scratch, merges.
 * The arithmetic is in kern_attn.c and kern_kv.c.
 *
 * Pages are grouped into runs whose borders depend only on the page number. A row's result is the fold of its runs in
 * increasing order, whether one task goes through all of them (prefill: many rows) or each run is a task of its own whose
 * (o, m, l) is kept and folded afterwards (decode: few rows, long context). So the bits depend neither on the number of
 * threads nor on how many tokens a call has. */
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "cpu/impl.h"
#include "cpu/kern_attn.h"
#include "cpu/kern_kv.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK_ROWS = 96,      /* rows of a block: K and V are widened once for all of them */
    SPLIT_TOKENS = 8,     /* tokens for which partial results are kept at the full context */
    TASKS_PER_THREAD = 8, /* fewer tasks than that: split by runs */
    MERGE_ROWS = 4,
    PUT_VALUES = 32768,   /* K and V values below which kv_put does not wake the workers */
};

struct worker_scratch {
    struct attn_rows rows;
    float *run_o, *run_m, *run_l; /* [BLOCK_ROWS][dim], [BLOCK_ROWS] x2: the state of the current run */
    float *sum_o, *sum_m, *sum_l; /* the fold of the runs before */
    float *tmp;                   /* [KV_MAX_DIM] */
};

/* The call in progress. */
struct job {
    const struct attn_args *a;
    const struct kv_layer *layer;
    int group;            /* query heads per KV head */
    int n_row;            /* n_tok * group: rows of a KV head */
    int block_rows, n_block;
    int64_t run_first;    /* first run that any row sees */
    int n_run;
    int dim_o;
    int64_t page_first, page_end; /* pages that are attended to */
    float *part;          /* ?[n_tok, n_head, head_dim_v + 2]: where (o, m, l) of the rows go, instead of a->o */
};

struct put_job {
    struct kv *kv;
    int il, n_tok;
    int64_t pos0;
    const float *k, *v;
    int64_t first_page;
    _Atomic int64_t bad; /* smallest position that could not be stored; INT64_MAX: none */
};

struct attn_state {
    const struct kern_attn *kern;
    const struct kern_kv *put;
    struct worker_scratch *w; /* [n_thread] */
    unsigned char *mem;
    float *part;              /* partial results: [n_run][n_kv * n_row] of o[dim_o], m, l */
    size_t part_floats;
    struct job job;
    struct put_job put_job;
    struct attn_rows *slots;  /* [n_slot] blocks packed for all their runs at once */
    int n_slot;
    _Atomic int64_t bad;      /* smallest position whose result is not finite; INT64_MAX: none */
};

/* --- runs -------------------------------------------------------------------------------------------------------------- */

/* Single pages at the start, where contexts are short and tasks few; longer runs further on, where there are many and
 * partial results would take space. A layer with a window never sees many pages. */
enum { RUN_1 = 16, RUN_4 = 256, RUNS_4 = RUN_1 + (RUN_4 - RUN_1) / 4 };

static int64_t run_of_page(const struct kv_layer *l, int64_t page) {
    if (l->window || page < RUN_1) return page;
    return page < RUN_4 ? RUN_1 + (page - RUN_1) / 4 : RUNS_4 + (page - RUN_4) / 16;
}

static int64_t run_first_page(const struct kv_layer *l, int64_t run) {
    if (l->window || run < RUN_1) return run;
    return run < RUNS_4 ? RUN_1 + (run - RUN_1) * 4 : RUN_4 + (run - RUNS_4) * 16;
}

/* --- scratch ----------------------------------------------------------------------------------------------------------- */

static size_t take(size_t *at, size_t bytes) {
    size_t start = *at;
    *at = align_up(start + bytes, 64);
    return start;
}

#define TAKE(field, count) field = (void *)(base + take(&at, sizeof *field * (count)))

/* Lays out the queries of a block at base (NULL: only the size). */
static size_t queries_layout(struct attn_rows *b, unsigned char *base, int dim) {
    size_t at = 0, d = align_up((size_t)dim, 32);
    size_t packed = (BLOCK_ROWS / 4 + 1) * ATTN_TILE_MAX; /* the smallest tile has 4 rows, each is packed with ATTN_TILE_MAX */
    TAKE(b->tile_row, ATTN_MAX_TILES + 1);
    TAKE(b->lo, BLOCK_ROWS);
    TAKE(b->hi, BLOCK_ROWS);
    TAKE(b->q, packed * d);
    TAKE(b->qs, packed * (d / KV_BLOCK));
    TAKE(b->qsum, packed * (d / KV_BLOCK));
    b->qi = (int32_t *)b->q; /* one or the other */
    return at;
}

/* One worker's scratch. */
static size_t worker_layout(struct worker_scratch *w, unsigned char *base, int dim) {
    size_t d = align_up((size_t)dim, 32), rows = BLOCK_ROWS, at = queries_layout(&w->rows, base, dim);
    TAKE(w->rows.s, rows * KV_PAGE);
    TAKE(w->rows.ps, (size_t)ATTN_TILE_MAX * KV_PAGE);
    TAKE(w->rows.alpha, rows);
    TAKE(w->rows.beta, rows);
    TAKE(w->rows.panel, 32 * (d > KV_PAGE ? d : KV_PAGE) + 32 * (d / KV_BLOCK));
    TAKE(w->run_o, rows * d);
    TAKE(w->run_m, rows);
    TAKE(w->run_l, rows);
    TAKE(w->sum_o, rows * d);
    TAKE(w->sum_m, rows);
    TAKE(w->sum_l, rows);
    TAKE(w->tmp, KV_MAX_DIM);
    return at;
}
#undef TAKE

/* Blocks of SPLIT_TOKENS tokens of all heads: at most one of a KV head is not full. */
static int slot_count(const struct ops_limits *l) { return l->n_kv + SPLIT_TOKENS * l->n_head / BLOCK_ROWS; }

static size_t part_floats(const struct ops_limits *l) {
    struct kv_layer plain = {.window = 0};
    size_t runs = (size_t)run_of_page(&plain, (l->n_ctx + KV_PAGE - 1) / KV_PAGE) + 1;
    return runs * (size_t)l->n_head * SPLIT_TOKENS * (align_up((size_t)l->head_dim, KV_LANES) + 2);
}

size_t attn_scratch_bytes(const struct cpu_opts *o) {
    const struct ops_limits *l = &o->limits;
    struct worker_scratch w;
    if (!l->n_head) return 0;
    return (size_t)o->n_thread * worker_layout(&w, NULL, l->head_dim) +
           (size_t)slot_count(l) * queries_layout(&w.rows, NULL, l->head_dim) + sizeof(float) * part_floats(l);
}

static int kv_put(struct ops *ops, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v);
static int attn(struct ops *ops, const struct attn_args *a);

int attn_open(struct cpu *c) {
    struct attn_state *s = calloc(1, sizeof *s);
    c->attn = s;
    c->ops.kv_put = kv_put;
    c->ops.attn = attn;
    if (!s) return err_set(ERR_NOMEM, "attention: out of memory");
    s->kern = kern_attn_pick(c->opts.isa);
    s->put = kern_kv_pick(c->opts.isa);
    const struct ops_limits *l = &c->opts.limits;
    if (l->head_dim > KV_MAX_DIM) return err_set(ERR_UNSUPPORTED, "head size %d is above %d", l->head_dim, KV_MAX_DIM);
    s->n_slot = slot_count(l);
    s->w = calloc((size_t)c->opts.n_thread, sizeof *s->w);
    s->slots = calloc((size_t)s->n_slot + 1, sizeof *s->slots);
    if (!s->w || !s->slots) return err_set(ERR_NOMEM, "attention: out of memory");
    if (!l->n_head) return 0;
    s->mem = mem_alloc(attn_scratch_bytes(&c->opts), 64, "attention scratch");
    if (!s->mem) return ERR_NOMEM;
    unsigned char *at = s->mem;
    for (int i = 0; i < c->opts.n_thread; i++) at += worker_layout(&s->w[i], at, l->head_dim);
    for (int i = 0; i < s->n_slot; i++) at += queries_layout(&s->slots[i], at, l->head_dim);
    s->part = (float *)at;
    s->part_floats = part_floats(l);
    return 0;
}

void attn_close(struct cpu *c) {
    if (!c->attn) return;
    mem_free(c->attn->mem);
    free(c->attn->w);
    free(c->attn->slots);
    free(c->attn);
    c->attn = NULL;
}

static void note_bad(_Atomic int64_t *bad, int64_t pos) {
    int64_t old = atomic_load(bad);
    while (pos < old && !atomic_compare_exchange_weak(bad, &old, pos)) {}
}

/* --- kv_put ------------------------------------------------------------------------------------------------------------ */

/* One head of one page. */
static void put_task(void *arg, int task, int worker) {
    (void)worker;
    struct attn_state *s = arg;
    struct put_job *j = &s->put_job;
    const struct kv_layer *l = &j->kv->layers[j->il];
    int head = task % l->n_kv;
    int64_t page = (j->first_page + task / l->n_kv) * KV_PAGE, end = j->pos0 + j->n_tok;
    int64_t from = page > j->pos0 ? page : j->pos0, to = page + KV_PAGE < end ? page + KV_PAGE : end;
    size_t k_row = (size_t)l->n_kv * (size_t)l->head_dim_k, v_row = (size_t)l->n_kv * (size_t)l->head_dim_v;
    const float *k = j->k + (size_t)(from - j->pos0) * k_row + (size_t)head * (size_t)l->head_dim_k;
    const float *v = j->v + (size_t)(from - j->pos0) * v_row + (size_t)head * (size_t)l->head_dim_v;
    int n = (int)(to - from);
    int done = s->put->put(l, kv_head(j->kv, j->il, from, head), (int)(from - page), n, k, k_row, v, v_row);
    if (done < n) note_bad(&j->bad, from + done);
}

/* Positions pos0 .. pos0 + n_tok of layer il exist and are held together. */
static int check_range(const struct kv *kv, int il, int64_t pos0, int n_tok) {
    if (il < 0 || il >= kv->n_layer || !kv->layers[il].n_kv)
        return err_set(ERR_ARG, "layer %d has no KV cache", il);
    if (pos0 < 0 || n_tok < 1 || pos0 > kv->n_ctx - n_tok)
        return err_set(ERR_ARG, "positions %lld..%lld are outside the context of %lld", (long long)pos0,
                       (long long)pos0 + n_tok - 1, (long long)kv->n_ctx);
    const struct kv_layer *l = &kv->layers[il];
    if (l->ring && (l->window + n_tok + KV_PAGE - 1) / KV_PAGE + 1 > l->n_slot)
        return err_set(ERR_ARG, "layer %d: %d tokens in one call, but its window was opened for fewer", il, n_tok);
    return 0;
}

/* Which value of the position could not be stored; it is looked for only after a failure. */
static int report_bad(const struct put_job *j, int64_t pos) {
    const struct kv_layer *l = &j->kv->layers[j->il];
    size_t t = (size_t)(pos - j->pos0), nk = (size_t)l->n_kv * (size_t)l->head_dim_k, nv = (size_t)l->n_kv * (size_t)l->head_dim_v;
    float worst = 0;
    bool key = false;
    for (size_t i = 0; i < nk + nv; i++) {
        float x = i < nk ? j->k[t * nk + i] : j->v[t * nv + i - nk];
        if (fabsf(x) <= fabsf(worst)) continue;
        worst = x;
        key = i < nk;
        if (isnan(x)) break;
    }
    int type = key ? l->type_k : l->type_v;
    return err_set(ERR_NUMERIC, "layer %d, position %lld: a %s of %g cannot be stored as %s (at most %g)", j->il, (long long)pos,
                   key ? "key" : "value", (double)worst, quant_name(type), (double)kv_type_max(type));
}

static int kv_put(struct ops *ops, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v) {
    struct cpu *c = (struct cpu *)ops;
    int rc = check_range(kv, il, pos0, n_tok);
    if (rc) return rc;
    const struct kv_layer *l = &kv->layers[il];
    struct put_job *j = &c->attn->put_job;
    *j = (struct put_job){.kv = kv, .il = il, .n_tok = n_tok, .pos0 = pos0, .k = k, .v = v, .first_page = pos0 / KV_PAGE,
                          .bad = INT64_MAX};
    int n_task = (int)((pos0 + n_tok - 1) / KV_PAGE - j->first_page + 1) * l->n_kv;
    if ((int64_t)n_tok * l->n_kv * (l->head_dim_k + l->head_dim_v) < PUT_VALUES)
        for (int i = 0; i < n_task; i++) put_task(c->attn, i, 0);
    else
        pool_run(c->pool, put_task, c->attn, n_task);
    int64_t bad = atomic_load(&j->bad);
    return bad == INT64_MAX ? 0 : report_bad(j, bad);
}

/* --- attention --------------------------------------------------------------------------------------------------------- */

/* Rows first .. first + n of KV head `head`: limits and packed queries. */
static void load_rows(const struct attn_state *s, struct attn_rows *b, float *tmp, int head, int first, int n) {
    const struct job *j = &s->job;
    const struct attn_args *a = j->a;
    int dim = j->layer->head_dim_k;
    b->layer = j->layer;
    b->n_row = n;
    b->n_tile = (n + s->kern->tile - 1) / s->kern->tile;
    b->dim_o = j->dim_o;
    for (int t = 0; t <= b->n_tile; t++) b->tile_row[t] = (int)((int64_t)n * t / b->n_tile);
    for (int i = 0; i < n; i++) {
        int tok = (first + i) / j->group, h = head * j->group + (first + i) % j->group;
        b->hi[i] = a->pos0 + tok + 1;
        b->lo[i] = a->window && b->hi[i] > a->window ? b->hi[i] - a->window : 0;
        const float *q = a->q + ((size_t)tok * (size_t)a->n_head + (size_t)h) * (size_t)dim;
        if (j->layer->rotate_k) {
            memcpy(tmp, q, sizeof *q * (size_t)dim);
            kv_rotate(tmp, dim);
            q = tmp;
        }
        s->kern->pack(b, i, q, a->scale);
    }
}

/* Pages of one run that the loaded rows may see, into (o, m, l) of the rows. */
static void do_run(const struct attn_state *s, const struct attn_rows *b, int head, int64_t run) {
    const struct job *j = &s->job;
    int64_t lo = b->lo[0] / KV_PAGE, hi = (b->hi[b->n_row - 1] - 1) / KV_PAGE; /* rows are in order of position */
    int64_t first = run_first_page(j->layer, run), last = run_first_page(j->layer, run + 1) - 1;
    if (first < j->page_first) first = j->page_first;
    if (last >= j->page_end) last = j->page_end - 1;
    s->kern->clear(b);
    for (int64_t page = first > lo ? first : lo; page <= last && page <= hi; page++)
        s->kern->page(b, kv_head(j->a->kv, j->a->il, page * KV_PAGE, head), kv_head(j->a->kv, j->a->il, (page + 1) * KV_PAGE, head),
                      page * KV_PAGE);
}

/* o / l of a row to its place in the output, or all three to that of a partial result. */
static void finish_row(struct attn_state *s, int head, int row, float *tmp, const float *o, float m, float l) {
    const struct job *j = &s->job;
    const struct attn_args *a = j->a;
    int tok = row / j->group, h = head * j->group + row % j->group, dim = j->layer->head_dim_v;
    size_t at = (size_t)tok * (size_t)a->n_head + (size_t)h;
    if (j->part) {
        float *p = j->part + at * (size_t)(dim + 2);
        memcpy(p, o, sizeof *p * (size_t)dim);
        p[dim] = m;
        p[dim + 1] = l;
        return;
    }
    float *dst = a->o + at * (size_t)dim;
    if (!(l > 0 && l < INFINITY)) note_bad(&s->bad, a->pos0 + tok);
    s->kern->finish(j->layer->rotate_v ? tmp : dst, o, l, dim);
    if (!j->layer->rotate_v) return;
    kv_rotate(tmp, dim);
    memcpy(dst, tmp, sizeof *dst * (size_t)dim);
}

/* Many rows: a task is one block and goes through all its runs. Late blocks see most and start first. */
static void block_task(void *arg, int task, int worker) {
    struct attn_state *s = arg;
    const struct job *j = &s->job;
    struct worker_scratch *w = &s->w[worker];
    int head = task % j->layer->n_kv, first = (j->n_block - 1 - task / j->layer->n_kv) * j->block_rows;
    int n = j->n_row - first < j->block_rows ? j->n_row - first : j->block_rows;
    struct attn_rows *b = &w->rows;
    load_rows(s, b, w->tmp, head, first, n);
    b->o = w->sum_o, b->m = w->sum_m, b->l = w->sum_l;
    s->kern->clear(b);
    b->o = w->run_o, b->m = w->run_m, b->l = w->run_l;
    int64_t from = b->lo[0] / KV_PAGE, to = (b->hi[n - 1] - 1) / KV_PAGE;
    if (from < j->page_first) from = j->page_first;
    if (to >= j->page_end) to = j->page_end - 1;
    int64_t last = run_of_page(j->layer, to);
    for (int64_t run = run_of_page(j->layer, from); from <= to && run <= last; run++) {
        do_run(s, b, head, run);
        for (int i = 0; i < n; i++) {
            size_t at = (size_t)i * (size_t)j->dim_o;
            s->kern->merge(w->sum_o + at, &w->sum_m[i], &w->sum_l[i], w->run_o + at, w->run_m[i], w->run_l[i], j->dim_o);
        }
    }
    for (int i = 0; i < n; i++)
        finish_row(s, head, first + i, w->tmp, w->sum_o + (size_t)i * (size_t)j->dim_o, w->sum_m[i], w->sum_l[i]);
}

static float *part_at(const struct attn_state *s, int run, int head, int row) {
    const struct job *j = &s->job;
    return s->part + (((size_t)run * (size_t)j->layer->n_kv + (size_t)head) * (size_t)j->n_row + (size_t)row) * (size_t)(j->dim_o + 2);
}

/* Few rows: the queries of each block are packed first, */
static void pack_task(void *arg, int task, int worker) {
    struct attn_state *s = arg;
    const struct job *j = &s->job;
    int head = task % j->layer->n_kv, first = task / j->layer->n_kv * j->block_rows;
    int n = j->n_row - first < j->block_rows ? j->n_row - first : j->block_rows;
    load_rows(s, &s->slots[task], s->w[worker].tmp, head, first, n);
}

/* then a task is one run of one block; its (o, m, l) is kept. */
static void run_task(void *arg, int task, int worker) {
    struct attn_state *s = arg;
    const struct job *j = &s->job;
    struct worker_scratch *w = &s->w[worker];
    int n_slot = j->layer->n_kv * j->n_block, slot = task % n_slot, run = task / n_slot;
    int head = slot % j->layer->n_kv, first = slot / j->layer->n_kv * j->block_rows;
    struct attn_rows b = s->slots[slot];
    b.s = w->rows.s, b.ps = w->rows.ps, b.alpha = w->rows.alpha, b.beta = w->rows.beta, b.panel = w->rows.panel;
    b.o = w->run_o, b.m = w->run_m, b.l = w->run_l;
    do_run(s, &b, head, j->run_first + run);
    for (int i = 0; i < b.n_row; i++) {
        float *p = part_at(s, run, head, first + i);
        memcpy(p, w->run_o + (size_t)i * (size_t)j->dim_o, sizeof *p * (size_t)j->dim_o);
        p[j->dim_o] = w->run_m[i];
        p[j->dim_o + 1] = w->run_l[i];
    }
}

static void merge_task(void *arg, int task, int worker) {
    struct attn_state *s = arg;
    const struct job *j = &s->job;
    struct worker_scratch *w = &s->w[worker];
    int end = (task + 1) * MERGE_ROWS, all = j->layer->n_kv * j->n_row;
    for (int i = task * MERGE_ROWS; i < end && i < all; i++) {
        int head = i / j->n_row, row = i % j->n_row;
        float m = -INFINITY, l = 0, *o = w->sum_o;
        memset(o, 0, sizeof *o * (size_t)j->dim_o);
        for (int run = 0; run < j->n_run; run++) {
            const float *p = part_at(s, run, head, row);
            s->kern->merge(o, &m, &l, p, p[j->dim_o], p[j->dim_o + 1], j->dim_o);
        }
        finish_row(s, head, row, w->tmp, o, m, l);
    }
}

static int check_args(const struct cpu *c, const struct attn_args *a) {
    int rc = check_range(a->kv, a->il, a->pos0, a->n_tok);
    if (rc) return rc;
    const struct kv_layer *l = &a->kv->layers[a->il];
    const struct ops_limits *lim = &c->opts.limits;
    if (a->n_head < 1 || a->n_head % l->n_kv || a->n_head > lim->n_head || l->head_dim_k > lim->head_dim || l->head_dim_v > lim->head_dim)
        return err_set(ERR_ARG, "attention of layer %d: %d query heads of size %d/%d over %d KV heads; opened for %d heads of size %d",
                       a->il, a->n_head, l->head_dim_k, l->head_dim_v, l->n_kv, lim->n_head, lim->head_dim);
    if (a->window < 0 || (l->ring && (a->window == 0 || a->window > l->window)))
        return err_set(ERR_ARG, "attention of layer %d asks for a window of %lld, its KV cache keeps %lld", a->il,
                       (long long)a->window, (long long)l->window);
    return 0;
}

/* Whether every run becomes a task. Results are the same either way. */
static bool split_runs(const struct attn_state *s, const struct job *j, int n_thread) {
    size_t need = (size_t)j->n_run * (size_t)j->layer->n_kv * (size_t)j->n_row * (size_t)(j->dim_o + 2);
    int blocks = j->layer->n_kv * j->n_block;
    return j->n_run > 1 && blocks < TASKS_PER_THREAD * n_thread && blocks <= s->n_slot && need <= s->part_floats;
}

/* Pages page_first .. page_end that the queries see; there is one. */
static void attend(struct cpu *c, const struct attn_args *a, int64_t page_first, int64_t page_end, float *part) {
    struct attn_state *s = c->attn;
    struct job *j = &s->job;
    const struct kv_layer *l = &a->kv->layers[a->il];
    *j = (struct job){.a = a, .layer = l, .group = a->n_head / l->n_kv, .page_first = page_first, .page_end = page_end, .part = part};
    j->n_row = a->n_tok * j->group;
    j->n_block = (j->n_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
    j->block_rows = (j->n_row + j->n_block - 1) / j->n_block;
    j->n_block = (j->n_row + j->block_rows - 1) / j->block_rows;
    j->dim_o = (l->head_dim_v + KV_LANES - 1) / KV_LANES * KV_LANES;
    j->run_first = run_of_page(l, page_first);
    j->n_run = (int)(run_of_page(l, page_end - 1) - j->run_first + 1);
    atomic_store(&s->bad, INT64_MAX);
    if (split_runs(s, j, pool_threads(c->pool))) {
        pool_run(c->pool, pack_task, s, l->n_kv * j->n_block);
        pool_run(c->pool, run_task, s, l->n_kv * j->n_block * j->n_run);
        pool_run(c->pool, merge_task, s, (l->n_kv * j->n_row + MERGE_ROWS - 1) / MERGE_ROWS);
    } else {
        pool_run(c->pool, block_task, s, l->n_kv * j->n_block);
    }
}

/* First page that any query sees, and the one behind the last. */
static int64_t pages_seen(int64_t *end, const struct attn_args *a) {
    *end = (a->pos0 + a->n_tok - 1) / KV_PAGE + 1;
    return (a->window && a->pos0 + 1 > a->window ? a->pos0 + 1 - a->window : 0) / KV_PAGE;
}

static int attn(struct ops *ops, const struct attn_args *a) {
    struct cpu *c = (struct cpu *)ops;
    int rc = check_args(c, a);
    if (rc) return rc;
    int64_t end, first = pages_seen(&end, a);
    attend(c, a, first, end, NULL);
    int64_t bad = atomic_load(&c->attn->bad);
    if (bad == INT64_MAX) return 0;
    return err_set(ERR_NUMERIC, "layer %d, position %lld: attention gave a NaN or an infinity", a->il, (long long)bad);
}

int cpu_attn_pages(struct cpu *c, const struct attn_args *a, int64_t first, int64_t end, float *part) {
    int rc = check_args(c, a);
    if (rc) return rc;
    int64_t seen_end, seen = pages_seen(&seen_end, a);
    if (first < seen) first = seen;
    if (end > seen_end) end = seen_end;
    if (first < end) {
        attend(c, a, first, end, part);
        return 0;
    }
    int dim = a->kv->layers[a->il].head_dim_v;
    for (int i = 0; i < a->n_tok * a->n_head; i++) {
        float *p = part + (size_t)i * (size_t)(dim + 2);
        memset(p, 0, sizeof *p * (size_t)(dim + 2));
        p[dim] = -INFINITY;
    }
    return 0;
}
