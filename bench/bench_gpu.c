/* bench_gpu.c: operations of the GPU back end against what the card can do. Each is checked first, then timed. One CSV row per
 * point, medians with the spread.
 *
 *   bench_gpu [--device I] [--op NAME,..] [--type T,..] [--n N,..] [--dim D] [--rows R] [--depth P] [--mib M] [--reps K]
 *             [--small]
 *
 * bytes and flops are those of the cost table (core/cost.h), which the planner uses as well: what must move once. copy_share is
 * of the card's own copies, measured in the same run (read + written bytes); gemm_share of cuBLAS, f16 with f32 sums, on a
 * square product. Products use --mib of weights in turn, more than caches hold. Times are between events on the stream around
 * many calls. error is the largest one found, as a share of what is allowed. Status 1: a result was wrong.
 * --small: sizes for the emulator, where times are those of a described machine ("simulated"). */
#include "bench/common.h"
#include "core/cost.h"
#include "core/err.h"
#include "core/kv.h"
#include "cpu/cpu.h"
#include "gpu/gpu.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#if defined(GPU_EMU)
enum { SIMULATED = 1 };
#else
enum { SIMULATED = 0 };
#endif

enum { MAX_LIST = 32, MAX_REPS = 101, MAX_BUF = 14, MAX_PARTS = 64, STAGING = 16 << 20, N_CONV = 4, N_EXPERT = 32, N_USED = 4 };

struct options {
    int device, reps;
    int types[MAX_LIST], n_type, n[MAX_LIST], n_n;
    const char *ops;
    int dim, n_head, n_kv, head_dim, n_expert;
    int64_t rows, depth, mib;
    bool small;
};

struct card {
    struct gpu *g;
    struct gpu_arena *arena;
    struct gpu_stream *stream;
    struct gpu_ops *ops;
    struct gpu_event *from, *to;
    void *staging; /* pinned, STAGING bytes */
    size_t mark;
    double copy_gbps, gemm_tflops;
    struct cpu *cpu; /* the reference of all but products */
    uint64_t seed;
    int bad;
};

static void check(int rc) {
    if (!rc) return;
    fprintf(stderr, "bench_gpu: %s\n", err_text());
    exit(err_exit_status(rc));
}

static void *memory(size_t bytes) {
    void *p = mem_alloc(bytes ? bytes : 1, 64, "bench data");
    if (!p) check(ERR_NOMEM);
    return p;
}

/* About N(0,1), and quick: the sum of four uniform values. */
static float normal(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    uint64_t s = *seed >> 16;
    int sum = (int)(s & 4095) + (int)(s >> 12 & 4095) + (int)(s >> 24 & 4095) + (int)(s >> 36 & 4095) - 8190;
    return (float)sum * (1.0f / 2364.0f);
}

/* --- a point: an operation, its data on both sides -------------------------------------------------------------------------- */

/* HOST: a host array for both back ends. OUT: compared after the first call. */
enum kind { BUF_IN, BUF_OUT, BUF_HOST, BUF_KV };
struct buf {
    enum kind kind;
    size_t bytes;
    void *host, *dev;
};
struct point;
typedef int (*call_fn)(struct ops *t, void *const *p, const struct point *q, int64_t turn);
struct point {
    const char *op;
    char what[48];
    int n;
    int64_t depth;
    call_fn call;
    struct buf b[MAX_BUF];
    int n_buf;
    double tolerance; /* of an element, as a share of the largest reference value */
    bool product;     /* checked against sums in double instead of the CPU back end */
    int type;
    int64_t rows, cols, copies;
    size_t matrix_bytes;
    const struct options *o;
    struct kv_layer d_layer;
    struct kv d_kv;
};

static void *add_buf(struct point *q, enum kind kind, size_t bytes) {
    struct buf *b = &q->b[q->n_buf++];
    *b = (struct buf){kind, bytes, memory(bytes), NULL};
    if (kind == BUF_OUT) memset(b->host, 0xff, bytes); /* NaN */
    return b->host;
}

