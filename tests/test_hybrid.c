/* test_hybrid.c: models with Gated DeltaNet layers as a whole: what is read from their files, their recurrent state and how a
 * session goes back, quantised weights, multi-token prediction. (f32 logits of the trunk: tests/test_logits.c.) */
#include "core/decoder.h"
#include "core/err.h"
#include "core/gguf.h"
#include "core/kv.h"
#include "core/quant.h"
#include "core/state.h"
#include "cpu/pool.h"
#include "offload/engine.h"
#include "offload/session.h"
#include "tests/support.h"
#include "tests/support_gguf.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define TINY "tiny-models/tiny-random-"
enum { VOCAB = 512 };

static json_t *expected(void) {
    size_t n;
    json_error_t err;
    char *text = test_read("tiny-models/expected.json", &n);
    json_t *j = json_loadb(text, n, 0, &err);
    free(text);
    if (!j) fail_msg("expected.json: %s", err.text);
    return j;
}

static int32_t *ids_of(const json_t *j, const char *key, int *n) {
    const json_t *list = json_object_get(j, key);
    *n = (int)json_array_size(list);
    int32_t *v = malloc((size_t)*n * sizeof *v + 1);
    for (int i = 0; i < *n; i++) v[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return v;
}

static struct plan_request request(int64_t n_ctx, int chunk) {
    struct plan_request q = {.n_ctx = n_ctx, .type_k = QT_F32, .type_v = QT_F32, .chunk_tokens = chunk, .logits_rows = 4, .n_thread = 2,
                             .host_limit = SIZE_MAX};
    assert_int_equal(isa_choose(&q.isa, NULL), 0);
    return q;
}

static void open_session(struct engine **e, struct session **s, const char *file, int64_t n_ctx, int chunk) {
    struct plan_request q = request(n_ctx, chunk);
    struct plan p;
    if (engine_open(e, test_path(file), NULL) || plan_make(&p, engine_model(*e), &q) || engine_load(*e, &(struct plan){.n_thread = 2}, NULL, NULL, NULL) ||
        session_open(s, *e, &p))
        fail_msg("%s: %s", file, err_text());
}

static void eval(struct session *s, const int32_t *ids, int n) {
    if (session_eval(s, ids, n, LOGITS_LAST, NULL)) fail_msg("%s", err_text());
}

/* --- what is read ---------------------------------------------------------------------------------------------------- */

static struct gguf *g;
static struct model m;

static void open_file(const char *path) {
    if (gguf_open(&g, path) || model_open(&m, g)) fail_msg("%s: %s", path, err_text());
}

static void close_file(void) {
    model_close(&m);
    gguf_close(g);
}

static void files_have_their_shapes(void **state) {
    (void)state;
    open_file(test_path(TINY "qwen35-f32.gguf"));
    enum { D = 64, INNER = 128, CONV = 256, FF = 3 * D * 128, DELTA = D * (CONV + INNER + 2 * 4) + 4 * CONV + 2 * 4 + 32 + INNER * D,
           ATTN = D * (2 * 128 + 2 * 64 + 128) + 2 * 32 };
    assert_int_equal(m.n_layer, 8);
    assert_int_equal(m.n_mtp, 1);
    assert_int_equal(m.n_block, 8);
    for (int il = 0; il < 8; il++) {
        const struct layer *l = &m.layers[il];
        assert_int_equal(l->mixer, il % 4 == 3 ? MIXER_ATTN : MIXER_DELTA);
        assert_int_equal(l->n_kv, il % 4 == 3 ? 2 : 0);
        assert_int_equal(l->t[LT_ATTN_GATE].bytes, il % 4 == 3 ? 128 * D * 4 : 0);
    }
    uint64_t trunk = 2 * VOCAB * D + D + 6 * (DELTA + FF + 2 * D) + 2 * (ATTN + FF + 2 * D), mtp = ATTN + FF + 2 * D + 2 * D * D + 3 * D;
    assert_true(m.n_params == trunk);
    assert_true(m.delta.tiled);
    assert_int_equal(state_bytes(&m), 6 * (3 * CONV + 4 * 32 * 32) * 4);
    assert_int_equal(model_use_mtp(&m), 0);
    assert_int_equal(m.n_block, 9);
    assert_true(m.n_params == trunk + mtp);
    size_t bytes = 0; /* now the whole file is read */
    for (int i = 0; i < gguf_n_tensors(g); i++) bytes += gguf_tensor(g, i)->bytes;
    assert_int_equal(m.file_bytes, bytes);
    assert_int_equal(state_bytes(&m), 6 * (3 * CONV + 4 * 32 * 32) * 4);
    close_file();

    open_file(test_path(TINY "qwen3next-f32.gguf"));
    const struct tensor *beta = &m.layers[0].t[LT_DELTA_BETA], *alpha = &m.layers[0].t[LT_DELTA_ALPHA];
    assert_false(m.delta.tiled);
    assert_int_equal(beta->group, 2);
    assert_int_equal(alpha->offset, beta->offset + 2 * D * 4);
    assert_int_equal(alpha->group_stride, 4 * D * 4);
    assert_true(m.n_ff_shared > 0);
    assert_int_equal(model_use_mtp(&m), ERR_UNSUPPORTED);
    close_file();
}

static char path[64];
static const char arch[] = "qwen35";
#define DIMS(...) ((const int64_t[]){__VA_ARGS__, 0})

static void key_u32(struct made_gguf *f, const char *name, uint32_t v) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    made_u32(f, key, v);
}

