/* test_gpu_prefill.c: the GPU's operations with many tokens (PREFILL_MIN_TOK of gpu/sizes.h on): products, experts and attention
 * with half inputs and f32 sums, against textbook versions in double. Built with LH_GPU where there is a GPU back end; on the
 * emulated one every test runs in several orders with equal results. */
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
#include "gpu/impl.h"
#include "gpu/kernels.h"
#include "tests/gpu_dev.h"
#include "tests/ref.h"
#include "tests/ref_attn.h"

#include <math.h>
#include <stdlib.h>

static const int types[] = {
#define X(name, id, elems, bytes, enc) id,
    QUANT_LIST(X)
#undef X
};
enum { N_TYPE = sizeof types / sizeof *types, DATA_BYTES = 64 << 20, N = PREFILL_MIN_TOK };

static const struct ops_limits small = {.n_tok = 80, .cols = 2304, .rows = 600, .n_head = 20, .n_kv = 4, .head_dim = 256,
                                        .n_ctx = 2048, .n_expert = 8, .n_expert_used = 4};

static float *normals(size_t n, uint64_t *seed, float scale) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_normal(seed);
    return x;
}

/* --- products ------------------------------------------------------------------------------------------------------------- */

/* A matrix on both sides. */
struct weights {
    int type;
    int64_t rows, cols;
    uint8_t *file; /* rows as in a file */
    size_t row_bytes;
    struct mat m;  /* on the device */
};

static void weights_up(struct dev *d, struct weights *w) {
    struct strip_layout l;
    assert_true(strip_layout(&l, w->type, w->rows, w->cols) && quant_row_bytes(&w->row_bytes, w->type, w->cols));
    void *strips = ref_strips(w->type, w->file, w->rows, w->cols);
    w->m = (struct mat){dev_new(d, strips, l.bytes), w->type, w->rows, w->cols};
    free(strips);
}

static struct weights weights_new(struct dev *d, int type, int64_t rows, int64_t cols, uint64_t seed) {
    struct weights w = {.type = type, .rows = rows, .cols = cols, .file = ref_random_rows(type, rows, cols, seed)};
    weights_up(d, &w);
    return w;
}

/* Error of numbers of at most `most` in half where it is not relative: half's subnormals after the power of two of their
 * row, which is 2^0 while `bound`, at least `most`, is within 2^-6 .. 2^15. */
static double half_step(double most, double bound) {
    if (bound < 0x1p-6) return 0x1p-39 * bound;
    return most > 0x1p15 || bound > 0x1p15 ? fmax(0x1p-25, 0x1p-39 * bound) : 0x1p-25;
}

/* Allowed |error| of one output. Half rounds to 11 bits: 2^-11 of each x, and of each weight whose type it does not hold
 * exactly, is at most 2^-10 (1 + 2^-12) of the sum of |w x|; small numbers as above, with a bound of a quantised row of up to
 * 64 times its largest weight (a byte is counted as 128, the minimum apart); sums in f32. F32: nothing is rounded. */
static double product_tolerance(int type, const float *w, const float *x, int64_t cols, double bias) {
    double sum = 0, w_sum = 0, x_sum = 0, w_most = 0, x_most = 0;
    for (int64_t i = 0; i < cols; i++) {
        sum += fabs((double)w[i] * x[i]);
        w_sum += fabs((double)w[i]), x_sum += fabs((double)x[i]);
        w_most = fmax(w_most, fabs((double)w[i])), x_most = fmax(x_most, fabs((double)x[i]));
    }
    double f32 = 0x1p-24 * (double)(cols + 8) * sum + 0x1p-23 * fabs(bias) + 1e-44;
    if (type == QT_F32) return f32;
    bool exact = type == QT_F16 || type == QT_BF16;
    double low = w_sum * half_step(x_most, x_most);
    if (type != QT_F16) low += x_sum * half_step(w_most, (exact ? 1 : 64) * w_most);
    return (exact ? 0x1p-11 : 0x1p-10 * (1 + 0x1p-12)) * sum + low + f32;
}

static void check_product(const struct weights *w, const float *x, int n_tok, const float *bias, const float *y, const char *what) {
    double *want = malloc((size_t)(n_tok * w->rows) * sizeof *want);
    float *row = malloc((size_t)w->cols * sizeof *row);
    ref_matmul(want, w->type, w->file, w->rows, w->cols, x, n_tok, bias);
    for (int64_t r = 0; r < w->rows; r++) {
        quant_decode_row(w->type, w->file + (size_t)r * w->row_bytes, row, w->cols);
        for (int t = 0; t < n_tok; t++) {
            double tol = product_tolerance(w->type, row, x + t * w->cols, w->cols, bias ? bias[r] : 0), got = y[t * w->rows + r];
            if (!(fabs(got - want[t * w->rows + r]) <= tol))
                fail_msg("%s %s [%lld, %lld] n %d: token %d row %lld is %.9g, expected %.9g, tolerance %.3g", what, quant_name(w->type),
                         (long long)w->rows, (long long)w->cols, n_tok, t, (long long)r, got, want[t * w->rows + r], tol);
        }
    }
    free(want), free(row);
}

/* Tokens of every kind: ordinary, zero, beyond half's range, one spike among small ones, below half's range. */
static float *random_tokens(int n_tok, int64_t cols, uint64_t seed) {
    float *x = malloc((size_t)(n_tok * cols) * sizeof *x);
    for (int t = 0; t < n_tok; t++)
        for (int64_t i = 0; i < cols; i++) {
            float v = test_normal(&seed);
            switch (t % 9) {
            case 2: v = 0; break;
            case 3: v *= 1e6f; break;
            case 4: v = i % 100 == 7 ? 3e5f : v * 1e-2f; break;
            case 5: v *= 1e-7f; break;
            case 6: v *= 1e30f; break;
            case 7: v *= 1e-30f; break;
            case 8: v = i == cols - 1 ? v : 0; break;
            default: break;
            }
            x[t * cols + i] = v;
        }
    return x;
}

