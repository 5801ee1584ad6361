/* test_gpu_ops.c: the GPU's operations against textbook versions in double and the arithmetic contract of core/ops.h: the
 * rows of cases of test_elem.c, test_matmul.c and test_attn.c, with their tolerances. Built with LH_GPU where there is a GPU
 * back end: the emulated one (GPU_EMU), where every test runs in several orders of lanes and streams with equal results, or a
 * real one. */
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
#include <stdlib.h>
#include <string.h>

static const int types[] = {
#define X(name, id, elems, bytes, enc) id,
    QUANT_LIST(X)
#undef X
};
enum { N_TYPE = sizeof types / sizeof *types, ARENA = 96 << 20 };

static float *normals(size_t n, uint64_t *seed, float scale) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_normal(seed);
    return x;
}

static void near(const char *what, int64_t i, double got, double want, double tol) {
    if (!(fabs(got - want) <= tol * (1 + fabs(want))))
        fail_msg("%s[%lld]: got %.9g, want %.9g, tolerance %g", what, (long long)i, got, want, tol);
}

/* --- element-wise -------------------------------------------------------------------------------------------------------- */

static const struct ops_limits small = {.n_tok = 40, .cols = 4096, .rows = 600, .n_head = 40, .n_kv = 8, .head_dim = 256,
                                        .n_ctx = 2048, .n_expert = 8, .n_expert_used = 4};

static void norms(void) {
    static const int dims[] = {1, 8, 15, 16, 17, 33, 64, 576, 1000, 5120};
    struct dev d;
    dev_open(&d, &small, ARENA);
    uint64_t rng = 1;
    for (size_t k = 0; k < sizeof dims / sizeof *dims; k++)
        for (int rows = 1; rows <= 14; rows += 13, dev_next_case(&d)) {
            int n = dims[k];
            size_t bytes = sizeof(float) * (size_t)(n * rows);
            float *x = normals((size_t)(n * rows), &rng, 100), *w = normals((size_t)n, &rng, 1), *y = malloc(bytes), *same = malloc(bytes);
            float *dx = dev_new(&d, x, bytes), *dw = dev_new(&d, w, sizeof *w * (size_t)n), *dy = dev_new(&d, NULL, bytes);
            ok(d.t->rmsnorm(d.t, dy, dx, dw, rows, n, 1e-5f));
            dev_read(&d, y, dy, bytes);
            for (int r = 0; r < rows; r++) {
                double s = 0;
                for (int i = 0; i < n; i++) s += (double)x[r * n + i] * x[r * n + i];
                for (int i = 0; i < n; i++) near("rmsnorm", r * n + i, y[r * n + i], w[i] * x[r * n + i] / sqrt(s / n + 1e-5), 2e-6);
            }
            ok(d.t->rmsnorm(d.t, dx, dx, dw, rows, n, 1e-5f));
            dev_read(&d, same, dx, bytes);
            assert_memory_equal(same, y, bytes);
            add_digest(y, bytes);
            free(x), free(w), free(y), free(same);
        }
    dev_close(&d);
}

static void activations(void) {
    static const int64_t sizes[] = {1, 15, 16, 17, 255, 256, 257, 5000};
    struct dev d;
    dev_open(&d, &small, ARENA);
    uint64_t rng = 2;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++, dev_next_case(&d)) {
        int64_t n = sizes[k];
        size_t bytes = sizeof(float) * (size_t)n;
        float *g = normals((size_t)n, &rng, 3), *u = normals((size_t)n, &rng, 1), *y = malloc(bytes);
        for (int64_t i = 0; i < n; i += 7) g[i] *= 20;
        float *dg = dev_new(&d, g, bytes), *du = dev_new(&d, u, bytes), *dy = dev_new(&d, NULL, bytes);
        ok(d.t->glu(d.t, dy, dg, du, n, ACT_SILU));
        dev_read(&d, y, dy, bytes);
        for (int64_t i = 0; i < n; i++) near("silu", i, y[i], u[i] * g[i] / (1 + exp(-(double)g[i])), 2e-6);
        add_digest(y, bytes);
        ok(d.t->glu(d.t, dy, dg, du, n, ACT_GELU));
        dev_read(&d, y, dy, bytes);
        for (int64_t i = 0; i < n; i++)
            near("gelu", i, y[i], u[i] * 0.5 * g[i] * (1 + tanh(0.7978845608 * (g[i] + 0.044715 * pow(g[i], 3)))), 1e-5);
        add_digest(y, bytes);
        ok(d.t->glu(d.t, dy, dg, du, n, ACT_SIGMOID));
        dev_read(&d, y, dy, bytes);
        for (int64_t i = 0; i < n; i++) near("sigmoid", i, y[i], u[i] / (1 + exp(-(double)g[i])), 2e-6);
        ok(gpu_copy_on(d.stream, dy, dg, bytes));
        ok(d.t->add_gated(d.t, dy, du, du, 1, n));
        dev_read(&d, y, dy, bytes);
        for (int64_t i = 0; i < n; i++) near("add_gated", i, y[i], g[i] + u[i] / (1 + exp(-(double)u[0])), 2e-6);
        ok(gpu_copy_on(d.stream, dy, dg, bytes));
        ok(d.t->softcap(d.t, dy, n, 30));
        dev_read(&d, y, dy, bytes);
        for (int64_t i = 0; i < n; i++) near("softcap", i, y[i], 30 * tanh(g[i] / 30.0), 1e-6);
        ok(d.t->add(d.t, dg, du, n));
        dev_read(&d, y, dg, bytes);
        for (int64_t i = 0; i < n; i++) near("add", i, y[i], (double)g[i] + u[i], 1e-7);
        free(g), free(u), free(y);
    }
    dev_close(&d);
}

