/* kv_pack.c: the reference packing of KV pages (layout in kv.h): one position at a time, scalar. */
#include "core/kv.h"
#include "core/kv_q4.h"

#include "core/err.h"
#include "core/f16.h"
#include "core/quant.h"

#include <math.h>
#include <string.h>

void kv_rotate(float *x, int dim) {
    int n = dim & -dim;
    if (n > 256) n = 256;
    float scale = 1.0f / sqrtf((float)n);
    for (int b = 0; b < dim; b += n) {
        float *y = x + b;
        for (int h = 1; h < n; h *= 2)
            for (int i = 0; i < n; i += 2 * h)
                for (int j = i; j < i + h; j++) {
                    float s = y[j] + y[j + h], t = y[j] - y[j + h];
                    y[j] = s;
                    y[j + h] = t;
                }
        for (int i = 0; i < n; i++) y[i] *= scale;
    }
}

float kv_type_max(int type) {
    switch (type) {
    case QT_F16: return 65504.0f;
    case QT_BF16: return 3.3895314e38f;
    case QT_Q8_0: return 65504.0f * 127; /* the scale is an f16 */
    case QT_Q4_0: return 65504.0f * 8;
    default: return 3.4028235e38f;
    }
}

static size_t elem_bytes(int type) { return type == QT_F32 ? 4 : 2; }

static void put_plain(unsigned char *p, int type, float x) {
    if (type == QT_F32) {
        memcpy(p, &x, 4);
    } else {
        uint16_t h = type == QT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
        memcpy(p, &h, 2);
    }
}

