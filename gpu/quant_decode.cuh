/* quant_decode.cuh: how each quantised type lies in a strip (core/strip.h), one struct per type. To add a type: a struct
 * here. Field names are those of core/quant.h.
 *
 * One lane owns a row: `w` points to the lane's word 0 of a block (word i is STRIP_ROWS words further on), `sc` to its part
 * of the scales plane. A block is outer * inner runs of 32 elements; word(w, o, i, k) gives elements 4k .. 4k + 3 of run
 * g = o * inner + i as signed bytes. An element is
 *   scale(w, sc, g, h) * (byte - off) + minimum,  h = half of the run where a scale serves 16 elements, else 0
 * with minimum = 0, low(w, g) per run (MIN_RUN), or low(w, g) * code(w, g, h) per half (MIN_HALF), all f32 exact products. */
#ifndef LH_GPU_QUANT_DECODE_CUH
#define LH_GPU_QUANT_DECODE_CUH

#include "gpu/common.cuh"

enum quant_min { MIN_NONE, MIN_RUN, MIN_HALF };

__device__ __forceinline__ uint32_t word_at(const uint32_t *w, int i) { return w[i * STRIP_ROWS]; }
__device__ __forceinline__ uint32_t nibbles(uint32_t w, int high) { return (high ? w >> 4 : w) & 0x0f0f0f0fu; }
__device__ __forceinline__ uint32_t two_bits(uint32_t w, int j) { return w >> (2 * j) & 0x03030303u; }
__device__ __forceinline__ uint32_t byte_at(uint32_t w, int i) { return w >> (8 * i) & 255u; }
__device__ __forceinline__ int signed_byte_at(uint32_t w, int i) { return (int)(signed char)byte_at(w, i); }
/* Bits 0..3 of v as bit 4 of bytes 0..3. */
__device__ __forceinline__ uint32_t spread_bits(uint32_t v) { return ((v & 15u) * 0x00204081u & 0x01010101u) << 4; }
__device__ __forceinline__ float scale16(const unsigned char *sc) {
    return f16_value(*reinterpret_cast<const unsigned short *>(sc));
}

/* Bytes of a table of 16 (four words) for four 4-bit codes in the bytes of q. */
__device__ __forceinline__ uint32_t table_bytes(uint32_t q, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) {
    uint32_t pair = q | q >> 4, select = (pair & 0xffu) | (pair >> 8 & 0xff00u);
    uint32_t low = __byte_perm(t0, t1, select & 0x7777u), high = __byte_perm(t2, t3, select & 0x7777u);
    uint32_t upper = (q >> 3 & 0x01010101u) * 255u;
    return (low & ~upper) | (high & upper);
}
/* quant_iq4_values and quant_fp4_values of core/quant.h. */
__device__ __forceinline__ uint32_t iq4_bytes(uint32_t q) {
    return table_bytes(q, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
}
__device__ __forceinline__ uint32_t fp4_bytes(uint32_t q) {
    return table_bytes(q, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
}

template <int outer_runs, int inner_runs, int group_elems, int offset, int minimum, int words, int scales>
struct quant_shape {
    static constexpr int outer = outer_runs, inner = inner_runs, group = group_elems, off = offset, min = minimum,
                         n_word = words, scale_bytes = scales;
    static __device__ __forceinline__ float low(const uint32_t *, int) { return 0; }
    static __device__ __forceinline__ int code(const uint32_t *, int, int) { return 0; }
};

#define QUANT_FN static __device__ __forceinline__

template <int type> struct quant;

template <> struct quant<QT_Q4_0> : quant_shape<1, 1, 32, 8, MIN_NONE, 4, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) { return nibbles(word_at(w, k & 3), k >> 2); }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { return scale16(sc); }
};

template <> struct quant<QT_Q4_1> : quant_shape<1, 1, 32, 0, MIN_RUN, 5, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) { return nibbles(word_at(w, 1 + (k & 3)), k >> 2); }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int, int) { return f16_value(word_at(w, 0) & 0xffffu); }
    QUANT_FN float low(const uint32_t *w, int) { return f16_value(word_at(w, 0) >> 16); }
};