static float *add_normals(struct point *q, struct card *c, enum kind kind, size_t n, float scale) {
    float *x = add_buf(q, kind, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * normal(&c->seed);
    return x;
}

static void add_ids(struct point *q, struct card *c, enum kind kind, int n, int below) {
    int32_t *ids = add_buf(q, kind, (size_t)n * sizeof *ids);
    for (int i = 0; i < n; i++) c->seed = c->seed * 6364136223846793005u + 1442695040888963407u, ids[i] = (int32_t)((c->seed >> 33) % (uint64_t)below);
}

/* `copies` matrices of the type. false: the type has no such matrix. */
static bool add_weights(struct point *q, int type, int64_t rows, int64_t cols, int64_t copies) {
    struct strip_layout l;
    if (!strip_layout(&l, type, rows, cols)) return false;
    struct buf *b = &q->b[q->n_buf++];
    *b = (struct buf){BUF_IN, l.bytes * (size_t)copies, random_matrices(&l, type, cols, copies), NULL};
    if (!b->host) check(err_set(ERR_NOMEM, "out of memory for %lld matrices of %zu bytes", (long long)copies, l.bytes));
    q->matrix_bytes = l.bytes;
    return true;
}

static void add_kv(struct point *q, int type, int64_t n_ctx, int n_tok, bool filled) {
    const struct options *o = q->o;
    struct kv_shape shape = {o->n_kv, o->head_dim, o->head_dim, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = n_tok, .type_k = type, .type_v = type};
    struct kv *kv;
    check(kv_open(&kv, &spec));
    if (filled) check(kv_fill_synthetic(kv, n_ctx, 5));
    q->b[q->n_buf++] = (struct buf){BUF_KV, kv->layers[0].bytes, kv, NULL};
}

static void to_card(struct card *c, void *d_dst, const void *src, size_t bytes) {
    for (size_t at = 0; at < bytes; at += STAGING) {
        size_t n = bytes - at < STAGING ? bytes - at : STAGING;
        memcpy(c->staging, (const char *)src + at, n);
        check(gpu_copy_in(c->stream, (char *)d_dst + at, c->staging, n));
        check(gpu_stream_sync(c->stream));
    }
}

static void from_card(struct card *c, void *dst, const void *d_src, size_t bytes) {
    for (size_t at = 0; at < bytes; at += STAGING) {
        size_t n = bytes - at < STAGING ? bytes - at : STAGING;
        check(gpu_copy_out(c->stream, c->staging, (const char *)d_src + at, n));
        check(gpu_stream_sync(c->stream));
        memcpy((char *)dst + at, c->staging, n);
    }
}

static void upload(struct card *c, struct point *q) {
    for (int i = 0; i < q->n_buf; i++) {
        struct buf *b = &q->b[i];
        b->dev = b->host;
        if (b->kind == BUF_HOST) continue;
        void *d_p;
        check(gpu_alloc(&d_p, c->arena, b->bytes, "bench data"));
        if (b->kind != BUF_KV) {
            to_card(c, d_p, b->host, b->bytes);
            b->dev = d_p;
            continue;
        }
        const struct kv *kv = b->host;
        to_card(c, d_p, kv->layers[0].base, b->bytes);
        q->d_layer = kv->layers[0];
        q->d_layer.base = d_p;
        q->d_kv = *kv;
        q->d_kv.layers = &q->d_layer;
        b->dev = &q->d_kv;
    }
}

static void drop(struct card *c, struct point *q) {
    check(gpu_stream_sync(c->stream));
    for (int i = 0; i < q->n_buf; i++) {
        if (q->b[i].kind == BUF_KV) kv_close(q->b[i].host);
        else mem_free(q->b[i].host);
    }
    gpu_arena_release(c->arena, c->mark);
}

static int call_host(struct ops *t, const struct point *q) {
    void *p[MAX_BUF];
    for (int i = 0; i < q->n_buf; i++) p[i] = q->b[i].host;
    return q->call(t, p, q, 0);
}

static int call_card(struct card *c, const struct point *q, int64_t turn) {
    void *p[MAX_BUF];
    for (int i = 0; i < q->n_buf; i++) p[i] = q->b[i].dev;
    struct ops *t = gpu_ops_table(c->ops);
    return q->call(t, p, q, turn);
}

/* --- checks ------------------------------------------------------------------------------------------------------------------ */

/* Largest difference as a share of the tolerance; NaN counts as infinite. */
static double compare(const float *got, const float *want, size_t n, double tolerance) {
    double most = 0, scale = 0;
    for (size_t i = 0; i < n; i++) scale = fmax(scale, fabs((double)want[i]));
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - (double)want[i]) / (tolerance * scale + 1e-30);
        most = e <= most ? most : isnan(e) ? INFINITY : e;
    }
    return most;
}

/* Some rows and tokens of a product, summed in double. A back end may round x to 8 bits per 32 values, or x and the weights to
 * half, whichever its contract says for this many tokens: either is within half a step of the largest of the 32 times the
 * weights. f32 sums add the rest. */
