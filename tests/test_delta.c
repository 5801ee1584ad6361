/* test_delta.c: the Gated DeltaNet layer of every instruction set against its formulas in double: the rule token by token and
 * in chunks, over long sequences and in the cases that are hard for a chunk.
 * Tolerances: keys have length 1, values, S and outputs are about 1. Sums of `dim` terms in f32 give some 1e-6; the rule
 * forgets old errors at the rate at which it forgets old values, so they do not grow with the length: 1e-5 everywhere. The
 * last norm divides by the length of an output, which may be small: 1e-4 behind it. */
#include "core/err.h"
#include "cpu/impl.h"
#include "cpu/kern_delta.h"
#include "tests/ref_delta.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!p) fail_msg("no memory for %zu bytes", bytes);
    memset(p, 0, bytes);
    return p;
}

static void near(const char *what, int64_t i, double got, double want, double tol) {
    if (!(fabs(got - want) <= tol * (1 + fabs(want))))
        fail_msg("%s[%lld]: got %.9g, want %.9g, tolerance %g", what, (long long)i, got, want, tol);
}

static const char *const forms[] = {"token by token", "in chunks"};
enum { STEPS, CHUNKS };

static void run(enum isa isa, int form, const struct delta_rows *r) {
    static struct delta_chunk w;
    if (form == STEPS) kern_delta_pick(isa)->steps(r);
    if (form == CHUNKS) kern_delta_pick(isa)->chunks(r, &w);
}

/* --- a known answer ------------------------------------------------------------------------------------------------ */

/* Four dims, padded with zeros to 16, which changes nothing; worked out with numpy from the formulas alone. */
static double wave(int t, int c, int s) { return sin(s + 0.7 * t + 1.3 * c); }

static void known_answer(enum isa isa, int form) {
    enum { DIM = 16, TOK = 7 };
    static const double first[4] = {0.0339628778, -0.1208203381, -0.1413367976, 0.0951825411},
                        last[4] = {0.0097434359, 0.3469831277, 0.1759744676, -0.2530699072};
    static const double final[4][4] = {{0.1253089719, -0.3733070855, -0.3229216899, 0.2100630425},
                                       {0.5177235248, 0.3787983911, -0.3085800201, -0.5431170190},
                                       {0.1610734200, 0.5775400315, 0.1471183104, -0.4932890485},
                                       {-0.4213902977, -0.0782713690, 0.3841661406, 0.2902623556}};
    static float u[TOK][3 * DIM], o[TOK][DIM], s[DIM][DIM], g[TOK], beta[TOK];
    memset(u, 0, sizeof u);
    memset(s, 0, sizeof s);
    for (int t = 0; t < TOK; t++) {
        double qq = 0, kk = 0;
        for (int c = 0; c < 4; c++) qq += wave(t, c, 1) * wave(t, c, 1), kk += wave(t, c, 2) * wave(t, c, 2);
        for (int c = 0; c < 4; c++) {
            u[t][c] = (float)(wave(t, c, 1) / sqrt(qq) / 2);
            u[t][DIM + c] = (float)(wave(t, c, 2) / sqrt(kk));
            u[t][2 * DIM + c] = (float)wave(t, c, 3);
        }
        beta[t] = (float)(1 / (1 + exp(-sin(0.5 * t))));
        g[t] = (float)(-0.3 * log1p(exp(cos(0.9 * t))));
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) s[j][i] = (float)(0.1 * sin(i + 2 * j)); /* i: key index */
    struct delta_rows r = {.s = s[0], .o = o[0], .q = u[0], .k = u[0] + DIM, .v = u[0] + 2 * DIM, .g = g, .beta = beta,
                           .o_step = DIM, .u_step = 3 * DIM, .n_tok = TOK, .n_row = DIM, .dim = DIM};
    run(isa, form, &r);
    for (int c = 0; c < 4; c++) near(forms[form], c, o[0][c], first[c], 1e-6), near(forms[form], c, o[6][c], last[c], 1e-6);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) near(forms[form], 4 * i + j, s[j][i], final[i][j], 1e-6);
}

/* --- one head, many tokens ----------------------------------------------------------------------------------------- */

enum kind { ORDINARY, FORGETFUL, NO_DECAY, SAME_TOKEN, STRONG, MIXED, NEARLY_PARALLEL, KINDS };
static const char *const kinds[] = {"ordinary", "slow decay", "no decay", "one token again and again", "strong decay",
                                    "strong and slow decay in turn", "nearly parallel keys"};

static void unit_vector(float *x, int n, uint64_t *rng) {
    double sum = 0;
    for (int i = 0; i < n; i++) x[i] = test_normal(rng), sum += (double)x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] = (float)(x[i] / sqrt(sum));
}