static float get_plain(const unsigned char *p, int type) {
    if (type == QT_F32) {
        float x;
        memcpy(&x, p, 4);
        return x;
    }
    uint16_t h;
    memcpy(&h, p, 2);
    return type == QT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

/* Codes of 32 values: Q8_0 in -127..127 as the GGUF quantiser gives them, Q4_0 in 0..15. Returns the f16 scale. A scale
 * that rounds to zero decodes as zero whatever the codes are; they are zeroed so that 1/d cannot overflow. */
static uint16_t encode_q8(int *code, const float *x) {
    float amax = 0;
    for (int i = 0; i < KV_BLOCK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    float d = amax / 127;
    uint16_t h = f32_to_f16(d);
    float id = h ? 1 / d : 0;
    for (int i = 0; i < KV_BLOCK; i++) code[i] = (int)roundf(x[i] * id);
    return h;
}

static uint16_t encode_q4(int *code, const float *x) {
    int8_t c[KV_BLOCK];
    uint16_t h = kv_encode_q4(c, x);
    for (int i = 0; i < KV_BLOCK; i++) code[i] = c[i];
    return h;
}

static void set_nibble(unsigned char *p, int high, int code) {
    *p = (unsigned char)(high ? (*p & 0x0f) | code << 4 : (*p & 0xf0) | code);
}

/* Where dim d of position row r (0..255) lies, relative to the head's K values. For Q4_0 *high chooses the nibble. */
static size_t k_at(const struct kv_layer *l, int r, int d, int *high) {
    size_t g = (size_t)r / KV_LANES, lane = (size_t)r % KV_LANES, dim = (size_t)l->head_dim_k, e = (size_t)d;
    if (l->type_k == QT_Q8_0) return ((g * (dim / 4) + e / 4) * KV_LANES + lane) * 4 + e % 4;
    if (l->type_k == QT_Q4_0) {
        size_t bit = 4 * (e % 8 / 2) + 16 * (e % 2);
        *high = bit % 8 != 0;
        return ((g * (dim / 8) + e / 8) * KV_LANES + lane) * 4 + bit / 8;
    }
    return ((g * dim + e) * KV_LANES + lane) * elem_bytes(l->type_k);
}

static size_t ks_at(const struct kv_layer *l, int r, int b) {
    size_t g = (size_t)r / KV_LANES, lane = (size_t)r % KV_LANES;
    return l->ks_off + ((g * (size_t)(l->head_dim_k / KV_BLOCK) + (size_t)b) * KV_LANES + lane) * 2;
}

/* The same for V, relative to the head. */
static size_t v_at(const struct kv_layer *l, int r, int d, int *high) {
    size_t b = (size_t)(d / KV_BLOCK), e = (size_t)(d % KV_BLOCK), row = (size_t)r;
    if (l->type_v == QT_Q4_0) {
        *high = e >= 16;
        return l->v_off + (b * KV_PAGE + row) * 16 + e % 16;
    }
    if (l->type_v == QT_Q8_0) return l->v_off + (b * KV_PAGE + row) * KV_BLOCK + e;
    size_t width = l->head_dim_v - (int)b * KV_BLOCK > 16 ? 32 : 16;
    return l->v_off + (b * KV_PAGE * KV_BLOCK + row * width + e) * elem_bytes(l->type_v);
}

static size_t vs_at(const struct kv_layer *l, int r, int b) { return l->vs_off + ((size_t)b * KV_PAGE + (size_t)r) * 2; }

static bool is_plain(int type) { return type != QT_Q8_0 && type != QT_Q4_0; }

static void put_quant_k(const struct kv_layer *l, unsigned char *h, int r, const float *x) {
    int code[KV_BLOCK], high = 0;
    for (int b = 0; b < l->head_dim_k / KV_BLOCK; b++) {
        uint16_t d = l->type_k == QT_Q8_0 ? encode_q8(code, x + b * KV_BLOCK) : encode_q4(code, x + b * KV_BLOCK);
        memcpy(h + ks_at(l, r, b), &d, 2);
        for (int i = 0; i < KV_BLOCK; i++) {
            unsigned char *p = h + k_at(l, r, b * KV_BLOCK + i, &high);
            if (l->type_k == QT_Q8_0)
                *p = (unsigned char)code[i];
            else
                set_nibble(p, high, code[i]);
        }
    }
}

static void put_quant_v(const struct kv_layer *l, unsigned char *h, int r, const float *x) {
    int code[KV_BLOCK], high = 0;
    for (int b = 0; b < l->head_dim_v / KV_BLOCK; b++) {
        uint16_t d = l->type_v == QT_Q8_0 ? encode_q8(code, x + b * KV_BLOCK) : encode_q4(code, x + b * KV_BLOCK);
        memcpy(h + vs_at(l, r, b), &d, 2);
        for (int i = 0; i < KV_BLOCK; i++) {
            unsigned char *p = h + v_at(l, r, b * KV_BLOCK + i, &high);
            if (l->type_v == QT_Q8_0)
                *p = (unsigned char)code[i];
            else
                set_nibble(p, high, code[i]);
        }
    }
}

void kv_put_ref(struct kv *kv, int il, int64_t pos, int head, const float *k, const float *v) {
    const struct kv_layer *l = &kv->layers[il];
    unsigned char *h = kv_head(kv, il, pos, head);
    int r = (int)(pos % KV_PAGE), high = 0;
    float x[KV_MAX_DIM];
    memcpy(x, k, sizeof *x * (size_t)l->head_dim_k);
    if (l->rotate_k) kv_rotate(x, l->head_dim_k);
    if (is_plain(l->type_k))
        for (int d = 0; d < l->head_dim_k; d++) put_plain(h + k_at(l, r, d, &high), l->type_k, x[d]);
    else
        put_quant_k(l, h, r, x);
    memcpy(x, v, sizeof *x * (size_t)l->head_dim_v);
    if (l->rotate_v) kv_rotate(x, l->head_dim_v);
    if (!is_plain(l->type_v)) {
        put_quant_v(l, h, r, x);
        return;
    }
    int pad = (l->head_dim_v + KV_LANES - 1) / KV_LANES * KV_LANES;
    for (int d = 0; d < pad; d++) put_plain(h + v_at(l, r, d, &high), l->type_v, d < l->head_dim_v ? x[d] : 0);
}

static float get_one(const struct kv_layer *l, const unsigned char *h, enum kv_which which, int r, int d) {
    int type = which == KV_K ? l->type_k : l->type_v, high = 0;
    size_t at = which == KV_K ? k_at(l, r, d, &high) : v_at(l, r, d, &high);
    if (is_plain(type)) return get_plain(h + at, type);
    uint16_t s;
    memcpy(&s, h + (which == KV_K ? ks_at(l, r, d / KV_BLOCK) : vs_at(l, r, d / KV_BLOCK)), 2);
    int code = type == QT_Q8_0 ? (int)(int8_t)h[at] : (high ? h[at] >> 4 : h[at] & 15) - 8;
    return f16_to_f32(s) * (float)code;
}

void kv_get(const struct kv *kv, int il, int64_t pos, int head, enum kv_which which, float *dst) {
    const struct kv_layer *l = &kv->layers[il];
    const unsigned char *h = kv_head(kv, il, pos, head);
    int dim = which == KV_K ? l->head_dim_k : l->head_dim_v;
    for (int d = 0; d < dim; d++) dst[d] = get_one(l, h, which, (int)(pos % KV_PAGE), d);
    if (which == KV_K ? l->rotate_k : l->rotate_v) kv_rotate(dst, dim);
}