static double check_product(const struct point *q, const float *y) {
    const float *x = q->b[1].host;
    float *w = memory((size_t)q->cols * sizeof *w);
    double most = 0;
    for (int64_t k = 0; k < 48; k++) {
        int64_t row = k < 24 ? k * 7 % q->rows : q->rows - 1 - (k * 5) % q->rows, t = k * 31 % q->n;
        strip_decode_row(q->type, q->b[0].host, q->rows, q->cols, row, w);
        double sum = 0, size = 0, step = 0, block = 0;
        for (int64_t i = 0; i < q->cols; i++) {
            if (i % 32 == 0) {
                block = 0;
                for (int64_t j = i; j < i + 32 && j < q->cols; j++) block = fmax(block, fabs((double)x[t * q->cols + j]));
            }
            double p = (double)w[i] * (double)x[t * q->cols + i];
            sum += p, size += fabs(p), step += fabs((double)w[i]) * block;
        }
        double e = fabs((double)y[t * q->rows + row] - sum) / (step / 254 + 1e-5 * size + 1e-30);
        most = e <= most ? most : isnan(e) ? INFINITY : e;
    }
    mem_free(w);
    return most;
}

/* Runs the point once on both sides. Returns the largest error as a share of what is allowed. */
static double check_point(struct card *c, struct point *q) {
    double most = 0;
    check(call_card(c, q, 0));
    check(gpu_ops_check(c->ops));
    if (!q->product) check(call_host(cpu_ops(c->cpu), q));
    for (int i = 0; i < q->n_buf; i++) {
        struct buf *b = &q->b[i];
        if (b->kind == BUF_KV && !strcmp(q->op, "kv_put")) { /* the same bytes */
            const struct kv *kv = b->host;
            unsigned char *got = memory(b->bytes);
            from_card(c, got, q->d_layer.base, b->bytes);
            if (memcmp(got, kv->layers[0].base, b->bytes)) most = INFINITY;
            mem_free(got);
        }
        if (b->kind != BUF_OUT) continue;
        float *got = memory(b->bytes);
        from_card(c, got, b->dev, b->bytes);
        double e = q->product ? check_product(q, got) : compare(got, b->host, b->bytes / sizeof *got, q->tolerance);
        most = e <= most ? most : e;
        mem_free(got);
    }
    return most;
}

/* --- time -------------------------------------------------------------------------------------------------------------------- */

/* Seconds per call of a group of `calls`. */
static double time_group(struct card *c, const struct point *q, int calls, int64_t *turn) {
    double s;
    check(gpu_event_record(c->from, c->stream));
    for (int i = 0; i < calls; i++) check(call_card(c, q, (*turn)++));
    check(gpu_event_record(c->to, c->stream));
    check(gpu_event_sync(c->to));
    check(gpu_event_seconds(&s, c->from, c->to));
    return s / calls;
}

static void run_point(struct card *c, const struct options *o, struct point *q) {
    upload(c, q);
    double error = check_point(c, q), v[MAX_REPS];
    if (!(error <= 1)) c->bad++;
    int64_t turn = 1;
    double once = time_group(c, q, 2, &turn);
    double wanted = o->small ? 2 : 4e-3 / (once > 1e-7 ? once : 1e-7);
    int calls = wanted < 2 ? 2 : wanted > 500 ? 500 : (int)wanted;
    for (int i = 0; i < o->reps; i++) v[i] = time_group(c, q, calls, &turn);
    double s = median(v, o->reps);
    struct cost cost;
    cost_open(&cost);
    check(call_host(&cost.ops, q));
    double bytes = cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes + cost.state_bytes + cost.act_bytes;
    double flops = cost.matmul_flops + cost.attn_flops + cost.delta_flops;
    double gbps = bytes / s * 1e-9, tflops = flops / s * 1e-12;
    printf("%s,%s,%d,%lld,%.0f,%.0f,%.4g,%.4g,%.4g,%.1f,%.3f,%.3f,%.3f,%.3f,%s,%s\n", q->op, q->what, q->n, (long long)q->depth, bytes,
           flops, s, v[0], v[o->reps - 1], gbps, gbps / c->copy_gbps, tflops, tflops / c->gemm_tflops, error,
           error <= 1 ? "ok" : "WRONG", SIMULATED ? "simulated" : "measured");
    fflush(stdout);
    drop(c, q);
}

