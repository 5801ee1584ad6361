/* test_sampler.c: every filter against a version that sorts everything, the arithmetic of the penalties, the distribution of
 * draws, repeatability, bad logits. Includes the source, to see which candidates the filters leave. */
#include "core/sampler.c"

#include "tests/support.h"

#include <stdlib.h>
#include <string.h>

static struct sampler *opened(struct sampler_params p, int n_vocab) {
    struct sampler *s;
    if (sampler_open(&s, &p, n_vocab, 4096)) fail_msg("%s", err_text());
    return s;
}

static struct sampler_params all_off(void) {
    struct sampler_params p = sampler_defaults();
    p.temp = 1, p.top_k = 0, p.top_p = 1, p.min_p = 0, p.seed = 1;
    return p;
}

/* --- naive filters ----------------------------------------------------------------------------------------------------------- */

static int by_preference(const void *a, const void *b) {
    const struct cand *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id - y->id;
}

static int by_id(const void *a, const void *b) { return ((const struct cand *)a)->id - ((const struct cand *)b)->id; }

/* Sorted full set -> what stays. *close: a decision was nearer to its limit than rounding allows to compare. */
static int naive(struct cand *c, const float *x, int n, const struct sampler_params *p, bool *close) {
    for (int i = 0; i < n; i++) c[i] = (struct cand){x[i], i};
    qsort(c, (size_t)n, sizeof *c, by_preference);
    while (c[n - 1].logit == -INFINITY) n--;
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    double z = 0, cum = 0;
    for (int i = 0; i < n; i++) z += exp((double)c[i].logit - c[0].logit);
    if (p->top_p < 1) {
        int i = 0;
        do {
            cum += exp((double)c[i++].logit - c[0].logit) / z;
            *close |= fabs(cum - p->top_p) < 1e-9;
        } while (i < n && cum < p->top_p);
        n = i;
    }
    int kept = 0;
    for (int i = 0; i < n; i++) {
        double rel = exp((double)c[i].logit - c[0].logit);
        *close |= fabs(rel - p->min_p) < 1e-9 && p->min_p > 0 && p->min_p < 1;
        kept += rel >= p->min_p;
    }
    return kept;
}

static void random_logits(float *x, int n, uint64_t *seed) {
    float spread = test_uniform(seed, 0, 6);
    bool coarse = test_rand(seed) & 1; /* many ties */
    for (int i = 0; i < n; i++) {
        x[i] = spread * test_normal(seed);
        if (coarse) x[i] = floorf(x[i]);
        if (test_rand(seed) % 16 == 0) x[i] = -INFINITY;
    }
    x[test_rand(seed) % (uint64_t)n] = 1;
}

static float pick(uint64_t *seed, const float *of, int n) { return of[test_rand(seed) % (uint64_t)n]; }

static void filters_agree_with_full_sort(void **state) {
    (void)state;
    static const float ps[] = {0, 0.05f, 0.3f, 0.9f, 0.95f, 0.999f, 1}, ms[] = {0, 0, 0.001f, 0.05f, 0.5f, 1};
    static const int ns[] = {1, 2, 3, 8, 41, 257, 1000};
    uint64_t seed = 11;
    int compared = 0;
    for (int round = 0; round < 4000; round++) {
        int n = ns[test_rand(&seed) % 7], n_want, n_got;
        float x[1000], max;
        struct cand want[1000];
        bool close = false;
        struct sampler_params p = all_off();
        p.top_k = (int)(test_rand(&seed) % 4 ? test_rand(&seed) % 60 : 0);
        p.top_p = pick(&seed, ps, 7);
        p.min_p = pick(&seed, ms, 6);
        random_logits(x, n, &seed);
        n_want = naive(want, x, n, &p, &close);
        if (close) continue;
        struct sampler *s = opened(p, n);
        struct cand *got = filter(s, x, &max, &n_got);
        assert_true(max == want[0].logit);
        qsort(want, (size_t)n_want, sizeof *want, by_id);
        qsort(got, (size_t)n_got, sizeof *got, by_id);
        for (int i = 0; i < n_got && i < n_want; i++)
            if (got[i].id != want[i].id || got[i].logit != want[i].logit)
                fail_msg("round %d (n %d, k %d, p %g, m %g): candidate %d is %d, want %d", round, n, p.top_k, p.top_p, p.min_p, i,
                         got[i].id, want[i].id);
        if (n_got != n_want)
            fail_msg("round %d (n %d, k %d, p %g, m %g): %d candidates, want %d", round, n, p.top_k, p.top_p, p.min_p, n_got, n_want);
        sampler_close(s);
        compared++;
    }
    assert_in_range(compared, 3000, 4000);
}

