/* test_gpu_logits.c: whole tiny models through the GPU's table, all layers resident, against the CPU's table: the same
 * logits within 1e-4 (f32 weights and KV; what remains is the order of f32 sums). 20 tokens: 12 in one call, 8 one by one.
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
#include "cpu/cpu.h"
#include "cpu/pool.h"
#include "gpu/gpu.h"
#include "offload/engine.h"
#include "offload/home.h"
#include "offload/session.h"

#if defined(GPU_EMU)
#include <emu.h>
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_TOK = 20, FIRST = 12 };

static void ok(int rc) {
    if (rc) fail_msg("%d: %s", rc, err_text());
}

/* A model file on the host. */
struct loaded {
    struct gguf *g;
    struct model m;
    struct home *h;
    struct plan plan;
    struct kv *kv;
    float *freqs;
};

static void load(struct loaded *l, const char *path) {
    struct pool *pool;
    struct kv_spec spec;
    struct kv_shape *shapes;
    memset(l, 0, sizeof *l);
    l->plan = (struct plan){.n_ctx = N_TOK, .type_k = QT_F32, .type_v = QT_F32, .chunk_tokens = N_TOK, .n_thread = 2, .logits_rows = N_TOK};
    ok(isa_choose(&l->plan.isa, NULL));
    ok(gguf_open(&l->g, path));
    ok(model_open(&l->m, l->g));
    ok(home_open(&l->h, &l->m));
    ok(pool_open(&pool, 2, NULL, 0));
    ok(home_load(l->h, l->g, pool, NULL, NULL, NULL));
    pool_close(pool);
    if (l->m.rope_freqs.bytes) {
        l->freqs = malloc((size_t)l->m.rope_freqs.cols * sizeof *l->freqs);
        ok(home_read_vector(l->g, &l->m.rope_freqs, l->freqs));
    }
    ok(session_kv_spec(&spec, &shapes, &l->m, &l->plan));
    ok(kv_open(&l->kv, &spec));
    free(shapes);
}

static void unload(struct loaded *l) {
    kv_close(l->kv);
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
    void *scratch;
    float *x, *logits; /* [N_TOK, dim], [N_TOK, n_vocab] */
};

/* One pass of n tokens from position pos0 on; their logits go to row pos0 on. */
static void pass(struct decoder *d, const struct side *s, const struct model *m, const int32_t *ids, int pos0, int n) {
    ok(decoder_begin(d, pos0, n));
    ok(decoder_embed(d, s->x, ids + pos0, n));
    for (int il = 0; il < m->n_layer; il++) {
        ok(decoder_mixer(d, il, s->x, 0, n));
        ok(decoder_ffn(d, il, s->x, 0, n));
    }
    ok(decoder_head(d, s->logits + (size_t)pos0 * (size_t)m->n_vocab, s->x, n));
}

static void forward(const struct side *s, const struct loaded *l, const int32_t *ids) {
    struct decoder *d;
    ok(decoder_open(&d, &l->m, s->ops, s->w, s->kv, NULL, N_TOK, N_TOK, N_TOK, l->freqs, s->scratch));
    pass(d, s, &l->m, ids, 0, FIRST);
    for (int p = FIRST; p < N_TOK; p++) pass(d, s, &l->m, ids, p, 1);
    decoder_close(d);
}

static float *cpu_logits(const struct loaded *l, const int32_t *ids) {
    struct cpu *cpu;
    struct cpu_opts o = session_cpu_opts(&l->m, &l->plan);
    ok(cpu_open(&cpu, &o));
    struct side s = {.ops = cpu_ops(cpu), .w = home_weights(l->h), .kv = l->kv};
    s.scratch = aligned_alloc(64, (decoder_scratch_bytes(&l->m, N_TOK, N_TOK) + 127) / 64 * 64);
    s.x = malloc(N_TOK * (size_t)l->m.dim * sizeof *s.x);
    s.logits = malloc(N_TOK * (size_t)l->m.n_vocab * sizeof *s.logits);
    forward(&s, l, ids);
    cpu_close(cpu);
    free(s.scratch), free(s.x);
    return s.logits;
}

/* --- the same on the device ---------------------------------------------------------------------------------------------- */

/* Lowest address of the weights: they lie in one arena of home_bytes, which is copied as it is. */
static const char *lowest(const struct weights *w, int n_layer) {
    const char *low = w->embd;
    const void *const fixed[] = {w->out, w->out_norm, w->out_bias};
    for (int i = 0; i < 3; i++)
        if (fixed[i] && (const char *)fixed[i] < low) low = fixed[i];
    for (int il = 0; il < n_layer; il++)
        for (int t = 0; t < LT_COUNT; t++)
            if (w->layers[il].at[t] && (const char *)w->layers[il].at[t] < low) low = w->layers[il].at[t];
    return low;
}

