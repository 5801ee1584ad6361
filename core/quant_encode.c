/* quant_encode.c: packs f32 rows into the block types, without importance data. One encode_NAME per type handles one
 * block. All sums are f32 in element order, which is what makes the bytes equal to the common reference quantisers
 * (tests/test_quant.c); Q3_K, IQ4_NL and IQ4_XS search in a way of our own. */
#include "core/quant.h"

#include "core/err.h"
#include "core/f16.h"

#include <math.h>
#include <string.h>

/* Half to even, as opposed to roundf (half away from zero): the two are not interchangeable for equal bytes. */
static int nearest(float x) {
    return (int)lrintf(x);
}

/* roundf for |x| < 2^31 without a library call: x - trunc(x) is exact. */
static int round_away(float x) {
    int i = (int)x;
    float rest = x - (float)i;
    return i + (rest >= 0.5f) - (rest <= -0.5f);
}

static int clamp(int v, int lo, int hi) {
    return v < lo ? lo : v > hi ? hi : v;
}

/* Truncation to 0..top that is also defined for NaN, which 0 * (1/subnormal) gives. */
static uint8_t truncate(float v, int top) {
    return (uint8_t)(v > 0 ? v < (float)top ? (int)v : top : 0);
}

/* The value of largest magnitude, with its sign; the first of equals. */
static float signed_extreme(const float *x, int n) {
    float m = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > fabsf(m)) m = x[i];
    return m;
}

static void range(float *lo, float *hi, const float *x, int n) {
    *lo = *hi = x[0];
    for (int i = 1; i < n; i++) {
        if (x[i] < *lo) *lo = x[i];
        if (x[i] > *hi) *hi = x[i];
    }
}

/* --- whole numbers ---------------------------------------------------------------------------------------------------- */

static void encode_F32(const float *x, void *dst) {
    memcpy(dst, x, sizeof *x);
}
static void encode_F16(const float *x, void *dst) {
    *(uint16_t *)dst = f32_to_f16(*x);
}
static void encode_BF16(const float *x, void *dst) {
    *(uint16_t *)dst = f32_to_bf16(*x);
}

/* --- blocks of 32 ------------------------------------------------------------------------------------------------------ */

static void pack_nibbles(uint8_t *qs, const uint8_t *q, int half) {
    for (int j = 0; j < half; j++) qs[j] = (uint8_t)((q[j] & 15) | (q[j + half] & 15) << 4);
}

static void pack_fifth_bits(uint8_t qh[4], const uint8_t q[32]) {
    memset(qh, 0, 4);
    for (int i = 0; i < 32; i++) qh[i >> 3] |= (uint8_t)((q[i] >> 4) << (i & 7));
}

/* Symmetric codes 0..2*half-1 with zero at half; the extreme value gets code 0. */
static uint16_t codes_symmetric(uint8_t q[32], const float *x, int half) {
    float d = signed_extreme(x, 32) / (float)-half, id = d != 0 ? 1 / d : 0;
    for (int i = 0; i < 32; i++) q[i] = truncate(x[i] * id + ((float)half + 0.5f), 2 * half - 1);
    return f32_to_f16(d);
}

/* Codes 0..top from the minimum up. */
static uint16_t codes_offset(uint8_t q[32], uint16_t *m, const float *x, int top) {
    float lo, hi;
    range(&lo, &hi, x, 32);
    float d = (hi - lo) / (float)top, id = d != 0 ? 1 / d : 0;
    for (int i = 0; i < 32; i++) q[i] = truncate((x[i] - lo) * id + 0.5f, top);
    *m = f32_to_f16(lo);
    return f32_to_f16(d);
}

static void encode_Q4_0(const float *x, void *dst) {
    struct q4_0 *b = dst;
    uint8_t q[32];
    b->d = codes_symmetric(q, x, 8);
    pack_nibbles(b->qs, q, 16);
}

static void encode_Q4_1(const float *x, void *dst) {
    struct q4_1 *b = dst;
    uint8_t q[32];
    b->d = codes_offset(q, &b->m, x, 15);
    pack_nibbles(b->qs, q, 16);
}

static void encode_Q5_0(const float *x, void *dst) {
    struct q5_0 *b = dst;
    uint8_t q[32];
    b->d = codes_symmetric(q, x, 16);
    pack_nibbles(b->qs, q, 16);
    pack_fifth_bits(b->qh, q);
}

