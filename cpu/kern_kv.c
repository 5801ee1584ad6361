/* kern_kv.c: see kern_kv.h. */
#include "cpu/kern_kv.h"

#include "core/kv_q4.h"
#include "core/quant.h"
#include "cpu/simd.h"

#include <math.h>

static bool is_plain(int type) { return type != QT_Q8_0 && type != QT_Q4_0; }

/* false: a value is NaN or too large. */
static bool in_range(const float *x, int n, float most) {
    int bad = 0;
    for (int i = 0; i < n; i++) bad += !(fabsf(x[i]) <= most);
    return bad == 0;
}

/* n (a multiple of 8) values to 16 bits or copied. */
static void narrow(unsigned char *dst, int type, const float *x, int n) {
    if (type == QT_F32) {
        memcpy(dst, x, sizeof *x * (size_t)n);
        return;
    }
    uint16_t *h = (uint16_t *)dst;
    int i = 0;
    if (type == QT_F16) {
        for (; i + VLEN <= n; i += VLEN) vf_store_f16(h + i, vf_load(x + i));
        for (; i < n; i++) h[i] = f32_to_f16(x[i]);
    } else {
        for (; i < n; i++) h[i] = f32_to_bf16(x[i]);
    }
}

/* Codes of 32 values, see encode_q8 of core/kv_pack.c. roundf by hand, so that it becomes vector code: the
 * difference from the truncated value is exact. */
