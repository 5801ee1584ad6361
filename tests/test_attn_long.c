/* test_attn_long.c: long contexts: 262,144 positions, and the positions where 32-bit products of positions wrap. */
#include "core/err.h"
#include "core/quant.h"
#include "cpu/impl.h"
#include "tests/ref_attn.h"
#include "tests/support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bench {
    struct cpu c;
    struct kv *kv;
    int n_kv, group, dim;
};

static void open_bench(struct bench *b, int type_k, int type_v, int n_kv, int group, int dim, int64_t n_ctx) {
    memset(b, 0, sizeof *b);
    b->n_kv = n_kv, b->group = group, b->dim = dim;
    struct kv_shape shape = {n_kv, dim, dim, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = 512, .type_k = type_k, .type_v = type_v};
    assert_int_equal(kv_open(&b->kv, &spec), 0);
    b->c.opts.n_thread = 2;
    assert_int_equal(isa_choose(&b->c.opts.isa, NULL), 0);
    b->c.opts.limits = (struct ops_limits){.n_tok = 512, .n_head = n_kv * group, .n_kv = n_kv, .head_dim = dim, .n_ctx = n_ctx};
    assert_int_equal(pool_open(&b->c.pool, 2, NULL, 0), 0);
    assert_int_equal(attn_open(&b->c), 0);
}

static void close_bench(struct bench *b) {
    attn_close(&b->c);
    pool_close(b->c.pool);
    kv_close(b->kv);
}

/* Attends n_tok tokens from pos and compares the first and the last with the reference. Returns the first output. */
static float attend(struct bench *b, int64_t pos, int n_tok, const float *q, float scale) {
    int n_head = b->n_kv * b->group;
    float *o = malloc(sizeof *o * (size_t)(n_tok * n_head * b->dim)), result;
    double *want = malloc(sizeof *want * (size_t)(n_head * b->dim)), *tol = malloc(sizeof *tol * (size_t)n_head);
    struct attn_args a = {.o = o, .q = q, .kv = b->kv, .pos0 = pos, .n_tok = n_tok, .n_head = n_head, .scale = scale};
    if (b->c.ops.attn(&b->c.ops, &a)) fail_msg("%s", err_text());
    for (int t = 0; t < n_tok; t += n_tok > 1 ? n_tok - 1 : 1) {
        ref_attn_row(want, tol, &a, t);
        for (int i = 0; i < n_head * b->dim; i++) {
            double got = o[t * n_head * b->dim + i];
            if (!(fabs(got - want[i]) <= tol[i / b->dim]))
                fail_msg("type %s, position %lld, %d tokens: token %d [%d] is %.9g, want %.9g +- %.2g", quant_name(b->kv->layers[0].type_k),
                         (long long)pos, n_tok, t, i, got, want[i], tol[i / b->dim]);
        }
    }
    result = o[0];
    free(o), free(want), free(tol);
    return result;
}

static void every_position_of_256k_counts(void **state) {
    (void)state;
    const int types[] = {QT_F16, QT_Q8_0, QT_Q4_0};
    for (int t = 0; t < 3; t++) {
        struct bench b;
        uint64_t seed = 3;
        open_bench(&b, types[t], types[t], 1, 2, 32, 262144);
        assert_int_equal(kv_fill_synthetic(b.kv, 262144, 5), 0);
        float q[12 * 2 * 32];
        for (int i = 0; i < 12 * 2 * 32; i++) q[i] = test_normal(&seed);
        attend(&b, 262143, 1, q, 0.17f);
        attend(&b, 262144 - 12, 12, q, 0.17f);
        attend(&b, 131071, 1, q, 0.17f);
        assert_int_equal(b.c.ops.kv_put(&b.c.ops, b.kv, 0, 262144, 1, q, q), ERR_ARG);
        close_bench(&b);
    }
}