static void rotations(void) {
    enum { HEADS = 3, DIM = 40, TOK = 9 };
    static const int64_t starts[] = {0, 1, 65535, 262143 - TOK, INT64_C(1) << 31};
    struct dev d;
    dev_open(&d, &small, ARENA);
    double freq[DIM / 2];
    uint64_t rng = 3;
    static float x[TOK * HEADS * DIM], y[TOK * HEADS * DIM], norm[DIM];
    for (int i = 0; i < DIM; i++) norm[i] = test_normal(&rng);
    for (size_t s = 0; s < sizeof starts / sizeof *starts; s++)
        for (int n_rot = 2; n_rot <= DIM; n_rot += 38)
            for (int kind = 0; kind < 4; kind++, dev_next_case(&d)) {
                bool with_norm = kind & 1;
                enum rope_pairing pairing = (enum rope_pairing)(kind >> 1);
                for (int i = 0; i < n_rot / 2; i++) freq[i] = pow(1e6, -2.0 * i / n_rot);
                for (int i = 0; i < TOK * HEADS * DIM; i++) x[i] = test_normal(&rng);
                float *dx = dev_new(&d, x, sizeof x), *dn = dev_new(&d, norm, sizeof norm), *cs = dev_new(&d, NULL, sizeof(float) * TOK * DIM);
                ok(d.t->rope_table(d.t, cs, freq, n_rot / 2, 1.25f, starts[s], TOK));
                struct rope_args a = {dx, TOK, HEADS, DIM, with_norm ? dn : NULL, 1e-6f, cs, n_rot, pairing};
                ok(d.t->rope(d.t, &a));
                dev_read(&d, y, dx, sizeof y);
                add_digest(y, sizeof y);
                for (int th = 0; th < TOK * HEADS; th++) {
                    double h[DIM], sum = 0;
                    for (int i = 0; i < DIM; i++) sum += (double)x[th * DIM + i] * x[th * DIM + i];
                    for (int i = 0; i < DIM; i++) h[i] = with_norm ? norm[i] * x[th * DIM + i] / sqrt(sum / DIM + 1e-6) : x[th * DIM + i];
                    for (int i = 0; i < n_rot / 2; i++) {
                        int u = pairing == ROPE_NEOX ? i : 2 * i, v = pairing == ROPE_NEOX ? i + n_rot / 2 : 2 * i + 1;
                        double ang = (double)(starts[s] + th / HEADS) * freq[i], p = h[u], q = h[v];
                        h[u] = 1.25 * (p * cos(ang) - q * sin(ang));
                        h[v] = 1.25 * (p * sin(ang) + q * cos(ang));
                    }
                    for (int i = 0; i < DIM; i++) near("rope", th * DIM + i, y[th * DIM + i], h[i], 2e-6);
                }
            }
    dev_close(&d);
}

