/* test_elem.c: element-wise operations of every instruction set against textbook versions in double. Tolerances: a few
 * f32 roundings (1e-6 of the value) for norms and activations, whose sums are short. */
#include "core/err.h"
#include "cpu/impl.h"
#include "cpu/kern_elem.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A back end with the element-wise family only. */
static struct cpu *open_elem(enum isa isa, int n_thread) {
    struct cpu *c = calloc(1, sizeof *c);
    c->opts.isa = isa;
    assert_int_equal(pool_open(&c->pool, n_thread, NULL, 0), 0);
    assert_int_equal(elem_open(c), 0);
    return c;
}

static void close_elem(struct cpu *c) {
    elem_close(c);
    pool_close(c->pool);
    free(c);
}

static void near(const char *what, int64_t i, double got, double want, double tol) {
    if (!(fabs(got - want) <= tol * (1 + fabs(want)))) fail_msg("%s[%lld]: got %.9g, want %.9g, tolerance %g", what, (long long)i, got, want, tol);
}

static void norms(struct ops *o) {
    static const int dims[] = {1, 8, 15, 16, 17, 33, 64, 576, 1000, 5120};
    uint64_t rng = 1;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
        for (int rows = 1; rows <= 40; rows += 13) {
            int n = dims[d];
            float *x = malloc(sizeof *x * (size_t)(n * rows)), *y = malloc(sizeof *x * (size_t)(n * rows)), *w = malloc(sizeof *w * (size_t)n);
            for (int i = 0; i < n * rows; i++) x[i] = 100 * test_normal(&rng);
            for (int i = 0; i < n; i++) w[i] = test_normal(&rng);
            assert_int_equal(o->rmsnorm(o, y, x, w, rows, n, 1e-5f), 0);
            for (int r = 0; r < rows; r++) {
                double s = 0;
                for (int i = 0; i < n; i++) s += (double)x[r * n + i] * x[r * n + i];
                for (int i = 0; i < n; i++) near("rmsnorm", r * n + i, y[r * n + i], w[i] * x[r * n + i] / sqrt(s / n + 1e-5), 2e-6);
            }
            float *same = malloc(sizeof *x * (size_t)(n * rows));
            memcpy(same, x, sizeof *x * (size_t)(n * rows));
            assert_int_equal(o->rmsnorm(o, same, same, w, rows, n, 1e-5f), 0);
            assert_memory_equal(same, y, sizeof *x * (size_t)(n * rows));
            free(same);
            free(x);
            free(y);
            free(w);
        }
}

static void activations(struct ops *o) {
    static const int64_t sizes[] = {1, 15, 16, 17, 4095, 4096, 4097, 100000};
    uint64_t rng = 2;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int64_t n = sizes[k];
        float *g = malloc(sizeof *g * (size_t)n), *u = malloc(sizeof *u * (size_t)n), *y = malloc(sizeof *y * (size_t)n);
        for (int64_t i = 0; i < n; i++) g[i] = (i % 7 ? 3 : 60) * test_normal(&rng), u[i] = test_normal(&rng);
        assert_int_equal(o->glu(o, y, g, u, n, ACT_SILU), 0);
        for (int64_t i = 0; i < n; i++) near("silu", i, y[i], u[i] * g[i] / (1 + exp(-(double)g[i])), 2e-6);
        assert_int_equal(o->glu(o, y, g, u, n, ACT_GELU), 0);
        for (int64_t i = 0; i < n; i++)
            near("gelu", i, y[i], u[i] * 0.5 * g[i] * (1 + tanh(0.7978845608 * (g[i] + 0.044715 * pow(g[i], 3)))), 1e-5);
        memcpy(y, g, sizeof *y * (size_t)n);
        assert_int_equal(o->add(o, y, u, n), 0);
        for (int64_t i = 0; i < n; i++) near("add", i, y[i], (double)g[i] + u[i], 1e-7);
        memcpy(y, g, sizeof *y * (size_t)n);
        assert_int_equal(o->softcap(o, y, n, 30), 0);
        for (int64_t i = 0; i < n; i++) near("softcap", i, y[i], 30 * tanh(g[i] / 30.0), 1e-6);
        free(g);
        free(u);
        free(y);
    }
}