/* Inputs of n tokens: u = q, k, v. */
static void make_inputs(enum kind kind, float *u, float *g, float *beta, int n_tok, int dim, uint64_t *rng) {
    float base[2][256];
    unit_vector(base[0], dim, rng);
    unit_vector(base[1], dim, rng);
    for (int t = 0; t < n_tok; t++, u += 3 * dim) {
        unit_vector(u, dim, rng);
        unit_vector(u + dim, dim, rng);
        if (kind == NEARLY_PARALLEL) { /* A is near a matrix of ones below the diagonal */
            float len = 0;
            for (int i = 0; i < dim; i++) u[dim + i] = base[t & 1][i] + 1e-3f * u[dim + i], len += u[dim + i] * u[dim + i];
            for (int i = 0; i < dim; i++) u[dim + i] /= sqrtf(len);
        }
        for (int i = 0; i < dim; i++) u[2 * dim + i] = test_normal(rng);
        if (kind == SAME_TOKEN && t) memcpy(u, u - 3 * dim, 3 * (size_t)dim * sizeof *u);
        for (int i = 0; i < dim && (kind != SAME_TOKEN || !t); i++) u[i] /= sqrtf((float)dim);
        bool hard = kind == SAME_TOKEN || kind == NEARLY_PARALLEL;
        beta[t] = hard ? 0.9999f : test_uniform(rng, 0, 1);
        g[t] = hard || kind == NO_DECAY ? 0 : kind == STRONG ? test_uniform(rng, -200, -20) : kind == FORGETFUL ? test_uniform(rng, -2e-3f, 0) :
               kind == MIXED ? (t % 5 ? test_uniform(rng, -1e-2f, 0) : test_uniform(rng, -900, -100)) : test_uniform(rng, -1, 0);
    }
}

/* Both forms against double, in calls of `piece` tokens; returns the largest error relative to 1 + |value|. */
static double long_run(enum isa isa, enum kind kind, int dim, int n_tok, int piece, uint64_t seed) {
    uint64_t rng = seed;
    size_t n_s = (size_t)dim * (size_t)dim;
    float *u = must((size_t)piece * 3 * (size_t)dim * sizeof *u), *g = must((size_t)piece * 8), *beta = g + piece;
    float *o[2], *s[2];
    double *ds = must(n_s * sizeof *ds), *x = must((size_t)dim * 4 * sizeof *x), worst = 0;
    for (int f = 0; f < 2; f++) o[f] = must((size_t)piece * (size_t)dim * sizeof *u), s[f] = must(n_s * sizeof *u);
    for (size_t i = 0; i < n_s; i++) s[0][i] = s[1][i] = 0.1f * test_normal(&rng), ds[i] = s[0][i];
    for (int t0 = 0; t0 < n_tok; t0 += piece) {
        int n = n_tok - t0 < piece ? n_tok - t0 : piece;
        make_inputs(kind, u, g, beta, n, dim, &rng);
        for (int f = 0; f < 2; f++) {
            struct delta_rows r = {.s = s[f], .o = o[f], .q = u, .k = u + dim, .v = u + 2 * dim, .g = g, .beta = beta, .o_step = dim,
                                   .u_step = 3 * dim, .n_tok = n, .n_row = dim, .dim = dim};
            run(isa, f, &r);
        }
        for (int t = 0; t < n; t++) {
            for (int i = 0; i < 3 * dim; i++) x[i] = u[t * 3 * dim + i];
            ref_delta_step(ds, x + 3 * dim, x, x + dim, x + 2 * dim, g[t], beta[t], dim, dim);
            for (int f = 0; f < 2; f++)
                for (int i = 0; i < dim; i++) {
                    double want = x[3 * dim + i], got = o[f][t * dim + i];
                    worst = fmax(worst, isfinite(got) ? fabs(got - want) / (1 + fabs(want)) : INFINITY);
                }
        }
        for (int f = 0; f < 2; f++)
            for (size_t i = 0; i < n_s; i++)
                worst = fmax(worst, isfinite(s[f][i]) ? fabs(s[f][i] - ds[i]) / (1 + fabs(ds[i])) : INFINITY);
    }
    for (int f = 0; f < 2; f++) free(o[f]), free(s[f]);
    free(u), free(g), free(ds), free(x);
    return worst;
}

static void both_forms_follow_the_rule(void **state) {
    (void)state;
    static const int dims[] = {16, 48, 128, 256}, counts[] = {1, 3, 4, 5, 15, 63, 64, 65, 200};
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) {
            printf("skipped: this CPU lacks %s\n", isa_name(isa));
            continue;
        }
        for (int f = 0; f < 2; f++) known_answer(isa, f);
        for (int kind = 0; kind < KINDS; kind++)
            for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
                for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                    double worst = long_run(isa, kind, dims[d], counts[c], counts[c], 1 + d + 10 * c);
                    if (!(worst <= 1e-5))
                        fail_msg("%s, %s, dim %d, %d tokens: error %g, tolerance 1e-5", isa_name(isa), kinds[kind], dims[d], counts[c], worst);
                }
    }
}

