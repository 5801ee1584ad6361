/* test_gpu_delta.c: the GPU's Gated DeltaNet layer against its formulas in double, with the cases of test_delta.c that are hard
 * for a chunk, and the tolerances of that file for their reasons: 1e-5 for S, 1e-4 behind the last norm. Built with LH_GPU where
 * there is a GPU back end; on the emulated one every test runs in several orders with equal results. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "tests/gpu_dev.h"
#include "tests/ref_delta.h"

#include <math.h>
#include <stdlib.h>

enum { DATA_BYTES = 48 << 20 };

static void near(const char *what, int64_t i, double got, double want, double tol) {
    if (!(fabs(got - want) <= tol * (1 + fabs(want))))
        fail_msg("%s[%lld]: got %.9g, want %.9g, tolerance %g", what, (long long)i, got, want, tol);
}

static const struct delta_shape shapes[] = {
    {1, 1, 16, 4, false}, {2, 4, 32, 4, true}, {2, 4, 32, 4, false}, {1, 3, 48, 4, true}, {3, 6, 128, 4, false}, {1, 2, 256, 4, true},
};
enum { N_SHAPE = sizeof shapes / sizeof *shapes };

/* --- arguments ------------------------------------------------------------------------------------------------------------- */

/* What the tokens of a case are like. The hard ones leave the convolution at its last tap, so that a token's u decides. */
enum kind { ORDINARY, SAME_TOKEN, NEARLY_PARALLEL, STRONG, MIXED, KINDS };
static const char *const kinds[] = {"ordinary", "one token again and again, no decay", "nearly parallel keys, no decay", "strong decay",
                                    "strong and slow decay in turn"};

/* Arguments on the host, all in one piece of memory, and on the device. */
struct layer_case {
    struct delta_args a, d;
    float *memory;
    size_t n_y, n_u, n_last, n_s, n_gate;
};

static float *some(float **p, size_t n) { return *p += n, *p - n; }

static void fill_gates(struct layer_case *l, enum kind kind, uint64_t *rng) {
    float *b = (float *)l->a.b, *a = (float *)l->a.a;
    int hv = l->a.shape.n_value;
    for (size_t i = 0; i < l->n_gate; i++) {
        int t = (int)i / hv;
        bool keep = kind == SAME_TOKEN || kind == NEARLY_PARALLEL;
        b[i] = keep ? 10 : 2 * test_normal(rng); /* 10: beta is 0.99995 */
        a[i] = keep ? -60 : kind == STRONG || (kind == MIXED && t % 5 == 0) ? 300 + 200 * test_uniform(rng, 0, 1) :
               kind == MIXED ? -6 : (i % 9 ? 2 : 15) * test_normal(rng);
    }
}

static struct layer_case make_case(struct dev *d, const struct delta_shape *s, int n_tok, enum kind kind, uint64_t seed) {
    struct layer_case l = {.a = {.shape = *s, .n_tok = n_tok, .eps = 1e-6f}};
    size_t ch = (size_t)delta_conv_dim(s), hv = (size_t)s->n_value, dim = (size_t)s->dim, n = (size_t)n_tok;
    l.n_y = n * hv * dim, l.n_u = n * ch, l.n_last = 3 * ch, l.n_s = hv * dim * dim, l.n_gate = n * hv;
    size_t all = 2 * l.n_y + l.n_u + l.n_last + l.n_s + 2 * l.n_gate + 4 * ch + 2 * hv + dim;
    float *p = l.memory = malloc(all * sizeof *p), *z, *conv, *dt, *rate, *norm;
    l.a.y = some(&p, l.n_y), l.a.u = some(&p, l.n_u), l.a.last = some(&p, l.n_last), l.a.s = some(&p, l.n_s);
    l.a.z = z = some(&p, l.n_y), l.a.b = some(&p, l.n_gate), l.a.a = some(&p, l.n_gate), l.a.conv = conv = some(&p, 4 * ch);
    l.a.dt = dt = some(&p, hv), l.a.rate = rate = some(&p, hv), l.a.norm = norm = some(&p, dim);
    uint64_t rng = seed;
    for (size_t i = 0; i < l.n_u; i++) l.a.u[i] = test_normal(&rng);
    for (size_t i = 0; kind == SAME_TOKEN && i < l.n_u; i++) l.a.u[i] = l.a.u[i % ch];
    for (size_t i = 2 * ch; kind == NEARLY_PARALLEL && i < l.n_u; i++) /* keys of two directions in turn */
        if (i % ch >= (size_t)s->n_key * dim && i % ch < 2 * (size_t)s->n_key * dim) l.a.u[i] = l.a.u[i % (2 * ch)] + 1e-3f * l.a.u[i];
    for (size_t i = 0; i < l.n_last; i++) l.a.last[i] = test_normal(&rng);
    for (size_t i = 0; i < l.n_s; i++) l.a.s[i] = 0.1f * test_normal(&rng);
    for (size_t i = 0; i < l.n_y; i++) z[i] = test_normal(&rng), l.a.y[i] = 0;
    for (size_t i = 0; i < 4 * ch; i++) conv[i] = kind == ORDINARY ? 0.5f * test_normal(&rng) : i % 4 == 3;
    for (size_t i = 0; i < hv; i++) dt[i] = kind == ORDINARY ? test_uniform(&rng, -5, 1) : 0, rate[i] = -test_uniform(&rng, 0.05f, 2);
    for (size_t i = 0; i < dim; i++) norm[i] = 1 + 0.1f * test_normal(&rng);
    fill_gates(&l, kind, &rng);

