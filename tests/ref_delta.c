/* ref_delta.c: see ref_delta.h. Written from the formulas in core/ops.h, one line each. */
#include "tests/ref_delta.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void ref_delta_step(double *s, double *o, const double *q, const double *k, const double *v, double g, double beta, int n_row, int dim) {
    double decay = exp(g);
    for (int r = 0; r < n_row; r++) {
        double *row = s + (int64_t)r * dim, sk = 0;
        for (int d = 0; d < dim; d++) row[d] *= decay;
        for (int d = 0; d < dim; d++) sk += row[d] * k[d];
        double e = beta * (v[r] - sk);
        o[r] = 0;
        for (int d = 0; d < dim; d++) {
            row[d] += k[d] * e;
            o[r] += row[d] * q[d];
        }
    }
}

static double silu(double x) { return x / (1 + exp(-x)); }

static void to_unit(double *x, int n, double scale, double eps) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= scale / fmax(sqrt(sum), eps);
}

/* c [conv_dim] of one token; `last` moves on. */
static void convolve(double *c, double *last, const struct delta_args *a, const float *u) {
    int64_t n = delta_conv_dim(&a->shape);
    int taps = a->shape.n_conv;
    for (int64_t ch = 0; ch < n; ch++) {
        double sum = a->conv[ch * taps + taps - 1] * (double)u[ch];
        for (int i = 0; i < taps - 1; i++) sum += a->conv[ch * taps + i] * last[i * n + ch];
        c[ch] = silu(sum);
    }
    memmove(last, last + n, (size_t)(taps - 2) * (size_t)n * sizeof *last);
    for (int64_t ch = 0; ch < n; ch++) last[(taps - 2) * n + ch] = u[ch];
}

void ref_delta(double *y, double *last, double *s, const struct delta_args *a) {
    const struct delta_shape *sh = &a->shape;
    int dim = sh->dim, hk = sh->n_key, hv = sh->n_value;
    int64_t n = delta_conv_dim(sh);
    double *c = malloc((size_t)n * sizeof *c);
    for (int t = 0; t < a->n_tok; t++) {
        convolve(c, last, a, a->u + t * n);
        for (int h = 0; h < hk; h++) {
            to_unit(c + h * dim, dim, 1 / sqrt(dim), a->eps);
            to_unit(c + (hk + h) * dim, dim, 1, a->eps);
        }
        for (int j = 0; j < hv; j++) {
            int key = sh->tiled ? j % hk : j / (hv / hk);
            double *o = y + ((int64_t)t * hv + j) * dim, pre = (double)a->a[t * hv + j] + a->dt[j], sum = 0;
            double g = a->rate[j] * (pre > 20 ? pre : log1p(exp(pre))), beta = 1 / (1 + exp(-(double)a->b[t * hv + j]));
            ref_delta_step(s + (int64_t)j * dim * dim, o, c + key * dim, c + (hk + key) * dim, c + (2 * hk + j) * dim, g, beta, dim, dim);
            for (int d = 0; d < dim; d++) sum += o[d] * o[d];
            for (int d = 0; d < dim; d++) o[d] = a->norm[d] * o[d] / sqrt(sum / dim + a->eps) * silu(a->z[((int64_t)t * hv + j) * dim + d]);
        }
    }
    free(c);
}
