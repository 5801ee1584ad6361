/* unpack.h: how each quantised type lies in a strip (core/strip.h), as functions of a compile-time `type`: word vectors of
 * byte weights for dot(), and f32 scales per group, 16 rows at once. Private to cpu/kern_matmul_*.c; to add a type, add
 * a case to each switch. Field names are those of core/quant.h.
 *
 * A block is `outer * inner` runs of 32 elements. Run g, word k holds elements 4k..4k+3 of the run, as 8-bit activations
 * lie in struct xq. Unpacked weights have `off` added so that they are unsigned (signed types: see dot.h). */
#ifndef LH_CPU_UNPACK_H
#define LH_CPU_UNPACK_H

#include "core/quant.h"
#include "cpu/dot.h"

enum { ROW_WORDS = 64 }; /* bytes from one word vector to the next */

enum minimum {
    MIN_NONE,
    MIN_RUN, /* y gains min[g] * (sum of the 32 activations) */
    MIN_HALF /* the same per 16 elements: integer minima in pairs, times a scale per block */
};

struct traits {
    int outer, inner; /* the outer loop stays a loop, the inner one is unrolled */
    int group;        /* elements under one scale: 16 or 32 */
    int off;
    enum minimum min;
    int step; /* words that dot() may add in 16 bits */
    bool is_signed;
    int n_word, scale_bytes;
};

/* Scales of one block and 16 rows. */
struct scales {
    vf d[16]; /* [runs * 32 / group] */
    vf m[8];  /* MIN_RUN: [runs]; MIN_HALF: m[0] = -dmin */
    vi pair[8]; /* MIN_HALF: [runs] minima of both halves in 16 bits each */
};

SIMD_FN struct traits traits(const int type) {
    const int off_signed = SIGNED_BYTES ? 0 : 128;
    switch (type) {
    case QT_Q4_0: return (struct traits){1, 1, 32, 8, MIN_NONE, 8, false, 4, 2};
    case QT_Q4_1: return (struct traits){1, 1, 32, 0, MIN_RUN, 8, false, 5, 0};
    case QT_Q5_0: return (struct traits){1, 1, 32, 16, MIN_NONE, 4, false, 5, 2};
    case QT_Q5_1: return (struct traits){1, 1, 32, 0, MIN_RUN, 4, false, 6, 0};
    case QT_Q8_0: return (struct traits){1, 1, 32, off_signed, MIN_NONE, 1, SIGNED_BYTES, 8, 2};
    case QT_IQ4_NL: return (struct traits){1, 1, 32, off_signed, MIN_NONE, 1, SIGNED_BYTES, 4, 2};
    case QT_MXFP4: return (struct traits){1, 1, 32, 12, MIN_NONE, 4, false, 4, 1};
    case QT_NVFP4: return (struct traits){1, 2, 16, 12, MIN_NONE, 4, false, 9, 0};
    case QT_Q2_K: return (struct traits){2, 4, 16, 0, MIN_HALF, 4, false, 21, 0};
    case QT_Q3_K: return (struct traits){2, 4, 16, 4, MIN_NONE, 4, false, 27, 2};
    case QT_Q4_K: return (struct traits){4, 2, 32, 0, MIN_RUN, 8, false, 36, 0};
    case QT_Q5_K: return (struct traits){4, 2, 32, 0, MIN_RUN, 4, false, 44, 0};
    case QT_Q6_K: return (struct traits){2, 4, 16, 32, MIN_NONE, 2, false, 52, 2};
    case QT_IQ4_XS: return (struct traits){8, 1, 32, off_signed, MIN_NONE, 1, SIGNED_BYTES, 34, 0};
    case QT_TQ2_0: return (struct traits){2, 4, 32, 1, MIN_NONE, 8, false, 16, 2};
    default: return (struct traits){0};
    }
}

SIMD_FN vi word_at(const uint8_t *w, int i) { return vi_load(w + (size_t)i * ROW_WORDS); }
SIMD_FN vi nibble(vi w, int high) { return vi_and(high ? vi_shr(w, 4) : w, vi_set1(0x0f0f0f0f)); }
SIMD_FN vi two_bits(vi w, int j) { return vi_and(j ? vi_shr(w, 2 * j) : w, vi_set1(0x03030303)); }
/* Byte i of each lane, unsigned and signed, as f32. */
SIMD_FN vf byte_at(vi w, int i) { return vf_from_vi(vi_and(i ? vi_shr(w, 8 * i) : w, vi_set1(255))); }
SIMD_FN vf signed_byte_at(vi w, int i) { return vf_from_vi(vi_sar(i < 3 ? vi_shl(w, 24 - 8 * i) : w, 24)); }