/* The same call twice: within the tolerance, nothing beyond the output, the same bits. */
static void product_case(struct dev *d, int type, int64_t rows, int64_t cols, int n, bool with_bias) {
    uint64_t seed = (uint64_t)(type * 7919 + rows * 31 + cols + n);
    struct weights w = weights_new(d, type, rows, cols, seed);
    float *x = random_tokens(n, cols, seed + 1), *bias = normals((size_t)rows, &seed, 1);
    size_t out = (size_t)(n * rows);
    float *y = malloc((out + 64) * sizeof *y), *again = malloc((out + 64) * sizeof *y);
    float *dx = dev_new(d, x, (size_t)(n * cols) * 4), *db = dev_new(d, bias, (size_t)rows * 4), *dy = dev_new(d, NULL, (out + 64) * 4);
    struct matmul m = {.x = dx, .cols = cols, .n_tok = n, .n = 1, .out = {{&w.m, dy, with_bias ? db : NULL}}};
    ok(d->t->matmul(d->t, &m));
    dev_read(d, y, dy, (out + 64) * 4);
    for (int i = 0; i < 64; i++) assert_true(isnan(y[out + (size_t)i]));
    check_product(&w, x, n, with_bias ? bias : NULL, y, "product");
    ok(d->t->matmul(d->t, &m));
    dev_read(d, again, dy, (out + 64) * 4);
    assert_memory_equal(again, y, out * 4);
    add_digest(y, out * 4);
    free(w.file), free(x), free(bias), free(y), free(again);
    dev_next_case(d);
}

static void products(void) {
    static const int64_t rows[] = {1, 15, 16, 17, 172};
    static const int counts[] = {N, N + 1, 64, 65, 80};
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    for (int t = 0; t < N_TYPE; t++) {
        int64_t block = quant_info(types[t])->block_elems;
        const int64_t cols[] = {block, block == 1 ? 33 : block * 3, block == 1 ? 512 : block * 2};
        for (size_t r = 0; r < 5; r++) product_case(&d, types[t], rows[r], cols[r % 3], counts[(r + (size_t)t) % 5], (r + (size_t)t) % 2);
        product_case(&d, types[t], 20, block == 1 ? 577 : 2304, N, true);
    }
    dev_close(&d);
}

/* Weights whose values half cannot hold as they are, each row in its own way. */
static void product_ranges(void) {
    enum { ROWS = 20, COLS = 256, TOK = N };
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    static const int kinds[] = {QT_BF16, QT_F32, QT_Q8_0, QT_Q4_K, QT_Q2_K, QT_Q6_K, QT_MXFP4, QT_F16};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++, dev_next_case(&d)) {
        struct weights w = {.type = kinds[k], .rows = ROWS, .cols = COLS, .file = ref_random_rows(kinds[k], ROWS, COLS, k + 40)};
        assert_true(quant_row_bytes(&w.row_bytes, w.type, w.cols));
        for (int r = 0; r < ROWS; r++) {
            static const float scales[] = {0x1p60f, 0x1p16f, 0x1p-40f, 0x1p-90f, 1};
            uint8_t *row = w.file + (size_t)r * w.row_bytes;
            for (int i = 0; i < COLS; i++) {
                float scale = scales[r % 5];
                uint16_t h;
                if (w.type == QT_F32) {
                    float v;
                    memcpy(&v, row + 4 * i, 4);
                    v *= scale;
                    memcpy(row + 4 * i, &v, 4);
                } else if (w.type == QT_BF16) {
                    memcpy(&h, row + 2 * i, 2);
                    h = f32_to_bf16(bf16_to_f32(h) * scale);
                    memcpy(row + 2 * i, &h, 2);
                }
            }
            /* scales of all blocks at the ends of what they can be */
            const struct quant_info *q = quant_info(w.type);
            for (size_t b = 0; b < w.row_bytes && r % 5 < 3; b += (size_t)q->block_bytes) {
                uint16_t h = f32_to_f16(r % 5 == 0 ? 65504 : r % 5 == 1 ? -30000 : 0x1p-22f), m = f32_to_f16(r % 5 == 0 ? 60000 : 1);
                if (w.type == QT_Q8_0 || w.type == QT_Q4_K) memcpy(row + b, &h, 2);
                if (w.type == QT_Q4_K) memcpy(row + b + 2, &m, 2);
                if (w.type == QT_Q2_K) memcpy(row + b + 80, &h, 2), memcpy(row + b + 82, &m, 2);
                if (w.type == QT_Q6_K) memcpy(row + b + 208, &h, 2);
                if (w.type == QT_MXFP4) row[b] = (uint8_t)(r % 5 == 0 ? 200 : r % 5 == 1 ? 230 : 40);
            }
        }
        weights_up(&d, &w);
        uint64_t seed = k;
        float *x = normals(TOK * COLS, &seed, 1), y[TOK * ROWS], *dy = dev_new(&d, NULL, sizeof y);
        struct matmul m = {.x = dev_new(&d, x, TOK * COLS * 4), .cols = COLS, .n_tok = TOK, .n = 1, .out = {{&w.m, dy, NULL}}};
        ok(d.t->matmul(d.t, &m));
        dev_read(&d, y, dy, sizeof y);
        for (int i = 0; i < TOK * ROWS; i++) assert_true(isfinite(y[i]));
        check_product(&w, x, TOK, NULL, y, "range of");
        add_digest(y, sizeof y);
        free(w.file), free(x);
    }
    dev_close(&d);
}

