/* bench_ops.c: CPU operations against what the machine can do. One CSV row per point, medians.
 *
 *   bench_ops matmul [--threads N] [--isa NAME] [--type T,T..] [--n N,N..] [--rows R] [--cols C] [--mib M] [--reps K]
 *                    [--against-blas]
 *
 * matmul: y = W x for n tokens. Weights beyond the last-level cache (--mib of them in matrices of R x C, used in turn);
 * GB/s are weight bytes, the share is of the DRAM read rate measured with the same threads in the same program, GFLOP/s
 * are 2 * R * C * n, their share is of an f32 FMA loop in registers. */
#include "bench/common.h"
#include "core/err.h"
#include "cpu/impl.h"

#include <dlfcn.h>
#include <stdio.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_LIST = 32, MAX_REPS = 101, MAX_THREADS = 256, LINE_FLOATS = 16 };

struct options {
    int threads, reps;
    const char *isa;
    int types[MAX_LIST], n_type;
    int n[MAX_LIST], n_n;
    int64_t rows, cols;
    int64_t mib;
    bool blas;
};

static clockid_t the_clock = CLOCK_MONOTONIC;

static double work_s(void) {
    struct timespec t;
    clock_gettime(the_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(int rc) {
    if (!rc) return;
    fprintf(stderr, "bench_ops: %s\n", err_text());
    exit(1);
}

/* ---- what the machine can do ---- */

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float read_avx512(const float *p, size_t n, size_t ahead) {
    __m512i s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 128)
        for (int k = 0; k < 8; k++) {
            _mm_prefetch((const char *)(p + i + 16 * k) + ahead, _MM_HINT_T0);
            s[k] = _mm512_xor_si512(s[k], _mm512_load_si512(p + i + 16 * k));
        }
    for (int i = 1; i < 8; i++) s[0] = _mm512_xor_si512(s[0], s[i]);
    return (float)_mm512_reduce_add_epi32(s[0]);
}
__attribute__((target("avx2"))) static float read_avx2(const float *p, size_t n, size_t ahead) {
    __m256i s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 64)
        for (int k = 0; k < 8; k++) {
            if (k % 2 == 0) _mm_prefetch((const char *)(p + i + 8 * k) + ahead, _MM_HINT_T0);
            s[k] = _mm256_xor_si256(s[k], _mm256_load_si256((const __m256i *)(const void *)(p + i + 8 * k)));
        }
    for (int i = 1; i < 8; i++) s[0] = _mm256_xor_si256(s[0], s[i]);
    return (float)_mm256_extract_epi32(s[0], 0);
}
__attribute__((target("avx512f"))) static float fma_avx512(int64_t n) {
    __m512 a[12], x = _mm512_set1_ps(1e-9f), y = _mm512_set1_ps(0.999f);
    for (int i = 0; i < 12; i++) a[i] = _mm512_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
        for (int i = 0; i < 12; i++) a[i] = _mm512_fmadd_ps(a[i], y, x);
    for (int i = 1; i < 12; i++) a[0] = _mm512_add_ps(a[0], a[i]);
    return _mm512_reduce_add_ps(a[0]);
}
__attribute__((target("avx2,fma"))) static float fma_avx2(int64_t n) {
    __m256 a[12], x = _mm256_set1_ps(1e-9f), y = _mm256_set1_ps(0.999f);
    for (int i = 0; i < 12; i++) a[i] = _mm256_set1_ps((float)i);
    for (int64_t k = 0; k < n; k++)
        for (int i = 0; i < 12; i++) a[i] = _mm256_fmadd_ps(a[i], y, x);
    for (int i = 1; i < 12; i++) a[0] = _mm256_add_ps(a[0], a[i]);
    return _mm256_cvtss_f32(a[0]);
}
#endif

struct probe {
    enum isa isa;
    const float *p;
    size_t n_float; /* of all tasks */
    int n_task;
    size_t ahead; /* bytes to prefetch */
    int64_t n_fma;
    float sink[MAX_THREADS * LINE_FLOATS];
};