static void errors_do_not_grow_with_the_context(void **state) {
    (void)state;
    enum isa isa;
    assert_int_equal(isa_choose(&isa, NULL), 0);
    for (int kind = ORDINARY; kind <= FORGETFUL; kind++) {
        double worst = long_run(isa, kind, 16, 262144, 512, 7);
        if (!(worst <= 1e-5)) fail_msg("%s: error %g after 262144 tokens, tolerance 1e-5", kinds[kind], worst);
    }
}

/* The dims of real models: both forms stay within 1e-5 of the rule in double, so within 2e-5 of each other, for 262144 tokens. */
static void both_forms_hold_for_262144_tokens_of_real_size(void **state) {
    (void)state;
    enum isa isa;
    assert_int_equal(isa_choose(&isa, NULL), 0);
    for (int kind = ORDINARY; kind <= FORGETFUL; kind++) {
        double worst = long_run(isa, kind, 128, 262144, 4096, 11);
        printf("%s: largest error %.2g\n", kinds[kind], worst);
        if (!(worst <= 1e-5)) fail_msg("%s: error %g after 262144 tokens, tolerance 1e-5", kinds[kind], worst);
    }
}

/* --- the whole operation --------------------------------------------------------------------------------------------- */

static struct cpu *open_delta(enum isa isa, int n_thread, const struct delta_shape *s, int n_tok) {
    struct cpu *c = calloc(1, sizeof *c);
    c->opts = (struct cpu_opts){.n_thread = n_thread, .isa = isa, .limits = {.n_tok = n_tok, .delta = *s}};
    assert_int_equal(pool_open(&c->pool, n_thread, NULL, 0), 0);
    assert_int_equal(elem_open(c), 0);
    if (delta_open(c)) fail_msg("%s", err_text());
    return c;
}

static void close_delta(struct cpu *c) {
    delta_close(c);
    elem_close(c);
    pool_close(c->pool);
    free(c);
}

/* Random arguments for n_tok tokens, and room for the results. */
struct layer_case {
    struct delta_args a;
    float *memory;
    size_t n_y, n_last, n_s, n_u;
};

static struct layer_case make_case(const struct delta_shape *s, int n_tok, uint64_t seed) {
    struct layer_case l = {0};
    size_t ch = (size_t)delta_conv_dim(s), hv = (size_t)s->n_value, dim = (size_t)s->dim, n = (size_t)n_tok;
    l.n_y = n * hv * dim, l.n_last = (size_t)(s->n_conv - 1) * ch, l.n_s = hv * dim * dim, l.n_u = n * ch;
    float *p = l.memory = must((2 * l.n_y + l.n_u + 2 * n * hv + ch * 4 + 2 * hv + dim + l.n_last + l.n_s) * sizeof *p);
    l.a = (struct delta_args){.shape = *s, .n_tok = n_tok, .eps = 1e-6f};
    l.a.y = p, p += l.n_y;
    l.a.u = p, p += l.n_u;
    l.a.last = p, p += l.n_last;
    l.a.s = p, p += l.n_s;
    float *z = p, *b = z + l.n_y, *a = b + n * hv, *conv = a + n * hv, *dt = conv + ch * 4, *rate = dt + hv, *norm = rate + hv;
    l.a.z = z, l.a.b = b, l.a.a = a, l.a.conv = conv, l.a.dt = dt, l.a.rate = rate, l.a.norm = norm;
    uint64_t rng = seed;
    for (size_t i = 0; i < l.n_u; i++) l.a.u[i] = test_normal(&rng);
    for (size_t i = 0; i < l.n_last; i++) l.a.last[i] = test_normal(&rng);
    for (size_t i = 0; i < l.n_s; i++) l.a.s[i] = 0.1f * test_normal(&rng);
    for (size_t i = 0; i < l.n_y; i++) z[i] = test_normal(&rng);
    for (size_t i = 0; i < n * hv; i++) b[i] = 2 * test_normal(&rng), a[i] = (i % 9 ? 2 : 15) * test_normal(&rng);
    for (size_t i = 0; i < ch * 4; i++) conv[i] = 0.5f * test_normal(&rng);
    for (size_t i = 0; i < hv; i++) dt[i] = test_uniform(&rng, -5, 1), rate[i] = -test_uniform(&rng, 0.05f, 2);
    for (size_t i = 0; i < dim; i++) norm[i] = 1 + 0.1f * test_normal(&rng);
    return l;
}

static const struct delta_shape shapes[] = {
    {1, 1, 16, 4, false}, {2, 4, 32, 4, true}, {2, 4, 32, 4, false}, {1, 3, 48, 4, true}, {3, 6, 128, 4, false}, {1, 2, 256, 4, true},
};