/* Word k of run g = o * inner + i, as in struct traits. `table` as from type_table. */
SIMD_FN vi unpack_word(const int type, const uint8_t *w, vi table, int o, int i, int k) {
    switch (type) {
    case QT_Q4_0: return nibble(word_at(w, k & 3), k >> 2);
    case QT_Q4_1: return nibble(word_at(w, 1 + (k & 3)), k >> 2);
    case QT_Q5_0: return vi_or(nibble(word_at(w, 1 + (k & 3)), k >> 2), spread_bits(word_at(w, 0), 4 * k));
    case QT_Q5_1: return vi_or(nibble(word_at(w, 2 + (k & 3)), k >> 2), spread_bits(word_at(w, 1), 4 * k));
    case QT_Q8_0: return SIGNED_BYTES ? word_at(w, k) : vi_xor(word_at(w, k), vi_set1((int32_t)0x80808080));
    case QT_IQ4_NL:
    case QT_MXFP4: return table_bytes(table, nibble(word_at(w, k & 3), k >> 2));
    case QT_NVFP4: /* each sub-block of 16 has its low nibbles in elements 0..7 */
        return table_bytes(table, nibble(word_at(w, 1 + 4 * i + 2 * (k >> 2) + (k & 1)), (k >> 1) & 1));
    case QT_Q2_K: return two_bits(word_at(w, 4 + 8 * o + k), i);
    case QT_TQ2_0: return two_bits(word_at(w, 8 * o + k), i);
    case QT_Q3_K: {
        vi h = vi_shr(word_at(w, k), 4 * o); /* bit 4n + j of hmask */
        h = vi_and(i > 2 ? vi_shr(h, i - 2) : vi_shl(h, 2 - i), vi_set1(0x04040404));
        return vi_or(two_bits(word_at(w, 8 + 8 * o + k), i), h);
    }
    case QT_Q4_K: return nibble(word_at(w, 4 + 8 * o + k), i);
    case QT_Q5_K: {
        vi h = vi_shr(word_at(w, 4 + k), 2 * o); /* bit 2p or 2p + 1 of qh */
        return vi_or(nibble(word_at(w, 12 + 8 * o + k), i), vi_and(vi_shl(h, 4 - i), vi_set1(0x10101010)));
    }
    case QT_Q6_K: {
        vi h = word_at(w, 32 + 8 * o + k); /* bits 2g, 2g + 1 of qh */
        h = vi_and(i < 2 ? vi_shl(h, 4 - 2 * i) : i == 2 ? h : vi_shr(h, 2), vi_set1(0x30303030));
        return vi_or(nibble(word_at(w, 16 * o + 8 * (i & 1) + k), i >> 1), h);
    }
    case QT_IQ4_XS: return table_bytes(table, nibble(word_at(w, 2 + 4 * o + (k & 3)), k >> 2));
    default: return vi_zero();
    }
}

SIMD_FN vi type_table(const int type) {
    int8_t t[16] = {0};
    for (int i = 0; i < 16; i++) {
        if (type == QT_IQ4_NL || type == QT_IQ4_XS) t[i] = (int8_t)(quant_iq4_values[i] ^ (SIGNED_BYTES ? 0 : -128));
        if (type == QT_MXFP4 || type == QT_NVFP4) t[i] = (int8_t)(quant_fp4_values[i] + 12);
    }
    return table_load(t);
}

/* 2^(e-128), subnormal for e < 2: e8m0_half_to_f32 of core/f16.h. */
SIMD_FN vf e8m0_half(vi e) {
    vf normal = vf_bits(vi_shl(vi_sub(e, vi_set1(1)), 23)), tiny = vf_bits(vi_shl(vi_add(e, vi_set1(1)), 21));
    return vf_select_lt(vf_from_vi(e), vf_set1(2), tiny, normal);
}

/* ue4m3_half_to_f32 of core/f16.h of byte i of each lane. */
SIMD_FN vf ue4m3_half(vi w, int i) {
    vi b = vi_and(i ? vi_shr(w, 8 * i) : w, vi_set1(127));
    vf value = vf_from_vi(b), normal = vf_bits(vi_add(vi_shl(b, 20), vi_set1(119 << 23)));
    vf y = vf_select_lt(value, vf_set1(8), vf_mul(value, vf_set1(0x1p-10f)), normal);
    return vf_select_lt(vf_set1(126), value, vf_zero(), y);
}