static void read_task(void *arg, int task, int worker) {
    struct probe *b = arg;
    size_t n = b->n_float / (size_t)b->n_task;
    const float *p = b->p + (size_t)task * n;
    float s = 0;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        s = read_avx512(p, n, b->ahead);
    else if (b->isa == ISA_AVX2)
        s = read_avx2(p, n, b->ahead);
    else
#endif
        for (size_t i = 0; i < n; i += 4) s += p[i] + p[i + 1] + p[i + 2] + p[i + 3];
    b->sink[worker * LINE_FLOATS] += s;
}

static void fma_task(void *arg, int task, int worker) {
    (void)task;
    struct probe *b = arg;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512) b->sink[worker * LINE_FLOATS] += fma_avx512(b->n_fma);
    if (b->isa == ISA_AVX2) b->sink[worker * LINE_FLOATS] += fma_avx2(b->n_fma);
#endif
}

static double read_gbps(struct pool *pool, enum isa isa, int reps) {
    static struct probe b;
    enum { TASKS = 1024 };
    size_t bytes = (size_t)1 << 30;
    float *p = mem_alloc(bytes, 4096, "read buffer");
    if (!p) check(ERR_NOMEM);
    memset(p, 1, bytes);
    b = (struct probe){.isa = isa, .p = p, .n_float = bytes / sizeof *p, .n_task = TASKS};
    /* The best of what plain loads and three prefetch distances reach: the ceiling must not be beaten by a kernel. */
    static const size_t ahead[4] = {0, 1024, 2048, 4096};
    double v[4][MAX_REPS], best = 0;
    for (int i = 0; i < 4 * reps; i++) {
        b.ahead = ahead[i % 4];
        double t = work_s();
        pool_run(pool, read_task, &b, TASKS);
        v[i % 4][i / 4] = (double)bytes / (work_s() - t) * 1e-9;
    }
    mem_free(p);
    for (int k = 0; k < 4; k++) {
        double m = median(v[k], reps);
        best = m > best ? m : best;
    }
    return best;
}

static double fma_gflops(struct pool *pool, enum isa isa, int reps) {
    static struct probe b;
    b = (struct probe){.isa = isa, .n_fma = 2000000};
    double v[MAX_REPS];
    int n = pool_threads(pool), lanes = isa == ISA_AVX512 ? 16 : 8;
    if (isa == ISA_GENERIC) return 0;
    for (int i = 0; i < reps; i++) {
        double t = work_s();
        pool_run(pool, fma_task, &b, n);
        v[i] = 2.0 * 12 * lanes * (double)b.n_fma * n / (work_s() - t) * 1e-9;
    }
    return median(v, reps);
}

/* ---- matmul ---- */

typedef void (*sgemm_fn)(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                         const float *b, int ldb, float beta, float *c, int ldc);

/* The library picks its kernels when it is loaded; old builds do not know new CPUs and need the core's name. */
static sgemm_fn load_sgemm(enum isa isa, int threads) {
    setenv("OPENBLAS_CORETYPE", isa == ISA_AVX512 ? "SkylakeX" : "Haswell", 0);
    char n[16];
    snprintf(n, sizeof n, "%d", threads);
    setenv("OPENBLAS_NUM_THREADS", n, 1);
    void *h = dlopen("libopenblas.so.0", RTLD_NOW);
    union {
        void *p;
        sgemm_fn f;
    } u = {h ? dlsym(h, "cblas_sgemm") : NULL};
    return u.f;
}