/* --- the operations ------------------------------------------------------------------------------------------------------------ */

static struct mat mat_at(const void *data, const struct point *q, int64_t turn, int64_t rows, int64_t cols) {
    return (struct mat){(const char *)data + (size_t)(turn % q->copies) * q->matrix_bytes, q->type, rows, cols};
}

static int call_matmul(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    struct mat w = mat_at(p[0], q, turn, q->rows, q->cols);
    struct matmul m = {.x = p[1], .cols = q->cols, .n_tok = q->n, .n = 1, .out = {{&w, p[2], NULL}}};
    return t->matmul(t, &m);
}
static int call_embed(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    struct mat w = mat_at(p[0], q, turn, q->rows, q->cols);
    return t->embed(t, p[2], &w, p[1], q->n, 1.5f);
}
static int call_rmsnorm(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->rmsnorm(t, p[2], p[0], p[1], q->n, (int)q->cols, 1e-5f);
}
static int call_add(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->add(t, p[0], p[1], q->n * q->cols);
}
static int call_glu(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->glu(t, p[2], p[0], p[1], q->n * q->cols, ACT_SILU);
}
static int call_add_gated(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->add_gated(t, p[0], p[1], p[2], q->n, q->cols);
}
static int call_softcap(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->softcap(t, p[0], q->n * q->cols, 30);
}
static int call_gather(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->gather(t, p[2], p[1], p[0], q->n, q->cols);
}
static int call_rope_table(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->rope_table(t, p[1], p[0], q->o->head_dim / 2, 1, 200000, q->n);
}
static int call_rope(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    struct rope_args a = {.x = p[0], .n_tok = q->n, .n_head = q->o->n_head, .head_dim = q->o->head_dim, .norm = p[1], .eps = 1e-5f, .cs = p[2],
                          .n_rot = q->o->head_dim, .pairing = ROPE_NEOX};
    return t->rope(t, &a);
}
static int call_route(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->route(t, p[1], p[2], p[0], q->n, q->o->n_expert, N_USED, true);
}
static int call_experts(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    struct experts_args a = {.y = p[6], .x = p[3], .ids = p[4], .weight = p[5], .n_tok = q->n, .n_used = N_USED, .n_expert = q->o->n_expert,
                             .gate = {p[0], q->type, q->rows, q->cols}, .up = {p[1], q->type, q->rows, q->cols},
                             .down = {p[2], q->type, q->cols, q->rows}, .act = ACT_SILU};
    return t->experts(t, &a);
}
static int call_kv_put(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    return t->kv_put(t, p[0], 0, 100, q->n, p[1], p[2]);
}
static int call_attn(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    struct attn_args a = {.o = p[2], .q = p[1], .kv = p[0], .pos0 = q->depth, .n_tok = q->n, .n_head = q->o->n_head,
                          .scale = 1 / sqrtf((float)q->o->head_dim)};
    return t->attn(t, &a);
}
static struct delta_shape delta_of(const struct options *o) {
    return (struct delta_shape){.n_key = o->n_kv, .n_value = o->n_head, .dim = o->head_dim, .n_conv = DELTA_CONV};
}
static int call_delta(struct ops *t, void *const *p, const struct point *q, int64_t turn) {
    (void)turn;
    struct delta_args a = {.y = p[0], .u = p[1], .z = p[2], .b = p[3], .a = p[4], .conv = p[5], .dt = p[6], .rate = p[7], .norm = p[8],
                           .last = p[9], .s = p[10], .shape = delta_of(q->o), .n_tok = q->n, .eps = 1e-6f};
    return t->delta(t, &a);
}

/* --- the points ---------------------------------------------------------------------------------------------------------------- */

static struct point point_of(const struct options *o, const char *op, const char *what, int n, call_fn call, double tolerance) {
    struct point q = {.op = op, .n = n, .call = call, .o = o, .tolerance = tolerance, .rows = o->rows, .cols = o->dim, .copies = 1};
    snprintf(q.what, sizeof q.what, "%s", what);
    return q;
}

/* Whether --op asks for it. */
static bool asked(const struct options *o, const char *op) {
    size_t len = strlen(op);
    for (const char *s = o->ops; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : "")
        if (!strncmp(s, op, len) && (s[len] == ',' || !s[len])) return true;
    return !o->ops;
}

