/* quant.c: table of the packed types and the reference decoders. Encoders are in quant_encode.c. */
#include "core/quant.h"

#include "core/f16.h"
#include "core/mem.h"

#include <assert.h>
#include <string.h>
#include <strings.h>

const int8_t quant_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t quant_fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static const struct quant_info infos[QT_END] = {
#define X(name, id, elems, bytes, enc) [id] = {#name, id, elems, bytes, true, enc, 8.0 * (bytes) / (elems)},
    QUANT_LIST(X)
#undef X
#define X(name, id, elems, bytes) [id] = {#name, id, elems, bytes, false, false, 8.0 * (bytes) / (elems)},
        QUANT_NAMED_LIST(X)
#undef X
};

const struct quant_info *quant_info(int64_t ggml_type) {
    if (ggml_type < 0 || ggml_type >= QT_END || !infos[ggml_type].name) return NULL;
    return &infos[ggml_type];
}

const char *quant_name(int64_t ggml_type) {
    const struct quant_info *q = quant_info(ggml_type);
    return q ? q->name : "unknown";
}

int quant_from_name(const char *name) {
    for (int i = 0; i < QT_END; i++)
        if (infos[i].name && !strcasecmp(infos[i].name, name)) return i;
    return -1;
}

bool quant_row_bytes(size_t *out, int type, int64_t n) {
    const struct quant_info *q = quant_info(type);
    if (!q || n < 0 || n % q->block_elems) return false;
    return size_mul(out, (size_t)(n / q->block_elems), (size_t)q->block_bytes);
}

/* One block each: y = block_elems values. Products associate to the left as written; that is part of the contract. */

static void decode_F32(const void *src, float *y) {
    memcpy(y, src, sizeof *y);
}
static void decode_F16(const void *src, float *y) {
    *y = f16_to_f32(*(const uint16_t *)src);
}
static void decode_BF16(const void *src, float *y) {
    *y = bf16_to_f32(*(const uint16_t *)src);
}

static void decode_Q4_0(const void *src, float *y) {
    const struct q4_0 *b = src;
    float d = f16_to_f32(b->d);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((b->qs[j] & 15) - 8);
        y[j + 16] = d * (float)((b->qs[j] >> 4) - 8);
    }
}

static void decode_Q4_1(const void *src, float *y) {
    const struct q4_1 *b = src;
    float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)(b->qs[j] & 15) + m;
        y[j + 16] = d * (float)(b->qs[j] >> 4) + m;
    }
}

/* 5-bit code of element i of a q5_0 or q5_1 block. */
static int code5(const uint8_t *qs, const uint8_t *qh, int i) {
    int nibble = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
    return nibble | ((qh[i >> 3] >> (i & 7)) & 1) << 4;
}

static void decode_Q5_0(const void *src, float *y) {
    const struct q5_0 *b = src;
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 32; i++) y[i] = d * (float)(code5(b->qs, b->qh, i) - 16);
}

static void decode_Q5_1(const void *src, float *y) {
    const struct q5_1 *b = src;
    float d = f16_to_f32(b->d), m = f16_to_f32(b->m);
    for (int i = 0; i < 32; i++) y[i] = d * (float)code5(b->qs, b->qh, i) + m;
}

static void decode_Q8_0(const void *src, float *y) {
    const struct q8_0 *b = src;
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 32; i++) y[i] = d * (float)b->qs[i];
}

/* 2-bit code of element i where 128 elements share 32 bytes: q2_k, q3_k, tq2_0. */
static int code2(const uint8_t *qs, int i) {
    return (qs[32 * (i >> 7) + (i & 31)] >> (2 * ((i >> 5) & 3))) & 3;
}

static void decode_Q2_K(const void *src, float *y) {
    const struct q2_k *b = src;
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int k = 0; k < 16; k++) {
        float scale = d * (float)(b->scales[k] & 15), min = dmin * (float)(b->scales[k] >> 4);
        for (int i = 16 * k; i < 16 * k + 16; i++) y[i] = scale * (float)code2(b->qs, i) - min;
    }
}

