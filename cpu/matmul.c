/* matmul.c: products of weight matrices with tokens over the thread pool, and row lookup. See matmul.h. */
#include "cpu/matmul.h"

#include "core/err.h"
#include "core/mem.h"

#include <string.h>

enum {
    REUSE_TASK_BYTES = 192 << 10, /* weights of a task that several column blocks use: stay in the second-level cache */
    PIECE_BYTES = 10 << 10,       /* activations of a column block that stay in the first-level cache */
    TASKS_PER_THREAD = 6,         /* at least, where there is enough work: evens out unequal threads */
    PREFETCH_BYTES = 5120,        /* ahead of the weights at work, when all of a strip is read in one go */
    PREFETCH_L2_BYTES = 16 << 10, /* the same where that is into the second-level cache */
    PANEL_FLOATS = 64 << 10,      /* per worker: plain weights for many columns */
    PLAIN_PIECE_BYTES = 16 << 10, /* PIECE_BYTES then: sums in y are read and written less often */
    PLAIN_STRIPS = 16,            /* of a task then */
    PLAIN_BLOCKS = 3,             /* column blocks from which that pays */
    PREPARE_COLS = 4096           /* elements prepared by a task; fewer in all are not worth waking the pool for */
};

static int64_t div_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}
static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int tile_width(const struct matmul_state *s, int type) {
    return matmul_is_plain(type) ? s->kern->plain_cols : s->kern->cols;
}

size_t matmul_token_bytes(int type, int64_t cols) {
    if (!matmul_is_plain(type)) return (size_t)(cols / 32) * sizeof(struct xq);
    return (size_t)(cols + cols % 2) * sizeof(float);
}

/* Bytes of prepared activations that one block of a strip multiplies with, per token. */
static size_t block_x_bytes(int type) {
    if (!matmul_is_plain(type)) return (size_t)(quant_info(type)->block_elems / 32) * sizeof(struct xq);
    return type == QT_F32 ? sizeof(float) : 2 * sizeof(float);
}

/* ---- activations ---- */

struct prepare_job {
    struct matmul_state *s;
    const struct prepare *p;
};

static int prepare_tasks(const struct prepare *p) {
    return p->n_tok * (int)div_up(p->cols, PREPARE_COLS);
}

/* Elements k0..k1-1 of token t. */
static void prepare_part(struct matmul_state *s, const struct prepare *p, int t, int64_t k0, int64_t k1) {
    int width = tile_width(s, p->type), block = t / width;
    int64_t stride = min64(width, p->n_tok - block * width);
    const float *x = p->x + (p->rows ? p->rows[t] : t) * p->cols;
    uint8_t *base = (uint8_t *)p->dst + (size_t)block * (size_t)width * matmul_token_bytes(p->type, p->cols);
    if (!matmul_is_plain(p->type)) {
        struct xq *dst = (struct xq *)(void *)base + t % width + k0 / 32 * stride;
        s->kern->quantize(dst, stride, x + k0, k1 - k0);
        return;
    }
    float *dst = (float *)(void *)base + t % width;
    for (int64_t k = k0; k < k1; k++) dst[k * stride] = x[k];
    if (k1 == p->cols && p->cols % 2) dst[p->cols * stride] = 0;
}

static void prepare_task(void *arg, int task, int worker) {
    (void)worker;
    struct prepare_job *j = arg;
    const struct prepare *p = j->p;
    for (; task >= prepare_tasks(p); p++) task -= prepare_tasks(p);
    int64_t k0 = task / p->n_tok * (int64_t)PREPARE_COLS;
    prepare_part(j->s, p, task % p->n_tok, k0, min64(p->cols, k0 + PREPARE_COLS));
}

void prepare_run(struct cpu *c, const struct prepare *p, int n) {
    struct prepare_job j = {c->matmul, p};
    int64_t elements = 0;
    int n_task = 0;
    for (int i = 0; i < n; i++) elements += p[i].n_tok * p[i].cols, n_task += prepare_tasks(&p[i]);
    if (elements > PREPARE_COLS)
        pool_run(c->pool, prepare_task, &j, n_task);
    else
        for (int i = 0; i < n_task; i++) prepare_task(&j, i, 0);
}

