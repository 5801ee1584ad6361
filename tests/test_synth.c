/* test_synth.c: made-up models: weights of the promised spread in every type, files that our own reader and tokenizer
 * accept. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/model.h"
#include "core/quant.h"
#include "core/synth.h"
#include "core/tokenizer.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct synth *must_open(uint64_t seed) {
    struct synth *s = NULL;
    if (synth_open(&s, seed)) fail_msg("%s", err_text());
    return s;
}

static void weights_have_the_promised_spread(void **st) {
    (void)st;
    struct synth *s = must_open(5);
    enum { COLS = 768, ROWS = 96 };
    float *y = malloc(COLS * ROWS * sizeof *y);
    for (int type = 0; type < QT_END; type++) {
        if (!quant_info(type) || !quant_info(type)->decodable) continue;
        struct shape_tensor t = {.name = "blk.3.attn_q.weight", .n_dims = 2, .dims = {COLS, ROWS, 1, 1}, .type = type};
        size_t row;
        assert_true(quant_row_bytes(&row, type, COLS));
        uint8_t *p = malloc(ROWS * row), *again = malloc(row);
        if (synth_rows(s, p, shape_at(0), &t, 0, ROWS)) fail_msg("%s", err_text());
        quant_decode_row(type, p, y, COLS * ROWS);
        double sum = 0, squares = 0;
        for (int i = 0; i < COLS * ROWS; i++) sum += (double)y[i], squares += (double)y[i] * (double)y[i];
        double mean = sum / (COLS * ROWS), sigma = sqrt(squares / (COLS * ROWS));
        /* Quantising widens or narrows by some percent; the two types made from random codes are looser. */
        double tol = quant_info(type)->encodable ? 0.05 : 0.15;
        if (fabs(mean) > 0.02 * SYNTH_SIGMA || fabs(sigma / SYNTH_SIGMA - 1) > tol)
            fail_msg("%s: mean %g, deviation %g, expected 0 and %g", quant_name(type), mean, sigma,
                     (double)SYNTH_SIGMA);
        /* A row alone is the same row, and no other row. */
        assert_int_equal(synth_rows(s, again, shape_at(0), &t, 41, 1), 0);
        assert_memory_equal(again, p + 41 * row, row);
        assert_memory_not_equal(again, p + 42 * row, row);
        free(again);
        free(p);
    }
    free(y);
    synth_close(s);
}

static void seeds_and_tensors_differ(void **st) {
    (void)st;
    struct shape_tensor a = {.name = "blk.0.attn_q.weight", .n_dims = 2, .dims = {256, 1, 1, 1}, .type = QT_Q8_0};
    struct shape_tensor b = a;
    strcpy(b.name, "blk.1.attn_q.weight");
    uint8_t p[4][272];
    for (int i = 0; i < 4; i++) {
        struct synth *s = must_open(i == 2 ? 2 : 1);
        assert_int_equal(synth_rows(s, p[i], shape_at(0), i == 1 ? &b : &a, 0, 1), 0);
        synth_close(s);
    }
    assert_memory_not_equal(p[0], p[1], 272);
    assert_memory_not_equal(p[0], p[2], 272);
    assert_memory_equal(p[0], p[3], 272);
}

static float one_value(struct synth *s, const char *name, int n_dims, int64_t at) {
    struct shape_tensor t = {.n_dims = n_dims, .dims = {64, 1, 1, 1}, .type = QT_F32};
    snprintf(t.name, sizeof t.name, "%s", name);
    float y[64];
    assert_int_equal(synth_rows(s, y, shape_find("llama-3.1-8b"), &t, 0, 1), 0);
    return y[at];
}

