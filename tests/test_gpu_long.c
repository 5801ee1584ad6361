/* test_gpu_long.c: sizes that small tests do not reach, on the GPU: attention over 262,144 positions of every KV type against
 * double, windows and masks at that depth, offsets past 2^31 and 2^32 in KV, weights and activations, more than 65,535 blocks in
 * y of a grid. Memory is sparse: only what a case touches exists. Each case runs in one order of lanes (what depends on the
 * order is in test_gpu_ops.c). Built with LH_GPU where there is a GPU back end. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "core/f16.h"
#include "core/kv.h"
#include "core/quant.h"
#include "core/strip.h"
#include "tests/gpu_dev.h"
#include "tests/ref.h"
#include "tests/ref_attn.h"

#include <math.h>

enum { K256 = 262144 };

/* A device with room for `bytes`; false where a real one has not. The emulated one is a large card of sparse memory. */
static bool open_large(struct dev *d, const struct ops_limits *l, size_t bytes, const char *what) {
#if defined(GPU_EMU)
    struct gpu_order o;
    struct emu_machine m;
    assert_int_equal(emu_machine_get(&m, "h200-141g"), 0);
    m.sm = 0; /* as built */
    gpu_order_at(&o, 0);
    gpu_order_set(&o);
    emu_reset(&m);
#else
    struct gpu *g;
    size_t free_bytes;
    ok(gpu_open(&g, 0));
    ok(gpu_mem_free(g, &free_bytes));
    gpu_close(g);
    if (free_bytes < bytes + gpu_ops_scratch_bytes(l) + ((size_t)64 << 20)) {
        printf("%s: left out, needs %zu MiB of device memory\n", what, bytes >> 20);
        return false;
    }
#endif
    (void)what;
    dev_open(d, l, bytes);
    return true;
}

static void close_large(struct dev *d) {
    dev_close(d);
#if defined(GPU_EMU)
    if (emu_leaks()) fail_msg("something was left open");
#endif
}

/* --- attention ------------------------------------------------------------------------------------------------------------- */

/* One layer on the host and the same on the device, which has the bytes of the host's pages from..to. */
struct layer {
    struct kv *host, kv;
    struct kv_layer l;
    int n_head;
};

static void layer_open(struct layer *x, struct dev *d, int type_k, int type_v, int n_kv, int group, int dim, int64_t n_ctx) {
    struct kv_shape shape = {n_kv, dim, dim, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = 16, .type_k = type_k, .type_v = type_v};
    ok(kv_open(&x->host, &spec));
    x->kv = *x->host;
    x->l = x->host->layers[0];
    x->kv.layers = &x->l;
    x->n_head = n_kv * group;
    ok(gpu_alloc((void **)&x->l.base, d->arena, x->l.bytes, "KV"));
}

static void send_pages(struct layer *x, struct dev *d, int64_t from, int64_t to) {
    size_t at = (size_t)(from / KV_PAGE) * x->l.page_bytes, end = (size_t)((to + KV_PAGE - 1) / KV_PAGE) * x->l.page_bytes;
    for (size_t part; at < end; at += part) {
        part = end - at < (size_t)8 << 20 ? end - at : (size_t)8 << 20;
        dev_write(d, x->l.base + at, x->host->layers[0].base + at, part);
    }
}

/* Attends n_tok tokens from pos0 on and holds the first and the last against the reference. Returns the first result. */
static float attend(struct layer *x, struct dev *d, int64_t pos0, int n_tok, int64_t window, const float *q, float scale) {
    size_t mark = gpu_arena_used(d->arena), row = (size_t)(x->n_head * x->l.head_dim_v);
    float *o = malloc(row * (size_t)n_tok * sizeof *o), first;
    double *want = malloc(row * sizeof *want), tol[256];
    struct attn_args a = {.o = dev_new(d, NULL, row * (size_t)n_tok * 4),
                          .q = dev_new(d, q, (size_t)(n_tok * x->n_head * x->l.head_dim_k) * 4), .kv = &x->kv, .pos0 = pos0,
                          .n_tok = n_tok, .n_head = x->n_head, .window = window, .scale = scale};
    ok(d->t->attn(d->t, &a));
    ok(gpu_ops_check(d->ops));
    dev_read(d, o, a.o, row * (size_t)n_tok * 4);
    a.kv = x->host, a.q = q;
    for (int t = 0; t < n_tok; t += n_tok > 1 ? n_tok - 1 : 1) {
        ref_attn_row(want, tol, &a, t);
        for (size_t i = 0; i < row; i++) {
            double got = o[(size_t)t * row + i];
            if (!(fabs(got - want[i]) <= tol[i / (size_t)x->l.head_dim_v]))
                fail_msg("K %s V %s, %d tokens at %lld, window %lld: token %d [%zu] is %.9g, want %.9g +- %.2g", quant_name(x->l.type_k),
                         quant_name(x->l.type_v), n_tok, (long long)pos0, (long long)window, t, i, got, want[i],
                         tol[i / (size_t)x->l.head_dim_v]);
        }
    }
    first = o[0];
    free(o), free(want);
    gpu_arena_release(d->arena, mark);
    return first;
}