static void layer_tensor(struct made_gguf *f, int il, const char *name, int type, const int64_t *dims) {
    char full[128];
    snprintf(full, sizeof full, "blk.%d.%s", il, name);
    made_tensor(f, full, type, dims);
}

static void add_rest(struct made_gguf *f, int il) {
    layer_tensor(f, il, "attn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(f, il, "post_attention_norm.weight", QT_F32, DIMS(64));
    layer_tensor(f, il, "ffn_gate.weight", QT_Q8_0, DIMS(64, 96));
    layer_tensor(f, il, "ffn_up.weight", QT_Q8_0, DIMS(64, 96));
    layer_tensor(f, il, "ffn_down.weight", QT_Q8_0, DIMS(96, 64));
}

static void add_attention(struct made_gguf *f, int il) {
    layer_tensor(f, il, "attn_q.weight", QT_Q8_0, DIMS(64, 128));
    layer_tensor(f, il, "attn_k.weight", QT_Q8_0, DIMS(64, 32));
    layer_tensor(f, il, "attn_v.weight", QT_Q8_0, DIMS(64, 32));
    layer_tensor(f, il, "attn_output.weight", QT_Q8_0, DIMS(64, 64));
    layer_tensor(f, il, "attn_q_norm.weight", QT_F32, DIMS(16));
    layer_tensor(f, il, "attn_k_norm.weight", QT_F32, DIMS(16));
    add_rest(f, il);
}

static void add_delta(struct made_gguf *f, int il, const char *qkv) {
    layer_tensor(f, il, qkv, QT_Q8_0, DIMS(64, 128));
    layer_tensor(f, il, "attn_gate.weight", QT_Q8_0, DIMS(64, 64));
    layer_tensor(f, il, "ssm_conv1d.weight", QT_F32, DIMS(4, 128));
    layer_tensor(f, il, "ssm_dt.bias", QT_F32, DIMS(4));
    layer_tensor(f, il, "ssm_a", QT_F32, DIMS(4));
    layer_tensor(f, il, "ssm_alpha.weight", QT_F16, DIMS(64, 4));
    layer_tensor(f, il, "ssm_beta.weight", QT_F32, DIMS(64, 4));
    layer_tensor(f, il, "ssm_norm.weight", QT_F32, DIMS(16));
    layer_tensor(f, il, "ssm_out.weight", QT_Q8_0, DIMS(64, 64));
    add_rest(f, il);
}

/* 64 wide, 4 heads of 16 on 2; 2 key and 4 value heads of 16; no layers' tensors yet. */
static struct made_gguf base(int n_layer) {
    struct made_gguf f = {0};
    made_str(&f, "general.architecture", arch);
    key_u32(&f, "context_length", 512);
    key_u32(&f, "embedding_length", 64);
    key_u32(&f, "block_count", (uint32_t)n_layer);
    key_u32(&f, "feed_forward_length", 96);
    key_u32(&f, "attention.head_count", 4);
    key_u32(&f, "attention.head_count_kv", 2);
    made_f32(&f, "qwen35.attention.layer_norm_rms_epsilon", 1e-6f);
    key_u32(&f, "ssm.conv_kernel", 4);
    key_u32(&f, "ssm.state_size", 16);
    key_u32(&f, "ssm.group_count", 2);
    key_u32(&f, "ssm.time_step_rank", 4);
    key_u32(&f, "ssm.inner_size", 64);
    made_tensor(&f, "token_embd.weight", QT_F16, DIMS(64, 40));
    made_tensor(&f, "output_norm.weight", QT_F32, DIMS(64));
    return f;
}

static struct made_gguf two_layers(void) {
    struct made_gguf f = base(2);
    key_u32(&f, "full_attention_interval", 2);
    add_delta(&f, 0, "attn_qkv.weight");
    add_attention(&f, 1);
    return f;
}

static void refuse(struct made_gguf *f, int code, const char *must_say) {
    int rc = gguf_open(&g, made_write(f, path));
    if (!rc) rc = model_open(&m, g);
    if (rc != code || !strstr(err_text(), must_say))
        fail_msg("code %d \"%s\", want code %d and \"%s\"", rc, rc ? err_text() : "accepted", code, must_say);
    gguf_close(g);
    made_free(f);
}

static void accept(struct made_gguf *f) {
    open_file(made_write(f, path));
    made_free(f);
}

static void keys_are_checked(void **state) {
    (void)state;
    static const struct {
        const char *key;
        uint32_t v;
        int code;
        const char *say;
    } bad[] = {
        {"ssm.conv_kernel", 3, ERR_UNSUPPORTED, "ssm.conv_kernel"},   {"ssm.state_size", 20, ERR_UNSUPPORTED, "ssm.state_size"},
        {"ssm.state_size", 512, ERR_UNSUPPORTED, "ssm.state_size"},   {"ssm.state_size", 0, ERR_FORMAT, "ssm.state_size"},
        {"ssm.group_count", 3, ERR_FORMAT, "3 key heads"},            {"ssm.group_count", 0, ERR_FORMAT, "ssm.group_count"},
        {"ssm.inner_size", 128, ERR_FORMAT, "inner size 128"},        {"ssm.time_step_rank", 4000000, ERR_FORMAT, "ssm.time_step_rank"},
        {"full_attention_interval", 0, ERR_FORMAT, "full_attention_interval"},
        {"full_attention_interval", 1, ERR_FORMAT, "attn_qkv.weight"}, /* the first layer has attention now */
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct made_gguf f = two_layers();
        key_u32(&f, bad[i].key, bad[i].v);
        refuse(&f, bad[i].code, bad[i].say);
    }
    struct made_gguf f = two_layers();
    made_drop(&f, "qwen35.ssm.inner_size");
    refuse(&f, ERR_FORMAT, "ssm.inner_size is missing");
    f = two_layers();
    made_i32s(&f, "qwen35.rope.dimension_sections", (const int32_t[]){1, 11, 10, 0}, 4);
    refuse(&f, ERR_UNSUPPORTED, "dimension_sections leaves pair 3 of 8");
    f = base(2);
    key_u32(&f, "full_attention_interval", 2);
    add_delta(&f, 0, "ssm_in.weight");
    add_attention(&f, 1);
    refuse(&f, ERR_UNSUPPORTED, "ssm_in");
    f = base(3); /* a file with the drafting block only */
    key_u32(&f, "nextn_predict_layers", 1);
    add_attention(&f, 2);
    layer_tensor(&f, 2, "nextn.eh_proj.weight", QT_Q8_0, DIMS(128, 64));
    refuse(&f, ERR_UNSUPPORTED, "multi-token prediction");
}

static void layers_may_be_listed(void **state) {
    (void)state;
    struct made_gguf f = two_layers();
    accept(&f);
    assert_int_equal(m.layers[0].mixer, MIXER_DELTA);
    close_file();
    f = base(2); /* attention first, and no KV heads where there is none */
    made_bools(&f, "qwen35.attention.recurrent_layers", (const uint8_t[]){0, 1}, 2);
    made_i32s(&f, "qwen35.attention.head_count_kv", (const int32_t[]){2, 0}, 2);
    add_attention(&f, 0);
    add_delta(&f, 1, "attn_qkv.weight");
    accept(&f);
    assert_int_equal(m.layers[0].mixer, MIXER_ATTN);
    assert_int_equal(m.layers[1].mixer, MIXER_DELTA);
    close_file();
    f = two_layers();
    made_i32s(&f, "qwen35.attention.head_count_kv", (const int32_t[]){2, 0}, 2); /* the wrong one */
    refuse(&f, ERR_FORMAT, "layer 1");
}

/* --- built-in shapes ----------------------------------------------------------------------------------------------------- */

static void the_27b_is_planned_to_the_byte(void **state) {
    (void)state;
    struct engine *e;
    struct plan_request q = request(262144, 512);
    struct plan p;
    q.type_k = q.type_v = QT_Q8_0;
    if (engine_open_shape(&e, "qwen3.8-27b:q4_k_m", NULL) || plan_make(&p, engine_model(e), &q)) fail_msg("%s", err_text());
    const struct model *big = engine_model(e);
    assert_true(big->n_params == 26895998464u);
    assert_true(big->file_bytes > 16450000000u && big->file_bytes < 16650000000u);
    /* 16 of 64 layers have KV: 4 heads of K and V, 256 values of 1 byte and 8 scales of 2. */
    assert_true(p.kv_bytes == (size_t)262144 * 16 * 4 * 2 * (256 + 8 * 2));
    /* 48 layers: 3 inputs of 2 * 16 * 128 + 48 * 128 channels, and 48 matrices of 128 x 128. */
    assert_true(p.state_bytes == 48u * 4 * (3 * (2 * 16 * 128 + 48 * 128) + 48 * 128 * 128));
    assert_true(p.state_bytes == 156893184);
    assert_true(p.saved_bytes == p.state_bytes);
    assert_true(p.state_bytes_per_tok == 156893184.0);
    assert_true(p.kv_bytes_per_position == 16 * 4 * 2 * (256 + 8 * 2));
    assert_true(p.host_bytes == p.weights_bytes + p.kv_bytes + 2 * p.state_bytes + p.scratch_bytes + p.runtime_bytes);
    engine_close(e);
    assert_int_equal(engine_open_shape(&e, "qwen3.8-28b", NULL), ERR_ARG);
    assert_int_equal(engine_open_shape(&e, "qwen3.8-27b:q4_k_x", NULL), ERR_ARG);
}

static void a_shape_runs_with_made_up_weights(void **state) {
    (void)state;
    struct engine *e;
    struct session *s;
    struct plan_request q = request(16, 16);
    struct plan p;
    float first[16];
    for (int round = 0; round < 2; round++) { /* the same weights, whatever the threads */
        if (engine_open_shape(&e, "qwen3.5-0.8b:q4_0", NULL) || plan_make(&p, engine_model(e), &q) ||
            engine_load(e, &(struct plan){.n_thread = 1 + round}, NULL, NULL, NULL) || session_open(&s, e, &p))
            fail_msg("%s", err_text());
        eval(s, (const int32_t[]){1, 2, 3}, 3);
        if (round == 0) memcpy(first, session_logits(s), sizeof first);
        assert_memory_equal(session_logits(s), first, sizeof first);
        char byte;
        assert_int_equal(gguf_read(engine_gguf(e), 0, gguf_tensor(engine_gguf(e), 0)->offset, &byte, 1), ERR_ARG); /* no row */
        session_close(s);
        engine_close(e);
    }
}

/* --- quantised weights --------------------------------------------------------------------------------------------------- */

struct rows {
    float *v;
    int64_t n;
};

static int keep(void *arg, int64_t pos, const float *logits) {
    struct rows *r = arg;
    memcpy(r->v + pos * VOCAB, logits, VOCAB * sizeof *logits);
    r->n++;
    return 0;
}

/* llama.cpp's own distance from the exact logits of the decoded weights, which comes from 8-bit activations, is the scale. */
static void quantised_models_are_as_near_as_llama_cpp(void **state) {
    (void)state;
    json_t *j = expected(), *q;
    int n;
    int32_t *ids = ids_of(j, "tokens", &n);
    size_t i, seen = 0;
    json_array_foreach(json_object_get(j, "quantised"), i, q) {
        char file[256];
        const json_t *theirs = json_object_get(q, "llamacpp");
        double most = json_number_value(json_object_get(theirs, "max_abs_diff")), kl_most = json_number_value(json_object_get(theirs, "mean_kl"));
        snprintf(file, sizeof file, "tiny-models/%s", json_string_value(json_object_get(q, "logits_file")));
        float *want = (float *)test_read(file, NULL);
        snprintf(file, sizeof file, "tiny-models/%s", json_string_value(json_object_get(q, "model")));
        struct engine *e;
        struct session *s;
        open_session(&e, &s, file, n, 512);
        struct rows r = {calloc((size_t)n * VOCAB, sizeof(float)), 0};
        if (session_eval(s, ids, n, LOGITS_ALL, &(struct session_hooks){.logits = keep, .arg = &r})) fail_msg("%s: %s", file, err_text());
        assert_int_equal(r.n, n);
        double worst = 0, kl = 0;
        for (int t = 0; t < n; t++) {
            double zw = 0, zg = 0, sum = 0;
            const float *w = want + t * VOCAB, *got = r.v + t * VOCAB;
            for (int k = 0; k < VOCAB; k++) zw += exp(w[k]), zg += exp(got[k]), worst = fmax(worst, fabs((double)w[k] - got[k]));
            for (int k = 0; k < VOCAB; k++) sum += exp(w[k]) / zw * (w[k] - log(zw) - got[k] + log(zg));
            kl += sum / n;
        }
        if (!(worst <= most && kl <= 1.5 * kl_most))
            fail_msg("%s: largest difference %g (llama.cpp %g), mean KL %g (llama.cpp %g)", file, worst, most, kl, kl_most);
        session_close(s);
        engine_close(e);
        free(r.v);
        free(want);
        seen++;
    }
    assert_int_equal(seen, 2);
    free(ids);
    json_decref(j);
}

/* --- multi-token prediction ---------------------------------------------------------------------------------------------- */

enum { CHAIN = 3 };

static int32_t best_of(const float *logits) {
    int32_t best = 0;
    for (int i = 1; i < VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Logits of rows 0 .. n-2 of the block: row t knows tokens up to t + 1 and predicts t + 2. In calls of `step` rows. Then CHAIN rows
 * more, each with the block's own state and most likely token of the row before. */
static float *mtp_logits(const char *file, const int32_t *ids, int n, int step) {
    struct home *h;
    struct pool *pool;
    struct cpu *cpu;
    struct kv *kv;
    struct state *st;
    struct decoder *d;
    struct kv_spec spec;
    struct kv_shape *shapes;
    struct plan p = {.n_ctx = n + CHAIN, .type_k = QT_F32, .type_v = QT_F32, .chunk_tokens = n, .n_thread = 2, .logits_rows = n};
    assert_int_equal(isa_choose(&p.isa, NULL), 0);
    open_file(test_path(file));
    if (model_use_mtp(&m) || home_open(&h, &m, NULL, NULL, NULL) || pool_open(&pool, 2, NULL, 0) || home_load(h, g, pool, NULL, NULL, NULL))
        fail_msg("%s: %s", file, err_text());
    struct cpu_opts o = session_cpu_opts(&m, &p);
    void *scratch = aligned_alloc(64, decoder_scratch_bytes(&m, n, n) + 64);
    float *x = malloc((size_t)n * (size_t)m.dim * sizeof *x), *hidden = malloc((size_t)n * (size_t)m.dim * sizeof *x);
    float *logits = malloc((size_t)(n + CHAIN) * VOCAB * sizeof *logits);
    if (session_kv_spec(&spec, &shapes, &m, &p) || kv_open(&kv, &spec) || cpu_open(&cpu, &o) || state_open(&st, &m) ||
        decoder_open(&d, &m, cpu_ops(cpu), home_weights(h), kv, st, n, n, n + CHAIN, NULL, scratch))
        fail_msg("%s: %s", file, err_text());
    int rc = decoder_begin(d, 0, n);
    if (!rc) rc = decoder_embed(d, x, ids, n);
    for (int il = 0; il < m.n_layer && !rc; il++) {
        rc = decoder_mixer(d, il, x, 0, n);
        if (!rc) rc = decoder_ffn(d, il, x, 0, n);
    }
    if (!rc) rc = decoder_norm(d, hidden, x, n);
    for (int t = 0; t < n - 1 && !rc; t += step) {
        int rows = n - 1 - t < step ? n - 1 - t : step;
        rc = decoder_mtp(d, 0, logits + (int64_t)t * VOCAB, x, hidden + (int64_t)t * m.dim, ids + t + 1, t, rows);
    }
    float *last = x + (int64_t)((n - 2) % step) * m.dim;
    for (int t = n - 1; t < n - 1 + CHAIN && !rc; t++) {
        int32_t id = best_of(logits + (int64_t)(t - 1) * VOCAB);
        rc = decoder_begin(d, t, 1);
        if (!rc) rc = decoder_mtp(d, 0, logits + (int64_t)t * VOCAB, last, last, &id, 0, 1);
    }
    if (rc) fail_msg("%s: %s", file, err_text());
    assert_int_equal(decoder_mtp(d, 1, logits, x, hidden, ids, 0, 1), ERR_ARG);
    decoder_close(d);
    state_close(st);
    cpu_close(cpu);
    kv_close(kv);
    home_close(h);
    pool_close(pool);
    close_file();
    free(shapes), free(scratch), free(x), free(hidden);
    return logits;
}

static void check_rows(const char *file, const json_t *check, const float *logits, double tol) {
    size_t i, k;
    json_t *c, *top;
    assert_true(json_array_size(check) >= 3);
    json_array_foreach(check, i, c) {
        int64_t pos = json_integer_value(json_object_get(c, "pos"));
        json_array_foreach(json_object_get(c, "top5"), k, top) {
            int64_t id = json_integer_value(json_array_get(top, 0));
            double want = json_number_value(json_array_get(top, 1)), got = logits[pos * VOCAB + id];
            if (!(fabs(got - want) <= tol))
                fail_msg("%s: row %lld, id %lld: %g, expected %g, tolerance %g", file, (long long)pos, (long long)id, got, want, tol);
        }
    }
}

static void the_prediction_block_gives_the_stored_logits(void **state) {
    (void)state;
    json_t *j = expected(), *q;
    int n;
    int32_t *ids = ids_of(j, "tokens", &n);
    size_t i, seen = 0;
    json_array_foreach(json_object_get(j, "models"), i, q) {
        const json_t *check = json_object_get(json_object_get(q, "mtp"), "check");
        if (!check) continue;
        char file[256];
        snprintf(file, sizeof file, "tiny-models/%s", json_string_value(json_object_get(q, "model")));
        for (int step = 99; step > 0; step -= 49) { /* 99, 50, 1 */
            float *logits = mtp_logits(file, ids, n, step);
            check_rows(file, check, logits, 2e-4);
            free(logits);
        }
        seen++;
    }
    json_array_foreach(json_object_get(j, "quantised"), i, q) {
        char file[256];
        snprintf(file, sizeof file, "tiny-models/%s", json_string_value(json_object_get(q, "model")));
        float *logits = mtp_logits(file, ids, n, n);
        check_rows(file, json_object_get(q, "mtp_check"), logits, json_number_value(json_object_get(json_object_get(q, "llamacpp"), "max_abs_diff")));
        free(logits);
        seen++;
    }
    assert_int_equal(seen, 3);
    free(ids);
    json_decref(j);
}

struct drafted {
    float v[1 + CHAIN][VOCAB];
    int64_t pos0;
    int n;
};

static int keep_draft(void *arg, int64_t pos, const float *logits) {
    struct drafted *d = arg;
    if (!d->n) d->pos0 = pos;
    assert_int_equal(pos, d->pos0 + d->n);
    memcpy(d->v[d->n++], logits, sizeof d->v[0]);
    return 0;
}

static void draft(struct session *s, struct drafted *d, int32_t id, int n) {
    int32_t out[1 + CHAIN];
    d->n = 0;
    if (session_draft(s, out, id, n, &(struct session_hooks){.logits = keep_draft, .arg = d})) fail_msg("%s", err_text());
    assert_int_equal(d->n, n);
    assert_int_equal(d->pos0, session_pos(s) + 1);
    for (int k = 0; k < n; k++) assert_int_equal(out[k], best_of(d->v[k]));
}

static void open_drafting(struct engine **e, struct session **s, const char *file, int chunk) {
    struct plan_request q = request(200, chunk);
    struct plan p;
    if (engine_open(e, test_path(file), NULL) || engine_use_mtp(*e) || plan_make(&p, engine_model(*e), &q) ||
        engine_load(*e, &p, NULL, NULL, NULL) || session_open(s, *e, &p))
        fail_msg("%s: %s", file, err_text());
}

/* After every piece of text the session drafts what the block's row says, and its own chain after it; the text's logits and
 * state do not notice. */
static void sessions_draft(void **state) {
    (void)state;
    static const int pieces[] = {1, 1, 16, 7, 40, 1, 33}; /* 99; the session takes 16 at a time */
    json_t *j = expected();
    int n, at = 0;
    int32_t *ids = ids_of(j, "tokens", &n);
    float *want = mtp_logits(TINY "qwen35-f32.gguf", ids, n, n), plain[VOCAB];
    struct engine *e;
    struct session *s;
    struct drafted d, again;
    open_session(&e, &s, TINY "qwen35-f32.gguf", 200, 16);
    eval(s, ids, n - 1);
    memcpy(plain, session_logits(s), sizeof plain);
    assert_int_equal(session_draft(s, &(int32_t){0}, 1, 1, NULL), ERR_ARG);
    assert_non_null(strstr(err_text(), "engine_use_mtp"));
    session_close(s);
    engine_close(e);

    open_drafting(&e, &s, TINY "qwen35-f32.gguf", 16);
    assert_int_equal(session_draft(s, &(int32_t){0}, 1, 1, NULL), ERR_ARG); /* nothing to start from */
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        eval(s, ids + at, pieces[i]);
        at += pieces[i];
        draft(s, &d, ids[at], 1 + CHAIN);
        for (int k = 0; k < VOCAB; k++)
            if (!(fabsf(d.v[0][k] - want[(at - 1) * VOCAB + k]) <= 1e-4f))
                fail_msg("after %d tokens: id %d has %g, the block's row %g", at, k, d.v[0][k], want[(at - 1) * VOCAB + k]);
    }
    assert_int_equal(at, n - 1);
    assert_memory_equal(session_logits(s), plain, sizeof plain);
    for (int r = 0; r < 1 + CHAIN; r++)
        for (int k = 0; k < VOCAB; k++)
            if (!(fabsf(d.v[r][k] - want[(n - 2 + r) * VOCAB + k]) <= 1e-4f))
                fail_msg("draft %d: id %d has %g, expected %g", r, k, d.v[r][k], want[(n - 2 + r) * VOCAB + k]);

    /* Back at a mark, other text and its drafts leave no trace. */
    assert_int_equal(session_mark(s), 0);
    eval(s, ids, 20);
    draft(s, &again, 7, 2);
    assert_int_equal(session_truncate(s, n - 1), 0);
    draft(s, &again, ids[n - 1], 1 + CHAIN);
    assert_memory_equal(again.v, d.v, sizeof d.v);
    eval(s, ids + n - 1, 1);
    draft(s, &d, 3, 1);
    assert_int_equal(session_truncate(s, n - 1), 0);
    eval(s, ids + n - 1, 1);
    draft(s, &again, 3, 1);
    assert_memory_equal(again.v[0], d.v[0], sizeof d.v[0]);

    assert_int_equal(session_draft(s, &(int32_t){0}, VOCAB, 1, NULL), ERR_ARG);
    assert_int_equal(session_draft(s, &(int32_t){0}, 1, 200, NULL), ERR_ARG);
    assert_int_equal(session_draft(s, &(int32_t){0}, 1, 0, NULL), ERR_ARG);
    assert_int_equal(session_fill_synthetic(s, 50, 1), 0);
    assert_int_equal(session_draft(s, &(int32_t){0}, 1, 1, NULL), ERR_ARG);
    eval(s, ids, 2);
    draft(s, &d, 1, 1);
    session_close(s);
    engine_close(e);
    free(want), free(ids);
    json_decref(j);
}

static void the_prediction_block_is_loaded_only_when_asked_for(void **state) {
    (void)state;
    struct engine *e;
    struct plan_request q = request(1000, 64);
    struct plan without, with;
    assert_int_equal(engine_open(&e, test_path(TINY "qwen35-f32.gguf"), NULL), 0);
    assert_int_equal(plan_make(&without, engine_model(e), &q), 0);
    assert_int_equal(engine_use_mtp(e), 0);
    assert_int_equal(plan_make(&with, engine_model(e), &q), 0);
    assert_true(with.weights_bytes > without.weights_bytes);
    assert_int_equal(without.kv_bytes, 2 * 1024 * 2 * 2 * 32 * 4); /* two layers' whole pages of 2 heads, K and V of 32, f32 */
    assert_int_equal(with.kv_bytes, 3 * 1024 * 2 * 2 * 32 * 4);
    assert_int_equal(with.state_bytes, without.state_bytes);
    assert_int_equal(engine_load(e, &(struct plan){.n_thread = 1}, NULL, NULL, NULL), 0);
    assert_int_equal(engine_use_mtp(e), ERR_ARG);
    engine_close(e);
    assert_int_equal(engine_open(&e, test_path(TINY "qwen3-f32.gguf"), NULL), 0);
    assert_int_equal(engine_use_mtp(e), ERR_UNSUPPORTED);
    engine_close(e);
}

/* --- going back ---------------------------------------------------------------------------------------------------------- */

static void sessions_come_back_bit_for_bit(void **state) {
    (void)state;
    static const char *const files[] = {TINY "qwen35-f32.gguf", TINY "qwen3next-f32.gguf", TINY "qwen35-wide-q4_K_M.gguf"};
    json_t *j = expected();
    int n;
    int32_t *ids = ids_of(j, "long_tokens", &n);
    for (int f = 0; f < 3; f++) {
        struct engine *e;
        struct session *s;
        float first[VOCAB], after[VOCAB];
        open_session(&e, &s, files[f], 400, 128);
        eval(s, ids, 300); /* passes start at 0, 128, 256 */
        memcpy(first, session_logits(s), sizeof first);
        assert_int_equal(session_nearest(s, 299), 256);
        assert_int_equal(session_nearest(s, 300), 300);
        assert_int_equal(session_nearest(s, 255), 0);
        assert_int_equal(session_truncate(s, 299), ERR_ARG);
        assert_non_null(strstr(err_text(), "256"));
        assert_int_equal(session_truncate(s, 301), ERR_ARG);
        assert_int_equal(session_truncate(s, 300), 0);

        assert_int_equal(session_truncate(s, 256), 0); /* the start of the last pass */
        eval(s, ids + 256, 44);
        assert_memory_equal(session_logits(s), first, sizeof first);

        assert_int_equal(session_mark(s), 0);
        for (int t = 0; t < 5; t++) eval(s, ids + 300 + t, 1);
        memcpy(after, session_logits(s), sizeof after);
        eval(s, ids + 305, 20); /* a long pass leaves the mark alone */
        assert_int_equal(session_nearest(s, 310), 300);
        assert_int_equal(session_truncate(s, 300), 0);
        eval(s, ids + 700, 7); /* another text in between */
        assert_int_equal(session_truncate(s, 300), 0);
        for (int t = 0; t < 5; t++) eval(s, ids + 300 + t, 1);
        assert_memory_equal(session_logits(s), after, sizeof after);

        assert_int_equal(session_truncate(s, 0), 0);
        assert_int_equal(session_nearest(s, 0), 0);
        eval(s, ids, 300);
        assert_memory_equal(session_logits(s), first, sizeof first);
        assert_int_equal(session_nearest(s, 299), 256); /* the mark went with the text */

        assert_int_equal(session_fill_synthetic(s, 390, 3), 0);
        assert_int_equal(session_pos(s), 390);
        assert_int_equal(session_truncate(s, 256), ERR_ARG);
        eval(s, ids, 1);
        session_close(s);
        engine_close(e);
    }
    free(ids);
    json_decref(j);
}

static volatile sig_atomic_t stop;
static void on_alarm(int sig) { (void)sig, stop = 1; }

static void an_interrupted_pass_is_taken_back(void **state) {
    (void)state;
    json_t *j = expected();
    int n, cuts = 0;
    int32_t *ids = ids_of(j, "long_tokens", &n);
    struct engine *e;
    struct session *s;
    float want[VOCAB];
    open_session(&e, &s, TINY "qwen35-f32.gguf", n, 100);
    eval(s, ids, n);
    memcpy(want, session_logits(s), sizeof want);
    signal(SIGALRM, on_alarm);
    struct session_hooks h = {.stop = &stop};
    uint64_t rng = 5;
    for (int round = 0; round < 4; round++) {
        assert_int_equal(session_truncate(s, 0), 0);
        while (session_pos(s) < n) {
            int at = (int)session_pos(s);
            assert_int_equal(at % 100, 0); /* whole passes only */
            struct itimerval t = {.it_value.tv_usec = 1000 + (suseconds_t)(test_rand(&rng) % 40000)};
            stop = 0;
            setitimer(ITIMER_REAL, &t, NULL);
            int rc = session_eval(s, ids + at, n - at, LOGITS_LAST, &h);
            if (rc && rc != ERR_INTERRUPTED) fail_msg("%s", err_text());
            cuts += rc != 0;
            /* On a slow machine no pass would ever end in time. */
            if (rc && session_pos(s) == at) eval(s, ids + at, n - at < 100 ? n - at : 100);
        }
        assert_memory_equal(session_logits(s), want, sizeof want);
    }
    assert_true(cuts > 0);
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    session_close(s);
    engine_close(e);
    free(ids);
    json_decref(j);
}

static void states_are_plain_data(void **state) {
    (void)state;
    struct state *a, *b;
    open_file(test_path(TINY "qwen35-f32.gguf"));
    assert_int_equal(state_open(&a, &m), 0);
    assert_int_equal(state_open(&b, &m), 0);
    assert_int_equal(a->bytes, state_bytes(&m));
    for (size_t i = 0; i < a->bytes; i++) assert_int_equal(a->base[i], 0);
    assert_int_equal(a->at[3], STATE_NONE);
    assert_ptr_equal(state_last(a, 4), a->base + 3 * a->layer_bytes);
    assert_ptr_equal(state_s(a, 4), a->base + 3 * a->layer_bytes + 3 * 256 * 4);
    state_fill_synthetic(a, 1);
    state_fill_synthetic(b, 1);
    assert_memory_equal(a->base, b->base, a->bytes);
    state_fill_synthetic(b, 2);
    assert_true(memcmp(a->base, b->base, a->bytes) != 0);
    state_copy(b, a);
    assert_memory_equal(a->base, b->base, a->bytes);
    state_reset(b);
    for (size_t i = 0; i < b->bytes; i++) assert_int_equal(b->base[i], 0);
    state_close(a);
    state_close(b);
    state_close(NULL);
    close_file();
    open_file(test_path(TINY "qwen3-f32.gguf"));
    assert_int_equal(state_bytes(&m), 0);
    close_file();
}

static int make_path(void **state) {
    (void)state;
    snprintf(path, sizeof path, "/tmp/longhaul-hybrid-XXXXXX");
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state) {
    (void)state;
    return unlink(path);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(files_have_their_shapes),
        cmocka_unit_test(keys_are_checked),
        cmocka_unit_test(layers_may_be_listed),
        cmocka_unit_test(states_are_plain_data),
        cmocka_unit_test(the_27b_is_planned_to_the_byte),
        cmocka_unit_test(a_shape_runs_with_made_up_weights),
        cmocka_unit_test(quantised_models_are_as_near_as_llama_cpp),
        cmocka_unit_test(the_prediction_block_gives_the_stored_logits),
        cmocka_unit_test(sessions_draft),
        cmocka_unit_test(the_prediction_block_is_loaded_only_when_asked_for),
        cmocka_unit_test(sessions_come_back_bit_for_bit),
        cmocka_unit_test(an_interrupted_pass_is_taken_back),
    };
    return cmocka_run_group_tests(t, make_path, remove_path);
}
