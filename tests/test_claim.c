/* test_claim.c: twelve claims whose right answers were worked out by hand from datasheets, and properties that every
 * answer has. Numbers of the cases are given to as many digits as the hand calculation; the tolerance is half of the last. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/gguf_write.h"
#include "core/quant.h"
#include "core/synth.h"
#include "offload/claim.h"
#include "tests/support.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { K = 1024 };

/* Of every claim with KV in f16, and of one that does not say at which depth. */
#define F16 .type_k = QT_F16, .type_v = QT_F16
#define ANY .depth = -1, F16

static struct claim_rates rates_of(const char *gpu) {
    const struct machine *m;
    struct claim_rates r;
    if (machine_find_gpu(&m, gpu)) fail_msg("%s", err_text());
    claim_rates_of(&r, m);
    return r;
}

static struct claim_model model_of(const char *shape) {
    struct claim_model m;
    if (claim_model_parse(&m, shape)) fail_msg("%s", err_text());
    return m;
}

static struct claim_report examine(const char *gpu, const char *shape, struct claim c) {
    struct claim_rates r = rates_of(gpu);
    struct claim_model m = model_of(shape);
    struct claim_report out;
    if (claim_examine(&out, &c, &m, &r)) fail_msg("%s", err_text());
    return out;
}

static const struct claim_figure *figure(const struct claim_report *r, const char *name) {
    for (int i = 0; i < r->n_figure; i++)
        if (!strcmp(r->figures[i].figure, name)) return &r->figures[i];
    fail_msg("the answer has no figure %s", name);
    return NULL;
}

static void near_to(const char *what, double got, double want, double half_digit) {
    if (!(fabs(got - want) <= half_digit)) fail_msg("%s is %.6g, want %.6g within %g", what, got, want, half_digit);
}

static void verdict(const struct claim_report *r, const char *name, enum claim_verdict want, const char *because) {
    const struct claim_figure *f = figure(r, name);
    if (f->verdict != want || !strstr(f->why, because))
        fail_msg("%s: %s, '%s'; want %s with '%s'", name, claim_verdict_name(f->verdict), f->why, claim_verdict_name(want), because);
}

static double gib(double bytes) { return bytes / 1073741824.0; }

static void case_1_decode_near_the_datasheet(void **s) {
    (void)s;
    struct claim_report r = examine("v100-16g", "generic-27b:q4", (struct claim){ANY, .decode_ts = 60});
    verdict(&r, "decode", CLAIM_ONLY_IF, "only at 97 % of datasheet bandwidth, engines reach 60-70 % (37.2-43.4 t/s)");
    near_to("ceiling", figure(&r, "decode")->ceiling, 62.1, 0.05);
    verdict(&r, "memory", CLAIM_POSSIBLE, "weights 13.5 ");
    verdict(&r, "memory", CLAIM_POSSIBLE, "against 16.0 (15.8 usable); 2.3 GiB left");
}

static void case_2_context_in_f16(void **s) {
    (void)s;
    struct claim c = {ANY, .ctx = 256 * K, .all_vram = true};
    struct claim_report r = examine("v100-16g", "generic-27b:q4", c);
    assert_true(r.kv_bytes_per_tok == 81920);
    near_to("KV GiB", gib(r.kv_bytes), 20.0, 0.05);
    near_to("with weights GiB", gib(figure(&r, "memory")->claimed), 33.5, 0.05);
    verdict(&r, "memory", CLAIM_IMPOSSIBLE, "33.5 GiB");
    verdict(&r, "context", CLAIM_IMPOSSIBLE, "81,920 B/token");
    /* The same figures for the model that the name stands for today. */
    r = examine("v100-16g", "qwen3.8-27b:q4_k_m", c);
    assert_true(r.kv_bytes_per_tok == 65536);
    near_to("KV GiB", gib(r.kv_bytes), 16.0, 0.05);
    verdict(&r, "context", CLAIM_IMPOSSIBLE, "65,536 B/token");
}

static void case_3_context_in_smaller_types(void **s) {
    (void)s;
    static const struct {
        int type;
        double gib;
    } types[] = {{QT_Q8_0, 10.6}, {QT_Q4_0, 5.6}};
    for (int i = 0; i < 2; i++) {
        struct claim c = {.depth = -1, .ctx = 256 * K, .all_vram = true, .type_k = types[i].type, .type_v = types[i].type};
        struct claim_report r = examine("v100-16g", "generic-27b:q4", c);
        near_to("KV GiB", gib(r.kv_bytes), types[i].gib, 0.05);
        verdict(&r, "memory", CLAIM_IMPOSSIBLE, "weights 13.5 ");
        verdict(&r, "context", CLAIM_IMPOSSIBLE, "(f16 20.0, q8_0 10.6, q4_0 5.6)");
    }
}

