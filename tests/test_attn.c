/* test_attn.c: CPU attention and KV writes against the reference in double, for every usable kernel build. */
#include "core/err.h"
#include "core/quant.h"
#include "cpu/impl.h"
#include "tests/ref_attn.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int types[] = {QT_F32, QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
static const int dims[] = {8, 16, 32, 40, 64, 80, 96, 112, 128, 192, 256};
static const int groups[] = {1, 2, 3, 4, 5, 6, 8, 10};
static const int tokens[] = {1, 2, 7, 8, 9, 33, 70};
static const int starts[] = {0, 1, 15, 16, 255, 256, 257, 1000};

#define PICK(array, seed) (array)[test_rand(seed) % (sizeof(array) / sizeof *(array))]

struct shape {
    int type_k, type_v, dim_k, dim_v, group, n_kv, n_tok;
    int64_t pos0, window;
};

/* The attention part of the CPU back end alone. */
static void backend_open(struct cpu *c, enum isa isa, int n_thread, const struct shape *s, int64_t n_ctx) {
    memset(c, 0, sizeof *c);
    c->opts.n_thread = n_thread;
    c->opts.isa = isa;
    c->opts.limits = (struct ops_limits){.n_tok = 1024, .n_head = s->group * s->n_kv, .n_kv = s->n_kv, .n_ctx = n_ctx,
                                         .head_dim = s->dim_k > s->dim_v ? s->dim_k : s->dim_v};
    assert_int_equal(pool_open(&c->pool, n_thread, NULL, 0), 0);
    assert_int_equal(attn_open(c), 0);
}

static void backend_close(struct cpu *c) {
    attn_close(c);
    pool_close(c->pool);
}

static struct kv *kv_of(const struct shape *s, int64_t n_ctx, int n_tok) {
    struct kv_shape shape = {s->n_kv, s->dim_k, s->dim_v, s->window};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = n_ctx, .n_tok = n_tok, .type_k = s->type_k, .type_v = s->type_v};
    struct kv *kv;
    if (kv_open(&kv, &spec)) fail_msg("%s", err_text());
    return kv;
}

static float *normals(size_t n, uint64_t *seed, float scale) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_normal(seed);
    return x;
}

/* Everything that was never written reads as NaN. */
static void poison(struct kv *kv) {
    for (int il = 0; il < kv->n_layer; il++) memset(kv->layers[il].base, 0xff, kv->layers[il].bytes);
}

static const char *describe(const struct shape *s, enum isa isa) {
    static char text[200];
    snprintf(text, sizeof text, "%s K %s[%d] V %s[%d] heads %d x %d, %d tokens at %lld, window %lld", isa_name(isa),
             quant_name(s->type_k), s->dim_k, quant_name(s->type_v), s->dim_v, s->n_kv, s->group, s->n_tok, (long long)s->pos0,
             (long long)s->window);
    return text;
}

static void check(const struct attn_args *a, const struct shape *s, enum isa isa) {
    double *want = malloc(sizeof *want * (size_t)a->n_head * (size_t)s->dim_v), tol[256];
    for (int t = 0; t < a->n_tok; t += a->n_tok > 9 ? 5 : 1) {
        ref_attn_row(want, tol, a, t);
        for (int i = 0; i < a->n_head * s->dim_v; i++) {
            double got = a->o[(size_t)t * (size_t)(a->n_head * s->dim_v) + (size_t)i];
            if (!(fabs(got - want[i]) <= tol[i / s->dim_v]))
                fail_msg("%s: token %d head %d dim %d is %.9g, want %.9g +- %.2g", describe(s, isa), t, i / s->dim_v, i % s->dim_v,
                         got, want[i], tol[i / s->dim_v]);
        }
    }
    free(want);
}

static struct shape random_shape(uint64_t *seed) {
    struct shape s;
    do {
        s = (struct shape){.type_k = PICK(types, seed), .type_v = PICK(types, seed), .dim_k = PICK(dims, seed), .group = PICK(groups, seed),
                           .n_kv = 1 + (int)(test_rand(seed) % 3), .n_tok = PICK(tokens, seed), .pos0 = PICK(starts, seed)};
        s.dim_v = test_rand(seed) % 3 ? s.dim_k : PICK(dims, seed);
        if (test_rand(seed) % 3 == 0) s.window = 1 + (int64_t)(test_rand(seed) % 600);
    } while ((s.dim_k % 32 && (s.type_k == QT_Q8_0 || s.type_k == QT_Q4_0)) || (s.dim_v % 32 && (s.type_v == QT_Q8_0 || s.type_v == QT_Q4_0)));
    return s;
}

