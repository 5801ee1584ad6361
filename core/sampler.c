/* sampler.c: see sampler.h. Only what can be chosen is ever ordered: top-k keeps a heap of k while it scans, top-p takes the
 * best candidates off a heap until it has enough, min-p drops candidates before that heap is built. */
#include "core/sampler.h"

#include "core/err.h"
#include "core/mem.h"

#include <float.h>
#include <math.h>
#include <sys/random.h>
#include <time.h>

struct cand {
    float logit;
    int id;
};

struct sampler {
    struct sampler_params p;
    int n_vocab;
    uint64_t rng[4];
    struct cand *cand; /* [n_vocab] */
    /* Penalties, absent when they are off: */
    float *work;        /* [n_vocab] penalised logits */
    int *count;         /* [n_vocab] occurrences in the window */
    uint32_t *pass_of;  /* [n_vocab] the latest pass that penalised this token */
    uint32_t pass;
    int *window;        /* [window_cap] latest ids, a ring */
    int window_cap, window_n, window_at;
};

enum { MAX_LAST_N = 1 << 24 };

struct sampler_params sampler_defaults(void) {
    return (struct sampler_params){.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1,
                                   .repeat_last_n = 64, .seed = SAMPLER_SEED_RANDOM};
}

static int check(const char *option, double v, double lo, double hi) {
    if (v >= lo && v <= hi) return 0; /* false for NaN */
    return err_set(ERR_ARG, "%s %g: must be between %g and %g", option, v, lo, hi);
}

int sampler_params_check(const struct sampler_params *p) {
    int rc = check("--temp", p->temp, -1000, 1000);
    if (!rc) rc = check("--top-p", p->top_p, 0, 1);
    if (!rc) rc = check("--min-p", p->min_p, 0, 1);
    if (!rc) rc = check("--repeat-penalty", p->repeat_penalty, 0.01f, 100);
    if (!rc) rc = check("--repeat-last-n", p->repeat_last_n, -1, MAX_LAST_N);
    if (!rc) rc = check("--presence-penalty", p->presence_penalty, -2, 2);
    if (!rc) rc = check("--frequency-penalty", p->frequency_penalty, -2, 2);
    return rc;
}

/* --- random numbers: xoshiro256**, seeded by splitmix64 (Blackman, Vigna) ----------------------------------------------- */

static void rng_seed(uint64_t state[4], uint64_t seed) {
    for (int i = 0; i < 4; i++) {
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        state[i] = z ^ (z >> 31);
    }
}

static uint64_t rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

/* Uniform in [0, 1), 53 bits. */
static double rng_next(uint64_t s[4]) {
    uint64_t out = rotl(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return (double)(out >> 11) * 0x1p-53;
}

static uint32_t random_seed(void) {
    uint32_t seed;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed) seed = (uint32_t)time(NULL) * 2654435761u;
    return seed == SAMPLER_SEED_RANDOM ? 0 : seed;
}

/* e^x for x <= 0, relative error below 1e-15. Our own, because the last bit of libm's differs between machines and a
 * draw that falls on it would change the text. x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to r^13. */
static double exp_neg(double x) {
    static const double one_over_factorial[14] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320,
        1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
    if (x < -708) return 0;
    double n = (double)(int)(x * 1.4426950408889634 - 0.5);
    double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33; /* ln 2 in two parts: n * high is exact */
    double y = one_over_factorial[13];
    for (int i = 12; i >= 0; i--) y = y * r + one_over_factorial[i];
    union { uint64_t u; double d; } scale = {.u = (uint64_t)(1023 + (int)n) << 52};
    return y * scale.d;
}

/* --- opening ------------------------------------------------------------------------------------------------------------------- */

static bool penalties_on(const struct sampler_params *p) {
    return p->repeat_last_n && (p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0);
}

static int window_alloc(struct sampler *s, int n_ctx) {
    size_t n = (size_t)s->n_vocab;
    s->window_cap = s->p.repeat_last_n < 0 ? n_ctx : s->p.repeat_last_n;
    if (s->window_cap > MAX_LAST_N) s->window_cap = MAX_LAST_N;
    if (s->window_cap < 1) s->window_cap = 1;
    s->work = mem_alloc(n * sizeof *s->work, 64, "sampler");
    s->count = mem_alloc(n * sizeof *s->count, 64, "sampler");
    s->pass_of = mem_alloc(n * sizeof *s->pass_of, 64, "sampler");
    s->window = mem_alloc((size_t)s->window_cap * sizeof *s->window, 64, "sampler");
    return s->work && s->count && s->pass_of && s->window ? 0 : ERR_NOMEM;
}