static void case_4_decode_with_kv_in_host_memory(void **s) {
    (void)s;
    struct claim c = {F16, .ctx = 256 * K, .decode_ts = 60, .depth = 256 * K};
    struct claim_report r = examine("v100-16g", "generic-27b:q4", c);
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "at least 18.8 GB of it lie outside VRAM: at most 2.1 t/s by DRAM (40 GB/s), 0.64 over the link alone");
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "with 2.0 GB kept for runtime, scratch and headroom 1.9 and 0.58");
    const struct claim_decode *d = &r.at_depth;
    near_to("outside GB", d->outside_bytes / 1e9, 18.8, 0.05);
    near_to("by DRAM", d->dram_ts, 2.13, 0.005);
    near_to("by the link", d->link_ts, 0.64, 0.005);
    near_to("by DRAM with reserve", d->kept_dram_ts, 1.92, 0.005);
    near_to("by the link with reserve", d->kept_link_ts, 0.58, 0.005);
    near_to("ceiling", figure(&r, "decode")->ceiling, 2.13, 0.005);
    verdict(&r, "memory", CLAIM_ONLY_IF, "only if at least 18.8 GB lie in host memory");
}

static void case_5_prefill(void **s) {
    (void)s;
    struct claim_report r = examine("v100-16g", "generic-27b:q4", (struct claim){ANY, .prefill_ts = 1000});
    verdict(&r, "prefill", CLAIM_ONLY_IF, "needs 54 of 112 TFLOP/s (48 % of the peak)");
    verdict(&r, "prefill", CLAIM_ONLY_IF, "only with long batches");
    r = examine("v100-16g", "generic-27b:q4", (struct claim){ANY, .prefill_ts = 1000, .prompt = 256 * K});
    verdict(&r, "prefill_short", CLAIM_ONLY_IF, "48 %");
    verdict(&r, "prefill", CLAIM_IMPOSSIBLE, "at most 694 t/s");
    near_to("ceiling", figure(&r, "prefill")->ceiling, 694, 0.5);
    assert_int_equal(figure(&r, "prefill")->tokens, 256 * K);
}

static void case_6_headline_excludes_itself(void **s) {
    (void)s;
    struct claim_report r = examine("v100-16g", "generic-27b:q4", (struct claim){ANY, .ctx = 256 * K, .decode_ts = 60, .prefill_ts = 1000});
    verdict(&r, "together", CLAIM_IMPOSSIBLE, "exclude each other; 60.0 t/s decode needs all weights in VRAM and holds up to 6,103 tokens of KV");
    verdict(&r, "together", CLAIM_IMPOSSIBLE, "262,144 tokens put at least 18.8 GB outside VRAM");
    verdict(&r, "decode_depth_0", CLAIM_ONLY_IF, "97 %");
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "2.1 t/s");
    verdict(&r, "prefill_short", CLAIM_ONLY_IF, "48 %");
    verdict(&r, "prefill", CLAIM_IMPOSSIBLE, "694");
    /* Each at its own moment of a run, and each possible there, is another claim. */
    r = examine("v100-16g", "generic-27b:q4", (struct claim){F16, .ctx = 256 * K, .decode_ts = 40, .depth = 4 * K});
    verdict(&r, "together", CLAIM_ONLY_IF, "only if not at the same moment");
}

static void case_7_fits_but_for_the_embedding(void **s) {
    (void)s;
    struct claim_report r = examine("V100 16GB", "qwen3.8-27b:q4_k_m", (struct claim){ANY, .ctx = 4 * K, .all_vram = true});
    near_to("weights GB", r.weight_bytes / 1e9, 16.54, 0.005);
    verdict(&r, "memory", CLAIM_ONLY_IF, "with scratch and runtime (1.0 GB) does not fit: only if the token embedding (0.72 GB) or some layers stay on the host");
}

static void case_8_long_context_in_q4(void **s) {
    (void)s;
    struct claim c = {.depth = 256 * K, .ctx = 256 * K, .all_vram = true, .decode_ts = 30, .type_k = QT_Q4_0, .type_v = QT_Q4_0};
    struct claim_report r = examine("rtx3090", "qwen3.8-27b:q4_k_m", c);
    verdict(&r, "memory", CLAIM_POSSIBLE, "weights 15.4 + KV 4.5 (262,144 tokens) + state 0.15 ");
    verdict(&r, "context", CLAIM_POSSIBLE, "18,432 B/token");
    near_to("ceiling", figure(&r, "decode")->ceiling, 45, 0.5);
    verdict(&r, "decode", CLAIM_POSSIBLE, "67 %");
}

