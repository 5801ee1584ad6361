/* bench_attn.c: how much of the DRAM read bandwidth CPU attention reaches while decoding, and how much of the FMA peak in
 * prefill. One CSV row per point; the KV of a point is larger than any cache.
 *
 *   bench_attn [--isa NAME] [--threads LIST] [--mib N] [--reps N] [--types k/v,..] [--dims LIST] [--groups LIST]
 *              [--rows LIST] [--depth N] [--prefill] [--cpu-time]
 *
 * Columns: kind, isa, threads, K/V type, head dim, g = query heads per KV head, tokens per call, positions, KV heads,
 * median and smallest seconds per call, GB/s of KV (values and scales) at the median, share of the rate at which the same
 * threads just read the same memory (the two alternate), GFLOP/s (2 per product of scores and of outputs), FMA peak,
 * share of the time that the multipliers need at least (multiplies() below), which of the two limits is the tighter one,
 * and the share of it.
 * --cpu-time takes the processor time of the calling thread instead of wall time: for one thread on a busy machine. */
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "cpu/impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static clockid_t the_clock = CLOCK_MONOTONIC;

static double now_s(void) {
    struct timespec t;
    clock_gettime(the_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct options {
    const char *isa, *types;
    int threads[8], n_threads, dims[8], n_dims, groups[16], n_groups, rows[8], n_rows, reps, depth;
    size_t mib;
    bool prefill;
};

static int parse_ints(int *out, int most, const char *text) {
    int n = 0;
    for (const char *p = text; p && *p && n < most; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) out[n++] = atoi(p);
    return n;
}

static void die(const char *what) {
    fprintf(stderr, "bench_attn: %s: %s\n", what, err_text());
    exit(1);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* --- the machine -------------------------------------------------------------------------------------------------------- */

struct reader {
    const uint64_t *base;
    size_t words; /* per task */
    bool ahead;   /* one stream with prefetches, not eight without */
    uint64_t sink[64];
};

/* Eight streams: one alone does not keep the prefetchers of a core busy. */
static void read_task(void *arg, int task, int worker) {
    struct reader *r = arg;
    size_t part = r->words / 8;
    const uint64_t *p = r->base + (size_t)task * r->words;
    uint64_t a[8] = {0};
    for (size_t i = 0; r->ahead && i < r->words; i += 8) {
        __builtin_prefetch(p + i + 256, 0, 2);
        for (size_t j = 0; j < 8; j++) a[j] += p[i + j];
    }
    for (size_t i = 0; !r->ahead && i < part; i += 8)
        for (size_t k = 0; k < 8; k++)
            for (size_t j = 0; j < 8; j++) a[j] += p[k * part + i + j];
    for (int k = 1; k < 8; k++) a[0] ^= a[k];
    r->sink[worker & 63] ^= a[0];
}

/* GB/s at which all threads together read `bytes` of memory, once; of the two ways the faster. */
static double dram_gbps(struct pool *pool, const void *base, size_t bytes) {
    enum { TASKS = 64 };
    struct reader r = {.base = base, .words = bytes / 8 / TASKS / 64 * 64};
    double best = 0;
    for (int ahead = 0; ahead < 2; ahead++) {
        r.ahead = ahead;
        double start = now_s();
        pool_run(pool, read_task, &r, TASKS);
        double gbps = (double)(r.words * 8 * TASKS) / (now_s() - start) * 1e-9;
        best = gbps > best ? gbps : best;
    }
    return best;
}

/* Independent products of registers: nothing but FMA. The best of several, in GFLOP/s of all threads. */
#if defined(__x86_64__)
enum { FMA_LOOPS = 2000000 };
__attribute__((target("avx512f"))) static float fma_512(void) {
    typedef float v16 __attribute__((vector_size(64)));
    v16 a[12], x = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, y = x * 1e-9f;
    for (int k = 0; k < 12; k++) a[k] = x * (float)k;
    for (int i = 0; i < FMA_LOOPS; i++) {
#define STEP(k) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(a[k]) : "v"(x), "v"(y))
        STEP(0); STEP(1); STEP(2); STEP(3); STEP(4); STEP(5); STEP(6); STEP(7); STEP(8); STEP(9); STEP(10); STEP(11);
    }
    return a[0][0] + a[11][3];
}
__attribute__((target("avx2,fma"))) static float fma_256(void) {
    typedef float v8 __attribute__((vector_size(32)));
    v8 a[12], x = {1, 1, 1, 1, 1, 1, 1, 1}, y = x * 1e-9f;
    for (int k = 0; k < 12; k++) a[k] = x * (float)k;
    for (int i = 0; i < FMA_LOOPS; i++) {
        STEP(0); STEP(1); STEP(2); STEP(3); STEP(4); STEP(5); STEP(6); STEP(7); STEP(8); STEP(9); STEP(10); STEP(11);
#undef STEP
    }
    return a[0][0] + a[11][3];
}
static void fma_task(void *arg, int task, int worker) {
    float *sink = arg;
    (void)worker;
    sink[1 + task % 63] = sink[0] > 0 ? fma_512() : fma_256();
}
static double fma_peak(struct pool *pool, enum isa isa) {
    float sink[64] = {isa == ISA_AVX512 ? 1.0f : 0};
    if (isa == ISA_GENERIC) return 0;
    double best = 1e9;
    int n = pool_threads(pool);
    for (int i = 0; i < 7; i++) {
        double start = now_s();
        pool_run(pool, fma_task, sink, n);
        double s = now_s() - start;
        best = s < best ? s : best;
    }
    return 2.0 * (isa == ISA_AVX512 ? 16 : 8) * 12 * FMA_LOOPS * n / best * 1e-9;
}
#else
static double fma_peak(struct pool *pool, enum isa isa) { return (void)pool, (void)isa, 0; }
#endif

/* --- one point ---------------------------------------------------------------------------------------------------------- */

struct point {
    int isa, n_thread, type_k, type_v, dim, group, n_tok, n_kv;
    int64_t n;
};

/* Instructions of 16 lanes that the multipliers execute at least, for one query row, one position and 32 values of K and of
 * V: plain types an FMA per 16 products; K of 16-bit pairs an instruction per 32 products and two per 16 positions for the
 * scales; V in three digits (AVX-512) 3 per 64 products and two per 16 positions, else FMA and one per 16 positions for
 * the scales; and of the exponential 6 per 16 positions, shared by all dims. Unpacking and conversions count nothing:
 * they run beside. */
static double multiplies(const struct point *p) {
    bool k = p->type_k == QT_Q8_0 || p->type_k == QT_Q4_0, v = p->type_v == QT_Q8_0 || p->type_v == QT_Q4_0;
    double k_ops = k ? 1 + 2 / 16.0 : 2, v_ops = !v ? 2 : p->isa == ISA_AVX512 ? 1.5 + 2 / 16.0 : 2 + 1 / 16.0;
    return k_ops + v_ops + 6 / 16.0 * 32 / p->dim;
}

/* Seconds per call and, per call, the read rate just before it. */
static void attend(struct cpu *c, struct kv *kv, const struct point *p, int reps, double *t, double *dram) {
    size_t count = (size_t)(p->n_tok * p->group * p->n_kv) * (size_t)p->dim;
    float *q = malloc(count * sizeof *q), *o = malloc(count * sizeof *o);
    uint32_t seed = 1;
    for (size_t i = 0; i < count; i++) seed = seed * 1664525 + 1013904223, q[i] = (float)(int32_t)seed * 0x1p-31f;
    struct attn_args a = {.o = o, .q = q, .kv = kv, .pos0 = p->n - p->n_tok, .n_tok = p->n_tok, .n_head = p->group * p->n_kv, .scale = 0.1f};
    for (int i = -1; i < reps; i++) {
        if (dram && i >= 0) dram[i] = dram_gbps(c->pool, kv->layers[0].base, kv->layers[0].bytes);
        double start = now_s();
        if (c->ops.attn(&c->ops, &a)) die("attn");
        if (i >= 0) t[i] = now_s() - start;
    }
    free(q), free(o);
}

static void run_point(const struct point *p, int reps, bool prefill) {
    struct kv_shape shape = {p->n_kv, p->dim, p->dim, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = p->n, .n_tok = p->n_tok, .type_k = p->type_k, .type_v = p->type_v};
    struct kv *kv;
    if (kv_open(&kv, &spec) || kv_fill_synthetic(kv, p->n, 1)) die("KV");
    struct cpu c = {.opts = {.n_thread = p->n_thread, .isa = (enum isa)p->isa}};
    c.opts.limits = (struct ops_limits){.n_tok = p->n_tok, .n_head = p->group * p->n_kv, .n_kv = p->n_kv, .head_dim = p->dim, .n_ctx = p->n};
    if (pool_open(&c.pool, p->n_thread, NULL, 0) || attn_open(&c)) die("open");
    double t[64], dram[64], gb = (double)kv->layers[0].page_bytes * (double)(p->n / KV_PAGE) * 1e-9, share = 0;
    double peak = fma_peak(c.pool, (enum isa)p->isa);
    attend(&c, kv, p, reps, t, prefill ? NULL : dram);
    if (!prefill) {
        for (int i = 0; i < reps; i++) dram[i] = gb / t[i] / dram[i];
        qsort(dram, (size_t)reps, sizeof *dram, by_value);
        share = dram[reps / 2];
    }
    qsort(t, (size_t)reps, sizeof *t, by_value);
    double s = t[reps / 2], flops = 4.0 * p->dim * p->group * p->n_kv * (double)p->n_tok * ((double)p->n - 0.5 * p->n_tok);
    double rows = (double)p->n_tok * p->group * p->n_kv * ((double)p->n - 0.5 * p->n_tok), arith = 0;
    if (peak > 0) arith = rows * p->dim / 32 * multiplies(p) / (peak * 1e9 / 32) / s; /* peak: 32 operations per instruction */
    bool memory = share > arith;
    printf("%s,%s,%d,%s/%s,%d,%d,%d,%lld,%d,%.5f,%.5f,%.2f,%.2f,%.1f,%.0f,%.2f,%s,%.2f\n", prefill ? "prefill" : "decode", isa_name((enum isa)p->isa), p->n_thread,
           quant_name(p->type_k), quant_name(p->type_v), p->dim, p->group, p->n_tok, (long long)p->n, p->n_kv, s, t[0], gb / s, share,
           flops / s * 1e-9, peak, arith, memory ? "memory" : "arithmetic", memory ? share : arith);
    fflush(stdout);
    attn_close(&c);
    pool_close(c.pool);
    kv_close(kv);
}

static void run_types(const struct options *o, struct point p, int isa) {
    char text[256];
    snprintf(text, sizeof text, "%s", o->types);
    p.isa = isa;
    for (char *save, *t = strtok_r(text, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        char k[32] = "", v[32] = "";
        if (sscanf(t, "%31[^/]/%31s", k, v) < 2) snprintf(v, sizeof v, "%s", k);
        p.type_k = quant_from_name(k), p.type_v = quant_from_name(v);
        struct kv_shape shape = {p.n_kv, p.dim, p.dim, 0};
        struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = KV_PAGE, .n_tok = 1, .type_k = p.type_k, .type_v = p.type_v};
        struct kv_layer l;
        size_t page;
        if (kv_plan(&l, &page, &spec)) die(t);
        p.n = o->depth ? o->depth : o->prefill ? 8192 : (int64_t)((o->mib << 20) / page) * KV_PAGE;
        run_point(&p, o->reps, o->prefill);
    }
}

int main(int argc, char **argv) {
    struct options o = {.isa = "auto", .types = "f16,q8_0,q4_0,bf16,f32", .threads = {1, 2}, .n_threads = 2, .dims = {128}, .n_dims = 1,
                        .groups = {4}, .n_groups = 1, .rows = {1}, .n_rows = 1, .reps = 5, .mib = 640};
    for (int i = 1; i < argc; i++) {
        const char *v = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--prefill") || !strcmp(argv[i], "--cpu-time")) {
            if (argv[i][2] == 'p')
                o.prefill = true;
            else
                the_clock = CLOCK_THREAD_CPUTIME_ID;
            continue;
        }
        if (!strcmp(argv[i], "--isa")) o.isa = v;
        if (!strcmp(argv[i], "--types")) o.types = v;
        if (!strcmp(argv[i], "--threads")) o.n_threads = parse_ints(o.threads, 8, v);
        if (!strcmp(argv[i], "--dims")) o.n_dims = parse_ints(o.dims, 8, v);
        if (!strcmp(argv[i], "--groups")) o.n_groups = parse_ints(o.groups, 16, v);
        if (!strcmp(argv[i], "--rows")) o.n_rows = parse_ints(o.rows, 8, v);
        if (!strcmp(argv[i], "--depth")) o.depth = atoi(v);
        if (!strcmp(argv[i], "--reps")) o.reps = atoi(v);
        if (!strcmp(argv[i], "--mib")) o.mib = (size_t)atoi(v);
        i++;
    }
    if (o.reps < 1 || o.reps > 64 || o.mib < 1) return 2;
    enum isa isa;
    if (isa_choose(&isa, o.isa)) die("--isa");
    printf("kind,isa,threads,type,head_dim,g,n_tok,positions,n_kv,median_s,best_s,kv_gbps,of_dram,gflops,fma_peak_gflops,of_arithmetic,bound,of_bound\n");
    for (int t = 0; t < o.n_threads; t++)
        for (int d = 0; d < o.n_dims; d++)
            for (int g = 0; g < o.n_groups; g++)
                for (int r = 0; r < o.n_rows; r++)
                    run_types(&o, (struct point){.n_thread = o.threads[t], .dim = o.dims[d], .group = o.groups[g], .n_tok = o.rows[r], .n_kv = 4}, isa);
    return 0;
}