static void exp_is_exact_enough(void **state) {
    (void)state;
    uint64_t seed = 3;
    for (int i = 0; i < 200000; i++) {
        double x = -(double)test_uniform(&seed, 0, 1) * (i % 2 ? 1 : 700), want = exp(x);
        if (fabs(exp_neg(x) - want) > 1e-15 * want) fail_msg("exp(%.17g): got %.17g, want %.17g", x, exp_neg(x), want);
    }
    assert_true(exp_neg(0) == 1 && exp_neg(-1e9) == 0 && exp_neg(-INFINITY) == 0);
}

/* --- draws ---------------------------------------------------------------------------------------------------------------------- */

static void draws_follow_the_distribution(void **state) {
    (void)state;
    enum { N = 12, DRAWS = 200000 };
    const float x[N] = {0, 1, -1, 2, 0.5f, -2, 1.5f, 1.5f, -0.5f, -INFINITY, 0.25f, -3};
    struct sampler_params p = all_off();
    p.temp = 0.7f;
    struct sampler *s = opened(p, N);
    int count[N] = {0}, id;
    for (int i = 0; i < DRAWS; i++) {
        assert_int_equal(sampler_sample(s, x, &id), 0);
        count[id]++;
    }
    double z = 0, chi2 = 0;
    for (int i = 0; i < N; i++) z += exp(x[i] / (double)p.temp);
    for (int i = 0; i < N; i++) {
        double want = DRAWS * exp(x[i] / (double)p.temp) / z;
        if (want > 0) chi2 += (count[i] - want) * (count[i] - want) / want;
    }
    assert_int_equal(count[9], 0);
    if (chi2 > 31.3) fail_msg("chi-square %.2f over 10 degrees of freedom, limit 31.3 (0.0005)", chi2);
    if (chi2 < 0.5) fail_msg("chi-square %.2f over 10 degrees of freedom: too even to be random", chi2);
    sampler_close(s);
}

static void temperature_of_zero_is_greedy(void **state) {
    (void)state;
    const float x[] = {1, 3, 3, -INFINITY, 2, 3};
    const float temps[] = {0, -1, 1e-30f};
    for (int k = 0; k < 2; k++) {
        struct sampler_params p = sampler_defaults();
        p.temp = temps[k];
        struct sampler *s = opened(p, 6);
        int id;
        assert_int_equal(sampler_sample(s, x, &id), 0);
        assert_int_equal(id, 1);
        sampler_close(s);
    }
    /* A tiny temperature still draws, among the best only. */
    struct sampler_params p = all_off();
    p.temp = temps[2];
    struct sampler *s = opened(p, 6);
    int seen[6] = {0}, id;
    for (int i = 0; i < 200; i++) {
        assert_int_equal(sampler_sample(s, x, &id), 0);
        seen[id]++;
    }
    assert_int_equal(seen[1] + seen[2] + seen[5], 200);
    assert_true(seen[1] && seen[2] && seen[5]);
    sampler_close(s);
}

/* The ids a seed gives are part of the contract: they must be the same on every machine. */
static void same_seed_same_ids(void **state) {
    (void)state;
    enum { N = 1000 };
    static const int golden[16] = {34, 47, 838, 708, 675, 580, 968, 671, 580, 845, 838, 422, 69, 89, 968, 467};
    float x[N];
    uint64_t seed = 5;
    for (int i = 0; i < N; i++) x[i] = test_uniform(&seed, -4, 4);
    struct sampler_params p = sampler_defaults();
    p.seed = 42;
    struct sampler *s = opened(p, N);
    assert_int_equal(sampler_seed(s), 42);
    for (int pass = 0; pass < 2; pass++, sampler_reset(s))
        for (int i = 0; i < 16; i++) {
            int id;
            assert_int_equal(sampler_sample(s, x, &id), 0);
            if (id != golden[i]) fail_msg("pass %d draw %d: got %d, want %d", pass, i, id, golden[i]);
        }
    sampler_close(s);
    p.seed = SAMPLER_SEED_RANDOM;
    struct sampler *a = opened(p, N), *b = opened(p, N);
    assert_true(sampler_seed(a) != SAMPLER_SEED_RANDOM);
    assert_true(sampler_seed(a) != sampler_seed(b));
    sampler_close(a);
    sampler_close(b);
}

/* --- penalties ------------------------------------------------------------------------------------------------------------------- */

static void penalties(void **state) {
    (void)state;
    const float x[6] = {2, -2, 1, 0.5f, 4, -INFINITY};
    struct sampler_params p = all_off();
    p.repeat_penalty = 1.5f, p.presence_penalty = 0.25f, p.frequency_penalty = 0.5f, p.repeat_last_n = 4;
    struct sampler *s = opened(p, 6);
    assert_ptr_equal(penalise(s, x), x);
    static const int said[] = {4, 3, 0, 0, 1, 5}; /* the window keeps 0 0 1 5 */
    for (int i = 0; i < 6; i++) sampler_accept(s, said[i]);
    sampler_accept(s, -1);
    sampler_accept(s, 6);
    const float want[6] = {2 / 1.5f - 1.0f - 0.25f, -2 * 1.5f - 0.5f - 0.25f, 1, 0.5f, 4, -INFINITY};
    for (int pass = 0; pass < 3; pass++) {
        const float *got = penalise(s, x);
        for (int i = 0; i < 6; i++)
            if (got[i] != want[i]) fail_msg("pass %d token %d: got %g, want %g", pass, i, got[i], want[i]);
    }
    sampler_reset(s);
    assert_ptr_equal(penalise(s, x), x);
    sampler_close(s);
}