static void bench_matmul(struct card *c, const struct options *o, int type, int n) {
    struct strip_layout l;
    char what[48];
    if (!strip_layout(&l, type, o->rows, o->dim)) return;
    snprintf(what, sizeof what, "%s %lldx%d", quant_name(type), (long long)o->rows, o->dim);
    struct point q = point_of(o, "matmul", what, n, call_matmul, 0);
    q.type = type;
    q.product = true;
    q.copies = (int64_t)(((size_t)o->mib << 20) / l.bytes) + 1;
    if (!add_weights(&q, type, o->rows, o->dim, q.copies)) return;
    add_normals(&q, c, BUF_IN, (size_t)n * (size_t)o->dim, 1);
    add_buf(&q, BUF_OUT, (size_t)n * (size_t)o->rows * sizeof(float));
    run_point(c, o, &q);
}

static void bench_embed(struct card *c, const struct options *o, int type, int n) {
    struct point q = point_of(o, "embed", quant_name(type), n, call_embed, 1e-5);
    q.type = type;
    if (!add_weights(&q, type, o->rows, o->dim, 1)) return;
    add_ids(&q, c, BUF_HOST, n, (int)o->rows);
    add_buf(&q, BUF_OUT, (size_t)n * (size_t)o->dim * sizeof(float));
    run_point(c, o, &q);
}

/* Operations on rows of activations: x, d, an output or none. tolerance: f32 arithmetic, sums in another order. */
static void bench_rows(struct card *c, const struct options *o, int n) {
    size_t dim = (size_t)o->dim, all = (size_t)n * dim;
    static const struct {
        const char *op;
        call_fn call;
        int first; /* 1: the second input is a row */
        bool in_place;
    } rows[] = {{"rmsnorm", call_rmsnorm, 1, false}, {"add", call_add, 0, true}, {"glu", call_glu, 0, false},
                {"add_gated", call_add_gated, 0, true}, {"softcap", call_softcap, 0, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!asked(o, rows[i].op)) continue;
        struct point q = point_of(o, rows[i].op, "F32", n, rows[i].call, 1e-5);
        add_normals(&q, c, rows[i].in_place ? BUF_OUT : BUF_IN, all, 3);
        add_normals(&q, c, BUF_IN, rows[i].first ? dim : all, 1);
        if (!strcmp(rows[i].op, "add_gated")) add_normals(&q, c, BUF_IN, (size_t)n, 1);
        else if (!rows[i].in_place) add_buf(&q, BUF_OUT, all * sizeof(float));
        run_point(c, o, &q);
    }
    if (asked(o, "gather")) {
        struct point q = point_of(o, "gather", "F32", n, call_gather, 1e-7);
        add_ids(&q, c, BUF_HOST, n, n);
        add_normals(&q, c, BUF_IN, all, 1);
        add_buf(&q, BUF_OUT, all * sizeof(float));
        run_point(c, o, &q);
    }
}

static double *add_freq(struct point *q) {
    int n = q->o->head_dim / 2;
    double *f = add_buf(q, BUF_HOST, (size_t)n * sizeof *f);
    for (int i = 0; i < n; i++) f[i] = pow(1e6, -(double)i / n);
    return f;
}

static void bench_rope(struct card *c, const struct options *o, int n) {
    size_t pairs = (size_t)n * (size_t)o->head_dim / 2;
    if (asked(o, "rope_table")) {
        struct point q = point_of(o, "rope_table", "F32", n, call_rope_table, 1e-6);
        add_freq(&q);
        add_buf(&q, BUF_OUT, 2 * pairs * sizeof(float));
        run_point(c, o, &q);
    }
    if (!asked(o, "rope")) return;
    struct point q = point_of(o, "rope", "F32 with norm", n, call_rope, 1e-5);
    add_normals(&q, c, BUF_OUT, (size_t)n * (size_t)(o->n_head * o->head_dim), 1);
    add_normals(&q, c, BUF_IN, (size_t)o->head_dim, 1);
    float *cs = add_buf(&q, BUF_IN, 2 * pairs * sizeof *cs);
    for (size_t i = 0; i < pairs; i++) cs[2 * i] = cosf((float)i), cs[2 * i + 1] = sinf((float)i);
    run_point(c, o, &q);
}