static void routing(void) {
    enum { TOK = 30, E = 70, K = 8 };
    static float logits[TOK * E], w[TOK * K];
    static int32_t ids[TOK * K];
    struct dev d;
    dev_open(&d, &small, ARENA);
    uint64_t rng = 4;
    for (int i = 0; i < TOK * E; i++) logits[i] = (float)(int)(test_normal(&rng) * 8) / 4; /* many ties */
    float *dl = dev_new(&d, logits, sizeof logits), *dw = dev_new(&d, NULL, sizeof w);
    int32_t *di = dev_new(&d, NULL, sizeof ids);
    for (int norm = 0; norm < 2; norm++) {
        ok(d.t->route(d.t, di, dw, dl, TOK, E, K, norm));
        dev_read(&d, ids, di, sizeof ids);
        dev_read(&d, w, dw, sizeof w);
        add_digest(w, sizeof w);
        for (int t = 0; t < TOK; t++) {
            bool used[E] = {false};
            double all = 0, chosen = 0;
            int want[K];
            for (int e = 0; e < E; e++) all += exp(logits[t * E + e]);
            for (int k = 0; k < K; k++) {
                int best = -1;
                for (int e = 0; e < E; e++)
                    if (!used[e] && (best < 0 || logits[t * E + e] > logits[t * E + best])) best = e;
                used[best] = true;
                want[k] = best;
                chosen += exp(logits[t * E + best]);
            }
            for (int k = 0; k < K; k++) {
                assert_int_equal(ids[t * K + k], want[k]);
                near("route", t * K + k, w[t * K + k], exp(logits[t * E + want[k]]) / (norm ? chosen : all), 1e-6);
            }
        }
    }
    assert_int_equal(d.t->route(d.t, di, dw, dl, 1, E, E + 1, true), ERR_ARG);
    /* NaN logits: ids stay those of experts, no two alike. */
    for (int i = 0; i < TOK * E; i++) logits[i] = i % 3 ? NAN : logits[i];
    dl = dev_new(&d, logits, sizeof logits);
    ok(d.t->route(d.t, di, dw, dl, TOK, E, K, true));
    dev_read(&d, ids, di, sizeof ids);
    for (int i = 0; i < TOK * K; i++) {
        assert_in_range(ids[i], 0, E - 1);
        for (int j = i / K * K; j < i; j++) assert_int_not_equal(ids[i], ids[j]);
    }
    int32_t rows[3] = {5, 0, 29};
    float *dg = dev_new(&d, NULL, 3 * 7 * sizeof(float)), got[21], *many = dev_new(&d, NULL, 1100 * sizeof(float));
    ok(d.t->gather(d.t, dg, dl, rows, 3, 7));
    dev_read(&d, got, dg, sizeof got);
    for (int i = 0; i < 3; i++) assert_memory_equal(got + 7 * i, logits + rows[i] * 7, 28);
    int32_t list[1100]; /* more than one launch holds */
    for (int i = 0; i < 1100; i++) list[i] = i * 3 % TOK;
    ok(d.t->gather(d.t, many, dl, list, 1100, 1));
    memset(list, 0, sizeof list); /* the call has its own copy */
    float all[1100];
    dev_read(&d, all, many, sizeof all);
    for (int i = 0; i < 1100; i++) assert_memory_equal(&all[i], &logits[i * 3 % TOK], 4);
    dev_close(&d);
}

/* --- weights ------------------------------------------------------------------------------------------------------------- */

static void embeddings(void) {
    enum { ROWS = 50, COLS = 512 };
    static const int32_t ids[] = {0, 49, 17, 17, 31};
    struct dev d;
    dev_open(&d, &small, ARENA);
    for (int t = 0; t < N_TYPE; t++, dev_next_case(&d)) {
        uint8_t *file = ref_random_rows(types[t], ROWS, COLS, 9);
        void *strips = ref_strips(types[t], file, ROWS, COLS);
        struct strip_layout l;
        size_t row;
        assert_true(strip_layout(&l, types[t], ROWS, COLS) && quant_row_bytes(&row, types[t], COLS));
        struct mat w = {dev_new(&d, strips, l.bytes), types[t], ROWS, COLS};
        float x[5 * COLS], want[COLS], *dx = dev_new(&d, NULL, sizeof x);
        for (int k = 0; k < 2; k++) {
            float scale = k ? 22.5f : 1;
            ok(d.t->embed(d.t, dx, &w, ids, 5, scale));
            dev_read(&d, x, dx, sizeof x);
            add_digest(x, sizeof x);
            for (int i = 0; i < 5; i++) {
                quant_decode_row(types[t], file + (size_t)ids[i] * row, want, COLS);
                for (int j = 0; j < COLS; j++)
                    if (f32_bits(x[i * COLS + j]) != f32_bits(want[j] * scale))
                        fail_msg("embed %s: id %d element %d is %.9g, want %.9g", quant_name(types[t]), ids[i], j, x[i * COLS + j],
                                 want[j] * scale);
            }
        }
        const int32_t too_large = ROWS, negative = -1;
        assert_int_equal(d.t->embed(d.t, dx, &w, &too_large, 1, 1), ERR_ARG);
        assert_int_equal(d.t->embed(d.t, dx, &w, &negative, 1, 1), ERR_ARG);
        free(file), free(strips);
    }
    dev_close(&d);
}

enum { MAX_TOK = 17 };

/* Tokens of every kind: ordinary, zero, very large, one spike per 32, tiny. */
static float *random_tokens(int n_tok, int64_t cols, uint64_t seed) {
    float *x = malloc((size_t)(n_tok * cols) * sizeof *x);
    for (int t = 0; t < n_tok; t++)
        for (int64_t i = 0; i < cols; i++) {
            float v = test_normal(&seed);
            switch (t % 8) {
            case 3: v = 0; break;
            case 4: v *= 1e4f; break;
            case 5: v = i % 32 == 7 ? 1e4f : v * 1e-3f; break;
            case 6: v = i / 32 % 2 ? v : 0; break;
            case 7: v *= 1e-30f; break;
            default: break;
            }
            x[t * cols + i] = v;
        }
    return x;
}