static void encode_Q5_1(const float *x, void *dst) {
    struct q5_1 *b = dst;
    uint8_t q[32];
    b->d = codes_offset(q, &b->m, x, 31);
    pack_nibbles(b->qs, q, 16);
    pack_fifth_bits(b->qh, q);
}

static void encode_Q8_0(const float *x, void *dst) {
    struct q8_0 *b = dst;
    float d = fabsf(signed_extreme(x, 32)) / 127, id = d != 0 ? 1 / d : 0;
    b->d = f32_to_f16(d);
    for (int i = 0; i < 32; i++) {
        float v = x[i] * id;
        b->qs[i] =
            (int8_t)(fabsf(v) < 127.5f ? round_away(v) : 0); /* NaN when d is subnormal: the block is zero in f16 */
    }
}

static void encode_MXFP4(const float *x, void *dst) {
    struct mxfp4 *b = dst;
    /* The exponent field is floor(log2) + 127; 2 less because the largest code is 6 = 1.5 * 2^2. */
    int e = (int)(f32_bits(signed_extreme(x, 32)) >> 23 & 255) - 2;
    b->e = (uint8_t)(e > 0 ? e : 0);
    float s = e8m0_half_to_f32(b->e);
    uint8_t q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = 0;
        for (int c = 1; c < 16; c++)
            if (fabsf((float)quant_fp4_values[c] * s - x[i]) < fabsf((float)quant_fp4_values[q[i]] * s - x[i]))
                q[i] = (uint8_t)c;
    }
    pack_nibbles(b->qs, q, 16);
}

/* --- table of 16 values: IQ4_NL, IQ4_XS --------------------------------------------------------------------------------- */

/* Code whose table value is nearest to v; the lower one on ties. */
static uint8_t nearest_iq4(float v) {
    int lo = 0, hi = 15;
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (v < (float)quant_iq4_values[mid])
            hi = mid;
        else
            lo = mid;
    }
    return (uint8_t)(v - (float)quant_iq4_values[lo] <= (float)quant_iq4_values[hi] - v ? lo : hi);
}

/* Scale for 32 values: each candidate maps the extreme value near the end of the table, and its codes give the best scale
 * for them by least squares. Weights |x|: large values matter more, but x^2 costs 1-2 % of RMS error. 0 for all zeros. */
static float search_iq4(const float *x) {
    enum { TRIES = 8 };
    float m = signed_extreme(x, 32), scale = 0, best = 0;
    if (fabsf(m) < 1e-15f) return 0;
    for (int t = -TRIES; t <= TRIES; t++) {
        float inv = ((float)quant_iq4_values[0] + (float)t) / m, sxq = 0, sqq = 0;
        for (int i = 0; i < 32; i++) {
            float q = (float)quant_iq4_values[nearest_iq4(inv * x[i])], w = fabsf(x[i]);
            sxq += w * q * x[i];
            sqq += w * q * q;
        }
        if (sqq > 0 && sxq * sxq > best * sqq) {
            scale = sxq / sqq;
            best = scale * sxq;
        }
    }
    return scale;
}

static void codes_iq4(uint8_t q[32], const float *x, float d) {
    float id = d != 0 ? 1 / d : 0;
    for (int i = 0; i < 32; i++) q[i] = nearest_iq4(id * x[i]);
}

static void encode_IQ4_NL(const float *x, void *dst) {
    struct iq4_nl *b = dst;
    uint8_t q[32];
    b->d = f32_to_f16(search_iq4(x));
    codes_iq4(q, x, f16_to_f32(b->d));
    pack_nibbles(b->qs, q, 16);
}

static void encode_IQ4_XS(const float *x, void *dst) {
    struct iq4_xs *b = dst;
    float scale[8];
    for (int j = 0; j < 8; j++) scale[j] = search_iq4(x + 32 * j);
    /* 6-bit scales reach from -32 to 31: the extreme one goes to -32. */
    float top = signed_extreme(scale, 8), d = top / -32, id = d != 0 ? 1 / d : 0;
    memset(b, 0, sizeof *b);
    b->d = f32_to_f16(d);
    d = f16_to_f32(b->d);
    for (int j = 0; j < 8; j++) {
        int s = clamp(nearest(id * scale[j]), -32, 31);
        uint8_t q[32];
        codes_iq4(q, x + 32 * j, d * (float)s);
        pack_nibbles(b->qs + 16 * j, q, 16);
        b->scales_l[j >> 1] |= (uint8_t)(((s + 32) & 15) << (4 * (j & 1)));
        b->scales_h |= (uint16_t)(((s + 32) >> 4) << (2 * j));
    }
}

