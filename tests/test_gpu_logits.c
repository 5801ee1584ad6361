/* test_gpu_logits.c: whole tiny models through the GPU's table, all layers resident, against the CPU's table: one pass, passes
 * of 7 tokens and token by token, each in another order of lanes and streams, and the rows of the multi-token-prediction block.
 * f32 weights and KV: the same logits within 1e-4, since only the order of f32 sums differs. Quantised weights: sums that
 * differ in their last bits make a few activations round to the next of their 8-bit steps; the same happens between the CPU's
 * instruction sets, and the GPU may be twice as far from the CPU as those are from each other. A pass of PREFILL_MIN_TOK tokens
 * or more has products with half inputs instead: near the f32 logits, and for quantised weights nearer to the exact ones than
 * 8-bit activations ever are.
 * KV types smaller than f32, with f32 weights: a few keys and values round the other way. The median token is within 1e-4 and a
 * quarter of what the type itself changes in the median token, which is the effect of all roundings; the worst token, where
 * another expert may have been chosen, within twice that of the worst.
 * Built with LH_GPU where there is a GPU back end, the emulated one (GPU_EMU) included. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "core/decoder.h"
#include "core/err.h"
#include "core/gguf.h"
#include "core/kv.h"
#include "core/quant.h"
#include "core/state.h"
#include "cpu/cpu.h"
#include "cpu/pool.h"
#include "gpu/gpu.h"
#include "gpu/sizes.h"
#include "offload/engine.h"
#include "offload/home.h"
#include "offload/session.h"
#include "tests/gpu_orders.h"
#include "tests/support_layout.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_TOK = 100, VOCAB = 512, ROWS = N_TOK * VOCAB };

/* Passes of these many tokens. A first pass of 100 takes Gated DeltaNet layers in chunks, the others token by token. */
static const int pieces[] = {N_TOK, 7, 1};

/* A model file on the host. */
struct loaded {
    struct gguf *g;
    struct model m;
    struct home *h;
    struct plan plan;
    struct kv *kv;
    struct state *state; /* NULL: the model has none */
    float *freqs;
};

static void load(struct loaded *l, const char *path, int type_k, int type_v) {
    struct pool *pool;
    struct kv_spec spec;
    struct kv_shape *shapes;
    memset(l, 0, sizeof *l);
    l->plan = (struct plan){.n_ctx = N_TOK, .type_k = type_k, .type_v = type_v, .chunk_tokens = N_TOK, .n_thread = 2, .logits_rows = N_TOK};
    ok(isa_choose(&l->plan.isa, NULL));
    ok(gguf_open(&l->g, path));
    ok(model_open(&l->m, l->g));
    assert_int_equal(l->m.n_vocab, VOCAB);
    if (l->m.n_mtp) ok(model_use_mtp(&l->m));
    ok(home_open(&l->h, &l->m, NULL, NULL, NULL));
    ok(pool_open(&pool, 2, NULL, 0));
    ok(home_load(l->h, l->g, pool, NULL, NULL, NULL));
    pool_close(pool);
    if (l->m.rope_freqs.bytes) {
        l->freqs = malloc((size_t)l->m.rope_freqs.cols * sizeof *l->freqs);
        ok(home_read_vector(l->g, &l->m.rope_freqs, l->freqs));
    }
    ok(session_kv_spec(&spec, &shapes, &l->m, &l->plan));
    ok(kv_open(&l->kv, &spec));
    if (state_bytes(&l->m)) ok(state_open(&l->state, &l->m));
    free(shapes);
}

static void unload(struct loaded *l) {
    kv_close(l->kv);
    state_close(l->state);
    home_close(l->h);
    model_close(&l->m);
    gguf_close(l->g);
    free(l->freqs);
}

/* What a table works on, in its own memory. */
struct side {
    struct ops *ops;
    const struct weights *w;
    struct kv *kv;
    struct state *state;
    void *scratch;
    float *x, *hidden;     /* [N_TOK, dim] */
    float *logits, *drafts; /* [N_TOK, VOCAB] of the model, of its prediction block: row t predicts t + 2 */
    struct gpu_stream *recorded; /* ?each pass is a graph of this stream, launched once */
};