/* ---- products ---- */

/* Strips and columns per task when several column blocks use the weights: a task's strips stay in cache while the column
 * blocks pass, and columns are split only if strips alone would leave threads without work. */
static void cut_product(const struct cpu *c, struct product *p, int64_t job_strips) {
    int64_t n_block = div_up(p->n_tok, p->width), want = (int64_t)TASKS_PER_THREAD * pool_threads(c->pool);
    bool plain = matmul_is_plain(p->w.type) && n_block >= PLAIN_BLOCKS;
    int64_t most = plain ? PLAIN_STRIPS : REUSE_TASK_BYTES / (int64_t)p->l.strip_bytes;
    p->strips = max64(1, min64(most, job_strips / want));
    p->cols = n_block;
    int64_t tasks = div_up(job_strips, p->strips);
    if (tasks < want) p->cols = max64(1, n_block / div_up(want, tasks));
    p->n_col_task = (int)div_up(n_block, p->cols);
}

/* Blocks of a row per pass over the column blocks: their activations should stay in the first-level cache. */
static int64_t piece_blocks(const struct product *p, int64_t n_col_block) {
    if (n_col_block == 1) return p->l.n_block;
    return max64(1, PIECE_BYTES / ((int64_t)block_x_bytes(p->w.type) * p->width));
}

static struct matmul_tile tile_of(const struct product *p, int64_t strip, int64_t col_block, int64_t b0,
                                  int64_t n_block) {
    const struct strip_layout *l = &p->l;
    const uint8_t *base = (const uint8_t *)p->w.data + (size_t)strip * l->strip_bytes;
    int64_t t0 = col_block * p->width, row = strip * STRIP_ROWS;
    int stride = (int)min64(p->width, p->n_tok - t0);
    const uint8_t *x = (const uint8_t *)p->x + (size_t)t0 * matmul_token_bytes(p->w.type, p->w.cols);
    bool whole = n_block == l->n_block;
    return (struct matmul_tile){
        .words = base + (size_t)b0 * (size_t)l->n_word * 4 * STRIP_ROWS,
        .scales = base + l->scales_off + (size_t)b0 * (size_t)l->scale_bytes * STRIP_ROWS,
        .second = (ptrdiff_t)l->strip_bytes,
        .n_block = n_block,
        .x = x + (size_t)b0 * block_x_bytes(p->w.type) * (size_t)stride,
        .stride = stride,
        .n_col = stride,
        .n_row = (int)min64(STRIP_ROWS, p->w.rows - row),
        .y = p->y + t0 * p->w.rows + row,
        .y_stride = p->w.rows,
        .ahead = !whole ? (ptrdiff_t)l->strip_bytes : p->to_l2 ? PREFETCH_L2_BYTES : PREFETCH_BYTES,
        .to_l2 = whole && p->to_l2,
        .next = (ptrdiff_t)l->strip_bytes,
        .resume = b0 > 0,
        .bias = p->bias && b0 + n_block == l->n_block ? p->bias + row : NULL,
    };
}

/* Plain weights and many column blocks: piece by piece of the rows, copied as f32 to a panel of this worker, so that the
 * pieces of all strips of the task lie together in the second-level cache while the column blocks pass. (Where they are,
 * strips of 2^n columns share the same few sets of a cache.) */
static void run_plain(const struct matmul_state *m, const struct product *p, int64_t s0, int64_t s1, int64_t c0,
                      int64_t c1, int worker) {
    float *panel = m->panels + (size_t)worker * PANEL_FLOATS;
    const int per_block = p->w.type == QT_F32 ? 1 : 2, step = m->kern->plain_strips;
    int64_t piece = PLAIN_PIECE_BYTES / ((int64_t)block_x_bytes(p->w.type) * p->width);
    piece = min64(piece, PANEL_FLOATS / (per_block * STRIP_ROWS * (s1 - s0)));
    for (int64_t b = 0; b < p->l.n_block; b += piece) {
        int64_t n = min64(piece, p->l.n_block - b), floats = per_block * n * STRIP_ROWS;
        for (int64_t s = s0; s < s1; s++)
            m->kern->widen(panel + (s - s0) * floats, p->w.type, tile_of(p, s, c0, b, n).words, n);
        for (int64_t cb = c0; cb < c1; cb++)
            for (int64_t s = s0; s < s1; s += step) {
                struct matmul_tile t = tile_of(p, s, cb, b, n);
                t.words = (const uint8_t *)(panel + (s - s0) * floats);
                t.n_block = per_block * n;
                t.second = floats * (int64_t)sizeof(float);
                t.ahead = t.second * step;
                if (step == 2 && s + 1 < s1) t.n_row = (int)min64(2 * STRIP_ROWS, p->w.rows - s * STRIP_ROWS);
                m->kern->tile[QT_F32](&t);
            }
    }
}