static void penalties_off_and_extreme(void **state) {
    (void)state;
    const float x[2] = {3e38f, 1};
    struct sampler_params p = all_off();
    p.repeat_penalty = 2, p.repeat_last_n = 0;
    struct sampler *s = opened(p, 2);
    sampler_accept(s, 0);
    assert_ptr_equal(penalise(s, x), x);
    sampler_close(s);
    p.repeat_penalty = 0.01f, p.repeat_last_n = -1; /* would overflow to infinity */
    s = opened(p, 2);
    for (int i = 0; i < 5000; i++) sampler_accept(s, 0); /* more than the context of 4096 */
    assert_int_equal(s->count[0], 4096);
    int id;
    assert_int_equal(sampler_sample(s, x, &id), 0);
    assert_int_equal(id, 0);
    sampler_close(s);
}

static void penalised_greedy_moves_on(void **state) {
    (void)state;
    const float x[3] = {2, 1.9f, 1.8f};
    struct sampler_params p = sampler_defaults();
    p.temp = 0, p.presence_penalty = 1;
    struct sampler *s = opened(p, 3);
    for (int i = 0; i < 3; i++) {
        int id;
        assert_int_equal(sampler_sample(s, x, &id), 0);
        assert_int_equal(id, i);
        sampler_accept(s, id);
    }
    sampler_close(s);
}

/* --- refusals -------------------------------------------------------------------------------------------------------------------- */

static void bad_logits(void **state) {
    (void)state;
    const float bad[][3] = {{1, NAN, 2}, {INFINITY, 1, 2}, {-INFINITY, -INFINITY, -INFINITY}};
    const char *names[] = {"token 1 of 3", "token 0 of 3", "all 3"};
    for (int i = 0; i < 3; i++) {
        for (int greedy = 0; greedy < 2; greedy++) {
            struct sampler_params p = greedy ? sampler_defaults() : all_off();
            if (greedy) p.temp = 0;
            struct sampler *s = opened(p, 3);
            int id = 7;
            assert_int_equal(sampler_sample(s, bad[i], &id), ERR_NUMERIC);
            if (!strstr(err_text(), names[i])) fail_msg("%s does not name %s", err_text(), names[i]);
            assert_int_equal(id, 7);
            sampler_close(s);
        }
    }
}

static void bad_parameters(void **state) {
    (void)state;
    struct sampler_params p = sampler_defaults();
    assert_int_equal(sampler_params_check(&p), 0);
#define REFUSED(field, value, words)                                                                   \
    do {                                                                                               \
        p = sampler_defaults();                                                                        \
        p.field = value;                                                                               \
        struct sampler *s_;                                                                            \
        if (sampler_open(&s_, &p, 10, 10) != ERR_ARG) fail_msg("%s = %g accepted", #field, (double)(value)); \
        if (strcmp(err_text(), words)) fail_msg("got %s, want %s", err_text(), words);                  \
    } while (0)
    REFUSED(top_p, 1.5f, "--top-p 1.5: must be between 0 and 1");
    REFUSED(top_p, NAN, "--top-p nan: must be between 0 and 1");
    REFUSED(min_p, -0.5f, "--min-p -0.5: must be between 0 and 1");
    REFUSED(temp, INFINITY, "--temp inf: must be between -1000 and 1000");
    REFUSED(repeat_penalty, 0, "--repeat-penalty 0: must be between 0.01 and 100");
    REFUSED(repeat_last_n, -2, "--repeat-last-n -2: must be between -1 and 1.67772e+07");
    REFUSED(presence_penalty, 3, "--presence-penalty 3: must be between -2 and 2");
    REFUSED(frequency_penalty, -3, "--frequency-penalty -3: must be between -2 and 2");
    p = sampler_defaults();
    struct sampler *s;
    assert_int_equal(sampler_open(&s, &p, 0, 10), ERR_ARG);
    sampler_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(filters_agree_with_full_sort),
        cmocka_unit_test(exp_is_exact_enough),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(temperature_of_zero_is_greedy),
        cmocka_unit_test(same_seed_same_ids),
        cmocka_unit_test(penalties),
        cmocka_unit_test(penalties_off_and_extreme),
        cmocka_unit_test(penalised_greedy_moves_on),
        cmocka_unit_test(bad_logits),
        cmocka_unit_test(bad_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