    l.d = l.a;
    l.d.y = dev_new(d, NULL, l.n_y * sizeof(float));
    l.d.u = dev_new(d, l.a.u, l.n_u * sizeof(float));
    l.d.last = dev_new(d, l.a.last, l.n_last * sizeof(float));
    l.d.s = dev_new(d, l.a.s, l.n_s * sizeof(float));
    l.d.z = dev_new(d, z, l.n_y * sizeof(float));
    l.d.b = dev_new(d, l.a.b, l.n_gate * sizeof(float));
    l.d.a = dev_new(d, l.a.a, l.n_gate * sizeof(float));
    l.d.conv = dev_new(d, conv, 4 * ch * sizeof(float));
    l.d.dt = dev_new(d, dt, hv * sizeof(float));
    l.d.rate = dev_new(d, rate, hv * sizeof(float));
    l.d.norm = dev_new(d, norm, dim * sizeof(float));
    return l;
}

/* The arguments of the tokens after the first n. */
static struct delta_args after(const struct delta_args *a, int n) {
    struct delta_args b = *a;
    int64_t heads = (int64_t)n * a->shape.n_value;
    b.y += heads * a->shape.dim, b.z += heads * a->shape.dim, b.a += heads, b.b += heads, b.u += n * delta_conv_dim(&a->shape);
    b.n_tok -= n;
    return b;
}

/* All tokens in calls of at most `piece`. */
static void run(struct dev *d, const struct layer_case *l, int piece) {
    for (struct delta_args a = l->d; a.n_tok > 0; a = after(&a, piece)) {
        struct delta_args call = a;
        if (call.n_tok > piece) call.n_tok = piece;
        ok(d->t->delta(d->t, &call));
    }
}

/* What the call left on the device. */
struct result {
    float *y, *last, *s;
};

static struct result result_of(struct dev *d, const struct layer_case *l) {
    struct result r = {malloc(l->n_y * 4), malloc(l->n_last * 4), malloc(l->n_s * 4)};
    dev_read(d, r.y, l->d.y, l->n_y * 4);
    dev_read(d, r.last, l->d.last, l->n_last * 4);
    dev_read(d, r.s, l->d.s, l->n_s * 4);
    add_digest(r.y, l->n_y * 4), add_digest(r.last, l->n_last * 4), add_digest(r.s, l->n_s * 4);
    return r;
}

static void free_result(struct result *r) { free(r->y), free(r->last), free(r->s); }

static struct ops_limits limits_of(const struct delta_shape *s, int n_tok) {
    return (struct ops_limits){.n_tok = n_tok, .cols = 64, .rows = 64, .n_head = 1, .n_kv = 1, .head_dim = 16, .n_ctx = 256, .delta = *s};
}

/* --- the layer against the textbook ------------------------------------------------------------------------------------------ */