struct products_job {
    const struct matmul_state *m;
    struct product *p;
    int n, n_thread;
    int64_t strips; /* of all products */
};

/* The last product whose `first` is not after i. */
static const struct product *product_at(const struct products_job *j, int64_t i) {
    int lo = 0, hi = j->n - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (j->p[mid].first <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &j->p[lo];
}

/* One product's strips s0..s1-1 with its column blocks c0..c1-1. */
static void run_part(const struct matmul_state *m, const struct product *p, int64_t s0, int64_t s1, int64_t c0,
                     int64_t c1, int worker) {
    if (matmul_is_plain(p->w.type) && c1 - c0 >= PLAIN_BLOCKS) {
        run_plain(m, p, s0, s1, c0, c1, worker);
        return;
    }
    int64_t piece = piece_blocks(p, c1 - c0);
    for (int64_t cb = c0; cb < c1; cb++)
        for (int64_t b = 0; b < p->l.n_block; b += piece)
            for (int64_t s = s0; s < s1; s++) {
                struct matmul_tile t = tile_of(p, s, cb, b, min64(piece, p->l.n_block - b));
                p->tile(&t);
            }
}

static void reuse_task(void *arg, int task, int worker) {
    const struct products_job *j = arg;
    const struct product *p = product_at(j, task);
    task -= (int)p->first;
    int64_t s0 = task / p->n_col_task * p->strips, c0 = task % p->n_col_task * p->cols;
    run_part(j->m, p, s0, min64(p->l.n_strip, s0 + p->strips), c0, min64(div_up(p->n_tok, p->width), c0 + p->cols),
             worker);
}

/* When weights are read once, each thread should walk through memory in long runs, yet all should end together: the first
 * tasks take half of all strips, the next a quarter, then an eighth, then sixteenths, each divided by the threads. */
enum { STREAM_LEVELS = 3, STREAM_TASKS = STREAM_LEVELS + 2 /* per thread */ };

static int64_t stream_begin(const struct products_job *j, int task) {
    int level = task / j->n_thread < STREAM_LEVELS ? task / j->n_thread : STREAM_LEVELS;
    int64_t n = j->n_thread, sixteenths = ((1LL << level) - 1) * 2 * n + task - level * n;
    return j->strips * sixteenths / (n << (level + 1));
}

static void stream_task(void *arg, int task, int worker) {
    const struct products_job *j = arg;
    int64_t end = stream_begin(j, task + 1);
    for (int64_t s = stream_begin(j, task); s < end;) {
        const struct product *p = product_at(j, s);
        int64_t s0 = s - p->first, s1 = min64(p->l.n_strip, end - p->first);
        run_part(j->m, p, s0, s1, 0, 1, worker);
        s = p->first + s1;
    }
}

/* Types whose words are not read in the order in which they lie, or whose scales lie apart: Zen 4's own prefetcher does not
 * follow them, and few misses of the first-level cache are under way at a time. Prefetched into the second-level cache they
 * come 1.2 to 2.2 times as fast there (one thread: Q6_K 10.4 to 23 GB/s, Q4_0 16 to 20, Q3_K 10 to 17). Types that are read
 * in order lose a tenth by that, and what an Intel Xeon does best with is the first-level cache for all. */
static bool is_out_of_order(int type) {
    return type == QT_Q4_0 || type == QT_Q5_0 || type == QT_Q2_K || type == QT_Q3_K || type == QT_Q6_K;
}

static int lay_out(struct cpu *c, struct product *p) {
    const struct mat *w = &p->w;
    if (!strip_layout(&p->l, w->type, w->rows, w->cols))
        return err_set(ERR_ARG, "matmul: no kernel for %s [%lld, %lld]", quant_name(w->type), (long long)w->rows,
                       (long long)w->cols);
    p->tile = c->matmul->kern->tile[w->type];
    p->to_l2 = c->matmul->is_amd && is_out_of_order(w->type);
    p->width = tile_width(c->matmul, w->type);
    return 0;
}

int products_run(struct cpu *c, struct product *p, int n) {
    struct products_job j = {.m = c->matmul, .p = p, .n_thread = pool_threads(c->pool)};
    bool read_once = true;
    for (int i = 0; i < n; i++) {
        int rc = lay_out(c, &p[i]);
        if (rc) return rc;
        if (p[i].n_tok <= 0) continue; /* drops out */
        read_once &= p[i].n_tok <= p[i].width;
        j.strips += p[i].l.n_strip;
        p[j.n++] = p[i];
    }
    int64_t first = 0;
    for (int i = 0; i < j.n; i++) {
        p[i].first = first;
        if (!read_once) cut_product(c, &p[i], j.strips);
        first += read_once ? p[i].l.n_strip : div_up(p[i].l.n_strip, p[i].strips) * p[i].n_col_task;
    }
    if (first > INT32_MAX) return err_set(ERR_ARG, "matmul: %lld tasks", (long long)first);
    if (j.n && read_once)
        pool_run(c->pool, stream_task, &j, STREAM_TASKS * j.n_thread);
    else if (j.n)
        pool_run(c->pool, reuse_task, &j, (int)first);
    return 0;
}

/* ---- ops ---- */

static int check_matmul(const struct cpu *c, const struct matmul *m) {
    if (m->n < 1 || m->n > MATMUL_MAX || m->n_tok < 0 || m->n_tok > c->opts.limits.n_tok)
        return err_set(ERR_ARG, "matmul: %d products of %d tokens (opened for %d products, %d tokens)", m->n, m->n_tok,
                       MATMUL_MAX, c->opts.limits.n_tok);
    for (int i = 0; i < m->n; i++) {
        const struct mat *w = m->out[i].w;
        if (w->cols != m->cols || w->cols > c->opts.limits.cols || w->rows > c->opts.limits.rows)
            return err_set(ERR_ARG, "matmul: weights [%lld, %lld] for %lld inputs (opened for [%lld, %lld])",
                           (long long)w->rows, (long long)w->cols, (long long)m->cols, (long long)c->opts.limits.rows,
                           (long long)c->opts.limits.cols);
    }
    return 0;
}

/* One chunk of tokens from t0. */
static int matmul_chunk(struct cpu *c, const struct matmul *m, int t0, int n_tok) {
    struct matmul_state *s = c->matmul;
    struct product p[MATMUL_MAX];
    struct prepare prep[2];
    const void *quantised = NULL, *plain = NULL;
    int n_prep = 0;
    const float *x = m->x + t0 * m->cols;
    for (int i = 0; i < m->n; i++) {
        const struct mat *w = m->out[i].w;
        const void **prepared = matmul_is_plain(w->type) ? &plain : &quantised;
        if (!*prepared && matmul_is_plain(w->type) && n_tok == 1 && m->cols % 2 == 0) *prepared = x;
        if (!*prepared) {
            void *dst = matmul_is_plain(w->type) ? (void *)s->plain : s->quantised;
            prep[n_prep++] = (struct prepare){.dst = dst, .x = x, .cols = m->cols, .n_tok = n_tok, .type = w->type};
            *prepared = dst;
        }
        p[i] = (struct product){
            .w = *w, .x = *prepared, .n_tok = n_tok, .y = m->out[i].y + t0 * w->rows, .bias = m->out[i].bias};
    }
    prepare_run(c, prep, n_prep);
    return products_run(c, p, m->n);
}

static int op_matmul(struct ops *o, const struct matmul *m) {
    struct cpu *c = (struct cpu *)o;
    int rc = check_matmul(c, m);
    for (int t = 0; t < m->n_tok && !rc; t += c->matmul->n_tok)
        rc = matmul_chunk(c, m, t, (int)min64(c->matmul->n_tok, m->n_tok - t));
    return rc;
}

struct embed_job {
    float *x;
    const struct mat *embd;
    const int32_t *ids;
    float scale;
};

static void embed_task(void *arg, int t, int worker) {
    (void)worker;
    const struct embed_job *j = arg;
    float *x = j->x + t * j->embd->cols;
    strip_decode_row(j->embd->type, j->embd->data, j->embd->rows, j->embd->cols, j->ids[t], x);
    if (j->scale != 1)
        for (int64_t i = 0; i < j->embd->cols; i++) x[i] *= j->scale;
}

static int op_embed(struct ops *o, float *x, const struct mat *embd, const int32_t *ids, int n_tok, float scale) {
    struct cpu *c = (struct cpu *)o;
    struct strip_layout l;
    if (!strip_layout(&l, embd->type, embd->rows, embd->cols))
        return err_set(ERR_ARG, "embed: %s [%lld, %lld] cannot be decoded", quant_name(embd->type),
                       (long long)embd->rows, (long long)embd->cols);
    for (int t = 0; t < n_tok; t++)
        if (ids[t] < 0 || ids[t] >= embd->rows)
            return err_set(ERR_ARG, "embed: token id %d, the vocabulary has %lld", ids[t], (long long)embd->rows);
    struct embed_job j = {x, embd, ids, scale};
    pool_run(c->pool, embed_task, &j, n_tok);
    return 0;
}

/* ---- open and close ---- */

static int chunk_tokens(const struct cpu_opts *o) {
    int n = o->limits.n_tok < MATMUL_TOKENS ? o->limits.n_tok : MATMUL_TOKENS;
    return n > 1 ? n : 1;
}

static size_t quantised_bytes(const struct cpu_opts *o) {
    return size_mul3((size_t)chunk_tokens(o), (size_t)div_up(o->limits.cols, 32), sizeof(struct xq));
}

static size_t plain_bytes(const struct cpu_opts *o) {
    return size_mul3((size_t)chunk_tokens(o), (size_t)o->limits.cols + 1, sizeof(float));
}

static size_t panel_bytes(const struct cpu_opts *o) {
    return size_mul3((size_t)o->n_thread, PANEL_FLOATS, sizeof(float));
}

size_t matmul_scratch_bytes(const struct cpu_opts *o) {
    size_t sum = sizeof(struct matmul_state);
    if (!size_add(&sum, sum, quantised_bytes(o)) || !size_add(&sum, sum, plain_bytes(o)) ||
        !size_add(&sum, sum, panel_bytes(o)) || !size_add(&sum, sum, experts_scratch_bytes(o)))
        return SIZE_MAX;
    return sum;
}

static bool is_amd(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

int matmul_open(struct cpu *c) {
    struct matmul_state *s = mem_alloc(sizeof *s, 64, "matmul");
    if (!s) return ERR_NOMEM;
    c->matmul = s;
    s->kern = kern_matmul_pick(c->opts.isa);
    s->is_amd = is_amd();
    s->n_tok = chunk_tokens(&c->opts);
    s->quantised = mem_alloc(quantised_bytes(&c->opts), 64, "quantised activations");
    s->plain = mem_alloc(plain_bytes(&c->opts), 64, "activations");
    s->panels = mem_alloc(panel_bytes(&c->opts), 64, "widened weights");
    int rc = s->quantised && s->plain && s->panels ? experts_open(c, s) : ERR_NOMEM;
    if (rc) {
        matmul_close(c);
        return rc;
    }
    c->ops.matmul = op_matmul;
    c->ops.embed = op_embed;
    return 0;
}

void matmul_close(struct cpu *c) {
    if (!c->matmul) return;
    experts_close(c->matmul);
    mem_free(c->matmul->panels);
    mem_free(c->matmul->plain);
    mem_free(c->matmul->quantised);
    mem_free(c->matmul);
    c->matmul = NULL;
}