/* --- asymmetric search: Q2_K, Q4_K, Q5_K -------------------------------------------------------------------------------- */

enum error_kind { ERROR_SQUARE, ERROR_ABSOLUTE };

/* How search_offset looks for a scale: codes 0..top, candidate t shifts top by first + 0.1 * t for t = 0..steps. */
struct search {
    int top;
    float first;
    int steps;
    enum error_kind kind;
};

static float weighted_error(const uint8_t *q, const float *x, const float *w, int n, float scale, float lo,
                            enum error_kind kind) {
    float sum = 0;
    for (int i = 0; i < n; i++) {
        float e = scale * (float)q[i] + lo - x[i];
        sum += w[i] * (kind == ERROR_ABSOLUTE ? fabsf(e) : e * e);
    }
    return sum;
}

/* Scale and non-negative minimum with x ~ scale * q - minimum, and the codes q[n]. Every candidate's codes give the best
 * line through them by weighted least squares; a line above zero is refitted through zero. n <= 32. */
static float search_offset(uint8_t *q, float *minimum, const float *x, const float *w, int n, const struct search *s) {
    float lo, hi, sw = 0, sx = 0;
    range(&lo, &hi, x, n);
    for (int i = 0; i < n; i++) {
        sw += w[i];
        sx += w[i] * x[i];
    }
    if (lo > 0) lo = 0;
    memset(q, 0, (size_t)n);
    *minimum = -lo;
    if (hi == lo) return 0;
    float inv = (float)s->top / (hi - lo), scale = 1 / inv;
    for (int i = 0; i < n; i++) q[i] = (uint8_t)clamp(nearest(inv * (x[i] - lo)), 0, s->top);
    float best = weighted_error(q, x, w, n, scale, lo, s->kind);
    for (int t = 0; t <= s->steps; t++) {
        inv = (s->first + 0.1f * (float)t + (float)s->top) / (hi - lo);
        float sl = 0, sll = 0, sxl = 0;
        uint8_t l[32];
        for (int i = 0; i < n; i++) {
            l[i] = (uint8_t)clamp(nearest(inv * (x[i] - lo)), 0, s->top);
            float c = (float)l[i];
            sl += w[i] * c;
            sll += w[i] * c * c;
            sxl += w[i] * c * x[i];
        }
        float det = sw * sll - sl * sl;
        if (!(det > 0)) continue;
        float a = (sw * sxl - sx * sl) / det, b = (sll * sx - sl * sxl) / det;
        if (b > 0) {
            b = 0;
            a = sxl / sll;
        }
        float error = weighted_error(l, x, w, n, a, b, s->kind);
        if (error < best) {
            memcpy(q, l, (size_t)n);
            best = error;
            scale = a;
            lo = b; /* later candidates start from the better minimum */
        }
    }
    *minimum = -lo;
    return scale;
}

/* Codes 0..top of n non-negative values relative to their maximum; *d is the step, rounded to f16. */
static void encode_scales(uint8_t *code, uint16_t *d, const float *v, int n, int top) {
    float max = 0;
    for (int i = 0; i < n; i++)
        if (v[i] > max) max = v[i];
    float inv = max > 0 ? (float)top / max : 0;
    for (int i = 0; i < n; i++) code[i] = (uint8_t)clamp(nearest(inv * v[i]), 0, top);
    *d = f32_to_f16(max / (float)top);
}

/* Codes again, with the scale and minimum as stored. A zero scale keeps the old codes: they do not matter. */
static void recode(uint8_t *q, const float *x, int n, float scale, float min, int top) {
    if (scale == 0) return;
    for (int i = 0; i < n; i++) q[i] = (uint8_t)clamp(nearest((x[i] + min) / scale), 0, top);
}