/* Stores positions 0 .. pos0 + n_tok through kv_put in pieces, attends the last n_tok. */
static void run_case(const struct shape *s, enum isa isa, int n_thread, uint64_t seed, float *o) {
    struct cpu c;
    int64_t n = s->pos0 + s->n_tok;
    int n_head = s->n_kv * s->group;
    backend_open(&c, isa, n_thread, s, n + 100);
    struct kv *kv = kv_of(s, n + 100, 1024);
    poison(kv);
    float *k = normals((size_t)n * (size_t)(s->n_kv * s->dim_k), &seed, 1), *v = normals((size_t)n * (size_t)(s->n_kv * s->dim_v), &seed, 1);
    float *q = normals((size_t)s->n_tok * (size_t)(n_head * s->dim_k), &seed, 1.5f);
    for (int64_t p = 0; p < n;) {
        int64_t part = 1 + (int64_t)(test_rand(&seed) % 300);
        if (part > n - p) part = n - p;
        if (c.ops.kv_put(&c.ops, kv, 0, p, (int)part, k + p * s->n_kv * s->dim_k, v + p * s->n_kv * s->dim_v)) fail_msg("%s", err_text());
        p += part;
    }
    struct attn_args a = {.o = o, .q = q, .kv = kv, .pos0 = s->pos0, .n_tok = s->n_tok, .n_head = n_head, .window = s->window,
                          .scale = 1 / sqrtf((float)s->dim_k)};
    if (c.ops.attn(&c.ops, &a)) fail_msg("%s: %s", describe(s, isa), err_text());
    if (n_thread == 1) check(&a, s, isa);
    free(k), free(v), free(q);
    kv_close(kv);
    backend_close(&c);
}

static void random_shapes_match_the_reference(void **state) {
    (void)state;
    int n_case = getenv("TEST_CASES") ? atoi(getenv("TEST_CASES")) : 100;
    uint64_t seed = getenv("TEST_SEED") ? strtoull(getenv("TEST_SEED"), NULL, 10) : 1;
    float *o = malloc(sizeof *o * 70 * 30 * 256), *o2 = malloc(sizeof *o * 70 * 30 * 256);
    for (int i = 0; i < n_case; i++) {
        struct shape s = random_shape(&seed);
        uint64_t data = test_rand(&seed);
        size_t bytes = sizeof *o * (size_t)(s.n_tok * s.n_kv * s.group * s.dim_v);
        for (int isa = 0; isa < ISA_COUNT; isa++) {
            if (!isa_usable(isa)) continue;
            run_case(&s, isa, 1, data, o);
            for (int n_thread = 2; n_thread <= 3; n_thread++) {
                run_case(&s, isa, n_thread, data, o2);
                if (memcmp(o, o2, bytes)) fail_msg("%s: other bits with %d threads (case %d)", describe(&s, isa), n_thread, i);
            }
        }
    }
    free(o), free(o2);
}

/* kv_put gives the bytes of the reference packing, whatever the pieces. */
static void stored_bytes_are_those_of_the_reference(void **state) {
    (void)state;
    uint64_t seed = 3;
    for (int i = 0; i < 40; i++) {
        struct shape s = random_shape(&seed);
        int64_t n = 1 + (int64_t)(test_rand(&seed) % 700);
        s.window = 0;
        float *k = normals((size_t)n * (size_t)(s.n_kv * s.dim_k), &seed, 3), *v = normals((size_t)n * (size_t)(s.n_kv * s.dim_v), &seed, 3);
        for (int64_t j = 0; j < n * s.n_kv * s.dim_k; j += 7) k[j] = (float)(int)(k[j] * 4) / 8; /* ties, zeros */
        memset(v, 0, sizeof *v * (size_t)s.dim_v);
        v[0] = 1e-42f;
        struct kv *want = kv_of(&s, 800, 800);
        for (int64_t p = 0; p < n; p++)
            for (int h = 0; h < s.n_kv; h++) kv_put_ref(want, 0, p, h, k + (p * s.n_kv + h) * s.dim_k, v + (p * s.n_kv + h) * s.dim_v);
        for (int isa = 0; isa < ISA_COUNT; isa++) {
            if (!isa_usable(isa)) continue;
            struct cpu c;
            backend_open(&c, isa, 2, &s, 800);
            struct kv *kv = kv_of(&s, 800, 800);
            for (int64_t p = 0; p < n;) {
                int64_t part = 1 + (int64_t)(test_rand(&seed) % 400);
                if (part > n - p) part = n - p;
                assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, p, (int)part, k + p * s.n_kv * s.dim_k, v + p * s.n_kv * s.dim_v), 0);
                p += part;
            }
            if (memcmp(kv->layers[0].base, want->layers[0].base, kv->layers[0].bytes)) fail_msg("%s, %lld positions: other bytes", describe(&s, isa), (long long)n);
            kv_close(kv);
            backend_close(&c);
        }
        kv_close(want);
        free(k), free(v);
    }
}

