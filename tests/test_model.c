/* test_model.c: what model_open makes of every test file (shapes, flags, refusals by name), and of made-up files that
 * hold the rarer forms: fused tensors, arrays per layer, scaling keys. */
#include "core/arch.h"
#include "core/err.h"
#include "core/gguf.h"
#include "core/model.h"
#include "core/quant.h"
#include "core/tokenizer.h"
#include "tests/support.h"
#include "tests/support_gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* shadow memory leaves no meaning to limits of address space */
#else
enum { SANITIZED = 0 };
#endif

static struct gguf *g;
static struct model m;

static int open_path(const char *path) {
    int rc = gguf_open(&g, path);
    if (rc) return rc;
    rc = model_open(&m, g);
    if (rc) gguf_close(g);
    return rc;
}

static void open_ok(const char *name) {
    if (open_path(test_path(name))) fail_msg("%s: %s", name, err_text());
}

static void close_both(void) {
    model_close(&m);
    gguf_close(g);
}

/* --- real shapes -------------------------------------------------------------------------------------------------- */

struct want {
    const char *file, *arch;
    int n_layer, dim, n_vocab, n_head, n_kv, head_dim, n_ff, n_rot, n_expert, n_used;
    double base;
    enum rope_pairing pairing;
    bool tied, bias, qk_norm;
    uint64_t n_params;
};

/* n_params: sums over the shapes, worked out by hand from the configurations. */
static const struct want wants[] = {
    {"tiny-models/tiny-random-llama-f32.gguf", "llama", 3, 64, 512, 4, 2, 16, 128, 16, 0, 0, 5e5, ROPE_NORM, false, false, false,
     2 * 64 * 512 + 64 + 3 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)},
    {"tiny-models/tiny-random-llama31rope-f32.gguf", "llama", 3, 64, 512, 4, 1, 32, 128, 32, 0, 0, 5e5, ROPE_NORM, true, false, false,
     64 * 512 + 64 + 16 + 3 * (2 * 64 + 2 * 64 * 128 + 2 * 64 * 32 + 3 * 64 * 128)},
    {"tiny-models/tiny-random-qwen2-f32.gguf", "qwen2", 3, 64, 512, 4, 2, 16, 128, 16, 0, 0, 1e6, ROPE_NEOX, false, true, false,
     2 * 64 * 512 + 64 + 3 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 64 * 128)},
    {"tiny-models/tiny-random-qwen3-f32.gguf", "qwen3", 3, 64, 512, 4, 2, 32, 128, 32, 0, 0, 1e6, ROPE_NEOX, true, false, true,
     64 * 512 + 64 + 3 * (2 * 64 + 2 * 64 * 128 + 2 * 64 * 64 + 2 * 32 + 3 * 64 * 128)},
    {"tiny-models/tiny-random-qwen3moe-f32.gguf", "qwen3moe", 3, 64, 512, 4, 2, 32, 32, 32, 8, 3, 1e6, ROPE_NEOX, false, false, true,
     2 * 64 * 512 + 64 + 3 * (2 * 64 + 2 * 64 * 128 + 2 * 64 * 64 + 2 * 32 + 64 * 8 + 8 * 3 * 64 * 32)},
    {"tiny-models/tiny-random-gemma3-f32.gguf", "gemma3", 7, 64, 512, 4, 1, 32, 128, 32, 0, 0, 1e6, ROPE_NEOX, true, false, true,
     64 * 512 + 64 + 7 * (4 * 64 + 2 * 64 * 128 + 2 * 64 * 32 + 2 * 32 + 3 * 64 * 128)},
    {"stories260K/stories260K-q8_0.gguf", "llama", 5, 64, 512, 8, 4, 8, 172, 8, 0, 0, 1e4, ROPE_NORM, true, false, false,
     64 * 512 + 64 + 5 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172)},
};