static void encode_Q2_K(const float *x, void *dst) {
    static const struct search how = {.top = 3, .first = -0.5f, .steps = 15, .kind = ERROR_ABSOLUTE};
    struct q2_k *b = dst;
    uint8_t q[256], sc[16], mn[16];
    float scale[16], min[16], w[16];
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 16; i++) w[i] = fabsf(x[16 * k + i]);
        scale[k] = search_offset(q + 16 * k, &min[k], x + 16 * k, w, 16, &how);
    }
    encode_scales(sc, &b->d, scale, 16, 15);
    encode_scales(mn, &b->dmin, min, 16, 15);
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    memset(b->qs, 0, sizeof b->qs);
    for (int k = 0; k < 16; k++) {
        b->scales[k] = (uint8_t)(sc[k] | mn[k] << 4);
        recode(q + 16 * k, x + 16 * k, 16, d * (float)sc[k], dmin * (float)mn[k], 3);
    }
    for (int i = 0; i < 256; i++) b->qs[32 * (i >> 7) + (i & 31)] |= (uint8_t)(q[i] << (2 * ((i >> 5) & 3)));
}

static void pack_k4_scales(uint8_t s[12], const uint8_t sc[8], const uint8_t mn[8]) {
    for (int j = 0; j < 4; j++) {
        s[j] = (uint8_t)(sc[j] | (sc[j + 4] >> 4) << 6);
        s[j + 4] = (uint8_t)(mn[j] | (mn[j + 4] >> 4) << 6);
        s[j + 8] = (uint8_t)((sc[j + 4] & 15) | (mn[j + 4] & 15) << 4);
    }
}

/* The part that Q4_K and Q5_K share: scales, minima and 256 codes of eight groups of 32. */
static void encode_groups(uint8_t q[256], uint16_t *d16, uint16_t *dmin16, uint8_t packed[12], const float *x,
                          const struct search *how) {
    float scale[8], min[8], w[32];
    uint8_t sc[8], mn[8];
    for (int j = 0; j < 8; j++) {
        const float *xj = x + 32 * j;
        float sum = 0;
        for (int i = 0; i < 32; i++) sum += xj[i] * xj[i];
        float rms = sqrtf(sum / 32);
        for (int i = 0; i < 32; i++) w[i] = rms + fabsf(xj[i]);
        scale[j] = search_offset(q + 32 * j, &min[j], xj, w, 32, how);
    }
    encode_scales(sc, d16, scale, 8, 63);
    encode_scales(mn, dmin16, min, 8, 63);
    pack_k4_scales(packed, sc, mn);
    float d = f16_to_f32(*d16), dmin = f16_to_f32(*dmin16);
    for (int j = 0; j < 8; j++) recode(q + 32 * j, x + 32 * j, 32, d * (float)sc[j], dmin * (float)mn[j], how->top);
}

static void pack_groups(uint8_t qs[128], const uint8_t q[256]) {
    for (int p = 0; p < 4; p++) pack_nibbles(qs + 32 * p, q + 64 * p, 32);
}

static void encode_Q4_K(const float *x, void *dst) {
    static const struct search how = {.top = 15, .first = -1, .steps = 20, .kind = ERROR_SQUARE};
    struct q4_k *b = dst;
    uint8_t q[256];
    encode_groups(q, &b->d, &b->dmin, b->scales, x, &how);
    pack_groups(b->qs, q);
}

static void encode_Q5_K(const float *x, void *dst) {
    static const struct search how = {.top = 31, .first = -0.5f, .steps = 15, .kind = ERROR_SQUARE};
    struct q5_k *b = dst;
    uint8_t q[256];
    encode_groups(q, &b->d, &b->dmin, b->scales, x, &how);
    pack_groups(b->qs, q);
    memset(b->qh, 0, sizeof b->qh);
    for (int i = 0; i < 256; i++) b->qh[i & 31] |= (uint8_t)((q[i] >> 4) << (i >> 5));
}

/* --- symmetric search: Q3_K, Q6_K --------------------------------------------------------------------------------------- */

/* Scale of 16 values with weights w and codes -half..half-1. 0 for an all-zero group. */
static float search_symmetric(const float *x, const float *w, int half) {
    float m = signed_extreme(x, 16), scale = 0, best = 0;
    if (fabsf(m) < 1e-15f) return 0;
    for (int step = 0; step < 19; step++) {
        int t = step == 0 ? 0 : step <= 9 ? step - 10 : step - 9; /* 0 first, then -9..-1, 1..9 */
        float inv = -((float)half + 0.1f * (float)t) / m, sxl = 0, sll = 0;
        for (int i = 0; i < 16; i++) {
            float l = (float)clamp(nearest(inv * x[i]), -half, half - 1);
            sxl += w[i] * x[i] * l;
            sll += w[i] * l * l;
        }
        if (sll > 0 && (step == 0 || sxl * sxl > best * sll)) {
            scale = sxl / sll;
            best = scale * sxl;
        }
    }
    return scale;
}

