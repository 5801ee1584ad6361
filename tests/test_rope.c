/* test_rope.c: frequencies against numbers worked out apart from this code (YaRN and Llama 3.1 values of the reference
 * implementations), and the user's options. */
#include "core/err.h"
#include "core/rope.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct rope plain(int n_rot, double base) {
    return (struct rope){.pairing = ROPE_NEOX, .n_rot = n_rot, .base = base, .scaling = ROPE_SCALING_NONE, .factor = 1,
                         .n_ctx_orig = 32768, .attn_factor = 1, .ext_factor = 1, .beta_fast = 32, .beta_slow = 1};
}

static struct rope with_yarn(int n_rot, double base, int64_t ctx, double factor) {
    struct rope r = plain(n_rot, base);
    r.scaling = ROPE_SCALING_YARN;
    r.factor = factor;
    r.n_ctx_orig = ctx;
    return r;
}

/* The known figures have 9 digits. */
static void near(const char *what, double got, double want) {
    if (!(fabs(got - want) <= 2e-9 * fabs(want))) fail_msg("%s: got %.12g, want %.12g", what, got, want);
}

struct known {
    int i;
    double f;
};

static void check_known(const struct rope *r, const struct known *k, int n, double m) {
    double f[256];
    float got;
    char what[32];
    assert_int_equal(rope_frequencies(f, &got, r, NULL, 131072), 0);
    near("magnitude", got, (double)(float)m);
    for (int j = 0; j < n; j++) {
        snprintf(what, sizeof what, "pair %d", k[j].i);
        near(what, f[k[j].i], k[j].f);
    }
}

static void plain_and_linear(void **s) {
    (void)s;
    struct rope r = plain(128, 1e6);
    double f[64], g[64];
    float m;
    assert_int_equal(rope_frequencies(f, &m, &r, NULL, 1), 0);
    assert_true(m == 1);
    assert_true(f[0] == 1);
    near("pair 32 of 64", f[32], 1e-3); /* base^(-1/2) */
    near("pair 63 of 64", f[63], 1e-6 * pow(1e6, 1.0 / 64));
    r.scaling = ROPE_SCALING_LINEAR;
    r.factor = 8;
    assert_int_equal(rope_frequencies(g, &m, &r, NULL, 1), 0);
    assert_true(m == 1);
    for (int i = 0; i < 64; i++) near("linear", g[i], f[i] / 8);
}

static void yarn_gives_the_published_numbers(void **s) {
    (void)s;
    struct rope a = with_yarn(128, 1e6, 32768, 4), b = with_yarn(64, 1e7, 262144, 4);
    const struct known ka[] = {{0, 1}, {23, 0.00697830585}, {24, 0.00537532149}, {31, 0.000802959728}, {40, 4.44569853e-05},
                               {63, 3.1023444e-07}};
    const struct known kb[] = {{14, 0.000865964323}, {15, 0.000474239823}, {18, 7.2173874e-05}, {22, 3.84981632e-06},
                               {31, 4.13704275e-08}};
    check_known(&a, ka, 6, 1.138629436);
    check_known(&b, kb, 5, 1.138629436);
    a.attn_factor = 0.5;
    check_known(&a, ka, 6, 1.138629436 * 0.5);
    a.ext_factor = 0; /* no blend, no magnitude: plain interpolation */
    const struct known kc[] = {{0, 0.25}, {32, 0.25e-3}};
    check_known(&a, kc, 2, 0.5);
}

static void llama31_divisors_are_applied(void **s) {
    (void)s;
    /* The rule of Llama 3.1 (original context 8192, factor 8, low 1, high 4) written out, and the known divisors. */
    struct rope r = plain(128, 5e5);
    double f[64], g[64];
    float m, ff[64];
    assert_int_equal(rope_frequencies(f, &m, &r, NULL, 1), 0);
    for (int i = 0; i < 64; i++) {
        double w = 2 * 3.14159265358979323846 / f[i], t = (8192 / w - 1) / 3;
        ff[i] = (float)(w < 2048 ? 1 : w > 8192 ? 8 : 1 / ((1 - t) / 8 + t));
    }
    const double known[] = {1.207484, 1.553415, 2.026313, 2.69453, 3.684253, 5.257327, 8};
    assert_true(ff[28] == 1);
    for (int i = 0; i < 7; i++) assert_float_equal(ff[29 + i], known[i], 1e-5);
    assert_int_equal(rope_frequencies(g, &m, &r, ff, 131072), 0);
    assert_true(m == 1);
    for (int i = 0; i < 64; i++) near("divided", g[i], f[i] / (double)ff[i]);
    ff[5] = 0;
    assert_int_equal(rope_frequencies(g, &m, &r, ff, 131072), ERR_FORMAT);
    ff[5] = NAN;
    assert_int_equal(rope_frequencies(g, &m, &r, ff, 131072), ERR_FORMAT);
}