static void check_want(const struct want *w) {
    open_ok(w->file);
    const struct layer *l = &m.layers[m.n_layer - 1];
#define SAME(got, want)                                                                                                \
    if ((got) != (want)) fail_msg("%s: " #got " is %g, want %g", w->file, (double)(got), (double)(want))
    assert_string_equal(m.arch, w->arch);
    SAME(m.n_layer, w->n_layer);
    SAME(m.dim, w->dim);
    SAME(m.n_vocab, w->n_vocab);
    SAME(l->n_head, w->n_head);
    SAME(l->n_kv, w->n_kv);
    SAME(l->head_dim_k, w->head_dim);
    SAME(l->head_dim_v, w->head_dim);
    SAME(l->n_ff, w->n_ff);
    SAME(m.ropes[0].n_rot, w->n_rot);
    SAME(m.ropes[0].base, w->base);
    SAME(m.ropes[0].pairing, w->pairing);
    SAME(m.ropes[0].scaling, ROPE_SCALING_NONE);
    SAME(m.n_expert, w->n_expert);
    SAME(m.n_expert_used, w->n_used);
    SAME(m.out.bytes == 0, w->tied);
    SAME(l->t[LT_ATTN_Q_BIAS].bytes != 0, w->bias);
    SAME(l->t[LT_ATTN_Q_NORM].bytes != 0, w->qk_norm);
    SAME(l->ffn, w->n_expert ? FFN_EXPERTS : FFN_DENSE);
    SAME(m.n_params, w->n_params);
    SAME(m.attn_scale, (float)(1 / sqrt(w->head_dim)));
#undef SAME
    size_t bytes = 0; /* these files hold nothing that the model does not read */
    for (int i = 0; i < gguf_n_tensors(g); i++) bytes += gguf_tensor(g, i)->bytes;
    assert_int_equal(m.file_bytes, bytes);
    close_both();
}

static void test_files_have_their_shapes(void **s) {
    (void)s;
    for (size_t i = 0; i < sizeof wants / sizeof *wants; i++) check_want(&wants[i]);
}

static void gemma3_alternates_windows(void **s) {
    (void)s;
    open_ok("tiny-models/tiny-random-gemma3-f32.gguf");
    assert_int_equal(m.n_rope, 2);
    assert_true(m.ropes[1].base == 10000);
    assert_true(m.embd_scale == 8);
    assert_int_equal(m.act, ACT_GELU);
    for (int il = 0; il < 7; il++) {
        assert_int_equal(m.layers[il].window, il == 5 ? 0 : 64);
        assert_int_equal(m.layers[il].rope, il != 5);
        assert_true(m.layers[il].t[LT_POST_FFN_NORM].bytes != 0);
    }
    close_both();
}

static void tensors_of_both_shards_are_found(void **s) {
    (void)s;
    open_ok("bad-gguf/valid_split-00001-of-00002.gguf");
    int seen[2] = {0, 0};
    for (int il = 0; il < m.n_layer; il++)
        for (int t = 0; t < LT_COUNT; t++)
            if (m.layers[il].t[t].bytes) seen[m.layers[il].t[t].shard]++;
    assert_true(seen[0] > 0 && seen[1] > 0);
    assert_int_equal(seen[0] + seen[1], 18);
    close_both();
}

static void refuse(const char *path, int code, const char *must_say) {
    int rc = open_path(path);
    if (rc != code || !strstr(err_text(), must_say))
        fail_msg("%s: code %d \"%s\", want code %d and \"%s\"", path, rc, rc ? err_text() : "accepted", code, must_say);
}

static void unknown_architectures_are_refused_by_name(void **s) {
    (void)s;
    refuse(test_path("gguf-fixtures/all-types.gguf"), ERR_UNSUPPORTED, "test");
}

/* --- the manifest of malformed files ------------------------------------------------------------------------------ */

/* What the parent learns from a child that opened one file. */
struct report {
    int rc;
    long rss_kib; /* growth of the peak */
    double seconds;
    char text[1024];
};

/* CPU time: other programs may be busy. */
static double cpu_seconds(const struct rusage *u) {
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) + (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1e-6;
}

static int open_all(const char *path) {
    struct tokenizer *t = NULL;
    int rc = open_path(path);
    if (rc) return rc;
    rc = tokenizer_from_gguf(&t, g);
    tokenizer_close(t);
    close_both();
    return rc;
}

static void child(const char *path, int to) {
    struct rusage before, after;
    struct rlimit as = {(rlim_t)576 << 20, (rlim_t)576 << 20}; /* 512 MiB, and 64 for the test program itself */
    struct report r = {0};
    if (!SANITIZED) setrlimit(RLIMIT_AS, &as);
    alarm(20);
    getrusage(RUSAGE_SELF, &before);
    r.rc = open_all(path);
    getrusage(RUSAGE_SELF, &after);
    r.seconds = cpu_seconds(&after) - cpu_seconds(&before);
    r.rss_kib = after.ru_maxrss - before.ru_maxrss;
    if (r.rc) snprintf(r.text, sizeof r.text, "%s", err_text());
    _exit(write(to, &r, sizeof r) == sizeof r ? 0 : 1);
}

static struct report open_in_child(const char *name, const char *path) {
    int fd[2], status;
    struct report r;
    assert_int_equal(pipe(fd), 0);
    pid_t pid = fork();
    if (pid == 0) child(path, fd[1]);
    close(fd[1]);
    ssize_t n = read(fd[0], &r, sizeof r);
    close(fd[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (n != sizeof r || !WIFEXITED(status) || WEXITSTATUS(status)) fail_msg("%s: died (wait status 0x%x)", name, status);
    return r;
}

static void check_row(const char *file, const char *verdict, const char *must_name) {
    char name[256], packed[1024];
    snprintf(name, sizeof name, "bad-gguf/%s", file);
    snprintf(packed, sizeof packed, "%s/%s.xz", TEST_DATA, name);
    if (!access(packed, R_OK)) strcat(name, ".xz");
    struct report r = open_in_child(file, test_path(name));
    if (r.seconds > 1 && !SANITIZED) fail_msg("%s: took %.2f s", file, r.seconds);
    if (r.rss_kib > 64 << 10 && !SANITIZED) fail_msg("%s: took %ld KiB", file, r.rss_kib);
    if (!strcmp(verdict, "valid") && r.rc) fail_msg("%s: refused: %s", file, r.text);
    if (strcmp(verdict, "reject")) return;
    if (r.rc != ERR_FORMAT && r.rc != ERR_UNSUPPORTED) fail_msg("%s: code %d \"%s\"", file, r.rc, r.text);
    if (!strstr(r.text, must_name)) fail_msg("%s: \"%s\" does not name %s", file, r.text, must_name);
    if (strlen(r.text) < 20) fail_msg("%s: \"%s\" is no sentence", file, r.text);
}

static void every_line_of_the_manifest_holds(void **s) {
    (void)s;
    char *text = test_read("bad-gguf/manifest.tsv", NULL), *line = strchr(text, '\n') + 1;
    int n = 0;
    for (char *end; (end = strchr(line, '\n')); line = end + 1, n++) {
        char *cell[5], *p = line;
        *end = 0;
        for (int i = 0; i < 5; i++) {
            cell[i] = p;
            p = strchr(p, '\t');
            if (p) *p++ = 0;
            else p = end;
        }
        check_row(cell[0], cell[1], cell[2]);
    }
    assert_int_equal(n, 91);
    free(text);
}

/* --- made-up files ------------------------------------------------------------------------------------------------ */

static char path[64];
#define DIMS(...) ((const int64_t[]){__VA_ARGS__, 0})

static void key_u32(struct made_gguf *f, const char *arch, const char *suffix, uint32_t v) {
    char key[128];
    snprintf(key, sizeof key, "%s.%s", arch, suffix);
    made_u32(f, key, v);
}

static void layer_tensor(struct made_gguf *f, int il, const char *suffix, int type, const int64_t *dims) {
    char name[64];
    snprintf(name, sizeof name, "blk.%d.%s", il, suffix);
    made_tensor(f, name, type, dims);
}

/* 64 wide, 4 heads of 16 on 2, FFN 96, 40 tokens; no layer tensors yet. */
static struct made_gguf base(const char *arch, int n_layer) {
    struct made_gguf f = {0};
    char key[128];
    made_str(&f, "general.architecture", arch);
    key_u32(&f, arch, "context_length", 512);
    key_u32(&f, arch, "embedding_length", 64);
    key_u32(&f, arch, "block_count", (uint32_t)n_layer);
    key_u32(&f, arch, "feed_forward_length", 96);
    key_u32(&f, arch, "attention.head_count", 4);
    key_u32(&f, arch, "attention.head_count_kv", 2);
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    made_f32(&f, key, 1e-5f);
    made_tensor(&f, "token_embd.weight", QT_F16, DIMS(64, 40));
    made_tensor(&f, "output_norm.weight", QT_F32, DIMS(64));
    return f;
}

static void add_attn(struct made_gguf *f, int il) {
    layer_tensor(f, il, "attn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(f, il, "attn_q.weight", QT_Q8_0, DIMS(64, 64));
    layer_tensor(f, il, "attn_k.weight", QT_Q8_0, DIMS(64, 32));
    layer_tensor(f, il, "attn_v.weight", QT_F16, DIMS(64, 32));
    layer_tensor(f, il, "attn_output.weight", QT_Q4_0, DIMS(64, 64));
}

static void add_ffn(struct made_gguf *f, int il) {
    layer_tensor(f, il, "ffn_norm.weight", QT_BF16, DIMS(64));
    layer_tensor(f, il, "ffn_gate.weight", QT_Q8_0, DIMS(64, 96));
    layer_tensor(f, il, "ffn_up.weight", QT_Q8_0, DIMS(64, 96));
    layer_tensor(f, il, "ffn_down.weight", QT_Q8_0, DIMS(96, 64));
}

static struct made_gguf llama(void) {
    struct made_gguf f = base("llama", 1);
    add_attn(&f, 0);
    add_ffn(&f, 0);
    return f;
}

static void accept_made(struct made_gguf *f) {
    if (open_path(made_write(f, path))) fail_msg("refused: %s", err_text());
    made_free(f);
}

static void refuse_made(struct made_gguf *f, int code, const char *must_say) {
    refuse(made_write(f, path), code, must_say);
    made_free(f);
}

static void a_plain_file_is_accepted(void **s) {
    (void)s;
    struct made_gguf f = llama();
    accept_made(&f);
    assert_int_equal(m.n_vocab, 40);
    assert_int_equal(m.layers[0].t[LT_FFN_NORM].type, QT_BF16);
    assert_true(m.ropes[0].base == 10000);
    close_both();
}

/* A slice must be the same bytes that the separate tensors would be. */
static void check_slice(const struct tensor *t, const struct gguf_tensor *whole, int64_t row0, int64_t rows) {
    size_t row_bytes = whole->bytes / (size_t)(whole->n_dims == 1 ? whole->dims[0] : whole->dims[1] * whole->dims[2]);
    assert_int_equal(t->offset, whole->offset + (size_t)row0 * row_bytes);
    assert_int_equal(t->bytes, (size_t)(rows * t->stack) * row_bytes);
    assert_int_equal(whole->n_dims == 1 ? t->cols : t->rows, rows);
    assert_int_equal(t->stride, whole->bytes / (size_t)t->stack);
}

static void fused_tensors_become_slices(void **s) {
    (void)s;
    struct made_gguf f = base("phi3", 1);
    layer_tensor(&f, 0, "attn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 0, "attn_qkv.weight", QT_Q8_0, DIMS(64, 128));
    layer_tensor(&f, 0, "attn_qkv.bias", QT_F32, DIMS(128));
    layer_tensor(&f, 0, "attn_output.weight", QT_Q8_0, DIMS(64, 64));
    layer_tensor(&f, 0, "ffn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 0, "ffn_up.weight", QT_Q8_0, DIMS(64, 192));
    layer_tensor(&f, 0, "ffn_down.weight", QT_Q8_0, DIMS(96, 64));
    made_u32(&f, "phi3.attention.sliding_window", 100); /* this family's files carry the key and do not mean it */
    accept_made(&f);
    const struct tensor *t = m.layers[0].t;
    const struct gguf_tensor *qkv = gguf_tensor_find(g, "blk.0.attn_qkv.weight"), *bias = gguf_tensor_find(g, "blk.0.attn_qkv.bias");
    const struct gguf_tensor *up = gguf_tensor_find(g, "blk.0.ffn_up.weight");
    check_slice(&t[LT_ATTN_Q], qkv, 0, 64);
    check_slice(&t[LT_ATTN_K], qkv, 64, 32);
    check_slice(&t[LT_ATTN_V], qkv, 96, 32);
    check_slice(&t[LT_ATTN_Q_BIAS], bias, 0, 64);
    check_slice(&t[LT_ATTN_K_BIAS], bias, 64, 32);
    check_slice(&t[LT_ATTN_V_BIAS], bias, 96, 32);
    check_slice(&t[LT_FFN_GATE], up, 0, 96);
    check_slice(&t[LT_FFN_UP], up, 96, 96);
    assert_int_equal(m.layers[0].window, 0);
    close_both();
}

static void experts(struct made_gguf *f, bool fused) {
    add_attn(f, 0);
    layer_tensor(f, 0, "ffn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(f, 0, "ffn_gate_inp.weight", QT_F32, DIMS(64, 4));
    if (fused) {
        layer_tensor(f, 0, "ffn_gate_up_exps.weight", QT_Q8_0, DIMS(64, 64, 4));
    } else {
        layer_tensor(f, 0, "ffn_gate_exps.weight", QT_Q8_0, DIMS(64, 32, 4));
        layer_tensor(f, 0, "ffn_up_exps.weight", QT_Q8_0, DIMS(64, 32, 4));
    }
    layer_tensor(f, 0, "ffn_down_exps.weight", QT_Q8_0, DIMS(32, 64, 4));
    made_u32(f, "llama.expert_count", 4);
    made_u32(f, "llama.expert_used_count", 2);
    made_u32(f, "llama.feed_forward_length", 32);
}

static void experts_may_be_fused_too(void **s) {
    (void)s;
    struct made_gguf f = base("llama", 1);
    experts(&f, true);
    accept_made(&f);
    const struct gguf_tensor *whole = gguf_tensor_find(g, "blk.0.ffn_gate_up_exps.weight");
    check_slice(&m.layers[0].t[LT_MOE_GATE], whole, 0, 32);
    check_slice(&m.layers[0].t[LT_MOE_UP], whole, 32, 32);
    assert_true(m.expert_normalise);
    close_both();

    f = base("llama", 1);
    experts(&f, false);
    accept_made(&f);
    assert_int_equal(m.layers[0].t[LT_MOE_UP].stride, 32 * 68);
    close_both();

    f = base("llama", 1);
    experts(&f, false);
    made_u32(&f, "llama.expert_used_count", 5);
    refuse_made(&f, ERR_FORMAT, "expert_used_count");
    f = base("llama", 1);
    experts(&f, false);
    made_u32(&f, "llama.expert_gating_func", 2);
    refuse_made(&f, ERR_UNSUPPORTED, "expert_gating_func");
}

static void head_counts_may_differ_by_layer(void **s) {
    (void)s;
    struct made_gguf f = base("llama", 2);
    const int32_t heads[] = {4, 8}, kvs[] = {2, 1}, ffs[] = {96, 32};
    made_i32s(&f, "llama.attention.head_count", heads, 2);
    made_i32s(&f, "llama.attention.head_count_kv", kvs, 2);
    made_i32s(&f, "llama.feed_forward_length", ffs, 2);
    made_u32(&f, "llama.attention.key_length", 16);
    made_u32(&f, "llama.attention.value_length", 16);
    add_attn(&f, 0);
    add_ffn(&f, 0);
    layer_tensor(&f, 1, "attn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 1, "attn_q.weight", QT_F16, DIMS(64, 128));
    layer_tensor(&f, 1, "attn_k.weight", QT_F16, DIMS(64, 16));
    layer_tensor(&f, 1, "attn_v.weight", QT_F16, DIMS(64, 16));
    layer_tensor(&f, 1, "attn_output.weight", QT_F16, DIMS(128, 64));
    layer_tensor(&f, 1, "ffn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 1, "ffn_gate.weight", QT_F16, DIMS(64, 32));
    layer_tensor(&f, 1, "ffn_up.weight", QT_F16, DIMS(64, 32));
    layer_tensor(&f, 1, "ffn_down.weight", QT_F16, DIMS(32, 64));
    struct made_gguf shorter = f; /* shares the buffers: write first, then change */
    made_write(&f, path);
    if (open_path(path)) fail_msg("refused: %s", err_text());
    assert_int_equal(m.layers[1].n_head, 8);
    assert_int_equal(m.layers[1].n_kv, 1);
    assert_int_equal(m.layers[1].n_ff, 32);
    close_both();
    made_i32s(&shorter, "llama.attention.head_count", heads, 1);
    refuse_made(&shorter, ERR_FORMAT, "llama.attention.head_count");
}

static void rope_keys_are_read(void **s) {
    (void)s;
    struct made_gguf f = llama();
    made_str(&f, "llama.rope.scaling.type", "yarn");
    made_f32(&f, "llama.rope.scaling.factor", 4);
    made_u32(&f, "llama.rope.scaling.original_context_length", 128);
    made_f32(&f, "llama.rope.scaling.attn_factor", 0.5f);
    made_f32(&f, "llama.rope.scaling.yarn_beta_fast", 16);
    made_f32(&f, "llama.rope.freq_base", 1e6f);
    made_u32(&f, "llama.rope.dimension_count", 8);
    accept_made(&f);
    const struct rope *r = &m.ropes[0];
    assert_true(r->scaling == ROPE_SCALING_YARN && r->factor == 4 && r->n_ctx_orig == 128 && r->attn_factor == 0.5 &&
                r->beta_fast == 16 && r->beta_slow == 1 && r->ext_factor == 1 && r->base == 1e6 && r->n_rot == 8);
    close_both();

    f = llama(); /* no type means linear */
    made_f32(&f, "llama.rope.scaling.factor", 8);
    accept_made(&f);
    assert_true(m.ropes[0].scaling == ROPE_SCALING_LINEAR && m.ropes[0].factor == 8 && m.ropes[0].n_ctx_orig == 512);
    close_both();

    f = llama();
    made_str(&f, "llama.rope.scaling.type", "foo");
    refuse_made(&f, ERR_UNSUPPORTED, "\"foo\"");
    f = llama();
    made_str(&f, "llama.rope.scaling.type", "longrope");
    refuse_made(&f, ERR_FORMAT, "rope_factors_long.weight");
    f = llama();
    made_u32(&f, "llama.rope.dimension_count", 7);
    refuse_made(&f, ERR_FORMAT, "llama.rope.dimension_count");
    f = llama();
    made_u32(&f, "llama.rope.dimension_count", 32);
    refuse_made(&f, ERR_FORMAT, "llama.rope.dimension_count");
    f = llama();
    made_f32(&f, "llama.rope.freq_base", NAN);
    refuse_made(&f, ERR_FORMAT, "llama.rope.freq_base");

    f = llama();
    made_tensor(&f, "rope_factors_long.weight", QT_F32, DIMS(8));
    made_tensor(&f, "rope_factors_short.weight", QT_F32, DIMS(8));
    accept_made(&f);
    assert_int_equal(m.ropes[0].scaling, ROPE_SCALING_LONGROPE);
    close_both();
}

/* 2 heads of 16, which is not width / heads. */
static struct made_gguf gemma(int n_layer) {
    struct made_gguf f = base("gemma3", n_layer);
    made_u32(&f, "gemma3.attention.head_count", 2);
    made_u32(&f, "gemma3.attention.head_count_kv", 1);
    made_u32(&f, "gemma3.attention.key_length", 16);
    made_u32(&f, "gemma3.attention.value_length", 16);
    for (int il = 0; il < n_layer; il++) {
        layer_tensor(&f, il, "attn_norm.weight", QT_F32, DIMS(64));
        layer_tensor(&f, il, "attn_q.weight", QT_F16, DIMS(64, 32));
        layer_tensor(&f, il, "attn_k.weight", QT_F16, DIMS(64, 16));
        layer_tensor(&f, il, "attn_v.weight", QT_F16, DIMS(64, 16));
        layer_tensor(&f, il, "attn_output.weight", QT_F16, DIMS(32, 64));
        add_ffn(&f, il);
        layer_tensor(&f, il, "attn_q_norm.weight", QT_F32, DIMS(16));
        layer_tensor(&f, il, "attn_k_norm.weight", QT_F32, DIMS(16));
        layer_tensor(&f, il, "post_attention_norm.weight", QT_F32, DIMS(64));
        layer_tensor(&f, il, "post_ffw_norm.weight", QT_F32, DIMS(64));
    }
    return f;
}

static void gemma3_rules(void **s) {
    (void)s;
    struct made_gguf f = gemma(3);
    const uint8_t local[] = {0, 1, 1};
    made_u32(&f, "gemma3.attention.sliding_window", 32);
    made_bools(&f, "gemma3.attention.sliding_window_pattern", local, 3);
    made_str(&f, "gemma3.rope.scaling.type", "linear");
    made_f32(&f, "gemma3.rope.scaling.factor", 8);
    made_f32(&f, "gemma3.rope.freq_base", 1e6f);
    made_f32(&f, "gemma3.rope.freq_base_swa", 20000);
    made_f32(&f, "gemma3.final_logit_softcapping", 30);
    made_f32(&f, "gemma3.attention.scale", 0.125f);
    accept_made(&f);
    assert_true(m.layers[0].window == 0 && m.layers[1].window == 32 && m.layers[2].window == 32);
    assert_true(m.ropes[0].scaling == ROPE_SCALING_LINEAR && m.ropes[0].factor == 8 && m.ropes[0].base == 1e6);
    assert_true(m.ropes[1].scaling == ROPE_SCALING_NONE && m.ropes[1].factor == 1 && m.ropes[1].base == 20000);
    assert_true(m.logit_softcap == 30 && m.attn_scale == 0.125f);
    close_both();

    f = gemma(4); /* a period of 2 instead of 6 */
    made_u32(&f, "gemma3.attention.sliding_window", 32);
    made_u32(&f, "gemma3.attention.sliding_window_pattern", 2);
    accept_made(&f);
    for (int il = 0; il < 4; il++) assert_int_equal(m.layers[il].window, il % 2 ? 0 : 32);
    assert_true(m.attn_scale == 0.25f);
    close_both();

    f = gemma(62); /* the 27B scales by width / heads, not by its head size */
    accept_made(&f);
    assert_true(m.attn_scale == (float)(1 / sqrt(64.0 / 2)));
    assert_int_equal(m.n_rope, 1); /* no window in the file */
    close_both();
}

static void bounds_and_types_are_checked(void **s) {
    (void)s;
    struct made_gguf f = llama();
    made_f32(&f, "llama.attention.layer_norm_rms_epsilon", NAN);
    refuse_made(&f, ERR_FORMAT, "layer_norm_rms_epsilon");
    f = llama();
    made_f32(&f, "llama.attention.layer_norm_rms_epsilon", -1e-5f);
    refuse_made(&f, ERR_FORMAT, "layer_norm_rms_epsilon");
    f = llama();
    made_u32(&f, "llama.attention.head_count", 1025);
    refuse_made(&f, ERR_FORMAT, "llama.attention.head_count");
    f = llama();
    made_drop(&f, "llama.block_count");
    refuse_made(&f, ERR_FORMAT, "llama.block_count");
    f = llama();
    made_drop(&f, "llama.feed_forward_length");
    refuse_made(&f, ERR_FORMAT, "llama.feed_forward_length");
    f = llama();
    made_f32(&f, "llama.attn_logit_softcapping", 50);
    refuse_made(&f, ERR_UNSUPPORTED, "attn_logit_softcapping");
    f = llama();
    made_str(&f, "general.type", "mmproj");
    refuse_made(&f, ERR_UNSUPPORTED, "mmproj");
    f = llama();
    made_tensor(&f, "output.weight", QT_F16, DIMS(64, 41));
    refuse_made(&f, ERR_FORMAT, "output.weight");
    f = llama();
    made_tensor(&f, "blk.0.ffn_up.scale", QT_F32, DIMS(1));
    refuse_made(&f, ERR_UNSUPPORTED, "blk.0.ffn_up.scale");

    f = base("llama", 1); /* types that cannot be used, where they are needed */
    add_attn(&f, 0);
    refuse_made(&f, ERR_FORMAT, "blk.0.ffn_norm.weight");
    f = base("llama", 1);
    add_attn(&f, 0);
    layer_tensor(&f, 0, "ffn_norm.weight", QT_Q8_0, DIMS(64));
    refuse_made(&f, ERR_UNSUPPORTED, "blk.0.ffn_norm.weight");
    f = base("llama", 1);
    add_attn(&f, 0);
    layer_tensor(&f, 0, "ffn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 0, "ffn_gate.weight", QT_I8, DIMS(64, 96));
    refuse_made(&f, ERR_UNSUPPORTED, "I8");
    f = base("llama", 1);
    add_attn(&f, 0);
    layer_tensor(&f, 0, "ffn_norm.weight", QT_F32, DIMS(64));
    layer_tensor(&f, 0, "ffn_gate.weight", 99, DIMS(64, 96));
    refuse_made(&f, ERR_UNSUPPORTED, "unknown type 99");

    f = llama(); /* and where they are not */
    made_tensor(&f, "v.patch_embd.weight", 99, DIMS(64, 96));
    made_tensor(&f, "blk.0.attn_rot_embd.weight", QT_I8, DIMS(3));
    accept_made(&f);
    close_both();

    f = base("qwen2", 1);
    add_attn(&f, 0);
    add_ffn(&f, 0);
    refuse_made(&f, ERR_FORMAT, "blk.0.attn_q.bias");
    f = base("qwen3", 1);
    add_attn(&f, 0);
    add_ffn(&f, 0);
    refuse_made(&f, ERR_FORMAT, "blk.0.attn_q_norm.weight");
}

static void every_architecture_has_a_row(void **s) {
    (void)s;
    const struct arch *a;
    int n = 0;
    for (; (a = arch_at(n)); n++) {
        assert_ptr_equal(arch_find(a->name, strlen(a->name)), a);
        struct made_gguf f = base(a->name, 1);
        int rc = open_path(made_write(&f, path)); /* has no layers: refused either way, with the right reason */
        assert_int_equal(rc, ERR_FORMAT);
        made_free(&f);
    }
    assert_int_equal(n, 10);
    assert_null(arch_find("llam", 4));
    assert_null(arch_find("llama4", 6));
}

static void names_of_tensors(void **s) {
    (void)s;
    assert_string_equal(layer_tensor_name(LT_POST_FFN_NORM), "post_ffw_norm.weight");
    assert_true(layer_tensor_is_vector(LT_ATTN_NORM));
    assert_false(layer_tensor_is_vector(LT_MOE_DOWN));
}

static int make_path(void **s) {
    (void)s;
    snprintf(path, sizeof path, "/tmp/longhaul-model-XXXXXX");
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **s) {
    (void)s;
    return unlink(path);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(test_files_have_their_shapes),
        cmocka_unit_test(gemma3_alternates_windows),
        cmocka_unit_test(tensors_of_both_shards_are_found),
        cmocka_unit_test(unknown_architectures_are_refused_by_name),
        cmocka_unit_test(every_line_of_the_manifest_holds),
        cmocka_unit_test(a_plain_file_is_accepted),
        cmocka_unit_test(fused_tensors_become_slices),
        cmocka_unit_test(experts_may_be_fused_too),
        cmocka_unit_test(head_counts_may_differ_by_layer),
        cmocka_unit_test(rope_keys_are_read),
        cmocka_unit_test(gemma3_rules),
        cmocka_unit_test(bounds_and_types_are_checked),
        cmocka_unit_test(every_architecture_has_a_row),
        cmocka_unit_test(names_of_tensors),
    };
    return cmocka_run_group_tests(t, make_path, remove_path);
}