static const int kv_pairs[][2] = {{QT_F32, QT_F32}, {QT_F16, QT_F16}, {QT_BF16, QT_BF16}, {QT_Q8_0, QT_Q8_0}, {QT_Q4_0, QT_Q4_0},
                                  {QT_Q8_0, QT_Q4_0}};
enum { N_PAIR = sizeof kv_pairs / sizeof *kv_pairs };

/* Every KV type: all positions count, at the end and where a run of pages begins or ends. */
static void every_position_of_256k_counts(void **state) {
    (void)state;
    enum { DIM = 32, GROUP = 2 };
    const struct ops_limits limits = {.n_tok = 16, .cols = 64, .rows = 64, .n_head = GROUP, .n_kv = 1, .head_dim = DIM, .n_ctx = K256};
    for (int i = 0; i < N_PAIR; i++) {
        struct dev d;
        struct layer x;
        uint64_t seed = 3;
        float q[12 * GROUP * DIM];
        for (int k = 0; k < 12 * GROUP * DIM; k++) q[k] = test_normal(&seed);
        if (!open_large(&d, &limits, (size_t)96 << 20, "262,144 positions")) return;
        layer_open(&x, &d, kv_pairs[i][0], kv_pairs[i][1], 1, GROUP, DIM, K256);
        ok(kv_fill_synthetic(x.host, K256, 5));
        send_pages(&x, &d, 0, K256);
        attend(&x, &d, K256 - 1, 1, 0, q, 0.17f);
        if (i == 1) { /* masks of several rows; windows with runs of pages and with single pages */
            attend(&x, &d, K256 - 12, 12, 0, q, 0.17f);
            attend(&x, &d, K256 - 12, 12, 1, q, 0.17f);
            attend(&x, &d, K256 - 12, 12, 4096, q, 0.17f);
            attend(&x, &d, K256 - 12, 12, 4097, q, 0.17f);
            attend(&x, &d, K256 - 12, 12, K256 - 5, q, 0.17f);
            attend(&x, &d, 256 * KV_PAGE - 6, 12, 200000, q, 0.17f);
            struct attn_args a = {.o = NULL, .q = NULL, .kv = &x.kv, .pos0 = K256, .n_tok = 1, .n_head = GROUP, .scale = 1};
            assert_int_equal(d.t->attn(d.t, &a), ERR_ARG);
            assert_int_equal(d.t->kv_put(d.t, &x.kv, 0, K256, 1, NULL, NULL), ERR_ARG);
        }
        kv_close(x.host);
        close_large(&d);
    }
}

/* A key at position 3 that only the query finds, asked for around 46,341 (whose square is 2^31) and 65,536. */
static void a_needle_is_found_at_any_depth(void **state) {
    (void)state;
    enum { DIM = 64, N = 70000 };
    const struct ops_limits limits = {.n_tok = 16, .cols = 64, .rows = 64, .n_head = 1, .n_kv = 1, .head_dim = DIM, .n_ctx = N};
    struct dev d;
    struct layer x;
    if (!open_large(&d, &limits, (size_t)64 << 20, "a needle")) return;
    layer_open(&x, &d, QT_F16, QT_F16, 1, 1, DIM, N);
    ok(kv_fill_synthetic(x.host, N, 5));
    float k[DIM], v[DIM], q[11 * DIM];
    for (int i = 0; i < DIM; i++) k[i] = i % 2 ? 4.0f : -4.0f, v[i] = 100;
    kv_put_ref(x.host, 0, 3, 0, k, v);
    send_pages(&x, &d, 0, N);
    for (int i = 0; i < 11 * DIM; i++) q[i] = k[i % DIM];
    const int64_t at[] = {255, 46339, 46340, 46341, 65534, 65535, 65536, 69980};
    for (int i = 0; i < 8; i++) {
        float o = attend(&x, &d, at[i], i % 2 ? 11 : 1, 0, q, 0.125f);
        if (!(o > 99.9f)) fail_msg("at %lld the needle gives %g", (long long)at[i], o);
    }
    kv_close(x.host);
    close_large(&d);
}