static void the_layer_follows_the_textbook(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 9, 64, 255, 300};
    for (int isa = 0; isa < ISA_COUNT; isa++)
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes && isa_usable(isa); k++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                struct layer_case l = make_case(&shapes[k], counts[c], 100 * k + c);
                double *y = must(l.n_y * sizeof *y), *last = must(l.n_last * sizeof *last), *s = must(l.n_s * sizeof *s);
                for (size_t i = 0; i < l.n_last; i++) last[i] = l.a.last[i];
                for (size_t i = 0; i < l.n_s; i++) s[i] = l.a.s[i];
                ref_delta(y, last, s, &l.a);
                struct cpu *cpu = open_delta(isa, 2, &shapes[k], counts[c]);
                assert_int_equal(cpu->ops.delta(&cpu->ops, &l.a), 0);
                for (size_t i = 0; i < l.n_y; i++) near("y", (int64_t)i, l.a.y[i], y[i], 1e-4);
                for (size_t i = 0; i < l.n_last; i++) near("last", (int64_t)i, l.a.last[i], last[i], 0);
                for (size_t i = 0; i < l.n_s; i++) near("s", (int64_t)i, l.a.s[i], s[i], 1e-5);
                close_delta(cpu);
                free(y), free(last), free(s), free(l.memory);
            }
}

/* The same tokens in one call and in several, as passes cut them. */
static void calls_continue_each_other(void **state) {
    (void)state;
    enum { N = 600 };
    static const int cuts[] = {1, 8, 7, 64, 260, 260};
    const struct delta_shape *s = &shapes[1];
    enum isa isa;
    assert_int_equal(isa_choose(&isa, NULL), 0);
    struct layer_case whole = make_case(s, N, 5), part = make_case(s, N, 5);
    struct cpu *c = open_delta(isa, 2, s, N);
    assert_int_equal(c->ops.delta(&c->ops, &whole.a), 0);
    struct delta_args a = part.a;
    for (int i = 0; i < 6; i++) {
        a.n_tok = cuts[i];
        assert_int_equal(c->ops.delta(&c->ops, &a), 0);
        int64_t heads = (int64_t)cuts[i] * s->n_value;
        a.y += heads * s->dim, a.z += heads * s->dim, a.a += heads, a.b += heads, a.u += cuts[i] * delta_conv_dim(s);
    }
    for (size_t i = 0; i < whole.n_y; i++) near("y", (int64_t)i, part.a.y[i], whole.a.y[i], 1e-4);
    for (size_t i = 0; i < whole.n_s; i++) near("s", (int64_t)i, part.a.s[i], whole.a.s[i], 1e-5);
    assert_memory_equal(part.a.last, whole.a.last, whole.n_last * sizeof(float));
    a.n_tok = N + 1;
    assert_int_equal(c->ops.delta(&c->ops, &a), ERR_ARG);
    close_delta(c);
    free(whole.memory), free(part.memory);
}

static void threads_give_the_same_bits(void **state) {
    (void)state;
    static const int counts[] = {1, 8, 300};
    enum isa isa;
    assert_int_equal(isa_choose(&isa, NULL), 0);
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        for (int c = 0; c < 3; c++) {
            struct layer_case first = make_case(&shapes[k], counts[c], 9);
            for (int n_thread = 1; n_thread <= 9; n_thread += 4) { /* 9: more than heads, so rows are cut */
                struct layer_case l = make_case(&shapes[k], counts[c], 9);
                struct cpu *cpu = open_delta(isa, n_thread, &shapes[k], counts[c]);
                assert_int_equal(cpu->ops.delta(&cpu->ops, n_thread == 1 ? &first.a : &l.a), 0);
                close_delta(cpu);
                if (n_thread > 1) {
                    assert_memory_equal(l.a.y, first.a.y, l.n_y * sizeof(float));
                    assert_memory_equal(l.a.s, first.a.s, l.n_s * sizeof(float));
                    assert_memory_equal(l.a.last, first.a.last, l.n_last * sizeof(float));
                }
                free(l.memory);
            }
            free(first.memory);
        }
}

int main(int argc, char **argv) {
    const struct CMUnitTest slow[] = {cmocka_unit_test(both_forms_hold_for_262144_tokens_of_real_size)};
    if (argc > 1 && !strcmp(argv[1], "slow")) return cmocka_run_group_tests(slow, NULL, NULL);
    const struct CMUnitTest t[] = {
        cmocka_unit_test(both_forms_follow_the_rule),
        cmocka_unit_test(errors_do_not_grow_with_the_context),
        cmocka_unit_test(the_layer_follows_the_textbook),
        cmocka_unit_test(calls_continue_each_other),
        cmocka_unit_test(threads_give_the_same_bits),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