static void product_case(struct dev *d, int type, int64_t rows, int64_t cols) {
    static const int counts[] = {MAX_TOK, 1, 2, 7, 8, 9};
    uint64_t seed = (uint64_t)(type * 7919 + rows * 31 + cols);
    void *file = ref_random_rows(type, rows, cols, seed), *strips = ref_strips(type, file, rows, cols);
    float *x = random_tokens(MAX_TOK, cols, seed + 1), *bias = normals((size_t)rows, &seed, 1);
    size_t out = (size_t)(MAX_TOK * rows);
    double *want = malloc(out * sizeof *want), *size = malloc(out * sizeof *size), tol = ref_matmul_tolerance(type, cols);
    float *all = malloc(out * sizeof *all), *y = malloc(out * sizeof *y);
    ref_matmul_contract(want, size, type, file, rows, cols, x, MAX_TOK, bias);
    struct strip_layout l;
    assert_true(strip_layout(&l, type, rows, cols));
    struct mat w = {dev_new(d, strips, l.bytes), type, rows, cols};
    float *dx = dev_new(d, x, (size_t)(MAX_TOK * cols) * 4), *db = dev_new(d, bias, (size_t)rows * 4), *dy = dev_new(d, NULL, (out + 64) * 4);
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        int n = counts[k], t0 = k ? (int)k : 0;
        struct matmul m = {.x = dx + t0 * cols, .cols = cols, .n_tok = n, .n = 1, .out = {{&w, dy, db}}};
        ok(gpu_fill(d->stream, dy, 0xff, (out + 64) * 4));
        ok(d->t->matmul(d->t, &m));
        float past[64];
        dev_read(d, y, dy, (size_t)(n * rows) * 4);
        dev_read(d, past, dy + n * rows, sizeof past);
        for (int i = 0; i < 64; i++) assert_true(isnan(past[i]));
        if (k == 0) memcpy(all, y, out * 4);
        for (int64_t i = 0; i < n * rows && k == 0; i++)
            if (!(fabs((double)y[i] - want[i]) <= tol * size[i] + 1e-44))
                fail_msg("%s [%lld, %lld] n %d: token %lld row %lld is %.9g, expected %.9g, tolerance %.3g", quant_name(type),
                         (long long)rows, (long long)cols, n, (long long)(i / rows), (long long)(i % rows), (double)y[i], want[i],
                         tol * size[i]);
        for (int64_t i = 0; i < n * rows; i++)
            if (f32_bits(y[i]) != f32_bits(all[t0 * rows + i]))
                fail_msg("%s [%lld, %lld] n %d: token %lld row %lld is %.9g, but %.9g among %d tokens", quant_name(type),
                         (long long)rows, (long long)cols, n, (long long)(i / rows), (long long)(i % rows), (double)y[i],
                         (double)all[t0 * rows + i], MAX_TOK);
    }
    add_digest(all, out * 4);
    free(file), free(strips), free(x), free(bias), free(want), free(size), free(all), free(y);
    dev_next_case(d);
}

static void products(void) {
    static const int64_t rows[] = {1, 15, 16, 17, 172};
    struct dev d;
    dev_open(&d, &small, ARENA);
    for (int t = 0; t < N_TYPE; t++) {
        int64_t block = quant_info(types[t])->block_elems;
        const int64_t cols[] = {block, block == 1 ? 33 : block * 3, block == 1 ? 512 : block * 2};
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) product_case(&d, types[t], rows[r], cols[r % 3]);
        product_case(&d, types[t], 20, block == 1 ? 577 : 2304);
    }
    dev_close(&d);
}

/* Several outputs of one x, of different kinds; a NaN must not vanish in the quantisation; what was not opened for. */
static void product_edges(void) {
    enum { COLS = 256 };
    struct dev d;
    dev_open(&d, &small, ARENA);
    void *q4 = ref_random_rows(QT_Q4_K, 20, COLS, 5), *s4 = ref_strips(QT_Q4_K, q4, 20, COLS);
    void *f16 = ref_random_rows(QT_F16, 33, COLS, 6), *s16 = ref_strips(QT_F16, f16, 33, COLS);
    struct strip_layout l4, l16;
    assert_true(strip_layout(&l4, QT_Q4_K, 20, COLS) && strip_layout(&l16, QT_F16, 33, COLS));
    struct mat a = {dev_new(&d, s4, l4.bytes), QT_Q4_K, 20, COLS}, b = {dev_new(&d, s16, l16.bytes), QT_F16, 33, COLS};
    uint64_t seed = 1;
    float *x = normals(3 * COLS, &seed, 1), ya[60], yb[99];
    double want[99], size[99];
    float *da = dev_new(&d, NULL, sizeof ya), *db = dev_new(&d, NULL, sizeof yb), *dx = dev_new(&d, x, 3 * COLS * 4);
    struct matmul m = {.x = dx, .cols = COLS, .n_tok = 3, .n = 2, .out = {{&a, da, NULL}, {&b, db, NULL}}};
    ok(d.t->matmul(d.t, &m));
    dev_read(&d, ya, da, sizeof ya);
    dev_read(&d, yb, db, sizeof yb);
    ref_matmul_contract(want, size, QT_Q4_K, q4, 20, COLS, x, 3, NULL);
    for (int i = 0; i < 60; i++) assert_true(fabs(ya[i] - want[i]) <= ref_matmul_tolerance(QT_Q4_K, COLS) * size[i]);
    ref_matmul_contract(want, size, QT_F16, f16, 33, COLS, x, 3, NULL);
    for (int i = 0; i < 99; i++) assert_true(fabs(yb[i] - want[i]) <= ref_matmul_tolerance(QT_F16, COLS) * size[i]);
    for (int at = 0; at < COLS; at += 17) {
        for (int i = 0; i < COLS; i++) x[i] = i == at ? NAN : 1;
        dx = dev_new(&d, x, COLS * 4);
        struct matmul one = {.x = dx, .cols = COLS, .n_tok = 1, .n = 1, .out = {{&a, da, NULL}}};
        ok(d.t->matmul(d.t, &one));
        dev_read(&d, ya, da, 20 * 4);
        for (int r = 0; r < 20; r++) assert_true(isnan(ya[r]));
    }
    struct mat tall = {a.data, QT_F32, 601, 8}, wide = {a.data, QT_F32, 16, 8192}, bad = {a.data, QT_IQ2_S, 16, 256};
    m.n = 1, m.n_tok = 41;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    m.n_tok = 1, m.n = MATMUL_MAX + 1;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    m.n = 1, m.cols = 128;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    m.cols = 8, m.out[0].w = &tall;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    m.cols = 8192, m.out[0].w = &wide;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    m.cols = 256, m.out[0].w = &bad;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    free(q4), free(s4), free(f16), free(s16), free(x);
    dev_close(&d);
}