/* The next n tokens; rows of the results go to row pos0 on. */
static void pass(struct decoder *d, const struct side *s, const struct model *m, const int32_t *ids, int pos0, int n) {
    float *hidden = s->hidden + (size_t)pos0 * (size_t)m->dim;
    ok(decoder_begin(d, pos0, n));
    ok(decoder_embed(d, s->x, ids + pos0, n));
    for (int il = 0; il < m->n_layer; il++) {
        ok(decoder_mixer(d, il, s->x, 0, n));
        ok(decoder_ffn(d, il, s->x, 0, n));
    }
    ok(decoder_norm(d, hidden, s->x, n));
    ok(decoder_head(d, s->logits + (size_t)pos0 * VOCAB, s->x, n));
    int known = pos0 + n == N_TOK ? n - 1 : n; /* rows whose next token is known */
    if (m->n_mtp && known) ok(decoder_mtp(d, 0, s->drafts + (size_t)pos0 * VOCAB, s->x, hidden, ids + pos0 + 1, 0, known));
}

static void forward(const struct side *s, const struct loaded *l, const int32_t *ids, int piece) {
    struct decoder *d;
    ok(decoder_open(&d, &l->m, s->ops, s->w, s->kv, s->state, N_TOK, N_TOK, N_TOK, l->freqs, s->scratch));
    for (int p = 0; p < N_TOK; p += piece) {
        const int n = N_TOK - p < piece ? N_TOK - p : piece;
        struct gpu_graph *graph;
        if (s->recorded) ok(gpu_graph_begin(s->recorded));
        pass(d, s, &l->m, ids, p, n);
        if (!s->recorded) continue;
        ok(gpu_graph_end(&graph, s->recorded));
        ok(gpu_graph_launch(graph, s->recorded));
        ok(gpu_stream_sync(s->recorded));
        gpu_graph_close(graph);
    }
    decoder_close(d);
}

/* Two times [N_TOK, VOCAB]: logits and drafts. */
static float *cpu_logits(const struct loaded *l, enum isa isa, const int32_t *ids) {
    struct cpu *cpu;
    struct cpu_opts o = session_cpu_opts(&l->m, &l->plan);
    o.isa = isa;
    if (l->state) state_reset(l->state);
    size_t x_floats = N_TOK * (size_t)l->m.dim;
    ok(cpu_open(&cpu, &o));
    struct side s = {.ops = cpu_ops(cpu), .w = home_weights(l->h), .kv = l->kv, .state = l->state};
    s.scratch = aligned_alloc(64, (decoder_scratch_bytes(&l->m, N_TOK, N_TOK) + 127) / 64 * 64);
    s.x = malloc(2 * x_floats * sizeof *s.x);
    s.hidden = s.x + x_floats;
    s.logits = calloc(2 * ROWS, sizeof *s.logits);
    s.drafts = s.logits + ROWS;
    forward(&s, l, ids, N_TOK);
    cpu_close(cpu);
    free(s.scratch), free(s.x);
    return s.logits;
}

/* --- the same on the device ---------------------------------------------------------------------------------------------- */

/* Lowest address of the weights: they lie in one arena of home_bytes, which is copied as it is. */
static const char *lowest(const struct weights *w, int n_block) {
    const char *low = w->embd;
    const void *const fixed[] = {w->out, w->out_norm, w->out_bias};
    for (int i = 0; i < 3; i++)
        if (fixed[i] && (const char *)fixed[i] < low) low = fixed[i];
    for (int il = 0; il < n_block; il++)
        for (int t = 0; t < LT_COUNT; t++)
            if (w->layers[il].at[t] && (const char *)w->layers[il].at[t] < low) low = w->layers[il].at[t];
    return low;
}

static const void *moved(const void *p, const char *from, char *to) { return p ? to + ((const char *)p - from) : NULL; }

static struct weights device_weights(const struct weights *w, int n_block, const char *from, char *to) {
    struct weights d = {moved(w->embd, from, to), moved(w->out, from, to), moved(w->out_norm, from, to), moved(w->out_bias, from, to),
                        calloc((size_t)n_block, sizeof *d.layers)};
    for (int il = 0; il < n_block; il++)
        for (int t = 0; t < LT_COUNT; t++) d.layers[il].at[t] = moved(w->layers[il].at[t], from, to);
    return d;
}

enum how { LAUNCHED, RECORDED };