static void case_9_long_context_in_f16(void **s) {
    (void)s;
    struct claim_report r = examine("3090", "qwen3.8-27b:q4_k_m", (struct claim){ANY, .ctx = 256 * K, .all_vram = true});
    verdict(&r, "memory", CLAIM_IMPOSSIBLE, "weights 15.4 + KV 16.0 ");
    verdict(&r, "context", CLAIM_IMPOSSIBLE, "");
}

static void case_10_fast_at_depth_0_only(void **s) {
    (void)s;
    struct claim c = {F16, .ctx = 128 * K, .depth = 128 * K, .decode_ts = 150};
    struct claim_report r = examine("4090", "llama-3.1-8b:q4_k_m", c);
    verdict(&r, "memory", CLAIM_POSSIBLE, "KV 16.0 ");
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "at most 46.2 t/s");
    near_to("ceiling at depth", figure(&r, "decode")->ceiling, 46, 0.5);
    verdict(&r, "decode_depth_0", CLAIM_POSSIBLE, "69 %");
    near_to("ceiling at 0", figure(&r, "decode_depth_0")->ceiling, 218, 0.5);
}

static bool asks(const struct claim_report *r, const char *about) {
    for (int i = 0; i < r->n_question; i++)
        if (strstr(r->questions[i], about)) return true;
    return false;
}

static void case_11_sparse_attention(void **s) {
    (void)s;
    struct claim c = {F16, .ctx = 256 * K, .depth = 256 * K, .decode_ts = 30};
    struct claim_report r = examine("v100-16g", "generic-27b:q4", c);
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "exact attention reads 35.97 GB per token");
    assert_true(asks(&r, "how many tokens were attended"));
    c.attended = 4 * K;
    r = examine("v100-16g", "generic-27b:q4", c);
    verdict(&r, "attended", CLAIM_ONLY_IF, "4,096 of 262,144 tokens: not comparable with exact attention, which must read 36.0 GB per token");
    verdict(&r, "decode", CLAIM_ONLY_IF, "only if no more than 4,096 tokens are attended: not comparable");
    assert_false(asks(&r, "how many tokens were attended"));
    c.decode_ts = 100;
    r = examine("v100-16g", "generic-27b:q4", c);
    verdict(&r, "attended", CLAIM_IMPOSSIBLE, "impossible even so");
    verdict(&r, "decode", CLAIM_IMPOSSIBLE, "");
}

static void case_12_room_to_spare(void **s) {
    (void)s;
    struct claim c = {F16, .ctx = 32 * K, .depth = 32 * K, .decode_ts = 40, .all_vram = true};
    struct claim_report r = examine("5090", "qwen2.5-32b:q4_k_m", c);
    near_to("weights GB", r.weight_bytes / 1e9, 19.85, 0.005);
    near_to("KV GiB", gib(r.kv_bytes), 8.0, 0.05);
    verdict(&r, "memory", CLAIM_POSSIBLE, "5.4 GiB left");
    near_to("ceiling", figure(&r, "decode")->ceiling, 64, 0.5);
}

static void questions_stay_open_unless_answered(void **s) {
    (void)s;
    struct claim c = {ANY, .ctx = 4 * K, .decode_ts = 1, .prefill_ts = 1};
    static const char *const all[] = {"prefill or decode", "prompt length", "batch", "weights", "engine", "depth", "attention", "speculation"};
    struct claim_report r = examine("3090", "llama-3.1-8b", c);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!asks(&r, all[i])) fail_msg("%s is not asked", all[i]);
    c.depth = c.prompt = c.attended = 2 * K;
    c.all_vram = true;
    r = examine("3090", "llama-3.1-8b", c);
    static const char *const answered[] = {"prompt length", "weights", "depth", "attention"};
    for (size_t i = 0; i < sizeof answered / sizeof *answered; i++)
        if (asks(&r, answered[i])) fail_msg("%s is asked though the claim says it", answered[i]);
    r = examine("3090", "llama-3.1-8b", (struct claim){ANY, .ctx = 256 * K, .decode_ts = 1});
    assert_true(asks(&r, "beyond the trained one"));
}