/* The expert FFN against its own parts, which the tests above hold against the contract: the same bits. */
static void expert_case(struct dev *d, int type) {
    enum { DIM = 256, FF = 512, EXPERTS = 8, USED = 3, TOK = 5 };
    struct mat w[3];
    size_t bytes[3];
    uint64_t seed = 77;
    for (int i = 0; i < 3; i++) {
        int64_t rows = i == 2 ? DIM : FF, cols = i == 2 ? FF : DIM;
        struct strip_layout l;
        size_t row;
        assert_true(strip_layout(&l, type, rows, cols) && quant_row_bytes(&row, type, cols));
        uint8_t *file = ref_random_rows(type, EXPERTS * rows, cols, (uint64_t)i), *strips = malloc(EXPERTS * l.bytes);
        for (int e = 0; e < EXPERTS; e++) {
            void *s = ref_strips(type, file + (size_t)e * row * (size_t)rows, rows, cols);
            memcpy(strips + (size_t)e * l.bytes, s, l.bytes);
            free(s);
        }
        bytes[i] = l.bytes;
        w[i] = (struct mat){dev_new(d, strips, EXPERTS * l.bytes), type, rows, cols};
        free(file), free(strips);
    }
    float *x = normals(TOK * DIM, &seed, 0.125f), weight[TOK * USED], y[TOK * DIM], part[DIM];
    int32_t ids[TOK * USED];
    for (int t = 0; t < TOK; t++)
        for (int k = 0, first = (int)(test_rand(&seed) % EXPERTS); k < USED; k++) {
            ids[t * USED + k] = (first + 5 * k) % EXPERTS;
            weight[t * USED + k] = test_uniform(&seed, 0, 1);
        }
    float *dx = dev_new(d, x, TOK * DIM * 4), *dw = dev_new(d, weight, sizeof weight), *dy = dev_new(d, NULL, sizeof y);
    float *dg = dev_new(d, NULL, FF * 4), *du = dev_new(d, NULL, FF * 4), *dp = dev_new(d, NULL, DIM * 4);
    int32_t *di = dev_new(d, ids, sizeof ids);
    struct experts_args a = {.y = dy, .x = dx, .ids = di, .weight = dw, .n_tok = TOK, .n_used = USED, .n_expert = EXPERTS,
                             .gate = w[0], .up = w[1], .down = w[2], .act = ACT_SILU};
    ok(d->t->experts(d->t, &a));
    ok(gpu_ops_check(d->ops));
    dev_read(d, y, dy, sizeof y);
    add_digest(y, sizeof y);
    for (int t = 0; t < TOK; t++) {
        float want[DIM] = {0};
        for (int k = 0; k < USED; k++) {
            struct mat one[3];
            for (int i = 0; i < 3; i++) {
                one[i] = w[i];
                one[i].data = (const uint8_t *)w[i].data + (size_t)ids[t * USED + k] * bytes[i];
            }
            struct matmul in = {.x = dx + t * DIM, .cols = DIM, .n_tok = 1, .n = 2, .out = {{&one[0], dg, NULL}, {&one[1], du, NULL}}};
            struct matmul out = {.x = dg, .cols = FF, .n_tok = 1, .n = 1, .out = {{&one[2], dp, NULL}}};
            ok(d->t->matmul(d->t, &in));
            ok(d->t->glu(d->t, dg, dg, du, FF, ACT_SILU));
            ok(d->t->matmul(d->t, &out));
            dev_read(d, part, dp, sizeof part);
            for (int i = 0; i < DIM; i++) want[i] = fmaf(weight[t * USED + k], part[i], want[i]);
        }
        for (int i = 0; i < DIM; i++)
            if (f32_bits(y[t * DIM + i]) != f32_bits(want[i]))
                fail_msg("experts %s: token %d element %d is %.9g, its parts give %.9g", quant_name(type), t, i, y[t * DIM + i], want[i]);
    }
    ids[7] = EXPERTS;
    a.ids = dev_new(d, ids, sizeof ids);
    ok(d->t->experts(d->t, &a));
    assert_int_equal(gpu_ops_check(d->ops), ERR_ARG);
    ok(gpu_ops_check(d->ops));
    a.down.cols = FF / 2;
    assert_int_equal(d->t->experts(d->t, &a), ERR_ARG);
    free(x);
    dev_next_case(d);
}