/* 300,000 positions of 32 heads of 256 dims: 2.46e9 elements of K, 2.8 to 19.7 GB in a layer, of which two pages are written
 * at each depth. What kv_put stores there is what the reference stores, and attention over it sees it. */
static void offsets_in_kv_are_64_bit(void **state) {
    (void)state;
    enum { N = 300000, HEADS = 32, DIM = 256, BACK = 40 };
    const struct ops_limits limits = {.n_tok = 16, .cols = 64, .rows = 64, .n_head = HEADS, .n_kv = HEADS, .head_dim = DIM, .n_ctx = N};
    static float k[4 * HEADS * DIM], v[4 * HEADS * DIM], q[HEADS * DIM];
    for (int i = 0; i < N_PAIR - 1; i++) {
        struct dev d;
        struct layer x;
        uint64_t seed = (uint64_t)i;
        if (!open_large(&d, &limits, (size_t)20 << 30, "300,000 positions of 32 heads")) return;
        layer_open(&x, &d, kv_pairs[i][0], kv_pairs[i][1], HEADS, 1, DIM, N);
        if (x.l.bytes <= UINT64_C(1) << 31) fail_msg("%s: a layer of only %zu bytes", quant_name(x.l.type_k), x.l.bytes);
        unsigned char *got = malloc(x.l.page_bytes);
        const int64_t at[] = {1000, K256 + 2, N - 4}; /* the second just behind the start of a page */
        for (int j = 0; j < 3; j++) {
            for (int64_t p = at[j] - BACK; p < at[j] + 4; p += 4) {
                for (int e = 0; e < 4 * HEADS * DIM; e++) k[e] = test_normal(&seed), v[e] = test_normal(&seed);
                for (int e = 0; e < 4 * HEADS; e++)
                    kv_put_ref(x.host, 0, p + e / HEADS, e % HEADS, k + e * DIM, v + e * DIM);
                size_t mark = gpu_arena_used(d.arena);
                float *dk = dev_new(&d, k, sizeof k), *dv = dev_new(&d, v, sizeof v);
                ok(d.t->kv_put(d.t, &x.kv, 0, p, 4, dk, dv));
                ok(gpu_ops_check(d.ops));
                gpu_arena_release(d.arena, mark);
            }
            for (int e = 0; e < HEADS * DIM; e++) q[e] = test_normal(&seed);
            attend(&x, &d, at[j] + 3, 1, BACK + 4, q, 0.06f);
            size_t page = (size_t)((at[j] + 3) / KV_PAGE) * x.l.page_bytes;
            dev_read(&d, got, x.l.base + page, x.l.page_bytes);
            assert_memory_equal(got, x.host->layers[0].base + page, x.l.page_bytes); /* emulated: what nobody wrote is 0 on both */
        }
        free(got);
        kv_close(x.host);
        close_large(&d);
    }
}

/* --- weights and activations ------------------------------------------------------------------------------------------------- */