static void shapes_hold_and_read_the_right_bytes(void **s) {
    (void)s;
    struct claim c = {ANY};
    struct claim_model m = model_of("qwen3.8-27b:q4_k_m");
    assert_true(m.state_bytes == 156893184);
    assert_true(m.params == 26895998464.0);
    assert_int_equal(m.n_attn, 16);
    struct claim_model mtp = model_of("qwen3.8-27b-mtp:q4_k_m");
    assert_true(mtp.read_bytes == m.read_bytes && mtp.weight_bytes == m.weight_bytes);
    /* 8 of 128 experts: 3.3 of 30.5 B parameters take part. */
    m = model_of("qwen3-30b-a3b:q4_k_m");
    near_to("active params", m.active_params / 1e9, 3.35, 0.05);
    assert_true(m.read_bytes < 0.15 * m.weight_bytes);
    /* A tied embedding is read as the output matrix. */
    m = model_of("qwen3-4b:q8_0");
    assert_true(m.embed_bytes == 0 && m.read_bytes == m.weight_bytes);
    /* 10 layers keep everything, 52 keep 1024 positions: 436 MB. */
    m = model_of("gemma3-27b:q4_k_m");
    assert_true(claim_kv_bytes(&m, &c, 100) == 507904.0 * 100);
    assert_true(claim_kv_bytes(&m, &c, 100000) == 81920.0 * 100000 + 52.0 * 1024 * 8192);
    m = model_of("generic-27b");
    assert_true(m.params == 27e9 && m.read_bytes == 14.5e9 && m.weight_bytes == 14.5e9);
    struct shape_totals sum;
    shape_totals(&sum, shape_find("generic-27b"), SHAPE_PUBLISHED_MIX);
    near_to("tensors of generic-27b, B parameters", (double)sum.params / 1e9, 27, 0.027);
    near_to("tensors of generic-27b, GB", (double)sum.bytes / 1e9, 14.5, 0.29);
}

static int put_record(void *ctx, const struct shape_tensor *t) { return gguf_writer_tensor(ctx, t->name, t->type, t->n_dims, t->dims); }

static int put_zeros(void *ctx, const struct shape_tensor *t) {
    void *p = calloc(1, t->bytes);
    int rc = gguf_writer_data(ctx, p, t->bytes);
    free(p);
    return rc;
}

static void write_model(const char *path, const struct shape *s, enum mix mix) {
    struct gguf_writer *w;
    if (gguf_writer_open(&w, path)) fail_msg("%s", err_text());
    synth_metadata(w, s, mix, 0);
    synth_tokenizer(w, s->n_vocab);
    if (shape_tensors(s, mix, false, 0, put_record, w) || gguf_writer_begin_data(w) || shape_tensors(s, mix, false, 0, put_zeros, w) ||
        gguf_writer_finish(w))
        fail_msg("%s: %s", s->name, err_text());
    gguf_writer_close(w);
}

/* Every built-in shape, made small and written to a file, gives the same model either way. */
static void files_and_shapes_agree(void **st) {
    (void)st;
    char path[64];
    snprintf(path, sizeof path, "/tmp/lh-claim-%ld.gguf", (long)getpid());
    for (int i = 0; i < shape_count(); i++) {
        struct shape s = *shape_at(i);
        s.n_layer = s.window ? s.window_pattern : 2 * s.full_interval;
        s.n_vocab = 320, s.dim = 256, s.n_head = 4, s.n_kv = 2;
        if (s.n_ff) s.n_ff = 512;
        if (s.n_expert) s.n_expert = 4, s.n_expert_used = 2, s.n_ff_expert = 256;
        if (s.n_ff_shared) s.n_ff_shared = 256;
        if (s.n_value_head) s.n_key_head = 2, s.n_value_head = 4;
        s.published_params = s.published_bytes = 0;
        write_model(path, &s, MIX_Q4_K_M);
        struct gguf *g;
        struct model m;
        struct claim_model f, b;
        if (gguf_open(&g, path) || model_open(&m, g)) fail_msg("%s: %s", s.name, err_text());
        claim_model_of_file(&f, &m);
        claim_model_of_shape(&b, &s, MIX_Q4_K_M);
        const double pairs[][2] = {{f.params, b.params}, {f.active_params, b.active_params}, {f.lazy_params, b.lazy_params}, {f.weight_bytes, b.weight_bytes},
                                   {f.read_bytes, b.read_bytes}, {f.embed_bytes, b.embed_bytes}, {f.state_bytes, b.state_bytes},
                                   {f.k_values, b.k_values}, {f.v_values, b.v_values}, {f.attn_flops, b.attn_flops}, {f.window_k_values, b.window_k_values}, {(double)f.window, (double)b.window}, {f.n_attn, b.n_attn},
                                   {f.n_head, b.n_head}, {f.n_kv, b.n_kv}, {f.head_dim_k, b.head_dim_k}, {f.n_layer, b.n_layer}};
        for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++)
            if (fabs(pairs[k][0] - pairs[k][1]) > 1e-9 * pairs[k][1]) fail_msg("%s, number %zu: file %.12g, shape %.12g", s.name, k, pairs[k][0], pairs[k][1]);
        model_close(&m);
        gguf_close(g);
    }
    unlink(path);
}