static void experts(void) {
    struct dev d;
    dev_open(&d, &small, ARENA);
    expert_case(&d, QT_F32);
    expert_case(&d, QT_F16);
    expert_case(&d, QT_Q4_K);
    expert_case(&d, QT_Q8_0);
    dev_close(&d);
}

/* --- KV and attention ---------------------------------------------------------------------------------------------------- */

static const int kv_types[] = {QT_F32, QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
static const int dims[] = {8, 16, 32, 40, 64, 80, 96, 112, 128, 192, 256};
static const int groups[] = {1, 2, 3, 4, 5, 6, 8, 10};
static const int tokens[] = {1, 2, 7, 8, 9, 19};
static const int starts[] = {0, 1, 15, 16, 255, 256, 257, 1000};
#define PICK(array, seed) (array)[test_rand(seed) % (sizeof(array) / sizeof *(array))]

struct shape {
    int type_k, type_v, dim_k, dim_v, group, n_kv, n_tok;
    int64_t pos0, window;
};

static bool fits(int type, int dim) { return dim % 32 == 0 || (type != QT_Q8_0 && type != QT_Q4_0); }

static struct shape random_shape(uint64_t *seed, int i) {
    struct shape s;
    do {
        s = (struct shape){.type_k = kv_types[i % 5], .type_v = kv_types[i / 5 % 5], .dim_k = PICK(dims, seed), .group = PICK(groups, seed),
                           .n_kv = 1 + (int)(test_rand(seed) % 3), .n_tok = PICK(tokens, seed), .pos0 = PICK(starts, seed)};
        s.dim_v = test_rand(seed) % 3 ? s.dim_k : PICK(dims, seed);
        if (test_rand(seed) % 3 == 0) s.window = 1 + (int64_t)(test_rand(seed) % 600);
    } while (!fits(s.type_k, s.dim_k) || !fits(s.type_v, s.dim_v));
    return s;
}

static const char *describe(const struct shape *s) {
    static char text[200];
    snprintf(text, sizeof text, "K %s[%d] V %s[%d] heads %d x %d, %d tokens at %lld, window %lld", quant_name(s->type_k), s->dim_k,
             quant_name(s->type_v), s->dim_v, s->n_kv, s->group, s->n_tok, (long long)s->pos0, (long long)s->window);
    return text;
}

static struct kv *kv_of(const struct shape *s, int64_t n_ctx, int n_tok) {
    struct kv_shape shape = {s->n_kv, s->dim_k, s->dim_v, s->window};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = n_tok, .type_k = s->type_k, .type_v = s->type_v};
    struct kv *kv;
    ok(kv_open(&kv, &spec));
    return kv;
}

/* A record of the same KV whose layer lies on the device; every byte 0xff. */
struct device_kv {
    struct kv kv;
    struct kv_layer layer;
};
static void device_kv(struct dev *d, struct device_kv *dk, const struct kv *host) {
    dk->kv = *host;
    dk->layer = host->layers[0];
    dk->kv.layers = &dk->layer;
    dk->layer.base = dev_new(d, NULL, host->layers[0].bytes);
}

/* Positions 0 .. n are stored on both sides; the bytes are the same. */
static void put_both(struct dev *d, struct device_kv *dk, struct kv *host, int64_t n, const float *k, const float *v, uint64_t *seed) {
    const struct kv_layer *l = &host->layers[0];
    size_t nk = (size_t)(l->n_kv * l->head_dim_k), nv = (size_t)(l->n_kv * l->head_dim_v);
    float *dkk = dev_new(d, k, (size_t)n * nk * 4), *dv = dev_new(d, v, (size_t)n * nv * 4);
    for (int64_t p = 0; p < n;) {
        int64_t part = 1 + (int64_t)(test_rand(seed) % 300);
        if (part > n - p) part = n - p;
        ok(d->t->kv_put(d->t, &dk->kv, 0, p, (int)part, dkk + (size_t)p * nk, dv + (size_t)p * nv));
        p += part;
    }
    memset(l->base, 0xff, l->bytes);
    for (int64_t p = 0; p < n; p++)
        for (int h = 0; h < l->n_kv; h++)
            kv_put_ref(host, 0, p, h, k + (size_t)p * nk + (size_t)(h * l->head_dim_k), v + (size_t)p * nv + (size_t)(h * l->head_dim_v));
}

