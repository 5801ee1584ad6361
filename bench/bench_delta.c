/* bench_delta.c: Gated DeltaNet on the CPU against what the machine can do: decode against memory (each step reads and writes
 * the state), prefill against arithmetic. One CSV row per number of tokens, medians.
 *
 *   bench_delta [--isa NAME] [--threads N] [--tokens N,N..] [--reps K]
 *
 * Shape of qwen3.5-27b: 16 key heads, 48 value heads of 128 dims; 48 layers' states, used in turn: beyond any cache. Columns:
 * tokens per call, seconds per call, GB/s of state read and written, share of what the same threads reach when they add 1
 * to the same memory, GFLOP/s of the rule token by token (8 per element of S and token, however it is computed), share of
 * an f32 FMA loop in registers. A share below both says that neither binds. */
#include "bench/common.h"
#include "core/err.h"
#include "core/mem.h"
#include "cpu/impl.h"

#include <math.h>
#include <stdio.h>

enum { N_KEY = 16, N_VALUE = 48, DIM = 128, LAYERS = 48, MAX_REPS = 99, MAX_TOKENS = 4096, FMA_LOOPS = 200000 };

static void check(int rc) {
    if (!rc) return;
    fprintf(stderr, "bench_delta: %s\n", err_text());
    exit(1);
}

static float *floats(size_t n) {
    float *p = mem_alloc(n * sizeof *p, 4096, "activations");
    if (!p) check(ERR_NOMEM);
    uint32_t seed = 1;
    for (size_t i = 0; i < n; i++) seed = seed * 1664525u + 1013904223u, p[i] = (float)(int32_t)seed * 0x1p-31f;
    return p;
}

/* --- ceilings ------------------------------------------------------------------------------------------------------------ */

struct update {
    float *p;
    size_t n; /* of a task */
};
static void update_task(void *arg, int task, int worker) {
    (void)worker;
    struct update *u = arg;
    float *p = u->p + (size_t)task * u->n;
    for (size_t i = 0; i < u->n; i++) p[i] += 1;
}

/* Twelve independent sums in registers; written out, so that nothing is optimised away. */
#if defined(__x86_64__)
#define FMA_TASK(name, isa, bytes)                                                                                     \
    __attribute__((target(isa))) static void name(void *arg, int task, int worker) {                                   \
        (void)arg, (void)task, (void)worker;                                                                           \
        typedef float v __attribute__((vector_size(bytes)));                                                           \
        v a[12] = {{0}}, x = {0}, y = {0};                                                                             \
        for (int i = 0; i < FMA_LOOPS; i++)                                                                            \
            for (int k = 0; k < 12; k++) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(a[k]) : "v"(x), "v"(y));     \
    }
FMA_TASK(fma_256, "avx2,fma", 32)
FMA_TASK(fma_512, "avx512f", 64)
#endif

/* GFLOP/s of all threads; 0: not known for these kernels. */
static double fma_peak(struct pool *pool, enum isa isa) {
#if defined(__x86_64__)
    if (isa == ISA_GENERIC) return 0;
    double best = 1e9;
    for (int i = 0; i < 5; i++) {
        double t = now_s();
        pool_run(pool, isa == ISA_AVX512 ? fma_512 : fma_256, NULL, pool_threads(pool));
        t = now_s() - t;
        best = t < best ? t : best;
    }
    return 2.0 * (isa == ISA_AVX512 ? 16 : 8) * 12 * FMA_LOOPS * pool_threads(pool) / best * 1e-9;
#else
    return (void)pool, (void)isa, 0;
#endif
}

/* --- one point ------------------------------------------------------------------------------------------------------------ */