static void custom_shapes_are_checked(void **s) {
    (void)s;
    static const char good[] = "layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9";
    static const struct {
        const char *add, *name;
    } bad[] = {
        {",kv_heads=4", "kv_heads"}, {",colour=3", "colour"},     {",", "key=number"},  {",attn_layers=41", "attn_layers"}, {",attn_layers=1.5", "attn_layers"},
        {",embed_bytes=-1", "embed_bytes"}, {",state_bytes=x", "state_bytes"}, {",embed_bytes=2e10", "embed_bytes"}, {",state_bytes=1e999", "state_bytes"},
        {",state_bytes=nan", "state_bytes"},
    };
    static const struct {
        const char *text, *name;
    } whole[] = {
        {"layers=40,heads=4,kv_heads=8,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9", "kv_heads"},
        {"layers=40,heads=40,kv_heads=7,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9", "heads=40"},
        {"layers=0,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9", "layers"},
        {"layers=-3,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9", "layers"},
        {"layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9", "weight_bytes"},
        {"layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e12", "weight_bytes"},
        {"layers=1000,heads=1000,kv_heads=1000,head_dim=1024,width=100000,params=27e9,weight_bytes=14.5e9", "params"},
        {"", "key=number"},
    };
    struct claim_model m = model_of("custom:layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9");
    struct claim_model same = model_of("generic-27b:q4");
    assert_true(m.k_values == same.k_values && m.attn_flops == same.attn_flops && m.read_bytes == same.read_bytes && m.active_params == same.active_params);
    char text[300];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(text, sizeof text, "custom:%s%s", good, bad[i].add);
        if (claim_model_parse(&m, text) != ERR_ARG || !strstr(err_text(), bad[i].name)) fail_msg("%s: '%s' does not name %s", text, err_text(), bad[i].name);
    }
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        snprintf(text, sizeof text, "custom:%s", whole[i].text);
        if (claim_model_parse(&m, text) != ERR_ARG || !strstr(err_text(), whole[i].name)) fail_msg("%s: '%s' does not name %s", text, err_text(), whole[i].name);
    }
}

static void missing_rates_are_named(void **s) {
    (void)s;
    struct claim_model m = model_of("generic-27b:q4");
    struct claim_rates r = {.vram_bytes = 16e9, .vram_most_bytes = 16e9};
    struct claim_report out;
    struct claim c = {ANY, .decode_ts = 1};
    assert_int_equal(claim_examine(&out, &c, &m, &r), ERR_ARG);
    assert_non_null(strstr(err_text(), "--vram-gbps"));
    c = (struct claim){ANY, .prefill_ts = 1};
    assert_int_equal(claim_examine(&out, &c, &m, &r), ERR_ARG);
    assert_non_null(strstr(err_text(), "--tflops"));
    c = (struct claim){ANY};
    assert_int_equal(claim_examine(&out, &c, &m, &r), ERR_ARG);
    assert_non_null(strstr(err_text(), "--claim-ctx"));
    /* Without DRAM's rate what lies outside bounds nothing, and that is said. */
    r.vram_gbps = 900;
    c = (struct claim){ANY, .ctx = 256 * K, .decode_ts = 10};
    assert_int_equal(claim_examine(&out, &c, &m, &r), 0);
    verdict(&out, "decode", CLAIM_ONLY_IF, "needs --dram-gbps");
}