static const void *moved(const void *p, const char *from, char *to) { return p ? to + ((const char *)p - from) : NULL; }

static struct weights device_weights(const struct weights *w, int n_layer, const char *from, char *to) {
    struct weights d = {moved(w->embd, from, to), moved(w->out, from, to), moved(w->out_norm, from, to), moved(w->out_bias, from, to),
                        calloc((size_t)n_layer, sizeof *d.layers)};
    for (int il = 0; il < n_layer; il++)
        for (int t = 0; t < LT_COUNT; t++) d.layers[il].at[t] = moved(w->layers[il].at[t], from, to);
    return d;
}

static float *gpu_logits(const struct loaded *l, const int32_t *ids) {
    struct gpu *g;
    struct gpu_arena *a;
    struct gpu_stream *st;
    struct gpu_ops *ops;
    struct ops_limits limits;
    decoder_limits(&limits, &l->m, N_TOK, N_TOK);
    size_t scratch = decoder_scratch_bytes(&l->m, N_TOK, N_TOK), weights = home_bytes(&l->m);
    size_t x_bytes = N_TOK * (size_t)l->m.dim * sizeof(float), out_bytes = N_TOK * (size_t)l->m.n_vocab * sizeof(float);
    size_t all = gpu_ops_scratch_bytes(&limits) + scratch + weights + l->kv->bytes + x_bytes + out_bytes;
    ok(gpu_open(&g, 0));
    ok(gpu_arena_open(&a, g, all + (64 + (size_t)l->m.n_layer) * GPU_ALIGN));
    ok(gpu_stream_open(&st, g));
    ok(gpu_ops_open(&ops, g, a, st, &limits));

    void *d_weights, *pinned, *out;
    const char *from = lowest(home_weights(l->h), l->m.n_layer);
    ok(gpu_alloc(&d_weights, a, weights, "weights"));
    ok(gpu_host_alloc(&pinned, g, weights));
    memcpy(pinned, from, weights);
    ok(gpu_copy_in(st, d_weights, pinned, weights));
    struct weights dw = device_weights(home_weights(l->h), l->m.n_layer, from, d_weights);
    struct kv kv = *l->kv;
    kv.layers = malloc((size_t)kv.n_layer * sizeof *kv.layers);
    memcpy(kv.layers, l->kv->layers, (size_t)kv.n_layer * sizeof *kv.layers);
    for (int il = 0; il < kv.n_layer; il++) ok(gpu_alloc((void **)&kv.layers[il].base, a, kv.layers[il].bytes, "KV"));

    struct side s = {.ops = gpu_ops_table(ops), .w = &dw, .kv = &kv};
    ok(gpu_alloc(&s.scratch, a, scratch, "scratch"));
    ok(gpu_alloc((void **)&s.x, a, x_bytes, "x"));
    ok(gpu_alloc((void **)&s.logits, a, out_bytes, "logits"));
    forward(&s, l, ids);
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

static void compare(const char *file) {
    static const int32_t ids[N_TOK] = {1, 17, 300, 5, 511, 42, 42, 99, 250, 7, 3, 410, 128, 64, 32, 16, 8, 4, 2, 500};
    char name[256], path[4096];
    struct loaded l;
    snprintf(name, sizeof name, "tiny-models/tiny-random-%s-f32.gguf", file);
    snprintf(path, sizeof path, "%s", test_path(name));
    load(&l, path);
    float *want = cpu_logits(&l, ids);
#if defined(GPU_EMU)
    static const enum emu_policy policies[] = {EMU_EAGER, EMU_LAZY, EMU_RANDOM};
    for (int i = 0; i < 3; i++) {
        emu_reset(NULL);
        emu_set_policy(policies[i], 3);
        emu_set_order(i);
#else
    for (int i = 0; i < 1; i++) {
#endif
        float *got = gpu_logits(&l, ids);
        for (int k = 0; k < N_TOK * l.m.n_vocab; k++)
            if (!(fabs((double)got[k] - (double)want[k]) <= 1e-4))
                fail_msg("%s, order %d: token %d logit %d is %.7g on the GPU, %.7g on the CPU", file, i, k / l.m.n_vocab,
                         k % l.m.n_vocab, (double)got[k], (double)want[k]);
        free(got);
    }
    free(want);
    unload(&l);
}

static void llama(void **state) { (void)state, compare("llama"); }
static void llama31(void **state) { (void)state, compare("llama31rope"); }
static void qwen2(void **state) { (void)state, compare("qwen2"); }
static void qwen3(void **state) { (void)state, compare("qwen3"); }
static void qwen3moe(void **state) { (void)state, compare("qwen3moe"); }
static void gemma3(void **state) { (void)state, compare("gemma3"); }

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(llama), cmocka_unit_test(llama31),  cmocka_unit_test(qwen2),
        cmocka_unit_test(qwen3), cmocka_unit_test(qwen3moe), cmocka_unit_test(gemma3),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
