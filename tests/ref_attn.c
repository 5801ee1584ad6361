/* ref_attn.c: see ref_attn.h. */
#include "tests/ref_attn.h"

#include "core/quant.h"

#include <math.h>
#include <stdlib.h>

struct row {
    const struct attn_args *a;
    const struct kv_layer *l;
    const float *q;
    int head, kv_head;
    int64_t lo, hi;
    bool half; /* products in half */
};

/* Error of numbers of at most `most` in half, where it is not relative: below 2^-14 after the power of two of their row. */
static double half_step(double most) {
    double step = most < 0x1p-6 ? 0x1p-39 * most : 0x1p-25;
    return most > 0x1p15 ? fmax(step, 0x1p-39 * most) : step;
}

/* Scores s[hi - lo] and the largest sum |q k| and of the rounding of q; *half: of the roundings to half. */
static void scores(double *s, double *sum_abs, double *q_step, double *half, const struct row *r) {
    int dim = r->l->head_dim_k;
    bool quant = r->l->type_k == QT_Q8_0 || r->l->type_k == QT_Q4_0;
    float k[KV_MAX_DIM], qr[KV_MAX_DIM];
    for (int d = 0; d < dim; d++) qr[d] = r->q[d];
    if (r->l->rotate_k) kv_rotate(qr, dim); /* where q is rounded; the score itself is taken unrotated */
    double q_most = 0, q_sum = 0;
    for (int d = 0; d < dim; d++) q_most = fmax(q_most, fabs((double)qr[d])), q_sum += fabs((double)qr[d]);
    *sum_abs = *q_step = *half = 0;
    for (int64_t p = r->lo; p < r->hi; p++) {
        kv_get(r->a->kv, r->a->il, p, r->kv_head, KV_K, k);
        double dot = 0, mag = 0, step = 0;
        for (int d = 0; d < dim; d++) {
            dot += (double)r->q[d] * k[d];
            mag += fabs((double)r->q[d] * k[d]);
        }
        if (r->l->rotate_k) kv_rotate(k, dim);
        for (int b = 0; quant && b < dim; b += 32) {
            double top = 0, sum = 0;
            for (int d = b; d < b + 32; d++) top = fmax(top, fabs((double)qr[d])), sum += fabs((double)k[d]);
            step += top * sum;
        }
        double squares = 0, k_most = 0, k_sum = 0;
        for (int d = 0; d < dim; d++) {
            double e = (double)qr[d] * k[d];
            squares += e * e;
            k_sum += fabs((double)k[d]);
            k_most = fmax(k_most, fabs((double)k[d]));
        }
        double low = k_sum * half_step(q_most) + q_sum * half_step(k_most);
        *half = fmax(*half, (4 * 0x1p-11 * sqrt(2 * squares) + low) * fabs((double)r->a->scale));
        s[p - r->lo] = dot * r->a->scale;
        *sum_abs = fmax(*sum_abs, mag * fabs((double)r->a->scale));
        *q_step = fmax(*q_step, step * fabs((double)r->a->scale));
    }
}

static void one_head(double *o, double *tol, const struct row *r) {
    int64_t n = r->hi - r->lo;
    double *s = malloc((size_t)n * sizeof *s), top = -INFINITY, sum = 0, vmax = 0, sum_abs, q_step, half;
    scores(s, &sum_abs, &q_step, &half, r);
    for (int64_t i = 0; i < n; i++) top = fmax(top, s[i]);
    for (int d = 0; d < r->l->head_dim_v; d++) o[d] = 0;
    for (int64_t i = 0; i < n; i++) {
        double p = exp(s[i] - top);
        float v[KV_MAX_DIM];
        sum += p;
        if (p < 1e-30) continue; /* cannot be seen in the sum; saves decoding in long contexts */
        kv_get(r->a->kv, r->a->il, r->lo + i, r->kv_head, KV_V, v);
        for (int d = 0; d < r->l->head_dim_v; d++) o[d] += p * v[d], vmax = fmax(vmax, fabs((double)v[d]));
    }
    for (int d = 0; d < r->l->head_dim_v; d++) o[d] /= sum;
    double score = 4 * 0x1p-24 * sqrt(r->l->head_dim_k) * sum_abs + 0x1p-16 * q_step;
    /* Values that are rotated back carry the rounding of every value of their row. */
    double rotated = r->l->rotate_v ? sqrt(r->l->head_dim_v) : 1;
    *tol = vmax * rotated * (2 * score + 0x1p-24 * (16 + sqrt((double)n / 16)));
    if (r->half)
        *tol = vmax * rotated * (expm1(2 * (score + half)) + 2 * 0x1p-11 + 0x1p-40 * (double)n + 0x1p-24 * (16 + sqrt((double)n))) +
               half_step(vmax);
    free(s);
}

static void all_heads(double *o, double *tol, const struct attn_args *a, int tok, bool half) {
    const struct kv_layer *l = &a->kv->layers[a->il];
    int group = a->n_head / l->n_kv;
    for (int h = 0; h < a->n_head; h++) {
        struct row r = {.a = a, .l = l, .head = h, .kv_head = h / group, .hi = a->pos0 + tok + 1, .half = half};
        r.q = a->q + ((size_t)tok * (size_t)a->n_head + (size_t)h) * (size_t)l->head_dim_k;
        r.lo = a->window && r.hi > a->window ? r.hi - a->window : 0;
        one_head(o + (size_t)h * (size_t)l->head_dim_v, &tol[h], &r);
    }
}

void ref_attn_row(double *o, double *tol, const struct attn_args *a, int tok) { all_heads(o, tol, a, tok, false); }
void ref_attn_row_half(double *o, double *tol, const struct attn_args *a, int tok) { all_heads(o, tol, a, tok, true); }
