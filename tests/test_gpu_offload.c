/* test_gpu_offload.c: placement never changes results. Tiny models of every architecture through the engine under random
 * plans (every part in VRAM, on the CPU or streamed; FFNs split by rows, experts by number; rings, chunks, passes of any size;
 * two phases that place things differently), against the engine without a GPU.
 *
 * With f32 weights and KV what remains is the order of f32 sums: 1e-4. With a narrower KV type a sum that is rounded the other
 * way moves a stored value by one step: less than a quarter of what the type as a whole does to the logits.
 * TEST_PLANS (environment): how many plans per model and KV type; 8, which makes 232, or 2 for older chips and under sanitizers. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "core/kv.h"
#include "core/quant.h"
#include "gpu/gpu.h"
#include "offload/engine.h"
#include "offload/run.h"
#include "tests/gpu_orders.h"
#include "tests/offload_plans.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_TOK = 22, FIRST = 13 };
static const int32_t ids[N_TOK] = {1, 17, 300, 5, 511, 42, 42, 99, 250, 7, 3, 410, 128, 64, 32, 16, 8, 4, 2, 500, 11, 77};

static const char *const files[] = {"llama-f32", "llama31rope-f32", "qwen2-f32", "qwen3-f32", "gemma3-f32", "qwen35-f32", "qwen3moe-f32", "qwen3next-f32"};

static const char *path_of(const char *file) {
    char name[256];
    snprintf(name, sizeof name, "tiny-models/tiny-random-%s.gguf", file);
    return test_path(name);
}

static int n_plans(void) {
    const char *n = getenv("TEST_PLANS");
    if (n) return atoi(n);
#if (defined(GPU_EMU) && EMU_ARCH < 800) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 2;
#else
    return 8;
#endif
}

struct rows {
    float *v;
    int n_vocab;
    int64_t n;
};

static int keep(void *arg, int64_t pos, const float *logits) {
    struct rows *r = arg;
    memcpy(r->v + pos * r->n_vocab, logits, (size_t)r->n_vocab * sizeof *logits);
    r->n++;
    return 0;
}

/* The text in one call of FIRST tokens, single ones, and a call of the rest. */
static int evaluate(struct session *s, struct rows *r) {
    struct session_hooks h = {.logits = keep, .arg = r};
    int rc = session_eval(s, ids, FIRST, LOGITS_ALL, &h);
    for (int i = FIRST; i < N_TOK - 4 && !rc; i++) rc = session_eval(s, ids + i, 1, LOGITS_LAST, &h);
    return rc ? rc : session_eval(s, ids + N_TOK - 4, 4, LOGITS_ALL, &h);
}

static float *logits_of(const char *file, const struct plan *p, struct run_stats *stats) {
    struct engine *e;
    struct session *s;
    ok(engine_open(&e, path_of(file), NULL));
    struct rows r = {.n_vocab = engine_model(e)->n_vocab};
    r.v = calloc(N_TOK * (size_t)r.n_vocab, sizeof *r.v);
    ok(engine_load(e, p, NULL, NULL, NULL));
    ok(session_open(&s, e, p));
    ok(evaluate(s, &r));
    assert_int_equal(r.n, N_TOK);
    if (stats) session_stats(s, stats);
    session_close(s);
    engine_close(e);
    return r.v;
}

static void cpu_plan(struct plan *p, const char *file, int type_k, int type_v) {
    struct engine *e;
    struct plan_request q = {.n_ctx = 600, .type_k = type_k, .type_v = type_v, .chunk_tokens = FIRST, .logits_rows = 3, .n_thread = 2, .host_limit = SIZE_MAX};
    ok(isa_choose(&q.isa, NULL));
    ok(engine_open(&e, path_of(file), NULL));
    ok(plan_make(p, engine_model(e), &q));
    engine_close(e);
}

static void random_plan(struct plan *p, const char *file, const struct plan *cpu, uint64_t seed, enum plan_kind kind) {
    struct engine *e;
    ok(engine_open(&e, path_of(file), NULL));
    plan_random(p, engine_model(e), cpu, seed, kind);
    engine_close(e);
}

static double difference(const float *a, const float *b, int64_t n) {
    double d = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = fabs((double)a[i] - (double)b[i]);
        if (!(x <= d)) d = x;
    }
    return d;
}

static int vocab_of(const char *file) {
    struct engine *e;
    ok(engine_open(&e, path_of(file), NULL));
    int n = engine_model(e)->n_vocab;
    engine_close(e);
    return n;
}