template <> struct quant<QT_Q5_0> : quant_shape<1, 1, 32, 16, MIN_NONE, 5, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) {
        return nibbles(word_at(w, 1 + (k & 3)), k >> 2) | spread_bits(word_at(w, 0) >> (4 * k));
    }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { return scale16(sc); }
};

template <> struct quant<QT_Q5_1> : quant_shape<1, 1, 32, 0, MIN_RUN, 6, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) {
        return nibbles(word_at(w, 2 + (k & 3)), k >> 2) | spread_bits(word_at(w, 1) >> (4 * k));
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int, int) { return f16_value(word_at(w, 0) & 0xffffu); }
    QUANT_FN float low(const uint32_t *w, int) { return f16_value(word_at(w, 0) >> 16); }
};

template <> struct quant<QT_Q8_0> : quant_shape<1, 1, 32, 0, MIN_NONE, 8, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) { return word_at(w, k); }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { return scale16(sc); }
};

template <> struct quant<QT_IQ4_NL> : quant_shape<1, 1, 32, 0, MIN_NONE, 4, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) { return iq4_bytes(nibbles(word_at(w, k & 3), k >> 2)); }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { return scale16(sc); }
};

template <> struct quant<QT_MXFP4> : quant_shape<1, 1, 32, 0, MIN_NONE, 4, 1> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int, int k) { return fp4_bytes(nibbles(word_at(w, k & 3), k >> 2)); }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { /* 2^(e - 128) */
        unsigned e = *sc;
        return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

template <> struct quant<QT_NVFP4> : quant_shape<1, 2, 16, 0, MIN_NONE, 9, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int, int i, int k) { /* 16 elements: their low nibbles come first */
        return fp4_bytes(nibbles(word_at(w, 1 + 4 * i + 2 * (k >> 2) + (k & 1)), k >> 1 & 1));
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int g, int h) { /* ue4m3_half_to_f32 of core/f16.h */
        unsigned b = byte_at(word_at(w, 0), 2 * g + h) & 127u;
        if (b == 127) return 0;
        return b < 8 ? (float)b * 0x1p-10f : __uint_as_float((b << 20) + (119u << 23));
    }
};

template <> struct quant<QT_Q2_K> : quant_shape<2, 4, 16, 0, MIN_HALF, 21, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) { return two_bits(word_at(w, 4 + 8 * o + k), i); }
    QUANT_FN uint32_t packed(const uint32_t *w, int g, int h) { return byte_at(word_at(w, g >> 1), 2 * (g & 1) + h); }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int g, int h) {
        return __fmul_rn(f16_value(word_at(w, 20) & 0xffffu), (float)(packed(w, g, h) & 15u));
    }
    QUANT_FN float low(const uint32_t *w, int) { return -f16_value(word_at(w, 20) >> 16); }
    QUANT_FN int code(const uint32_t *w, int g, int h) { return (int)(packed(w, g, h) >> 4); }
};

template <> struct quant<QT_Q3_K> : quant_shape<2, 4, 16, 4, MIN_NONE, 27, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) {
        uint32_t high = word_at(w, k) >> (4 * o); /* bit 4n + j of hmask */
        high = (i > 2 ? high >> 1 : high << (2 - i)) & 0x04040404u;
        return two_bits(word_at(w, 8 + 8 * o + k), i) | high;
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *sc, int g, int h) { /* quant_k3_scale of 16-group 2g + h */
        int m = g >> 1, at = 2 * (g & 1) + h;
        uint32_t v = nibbles(word_at(w, 24 + (m & 1)), m >> 1) | two_bits(word_at(w, 26), m) << 4;
        return __fmul_rn(scale16(sc), (float)((int)byte_at(v, at) - 32));
    }
};