static double sgemm_gflops(sgemm_fn f, int64_t rows, int64_t cols, int n, const float *x, float *y, int reps) {
    float *w = mem_alloc((size_t)rows * (size_t)cols * sizeof *w, 64, "f32 weights");
    if (!w) check(ERR_NOMEM);
    for (int64_t i = 0; i < rows * cols; i++) w[i] = (float)(i % 251 - 125) / 1000;
    double v[MAX_REPS];
    for (int i = 0; i < reps; i++) {
        double t = work_s();
        f(101, 111, 112, n, (int)rows, (int)cols, 1, x, (int)cols, w, (int)cols, 0, y, (int)rows);
        v[i] = 2.0 * (double)rows * (double)cols * n / (work_s() - t) * 1e-9;
    }
    mem_free(w);
    return median(v, reps);
}

static void bench_type(struct cpu *c, const struct options *o, int type, double gbps, double gflops) {
    struct strip_layout l;
    if (!strip_layout(&l, type, o->rows, o->cols)) return;
    int64_t copies = (int64_t)(((size_t)o->mib << 20) / l.bytes) + 1;
    uint8_t *data = random_matrices(&l, type, o->cols, copies);
    float *x = malloc((size_t)o->cols * 1024 * sizeof *x), *y = malloc((size_t)o->rows * 1024 * sizeof *y);
    if (!data || !x || !y) check(ERR_NOMEM);
    for (int64_t i = 0; i < o->cols * 1024; i++) x[i] = (float)((i * 7919) % 2001 - 1000) / 500;
    for (int k = 0; k < o->n_n; k++) {
        double v[MAX_REPS];
        int n = o->n[k];
        int64_t runs = n <= 16 ? copies : 1 + 16 / (n / 16 + 1);
        for (int r = 0; r < o->reps; r++) {
            double t = work_s();
            for (int64_t i = 0; i < runs; i++) {
                struct mat w = {data + (size_t)(i % copies) * l.bytes, type, o->rows, o->cols};
                struct matmul m = {.x = x, .cols = o->cols, .n_tok = n, .n = 1, .out = {{&w, y, NULL}}};
                check(c->ops.matmul(&c->ops, &m));
            }
            v[r] = (work_s() - t) / (double)runs;
        }
        double s = median(v, o->reps), rate = (double)l.bytes / s * 1e-9,
               flops = 2.0 * (double)(o->rows * o->cols) * n / s * 1e-9;
        printf("matmul,%s,%s,%lld,%lld,%d,%d,%.3g,%.2f,%.3f,%.1f,%.3f\n", isa_name(c->opts.isa), quant_name(type),
               (long long)o->rows, (long long)o->cols, n, o->threads, s, rate, rate / gbps, flops,
               gflops > 0 ? flops / gflops : 0);
        fflush(stdout);
    }
    free(x), free(y), mem_free(data);
}

static void bench_blas(const struct options *o, enum isa isa, double gflops) {
    sgemm_fn f = load_sgemm(isa, o->threads);
    if (!f) {
        fprintf(stderr, "bench_ops: libopenblas.so.0 cannot be loaded\n");
        return;
    }
    float *x = malloc((size_t)o->cols * 1024 * sizeof *x), *y = malloc((size_t)o->rows * 1024 * sizeof *y);
    if (!x || !y) check(ERR_NOMEM);
    for (int64_t i = 0; i < o->cols * 1024; i++) x[i] = (float)((i * 7919) % 2001 - 1000) / 500;
    for (int k = 0; k < o->n_n; k++) {
        double g = sgemm_gflops(f, o->rows, o->cols, o->n[k], x, y, o->reps);
        printf("sgemm,openblas,F32,%lld,%lld,%d,%d,,,,%.1f,%.3f\n", (long long)o->rows, (long long)o->cols, o->n[k],
               o->threads, g, gflops > 0 ? g / gflops : 0);
    }
    free(x), free(y);
}