static void same_bytes(struct dev *d, const struct device_kv *dk, const struct kv *host, const struct shape *s) {
    const struct kv_layer *l = &host->layers[0];
    unsigned char *got = malloc(l->bytes);
    dev_read(d, got, dk->layer.base, l->bytes);
    for (size_t i = 0; i < l->bytes; i++)
        if (got[i] != l->base[i])
            fail_msg("%s: byte %zu of head byte %zu is %02x, want %02x (V at %zu)", describe(s), i, i % l->head_bytes, got[i],
                     l->base[i], l->v_off);
    add_digest(got, l->bytes);
    free(got);
}

static void stored_bytes(void) {
    struct dev d;
    dev_open(&d, &small, ARENA);
    uint64_t seed = 3;
    for (int i = 0; i < 25; i++, dev_next_case(&d)) {
        struct shape s = random_shape(&seed, i);
        int64_t n = 1 + (int64_t)(test_rand(&seed) % 400);
        s.window = 0;
        if (i == 0) s = (struct shape){.type_k = QT_Q8_0, .type_v = QT_Q8_0, .dim_k = 256, .dim_v = 256, .n_kv = 1}; /* all codes in use */
        float *k = normals((size_t)(n * s.n_kv * s.dim_k), &seed, 3), *v = normals((size_t)(n * s.n_kv * s.dim_v), &seed, 3);
        for (int64_t j = 0; j < n * s.n_kv * s.dim_k; j += 7) k[j] = (float)(int)(k[j] * 4) / 8; /* ties, zeros */
        memset(v, 0, sizeof *v * (size_t)s.dim_v);
        v[0] = 1e-42f;
        struct kv *host = kv_of(&s, 500, 500);
        struct device_kv dk;
        device_kv(&d, &dk, host);
        put_both(&d, &dk, host, n, k, v, &seed);
        ok(gpu_ops_check(d.ops));
        same_bytes(&d, &dk, host, &s);
        kv_close(host);
        free(k), free(v);
    }
    dev_close(&d);
}

static void check_rows(const struct attn_args *a, const float *o, const struct shape *s) {
    double *want = malloc(sizeof *want * (size_t)(a->n_head * s->dim_v)), tol[256];
    for (int t = 0; t < a->n_tok; t += a->n_tok > 9 ? 5 : 1) {
        ref_attn_row(want, tol, a, t);
        for (int i = 0; i < a->n_head * s->dim_v; i++) {
            double got = o[(size_t)t * (size_t)(a->n_head * s->dim_v) + (size_t)i];
            if (!(fabs(got - want[i]) <= tol[i / s->dim_v]))
                fail_msg("%s: token %d head %d dim %d is %.9g, want %.9g +- %.2g", describe(s), t, i / s->dim_v, i % s->dim_v, got,
                         want[i], tol[i / s->dim_v]);
        }
    }
    free(want);
}

/* Attention on the device of a host record's arguments (a->q on the host, a->kv the host's). */
static void attend(struct dev *d, const struct device_kv *dk, const struct attn_args *a, float *o, size_t n_o, size_t n_q) {
    struct attn_args g = *a;
    g.kv = (struct kv *)&dk->kv;
    g.q = dev_new(d, a->q, n_q * 4);
    g.o = dev_new(d, NULL, n_o * 4);
    ok(d->t->attn(d->t, &g));
    ok(gpu_ops_check(d->ops));
    dev_read(d, o, g.o, n_o * 4);
    add_digest(o, n_o * 4);
}

static void attention(void) {
    int n_case = getenv("TEST_CASES") ? atoi(getenv("TEST_CASES")) : 25;
    struct dev d;
    dev_open(&d, &small, ARENA);
    uint64_t seed = getenv("TEST_SEED") ? strtoull(getenv("TEST_SEED"), NULL, 10) : 1;
    for (int i = 0; i < n_case; i++, dev_next_case(&d)) {
        struct shape s = random_shape(&seed, i);
        int n_head = s.n_kv * s.group;
        int64_t n = s.pos0 + s.n_tok;
        struct kv *host = kv_of(&s, n + 100, 1024);
        struct device_kv dk;
        device_kv(&d, &dk, host);
        float *k = normals((size_t)(n * s.n_kv * s.dim_k), &seed, 1), *v = normals((size_t)(n * s.n_kv * s.dim_v), &seed, 1);
        size_t n_q = (size_t)(s.n_tok * n_head * s.dim_k), n_o = (size_t)(s.n_tok * n_head * s.dim_v);
        float *q = normals(n_q, &seed, 1.5f), *o = malloc(n_o * sizeof *o);
        put_both(&d, &dk, host, n, k, v, &seed);
        struct attn_args a = {.q = q, .kv = host, .pos0 = s.pos0, .n_tok = s.n_tok, .n_head = n_head, .window = s.window,
                              .scale = 1 / sqrtf((float)s.dim_k)};
        attend(&d, &dk, &a, o, n_o, n_q);
        check_rows(&a, o, &s);
        kv_close(host);
        free(k), free(v), free(q), free(o);
    }
    dev_close(&d);
}