/* Several outputs of one x, of different kinds; a NaN stays in its token; more rows than a tile has; what was not opened for. */
static void product_edges(void) {
    enum { COLS = 256, TOK = 40 };
    struct dev d;
    struct ops_limits l = small;
    l.rows = 70000;
    dev_open(&d, &l, DATA_BYTES);
    struct weights a = weights_new(&d, QT_Q4_K, 20, COLS, 5), b = weights_new(&d, QT_F16, 33, COLS, 6), c = weights_new(&d, QT_F32, 7, COLS, 7);
    uint64_t seed = 1;
    float *x = normals(TOK * COLS, &seed, 1), *ya = malloc(TOK * 20 * 4), *yb = malloc(TOK * 33 * 4), *yc = malloc(TOK * 7 * 4);
    float *da = dev_new(&d, NULL, TOK * 20 * 4), *db = dev_new(&d, NULL, TOK * 33 * 4), *dc = dev_new(&d, NULL, TOK * 7 * 4);
    struct matmul m = {.x = dev_new(&d, x, TOK * COLS * 4), .cols = COLS, .n_tok = TOK, .n = 3,
                       .out = {{&a.m, da, NULL}, {&b.m, db, NULL}, {&c.m, dc, NULL}}};
    ok(d.t->matmul(d.t, &m));
    dev_read(&d, ya, da, TOK * 20 * 4);
    dev_read(&d, yb, db, TOK * 33 * 4);
    dev_read(&d, yc, dc, TOK * 7 * 4);
    check_product(&a, x, TOK, NULL, ya, "first of three");
    check_product(&b, x, TOK, NULL, yb, "second of three");
    check_product(&c, x, TOK, NULL, yc, "third of three");
    x[11 * COLS + 200] = NAN;
    x[12 * COLS + 3] = INFINITY;
    m.x = dev_new(&d, x, TOK * COLS * 4);
    ok(d.t->matmul(d.t, &m));
    dev_read(&d, yb, db, TOK * 33 * 4);
    dev_read(&d, yc, dc, TOK * 7 * 4);
    for (int i = 0; i < TOK * 33; i++) assert_int_equal(!isfinite(yb[i]), i / 33 == 11 || i / 33 == 12);
    for (int i = 0; i < TOK * 7; i++) assert_int_equal(!isfinite(yc[i]), i / 7 == 11 || i / 7 == 12);
    m.n_tok = small.n_tok + 1;
    assert_int_equal(d.t->matmul(d.t, &m), ERR_ARG);
    free(a.file), free(b.file), free(c.file), free(x), free(ya), free(yb), free(yc);
    dev_next_case(&d);

    enum { TALL = 66000 };
    struct weights t = weights_new(&d, QT_Q4_0, TALL, 32, 8);
    x = normals(N * 32, &seed, 1);
    float *y = malloc(N * TALL * 4), *bias = normals(TALL, &seed, 1), *dy = dev_new(&d, NULL, N * TALL * 4);
    struct matmul tall = {.x = dev_new(&d, x, N * 32 * 4), .cols = 32, .n_tok = N, .n = 1, .out = {{&t.m, dy, dev_new(&d, bias, TALL * 4)}}};
    ok(d.t->matmul(d.t, &tall));
    dev_read(&d, y, dy, N * TALL * 4);
    check_product(&t, x, N, bias, y, "tall");
    free(t.file), free(x), free(y), free(bias);
    dev_close(&d);
}

/* --- experts -------------------------------------------------------------------------------------------------------------- */

struct moe {
    int64_t dim, n_ff;
    int n_expert, n_used, n_tok;
};

/* Row r of expert e of w, decoded. */
static void expert_row(float *dst, const struct weights *w, int64_t rows, int e, int64_t r) {
    quant_decode_row(w->type, w->file + (size_t)(e * rows + r) * w->row_bytes, dst, w->cols);
}

static double dot(const float *w, const double *x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += (double)w[i] * x[i];
    return s;
}

/* The FFN of one token in double. */
static void expert_ref(double *y, const struct moe *s, const struct weights *w, const float *x, const int32_t *ids, const float *weight) {
    float *row = malloc((size_t)(s->dim + s->n_ff) * sizeof *row);
    double *xd = malloc((size_t)s->dim * sizeof *xd), *h = malloc((size_t)s->n_ff * sizeof *h);
    for (int64_t i = 0; i < s->dim; i++) xd[i] = x[i], y[i] = 0;
    for (int k = 0; k < s->n_used; k++) {
        for (int64_t r = 0; r < s->n_ff; r++) {
            expert_row(row, &w[0], s->n_ff, ids[k], r);
            double g = dot(row, xd, s->dim);
            expert_row(row, &w[1], s->n_ff, ids[k], r);
            h[r] = g / (1 + exp(-g)) * dot(row, xd, s->dim);
        }
        for (int64_t r = 0; r < s->dim; r++) {
            expert_row(row, &w[2], s->dim, ids[k], r);
            y[r] += (double)weight[k] * dot(row, h, s->n_ff);
        }
    }
    free(row), free(xd), free(h);
}

/* The same from two stacks, of the experts before `cut` and of the others, which add up. The choices of each may be grouped where
 * those of all were not: twice the bound of expert_case. */
static void held_case(struct dev *d, const struct experts_args *all, const struct moe *s, const float *y, int cut) {
    const size_t n = (size_t)(s->n_tok * s->dim);
    float *part[2] = {malloc(n * 4), malloc(n * 4)};
    double most = 0;
    for (int i = 0; i < 2; i++) {
        struct experts_args a = *all;
        struct mat *m[] = {&a.gate, &a.up, &a.down};
        a.first = i ? cut : 0;
        a.n_held = i ? s->n_expert - cut : cut;
        a.y = dev_new(d, NULL, n * 4);
        for (int k = 0; k < 3; k++) {
            struct strip_layout l;
            assert_true(strip_layout(&l, m[k]->type, m[k]->rows, m[k]->cols));
            m[k]->data = (const uint8_t *)m[k]->data + (size_t)a.first * l.bytes;
        }
        ok(d->t->experts(d->t, &a));
        ok(gpu_ops_check(d->ops));
        dev_read(d, part[i], a.y, n * 4);
        add_digest(part[i], n * 4);
    }
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs(y[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs(part[0][i] + part[1][i] - y[i]) <= 12 * 0x1p-11 * most))
            fail_msg("experts in two stacks: element %zu is %.9g + %.9g, want %.9g", i, part[0][i], part[1][i], y[i]);
    struct experts_args bad = *all;
    bad.first = 1, bad.n_held = s->n_expert;
    assert_int_equal(d->t->experts(d->t, &bad), ERR_ARG);
    free(part[0]), free(part[1]);
}