static void bench_experts(struct card *c, const struct options *o, int type, int n) {
    struct strip_layout l;
    int64_t n_ff = o->rows / 4;
    if (asked(o, "route")) {
        char what[48];
        snprintf(what, sizeof what, "%d of %d", N_USED, o->n_expert);
        struct point q = point_of(o, "route", what, n, call_route, 1e-5);
        add_normals(&q, c, BUF_IN, (size_t)n * (size_t)o->n_expert, 2);
        add_buf(&q, BUF_IN, (size_t)n * N_USED * sizeof(int32_t)); /* a wrong choice shows in the weights */
        add_buf(&q, BUF_OUT, (size_t)n * N_USED * sizeof(float));
        run_point(c, o, &q);
    }
    if (!asked(o, "experts") || !strip_layout(&l, type, o->dim, n_ff)) return;
    /* The input of the last product is rounded again, to 8 bits or to half: a step of it is 1/254 of the largest value, and
     * the errors of many inputs have either sign. */
    struct point q = point_of(o, "experts", quant_name(type), n, call_experts, 2e-2);
    q.type = type;
    q.rows = n_ff;
    if (!add_weights(&q, type, n_ff, o->dim, o->n_expert) || !add_weights(&q, type, n_ff, o->dim, o->n_expert) ||
        !add_weights(&q, type, o->dim, n_ff, o->n_expert))
        return;
    add_normals(&q, c, BUF_IN, (size_t)n * (size_t)o->dim, 1);
    add_ids(&q, c, BUF_IN, n * N_USED, o->n_expert);
    float *w = add_buf(&q, BUF_IN, (size_t)n * N_USED * sizeof *w);
    for (int i = 0; i < n * N_USED; i++) w[i] = 0.25f;
    add_buf(&q, BUF_OUT, (size_t)n * (size_t)o->dim * sizeof(float));
    run_point(c, o, &q);
}

static void bench_kv(struct card *c, const struct options *o, int type, int n) {
    size_t kv_row = (size_t)(o->n_kv * o->head_dim), q_row = (size_t)(o->n_head * o->head_dim);
    char what[48];
    snprintf(what, sizeof what, "%s %d/%d heads of %d", quant_name(type), o->n_head, o->n_kv, o->head_dim);
    if (asked(o, "kv_put")) {
        struct point q = point_of(o, "kv_put", what, n, call_kv_put, 0);
        add_kv(&q, type, n + 200, n, false);
        add_normals(&q, c, BUF_IN, (size_t)n * kv_row, 1);
        add_normals(&q, c, BUF_IN, (size_t)n * kv_row, 1);
        run_point(c, o, &q);
    }
    if (!asked(o, "attn")) return;
    /* Many tokens: products of half values with f32 sums, 11 bits. */
    struct point q = point_of(o, "attn", what, n, call_attn, n > 8 ? 2e-3 : 1e-4);
    q.depth = o->depth;
    add_kv(&q, type, o->depth + n, n, true);
    add_normals(&q, c, BUF_IN, (size_t)n * q_row, 1);
    add_buf(&q, BUF_OUT, (size_t)n * q_row * sizeof(float));
    run_point(c, o, &q);
}

static void bench_delta(struct card *c, const struct options *o, int n) {
    struct delta_shape s = delta_of(o);
    size_t conv = (size_t)delta_conv_dim(&s), tok = (size_t)n, heads = (size_t)s.n_value, dim = (size_t)s.dim;
    char what[48];
    snprintf(what, sizeof what, "%d/%d heads of %d", s.n_value, s.n_key, s.dim);
    /* f32; chunks solve systems whose entries are products of unit vectors: some bits go */
    struct point q = point_of(o, "delta", what, n, call_delta, n > 8 ? 1e-3 : 1e-4);
    add_buf(&q, BUF_OUT, tok * heads * dim * sizeof(float));
    add_normals(&q, c, BUF_IN, tok * conv, 1);
    add_normals(&q, c, BUF_IN, tok * heads * dim, 1);
    add_normals(&q, c, BUF_IN, tok * heads, 1);
    add_normals(&q, c, BUF_IN, tok * heads, 1);
    add_normals(&q, c, BUF_IN, conv * DELTA_CONV, 0.5f);
    add_normals(&q, c, BUF_IN, heads, 0.5f);
    float *rate = add_normals(&q, c, BUF_IN, heads, 0.1f);
    for (size_t i = 0; i < heads; i++) rate[i] = -fabsf(rate[i]);
    add_normals(&q, c, BUF_IN, dim, 1);
    add_normals(&q, c, BUF_IN, (DELTA_CONV - 1) * conv, 1);
    add_normals(&q, c, BUF_OUT, heads * dim * dim, 0.1f);
    run_point(c, o, &q);
}

/* --- the card -------------------------------------------------------------------------------------------------------------------- */