/* Q4_K, Q5_K: 6-bit scales and minima as in quant_k4_scale, their twelve bytes in words 1..3. */
__device__ __forceinline__ float k4_scale(const uint32_t *w, int g) {
    uint32_t a = byte_at(word_at(w, 1), g & 3);
    uint32_t s = g < 4 ? a & 63u : (byte_at(word_at(w, 3), g & 3) & 15u) | a >> 6 << 4;
    return __fmul_rn(f16_value(word_at(w, 0) & 0xffffu), (float)s);
}
__device__ __forceinline__ float k4_low(const uint32_t *w, int g) {
    uint32_t b = byte_at(word_at(w, 2), g & 3);
    uint32_t m = g < 4 ? b & 63u : byte_at(word_at(w, 3), g & 3) >> 4 | b >> 6 << 4;
    return -__fmul_rn(f16_value(word_at(w, 0) >> 16), (float)m);
}

template <> struct quant<QT_Q4_K> : quant_shape<4, 2, 32, 0, MIN_RUN, 36, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) { return nibbles(word_at(w, 4 + 8 * o + k), i); }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int g, int) { return k4_scale(w, g); }
    QUANT_FN float low(const uint32_t *w, int g) { return k4_low(w, g); }
};

template <> struct quant<QT_Q5_K> : quant_shape<4, 2, 32, 0, MIN_RUN, 44, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) {
        uint32_t high = word_at(w, 4 + k) >> (2 * o + i) & 0x01010101u; /* bit 2p or 2p + 1 of qh */
        return nibbles(word_at(w, 12 + 8 * o + k), i) | high << 4;
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int g, int) { return k4_scale(w, g); }
    QUANT_FN float low(const uint32_t *w, int g) { return k4_low(w, g); }
};

template <> struct quant<QT_Q6_K> : quant_shape<2, 4, 16, 32, MIN_NONE, 52, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) {
        uint32_t high = two_bits(word_at(w, 32 + 8 * o + k), i) << 4; /* bits 2g, 2g + 1 of qh */
        return nibbles(word_at(w, 16 * o + 8 * (i & 1) + k), i >> 1) | high;
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *sc, int g, int h) {
        return __fmul_rn(scale16(sc), (float)signed_byte_at(word_at(w, 48 + (g >> 1)), 2 * (g & 1) + h));
    }
};

template <> struct quant<QT_IQ4_XS> : quant_shape<8, 1, 32, 0, MIN_NONE, 34, 0> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int, int k) {
        return iq4_bytes(nibbles(word_at(w, 2 + 4 * o + (k & 3)), k >> 2));
    }
    QUANT_FN float scale(const uint32_t *w, const unsigned char *, int g, int) {
        uint32_t head = word_at(w, 0);
        uint32_t s = (word_at(w, 1) >> (4 * g) & 15u) | (head >> 16 >> (2 * g) & 3u) << 4;
        return __fmul_rn(f16_value(head & 0xffffu), (float)((int)s - 32));
    }
};

template <> struct quant<QT_TQ2_0> : quant_shape<2, 4, 32, 1, MIN_NONE, 16, 2> {
    QUANT_FN uint32_t word(const uint32_t *w, int o, int i, int k) { return two_bits(word_at(w, 8 * o + k), i); }
    QUANT_FN float scale(const uint32_t *, const unsigned char *sc, int, int) { return scale16(sc); }
};

#undef QUANT_FN

/* Elements 4k .. 4k + 3 of run (o, i) as f32, in the order of operations of quant_decode_row: the same bits. */
template <int type>
__device__ __forceinline__ void quant_decode4(float (&y)[4], const uint32_t *w, const unsigned char *sc, int o, int i, int k) {
    using Q = quant<type>;
    int g = o * Q::inner + i, h = Q::group == 16 ? k >> 2 : 0;
    uint32_t q = Q::word(w, o, i, k);
    float d = Q::scale(w, sc, g, h), m = 0;
    if (Q::min == MIN_RUN) m = Q::low(w, g);
    if (Q::min == MIN_HALF) m = __fmul_rn(Q::low(w, g), (float)Q::code(w, g, h));
    for (int e = 0; e < 4; e++) {
        y[e] = __fmul_rn(d, (float)(signed_byte_at(q, e) - Q::off));
        if (Q::min != MIN_NONE) y[e] = __fadd_rn(y[e], m);
    }
}

#endif