static void vectors_have_sane_values(void **st) {
    (void)st;
    struct synth *s = must_open(1);
    assert_true(one_value(s, "blk.0.attn_norm.weight", 1, 7) == 1);
    assert_true(one_value(s, "blk.0.ssm_norm.weight", 1, 7) == 1);
    for (int i = 0; i < 64; i++) assert_true(one_value(s, "blk.0.ssm_a", 1, i) < 0);
    /* Published divisors of llama 3.1. */
    static const struct {
        int at;
        double want;
    } freqs[] = {{0, 1},        {28, 1},        {29, 1.207484}, {30, 1.553415}, {31, 2.026313},
                 {32, 2.69453}, {33, 3.684253}, {34, 5.257327}, {35, 8},        {63, 8}};
    for (size_t i = 0; i < sizeof freqs / sizeof *freqs; i++) {
        double got = (double)one_value(s, "rope_freqs.weight", 1, freqs[i].at);
        if (fabs(got - freqs[i].want) > 1e-6 * freqs[i].want)
            fail_msg("rope divisor %d is %.7g, expected %.7g", freqs[i].at, got, freqs[i].want);
    }
    synth_close(s);
}

/* A file without tensors: metadata and tokenizer. Returns its path. */
static const char *write_head(const char *shape, const char *vocab) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-synth-%d.gguf", (int)getpid());
    struct gguf_writer *w = NULL;
    assert_int_equal(gguf_writer_open(&w, path), 0);
    const struct shape *s = shape_find(shape);
    synth_metadata(w, s, MIX_Q4_K_M, 0);
    int rc;
    if (vocab) {
        struct gguf *g = NULL;
        if (gguf_open(&g, test_path(vocab))) fail_msg("%s", err_text());
        rc = synth_copy_tokenizer(w, g, s->n_vocab);
        gguf_close(g);
    } else {
        rc = synth_tokenizer(w, s->n_vocab);
    }
    if (rc || gguf_writer_begin_data(w) || gguf_writer_finish(w)) fail_msg("%s", err_text());
    gguf_writer_close(w);
    return path;
}

static void every_shape_has_readable_metadata(void **st) {
    (void)st;
    for (int i = 0; i < shape_count(); i++) {
        const struct shape *s = shape_at(i);
        struct gguf *g = NULL;
        const char *path = write_head(s->name, NULL);
        if (gguf_open(&g, path)) fail_msg("%s: %s", s->name, err_text());
        char key[64];
        uint64_t v = 0;
        snprintf(key, sizeof key, "%s.block_count", s->arch);
        assert_int_equal(gguf_u64(g, key, &v), 0);
        assert_int_equal(v, s->n_layer + s->n_mtp);
        const struct gguf_kv *tokens = gguf_find(g, "tokenizer.ggml.tokens");
        assert_non_null(tokens);
        assert_int_equal(tokens->n, s->n_vocab);
        gguf_close(g);
        unlink(path);
    }
}

/* Encodes `text` with the tokenizer of a file and wants it back. */
static void check_tokenizer(const char *path, const char *text, int want_ids) {
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    if (gguf_open(&g, path) || tokenizer_from_gguf(&t, g)) fail_msg("%s", err_text());
    int32_t *ids;
    size_t n_ids, n;
    char *back;
    assert_int_equal(tokenizer_encode(t, text, strlen(text), TOK_PARSE_SPECIAL, &ids, &n_ids), 0);
    assert_int_equal(tokenizer_decode(t, ids, n_ids, TOK_SHOW_SPECIAL, &back, &n), 0);
    assert_string_equal(back, text);
    if (want_ids) assert_int_equal(n_ids, want_ids);
    assert_true(tokenizer_is_eog(t, tokenizer_find(t, "<|im_end|>")));
    assert_true(tokenizer_find(t, "[PAD151935]") == 151935);
    free(back);
    free(ids);
    tokenizer_close(t);
    gguf_close(g);
}