static void decode_Q3_K(const void *src, float *y) {
    const struct q3_k *b = src;
    float d = f16_to_f32(b->d);
    for (int k = 0; k < 16; k++) {
        float scale = d * (float)(quant_k3_scale(b->scales, k) - 32);
        for (int i = 16 * k; i < 16 * k + 16; i++) {
            int high = (b->hmask[i & 31] >> (i >> 5)) & 1;
            y[i] = scale * (float)(code2(b->qs, i) - (high ? 0 : 4));
        }
    }
}

static void decode_Q4_K(const void *src, float *y) {
    const struct q4_k *b = src;
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j++) {
        int sc, mn, shift = 4 * (j & 1);
        quant_k4_scale(&sc, &mn, b->scales, j);
        float scale = d * (float)sc, min = dmin * (float)mn;
        const uint8_t *qs = b->qs + 32 * (j >> 1);
        for (int l = 0; l < 32; l++) y[32 * j + l] = scale * (float)((qs[l] >> shift) & 15) - min;
    }
}

static void decode_Q5_K(const void *src, float *y) {
    const struct q5_k *b = src;
    float d = f16_to_f32(b->d), dmin = f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j++) {
        int sc, mn, shift = 4 * (j & 1);
        quant_k4_scale(&sc, &mn, b->scales, j);
        float scale = d * (float)sc, min = dmin * (float)mn;
        const uint8_t *qs = b->qs + 32 * (j >> 1);
        for (int l = 0; l < 32; l++) {
            int q = ((qs[l] >> shift) & 15) | ((b->qh[l] >> j) & 1) << 4;
            y[32 * j + l] = scale * (float)q - min;
        }
    }
}

static void decode_Q6_K(const void *src, float *y) {
    const struct q6_k *b = src;
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 256; i++) {
        int n = i >> 7, g = (i >> 5) & 3, l = i & 31;
        int low = (b->ql[64 * n + 32 * (g & 1) + l] >> (g < 2 ? 0 : 4)) & 15;
        int high = (b->qh[32 * n + l] >> (2 * g)) & 3;
        y[i] = d * (float)b->scales[i >> 4] * (float)((low | high << 4) - 32);
    }
}

/* 32 elements coded by a table of 16 values; low nibbles are the first half. */
static void decode_table(float *y, float d, const uint8_t *qs, int half, const int8_t *values) {
    for (int j = 0; j < half; j++) {
        y[j] = d * (float)values[qs[j] & 15];
        y[j + half] = d * (float)values[qs[j] >> 4];
    }
}

static void decode_IQ4_NL(const void *src, float *y) {
    const struct iq4_nl *b = src;
    decode_table(y, f16_to_f32(b->d), b->qs, 16, quant_iq4_values);
}

static void decode_IQ4_XS(const void *src, float *y) {
    const struct iq4_xs *b = src;
    float d = f16_to_f32(b->d);
    for (int j = 0; j < 8; j++) {
        int s = ((b->scales_l[j >> 1] >> (4 * (j & 1))) & 15) | ((b->scales_h >> (2 * j)) & 3) << 4;
        decode_table(y + 32 * j, d * (float)(s - 32), b->qs + 16 * j, 16, quant_iq4_values);
    }
}

static void decode_TQ2_0(const void *src, float *y) {
    const struct tq2_0 *b = src;
    float d = f16_to_f32(b->d);
    for (int i = 0; i < 256; i++) y[i] = d * (float)(code2(b->qs, i) - 1);
}

static void decode_MXFP4(const void *src, float *y) {
    const struct mxfp4 *b = src;
    decode_table(y, e8m0_half_to_f32(b->e), b->qs, 16, quant_fp4_values);
}

static void decode_NVFP4(const void *src, float *y) {
    const struct nvfp4 *b = src;
    for (int s = 0; s < 4; s++)
        decode_table(y + 16 * s, ue4m3_half_to_f32(b->scales[s]), b->qs + 8 * s, 8, quant_fp4_values);
}

void quant_decode_row(int type, const void *src, float *dst, int64_t n) {
    const uint8_t *p = src;
    switch (type) {
#define X(name, id, elems, bytes, enc)                                                                                 \
    case QT_##name:                                                                                                    \
        for (int64_t i = 0; i < n; i += elems, p += bytes) decode_##name(p, dst + i);                                  \
        return;
        QUANT_LIST(X)
#undef X
    default:
        assert(!"quant_decode_row: type cannot be decoded");
    }
}