static void rotations(struct ops *o) {
    enum { HEADS = 3, DIM = 40, TOK = 70 };
    static const int64_t starts[] = {0, 1, 65535, 262143 - TOK, INT64_C(1) << 31};
    double freq[DIM / 2];
    uint64_t rng = 3;
    static float cs[TOK * DIM], x[TOK * HEADS * DIM], y[TOK * HEADS * DIM], norm[DIM];
    for (int i = 0; i < DIM; i++) norm[i] = test_normal(&rng);
    for (size_t s = 0; s < sizeof starts / sizeof *starts; s++)
        for (int n_rot = 2; n_rot <= DIM; n_rot += 38)
            for (int pairing = 0; pairing < 2; pairing++)
                for (int with_norm = 0; with_norm < 2; with_norm++) {
                    for (int i = 0; i < n_rot / 2; i++) freq[i] = pow(1e6, -2.0 * i / n_rot);
                    for (int i = 0; i < TOK * HEADS * DIM; i++) x[i] = y[i] = test_normal(&rng);
                    assert_int_equal(o->rope_table(o, cs, freq, n_rot / 2, 1.25f, starts[s], TOK), 0);
                    struct rope_args a = {y, TOK, HEADS, DIM, with_norm ? norm : NULL, 1e-6f, cs, n_rot, (enum rope_pairing)pairing};
                    assert_int_equal(o->rope(o, &a), 0);
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
}

static void routing(struct ops *o) {
    enum { TOK = 300, E = 64, K = 8 };
    static float logits[TOK * E], w[TOK * K];
    static int32_t ids[TOK * K];
    uint64_t rng = 4;
    for (int i = 0; i < TOK * E; i++) logits[i] = (float)(int)(test_normal(&rng) * 8) / 4; /* many ties */
    for (int norm = 0; norm < 2; norm++) {
        assert_int_equal(o->route(o, ids, w, logits, TOK, E, K, norm), 0);
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
    assert_int_equal(o->route(o, ids, w, logits, 1, E, E + 1, true), ERR_ARG);
    int32_t rows[3] = {5, 0, 299};
    assert_int_equal(o->gather(o, w, logits, rows, 3, 7), 0);
    assert_memory_equal(w + 14, logits + 299 * 7, 28);
}

static void every_build_follows_the_textbook(void **state) {
    (void)state;
    for (int i = 0; i < ISA_COUNT; i++) {
        if (!isa_usable(i)) {
            printf("skipped: this CPU lacks %s\n", isa_name(i));
            continue;
        }
        struct cpu *c = open_elem(i, 2);
        norms(&c->ops);
        activations(&c->ops);
        rotations(&c->ops);
        routing(&c->ops);
        close_elem(c);
    }
}

static void threads_give_the_same_bits(void **state) {
    (void)state;
    enum { N = 70000 };
    float *g = malloc(N * sizeof *g), *first = malloc(N * sizeof *g), *y = malloc(N * sizeof *g);
    uint64_t rng = 5;
    for (int i = 0; i < N; i++) g[i] = test_normal(&rng);
    for (int t = 1; t <= 3; t++) {
        enum isa isa;
        isa_choose(&isa, NULL);
        struct cpu *c = open_elem(isa, t);
        c->ops.glu(&c->ops, t == 1 ? first : y, g, g, N, ACT_GELU);
        if (t > 1) assert_memory_equal(first, y, N * sizeof *y);
        close_elem(c);
    }
    free(g);
    free(first);
    free(y);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_build_follows_the_textbook),
        cmocka_unit_test(threads_give_the_same_bits),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