static void check_case(const struct delta_shape *s, int n_tok, enum kind kind, uint64_t seed) {
    struct dev d;
    struct ops_limits lim = limits_of(s, n_tok);
    dev_open(&d, &lim, DATA_BYTES);
    struct layer_case l = make_case(&d, s, n_tok, kind, seed);
    double *y = malloc(l.n_y * sizeof *y), *last = malloc(l.n_last * sizeof *last), *st = malloc(l.n_s * sizeof *st);
    for (size_t i = 0; i < l.n_last; i++) last[i] = l.a.last[i];
    for (size_t i = 0; i < l.n_s; i++) st[i] = l.a.s[i];
    ref_delta(y, last, st, &l.a);
    run(&d, &l, n_tok);
    struct result r = result_of(&d, &l);
    char what[128];
    snprintf(what, sizeof what, "%s, %d:%d heads of %d, %d tokens: y", kinds[kind], s->n_key, s->n_value, s->dim, n_tok);
    for (size_t i = 0; i < l.n_y; i++) near(what, (int64_t)i, r.y[i], y[i], 1e-4);
    what[strlen(what) - 1] = 's';
    for (size_t i = 0; i < l.n_s; i++) near(what, (int64_t)i, r.s[i], st[i], 1e-5);
    for (size_t i = 0; i < l.n_last; i++) near("last", (int64_t)i, r.last[i], last[i], 0);
    free_result(&r);
    free(y), free(last), free(st), free(l.memory);
    dev_close(&d);
}

static void the_layer_follows_the_textbook(void) {
    static const int counts[] = {1, 2, 8, 9, 63, 64, 65, 130};
    for (int k = 0; k < N_SHAPE; k++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) check_case(&shapes[k], counts[c], ORDINARY, (uint64_t)(100 * k) + c);
}
ORDERS(the_layer_follows_the_textbook)

/* More tokens than the scratch holds chunks of, and an end that is shorter than a chunk. */
static void long_calls_are_cut(void) {
    check_case(&shapes[1], 1100, ORDINARY, 5);
    check_case(&shapes[0], 513, ORDINARY, 6);
}
ORDERS(long_calls_are_cut)

static void hard_chunks_follow_the_textbook(void) {
    static const struct delta_shape of[] = {{1, 2, 128, 4, true}, {1, 1, 16, 4, false}};
    for (int k = 0; k < 2; k++)
        for (int kind = SAME_TOKEN; kind < KINDS; kind++)
            for (int n = 50; n <= 128; n += 39) /* 50: token by token; 89, 128: in chunks */
                check_case(&of[k], n, (enum kind)kind, (uint64_t)(n + kind));
}
ORDERS(hard_chunks_follow_the_textbook)

/* A few steps and a chunk of the 27B's layer. */
static void a_layer_of_the_27b_follows_the_textbook(void) {
    static const struct delta_shape big = {16, 48, 128, 4, true};
    check_case(&big, 3, ORDINARY, 7);
    check_case(&big, 70, ORDINARY, 8);
}
ORDERS(a_layer_of_the_27b_follows_the_textbook)

/* --- the two forms and the cuts -------------------------------------------------------------------------------------------- */

/* The same tokens, one call against many. */
static void cut(const struct delta_shape *s, int n_tok, int piece, bool same_bits) {
    struct dev d;
    struct ops_limits lim = limits_of(s, n_tok);
    dev_open(&d, &lim, DATA_BYTES);
    struct layer_case a = make_case(&d, s, n_tok, ORDINARY, 9), b = make_case(&d, s, n_tok, ORDINARY, 9);
    run(&d, &a, n_tok);
    run(&d, &b, piece);
    struct result ra = result_of(&d, &a), rb = result_of(&d, &b);
    if (same_bits && (memcmp(ra.y, rb.y, a.n_y * 4) || memcmp(ra.s, rb.s, a.n_s * 4)))
        fail_msg("heads of %d: %d tokens at once and in calls of %d differ", s->dim, n_tok, piece);
    for (size_t i = 0; i < a.n_y; i++) near("y", (int64_t)i, rb.y[i], ra.y[i], 1e-4);
    for (size_t i = 0; i < a.n_s; i++) near("s", (int64_t)i, rb.s[i], ra.s[i], 1e-5);
    assert_memory_equal(ra.last, rb.last, a.n_last * 4);
    free_result(&ra), free_result(&rb);
    free(a.memory), free(b.memory);
    dev_close(&d);
}

static void short_calls_give_the_bits_of_single_tokens(void) {
    for (int k = 0; k < N_SHAPE; k++) cut(&shapes[k], 8, 1, true), cut(&shapes[k], 8, 3, true);
    cut(&shapes[1], 63, 1, true);
}
ORDERS(short_calls_give_the_bits_of_single_tokens)