/* On random claims: more of anything never makes a verdict worse, deeper is never faster, an answer is complete. */
static void answers_are_monotone(void **s) {
    (void)s;
    uint64_t seed = 20261201;
    struct claim_model m;
    for (int i = 0; i < 20000; i++) {
        const struct shape *shape = shape_at((int)(test_rand(&seed) % (uint64_t)shape_count()));
        if (i % 50 == 0) claim_model_of_shape(&m, shape, (enum mix)(test_rand(&seed) % MIX_COUNT));
        const struct machine *gpu = machine_at((int)(test_rand(&seed) % (uint64_t)machine_count()));
        struct claim_rates r, better;
        claim_rates_of(&r, gpu);
        better = r;
        better.vram_bytes *= 1.3, better.vram_most_bytes *= 1.3, better.vram_gbps *= 1.2, better.dram_gbps *= 1.5, better.peak_tflops *= 1.4;
        better.host_bytes *= 2, better.link_gbps *= 1.5;
        static const int types[] = {QT_F32, QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
        struct claim c = {.depth = -1, .type_k = types[test_rand(&seed) % 5], .type_v = types[test_rand(&seed) % 5]};
        c.ctx = 1 + (int64_t)(test_rand(&seed) % (1u << (8 + test_rand(&seed) % 13)));
        if (test_rand(&seed) & 1) c.decode_ts = exp(test_uniform(&seed, -2, 7));
        if (test_rand(&seed) & 1) c.prefill_ts = exp(test_uniform(&seed, 0, 11));
        if (c.decode_ts > 0 && test_rand(&seed) & 1) c.depth = (int64_t)(test_rand(&seed) % (uint64_t)(c.ctx + 1));
        if (c.prefill_ts > 0 && test_rand(&seed) & 1) c.prompt = 1 + (int64_t)(test_rand(&seed) % (uint64_t)c.ctx);
        c.all_vram = test_rand(&seed) & 1;
        struct claim_report a, b;
        if (claim_examine(&a, &c, &m, &r) || claim_examine(&b, &c, &m, &better)) fail_msg("case %d: %s", i, err_text());
        assert_int_equal(a.n_figure, b.n_figure);
        for (int k = 0; k < a.n_figure; k++) {
            const struct claim_figure *f = &a.figures[k], *g = &b.figures[k];
            size_t n = strlen(f->why);
            if (g->verdict > f->verdict || g->ceiling < f->ceiling * (1 - 1e-12))
                fail_msg("case %d %s on %s: %s at %s: %s (%g), with a better machine %s (%g)", i, m.name, gpu->name, f->figure, f->why,
                         claim_verdict_name(f->verdict), f->ceiling, claim_verdict_name(g->verdict), g->ceiling);
            if (!(isfinite(f->ceiling) && f->ceiling >= 0) || n < 5 || n >= sizeof f->why - 1)
                fail_msg("case %d %s: %s: ceiling %g, %zu characters: %s", i, m.name, f->figure, f->ceiling, n, f->why);
            if (f->verdict == CLAIM_POSSIBLE && !strcmp(f->unit, "tokens/s") && f->claimed > f->ceiling)
                fail_msg("case %d %s: %s possible above its ceiling %g", i, m.name, f->figure, f->ceiling);
        }
        double deep = claim_decode_at(&c, &m, &r, c.ctx).ceiling_ts, flat = claim_decode_at(&c, &m, &r, c.ctx / 2).ceiling_ts;
        if (deep > flat) fail_msg("case %d %s: decode bound %g at %lld, %g at half of it", i, m.name, deep, (long long)c.ctx, flat);
        if (claim_prefill_ts(&m, &r, c.ctx) > claim_prefill_ts(&m, &r, c.ctx / 2)) fail_msg("case %d %s: longer prompts are faster", i, m.name);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case_1_decode_near_the_datasheet),
        cmocka_unit_test(case_2_context_in_f16),
        cmocka_unit_test(case_3_context_in_smaller_types),
        cmocka_unit_test(case_4_decode_with_kv_in_host_memory),
        cmocka_unit_test(case_5_prefill),
        cmocka_unit_test(case_6_headline_excludes_itself),
        cmocka_unit_test(case_7_fits_but_for_the_embedding),
        cmocka_unit_test(case_8_long_context_in_q4),
        cmocka_unit_test(case_9_long_context_in_f16),
        cmocka_unit_test(case_10_fast_at_depth_0_only),
        cmocka_unit_test(case_11_sparse_attention),
        cmocka_unit_test(case_12_room_to_spare),
        cmocka_unit_test(questions_stay_open_unless_answered),
        cmocka_unit_test(shapes_hold_and_read_the_right_bytes),
        cmocka_unit_test(files_and_shapes_agree),
        cmocka_unit_test(custom_shapes_are_checked),
        cmocka_unit_test(missing_rates_are_named),
        cmocka_unit_test(answers_are_monotone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
