/* test_engine.c: the engine's edges: files that shrink, interruption, budgets, numbers that are not finite, allocations
 * inside a pass. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/quant.h"
#include "core/unit.h"
#include "offload/engine.h"
#include "tests/support.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LLAMA "tiny-models/tiny-random-llama-f32.gguf"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 0
static atomic_long n_alloc;
#else
#define COUNTS_ALLOCATIONS 1
static atomic_long n_alloc;
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *malloc(size_t n) { return atomic_fetch_add(&n_alloc, 1), __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return atomic_fetch_add(&n_alloc, 1), __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return atomic_fetch_add(&n_alloc, 1), __libc_realloc(p, n); }
#endif

static struct plan_request request(int64_t n_ctx) {
    struct plan_request q = {.n_ctx = n_ctx, .type_k = QT_F16, .type_v = QT_F16, .logits_rows = 1, .n_thread = 2, .host_limit = SIZE_MAX};
    assert_int_equal(isa_choose(&q.isa, NULL), 0);
    return q;
}

/* A copy of a test file that may be spoiled. */
static const char *copy_of(const char *name) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-engine-XXXXXX");
    size_t n;
    char *data = test_read(name, &n);
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    close(fd);
    free(data);
    return path;
}

static void a_file_that_shrinks_is_an_io_error(void **state) {
    (void)state;
    const char *path = copy_of(LLAMA);
    struct engine *e;
    assert_int_equal(engine_open(&e, path, NULL), 0);
    assert_int_equal(truncate(path, 300000), 0);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 2}, NULL, NULL, NULL), ERR_IO);
    assert_non_null(strstr(err_text(), path));
    struct session *s;
    struct plan p;
    struct plan_request q = request(16);
    assert_int_equal(plan_make(&p, engine_model(e), &q), 0);
    assert_int_equal(session_open(&s, e, &p), ERR_ARG);
    engine_close(e);
    unlink(path);
}

static void a_file_that_is_removed_still_loads(void **state) {
    (void)state;
    const char *path = copy_of(LLAMA);
    struct engine *e;
    assert_int_equal(engine_open(&e, path, NULL), 0);
    unlink(path);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 1}, NULL, NULL, NULL), 0);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 1}, NULL, NULL, NULL), ERR_ARG);
    engine_close(e);
    assert_int_equal(engine_open(&e, path, NULL), ERR_FORMAT);
}

static void loading_can_be_interrupted(void **state) {
    (void)state;
    struct engine *e;
    volatile sig_atomic_t stop = 1;
    assert_int_equal(engine_open(&e, test_path(LLAMA), NULL), 0);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 2}, NULL, NULL, &stop), ERR_INTERRUPTED);
    stop = 0;
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 2}, NULL, NULL, &stop), 0);
    struct session *s;
    struct plan p;
    struct plan_request q = request(64);
    assert_int_equal(plan_make(&p, engine_model(e), &q), 0);
    assert_int_equal(session_open(&s, e, &p), 0);
    int32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    struct session_hooks h = {.stop = &stop};
    assert_int_equal(session_eval(s, ids, 8, LOGITS_LAST, &h), 0);
    stop = 1;
    assert_int_equal(session_eval(s, ids, 8, LOGITS_LAST, &h), ERR_INTERRUPTED);
    assert_int_equal(session_pos(s), 8);
    session_close(s);
    engine_close(e);
}

/* NaN in a weight is found where it first shows, and named. */
static void numbers_that_are_not_finite_stop_the_run(void **state) {
    (void)state;
    const char *path = copy_of(LLAMA);
    struct gguf *g;
    assert_int_equal(gguf_open(&g, path), 0);
    const struct gguf_tensor *t = gguf_tensor_find(g, "blk.1.ffn_norm.weight");
    FILE *f = fopen(path, "r+b");
    float bad = NAN;
    fseek(f, (long)t->offset + 8, SEEK_SET);
    fwrite(&bad, 4, 1, f);
    fclose(f);
    gguf_close(g);
    struct engine *e;
    struct session *s;
    struct plan p;
    struct plan_request q = request(16);
    int32_t ids[2] = {1, 2};
    assert_int_equal(engine_open(&e, path, NULL), 0);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 1}, NULL, NULL, NULL), 0);
    assert_int_equal(plan_make(&p, engine_model(e), &q), 0);
    assert_int_equal(session_open(&s, e, &p), 0);
    assert_int_equal(session_eval(s, ids, 2, LOGITS_LAST, NULL), ERR_NUMERIC);
    assert_non_null(strstr(err_text(), "layer 1"));
    assert_int_equal(session_pos(s), 0);
    session_close(s);
    engine_close(e);
    unlink(path);
}

static int stop_at_3(void *arg, int64_t pos, const float *logits) {
    (void)arg, (void)logits;
    return pos == 3 ? err_set(ERR_IO, "enough") : 0;
}