static void run_point(struct cpu *c, float *state, int n_tok, int reps, double peak) {
    struct delta_shape shape = {.n_key = N_KEY, .n_value = N_VALUE, .dim = DIM, .n_conv = DELTA_CONV};
    const size_t width = (size_t)N_VALUE * DIM, channels = (size_t)delta_conv_dim(&shape), per_layer = width * DIM;
    float *u = floats((size_t)n_tok * channels), *z = floats((size_t)n_tok * width), *y = floats((size_t)n_tok * width);
    float *b = floats((size_t)n_tok * N_VALUE), *a = floats((size_t)n_tok * N_VALUE), *conv = floats(channels * DELTA_CONV);
    float *dt = floats(N_VALUE), *rate = floats(N_VALUE), *norm = floats(DIM), *last = floats(3 * channels);
    for (int i = 0; i < N_VALUE; i++) rate[i] = -fabsf(rate[i]);
    double t[MAX_REPS], update[MAX_REPS];
    for (int i = -1; i < reps; i++) {
        struct update up = {state, per_layer * LAYERS / 512};
        double start = now_s();
        pool_run(c->pool, update_task, &up, 512);
        if (i >= 0) update[i] = 2e-9 * (double)(per_layer * LAYERS * sizeof *state) / (now_s() - start);
        memset(state, 0, per_layer * LAYERS * sizeof *state);
        start = now_s();
        for (int layer = 0; layer < LAYERS; layer++) {
            struct delta_args d = {.y = y, .u = u, .z = z, .b = b, .a = a, .conv = conv, .dt = dt, .rate = rate, .norm = norm, .last = last,
                                   .s = state + (size_t)layer * per_layer, .shape = shape, .n_tok = n_tok, .eps = 1e-6f};
            check(c->ops.delta(&c->ops, &d));
        }
        if (i >= 0) t[i] = (now_s() - start) / LAYERS;
    }
    double s = median(t, reps), gbps = 2e-9 * (double)(per_layer * sizeof *state) / s, most = median(update, reps);
    double gflops = 8e-9 * (double)per_layer * n_tok / s;
    printf("delta,%s,%d,%d,%.6g,%.2f,%.2f,%.1f,%.2f\n", isa_name(c->opts.isa), c->opts.n_thread, n_tok, s, gbps, gbps / most, gflops,
           peak > 0 ? gflops / peak : 0);
    fflush(stdout);
    float *all[] = {u, z, y, b, a, conv, dt, rate, norm, last};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) mem_free(all[i]);
}

static int usage(void) {
    fprintf(stderr, "usage: bench_delta [--isa NAME] [--threads N] [--tokens N,N..] [--reps K]\n");
    return 2;
}

int main(int argc, char **argv) {
    const char *isa = NULL, *tokens = "1,4,8,64,512,2048";
    int threads = 2, reps = 7;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--isa")) isa = argv[i + 1];
        else if (!strcmp(argv[i], "--threads")) threads = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--tokens")) tokens = argv[i + 1];
        else if (!strcmp(argv[i], "--reps")) reps = atoi(argv[i + 1]);
        else return usage();
    }
    if (argc % 2 == 0 || threads < 1 || threads > 1024 || reps < 1 || reps > MAX_REPS) return usage();
    struct cpu *c;
    struct cpu_opts o = {.n_thread = threads};
    check(isa_choose(&o.isa, isa));
    o.limits = (struct ops_limits){.n_tok = MAX_TOKENS, .cols = 32, .rows = 32, .n_head = 1, .n_kv = 1, .head_dim = 32, .n_ctx = 256,
                                   .delta = {.n_key = N_KEY, .n_value = N_VALUE, .dim = DIM, .n_conv = DELTA_CONV}};
    check(cpu_open(&c, &o));
    float *state = floats((size_t)LAYERS * N_VALUE * DIM * DIM);
    double peak = fma_peak(c->pool, o.isa);
    printf("# bench_delta: FMA peak %.1f GFLOP/s, %d threads, %s, median of %d\n", peak, threads, isa_name(o.isa), reps);
    printf("op,isa,threads,tokens,seconds,state_gbps,share_of_update,gflops,share_of_fma\n");
    for (const char *p = tokens; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL) {
        int n = atoi(p);
        if (n < 1 || n > MAX_TOKENS) return usage();
        run_point(c, state, n, reps, peak);
    }
    mem_free(state);
    cpu_close(c);
    return 0;
}