static float *gpu_logits(const struct loaded *l, const int32_t *ids, int piece, enum how how) {
    struct gpu *g;
    struct gpu_arena *a;
    struct gpu_stream *st;
    struct gpu_ops *ops;
    struct ops_limits limits;
    decoder_limits(&limits, &l->m, N_TOK, N_TOK);
    size_t scratch = decoder_scratch_bytes(&l->m, N_TOK, N_TOK), weights = home_bytes(&l->m), n_block = (size_t)l->m.n_block;
    size_t x_bytes = N_TOK * (size_t)l->m.dim * sizeof(float), out_bytes = 2 * ROWS * sizeof(float), st_bytes = state_bytes(&l->m);
    size_t all = gpu_ops_scratch_bytes(&limits) + scratch + weights + l->kv->bytes + 2 * x_bytes + out_bytes + st_bytes;
    ok(gpu_open(&g, 0));
    ok(gpu_arena_open(&a, g, all + (64 + n_block) * GPU_ALIGN));
    ok(gpu_stream_open(&st, g));
    ok(gpu_ops_open(&ops, g, a, st, &limits));

    void *d_weights, *pinned, *out;
    const char *from = lowest(home_weights(l->h), l->m.n_block);
    ok(gpu_alloc(&d_weights, a, weights, "weights"));
    ok(gpu_host_alloc(&pinned, g, weights));
    memcpy(pinned, from, weights);
    ok(gpu_copy_in(st, d_weights, pinned, weights));
    struct weights dw = device_weights(home_weights(l->h), l->m.n_block, from, d_weights);
    struct kv kv = *l->kv;
    kv.layers = malloc((size_t)kv.n_layer * sizeof *kv.layers);
    memcpy(kv.layers, l->kv->layers, (size_t)kv.n_layer * sizeof *kv.layers);
    for (int il = 0; il < kv.n_layer; il++)
        if (kv.layers[il].bytes) ok(gpu_alloc((void **)&kv.layers[il].base, a, kv.layers[il].bytes, "KV"));

    struct side s = {.ops = gpu_ops_table(ops), .w = &dw, .kv = &kv};
    struct state state;
    if (st_bytes) {
        state = *l->state;
        s.state = &state;
        ok(gpu_alloc((void **)&state.base, a, st_bytes, "state"));
        ok(gpu_fill(st, state.base, 0, st_bytes));
    }
    ok(gpu_alloc(&s.scratch, a, scratch, "scratch"));
    ok(gpu_alloc((void **)&s.x, a, x_bytes, "x"));
    ok(gpu_alloc((void **)&s.hidden, a, x_bytes, "hidden states"));
    ok(gpu_alloc((void **)&s.logits, a, out_bytes, "logits"));
    ok(gpu_fill(st, s.logits, 0, out_bytes));
    s.drafts = s.logits + ROWS;
    if (how == RECORDED) s.recorded = st;
    forward(&s, l, ids, piece);
    ok(gpu_ops_check(ops));
    ok(gpu_host_alloc(&out, g, out_bytes));
    ok(gpu_copy_out(st, out, s.logits, out_bytes));
    ok(gpu_stream_sync(st));
    float *logits = malloc(out_bytes);
    memcpy(logits, out, out_bytes);
    gpu_host_free(g, out), gpu_host_free(g, pinned);
    free(dw.layers), free(kv.layers);
    gpu_ops_close(ops);
    gpu_stream_close(st);
    gpu_arena_close(a);
    gpu_close(g);
    return logits;
}

/* --- comparisons --------------------------------------------------------------------------------------------------------- */

static json_t *expected(void) {
    json_error_t err;
    char *text = test_read("tiny-models/expected.json", NULL);
    json_t *j = json_loads(text, 0, &err);
    free(text);
    if (!j) fail_msg("expected.json: %s", err.text);
    return j;
}

static void read_ids(int32_t *ids, const json_t *j) {
    const json_t *tokens = json_object_get(j, "tokens");
    assert_int_equal(json_array_size(tokens), N_TOK);
    for (size_t i = 0; i < N_TOK; i++) ids[i] = (int32_t)json_integer_value(json_array_get(tokens, i));
}

/* The largest difference of n rows, and the mean KL divergence of got from want. */
struct distance {
    double most, kl;
};

static struct distance distance(const float *got, const float *want, int n_row) {
    struct distance d = {0};
    for (int t = 0; t < n_row; t++, want += VOCAB, got += VOCAB) {
        double zw = 0, zg = 0;
        for (int k = 0; k < VOCAB; k++) zw += exp(want[k]), zg += exp(got[k]), d.most = fmax(d.most, fabs((double)want[k] - got[k]));
        for (int k = 0; k < VOCAB; k++) d.kl += exp(want[k]) / zw * (want[k] - log(zw) - got[k] + log(zg)) / n_row;
    }
    return d;
}

static const char *const parts[] = {"logits", "logits of the prediction block"};

/* Every logit within 1e-4. */
static void check_same(const char *name, const float *got, const float *want) {
    for (int k = 0; k < 2 * ROWS; k++)
        if (!(fabs((double)got[k] - (double)want[k]) <= 1e-4))
            fail_msg("%s: %s of token %d: id %d has %.7g on the GPU, %.7g on the CPU", name, parts[k / ROWS], k % ROWS / VOCAB, k % VOCAB,
                     (double)got[k], (double)want[k]);
}