static void a_hook_can_end_the_evaluation(void **state) {
    (void)state;
    struct engine *e;
    struct session *s;
    struct plan p;
    struct plan_request q = request(16);
    int32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    assert_int_equal(engine_open(&e, test_path(LLAMA), NULL), 0);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 1}, NULL, NULL, NULL), 0);
    assert_int_equal(plan_make(&p, engine_model(e), &q), 0);
    assert_int_equal(session_open(&s, e, &p), 0);
    struct session_hooks h = {.logits = stop_at_3};
    assert_int_equal(session_eval(s, ids, 8, LOGITS_ALL, &h), ERR_IO);
    assert_string_equal(err_text(), "enough");
    session_close(s);
    engine_close(e);
}

static void a_pass_allocates_nothing(void **state) {
    (void)state;
    if (!COUNTS_ALLOCATIONS) {
        printf("skipped: allocations are not counted under a sanitizer\n");
        return;
    }
    static const char *const files[] = {"qwen3moe", "gemma3"};
    for (int f = 0; f < 2; f++) {
        struct engine *e;
        struct session *s;
        struct plan p;
        struct plan_request q = request(300);
        char name[128];
        int32_t ids[200];
        for (int i = 0; i < 200; i++) ids[i] = i;
        snprintf(name, sizeof name, "tiny-models/tiny-random-%s-f32.gguf", files[f]);
        assert_int_equal(engine_open(&e, test_path(name), NULL), 0);
        assert_int_equal(engine_load(e, &(struct plan){.n_thread = 2}, NULL, NULL, NULL), 0);
        assert_int_equal(plan_make(&p, engine_model(e), &q), 0);
        assert_int_equal(session_open(&s, e, &p), 0);
        long before = atomic_load(&n_alloc);
        assert_true(before > 0);
        assert_int_equal(session_eval(s, ids, 200, LOGITS_LAST, NULL), 0);
        for (int i = 0; i < 20; i++) assert_int_equal(session_eval(s, ids + i, 1, LOGITS_LAST, NULL), 0);
        assert_int_equal(atomic_load(&n_alloc), before);
        session_close(s);
        engine_close(e);
    }
}

static void the_home_is_the_sum_of_the_units(void **state) {
    (void)state;
    static const char *const files[] = {"llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "llama31rope"};
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        struct gguf *g;
        struct model m;
        struct unit *u;
        int n;
        char name[128];
        snprintf(name, sizeof name, "tiny-models/tiny-random-%s-f32.gguf", files[f]);
        assert_int_equal(gguf_open(&g, test_path(name)), 0);
        assert_int_equal(model_open(&m, g), 0);
        assert_int_equal(model_units(&u, &n, &m), 0);
        size_t sum = 0;
        for (int i = 0; i < n; i++) sum += u[i].home_bytes;
        assert_int_equal(sum, home_bytes(&m) + tensor_home_bytes(&m.rope_freqs, true));
        free(u);
        model_close(&m);
        gguf_close(g);
    }
}

static void budgets_are_kept_and_numbers_add_up(void **state) {
    (void)state;
    struct engine *e;
    assert_int_equal(engine_open(&e, test_path(LLAMA), NULL), 0);
    const struct model *m = engine_model(e);
    uint64_t rng = 11;
    for (int i = 0; i < 1000; i++) {
        struct plan_request q = request(1);
        struct plan p;
        static const int types[] = {QT_F32, QT_F16, QT_BF16};
        q.type_k = types[test_rand(&rng) % 3];
        q.type_v = types[test_rand(&rng) % 3];
        q.chunk_tokens = (int)(test_rand(&rng) % 3000);
        q.host_limit = (size_t)(70 << 20) + test_rand(&rng) % (size_t)(8ull << 30);
        int64_t n = plan_max_ctx(m, &q, INT64_C(1) << 40);
        if (!n) continue;
        q.n_ctx = n;
        if (plan_make(&p, m, &q)) fail_msg("case %d: %s", i, err_text());
        assert_true(p.host_bytes <= q.host_limit);
        size_t run = p.weights_bytes + p.kv_bytes + p.state_bytes + p.scratch_bytes + p.runtime_bytes;
        assert_true(p.host_bytes >= run && p.host_bytes >= p.weights_bytes + p.load_bytes + p.runtime_bytes);
        q.n_ctx = n + 256;
        assert_int_equal(plan_make(&p, m, &q), ERR_BUDGET);
        assert_true(p.host_bytes > q.host_limit);
    }
    struct plan_request q = request(INT64_C(1) << 62);
    struct plan p;
    assert_int_equal(plan_make(&p, m, &q), ERR_ARG); /* beyond what a KV can count */
    q.n_ctx = INT64_C(1) << 40;
    q.host_limit = (size_t)1 << 40;
    assert_int_equal(plan_make(&p, m, &q), ERR_BUDGET);
    q.n_ctx = 0;
    assert_int_equal(plan_make(&p, m, &q), ERR_ARG);
    engine_close(e);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(a_file_that_shrinks_is_an_io_error),
        cmocka_unit_test(a_file_that_is_removed_still_loads),
        cmocka_unit_test(loading_can_be_interrupted),
        cmocka_unit_test(numbers_that_are_not_finite_stop_the_run),
        cmocka_unit_test(a_hook_can_end_the_evaluation),
        cmocka_unit_test(a_pass_allocates_nothing),
        cmocka_unit_test(the_home_is_the_sum_of_the_units),
        cmocka_unit_test(budgets_are_kept_and_numbers_add_up),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