static void longrope_uses_its_table_and_magnitude(void **s) {
    (void)s;
    struct rope r = plain(4, 10000);
    double f[2];
    float m, ff[2] = {2, 4};
    r.scaling = ROPE_SCALING_LONGROPE;
    r.attn_factor = 1.19;
    r.factor = 32; /* must not divide anything */
    r.n_ctx_orig = 4096;
    assert_int_equal(rope_frequencies(f, &m, &r, ff, 8192), 0);
    near("pair 0", f[0], 0.5);
    near("pair 1", f[1], 0.01 / 4);
    assert_true(m == 1.19f);
    assert_false(rope_is_long(&r, 4096));
    assert_true(rope_is_long(&r, 4097));
    assert_int_equal(rope_frequencies(f, &m, &r, NULL, 8192), ERR_ARG);
}

static void impossible_parameters_are_refused(void **s) {
    (void)s;
    double f[64];
    float m;
    struct rope r = plain(128, 1e6);
#define REFUSE(change)                                                                                                 \
    do {                                                                                                               \
        struct rope x = with_yarn(128, 1e6, 32768, 4);                                                                 \
        x.change;                                                                                                      \
        assert_int_equal(rope_frequencies(f, &m, &x, NULL, 4096), ERR_ARG);                                            \
    } while (0)
    REFUSE(n_rot = 0);
    REFUSE(n_rot = 7);
    REFUSE(base = 1);
    REFUSE(base = NAN);
    REFUSE(factor = 0.5);
    REFUSE(factor = INFINITY);
    REFUSE(n_ctx_orig = 0);
    REFUSE(ext_factor = 2);
    REFUSE(beta_fast = 0.5);
    REFUSE(attn_factor = 0);
#undef REFUSE
    assert_int_equal(rope_frequencies(f, &m, &r, NULL, 0), ERR_ARG);
}

static void user_options_change_only_what_they_name(void **s) {
    (void)s;
    const struct rope file = plain(128, 1e6);
    struct rope r = file;
    struct rope_user u = rope_user_none();
    assert_int_equal(rope_override(&r, &u), 0);
    assert_memory_equal(&r, &file, sizeof r);

    u.scaling = ROPE_SCALING_YARN;
    u.factor = 4;
    u.n_ctx_orig = 16384;
    assert_int_equal(rope_override(&r, &u), 0);
    assert_int_equal(r.scaling, ROPE_SCALING_YARN);
    assert_true(r.factor == 4 && r.n_ctx_orig == 16384 && r.base == 1e6 && r.ext_factor == 1 && r.beta_fast == 32);

    u = rope_user_none(); /* back to none */
    u.scaling = ROPE_SCALING_NONE;
    assert_int_equal(rope_override(&r, &u), 0);
    assert_true(r.scaling == ROPE_SCALING_NONE && r.factor == 1);

    u = rope_user_none();
    u.freq_scale = 0.25;
    u.freq_base = 5e5;
    assert_int_equal(rope_override(&r, &u), 0);
    assert_true(r.scaling == ROPE_SCALING_LINEAR && r.factor == 4 && r.base == 5e5);

    u.factor = 4;
    struct rope before = r;
    assert_int_equal(rope_override(&r, &u), ERR_ARG);
    u = rope_user_none();
    u.factor = 0.5;
    assert_int_equal(rope_override(&r, &u), ERR_ARG);
    u = rope_user_none();
    u.scaling = ROPE_SCALING_LONGROPE;
    assert_int_equal(rope_override(&r, &u), ERR_ARG);
    assert_memory_equal(&r, &before, sizeof r);
}

static void names_of_scalings(void **s) {
    (void)s;
    for (int i = ROPE_SCALING_NONE; i <= ROPE_SCALING_LONGROPE; i++) {
        const char *n = rope_scaling_name((enum rope_scaling)i);
        assert_int_equal(rope_scaling_from_name(n, strlen(n)), i);
    }
    assert_int_equal(rope_scaling_from_name("yar", 3), -1);
    assert_int_equal(rope_scaling_from_name("foo", 3), -1);
    assert_int_equal(rope_scaling_from_name("", 0), -1);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(plain_and_linear),
        cmocka_unit_test(yarn_gives_the_published_numbers),
        cmocka_unit_test(llama31_divisors_are_applied),
        cmocka_unit_test(longrope_uses_its_table_and_magnitude),
        cmocka_unit_test(impossible_parameters_are_refused),
        cmocka_unit_test(user_options_change_only_what_they_name),
        cmocka_unit_test(names_of_scalings),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