/* kind 0: scattered choices; 1: everybody the same experts; 2: one more token than a full tile for expert 0; 3: the second and the
 * last expert in turn */
static void expert_case(struct dev *d, const int (*type)[3], const struct moe *s, int kind) {
    struct weights w[3];
    uint64_t seed = 77 + (uint64_t)kind;
    for (int i = 0; i < 3; i++) {
        int64_t rows = i == 2 ? s->dim : s->n_ff, cols = i == 2 ? s->n_ff : s->dim;
        struct strip_layout l;
        w[i] = (struct weights){.type = (*type)[i], .rows = rows, .cols = cols, .file = ref_random_rows((*type)[i], s->n_expert * rows, cols, (uint64_t)i + 3)};
        assert_true(strip_layout(&l, w[i].type, rows, cols) && quant_row_bytes(&w[i].row_bytes, w[i].type, cols));
        uint8_t *strips = malloc((size_t)s->n_expert * l.bytes);
        for (int e = 0; e < s->n_expert; e++) {
            void *one = ref_strips(w[i].type, w[i].file + (size_t)(e * rows) * w[i].row_bytes, rows, cols);
            memcpy(strips + (size_t)e * l.bytes, one, l.bytes);
            free(one);
        }
        w[i].m = (struct mat){dev_new(d, strips, (size_t)s->n_expert * l.bytes), w[i].type, rows, cols};
        free(strips);
    }
    const int n_choice = s->n_tok * s->n_used;
    float *x = normals((size_t)(s->n_tok * s->dim), &seed, 0.125f), *weight = malloc((size_t)n_choice * 4), *y = malloc((size_t)(s->n_tok * s->dim) * 4);
    int32_t *ids = malloc((size_t)n_choice * 4);
    for (int t = 0; t < s->n_tok; t++)
        for (int k = 0, first = (int)(test_rand(&seed) % (uint64_t)s->n_expert); k < s->n_used; k++) {
            if (kind == 1) first = 2;
            if (kind == 2) first = t < 65 ? 0 : 1;
            if (kind == 3) first = t % 2 ? 1 : s->n_expert - 1;
            ids[t * s->n_used + k] = (first + 3 * k) % s->n_expert;
            weight[t * s->n_used + k] = test_uniform(&seed, 0, 1);
        }
    float *dy = dev_new(d, NULL, (size_t)(s->n_tok * s->dim) * 4);
    struct experts_args a = {.y = dy, .x = dev_new(d, x, (size_t)(s->n_tok * s->dim) * 4), .ids = dev_new(d, ids, (size_t)n_choice * 4),
                             .weight = dev_new(d, weight, (size_t)n_choice * 4), .n_tok = s->n_tok, .n_used = s->n_used, .n_expert = s->n_expert,
                             .gate = w[0].m, .up = w[1].m, .down = w[2].m, .act = ACT_SILU};
    ok(d->t->experts(d->t, &a));
    ok(gpu_ops_check(d->ops));
    dev_read(d, y, dy, (size_t)(s->n_tok * s->dim) * 4);
    add_digest(y, (size_t)(s->n_tok * s->dim) * 4);
    double *want = malloc((size_t)s->dim * sizeof *want);
    for (int t = 0; t < s->n_tok; t += s->n_tok > 40 ? 13 : 4) {
        expert_ref(want, s, w, x + t * s->dim, ids + t * s->n_used, weight + t * s->n_used);
        double most = 0;
        for (int64_t i = 0; i < s->dim; i++) most = fmax(most, fabs(want[i]));
        /* three products in a row, each within 2^-10 of its terms (a hard bound; sums of such terms cancel and errors are
         * independent), and the slope of the activation, at most 1.1: 6 * 2^-11 of the token's largest */
        for (int64_t i = 0; i < s->dim; i++)
            if (!(fabs(y[t * s->dim + i] - want[i]) <= 6 * 0x1p-11 * most))
                fail_msg("experts %s %s %s, kind %d: token %d element %lld is %.9g, want %.9g +- %.2g", quant_name((*type)[0]), quant_name((*type)[1]),
                         quant_name((*type)[2]), kind, t, (long long)i, y[t * s->dim + i], want[i], 6 * 0x1p-11 * most);
    }
    held_case(d, &a, s, y, 1 + kind % (s->n_expert - 1));
    ids[7] = kind ? s->n_expert : -1;
    for (int i = 0; i < n_choice; i++)
        if (i != 7) ids[i] = 0; /* little work */
    a.ids = dev_new(d, ids, (size_t)n_choice * 4);
    ok(d->t->experts(d->t, &a));
    assert_int_equal(gpu_ops_check(d->ops), ERR_ARG);
    ok(gpu_ops_check(d->ops));
    for (int i = 0; i < 3; i++) free(w[i].file);
    free(x), free(weight), free(y), free(ids), free(want);
    dev_next_case(d);
}

static void experts(void) {
    static const int mixes[][3] = {{QT_F16, QT_F16, QT_F16}, {QT_Q4_K, QT_Q4_K, QT_Q6_K}, {QT_Q8_0, QT_MXFP4, QT_BF16},
                                   {QT_F32, QT_F32, QT_F32}, {QT_F32, QT_Q8_0, QT_Q4_0}, {QT_Q8_0, QT_F32, QT_NVFP4}};
    const struct moe s = {256, 256, 8, 3, N}, odd = {32, 192, 5, 1, 70};
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++) {
        expert_case(&d, &mixes[i], &s, i % 2);
        if (mixes[i][0] == QT_Q8_0) expert_case(&d, &mixes[i], &odd, 2);
    }
    dev_close(&d);
}

