/* quant.h: the packed weight types: what exists, sizes, block layouts, reference decode and encode.
 * A row of n elements is n / block_elems blocks back to back, without padding or alignment (2 bytes at best, 1 for MXFP4
 * and NVFP4). Everything is little-endian. All functions are pure and thread-safe.
 *
 * To add a type: a row in QUANT_LIST, its block struct here, decode_NAME in quant.c (and encode_NAME in quant_encode.c
 * with a row in QUANT_ENCODE_LIST there). Device and SIMD versions include this header and must agree with the reference. */
#ifndef LH_CORE_QUANT_H
#define LH_CORE_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define QUANT_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "block layout of " #type)
#else
#define QUANT_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "block layout of " #type)
#endif

/* Types that can be decoded: X(NAME, ggml id, elements per block, bytes per block, encodable). */
#define QUANT_LIST(X)                                                                                                  \
    X(F32, 0, 1, 4, 1)                                                                                                 \
    X(F16, 1, 1, 2, 1)                                                                                                 \
    X(Q4_0, 2, 32, 18, 1)                                                                                              \
    X(Q4_1, 3, 32, 20, 1)                                                                                              \
    X(Q5_0, 6, 32, 22, 1)                                                                                              \
    X(Q5_1, 7, 32, 24, 1)                                                                                              \
    X(Q8_0, 8, 32, 34, 1)                                                                                              \
    X(Q2_K, 10, 256, 84, 1)                                                                                            \
    X(Q3_K, 11, 256, 110, 1)                                                                                           \
    X(Q4_K, 12, 256, 144, 1)                                                                                           \
    X(Q5_K, 13, 256, 176, 1)                                                                                           \
    X(Q6_K, 14, 256, 210, 1)                                                                                           \
    X(IQ4_NL, 20, 32, 18, 1)                                                                                           \
    X(IQ4_XS, 23, 256, 136, 1)                                                                                         \
    X(BF16, 30, 1, 2, 1)                                                                                               \
    X(TQ2_0, 35, 256, 66, 0)                                                                                           \
    X(MXFP4, 39, 32, 17, 1)                                                                                            \
    X(NVFP4, 40, 64, 36, 0)

/* Types known by name and size only, so that a file holding them can be checked and the type named in an error:
 * X(NAME, ggml id, elements per block, bytes per block). Q8_1 and Q8_K are activation formats, never stored. */
#define QUANT_NAMED_LIST(X)                                                                                            \
    X(Q8_1, 9, 32, 36)                                                                                                 \
    X(Q8_K, 15, 256, 292)                                                                                              \
    X(IQ2_XXS, 16, 256, 66)                                                                                            \
    X(IQ2_XS, 17, 256, 74)                                                                                             \
    X(IQ3_XXS, 18, 256, 98)                                                                                            \
    X(IQ1_S, 19, 256, 50)                                                                                              \
    X(IQ3_S, 21, 256, 110)                                                                                             \
    X(IQ2_S, 22, 256, 82)                                                                                              \
    X(I8, 24, 1, 1)                                                                                                    \
    X(I16, 25, 1, 2)                                                                                                   \
    X(I32, 26, 1, 4)                                                                                                   \
    X(I64, 27, 1, 8)                                                                                                   \
    X(F64, 28, 1, 8)                                                                                                   \
    X(IQ1_M, 29, 256, 56)                                                                                              \
    X(TQ1_0, 34, 256, 54)                                                                                              \
    X(Q1_0, 41, 128, 18)                                                                                               \
    X(Q2_0, 42, 64, 18)

/* Values equal the ggml type ids found in GGUF files. */
/* clang-format off */
enum quant_type {
#define X(name, id, elems, bytes, enc) QT_##name = id,
    QUANT_LIST(X)
#undef X
#define X(name, id, elems, bytes) QT_##name = id,
    QUANT_NAMED_LIST(X)
#undef X
    QT_END = 43 /* one past the largest known id */
};
/* clang-format on */

enum { QUANT_MAX_BLOCK_ELEMS = 256, QUANT_MAX_BLOCK_BYTES = 292 };

struct quant_info {
    const char *name; /* as in ggml, upper case: "Q4_K" */
    int type;         /* enum quant_type = ggml id */
    int block_elems;
    int block_bytes;
    bool decodable; /* quant_decode_row works, so a model may use it */
    bool encodable; /* quant_encode_row works */
    double bpw;     /* bits per weight */
};

/* The type with this id, or NULL for an unknown or removed id (any 64-bit value may be asked). Static storage. */
const struct quant_info *quant_info(int64_t ggml_type);

/* Name of the type, "unknown" for an unknown id. Never NULL. */
const char *quant_name(int64_t ggml_type);

/* Id for a name in any case ("Q4_K", "q4_k"), -1 when there is none. Mix names such as Q4_K_M are in core/mix.h. */
int quant_from_name(const char *name);

/* *out = bytes of a row of n elements. false, *out untouched, when the type is unknown, n is negative or not a multiple
 * of the block, or the size does not fit. */
bool quant_row_bytes(size_t *out, int type, int64_t n);

/* dst[n] = the n values packed in src. type must be decodable and n a multiple of its block. This is the definition that
 * the other decoders are tested against: f32 products in the order written in quant.c, nothing fused. */
void quant_decode_row(int type, const void *src, float *dst, int64_t n);