static void bench_matmul(const struct options *o) {
    enum isa isa;
    check(isa_choose(&isa, o->isa));
    struct cpu c = {
        .opts = {.n_thread = o->threads, .isa = isa, .limits = {.n_tok = 1024, .cols = o->cols, .rows = o->rows}}};
    check(pool_open(&c.pool, o->threads, NULL, 0));
    check(matmul_open(&c));
    double gbps = read_gbps(c.pool, isa, o->reps), gflops = fma_gflops(c.pool, isa, o->reps);
    printf("# bench_ops matmul: DRAM read %.2f GB/s, f32 FMA peak %.1f GFLOP/s, %d threads, %s, median of %d\n", gbps,
           gflops, o->threads, isa_name(isa), o->reps);
    printf("op,isa,type,rows,cols,n,threads,seconds,gbps,dram_share,gflops,fma_share\n");
    if (o->blas) bench_blas(o, isa, gflops);
    for (int i = 0; i < o->n_type; i++) bench_type(&c, o, o->types[i], gbps, gflops);
    matmul_close(&c);
    pool_close(c.pool);
}

/* ---- command line ---- */

static int usage(void) {
    fprintf(
        stderr,
        "usage: bench_ops matmul [--threads N] [--isa NAME] [--type T,..] [--n N,..] [--rows R] [--cols C] [--mib M]"
        " [--reps K] [--against-blas] [--cpu-time]\n"
        "--cpu-time: processor time of the calling thread, for one thread on a busy machine\n");
    return 2;
}

static bool parse_types(struct options *o, char *list) {
    o->n_type = 0;
    for (char *s = strtok(list, ","); s; s = strtok(NULL, ",")) {
        int t = quant_from_name(s);
        if (t < 0 || !quant_info(t)->decodable || o->n_type == MAX_LIST) return false;
        o->types[o->n_type++] = t;
    }
    return true;
}

static bool parse_counts(struct options *o, char *list) {
    o->n_n = 0;
    for (char *s = strtok(list, ","); s; s = strtok(NULL, ",")) {
        int n = atoi(s);
        if (n < 1 || n > 1024 || o->n_n == MAX_LIST) return false;
        o->n[o->n_n++] = n;
    }
    return true;
}

static bool parse(struct options *o, int argc, char **argv) {
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--against-blas")) {
            o->blas = true;
            continue;
        }
        if (!strcmp(argv[i], "--cpu-time")) {
            the_clock = CLOCK_THREAD_CPUTIME_ID;
            continue;
        }
        if (i + 1 == argc) return false;
        char *v = argv[++i];
        const char *name = argv[i - 1];
        if (!strcmp(name, "--threads"))
            o->threads = atoi(v);
        else if (!strcmp(name, "--isa"))
            o->isa = v;
        else if (!strcmp(name, "--rows"))
            o->rows = atoll(v);
        else if (!strcmp(name, "--cols"))
            o->cols = atoll(v);
        else if (!strcmp(name, "--mib"))
            o->mib = atoll(v);
        else if (!strcmp(name, "--reps"))
            o->reps = atoi(v);
        else if (!strcmp(name, "--type")) {
            if (!parse_types(o, v)) return false;
        } else if (!strcmp(name, "--n")) {
            if (!parse_counts(o, v)) return false;
        } else
            return false;
    }
    return o->threads >= 1 && o->threads <= MAX_THREADS && o->reps >= 1 && o->reps <= MAX_REPS && o->rows > 0 &&
           o->cols > 0 && o->mib >= 0;
}

int main(int argc, char **argv) {
    struct options o = {.threads = 2,
                        .reps = 5,
                        .rows = 4096,
                        .cols = 4096,
                        .mib = 512,
                        .n = {1, 4, 8, 512},
                        .n_n = 4,
                        .types = {QT_F32, QT_F16, QT_BF16, QT_Q4_0, QT_Q4_1, QT_Q5_0, QT_Q5_1, QT_Q8_0, QT_Q2_K,
                                  QT_Q3_K, QT_Q4_K, QT_Q5_K, QT_Q6_K, QT_IQ4_NL, QT_IQ4_XS, QT_MXFP4, QT_NVFP4,
                                  QT_TQ2_0},
                        .n_type = 18};
    if (argc < 2 || strcmp(argv[1], "matmul") || !parse(&o, argc, argv)) return usage();
    bench_matmul(&o);
    return 0;
}