/* A key at position 3 that only the query finds, asked for just above 46,340 (whose square is 2^31) and 65,535. */
static void a_needle_is_found_at_any_depth(void **state) {
    (void)state;
    struct bench b;
    open_bench(&b, QT_F16, QT_F16, 1, 1, 64, 70000);
    assert_int_equal(kv_fill_synthetic(b.kv, 70000, 5), 0);
    float k[64], v[64];
    for (int i = 0; i < 64; i++) k[i] = i % 2 ? 4.0f : -4.0f, v[i] = 100;
    assert_int_equal(b.c.ops.kv_put(&b.c.ops, b.kv, 0, 3, 1, k, v), 0);
    float *q = malloc(sizeof *q * 40 * 64);
    for (int i = 0; i < 40 * 64; i++) q[i] = k[i % 64];
    const int64_t at[] = {255, 46338, 46339, 46340, 46341, 46342, 65534, 65535, 65536, 65537, 69960};
    for (int i = 0; i < 11; i++)
        for (int n_tok = 1; n_tok <= 40; n_tok += 39) {
            float o = attend(&b, at[i], n_tok, q, 0.125f);
            if (!(o > 99.9f)) fail_msg("at %lld the needle gives %g", (long long)at[i], o);
        }
    free(q);
    close_bench(&b);
}

/* 100,000 values of +-60: an f16 sum would overflow or lose them. */
static void many_large_values_add_up(void **state) {
    (void)state;
    struct bench b;
    enum { N = 100000, DIM = 16 };
    open_bench(&b, QT_F16, QT_F16, 1, 1, DIM, N);
    float *k = calloc((size_t)N * DIM, sizeof *k), *v = malloc(sizeof *v * N * DIM), q[DIM] = {1};
    for (int i = 0; i < N * DIM; i++) v[i] = i % DIM == 0 ? 60 : i / DIM % 3 ? -60 : 60;
    for (int p = 0; p < N; p += 500) assert_int_equal(b.c.ops.kv_put(&b.c.ops, b.kv, 0, p, 500, k + p * DIM, v + p * DIM), 0);
    float o = attend(&b, N - 1, 1, q, 1);
    if (fabsf(o - 60) > 1e-4f) fail_msg("mean of 60 is %.9g", o);
    free(k), free(v);
    close_bench(&b);
}

/* More than 2^31 elements of K in a layer: a row of 32 heads of 256 dims at 300,000 positions, most never written. */
static void offsets_are_64_bit(void **state) {
    (void)state;
    struct bench b;
    enum { N = 300000, HEADS = 32, DIM = 256 };
    open_bench(&b, QT_F16, QT_F16, HEADS, 1, DIM, N);
    float *k = malloc(sizeof *k * HEADS * DIM), *v = malloc(sizeof *v * HEADS * DIM), *o = malloc(sizeof *o * HEADS * DIM);
    const int64_t at[] = {1000, 262144, 299999};
    uint64_t seed = 1;
    for (int i = 0; i < 3; i++) {
        /* A window of one position: only what was written is read. */
        for (int j = 0; j < HEADS * DIM; j++) k[j] = test_normal(&seed), v[j] = (float)(int)(100 * test_normal(&seed)) / 64;
        assert_int_equal(b.c.ops.kv_put(&b.c.ops, b.kv, 0, at[i], 1, k, v), 0);
        struct attn_args a = {.o = o, .q = k, .kv = b.kv, .pos0 = at[i], .n_tok = 1, .n_head = HEADS, .scale = 0.06f, .window = 1};
        assert_int_equal(b.c.ops.attn(&b.c.ops, &a), 0);
        assert_memory_equal(o, v, sizeof *o * HEADS * DIM);
    }
    free(k), free(v), free(o);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_position_of_256k_counts),
        cmocka_unit_test(a_needle_is_found_at_any_depth),
        cmocka_unit_test(many_large_values_add_up),
        cmocka_unit_test(offsets_are_64_bit),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