/* Packs src[n] into dst (quant_row_bytes). ERR_ARG: the type cannot be encoded, or n is not a multiple of its block.
 * ERR_NUMERIC: a NaN or infinity in src that the type cannot hold (F32, F16 and BF16 take any value).
 * Same bytes as the common reference quantisers without importance data, except Q3_K, IQ4_NL and IQ4_XS, whose search is
 * our own. */
int quant_encode_row(int type, const float *src, void *dst, int64_t n);

/* Values of the 4-bit codes of IQ4_NL and IQ4_XS, and twice those of the e2m1 codes of MXFP4 and NVFP4. */
extern const int8_t quant_iq4_values[16];
extern const int8_t quant_fp4_values[16];

/* Blocks. d, m, dmin are binary16 bits. lo(b) = b & 15, hi(b) = b >> 4. y[i] is element i of the block. */

struct q4_0 { /* y[j] = d*(lo(qs[j]) - 8), y[j+16] = d*(hi(qs[j]) - 8) */
    uint16_t d;
    uint8_t qs[16];
};
QUANT_SIZE(struct q4_0, 18);

struct q4_1 { /* y[j] = d*lo(qs[j]) + m, y[j+16] = d*hi(qs[j]) + m */
    uint16_t d, m;
    uint8_t qs[16];
};
QUANT_SIZE(struct q4_1, 20);

struct q5_0 { /* as q4_0 with bit j (j+16) of the little-endian qh as fifth bit: y = d*(q - 16) */
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};
QUANT_SIZE(struct q5_0, 22);

struct q5_1 { /* the same bits: y = d*q + m */
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};
QUANT_SIZE(struct q5_1, 24);

struct q8_0 { /* y[j] = d*qs[j] */
    uint16_t d;
    int8_t qs[32];
};
QUANT_SIZE(struct q8_0, 34);

/* n in 0..1, j in 0..3, l in 0..31: y[128n + 32j + l] = d*lo(s)*q - dmin*hi(s) with
 * q = (qs[32n + l] >> 2j) & 3 and s = scales[8n + 2j + l/16], i.e. one scale byte per 16 elements in element order. */
struct q2_k {
    uint8_t scales[16];
    uint8_t qs[64];
    uint16_t d, dmin;
};
QUANT_SIZE(struct q2_k, 84);

/* Indices as q2_k: y = d*(S(k) - 32)*q, q = ((qs[32n + l] >> 2j) & 3) - (bit 4n+j of hmask[l] ? 0 : 4), k the 16-group.
 * S(k) is 6 bits: low four from nibble k/8 of scales[k%8], high two from bits 2*(k/4) of scales[8 + k%4]. */
struct q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;
};
QUANT_SIZE(struct q3_k, 110);

/* Eight groups of 32. p in 0..3: y[64p + l] = d*sc(2p)*lo(qs[32p + l]) - dmin*mn(2p), and
 * y[64p + 32 + l] = d*sc(2p+1)*hi(qs[32p + l]) - dmin*mn(2p+1). sc and mn: see quant_k4_scale. */
struct q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};
QUANT_SIZE(struct q4_k, 144);

/* As q4_k; group j, element l has bit j of qh[l] as fifth bit. */
struct q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};
QUANT_SIZE(struct q5_k, 176);

/* n in 0..1, g in 0..3, l in 0..31: y[128n + 32g + l] = d*scales[8n + 2g + l/16]*(low + 16*high - 32) with
 * low = nibble g/2 of ql[64n + 32(g&1) + l], high = (qh[32n + l] >> 2g) & 3. */
struct q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
};
QUANT_SIZE(struct q6_k, 210);

struct iq4_nl { /* T = quant_iq4_values: y[j] = d*T[lo(qs[j])], y[j+16] = d*T[hi(qs[j])] */
    uint16_t d;
    uint8_t qs[16];
};
QUANT_SIZE(struct iq4_nl, 18);

/* Eight groups b of 32 like iq4_nl with the scale d*(S-32), S = nibble b%2 of scales_l[b/2] + 16*((scales_h >> 2b) & 3). */
struct iq4_xs {
    uint16_t d, scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
};
QUANT_SIZE(struct iq4_xs, 136);

struct tq2_0 { /* indices as q2_k: y = d*(q - 1) */
    uint8_t qs[64];
    uint16_t d;
};
QUANT_SIZE(struct tq2_0, 66);

struct mxfp4 { /* X = quant_fp4_values: y[j] = 2^(e-128)*X[lo(qs[j])], y[j+16] = 2^(e-128)*X[hi(qs[j])] */
    uint8_t e;
    uint8_t qs[16];
};
QUANT_SIZE(struct mxfp4, 17);

/* Four groups s of 16: y[16s + j] = u*X[lo(qs[8s + j])], y[16s + 8 + j] = u*X[hi(qs[8s + j])], u = half of UE4M3
 * scales[s]. A factor per tensor (`NAME.scale`) multiplies the finished product outside. */
struct nvfp4 {
    uint8_t scales[4];
    uint8_t qs[32];
};
QUANT_SIZE(struct nvfp4, 36);

/* 6-bit scale and minimum of group j in 0..7 of a q4_k or q5_k block from its 12 bytes. */
static inline void quant_k4_scale(int *scale, int *min, const uint8_t s[12], int j) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

/* 6-bit scale (bias 32 not yet taken off) of 16-group k in 0..15 of a q3_k block. */
static inline int quant_k3_scale(const uint8_t s[12], int k) {
    return ((s[k & 7] >> (k < 8 ? 0 : 4)) & 15) | ((s[8 + (k & 3)] >> (2 * (k >> 2))) & 3) << 4;
}

#ifdef __cplusplus
}
#endif
#endif