/* Copies on the device: read and written bytes. */
static double copy_rate(struct card *c, const struct options *o) {
    size_t bytes = o->small ? 1 << 20 : (size_t)1 << 30;
    void *d_a, *d_b;
    double v[MAX_REPS];
    check(gpu_alloc(&d_a, c->arena, bytes, "copy source"));
    check(gpu_alloc(&d_b, c->arena, bytes, "copy target"));
    check(gpu_fill(c->stream, d_a, 1, bytes));
    check(gpu_copy_on(c->stream, d_b, d_a, bytes));
    for (int i = 0; i < o->reps; i++) {
        check(gpu_event_record(c->from, c->stream));
        for (int k = 0; k < 4; k++) check(gpu_copy_on(c->stream, d_b, d_a, bytes));
        check(gpu_event_record(c->to, c->stream));
        check(gpu_event_sync(c->to));
        check(gpu_event_seconds(&v[i], c->from, c->to));
    }
    gpu_arena_release(c->arena, c->mark);
    return 8.0 * (double)bytes / median(v, o->reps) * 1e-9;
}

static double gemm_rate(struct card *c, const struct options *o) {
    int size = o->small ? 64 : 8192;
    double v[MAX_REPS];
    for (int i = 0; i < o->reps; i++) check(gpu_probe_gemm(&v[i], c->arena, c->stream, size, size, size, o->small ? 1 : 10));
    return 2.0 * size * size * size / median(v, o->reps) * 1e-12;
}

static struct ops_limits limits_of(const struct options *o) {
    int most = 1;
    for (int i = 0; i < o->n_n; i++) most = o->n[i] > most ? o->n[i] : most;
    int64_t wide = o->rows > o->dim ? o->rows : o->dim;
    return (struct ops_limits){.n_tok = most, .cols = wide, .rows = wide, .n_head = o->n_head, .n_kv = o->n_kv, .head_dim = o->head_dim,
                               .n_ctx = o->depth + most + 256, .n_expert = o->n_expert, .n_expert_used = N_USED, .delta = delta_of(o)};
}

static void open_card(struct card *c, const struct options *o) {
    struct ops_limits l = limits_of(o);
    enum isa isa;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    size_t free_bytes, want = o->small ? (size_t)128 << 20 : ((size_t)o->mib << 20) + ((size_t)6 << 30);
    check(gpu_open(&c->g, o->device));
    check(gpu_mem_free(c->g, &free_bytes));
    want += gpu_ops_scratch_bytes(&l);
    if (want > free_bytes / 10 * 9) want = free_bytes / 10 * 9;
    check(gpu_arena_open(&c->arena, c->g, want));
    check(gpu_stream_open(&c->stream, c->g));
    check(gpu_event_open(&c->from, c->g, GPU_EVENT_TIMED));
    check(gpu_event_open(&c->to, c->g, GPU_EVENT_TIMED));
    check(gpu_host_alloc(&c->staging, c->g, STAGING));
    check(gpu_ops_open(&c->ops, c->g, c->arena, c->stream, &l));
    check(isa_choose(&isa, NULL));
    struct cpu_opts co = {.n_thread = cores > 0 ? (int)cores : 1, .isa = isa, .limits = l};
    check(cpu_open(&c->cpu, &co));
    c->mark = gpu_arena_used(c->arena);
    c->seed = 11;
    c->copy_gbps = copy_rate(c, o);
    c->gemm_tflops = gemm_rate(c, o);
}

static void close_card(struct card *c) {
    cpu_close(c->cpu);
    gpu_ops_close(c->ops);
    gpu_host_free(c->g, c->staging);
    gpu_event_close(c->from), gpu_event_close(c->to);
    gpu_stream_close(c->stream);
    gpu_arena_close(c->arena);
    gpu_close(c->g);
}

static void bench_all(struct card *c, const struct options *o) {
    static const int kv_types[] = {QT_F16, QT_Q8_0, QT_Q4_0};
    for (int i = 0; i < o->n_type && asked(o, "matmul"); i++)
        for (int k = 0; k < o->n_n; k++) bench_matmul(c, o, o->types[i], o->n[k]);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < o->n_n; k++) bench_kv(c, o, kv_types[i], o->n[k]);
    for (int k = 0; k < o->n_n; k++) {
        int n = o->n[k];
        if (asked(o, "delta")) bench_delta(c, o, n);
        bench_experts(c, o, QT_Q4_0, n);
        if (asked(o, "embed")) bench_embed(c, o, QT_F16, n), bench_embed(c, o, QT_Q8_0, n);
        bench_rows(c, o, n);
        bench_rope(c, o, n);
    }
}