static void tokenizers_work(void **st) {
    (void)st;
    const char *path = write_head("qwen3-0.6b", NULL);
    /* " the", " a" and the control token are one id each, every other byte is alone. */
    check_tokenizer(path, "<|im_start|> the a\n\xc3\xa9", 6);
    unlink(path);
    path = write_head("qwen3-0.6b", "qwen2-tokenizer/qwen3-vocab.gguf.xz");
    check_tokenizer(path, "Hello world <|im_start|>user", 5);
    unlink(path);
    /* A vocabulary of 151936 tokens under a shape of 152064: the rest is padded. */
    path = write_head("qwen2.5-7b", "qwen2-tokenizer/qwen3-vocab.gguf.xz");
    struct gguf *g = NULL;
    assert_int_equal(gguf_open(&g, path), 0);
    const struct gguf_kv *tokens = gguf_find(g, "tokenizer.ggml.tokens"),
                         *types = gguf_find(g, "tokenizer.ggml.token_type");
    assert_int_equal(tokens->n, 152064);
    size_t n;
    assert_memory_equal(gguf_elem_str(tokens, 152063, &n), "[PAD152063]", 11);
    uint64_t v = 0;
    assert_true(gguf_elem_u64(types, 152063, &v));
    assert_int_equal(v, 5);
    gguf_close(g);
    unlink(path);
}

struct job {
    struct gguf_writer *w;
    struct synth *s;
    const struct shape *shape;
};

static int put_record(void *ctx, const struct shape_tensor *t) {
    struct job *j = ctx;
    return gguf_writer_tensor(j->w, t->name, t->type, t->n_dims, t->dims);
}

static int put_data(void *ctx, const struct shape_tensor *t) {
    struct job *j = ctx;
    uint8_t *p = malloc(t->bytes);
    int rc = synth_rows(j->s, p, j->shape, t, 0, t->dims[1] * t->dims[2]);
    if (!rc) rc = gguf_writer_data(j->w, p, t->bytes);
    free(p);
    return rc;
}

/* The shape with everything that costs bytes made small. */
static struct shape shrunk(const struct shape *big) {
    struct shape s = *big;
    s.n_layer = 4;
    s.n_vocab = 320;
    s.dim = 256;
    s.n_head = 4;
    s.n_kv = 2;
    if (s.n_ff) s.n_ff = 512;
    if (s.n_expert) s.n_expert = 4, s.n_expert_used = 2, s.n_ff_expert = 256;
    if (s.n_ff_shared) s.n_ff_shared = 256;
    if (s.n_value_head) s.n_key_head = 2, s.n_value_head = 4;
    return s;
}

/* Keys and tensors of every family are what the loader expects. */
static void small_files_load_as_models(void **st) {
    (void)st;
    char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-synth-%d.gguf", (int)getpid());
    for (int i = 0; i < shape_count(); i++) {
        struct shape shape = shrunk(shape_at(i));
        struct job j = {.s = must_open(1), .shape = &shape};
        assert_int_equal(gguf_writer_open(&j.w, path), 0);
        synth_metadata(j.w, &shape, MIX_Q4_K_M, 0);
        synth_tokenizer(j.w, shape.n_vocab);
        if (shape_tensors(&shape, MIX_Q4_K_M, false, 0, put_record, &j) || gguf_writer_begin_data(j.w) ||
            shape_tensors(&shape, MIX_Q4_K_M, false, 0, put_data, &j) || gguf_writer_finish(j.w))
            fail_msg("%s: %s", shape.name, err_text());
        gguf_writer_close(j.w);
        synth_close(j.s);
        struct gguf *g = NULL;
        struct model m;
        if (gguf_open(&g, path)) fail_msg("%s: %s", shape.name, err_text());
        if (model_open(&m, g)) fail_msg("%s: %s", shape.name, err_text());
        assert_int_equal(m.n_layer, 4);
        assert_int_equal(m.n_vocab, 320);
        model_close(&m);
        gguf_close(g);
        unlink(path);
    }
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(weights_have_the_promised_spread),
        cmocka_unit_test(seeds_and_tensors_differ),
        cmocka_unit_test(vectors_have_sane_values),
        cmocka_unit_test(every_shape_has_readable_metadata),
        cmocka_unit_test(tokenizers_work),
        cmocka_unit_test(small_files_load_as_models),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