/* One plan in all orders: the same bits each time, and within the bound of what the CPU gives. */
static void check_plan(const char *file, const struct plan *p, const float *want, double bound, uint64_t seed) {
    int64_t n = (int64_t)N_TOK * vocab_of(file);
    float *first = NULL;
#if defined(GPU_EMU)
    struct gpu_order o;
    for (int i = 0; gpu_order_at(&o, i); i++) {
        gpu_order_set(&o);
#else
    for (int i = 0; i < 2; i++) {
#endif
        float *got = logits_of(file, p, NULL);
        double d = difference(got, want, n);
        if (!(d <= bound)) fail_msg("%s, plan %llu, order %d: logits differ by %g, bound %g", file, (unsigned long long)seed, i, d, bound);
        if (first && memcmp(first, got, (size_t)n * sizeof *got)) fail_msg("%s, plan %llu: other bits in order %d", file, (unsigned long long)seed, i);
        if (first) free(got);
        else first = got;
#if defined(GPU_EMU)
        if (emu_leaks()) fail_msg("%s, plan %llu: something is still open", file, (unsigned long long)seed);
#endif
    }
    free(first);
}

static void with_kv(const char *file, int type_k, int type_v, double bound, int n, enum plan_kind kind) {
    struct plan *cpu = malloc(sizeof *cpu), *p = malloc(sizeof *p);
    cpu_plan(cpu, file, type_k, type_v);
    float *want = logits_of(file, cpu, NULL);
    if (bound == 0) { /* from what the type does */
        struct plan *f32 = malloc(sizeof *f32);
        cpu_plan(f32, file, QT_F32, QT_F32);
        float *exact = logits_of(file, f32, NULL);
        bound = difference(want, exact, (int64_t)N_TOK * vocab_of(file)) / 4;
        free(exact), free(f32);
    }
    for (int i = 0; i < n; i++) {
        uint64_t seed = (uint64_t)i * 1000 + (uint64_t)kind + 7 * (uint64_t)type_k;
        random_plan(p, file, cpu, seed, kind);
        check_plan(file, p, want, bound, seed);
    }
    free(want), free(cpu), free(p);
}

static void all_in_vram(void **state) {
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) with_kv(files[f], QT_F32, QT_F32, 1e-4, 1, PLAN_ALL_VRAM);
}

static void some_layers_on_the_cpu(void **state) {
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) with_kv(files[f], QT_F32, QT_F32, 1e-4, n_plans(), PLAN_LAYERS);
}

static void anything_anywhere(void **state) {
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) with_kv(files[f], QT_F32, QT_F32, 1e-4, n_plans(), PLAN_ANY);
}

static void two_phases(void **state) {
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) with_kv(files[f], QT_F32, QT_F32, 1e-4, n_plans(), PLAN_TWO_PHASES);
}

static void all_kv_types(void **state) {
    (void)state;
    static const int types[] = {QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
    for (int t = 0; t < 4; t++) with_kv("qwen3-f32", types[t], types[(t + 1) % 4], 0, n_plans(), PLAN_TWO_PHASES);
}

/* A text of more than one page, and back into the first one: the last logits. */
static float *last_of_pages(const char *file, const struct plan *p) {
    enum { LONG = KV_PAGE + 20, MORE = 6 };
    struct engine *e;
    struct session *s;
    int32_t text[LONG + MORE];
    ok(engine_open(&e, path_of(file), NULL));
    int n_vocab = engine_model(e)->n_vocab;
    for (int i = 0; i < LONG + MORE; i++) text[i] = (i * 7919 + 11) % n_vocab;
    ok(engine_load(e, p, NULL, NULL, NULL));
    ok(session_open(&s, e, p));
    ok(session_eval(s, text, LONG, LOGITS_NONE, NULL));
    for (int i = LONG; i < LONG + MORE; i++) ok(session_eval(s, text + i, 1, LOGITS_NONE, NULL));
    ok(session_truncate(s, KV_PAGE - 3));
    ok(session_eval(s, text, MORE, LOGITS_LAST, NULL));
    float *v = malloc((size_t)n_vocab * sizeof *v);
    memcpy(v, session_logits(s), (size_t)n_vocab * sizeof *v);
    session_close(s);
    engine_close(e);
    return v;
}

static void over_pages(void **state) {
    (void)state;
    const char *file = "qwen3-f32";
    struct plan *cpu = malloc(sizeof *cpu), *p = malloc(sizeof *p);
    cpu_plan(cpu, file, QT_F32, QT_F32);
    float *want = last_of_pages(file, cpu);
    for (int i = 0; i < 4; i++) {
        random_plan(p, file, cpu, 900 + (uint64_t)i, i % 2 ? PLAN_ANY : PLAN_TWO_PHASES);
#if defined(GPU_EMU)
        gpu_order_set(&(struct gpu_order){(enum emu_policy)(i % 3), i % 3, 5});
#endif
        float *got = last_of_pages(file, p);
        double d = difference(got, want, vocab_of(file));
        if (!(d <= 1e-4)) fail_msg("plan %d: logits differ by %g", 900 + i, d);
        free(got);
    }
    free(want), free(cpu), free(p);
}

/* --- the planner's own plans ---------------------------------------------------------------------------------------------- */

static int planned(struct plan *p, const char *file, size_t vram_limit) {
    struct engine *e;
    const struct machine *mc;
    struct plan_request q = {.n_ctx = 600, .type_k = QT_F32, .type_v = QT_F32, .chunk_tokens = FIRST, .logits_rows = 3, .n_thread = 2,
                             .host_limit = SIZE_MAX, .vram_limit = vram_limit};
    ok(isa_choose(&q.isa, NULL));
    ok(machine_find(&mc, "v100-16g-pcie3"));
    q.machine = mc;
    ok(engine_open(&e, path_of(file), NULL));
    int rc = plan_make(p, engine_model(e), &q);
    for (int ph = 0; ph < PLAN_PHASES && !rc; ph++) { /* what is carved is what was planned */
        const struct plan_table *t = &p->phase[ph].vram;
        size_t bytes, own = t->sum - t->runtime - t->headroom;
        ok(run_vram_bytes(&bytes, engine_model(e), p, (enum plan_phase_id)ph));
        if (bytes > own || own - bytes > (size_t)32 << 20)
            fail_msg("%s, %zu bytes of VRAM, phase %d: %zu are carved, planned are %zu", file, vram_limit, ph, bytes, own);
    }
    engine_close(e);
    return rc;
}

static void plans_of_the_planner(void **state) {
    (void)state;
    struct plan *p = malloc(sizeof *p), *cpu = malloc(sizeof *cpu);
    int ran = 0;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        cpu_plan(cpu, files[f], QT_F32, QT_F32);
        float *want = logits_of(files[f], cpu, NULL);
        ok(planned(p, files[f], (size_t)1 << 30));
        size_t all = p->phase[PLAN_PREFILL].vram.sum > p->phase[PLAN_DECODE].vram.sum ? p->phase[PLAN_PREFILL].vram.sum : p->phase[PLAN_DECODE].vram.sum;
        static const double shares[] = {1, 0.8, 0.6, 0.4};
        for (int i = 0; i < 4; i++) {
            int rc = planned(p, files[f], (size_t)(shares[i] * (double)all));
            if (rc == ERR_BUDGET) continue;
            ok(rc);
            if (!p->gpu) continue;
            check_plan(files[f], p, want, 1e-4, (uint64_t)(100 * shares[i]));
            ran++;
        }
        free(want);
    }
    if (ran < 8) fail_msg("only %d plans were carried out", ran);
    free(p), free(cpu);
}