/* --- command line ------------------------------------------------------------------------------------------------------------------ */

static int usage(void) {
    fprintf(stderr, "usage: bench_gpu [--device I] [--op NAME,..] [--type T,..] [--n N,..] [--dim D] [--rows R] [--depth P] [--mib M]"
                    " [--reps K] [--small]\n");
    return 2;
}

static bool parse_list(struct options *o, const char *name, char *list) {
    bool types = !strcmp(name, "--type");
    *(types ? &o->n_type : &o->n_n) = 0;
    for (char *s = strtok(list, ","); s; s = strtok(NULL, ",")) {
        int v = types ? quant_from_name(s) : atoi(s);
        if (types ? v < 0 || !quant_info(v)->decodable || o->n_type == MAX_LIST : v < 1 || v > 4096 || o->n_n == MAX_LIST) return false;
        if (types) o->types[o->n_type++] = v;
        else o->n[o->n_n++] = v;
    }
    return true;
}

/* Sizes that the emulator gets through in seconds. */
static void make_small(struct options *o) {
    o->small = true;
    o->reps = 3;
    o->dim = 256, o->rows = 256, o->depth = 300, o->mib = 0;
    o->n_head = 4, o->n_kv = 2, o->head_dim = 64, o->n_expert = 8;
    o->n[0] = 1, o->n[1] = 3, o->n[2] = 36, o->n_n = 3;
}

static bool parse(struct options *o, int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--small")) make_small(o);
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (!strcmp(name, "--small")) continue;
        if (i + 1 == argc) return false;
        char *v = argv[++i];
        if (!strcmp(name, "--device")) o->device = atoi(v);
        else if (!strcmp(name, "--op")) o->ops = v;
        else if (!strcmp(name, "--dim")) o->dim = atoi(v);
        else if (!strcmp(name, "--rows")) o->rows = atoll(v);
        else if (!strcmp(name, "--depth")) o->depth = atoll(v);
        else if (!strcmp(name, "--mib")) o->mib = atoll(v);
        else if (!strcmp(name, "--reps")) o->reps = atoi(v);
        else if (strcmp(name, "--type") && strcmp(name, "--n")) return false;
        else if (!parse_list(o, name, v)) return false;
    }
    return o->reps >= 1 && o->reps <= MAX_REPS && o->dim >= 256 && o->dim <= 65536 && o->dim % 256 == 0 && o->rows >= 256 &&
           o->rows <= 1 << 20 && o->rows % 256 == 0 && o->depth >= 0 && o->depth <= 1 << 22 && o->mib >= 0 && o->mib <= 65536 && o->n_n > 0;
}

int main(int argc, char **argv) {
    struct options o = {.reps = 7, .dim = 4096, .rows = 4096, .depth = 32768, .mib = 512, .n_head = 32, .n_kv = 8, .head_dim = 128,
                        .n_expert = N_EXPERT, .n = {1, 4, 8, 512}, .n_n = 4};
#define X(name, id, elems, bytes, enc) o.types[o.n_type++] = id;
    QUANT_LIST(X)
#undef X
    int found = 0;
    if (!parse(&o, argc, argv)) return usage();
    if (!gpu_built()) {
        fprintf(stderr, "bench_gpu: this build has no GPU back end; build with -DLONGHAUL_CUDA=ON\n");
        return 77;
    }
    check(gpu_count(&found));
    if (!found) {
        fprintf(stderr, "bench_gpu: no GPU found\n");
        return 77;
    }
    static struct card c;
    open_card(&c, &o);
    const struct gpu_info *i = gpu_info(c.g);
    printf("# bench_gpu%s: %s, sm_%d, %d multiprocessors, driver %d, CUDA %d; copies on the card %.1f GB/s, cuBLAS f16 %.2f TFLOP/s;"
           " median of %d\n", SIMULATED ? " (simulated)" : "", i->name, i->sm, i->n_sm, i->driver, i->runtime, c.copy_gbps, c.gemm_tflops, o.reps);
    printf("op,what,n,depth,bytes,flops,seconds,seconds_min,seconds_max,gbps,copy_share,tflops,gemm_share,error,result,time\n");
    bench_all(&c, &o);
    close_card(&c);
    if (c.bad) fprintf(stderr, "bench_gpu: %d results are wrong\n", c.bad);
    return c.bad ? 1 : 0;
}