int sampler_open(struct sampler **out, const struct sampler_params *p, int n_vocab, int n_ctx) {
    int rc = sampler_params_check(p);
    if (rc) return rc;
    if (n_vocab < 1) return err_set(ERR_ARG, "sampler: a vocabulary of %d tokens", n_vocab);
    struct sampler *s = mem_alloc(sizeof *s, 64, "sampler");
    if (!s) return ERR_NOMEM;
    s->p = *p;
    s->n_vocab = n_vocab;
    if (p->seed == SAMPLER_SEED_RANDOM) s->p.seed = random_seed();
    s->cand = mem_alloc((size_t)n_vocab * sizeof *s->cand, 64, "sampler");
    rc = s->cand ? 0 : ERR_NOMEM;
    if (!rc && penalties_on(p)) rc = window_alloc(s, n_ctx);
    if (rc) {
        sampler_close(s);
        return rc;
    }
    sampler_reset(s);
    *out = s;
    return 0;
}

void sampler_close(struct sampler *s) {
    if (!s) return;
    mem_free(s->cand);
    mem_free(s->work);
    mem_free(s->count);
    mem_free(s->pass_of);
    mem_free(s->window);
    mem_free(s);
}

uint32_t sampler_seed(const struct sampler *s) { return s->p.seed; }

void sampler_reset(struct sampler *s) {
    rng_seed(s->rng, s->p.seed);
    if (s->count)
        for (int i = 0; i < s->n_vocab; i++) s->count[i] = 0;
    s->window_n = s->window_at = 0;
}

void sampler_accept(struct sampler *s, int id) {
    if (!s->window || id < 0 || id >= s->n_vocab) return;
    if (s->window_n == s->window_cap)
        s->count[s->window[s->window_at]]--;
    else
        s->window_n++;
    s->window[s->window_at] = id;
    s->count[id]++;
    if (++s->window_at == s->window_cap) s->window_at = 0;
}

/* --- the chain ------------------------------------------------------------------------------------------------------------------ */

/* Logits after penalties: the given ones when there is nothing to penalise. */
static const float *penalise(struct sampler *s, const float *logits) {
    if (!s->window_n) return logits;
    for (int i = 0; i < s->n_vocab; i++) s->work[i] = logits[i];
    if (!++s->pass) { /* wrapped after 2^32 passes: forget old marks */
        for (int i = 0; i < s->n_vocab; i++) s->pass_of[i] = 0;
        s->pass = 1;
    }
    for (int i = 0; i < s->window_n; i++) {
        int id = s->window[i];
        if (s->pass_of[id] == s->pass) continue;
        s->pass_of[id] = s->pass;
        float v = logits[id];
        v = v > 0 ? v / s->p.repeat_penalty : v * s->p.repeat_penalty;
        v -= (float)s->count[id] * s->p.frequency_penalty + s->p.presence_penalty;
        s->work[id] = v > FLT_MAX ? FLT_MAX : v; /* a large logit over a small penalty */
    }
    return s->work;
}

/* First index of the largest logit. Eight running maxima, because one chain of comparisons would wait on itself. */
static int argmax(const float *x, int n) {
    float best[8];
    for (int k = 0; k < 8; k++) best[k] = -INFINITY;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) best[k] = x[i + k] > best[k] ? x[i + k] : best[k];
    for (; i < n; i++) best[0] = x[i] > best[0] ? x[i] : best[0];
    for (int k = 1; k < 8; k++) best[0] = best[k] > best[0] ? best[k] : best[0];
    for (i = 0; i < n - 1 && x[i] != best[0];) i++;
    return i;
}

static int check_logits(const float *x, int n) {
    int bad = 0;
    for (int i = 0; i < n; i++) bad |= !(x[i] < INFINITY);
    if (!bad) return 0;
    int i = 0;
    while (x[i] < INFINITY) i++;
    return err_set(ERR_NUMERIC, "logits: token %d of %d is %s", i, n, x[i] != x[i] ? "not a number" : "infinite");
}

static int nothing_left(const struct sampler *s) {
    return err_set(ERR_NUMERIC, "logits: all %d are minus infinity", s->n_vocab);
}

/* Order of preference: higher logit, then lower id. */
static bool better(struct cand a, struct cand b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

/* Restores the heap below `i`: at the top the best candidate, or the worst when `worst_first`. */
static void sift_down(struct cand *h, int n, int i, bool worst_first) {
    struct cand moved = h[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && better(h[child + 1], h[child]) != worst_first) child++;
        if (better(h[child], moved) == worst_first) break;
        h[i] = h[child];
    }
    h[i] = moved;
}

