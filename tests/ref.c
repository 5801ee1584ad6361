/* ref.c: see ref.h. */
#include "tests/ref.h"

#include "core/f16.h"
#include "core/quant.h"
#include "core/strip.h"
#include "tests/support.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Byte positions of the binary16 fields of a block: scale, and minimum where there is one. */
struct fields {
    int d, m;
};

static struct fields fields(int type) {
    switch (type) {
    case QT_Q4_1:
    case QT_Q5_1:
    case QT_Q4_K:
    case QT_Q5_K:
        return (struct fields){0, 2};
    case QT_Q2_K:
        return (struct fields){80, 82};
    case QT_Q3_K:
        return (struct fields){108, -1};
    case QT_Q6_K:
        return (struct fields){208, -1};
    case QT_TQ2_0:
        return (struct fields){64, -1};
    case QT_F32:
    case QT_F16:
    case QT_BF16:
    case QT_MXFP4:
    case QT_NVFP4:
        return (struct fields){-1, -1};
    default:
        return (struct fields){0, -1};
    }
}

static void put_f16(uint8_t *p, int at, float v) {
    uint16_t h = f32_to_f16(v);
    if (at >= 0) memcpy(p + at, &h, 2);
}

void *ref_random_rows(int type, int64_t rows, int64_t cols, uint64_t seed) {
    const struct quant_info *q = quant_info(type);
    int64_t n = rows * (cols / q->block_elems);
    uint8_t *data = malloc((size_t)n * (size_t)q->block_bytes);
    struct fields f = fields(type);
    for (int64_t b = 0; b < n; b++) {
        uint8_t *p = data + b * q->block_bytes;
        for (int i = 0; i < q->block_bytes; i++) p[i] = (uint8_t)(test_rand(&seed) >> 24);
        float zero = test_rand(&seed) % 16 ? 1 : 0;
        put_f16(p, f.d, zero * test_normal(&seed) / 64);
        put_f16(p, f.m, test_normal(&seed) / 64);
        float v = test_normal(&seed);
        uint16_t bf = f32_to_bf16(v);
        if (type == QT_F32) memcpy(p, &v, 4);
        if (type == QT_F16) put_f16(p, 0, v);
        if (type == QT_BF16) memcpy(p, &bf, 2);
        if (type == QT_MXFP4)
            p[0] = (uint8_t)(test_rand(&seed) % 32 ? 120 + test_rand(&seed) % 8 : test_rand(&seed) % 3);
    }
    return data;
}

void *ref_strips(int type, const void *w, int64_t rows, int64_t cols) {
    struct strip_layout l;
    size_t row = 0;
    bool ok = strip_layout(&l, type, rows, cols) && quant_row_bytes(&row, type, cols);
    assert(ok);
    (void)ok;
    uint8_t *data = aligned_alloc(STRIP_ALIGN, l.bytes);
    for (int64_t s = 0; s < l.n_strip; s++) {
        int64_t left = rows - s * STRIP_ROWS;
        strip_pack(&l, type, data + (size_t)s * l.strip_bytes, (const uint8_t *)w + (size_t)(s * STRIP_ROWS) * row,
                   cols, (int)(left < STRIP_ROWS ? left : STRIP_ROWS));
    }
    return data;
}

void ref_quantise(double *x_hat, const float *x, int64_t cols) {
    for (int64_t i = 0; i < cols; i += 32) {
        float max = 0;
        for (int k = 0; k < 32; k++) max = fabsf(x[i + k]) > max ? fabsf(x[i + k]) : max;
        float d = max / 127;
        /* The limit is reached only by a subnormal d, which is imprecise. */
        for (int k = 0; k < 32; k++)
            x_hat[i + k] = d == 0 ? 0 : (double)d * (double)fminf(127, fmaxf(-127, rintf(x[i + k] / d)));
    }
}

static double dot(const float *w, const double *x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += (double)w[i] * x[i];
    return s;
}

void ref_matmul(double *y, int type, const void *w, int64_t rows, int64_t cols, const float *x, int n_tok,
                const float *bias) {
    size_t row_bytes = 0;
    quant_row_bytes(&row_bytes, type, cols);
    float *row = malloc((size_t)cols * sizeof *row);
    double *xd = malloc((size_t)cols * sizeof *xd);
    for (int64_t r = 0; r < rows; r++) {
        quant_decode_row(type, (const uint8_t *)w + (size_t)r * row_bytes, row, cols);
        for (int t = 0; t < n_tok; t++) {
            for (int64_t i = 0; i < cols; i++) xd[i] = x[t * cols + i];
            y[t * rows + r] = dot(row, xd, cols) + (bias ? bias[r] : 0);
        }
    }
    free(row), free(xd);
}

static bool is_plain(int type) {
    return quant_info(type)->block_elems == 1;
}

void ref_matmul_contract(double *y, double *size, int type, const void *w, int64_t rows, int64_t cols, const float *x,
                         int n_tok, const float *bias) {
    size_t row_bytes = 0;
    quant_row_bytes(&row_bytes, type, cols);
    const struct quant_info *q = quant_info(type);
    struct fields f = fields(type);
    uint8_t *packed = malloc(row_bytes);
    float *row = malloc((size_t)cols * sizeof *row), *scaled = malloc((size_t)cols * sizeof *scaled);
    double *xh = malloc((size_t)(n_tok * cols) * sizeof *xh);
    for (int64_t i = 0; i < n_tok * cols; i++) xh[i] = x[i];
    for (int t = 0; t < n_tok && !is_plain(type); t++) ref_quantise(xh + t * cols, x + t * cols, cols);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(packed, (const uint8_t *)w + (size_t)r * row_bytes, row_bytes);
        quant_decode_row(type, packed, row, cols);
        for (size_t b = 0; b < row_bytes; b += (size_t)q->block_bytes) put_f16(packed + b, f.m, 0);
        quant_decode_row(type, packed, scaled, cols);
        for (int t = 0; t < n_tok; t++) {
            const double *xt = xh + t * cols;
            double sum = 0, abs_sum = 0;
            for (int64_t i = 0; i < cols; i++) {
                sum += (double)row[i] * xt[i];
                abs_sum += (fabs((double)scaled[i]) + fabs((double)scaled[i] - (double)row[i])) * fabs(xt[i]);
            }
            y[t * rows + r] = sum + (bias ? bias[r] : 0);
            size[t * rows + r] = abs_sum + (bias ? fabs((double)bias[r]) : 0);
        }
    }
    free(packed), free(row), free(scaled), free(xh);
}

double ref_matmul_tolerance(int type, int64_t cols) {
    bool sixteen = type == QT_Q2_K || type == QT_Q3_K || type == QT_Q6_K || type == QT_NVFP4;
    int64_t terms = is_plain(type) ? cols : cols / (sixteen ? 16 : 32);
    if (fields(type).m >= 0) terms *= 2;
    return (double)(2 * terms + 6) * 0x1p-24;
}
