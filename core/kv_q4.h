/* kv_q4.h: how a 4-bit KV block gets its codes, shared by the reference (core/kv_pack.c) and the kernels (cpu/kern_kv.c),
 * so that both store the same bytes. */
#ifndef LH_CORE_KV_Q4_H
#define LH_CORE_KV_Q4_H

#include "core/f16.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { KV_Q4_BLOCK = 32 };

/* Codes 0..15 of x[32] for the inverse scale id, the scale of least squares for these codes, and by how much the block
 * is explained: the squared error is sum(x^2) - gain. Sums in eight strands, one order everywhere. */
static inline float kv_q4_try(int8_t *code, float *d, const float *x, float id) {
    float xc[8] = {0}, cc[8] = {0};
    for (int i = 0; i < KV_Q4_BLOCK; i++) {
        int c = (int)(x[i] * id + 8.5f);
        c = c > 15 ? 15 : c < 0 ? 0 : c;
        code[i] = (int8_t)c;
        float q = (float)(c - 8);
        xc[i & 7] += x[i] * q;
        cc[i & 7] += q * q;
    }
    float sx = ((xc[0] + xc[4]) + (xc[2] + xc[6])) + ((xc[1] + xc[5]) + (xc[3] + xc[7]));
    float sc = ((cc[0] + cc[4]) + (cc[2] + cc[6])) + ((cc[1] + cc[5]) + (cc[3] + cc[7]));
    *d = sc > 0 ? sx / sc : 0;
    return *d * sx;
}

/* The signed extreme m gets code 0 at scale m / -8, as in a GGUF block; finer scales, which clip it a little, and the
 * least-squares scale take 10 % off the squared error of normal values. Returns the f16 scale. A scale that rounds to zero
 * decodes as zero whatever the codes are. */
static inline uint16_t kv_encode_q4(int8_t code[KV_Q4_BLOCK], const float *x) {
    static const float steps[3] = {8.0f, 8.25f, 8.5f};
    float m = 0, d = 0, best = -1;
    for (int i = 0; i < KV_Q4_BLOCK; i++)
        if (fabsf(x[i]) > fabsf(m)) m = x[i];
    if (!(f32_to_f16(m / -8) & 0x7fff)) {
        memset(code, 8, KV_Q4_BLOCK);
        return 0;
    }
    for (int s = 0; s < 3; s++) {
        int8_t c[KV_Q4_BLOCK];
        float ds, gain = kv_q4_try(c, &ds, x, -steps[s] / m);
        if (!(gain > best)) continue;
        best = gain;
        d = ds;
        memcpy(code, c, sizeof c);
    }
    return f32_to_f16(d);
}

#endif