static void steps_and_chunks_agree(void) {
    cut(&shapes[1], 600, 50, false), cut(&shapes[1], 600, 1, false);
    cut(&shapes[4], 200, 8, false);
    cut(&shapes[3], 300, 77, false);
}
ORDERS(steps_and_chunks_agree)

/* A copy of the state, other tokens, the copy back: the next tokens come out as if nothing had been between. */
static void a_restored_state_continues_bit_for_bit(void) {
    enum { N = 150 };
    struct dev d;
    struct ops_limits lim = limits_of(&shapes[1], N);
    dev_open(&d, &lim, DATA_BYTES);
    for (int n = 1; n <= N; n = n == 1 ? 8 : n == 8 ? N : N + 1, dev_next_case(&d)) {
        struct layer_case before = make_case(&d, &shapes[1], 70, ORDINARY, 1), l = make_case(&d, &shapes[1], n, ORDINARY, 2);
        l.d.s = before.d.s, l.d.last = before.d.last;
        void *u = dev_new(&d, l.a.u, l.n_u * 4), *s = dev_new(&d, NULL, l.n_s * 4), *last = dev_new(&d, NULL, l.n_last * 4);
        run(&d, &before, 70);
        ok(gpu_copy_on(d.stream, s, l.d.s, l.n_s * 4));
        ok(gpu_copy_on(d.stream, last, l.d.last, l.n_last * 4));
        run(&d, &l, n);
        struct result first = result_of(&d, &l);
        ok(gpu_copy_on(d.stream, l.d.s, s, l.n_s * 4));
        ok(gpu_copy_on(d.stream, l.d.last, last, l.n_last * 4));
        ok(gpu_copy_on(d.stream, l.d.u, u, l.n_u * 4));
        ok(gpu_fill(d.stream, l.d.y, 0xff, l.n_y * 4));
        run(&d, &l, n);
        struct result again = result_of(&d, &l);
        assert_memory_equal(again.y, first.y, l.n_y * 4);
        assert_memory_equal(again.s, first.s, l.n_s * 4);
        assert_memory_equal(again.last, first.last, l.n_last * 4);
        free_result(&first), free_result(&again);
        free(before.memory), free(l.memory);
    }
    dev_close(&d);
}
ORDERS(a_restored_state_continues_bit_for_bit)

/* --- refusals -------------------------------------------------------------------------------------------------------------- */

static void other_sizes_are_refused(void **state) {
    (void)state;
    struct dev d;
    struct ops_limits lim = limits_of(&shapes[1], 10);
#if defined(GPU_EMU)
    emu_reset(NULL);
#endif
    dev_open(&d, &lim, DATA_BYTES);
    struct layer_case l = make_case(&d, &shapes[1], 11, ORDINARY, 1);
    assert_int_equal(d.t->delta(d.t, &l.d), ERR_ARG);
    assert_non_null(strstr(err_text(), "11 tokens"));
    for (int i = 0; i < 5; i++) {
        struct delta_args a = l.d;
        a.n_tok = 10;
        if (i == 0) a.n_tok = 0;
        if (i == 1) a.shape.dim = 16;
        if (i == 2) a.shape.n_value = 8;
        if (i == 3) a.shape.n_key = 3;
        if (i == 4) a.shape.n_conv = 3;
        assert_int_equal(d.t->delta(d.t, &a), ERR_ARG);
    }
    free(l.memory);
    struct gpu_ops *o;
    static const struct delta_shape bad[] = {{1, 1, 24, 4, false}, {1, 1, 272, 4, false}, {0, 1, 16, 4, false}, {1, 70000, 16, 4, false}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lim.delta = bad[i];
        assert_int_equal(gpu_ops_open(&o, d.g, d.arena, d.stream, &lim), ERR_ARG);
        assert_non_null(strstr(err_text(), "delta"));
    }
    dev_close(&d);
}

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(the_layer_follows_the_textbook_in_all_orders),
        cmocka_unit_test(long_calls_are_cut_in_all_orders),
        cmocka_unit_test(hard_chunks_follow_the_textbook_in_all_orders),
        cmocka_unit_test(a_layer_of_the_27b_follows_the_textbook_in_all_orders),
        cmocka_unit_test(short_calls_give_the_bits_of_single_tokens_in_all_orders),
        cmocka_unit_test(steps_and_chunks_agree_in_all_orders),
        cmocka_unit_test(a_restored_state_continues_bit_for_bit_in_all_orders),
        cmocka_unit_test(other_sizes_are_refused),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