/* More rows than the decoded tile holds for all experts at once, or for one. */
static void expert_tiles(void **state) {
    (void)state;
#if defined(GPU_EMU) /* much work, whose order other tests change */
    struct gpu_order o;
    gpu_order_at(&o, 0);
    gpu_order_set(&o);
#endif
    static const int type[3] = {QT_Q4_0, QT_Q8_0, QT_Q4_0};
    const struct moe some = {32, 16384, 6, 1, N}, one = {32, 65600, 2, 1, N};
    struct ops_limits l = {.n_tok = N, .cols = 65600, .rows = 65600, .n_head = 1, .n_kv = 1, .head_dim = 16, .n_ctx = 256, .n_expert = 8,
                           .n_expert_used = 1};
    struct dev d;
    dev_open(&d, &l, DATA_BYTES);
    expert_case(&d, &type, &some, 3);
    expert_case(&d, &type, &one, 1);
    dev_close(&d);
}

/* --- attention ------------------------------------------------------------------------------------------------------------ */

static const int kv_types[] = {QT_F32, QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
static const int dims[] = {8, 16, 32, 40, 64, 80, 96, 112, 128, 192, 256};
static const int groups[] = {1, 2, 3, 4, 5};
static const int tokens[] = {N, N + 1, 64, 65};
static const int starts[] = {0, 1, 31, 32, 223, 224, 256, 300, 520};
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
                           .n_kv = 1 + (int)(test_rand(seed) % 2), .n_tok = PICK(tokens, seed), .pos0 = PICK(starts, seed)};
        s.dim_v = test_rand(seed) % 3 ? s.dim_k : PICK(dims, seed);
        if (test_rand(seed) % 3 == 0) s.window = 1 + (int64_t)(test_rand(seed) % 400);
    } while (!fits(s.type_k, s.dim_k) || !fits(s.type_v, s.dim_v));
    return s;
}

static const char *describe(const struct shape *s) {
    static char text[200];
    snprintf(text, sizeof text, "K %s[%d] V %s[%d] heads %d x %d, %d tokens at %lld, window %lld", quant_name(s->type_k), s->dim_k,
             quant_name(s->type_v), s->dim_v, s->n_kv, s->group, s->n_tok, (long long)s->pos0, (long long)s->window);
    return text;
}

/* A KV cache of one layer on the host and on the device, with the same bytes; every other byte is 0xff. */
struct both {
    struct kv *host, dev;
    struct kv_layer layer;
};

static void both_open(struct dev *d, struct both *b, const struct shape *s, int64_t n_ctx, int n_tok) {
    struct kv_shape shape = {s->n_kv, s->dim_k, s->dim_v, s->window};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = n_tok, .type_k = s->type_k, .type_v = s->type_v};
    ok(kv_open(&b->host, &spec));
    memset(b->host->layers[0].base, 0xff, b->host->layers[0].bytes);
    b->dev = *b->host;
    b->layer = b->host->layers[0];
    b->dev.layers = &b->layer;
    b->layer.base = dev_new(d, NULL, b->layer.bytes);
}

/* Positions 0 .. n of k and v, by the reference that test_gpu_ops.c holds kv_put against. */
static void both_put(struct dev *d, struct both *b, int64_t n, const float *k, const float *v) {
    const struct kv_layer *l = &b->host->layers[0];
    for (int64_t p = 0; p < n; p++)
        for (int h = 0; h < l->n_kv; h++)
            kv_put_ref(b->host, 0, p, h, k + (p * l->n_kv + h) * l->head_dim_k, v + (p * l->n_kv + h) * l->head_dim_v);
    dev_write(d, b->layer.base, l->base, l->bytes);
}

static void check_rows(const struct attn_args *a, const float *o, const struct shape *s, int step) {
    double *want = malloc(sizeof *want * (size_t)(a->n_head * s->dim_v)), *tol = malloc(sizeof *tol * (size_t)a->n_head);
    for (int t = 0; t < a->n_tok; t = t == a->n_tok - 1 || t + step < a->n_tok ? t + step : a->n_tok - 1) {
        ref_attn_row_half(want, tol, a, t);
        for (int i = 0; i < a->n_head * s->dim_v; i++) {
            double got = o[(size_t)t * (size_t)(a->n_head * s->dim_v) + (size_t)i];
            if (!(fabs(got - want[i]) <= tol[i / s->dim_v]))
                fail_msg("%s: token %d head %d dim %d is %.9g, want %.9g +- %.2g", describe(s), t, i / s->dim_v, i % s->dim_v, got,
                         want[i], tol[i / s->dim_v]);
        }
    }
    free(want), free(tol);
}

/* Attention on the device of a host record's arguments. Caller frees. */
static float *attend(struct dev *d, struct both *b, const struct attn_args *a, const struct shape *s) {
    struct attn_args g = *a;
    size_t n_o = (size_t)(a->n_tok * a->n_head * s->dim_v) * 4;
    float *o = malloc(n_o);
    g.kv = &b->dev;
    g.q = dev_new(d, a->q, (size_t)(a->n_tok * a->n_head * s->dim_k) * 4);
    g.o = dev_new(d, NULL, n_o);
    ok(d->t->attn(d->t, &g));
    ok(gpu_ops_check(d->ops));
    dev_read(d, o, g.o, n_o);
    add_digest(o, n_o);
    return o;
}