static void encode_Q3_K(const float *x, void *dst) {
    struct q3_k *b = dst;
    float scale[16], w[256];
    for (int i = 0; i < 256; i++) w[i] = fabsf(x[i]);
    for (int k = 0; k < 16; k++) scale[k] = search_symmetric(x + 16 * k, w + 16 * k, 4);
    float d = signed_extreme(scale, 16) / -32, id = d != 0 ? 1 / d : 0;
    memset(b, 0, sizeof *b);
    b->d = f32_to_f16(d);
    d = f16_to_f32(b->d);
    for (int k = 0; k < 16; k++) {
        int s = clamp(nearest(id * scale[k]), -32, 31);
        b->scales[k & 7] |= (uint8_t)(((s + 32) & 15) << (k < 8 ? 0 : 4));
        b->scales[8 + (k & 3)] |= (uint8_t)(((s + 32) >> 4) << (2 * (k >> 2)));
        float dk = d * (float)s;
        for (int i = 16 * k; i < 16 * k + 16; i++) {
            int q = dk != 0 ? clamp(nearest(x[i] / dk), -4, 3) + 4 : 4;
            b->qs[32 * (i >> 7) + (i & 31)] |= (uint8_t)((q & 3) << (2 * ((i >> 5) & 3)));
            b->hmask[i & 31] |= (uint8_t)((q >> 2) << (i >> 5));
        }
    }
}

static void encode_Q6_K(const float *x, void *dst) {
    struct q6_k *b = dst;
    float scale[16], w[256];
    for (int i = 0; i < 256; i++) w[i] = x[i] * x[i];
    for (int k = 0; k < 16; k++) scale[k] = search_symmetric(x + 16 * k, w + 16 * k, 32);
    float top = signed_extreme(scale, 16);
    memset(b, 0, sizeof *b);
    if (fabsf(top) < 1e-15f) return;
    float inv = -128 / top;
    b->d = f32_to_f16(1 / inv);
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 256; i++) {
        int n = i >> 7, g = (i >> 5) & 3, l = i & 31, k = i >> 4;
        if ((i & 15) == 0) b->scales[k] = (int8_t)clamp(nearest(inv * scale[k]), -128, 127);
        float dk = d * (float)b->scales[k];
        /* With a zero scale the code does not matter; 32 decodes to the neutral value. */
        int q = dk != 0 ? clamp(nearest(x[i] / dk), -32, 31) + 32 : 32;
        b->ql[64 * n + 32 * (g & 1) + l] |= (uint8_t)((q & 15) << (g < 2 ? 0 : 4));
        b->qh[32 * n + l] |= (uint8_t)((q >> 4) << (2 * g));
    }
}

/* ------------------------------------------------------------------------------------------------------------------------ */

/* The scale of a block is an f16 (MXFP4: a power of two), so values beyond f16 are refused along with NaN and infinity. */
static int check_values(const struct quant_info *info, const float *src, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf(src[i]) <= 65504))
            return err_set(ERR_NUMERIC, "value %lld is %g, which %s cannot hold", (long long)i, (double)src[i],
                           info->name);
    return 0;
}

int quant_encode_row(int type, const float *src, void *dst, int64_t n) {
    const struct quant_info *info = quant_info(type);
    if (!info || !info->encodable) return err_set(ERR_ARG, "type %s (%d) cannot be written", quant_name(type), type);
    if (n < 0 || n % info->block_elems)
        return err_set(ERR_ARG, "a row of %lld values is not a multiple of the %d of a %s block", (long long)n,
                       info->block_elems, info->name);
    if (info->block_elems > 1) {
        int rc = check_values(info, src, n);
        if (rc) return rc;
    }
    uint8_t *p = dst;
#define ENCODABLE_0(name, elems, bytes)
#define ENCODABLE_1(name, elems, bytes)                                                                                \
    case QT_##name:                                                                                                    \
        for (int64_t i = 0; i < n; i += elems, p += bytes) encode_##name(src + i, p);                                  \
        break;
#define X(name, id, elems, bytes, enc) ENCODABLE_##enc(name, elems, bytes)
    switch (type) { QUANT_LIST(X) }
#undef X
    return 0;
}