/* Q4_K, Q5_K: 6-bit scales and minima of quant_k4_scale, four bytes at a time. */
SIMD_FN void scales_k4(const uint8_t *w, struct scales *s) {
    vi head = word_at(w, 0), a = word_at(w, 1), b = word_at(w, 2), c = word_at(w, 3);
    vf d = vf_from_f16_low(head), dmin = vf_sub(vf_zero(), vf_from_f16_high(head));
    const vi six = vi_set1(0x3f3f3f3f), top = vi_set1(0x30303030);
    vi sc[2] = {vi_and(a, six), vi_or(nibble(c, 0), vi_and(vi_shr(a, 2), top))};
    vi mn[2] = {vi_and(b, six), vi_or(nibble(c, 1), vi_and(vi_shr(b, 2), top))};
    for (int j = 0; j < 8; j++) {
        s->d[j] = vf_mul(d, byte_at(sc[j >> 2], j & 3));
        s->m[j] = vf_mul(dmin, byte_at(mn[j >> 2], j & 3));
    }
}

SIMD_FN void scales_q2k(const uint8_t *w, struct scales *s) {
    vi tail = word_at(w, 20);
    vf d = vf_from_f16_low(tail);
    s->m[0] = vf_sub(vf_zero(), vf_from_f16_high(tail));
    for (int j = 0; j < 8; j++) { /* scale bytes 2j and 2j + 1 */
        vi v = word_at(w, j >> 1);
        for (int h = 0; h < 2; h++) s->d[2 * j + h] = vf_mul(d, byte_at(nibble(v, 0), 2 * (j & 1) + h));
        v = j & 1 ? vi_shr(v, 16) : v;
        s->pair[j] = vi_or(vi_and(vi_shr(v, 4), vi_set1(15)), vi_and(vi_shl(v, 4), vi_set1(15 << 16)));
    }
}

/* quant_k3_scale: four scales of 16-groups 4m..4m+3 in the bytes of a word. */
SIMD_FN void scales_q3k(const uint8_t *w, vf d, struct scales *s) {
    vi low[2] = {word_at(w, 24), word_at(w, 25)}, high = word_at(w, 26);
    for (int m = 0; m < 4; m++) {
        vi v = vi_or(nibble(low[m & 1], m >> 1), vi_shl(two_bits(high, m), 4));
        for (int i = 0; i < 4; i++) s->d[4 * m + i] = vf_mul(d, vf_sub(byte_at(v, i), vf_set1(32)));
    }
}

SIMD_FN void scales_iq4xs(const uint8_t *w, struct scales *s) {
    vi head = word_at(w, 0), low = word_at(w, 1);
    vf d = vf_from_f16_low(head);
    vi high = vi_shr(head, 16);
    for (int j = 0; j < 8; j++) {
        vi v = vi_or(vi_and(vi_shr(low, 4 * j), vi_set1(15)), vi_shl(vi_and(vi_shr(high, 2 * j), vi_set1(3)), 4));
        s->d[j] = vf_mul(d, vf_from_vi(vi_sub(v, vi_set1(32))));
    }
}

/* Scales of the block whose words are at w and whose part of the scales plane is at sc. */
SIMD_FN void unpack_scales(const int type, const uint8_t *w, const uint8_t *sc, struct scales *s) {
    const uint16_t *d = (const uint16_t *)(const void *)sc;
    switch (type) {
    case QT_Q4_0:
    case QT_Q5_0:
    case QT_Q8_0:
    case QT_IQ4_NL: s->d[0] = vf_from_f16(d); break;
    case QT_Q4_1:
    case QT_Q5_1: s->d[0] = vf_from_f16_low(word_at(w, 0)), s->m[0] = vf_from_f16_high(word_at(w, 0)); break;
    case QT_MXFP4: s->d[0] = e8m0_half(vi_from_u8(sc)); break;
    case QT_NVFP4:
        for (int i = 0; i < 4; i++) s->d[i] = ue4m3_half(word_at(w, 0), i);
        break;
    case QT_Q2_K: scales_q2k(w, s); break;
    case QT_Q3_K: scales_q3k(w, vf_from_f16(d), s); break;
    case QT_Q4_K:
    case QT_Q5_K: scales_k4(w, s); break;
    case QT_Q6_K:
        for (int j = 0; j < 16; j++) s->d[j] = vf_mul(vf_from_f16(d), signed_byte_at(word_at(w, 48 + (j >> 2)), j & 3));
        break;
    case QT_IQ4_XS: scales_iq4xs(w, s); break;
    case QT_TQ2_0:
        for (int j = 0; j < 8; j++) s->d[j] = vf_from_f16(d);
        break;
    default: break;
    }
}

#endif