/* The last row of an embedding and the last matrix of a stack of experts, both behind 2^32 bytes. */
static void offsets_in_weights_are_64_bit(void **state) {
    (void)state;
    enum { VOCAB = 300000, DIM = 4096, FF = 1024, EXPERTS = 300, E_DIM = 4096 };
    const struct ops_limits limits = {.n_tok = 2, .cols = DIM, .rows = VOCAB, .n_head = 1, .n_kv = 1, .head_dim = 64, .n_ctx = 256,
                                      .n_expert = EXPERTS, .n_expert_used = 1};
    struct dev d;
    struct strip_layout l, up, down;
    uint64_t seed = 5;
    if (!open_large(&d, &limits, (size_t)20 << 30, "weights of 15 GiB")) return;
    assert_true(strip_layout(&l, QT_F32, VOCAB, DIM) && strip_layout(&up, QT_F32, FF, E_DIM) && strip_layout(&down, QT_F32, E_DIM, FF));
    struct mat embd = {NULL, QT_F32, VOCAB, DIM};
    ok(gpu_alloc((void **)&embd.data, d.arena, l.bytes, "embedding"));
    float *strip = malloc(l.strip_bytes), *x = malloc(DIM * 4), *dx = dev_new(&d, NULL, DIM * 4);
    for (size_t i = 0; i < l.strip_bytes / 4; i++) strip[i] = test_normal(&seed);
    const int32_t id = VOCAB - 3;
    size_t at = (size_t)(id / STRIP_ROWS) * l.strip_bytes;
    assert_true(at > UINT64_C(1) << 32);
    dev_write(&d, (char *)(uintptr_t)embd.data + at, strip, l.strip_bytes);
    ok(d.t->embed(d.t, dx, &embd, &id, 1, 1));
    dev_read(&d, x, dx, DIM * 4);
    for (int i = 0; i < DIM; i++) assert_true(f32_bits(x[i]) == f32_bits(strip[i * STRIP_ROWS + id % STRIP_ROWS]));
    free(strip);

    struct mat w[3] = {{NULL, QT_F32, FF, E_DIM}, {NULL, QT_F32, FF, E_DIM}, {NULL, QT_F32, E_DIM, FF}};
    for (int i = 0; i < 3; i++) {
        size_t bytes = i < 2 ? up.bytes : down.bytes;
        assert_true(bytes * (EXPERTS - 1) > UINT64_C(1) << 32);
        ok(gpu_alloc((void **)&w[i].data, d.arena, bytes * EXPERTS, "experts"));
        float *one = malloc(bytes);
        for (size_t e = 0; e < bytes / 4; e++) one[e] = 0.02f * test_normal(&seed);
        dev_write(&d, (char *)(uintptr_t)w[i].data + (EXPERTS - 1) * bytes, one, bytes);
        free(one);
    }
    const int32_t last = EXPERTS - 1;
    const float weight = 1;
    float *got = malloc(E_DIM * 4), *want = malloc(E_DIM * 4), *dg = dev_new(&d, NULL, FF * 4), *du = dev_new(&d, NULL, FF * 4);
    float *dy = dev_new(&d, NULL, E_DIM * 4);
    struct experts_args a = {.y = dy, .x = dx, .ids = dev_new(&d, &last, 4), .weight = dev_new(&d, &weight, 4), .n_tok = 1, .n_used = 1,
                             .n_expert = EXPERTS, .gate = w[0], .up = w[1], .down = w[2], .act = ACT_SILU};
    ok(d.t->experts(d.t, &a));
    ok(gpu_ops_check(d.ops));
    dev_read(&d, got, dy, E_DIM * 4);
    for (int i = 0; i < 3; i++) w[i].data = (const char *)w[i].data + (EXPERTS - 1) * (i < 2 ? up.bytes : down.bytes);
    struct matmul in = {.x = dx, .cols = E_DIM, .n_tok = 1, .n = 2, .out = {{&w[0], dg, NULL}, {&w[1], du, NULL}}};
    struct matmul out = {.x = dg, .cols = FF, .n_tok = 1, .n = 1, .out = {{&w[2], dy, NULL}}};
    ok(d.t->matmul(d.t, &in));
    ok(d.t->glu(d.t, dg, dg, du, FF, ACT_SILU));
    ok(d.t->matmul(d.t, &out));
    dev_read(&d, want, dy, E_DIM * 4);
    double size = 0;
    for (int i = 0; i < E_DIM; i++) size += fabs((double)want[i]);
    assert_true(size > 1); /* not the zeros of another expert */
    assert_memory_equal(got, want, E_DIM * 4);
    free(x), free(got), free(want);
    close_large(&d);
}