/* A window layer whose ring goes round many times. */
static void rings(void) {
    struct shape s = {QT_F16, QT_F16, 64, 64, 2, 1, 10, 0, 300};
    struct dev d;
    struct ops_limits l = small;
    l.n_ctx = 100000;
    dev_open(&d, &l, ARENA);
    uint64_t seed = 5;
    struct kv *host = kv_of(&s, 100000, 10);
    assert_true(host->layers[0].ring);
    struct device_kv dk;
    memset(host->layers[0].base, 0xff, host->layers[0].bytes);
    device_kv(&d, &dk, host);
    size_t mark = gpu_arena_used(d.arena);
    for (s.pos0 = 0; s.pos0 < 1800; s.pos0 += 10) {
        float *k = normals(10 * 64, &seed, 1), *v = normals(10 * 64, &seed, 1), *q = normals(10 * 128, &seed, 1), o[10 * 128];
        float *gk = dev_new(&d, k, 10 * 64 * 4), *gv = dev_new(&d, v, 10 * 64 * 4);
        ok(d.t->kv_put(d.t, &dk.kv, 0, s.pos0, 10, gk, gv));
        for (int t = 0; t < 10; t++) kv_put_ref(host, 0, s.pos0 + t, 0, k + t * 64, v + t * 64);
        struct attn_args a = {.q = q, .kv = host, .pos0 = s.pos0, .n_tok = 10, .n_head = 2, .window = 300, .scale = 0.125f};
        if (s.pos0 % 170 == 0) {
            attend(&d, &dk, &a, o, 10 * 128, 10 * 128);
            check_rows(&a, o, &s);
        }
        a.kv = &dk.kv, a.window = 0;
        assert_int_equal(d.t->attn(d.t, &a), ERR_ARG);
        free(k), free(v), free(q);
        ok(gpu_stream_sync(d.stream));
        gpu_arena_release(d.arena, mark);
    }
    kv_close(host);
    dev_close(&d);
}

/* What cannot be stored or is not a number is named afterwards, with the smallest position. */
static void bad_values(void) {
    struct shape s = {QT_F16, QT_Q8_0, 64, 64, 1, 2, 1, 0, 0};
    struct dev d;
    dev_open(&d, &small, ARENA);
    struct kv *host = kv_of(&s, 400, 400);
    struct device_kv dk;
    device_kv(&d, &dk, host);
    float *x = calloc(400 * 128, sizeof *x), *y = calloc(400 * 128, sizeof *y);
    x[300 * 128 + 70] = 70000;
    x[350 * 128] = NAN;
    float *dx = dev_new(&d, x, 400 * 128 * 4), *dy = dev_new(&d, y, 400 * 128 * 4);
    ok(d.t->kv_put(d.t, &dk.kv, 0, 0, 400, dx, dy));
    assert_int_equal(gpu_ops_check(d.ops), ERR_NUMERIC);
    assert_non_null(strstr(err_text(), "position 300"));
    ok(gpu_ops_check(d.ops));
    ok(d.t->kv_put(d.t, &dk.kv, 0, 0, 400, dy, dy));
    ok(gpu_ops_check(d.ops));
    struct attn_args a = {.o = dev_new(&d, NULL, 128 * 4), .q = dx + 350 * 128, .kv = &dk.kv, .pos0 = 399, .n_tok = 1, .n_head = 2, .scale = 1};
    ok(d.t->attn(d.t, &a));
    assert_int_equal(gpu_ops_check(d.ops), ERR_NUMERIC);
    assert_non_null(strstr(err_text(), "position 399"));
    a.pos0 = 400;
    assert_int_equal(d.t->attn(d.t, &a), ERR_ARG);
    a.pos0 = 0, a.n_head = 3;
    assert_int_equal(d.t->attn(d.t, &a), ERR_ARG);
    free(x), free(y);
    kv_close(host);
    dev_close(&d);
}

ORDERS(norms)
ORDERS(activations)
ORDERS(rotations)
ORDERS(routing)
ORDERS(embeddings)
ORDERS(products)
ORDERS(product_edges)
ORDERS(experts)
ORDERS(stored_bytes)
ORDERS(attention)
ORDERS(rings)
ORDERS(bad_values)

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(norms_in_all_orders),         cmocka_unit_test(activations_in_all_orders),
        cmocka_unit_test(rotations_in_all_orders),     cmocka_unit_test(routing_in_all_orders),
        cmocka_unit_test(embeddings_in_all_orders),    cmocka_unit_test(products_in_all_orders),
        cmocka_unit_test(product_edges_in_all_orders), cmocka_unit_test(experts_in_all_orders),
        cmocka_unit_test(stored_bytes_in_all_orders),  cmocka_unit_test(attention_in_all_orders),
        cmocka_unit_test(rings_in_all_orders),         cmocka_unit_test(bad_values_in_all_orders),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