/* Tokens from .. to attended in calls of `chunk`; all positions below `to` are stored. */
static void attend_in_chunks(const struct shape *s, enum isa isa, int from, int to, int chunk, const float *k, const float *v,
                             const float *q, float *o) {
    struct cpu c;
    int n_head = s->group * s->n_kv;
    backend_open(&c, isa, 2, s, to);
    struct kv *kv = kv_of(s, to, to);
    poison(kv);
    for (int p = 0; p < from; p += 500) {
        int n = from - p < 500 ? from - p : 500;
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, p, n, k + p * s->n_kv * s->dim_k, v + p * s->n_kv * s->dim_v), 0);
    }
    for (int p = from; p < to; p += chunk) {
        int n = chunk < to - p ? chunk : to - p;
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, p, n, k + p * s->n_kv * s->dim_k, v + p * s->n_kv * s->dim_v), 0);
        struct attn_args a = {.o = o + (p - from) * n_head * s->dim_v, .q = q + (p - from) * n_head * s->dim_k, .kv = kv, .pos0 = p,
                              .n_tok = n, .n_head = n_head, .window = s->window, .scale = 0.125f};
        if (c.ops.attn(&c.ops, &a)) fail_msg("%s: %s", describe(s, isa), err_text());
    }
    kv_close(kv);
    backend_close(&c);
}

/* In one call, in chunks and token by token: the same bits, at the start and where runs have several pages. */
static void chunks_do_not_change_results(void **state) {
    (void)state;
    const struct shape shapes[] = {{QT_F16, QT_F16, 64, 64, 3, 2, 0, 0, 0},   {QT_Q8_0, QT_Q8_0, 128, 128, 4, 1, 0, 0, 0},
                                   {QT_Q4_0, QT_Q4_0, 64, 64, 2, 2, 0, 0, 0}, {QT_BF16, QT_Q8_0, 80, 96, 5, 1, 0, 0, 300},
                                   {QT_F32, QT_F16, 40, 40, 1, 2, 0, 0, 0}};
    const int ranges[2][2] = {{0, 270}, {5180, 5230}}, chunks[] = {270, 1, 7, 64};
    for (size_t i = 0; i < 2 * sizeof shapes / sizeof *shapes; i++) {
        const struct shape *s = &shapes[i / 2];
        int from = ranges[i % 2][0], to = ranges[i % 2][1], n_head = s->group * s->n_kv;
        uint64_t seed = 77;
        size_t count = (size_t)((to - from) * n_head * s->dim_v);
        float *k = normals((size_t)(to * s->n_kv * s->dim_k), &seed, 1), *v = normals((size_t)(to * s->n_kv * s->dim_v), &seed, 1);
        float *q = normals((size_t)((to - from) * n_head * s->dim_k), &seed, 1), *o = malloc(sizeof *o * count), *first = malloc(sizeof *o * count);
        for (int isa = 0; isa < ISA_COUNT; isa++)
            for (int j = 0; j < 4 && isa_usable(isa); j++) {
                attend_in_chunks(s, isa, from, to, chunks[j], k, v, q, j ? o : first);
                for (size_t x = 0; j && x < count; x++)
                    if (o[x] != first[x])
                        fail_msg("%s: chunks of %d give %.9g at position %zu, one call gives %.9g", describe(s, isa), chunks[j], o[x],
                                 (size_t)from + x / (size_t)(n_head * s->dim_v), first[x]);
            }
        free(k), free(v), free(q), free(o), free(first);
    }
}

/* A window layer whose ring goes round many times. */
static void windows_run_on_a_ring(void **state) {
    (void)state;
    struct shape s = {QT_F16, QT_F16, 64, 64, 2, 1, 50, 0, 512};
    uint64_t seed = 5;
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) continue;
        struct cpu c;
        backend_open(&c, isa, 2, &s, 100000);
        struct kv *kv = kv_of(&s, 100000, 50);
        assert_true(kv->layers[0].ring);
        poison(kv);
        float *k = normals(50 * 64, &seed, 1), *v = normals(50 * 64, &seed, 1), *q = normals(50 * 128, &seed, 1), o[50 * 128];
        for (s.pos0 = 0; s.pos0 + 50 <= 4000; s.pos0 += 50) {
            for (int i = 0; i < 50 * 64; i++) k[i] = test_normal(&seed), v[i] = test_normal(&seed);
            assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, s.pos0, 50, k, v), 0);
            struct attn_args a = {.o = o, .q = q, .kv = kv, .pos0 = s.pos0, .n_tok = 50, .n_head = 2, .window = 512, .scale = 0.125f};
            if (c.ops.attn(&c.ops, &a)) fail_msg("%s", err_text());
            if (s.pos0 % 350 == 0) check(&a, &s, isa);
            a.window = 0;
            assert_int_equal(c.ops.attn(&c.ops, &a), ERR_ARG);
            a.window = 512, a.n_tok = 600, a.pos0 = 0;
            assert_int_equal(c.ops.attn(&c.ops, &a), ERR_ARG);
        }
        free(k), free(v), free(q);
        kv_close(kv);
        backend_close(&c);
    }
}