/* More rows than a grid has in y (65,535): tokens, choices of experts, rows of activations past 2^31 elements. */
static void many_tokens(void **state) {
    (void)state;
    enum { TOK = 66000, DIM = 32, EXPERTS = 4 };
    const struct ops_limits limits = {.n_tok = TOK, .cols = DIM, .rows = 64, .n_head = 1, .n_kv = 1, .head_dim = 64, .n_ctx = 256,
                                      .n_expert = EXPERTS, .n_expert_used = 1};
    struct dev d;
    struct strip_layout l;
    uint64_t seed = 9;
    if (!open_large(&d, &limits, (size_t)10 << 30, "66,000 tokens")) return;
    assert_true(strip_layout(&l, QT_F32, DIM, DIM));
    float *w = malloc(EXPERTS * l.bytes), *x = malloc(TOK * DIM * 4), *y = malloc(TOK * DIM * 4), *weight = malloc(TOK * 4);
    int32_t *ids = malloc(TOK * sizeof *ids);
    for (size_t i = 0; i < EXPERTS * l.bytes / 4; i++) w[i] = test_normal(&seed);
    for (int i = 0; i < TOK * DIM; i++) x[i] = test_normal(&seed);
    for (int t = 0; t < TOK; t++) ids[t] = (int32_t)(test_rand(&seed) % EXPERTS), weight[t] = test_uniform(&seed, 0, 1);
    const unsigned char *dw = dev_new(&d, w, EXPERTS * l.bytes);
    struct mat m = {dw, QT_F32, DIM, DIM};
    float *dx = dev_new(&d, x, TOK * DIM * 4), *dy = dev_new(&d, NULL, TOK * DIM * 4);
    struct experts_args a = {.y = dy, .x = dx, .ids = dev_new(&d, ids, TOK * 4), .weight = dev_new(&d, weight, TOK * 4), .n_tok = TOK,
                             .n_used = 1, .n_expert = EXPERTS, .gate = m, .up = m, .down = m, .act = ACT_SILU};
    ok(d.t->experts(d.t, &a));
    ok(gpu_ops_check(d.ops));
    dev_read(&d, y, dy, TOK * DIM * 4);
    static const int tokens[] = {0, 1, 65534, 65535, 65536, TOK - 1};
    for (int i = 0; i < 6; i++) {
        int t = tokens[i];
        const float *e = w + (size_t)ids[t] * l.bytes / 4, *in = x + t * DIM;
        double h[DIM];
        for (int r = 0; r < DIM; r++) {
            double s = 0;
            for (int c = 0; c < DIM; c++) s += (double)e[(size_t)(r / STRIP_ROWS) * l.strip_bytes / 4 + (size_t)(c * STRIP_ROWS + r % STRIP_ROWS)] * in[c];
            h[r] = s / (1 + exp(-s)) * s;
        }
        for (int r = 0; r < DIM; r++) {
            double s = 0, size = 0;
            for (int c = 0; c < DIM; c++) {
                double p = (double)e[(size_t)(r / STRIP_ROWS) * l.strip_bytes / 4 + (size_t)(c * STRIP_ROWS + r % STRIP_ROWS)] * h[c];
                s += p, size += fabs(p);
            }
            /* sums of 32 products in f32, twice, squared in between: some 1e-5 of what is added up */
            if (!(fabs(y[t * DIM + r] - weight[t] * s) <= 1e-5 * weight[t] * size))
                fail_msg("experts: token %d [%d] is %.9g, want %.9g", t, r, (double)y[t * DIM + r], weight[t] * s);
        }
    }
    /* Rows of 33,000 floats: row 65,999 begins behind 2^31 elements. */
    enum { WIDE = 33000 };
    float *wide, *row = malloc(WIDE * 4), *back = malloc(WIDE * 4), *d_row = dev_new(&d, NULL, WIDE * 4);
    const int32_t last = TOK - 1;
    ok(gpu_alloc((void **)&wide, d.arena, (size_t)TOK * WIDE * 4, "wide rows"));
    for (int i = 0; i < WIDE; i++) row[i] = test_normal(&seed);
    dev_write(&d, wide + (size_t)last * WIDE, row, WIDE * 4);
    ok(d.t->gather(d.t, d_row, wide, &last, 1, WIDE));
    dev_read(&d, back, d_row, WIDE * 4);
    assert_memory_equal(back, row, WIDE * 4);
    free(row), free(back), free(w), free(x), free(y), free(weight), free(ids);
    close_large(&d);
}

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_position_of_256k_counts), cmocka_unit_test(a_needle_is_found_at_any_depth),
        cmocka_unit_test(offsets_in_kv_are_64_bit),      cmocka_unit_test(offsets_in_weights_are_64_bit),
        cmocka_unit_test(many_tokens),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
