/* test_hybrid_layout.c: qwen3next and qwen35moe are one network in two file layouts. The tiny qwen3next model is rewritten as
 * qwen35moe, value heads in tiled order and beta and alpha apart, and must give qwen3next's stored logits. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/gguf_write.h"
#include "core/quant.h"
#include "offload/engine.h"
#include "tests/support.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 512, HK = 2, HV = 4, R = HV / HK, DIM = 32, QK = 2 * HK * DIM };

/* Value head of qwen3next that is head j of the tiled order. */
static int grouped(int j) { return j % HK * R + j / HK; }

/* Rows from `first` on in the tiled order of value heads of `per` rows each. */
static void tile_rows(float *dst, const float *src, int64_t first, int64_t per, int64_t cols) {
    for (int j = 0; j < HV; j++)
        memcpy(dst + (first + j * per) * cols, src + (first + grouped(j) * per) * cols, (size_t)(per * cols) * sizeof *dst);
}

static bool named(const char *name, const char *suffix) {
    const char *dot = strstr(name, ".");
    dot = dot ? strstr(dot + 1, ".") : NULL; /* after blk.N. */
    return dot && !strcmp(dot + 1, suffix);
}

/* The tensor's data in the other layout. */
static void rearrange(float *dst, const float *src, const struct gguf_tensor *t) {
    int64_t cols = t->dims[0], rows = t->dims[1];
    memcpy(dst, src, t->bytes);
    if (named(t->name, "attn_qkv.weight") || named(t->name, "ssm_conv1d.weight")) {
        /* attention layers have no such tensor in this file */
        tile_rows(dst, src, QK, DIM, cols);
    } else if (named(t->name, "attn_gate.weight")) {
        tile_rows(dst, src, 0, DIM, cols);
    } else if (named(t->name, "ssm_a") || named(t->name, "ssm_dt.bias")) {
        tile_rows(dst, src, 0, 1, 1);
    } else if (named(t->name, "ssm_out.weight")) {
        for (int64_t r = 0; r < rows; r++) tile_rows(dst + r * cols, src + r * cols, 0, DIM, 1);
    }
}

/* beta (which = 0) or alpha of ssm_ba, whose rows are per key head R of beta, then R of alpha. */
static void split_ba(float *dst, const float *src, int64_t cols, int which) {
    for (int j = 0; j < HV; j++) {
        int head = grouped(j);
        memcpy(dst + j * cols, src + (head / R * 2 * R + which * R + head % R) * cols, (size_t)cols * sizeof *dst);
    }
}

static void write_keys(struct gguf_writer *w, const struct gguf *g) {
    static const char from[] = "qwen3next.", arch[] = "qwen35moe";
    for (int i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv(g, i);
        char key[128];
        if (!strcmp(kv->key, "general.architecture")) {
            gguf_writer_str(w, kv->key, arch, strlen(arch));
        } else if (!strncmp(kv->key, from, strlen(from))) {
            snprintf(key, sizeof key, "%s.%s", arch, kv->key + strlen(from));
            gguf_writer_scalar(w, key, kv->type, kv->data);
        } else {
            gguf_writer_copy_kv(w, kv);
        }
    }
    gguf_writer_arr(w, "qwen35moe.rope.dimension_sections", GGUF_I32, 4, (const int32_t[]){2, 1, 1, 0});
}

static const char *ba_name(char *buf, size_t cap, const char *name, int which) {
    snprintf(buf, cap, "%.*s%s", (int)(strlen(name) - strlen("ssm_ba.weight")), name, which ? "ssm_alpha.weight" : "ssm_beta.weight");
    return buf;
}

static void rewrite(const char *path) {
    struct gguf *g;
    struct gguf_writer *w;
    char name[128];
    int n_ba = 0;
    if (gguf_open(&g, test_path("tiny-models/tiny-random-qwen3next-f32.gguf")) || gguf_writer_open(&w, path)) fail_msg("%s", err_text());
    write_keys(w, g);
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        assert_int_equal(t->type, QT_F32);
        if (named(t->name, "ssm_ba.weight"))
            for (int k = 0; k < 2; k++) gguf_writer_tensor(w, ba_name(name, sizeof name, t->name, k), QT_F32, 2, (int64_t[]){t->dims[0], HV});
        else
            gguf_writer_tensor(w, t->name, t->type, t->n_dims, t->dims);
    }
    gguf_writer_begin_data(w);
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        float *src = malloc(t->bytes), *dst = malloc(t->bytes);
        assert_int_equal(gguf_read(g, t->shard, t->offset, src, t->bytes), 0);
        bool ba = named(t->name, "ssm_ba.weight");
        n_ba += ba;
        if (ba)
            for (int k = 0; k < 2; k++) split_ba(dst + k * HV * t->dims[0], src, t->dims[0], k);
        else
            rearrange(dst, src, t);
        gguf_writer_data(w, dst, t->bytes);
        free(src);
        free(dst);
    }
    if (gguf_writer_finish(w)) fail_msg("%s", err_text());
    assert_int_equal(n_ba, 6);
    gguf_writer_close(w);
    gguf_close(g);
}

static int keep(void *arg, int64_t pos, const float *logits) {
    memcpy((float *)arg + pos * VOCAB, logits, VOCAB * sizeof *logits);
    return 0;
}

static void both_layouts_give_the_stored_logits(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-layout-%d.gguf", (int)getpid());
    rewrite(path);
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
    if (engine_open(&e, path, NULL) || plan_make(&p, engine_model(e), &q) || engine_load(e, 2, NULL, NULL, NULL) || session_open(&s, e, &p) ||
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