/* Keys with a bias of 300 and queries of 300 (products of 10^7), values of +-60: finite and as in double. */
static void large_keys_and_values_stay_finite(void **state) {
    (void)state;
    for (int t = 0; t < 5; t++)
        for (int isa = 0; isa < ISA_COUNT; isa++) {
            if (!isa_usable(isa)) continue;
            struct shape s = {types[t], types[t], 128, 128, 4, 1, 3, 0, 0};
            for (int every = 1; every <= 128; every *= 128) { /* the bias in all dims, or in one */
                struct cpu c;
                uint64_t seed = 9;
                backend_open(&c, isa, 2, &s, 600);
                struct kv *kv = kv_of(&s, 600, 600);
                float *k = normals(600 * 128, &seed, 1), *v = normals(600 * 128, &seed, 1), *q = normals(3 * 4 * 128, &seed, 1), o[3 * 4 * 128];
                for (int i = 0; i < 600 * 128; i += every) k[i] += 300;
                for (int i = 0; i < 600 * 128; i++) v[i] = v[i] > 0 ? 60 : -60;
                for (int i = 0; i < 3 * 4 * 128; i += every) q[i] += 300;
                assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, 0, 600, k, v), 0);
                struct attn_args a = {.o = o, .q = q, .kv = kv, .pos0 = 597, .n_tok = 3, .n_head = 4, .scale = 0.08838835f};
                if (c.ops.attn(&c.ops, &a)) fail_msg("%s", err_text());
                check(&a, &s, isa);
                for (int i = 0; i < 3 * 4 * 128; i++) assert_true(fabsf(o[i]) < (types[t] == QT_Q4_0 ? 120 : 61)); /* 4-bit V: coarse */
                free(k), free(v), free(q);
                kv_close(kv);
                backend_close(&c);
            }
        }
}

static void what_cannot_be_stored_is_named(void **state) {
    (void)state;
    struct shape s = {QT_F16, QT_Q8_0, 64, 64, 1, 2, 1, 0, 0};
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) continue;
        struct cpu c;
        backend_open(&c, isa, 2, &s, 400);
        struct kv *kv = kv_of(&s, 400, 400);
        float *x = calloc(400 * 128, sizeof *x), *y = calloc(400 * 128, sizeof *y);
        x[300 * 128 + 70] = 70000;
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, 0, 400, x, y), ERR_NUMERIC);
        assert_non_null(strstr(err_text(), "position 300"));
        assert_non_null(strstr(err_text(), "key of 70000"));
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, 0, 400, y, x), 0);
        y[17 * 128] = NAN;
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, 0, 20, x, y), ERR_NUMERIC);
        assert_non_null(strstr(err_text(), "position 17: a value of"));
        memset(y, 0, sizeof *y * 400 * 128);
        x[300 * 128 + 70] = 0;
        assert_int_equal(c.ops.kv_put(&c.ops, kv, 0, 0, 400, x, y), 0);
        float o[128];
        x[3] = INFINITY;
        struct attn_args a = {.o = o, .q = x, .kv = kv, .pos0 = 399, .n_tok = 1, .n_head = 2, .scale = 1};
        assert_int_equal(c.ops.attn(&c.ops, &a), ERR_NUMERIC);
        assert_non_null(strstr(err_text(), "position 399"));
        a.pos0 = 400;
        assert_int_equal(c.ops.attn(&c.ops, &a), ERR_ARG);
        a.pos0 = 0, a.n_head = 3;
        assert_int_equal(c.ops.attn(&c.ops, &a), ERR_ARG);
        free(x), free(y);
        kv_close(kv);
        backend_close(&c);
    }
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(random_shapes_match_the_reference),
        cmocka_unit_test(stored_bytes_are_those_of_the_reference),
        cmocka_unit_test(chunks_do_not_change_results),
        cmocka_unit_test(windows_run_on_a_ring),
        cmocka_unit_test(large_keys_and_values_stay_finite),
        cmocka_unit_test(what_cannot_be_stored_is_named),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