/* scale_q, scale_k, scale_v: powers of two that the case multiplies its data by. */
static void attention_case(struct dev *d, const struct shape *s, uint64_t *seed, float scale_q, float scale_k, float scale_v) {
    int n_head = s->n_kv * s->group;
    int64_t n = s->pos0 + s->n_tok;
    struct both b;
    both_open(d, &b, s, n + 100, 1024);
    float *k = normals((size_t)(n * s->n_kv * s->dim_k), seed, scale_k), *v = normals((size_t)(n * s->n_kv * s->dim_v), seed, scale_v);
    float *q = normals((size_t)(s->n_tok * n_head * s->dim_k), seed, 1.5f * scale_q);
    both_put(d, &b, n, k, v);
    struct attn_args a = {.q = q, .kv = b.host, .pos0 = s->pos0, .n_tok = s->n_tok, .n_head = n_head, .window = s->window,
                          .scale = 1 / sqrtf((float)s->dim_k)};
    float *o = attend(d, &b, &a, s);
    check_rows(&a, o, s, 16);
    kv_close(b.host);
    free(k), free(v), free(q), free(o);
    dev_next_case(d);
}

static void attention(void) {
    int n_case = getenv("TEST_CASES") ? atoi(getenv("TEST_CASES")) : 25;
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    uint64_t seed = getenv("TEST_SEED") ? strtoull(getenv("TEST_SEED"), NULL, 10) : 1;
    for (int i = 0; i < n_case; i++) {
        struct shape s = random_shape(&seed, i);
        attention_case(&d, &s, &seed, 1, 1, 1);
    }
    dev_close(&d);
}

/* Queries, keys and values far beyond what half can hold, and far below. */
static void attention_ranges(void) {
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    uint64_t seed = 8;
    for (int i = 0; i < 5; i++) {
        struct shape s = {kv_types[i], kv_types[(i + 2) % 5], 64, 64, 2, 1, N, 240, 0};
        bool wide_k = s.type_k == QT_F32 || s.type_k == QT_BF16, wide_v = s.type_v == QT_F32 || s.type_v == QT_BF16;
        attention_case(&d, &s, &seed, wide_k ? 0x1p-60f : 0x1p-10f, wide_k ? 0x1p60f : 0x1p10f, wide_v ? 0x1p80f : 0x1p12f);
        attention_case(&d, &s, &seed, wide_k ? 0x1p60f : 0x1p8f, wide_k ? 0x1p-60f : 0x1p-8f, wide_v ? 0x1p-80f : 0x1p-8f);
    }
    dev_close(&d);
}

/* Every position counts the same and values are small whole numbers, which half holds: the mean is exact but for a division,
 * and one position too many or too few shows. Then scores as large as half cannot hold, one of which decides. */
static void attention_masks(void) {
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    static const struct shape shapes[] = {{QT_F16, QT_F16, 32, 16, 3, 2, 65, 0, 0},    {QT_F16, QT_F16, 32, 32, 5, 1, 64, 250, 0},
                                          {QT_F16, QT_F16, 16, 48, 1, 2, N, 500, 37},  {QT_F16, QT_F16, 64, 16, 2, 1, 65, 255, 256},
                                          {QT_F32, QT_BF16, 16, 16, 2, 1, N, 300, 33}, {QT_F16, QT_F16, 16, 16, 1, 1, 70, 0, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++, dev_next_case(&d)) {
        const struct shape *s = &shapes[i];
        int64_t n = s->pos0 + s->n_tok;
        int n_head = s->n_kv * s->group;
        struct both b;
        both_open(&d, &b, s, n + 300, 1024);
        float *k = calloc((size_t)(n * s->n_kv * s->dim_k), 4), *v = malloc((size_t)(n * s->n_kv * s->dim_v) * 4);
        float *q = calloc((size_t)(s->n_tok * n_head * s->dim_k), 4);
        for (int64_t j = 0; j < n * s->n_kv * s->dim_v; j++) v[j] = (float)((j / s->dim_v * 37 + j % s->dim_v * 11) % 101);
        for (int64_t j = 0; j < n * s->n_kv; j++) k[j * s->dim_k + 5] = j / s->n_kv % 50 == 7 ? 100 : -100;
        both_put(&d, &b, n, k, v);
        struct attn_args a = {.q = q, .kv = b.host, .pos0 = s->pos0, .n_tok = s->n_tok, .n_head = n_head, .window = s->window, .scale = 1};
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t j = 0; j < s->n_tok * n_head && pass; j++) q[j * s->dim_k + 5] = 1e30f;
            float *o = attend(&d, &b, &a, s);
            for (int64_t j = 0; j < (int64_t)s->n_tok * n_head * s->dim_v; j++) {
                int64_t row = j / s->dim_v, hi = s->pos0 + row / n_head + 1, lo = s->window && hi > s->window ? hi - s->window : 0;
                double sum = 0, count = 0;
                bool chosen = false;
                for (int64_t p = lo; p < hi; p++) chosen |= p % 50 == 7;
                for (int64_t p = lo; p < hi; p++) {
                    if (pass && chosen && p % 50 != 7) continue;
                    sum += v[(p * s->n_kv + row % n_head / s->group) * s->dim_v + j % s->dim_v];
                    count++;
                }
                if (!(fabs(o[j] - sum / count) <= 1e-6 * (1 + sum / count)))
                    fail_msg("%s, pass %d: row %lld dim %lld is %.9g, the mean is %.9g", describe(s), pass, (long long)row, (long long)(j % s->dim_v),
                             o[j], sum / count);
            }
            free(o);
        }
        kv_close(b.host);
        free(k), free(v), free(q);
    }
    dev_close(&d);
}