/* Twice the distance of `other`. */
static void check_near(const char *name, const float *got, const float *want, const float *other) {
    for (int k = 0; k < 2; k++) {
        int n = N_TOK - k; /* the last token has no draft */
        struct distance d = distance(got + k * ROWS, want + k * ROWS, n), allowed = distance(other + k * ROWS, want + k * ROWS, n);
        if (!(allowed.most > 0 && d.most <= 2 * allowed.most && d.kl <= 2 * allowed.kl))
            fail_msg("%s: %s on the GPU are up to %g from the CPU's, mean KL %g; instruction sets differ by %g and %g", name, parts[k], d.most,
                     d.kl, allowed.most, allowed.kl);
    }
}

/* A pass with half inputs: queries, keys, softmax weights and values are rounded to 11 bits in each of two layers, and so are
 * the inputs of products of quantised weights: within 8 * 2^-11 of the largest logit, a mean KL of 1e-5 (8-bit activations of
 * the same models: 2e-3). */
static void check_half(const char *name, const float *got, const float *want, int n_part) {
    for (int k = 0; k < n_part; k++) {
        double largest = 0;
        for (int i = 0; i < ROWS; i++) largest = fmax(largest, fabs((double)want[k * ROWS + i]));
        struct distance d = distance(got + k * ROWS, want + k * ROWS, N_TOK - k);
        if (!(d.most <= 8 * 0x1p-11 * largest && d.kl <= 1e-5))
            fail_msg("%s: %s of one pass on the GPU are up to %g off, mean KL %g; largest %g", name, parts[k], d.most, d.kl, largest);
    }
}

/* The i-th cut in the i-th order: each once where there are three of each. exact: ?[N_TOK, VOCAB], of a model with quantised
 * weights. Returns the last result [2, N_TOK, VOCAB]. */