/* --- failures -------------------------------------------------------------------------------------------------------------- */

#if defined(GPU_EMU)
static const char *const calls[] = {"cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
                                    "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaMemsetAsync", "launch",
                                    "cudaStreamSynchronize", "cudaEventSynchronize"};
enum { N_CALL = sizeof calls / sizeof *calls };

/* Everything up to the end of a text, whatever fails on the way; then all is closed. count: ?calls before that. */
static int whole_run(const char *file, const struct plan *p, long count[N_CALL]) {
    struct engine *e;
    struct session *s = NULL;
    ok(engine_open(&e, path_of(file), NULL));
    struct rows r = {.n_vocab = engine_model(e)->n_vocab};
    r.v = calloc(N_TOK * (size_t)r.n_vocab, sizeof *r.v);
    int rc = engine_load(e, p, NULL, NULL, NULL);
    if (!rc) rc = session_open(&s, e, p);
    if (!rc) rc = evaluate(s, &r);
    for (int c = 0; c < N_CALL && count; c++) count[c] = emu_calls(calls[c]);
    session_close(s);
    engine_close(e);
    free(r.v);
    return rc;
}

/* The n-th call of each kind fails, for up to 12 n of each, spread over all of them. */
static void every_call_may_fail(void **state) {
    (void)state;
    const char *file = "qwen3next-f32";
    struct plan *cpu = malloc(sizeof *cpu), *p = malloc(sizeof *p);
    long count[N_CALL];
    cpu_plan(cpu, file, QT_F16, QT_Q8_0);
    random_plan(p, file, cpu, 11, PLAN_TWO_PHASES);
    emu_reset(NULL);
    ok(whole_run(file, p, count));
    for (int c = 0; c < N_CALL; c++) {
        if (!count[c]) fail_msg("%s is never called", calls[c]);
        for (int i = 0, most = count[c] < 12 ? (int)count[c] : 12; i < most; i++) {
            long n = most < 2 ? 1 : 1 + i * (count[c] - 1) / (most - 1);
            emu_reset(NULL);
            emu_fail(calls[c], n, 0, 0);
            int rc = whole_run(file, p, NULL);
            emu_fail_clear();
            bool degrades = !strcmp(calls[c], "cudaHostRegister"); /* what cannot be locked is copied slower */
            if (degrades ? rc != 0 : rc != ERR_DEVICE && rc != ERR_BUDGET && rc != ERR_NOMEM)
                fail_msg("%s number %ld fails: %d, %s", calls[c], n, rc, rc ? err_text() : "nobody noticed");
            if (emu_leaks()) fail_msg("%s number %ld fails: something is left open", calls[c], n);
        }
    }
    free(cpu), free(p);
}
#endif

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(all_in_vram),
        cmocka_unit_test(some_layers_on_the_cpu),
        cmocka_unit_test(anything_anywhere),
        cmocka_unit_test(two_phases),
        cmocka_unit_test(all_kv_types),
        cmocka_unit_test(over_pages),
        cmocka_unit_test(plans_of_the_planner),
#if defined(GPU_EMU)
        cmocka_unit_test(every_call_may_fail),
#endif
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