/* A window layer whose ring goes round many times. */
static void rings(void) {
    struct shape s = {QT_F16, QT_F16, 32, 32, 2, 1, N, 0, 300}, quant = {QT_Q8_0, QT_Q4_0, 32, 32, 2, 1, N, 0, 300};
    struct dev d;
    struct ops_limits l = small;
    l.n_ctx = 100000;
    dev_open(&d, &l, DATA_BYTES);
    uint64_t seed = 5;
    for (int pass = 0; pass < 2; pass++, dev_next_case(&d)) {
        struct shape *p = pass ? &quant : &s;
        struct both b;
        both_open(&d, &b, p, 100000, N);
        assert_true(b.layer.ring);
        size_t mark = gpu_arena_used(d.arena);
        for (p->pos0 = 0; p->pos0 < 2000; p->pos0 += N) {
            float *k = normals(N * 32, &seed, 1), *v = normals(N * 32, &seed, 1), *q = normals(N * 64, &seed, 1);
            ok(d.t->kv_put(d.t, &b.dev, 0, p->pos0, N, dev_new(&d, k, N * 32 * 4), dev_new(&d, v, N * 32 * 4)));
            for (int t = 0; t < N; t++) kv_put_ref(b.host, 0, p->pos0 + t, 0, k + t * 32, v + t * 32);
            struct attn_args a = {.q = q, .kv = b.host, .pos0 = p->pos0, .n_tok = N, .n_head = 2, .window = 300, .scale = 0.2f};
            if (p->pos0 / N % 7 == 6) {
                float *o = attend(&d, &b, &a, p);
                check_rows(&a, o, p, 11);
                free(o);
            }
            free(k), free(v), free(q);
            ok(gpu_stream_sync(d.stream));
            gpu_arena_release(d.arena, mark);
        }
        kv_close(b.host);
    }
    dev_close(&d);
}

