/* test_hybrid_layout.c: qwen3next and qwen35moe are one network in two file layouts. The tiny qwen3next model is rewritten as
 * qwen35moe, value heads in tiled order and beta and alpha apart, and must give qwen3next's stored logits. */
#include "core/err.h"
#include "core/quant.h"
#include "offload/engine.h"
#include "tests/support.h"
#include "tests/support_layout.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 512 };

static int keep(void *arg, int64_t pos, const float *logits) {
    memcpy((float *)arg + pos * VOCAB, logits, VOCAB * sizeof *logits);
    return 0;
}

static void both_layouts_give_the_stored_logits(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-layout-%d.gguf", (int)getpid());
    write_as_qwen35moe(path);
    size_t bytes;
    char *text = test_read("tiny-models/expected.json", &bytes);
    json_error_t err;
    json_t *j = json_loadb(text, bytes, 0, &err), *tokens = json_object_get(j, "tokens");
    int n = (int)json_array_size(tokens);
    int32_t ids[256];
    assert_true(n > 0 && n <= 256);
    for (int i = 0; i < n; i++) ids[i] = (int32_t)json_integer_value(json_array_get(tokens, (size_t)i));
    struct engine *e;
    struct session *s;
    struct plan_request q = {.n_ctx = n, .type_k = QT_F32, .type_v = QT_F32, .n_thread = 2, .logits_rows = 8, .host_limit = SIZE_MAX};
    struct plan p;
    assert_int_equal(isa_choose(&q.isa, NULL), 0);
    float *got = calloc((size_t)n * VOCAB, sizeof *got);
    if (engine_open(&e, path, NULL) || plan_make(&p, engine_model(e), &q) || engine_load(e, &(struct plan){.n_thread = 2}, NULL, NULL, NULL) || session_open(&s, e, &p) ||
        session_eval(s, ids, n, LOGITS_ALL, &(struct session_hooks){.logits = keep, .arg = got}))
        fail_msg("%s", err_text());
    assert_true(engine_model(e)->delta.tiled);
    float *want = (float *)test_read("tiny-models/tiny-random-qwen3next.logits.f32", NULL);
    for (int i = 0; i < n * VOCAB; i++)
        if (!(fabsf(got[i] - want[i]) <= 2e-4f)) fail_msg("logit %d is %g, expected %g, tolerance 2e-4", i, got[i], want[i]);
    session_close(s);
    engine_close(e);
    unlink(path);
    free(want);
    free(got);
    free(text);
    json_decref(j);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(both_layouts_give_the_stored_logits)};
    return cmocka_run_group_tests(t, NULL, NULL);
}