static uint16_t encode_q8(int8_t *code, const float *x) {
    float amax = 0;
    for (int i = 0; i < KV_BLOCK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    float d = amax / 127;
    uint16_t h = f32_to_f16(d);
    float id = h ? 1 / d : 0;
    for (int i = 0; i < KV_BLOCK; i++) {
        float y = x[i] * id;
        int t = (int)y;
        float rest = y - (float)t;
        code[i] = (int8_t)(t + (rest >= 0.5f) - (rest <= -0.5f));
    }
    return h;
}

static uint16_t encode(int type, int8_t *code, const float *x) {
    return type == QT_Q8_0 ? encode_q8(code, x) : kv_encode_q4(code, x);
}

/* One position of quantised K: a word of each 32 bits, 16 words apart. */
static void put_k_quant(const struct kv_layer *l, unsigned char *head, int r, const float *x) {
    size_t g = (size_t)r / KV_LANES, lane = (size_t)r % KV_LANES;
    int per_word = l->type_k == QT_Q8_0 ? 4 : 8, blocks = l->head_dim_k / KV_BLOCK;
    uint32_t *word = (uint32_t *)head + g * (size_t)(l->head_dim_k / per_word) * KV_LANES + lane;
    uint16_t *scale = (uint16_t *)(head + l->ks_off) + g * (size_t)blocks * KV_LANES + lane;
    for (int b = 0; b < blocks; b++) {
        int8_t c[KV_BLOCK];
        scale[b * KV_LANES] = encode(l->type_k, c, x + b * KV_BLOCK);
        for (int w = 0; w < KV_BLOCK / per_word; w++, word += KV_LANES) {
            uint32_t u = 0;
            if (per_word == 4)
                memcpy(&u, c + 4 * w, 4);
            else
                for (int i = 0; i < 8; i++) u |= (uint32_t)c[8 * w + i] << (4 * (i / 2) + 16 * (i % 2));
            *word = u;
        }
    }
}

/* c (1..16) positions of plain K in one group of 16, from lane `lane`; x[c][dim]. */
static void put_k_plain(const struct kv_layer *l, unsigned char *group, int lane, int c, const float *x, size_t x_row) {
    size_t e = l->type_k == QT_F32 ? 4 : 2;
    for (int d = 0; d < l->head_dim_k; d++) {
        float t[VLEN];
        unsigned char h[VLEN * 4];
        if (c == VLEN) {
            for (int p = 0; p < VLEN; p++) t[p] = x[(size_t)p * x_row + (size_t)d];
            narrow(group + (size_t)d * VLEN * e, l->type_k, t, VLEN);
        } else {
            for (int p = 0; p < c; p++) t[p] = x[(size_t)p * x_row + (size_t)d];
            narrow(h, l->type_k, t, c);
            memcpy(group + ((size_t)d * VLEN + (size_t)lane) * e, h, (size_t)c * e);
        }
    }
}

static void put_v_quant(const struct kv_layer *l, unsigned char *head, int r, const float *x) {
    for (int b = 0; b < l->head_dim_v / KV_BLOCK; b++) {
        int8_t c[KV_BLOCK];
        uint16_t d = encode(l->type_v, c, x + b * KV_BLOCK);
        ((uint16_t *)(head + l->vs_off))[b * KV_PAGE + r] = d;
        if (l->type_v == QT_Q8_0) {
            memcpy(head + l->v_off + ((size_t)b * KV_PAGE + (size_t)r) * KV_BLOCK, c, KV_BLOCK);
        } else {
            unsigned char *q = head + l->v_off + ((size_t)b * KV_PAGE + (size_t)r) * 16;
            for (int i = 0; i < 16; i++) q[i] = (unsigned char)(c[i] | c[i + 16] << 4);
        }
    }
}

static void put_v_plain(const struct kv_layer *l, unsigned char *head, int r, const float *x) {
    size_t e = l->type_v == QT_F32 ? 4 : 2;
    for (int d = 0; d < l->head_dim_v; d += KV_BLOCK) {
        int left = l->head_dim_v - d, n = left < KV_BLOCK ? left : KV_BLOCK, width = left > 16 ? 32 : 16;
        unsigned char *p = head + l->v_off + ((size_t)d * KV_PAGE + (size_t)r * (size_t)width) * e;
        narrow(p, l->type_v, x + d, n);
        if (n < width) memset(p + (size_t)n * e, 0, (size_t)(width - n) * e);
    }
}

/* Rows that must be rotated or checked one by one come here 16 at a time. Returns how many are sound. */
static int prepare(float *x, const float *src, size_t row, int n, int dim, int type, bool rotate) {
    for (int p = 0; p < n; p++) {
        float *y = x + (size_t)p * (size_t)dim;
        memcpy(y, src + (size_t)p * row, sizeof *y * (size_t)dim);
        if (rotate) kv_rotate(y, dim);
        if (!in_range(y, dim, kv_type_max(type))) return p;
    }
    return n;
}

static int put(const struct kv_layer *l, unsigned char *head, int r0, int n, const float *k, size_t k_row, const float *v,
               size_t v_row) {
    float x[KV_LANES * KV_MAX_DIM];
    int done = 0;
    while (done < n) {
        int r = r0 + done, lane = r % KV_LANES, c = KV_LANES - lane < n - done ? KV_LANES - lane : n - done;
        int dim = l->head_dim_k, sound = prepare(x, k + (size_t)done * k_row, k_row, c, dim, l->type_k, l->rotate_k);
        if (is_plain(l->type_k)) {
            size_t e = l->type_k == QT_F32 ? 4 : 2, group = (size_t)dim * KV_LANES * e;
            if (sound) put_k_plain(l, head + (size_t)(r / KV_LANES) * group, lane, sound, x, (size_t)dim);
        } else {
            for (int p = 0; p < sound; p++) put_k_quant(l, head, r + p, x + p * dim);
        }
        dim = l->head_dim_v;
        sound = prepare(x, v + (size_t)done * v_row, v_row, sound, dim, l->type_v, l->rotate_v);
        for (int p = 0; p < sound; p++) {
            if (is_plain(l->type_v))
                put_v_plain(l, head, r + p, x + p * dim);
            else
                put_v_quant(l, head, r + p, x + p * dim);
        }
        done += sound;
        if (sound < c) break;
    }
    return done;
}

const struct kern_kv KERN_SYM(kern_kv) = {.put = put};