/* Pages in several calls give the bits of one call, whatever the pieces. */
static void batches(void) {
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    uint64_t seed = 6;
    static const struct shape shapes[] = {{QT_F16, QT_F16, 64, 64, 3, 2, N, 1000, 0}, {QT_Q8_0, QT_Q4_0, 32, 32, 2, 1, 65, 900, 0},
                                          {QT_BF16, QT_F32, 16, 144, 1, 1, N, 800, 500}, {QT_F16, QT_F32, 128, 128, 2, 1, 40, 770, 0}};
    static const int pieces[][5] = {{5, 0}, {1, 1, 1, 1, 1}, {2, 3, 0}, {4, 1, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++, dev_next_case(&d)) {
        const struct shape *s = &shapes[i];
        int64_t n = s->pos0 + s->n_tok, end = (n + KV_PAGE - 1) / KV_PAGE;
        int n_head = s->n_kv * s->group;
        struct both b;
        both_open(&d, &b, s, n, 100);
        float *k = normals((size_t)(n * s->n_kv * s->dim_k), &seed, 1), *v = normals((size_t)(n * s->n_kv * s->dim_v), &seed, 1);
        for (int64_t j = 0; j < n * s->n_kv * s->dim_v && s->type_v == QT_F32; j++) v[j] *= j / (KV_PAGE * s->n_kv * s->dim_v) % 2 ? 1e9f : 1; /* pages of different scale */
        float *q = normals((size_t)(s->n_tok * n_head * s->dim_k), &seed, 1);
        both_put(&d, &b, n, k, v);
        const struct kv_layer *l = &b.layer;
        size_t rows = (size_t)(s->n_tok * n_head), out = rows * (size_t)s->dim_v * 4;
        struct attn_prefill_args a = {
            .kv = {.base = l->base, .n_slot = l->n_slot, .ring = l->ring, .n_kv = l->n_kv, .dim_k = l->head_dim_k, .dim_v = l->head_dim_v,
                   .type_k = l->type_k, .type_v = l->type_v, .rotate_k = l->rotate_k, .rotate_v = l->rotate_v, .ks_off = l->ks_off,
                   .v_off = l->v_off, .vs_off = l->vs_off, .head_bytes = l->head_bytes, .page_bytes = l->page_bytes},
            .q = dev_new(&d, q, rows * (size_t)s->dim_k * 4), .pos0 = s->pos0, .window = s->window, .smem_bytes = d.g->info.smem_bytes,
            .n_tok = s->n_tok, .n_head = n_head, .scale = 0.1f, .bad = dev_new(&d, NULL, 8)};
        a.q_half = dev_new(&d, NULL, rows * 256 * 2);
        a.q_exp = dev_new(&d, NULL, rows * 4);
        a.state = dev_new(&d, NULL, rows * ATTN_STATE * 4);
        a.stage = dev_new(&d, NULL, (size_t)end * attn_stage_halves(&a.kv) * 2 + 2);
        a.stage_exp = dev_new(&d, NULL, (size_t)(end * s->n_kv * 2) * 4);
        float *first = malloc(out), *o = malloc(out);
        for (size_t w = 0; w < 4; w++) {
            a.o = dev_new(&d, NULL, out);
            a.page_end = 0;
            for (int c = 0; c < 5 && pieces[w][c]; c++) {
                a.page_first = a.page_end;
                a.page_end = a.page_first + pieces[w][c] > end ? end : a.page_first + pieces[w][c];
                a.first = c == 0;
                a.last = a.page_end == end;
                assert_int_equal(attn_prefill_launch(&a, d.stream->s), cudaSuccess);
                if (a.last) break;
            }
            assert_true(a.last);
            dev_read(&d, w ? o : first, a.o, out);
            if (w && memcmp(o, first, out)) fail_msg("%s: other bits when pages come in pieces (way %zu)", describe(s), w);
        }
        struct attn_args ref = {.q = q, .kv = b.host, .pos0 = s->pos0, .n_tok = s->n_tok, .n_head = n_head, .window = s->window, .scale = 0.1f};
        check_rows(&ref, first, s, 16);
        add_digest(first, out);
        kv_close(b.host);
        free(k), free(v), free(q), free(first), free(o);
    }
    dev_close(&d);
}

/* What is not a number is named afterwards, with the smallest position; what was not opened for is refused. */
static void bad_values(void) {
    struct shape s = {QT_F16, QT_F16, 64, 64, 1, 2, N, 0, 0};
    struct dev d;
    dev_open(&d, &small, DATA_BYTES);
    struct both b;
    both_open(&d, &b, &s, 400, 400);
    uint64_t seed = 3;
    float *x = normals(400 * 128, &seed, 1), *q = normals(N * 128, &seed, 1);
    both_put(&d, &b, 400, x, x);
    q[20 * 128 + 64] = NAN;
    q[25 * 128] = NAN;
    struct attn_args a = {.o = dev_new(&d, NULL, N * 128 * 4), .q = dev_new(&d, q, N * 128 * 4), .kv = &b.dev, .pos0 = 100, .n_tok = N,
                          .n_head = 2, .scale = 1};
    ok(d.t->attn(d.t, &a));
    assert_int_equal(gpu_ops_check(d.ops), ERR_NUMERIC);
    assert_non_null(strstr(err_text(), "position 120"));
    ok(gpu_ops_check(d.ops));
    a.n_tok = small.n_tok + 1;
    assert_int_equal(d.t->attn(d.t, &a), ERR_ARG);
    kv_close(b.host);
    free(x), free(q);
    dev_close(&d);
}

/* --- faults --------------------------------------------------------------------------------------------------------------- */

#if defined(GPU_EMU)
/* Open, a product, experts, attention; with nth, the nth CUDA call fails: a code, everything closes, nothing is left. Returns
 * the calls made. */
static long once(long nth, int code) {
    const struct ops_limits l = {.n_tok = N, .cols = 32, .rows = 32, .n_head = 1, .n_kv = 1, .head_dim = 32, .n_ctx = 256, .n_expert = 2,
                                 .n_expert_used = 1};
    struct gpu *g = NULL;
    struct gpu_arena *a = NULL;
    struct gpu_stream *st = NULL;
    struct gpu_ops *ops = NULL;
    unsigned char *d = NULL;
    enum { PIECE = N * 64 * 4, PIECES = 8 };
    struct kv_shape shape = {1, 32, 32, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = 256, .n_tok = N, .type_k = QT_Q8_0, .type_v = QT_Q4_0};
    struct kv_layer layer;
    size_t kv_bytes;
    ok(kv_plan(&layer, &kv_bytes, &spec));
    struct kv kv = {.n_layer = 1, .layers = &layer, .n_ctx = 256};
    emu_reset(NULL);
    long before = emu_calls("any");
    if (nth) emu_fail("any", nth, code, 0);
    int rc = gpu_open(&g, 0);
    if (!rc) rc = gpu_arena_open(&a, g, (4 << 20) + gpu_ops_scratch_bytes(&l));
    if (!rc) rc = gpu_stream_open(&st, g);
    if (!rc) rc = gpu_ops_open(&ops, g, a, st, &l);
    if (!rc) rc = gpu_alloc((void **)&d, a, PIECES * PIECE + kv_bytes, "data");
    if (!rc) rc = gpu_fill(st, d, 0, PIECES * PIECE + kv_bytes);
    if (!rc) {
        struct ops *t = gpu_ops_table(ops);
        float *x = (float *)(void *)d, *y = (float *)(void *)(d + PIECE);
        struct mat w = {d + 2 * PIECE, QT_Q4_0, 32, 32};
        struct matmul m = {.x = x, .cols = 32, .n_tok = N, .n = 1, .out = {{&w, y, x}}};
        struct experts_args e = {.y = y, .x = x, .ids = (int32_t *)(void *)(d + 3 * PIECE), .weight = x, .n_tok = N, .n_used = 1, .n_expert = 2,
                                 .gate = w, .up = w, .down = w, .act = ACT_SILU};
        layer.base = d + PIECES * PIECE;
        struct attn_args at = {.o = y, .q = x, .kv = &kv, .n_tok = N, .n_head = 1, .scale = 1};
        rc = t->matmul(t, &m);
        if (!rc) rc = t->experts(t, &e);
        if (!rc) rc = t->attn(t, &at);
        if (!rc) rc = gpu_ops_check(ops);
    }
    long calls = emu_calls("any") - before;
    if (nth && rc != ERR_DEVICE && rc != ERR_BUDGET) fail_msg("call %ld failed with %d, and the result is %d (%s)", nth, code, rc, err_text());
    if (!nth && rc) fail_msg("%s", err_text());
    emu_fail_clear();
    if (st) (void)gpu_stream_sync(st);
    gpu_ops_close(ops);
    gpu_stream_close(st);
    gpu_arena_close(a);
    gpu_close(g);
    if (emu_leaks()) fail_msg("call %ld failed with %d (%s) and something was left open", nth, code, err_text());
    return calls;
}

static void every_call_may_fail(void **state) {
    (void)state;
    const long made = once(0, 0);
    if (made < 30) fail_msg("only %ld calls", made);
    for (long n = 1; n <= made; n++) {
        once(n, 0);                         /* as that call fails */
        once(n, cudaErrorMemoryAllocation); /* and with a code that any may return */
    }
    emu_reset(NULL);
}
#endif

ORDERS(products)
ORDERS(product_ranges)
ORDERS(product_edges)
ORDERS(experts)
ORDERS(attention)
ORDERS(attention_ranges)
ORDERS(attention_masks)
ORDERS(rings)
ORDERS(batches)
ORDERS(bad_values)

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(products_in_all_orders),         cmocka_unit_test(product_ranges_in_all_orders),
        cmocka_unit_test(product_edges_in_all_orders),    cmocka_unit_test(experts_in_all_orders),
        cmocka_unit_test(expert_tiles),                   cmocka_unit_test(attention_in_all_orders),
        cmocka_unit_test(attention_ranges_in_all_orders), cmocka_unit_test(attention_masks_in_all_orders),
        cmocka_unit_test(rings_in_all_orders),            cmocka_unit_test(batches_in_all_orders),
        cmocka_unit_test(bad_values_in_all_orders),
#if defined(GPU_EMU)
        cmocka_unit_test(every_call_may_fail),
#endif
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
