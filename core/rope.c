/* rope.c: see rope.h. Tables of cos and sin are an operation (core/ops.h, rope_table). */
#include "core/rope.h"

#include "core/err.h"

#include <math.h>
#include <string.h>

static const double PI = 3.14159265358979323846;

static const char *const names[] = {[ROPE_SCALING_NONE] = "none", [ROPE_SCALING_LINEAR] = "linear",
                                    [ROPE_SCALING_YARN] = "yarn", [ROPE_SCALING_LONGROPE] = "longrope"};

const char *rope_scaling_name(enum rope_scaling s) { return names[s]; }

int rope_scaling_from_name(const char *name, size_t bytes) {
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (bytes == strlen(names[i]) && !memcmp(name, names[i], bytes)) return i;
    return -1;
}

/* The pair (not a whole number) that turns `turns` times within the original context. */
static double pair_of_turns(const struct rope *r, double turns) {
    return r->n_rot * log((double)r->n_ctx_orig / (2 * PI * turns)) / (2 * log(r->base));
}

/* Share of the unscaled frequency that each pair keeps: 1 for fast pairs, 0 for slow ones, a ramp between. */
struct ramp {
    double lo, width;
};

static struct ramp yarn_ramp(const struct rope *r) {
    double lo = floor(pair_of_turns(r, r->beta_fast)), hi = ceil(pair_of_turns(r, r->beta_slow));
    if (lo < 0) lo = 0;
    if (hi > r->n_rot - 1) hi = r->n_rot - 1;
    return (struct ramp){lo, hi - lo > 0.001 ? hi - lo : 0.001};
}

static double yarn_blend(const struct rope *r, const struct ramp *ramp, double f, int i) {
    double t = ((double)i - ramp->lo) / ramp->width;
    double keep = (1 - (t < 0 ? 0 : t > 1 ? 1 : t)) * r->ext_factor;
    return f / r->factor * (1 - keep) + f * keep;
}

static int check(const struct rope *r, int64_t n_ctx) {
    if (r->n_rot < 2 || r->n_rot % 2) return err_set(ERR_ARG, "RoPE over %d dimensions: must be even and at least 2", r->n_rot);
    if (!(r->base > 1) || !isfinite(r->base)) return err_set(ERR_ARG, "RoPE base %g: must be above 1", r->base);
    if (!(r->factor >= 1) || !isfinite(r->factor)) return err_set(ERR_ARG, "RoPE factor %g: must be 1 or more", r->factor);
    if (!(r->attn_factor > 0) || !isfinite(r->attn_factor))
        return err_set(ERR_ARG, "RoPE magnitude factor %g: must be above 0", r->attn_factor);
    if (n_ctx < 1) return err_set(ERR_ARG, "a context of %lld positions: must be at least 1", (long long)n_ctx);
    if (r->scaling != ROPE_SCALING_YARN) return 0;
    if (r->n_ctx_orig < 1)
        return err_set(ERR_ARG, "YaRN with an original context of %lld: must be at least 1", (long long)r->n_ctx_orig);
    if (!(r->ext_factor >= 0 && r->ext_factor <= 1))
        return err_set(ERR_ARG, "YaRN extrapolation factor %g: must be 0 to 1", r->ext_factor);
    if (!(r->beta_slow > 0 && r->beta_fast >= r->beta_slow && isfinite(r->beta_fast)))
        return err_set(ERR_ARG, "YaRN betas %g (fast) and %g (slow): must be above 0, fast not below slow", r->beta_fast, r->beta_slow);
    return 0;
}

int rope_frequencies(double *inv_freq, float *mscale, const struct rope *r, const float *freq_factors, int64_t n_ctx) {
    int rc = check(r, n_ctx);
    if (rc) return rc;
    if (r->scaling == ROPE_SCALING_LONGROPE && !freq_factors)
        return err_set(ERR_ARG, "longrope needs the factors of rope_factors_long.weight or rope_factors_short.weight");
    struct ramp ramp = r->scaling == ROPE_SCALING_YARN ? yarn_ramp(r) : (struct ramp){0, 1};
    for (int i = 0; i < r->n_rot / 2; i++) {
        double f = pow(r->base, -2.0 * i / r->n_rot);
        if (freq_factors) {
            if (!(freq_factors[i] > 0) || !isfinite(freq_factors[i]))
                return err_set(ERR_FORMAT, "RoPE frequency factor %d is %g: must be a positive number", i, (double)freq_factors[i]);
            f /= (double)freq_factors[i];
        }
        if (r->scaling == ROPE_SCALING_LINEAR) f /= r->factor;
        if (r->scaling == ROPE_SCALING_YARN) f = yarn_blend(r, &ramp, f, i);
        inv_freq[i] = f;
    }
    double m = r->attn_factor;
    if (r->scaling == ROPE_SCALING_YARN && r->ext_factor != 0) m *= 0.1 * log(r->factor) + 1;
    *mscale = (float)m;
    return 0;
}

struct rope_user rope_user_none(void) { return (struct rope_user){.scaling = -1, .ext_factor = -1}; }

int rope_override(struct rope *r, const struct rope_user *u) {
    struct rope n = *r;
    if (u->factor != 0 && u->freq_scale != 0)
        return err_set(ERR_ARG, "RoPE factor %g and frequency scale %g say the same thing: give one of them", u->factor, u->freq_scale);
    if (u->freq_scale < 0 || u->freq_scale > 1)
        return err_set(ERR_ARG, "RoPE frequency scale %g: must be above 0 and at most 1", u->freq_scale);
    if (u->scaling == ROPE_SCALING_LONGROPE)
        return err_set(ERR_ARG, "longrope cannot be asked for: its factors are part of a model");
    if (u->factor != 0) n.factor = u->factor;
    if (u->freq_scale != 0) n.factor = 1 / u->freq_scale;
    if (u->scaling >= 0)
        n.scaling = (enum rope_scaling)u->scaling;
    else if (n.factor != 1 && n.scaling == ROPE_SCALING_NONE)
        n.scaling = ROPE_SCALING_LINEAR;
    if (n.scaling == ROPE_SCALING_NONE) n.factor = 1;
    if (u->freq_base != 0) n.base = u->freq_base;
    if (u->n_ctx_orig != 0) n.n_ctx_orig = u->n_ctx_orig;
    if (u->ext_factor >= 0) n.ext_factor = u->ext_factor;
    if (u->attn_factor != 0) n.attn_factor = u->attn_factor;
    if (u->beta_fast != 0) n.beta_fast = u->beta_fast;
    if (u->beta_slow != 0) n.beta_slow = u->beta_slow;
    int rc = check(&n, 1);
    if (rc) return rc;
    *r = n;
    return 0;
}