static void heapify(struct cand *h, int n, bool worst_first) {
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(h, n, i, worst_first);
}

/* Whether one of x[0..32) is above the limit: nearly all blocks of a vocabulary are not, and this loop is vectorised. */
static bool any_above(const float *x, float limit) {
    int any = 0;
    for (int i = 0; i < 32; i++) any |= x[i] > limit;
    return any;
}

/* Fills s->cand with the k best, in no order. -inf never comes in. Returns how many. */
static int take_top_k(struct sampler *s, const float *x) {
    int k = s->p.top_k > 0 && s->p.top_k < s->n_vocab ? s->p.top_k : s->n_vocab, n = 0, i = 0;
    struct cand *h = s->cand;
    for (; i < s->n_vocab && n < k; i++)
        if (x[i] > -INFINITY) h[n++] = (struct cand){x[i], i};
    if (i == s->n_vocab) return n;
    heapify(h, n, true);
    while (i < s->n_vocab) {
        if (i + 32 <= s->n_vocab && !any_above(x + i, h[0].logit)) {
            i += 32;
            continue;
        }
        for (int end = i + 32 < s->n_vocab ? i + 32 : s->n_vocab; i < end; i++) {
            if (!(x[i] > h[0].logit)) continue; /* equal: the earlier id stays */
            h[0] = (struct cand){x[i], i};
            sift_down(h, n, 0, true);
        }
    }
    return n;
}

/* Drops what min-p forbids. Returns how many stay. */
static int apply_min_p(struct cand *c, int n, float max, float min_p) {
    if (min_p <= 0) return n;
    double least = (double)max + log(min_p);
    int kept = 0;
    for (int i = 0; i < n; i++)
        if (c[i].logit >= least) c[kept++] = c[i];
    return kept;
}

/* Sum of e^(logit - max), the weight of the whole candidate set. */
static double total_weight(const struct cand *c, int n, float max) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += exp_neg((double)c[i].logit - max);
    return sum;
}

/* Moves the best candidates to the end of c[0..n), best last, until they weigh at least `need`. Returns their number; they
 * are c[n - number .. n). */
static int take_top_p(struct cand *c, int n, float max, double need) {
    heapify(c, n, false);
    double sum = 0;
    int left = n;
    do {
        struct cand best = c[0];
        c[0] = c[--left];
        if (left) sift_down(c, left, 0, false);
        c[left] = best;
        sum += exp_neg((double)best.logit - max);
    } while (left && sum < need);
    return n - left;
}

/* Draws from c[0..n) with weights e^((logit - max) / temp). */
static int draw(struct sampler *s, const struct cand *c, int n, float max) {
    double sum = 0, inv = 1 / (double)s->p.temp;
    for (int i = 0; i < n; i++) sum += exp_neg(((double)c[i].logit - max) * inv);
    double u = rng_next(s->rng) * sum, at = 0;
    int chosen = 0; /* the latest candidate with any weight: rounding may leave u at the very end */
    for (int i = 0; i < n; i++) {
        double w = exp_neg(((double)c[i].logit - max) * inv);
        if (w > 0) chosen = i;
        if ((at += w) > u) break;
    }
    return c[chosen].id;
}

/* The candidates that top-k, top-p and min-p leave of x. None when all logits are -inf. */
static struct cand *filter(struct sampler *s, const float *x, float *max, int *n_left) {
    struct cand *c = s->cand;
    int n = take_top_k(s, x);
    *max = -INFINITY;
    for (int i = 0; i < n; i++) *max = c[i].logit > *max ? c[i].logit : *max;
    double need = s->p.top_p < 1 ? s->p.top_p * total_weight(c, n, *max) : 0;
    n = apply_min_p(c, n, *max, s->p.min_p); /* does not change which come before which, so it may go first */
    if (n && s->p.top_p < 1) {
        int kept = take_top_p(c, n, *max, need);
        c += n - kept;
        n = kept;
    }
    *n_left = n;
    return c;
}

int sampler_sample(struct sampler *s, const float *logits, int *id) {
    int rc = check_logits(logits, s->n_vocab), n;
    if (rc) return rc;
    const float *x = penalise(s, logits);
    float max;
    if (s->p.temp <= 0 || s->p.top_k == 1) {
        int best = argmax(x, s->n_vocab);
        if (!(x[best] > -INFINITY)) return nothing_left(s);
        *id = best;
        return 0;
    }
    struct cand *c = filter(s, x, &max, &n);
    if (!n) return nothing_left(s);
    *id = draw(s, c, n, max);
    return 0;
}