static float *compare(const char *name, const char *path, const float *exact) {
    const bool quantised = exact != NULL;
    struct loaded l;
    int32_t ids[N_TOK];
    json_t *j = expected();
    read_ids(ids, j);
    load(&l, path, QT_F32, QT_F32);
    float *want = cpu_logits(&l, l.plan.isa, ids), *other = quantised ? cpu_logits(&l, ISA_GENERIC, ids) : NULL, *got = NULL;
    int i = 0;
#if defined(GPU_EMU)
    for (struct gpu_order o; gpu_order_at(&o, i); i++) {
        gpu_order_set(&o);
#else
    for (; i < 3; i++) {
#endif
        free(got);
        got = gpu_logits(&l, ids, pieces[i % 3], LAUNCHED);
        if (pieces[i % 3] >= PREFILL_MIN_TOK) check_half(name, got, quantised ? exact : want, quantised || !l.m.n_mtp ? 1 : 2);
        else quantised ? check_near(name, got, want, other) : check_same(name, got, want);
    }
    free(want), free(other);
    unload(&l);
    json_decref(j);
    return got;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The largest difference of a logit in the median token. */
static double median(const float *got, const float *want) {
    double most[N_TOK];
    for (int t = 0; t < N_TOK; t++) most[t] = distance(got + t * VOCAB, want + t * VOCAB, 1).most;
    qsort(most, N_TOK, sizeof *most, by_size);
    return most[N_TOK / 2];
}

/* One pair of KV types, in one cut and order. f32: the CPU's logits with f32 KV. */
static void compare_kv(const char *name, const char *path, int type_k, int type_v, const int32_t *ids, const float *f32) {
    struct loaded l;
    load(&l, path, type_k, type_v);
#if defined(GPU_EMU)
    struct gpu_order o;
    gpu_order_at(&o, 0);
    gpu_order_set(&o);
#endif
    float *want = cpu_logits(&l, l.plan.isa, ids), *got = gpu_logits(&l, ids, 7, LAUNCHED);
    for (int k = 0; k < ROWS; k++)
        if (isnan(got[k])) fail_msg("%s, K %s V %s: token %d has a NaN", name, quant_name(type_k), quant_name(type_v), k / VOCAB);
    double middle = median(got, want), most = distance(got, want, N_TOK).most;
    double middle_bound = 1e-4 + median(want, f32) / 4, bound = 1e-4 + 2 * distance(want, f32, N_TOK).most;
    if (!(middle <= middle_bound && most <= bound))
        fail_msg("%s, K %s V %s: logits differ by %g (median token) and %g between GPU and CPU, bounds %g and %g", name,
                 quant_name(type_k), quant_name(type_v), middle, most, middle_bound, bound);
    free(want), free(got);
    unload(&l);
}

static void every_kv_type(const char *name, const char *path) {
    static const int types[][2] = {{QT_F16, QT_F16}, {QT_BF16, QT_BF16}, {QT_Q8_0, QT_Q8_0}, {QT_Q4_0, QT_Q4_0}, {QT_Q8_0, QT_Q4_0}};
    struct loaded l;
    int32_t ids[N_TOK];
    json_t *j = expected();
    read_ids(ids, j);
    load(&l, path, QT_F32, QT_F32);
    float *f32 = cpu_logits(&l, l.plan.isa, ids);
    bool in_blocks = true; /* heads that quantised KV takes */
    for (int il = 0; il < l.kv->n_layer; il++)
        if (l.kv->layers[il].head_dim_k % KV_BLOCK || l.kv->layers[il].head_dim_v % KV_BLOCK) in_blocks = false;
    unload(&l);
    for (int i = 0; i < (in_blocks ? 5 : 2); i++) compare_kv(name, path, types[i][0], types[i][1], ids, f32);
    free(f32);
    json_decref(j);
}

static void f32_model(const char *model) {
    char name[256], path[4096];
    snprintf(name, sizeof name, "tiny-models/tiny-random-%s-f32.gguf", model);
    snprintf(path, sizeof path, "%s", test_path(name));
    free(compare(model, path, NULL));
    every_kv_type(model, path);
}

static void llama(void **state) { (void)state, f32_model("llama"); }
static void llama31(void **state) { (void)state, f32_model("llama31rope"); }
static void qwen2(void **state) { (void)state, f32_model("qwen2"); }
static void qwen3(void **state) { (void)state, f32_model("qwen3"); }
static void qwen3moe(void **state) { (void)state, f32_model("qwen3moe"); }
static void gemma3(void **state) { (void)state, f32_model("gemma3"); }
static void qwen35(void **state) { (void)state, f32_model("qwen35"); }
static void qwen3next(void **state) { (void)state, f32_model("qwen3next"); }

static void qwen35moe(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "/tmp/longhaul-gpu-logits-%d.gguf", (int)getpid());
    write_as_qwen35moe(path);
    free(compare("qwen35moe", path, NULL));
    unlink(path);
}

static void quantised_models(void **state) {
    (void)state;
    json_t *j = expected(), *about;
    size_t i;
    json_array_foreach(json_object_get(j, "quantised"), i, about) {
        char name[256], path[4096];
        double kl = json_number_value(json_object_get(json_object_get(about, "llamacpp"), "mean_kl"));
        snprintf(name, sizeof name, "tiny-models/%s", json_string_value(json_object_get(about, "logits_file")));
        float *exact = (float *)test_read(name, NULL); /* of the decoded weights */
        snprintf(name, sizeof name, "tiny-models/%s", json_string_value(json_object_get(about, "model")));
        snprintf(path, sizeof path, "%s", test_path(name));
        float *got = compare(name, path, exact);
        struct distance d = distance(got, exact, N_TOK);
        if (!(d.kl <= 1.5 * kl)) fail_msg("%s: mean KL %g from the exact logits, llama.cpp has %g", name, d.kl, kl);
        free(got), free(exact);
    }
    assert_int_equal(i, 2);
    json_decref(j);
}

/* Passes of one token and of all of them, recorded as graphs: the bits of the same launches. */
static void graphs(void **state) {
    (void)state;
    struct loaded l;
    int32_t ids[N_TOK];
    json_t *j = expected();
    read_ids(ids, j);
    load(&l, test_path("tiny-models/tiny-random-qwen35-f32.gguf"), QT_F16, QT_F16);
    for (int piece = 1; piece <= N_TOK; piece += N_TOK - 1) {
        float *want = gpu_logits(&l, ids, piece, LAUNCHED), *got = gpu_logits(&l, ids, piece, RECORDED);
        assert_memory_equal(got, want, 2 * ROWS * sizeof *got);
        free(want), free(got);
    }
    unload(&l);
    json_decref(j);
}

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(llama),    cmocka_unit_test(llama31), cmocka_unit_test(qwen2),     cmocka_unit_test(qwen3),
        cmocka_unit_test(qwen3moe), cmocka_unit_test(gemma3),  cmocka_unit_test(qwen35),    cmocka_unit_test(qwen3next),
        cmocka_unit_test(qwen35moe), cmocka_unit_test(quantised_models), cmocka_unit_test(graphs),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
