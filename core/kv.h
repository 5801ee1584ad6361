/* kv.h: the KV page table: keys and values of every layer in pages of 256 positions, one layout for the CPU kernels,
 * streaming and GPU kernels. docs/kv-layout.md has the reasons and measurements.
 *
 * A page holds KV_PAGE positions of one layer, head-major; each KV head has four planes, each a multiple of 64 bytes:
 * K values, K scales, V values, V scales. K and V have types of their own: F32, F16, BF16, Q8_0, Q4_0 (core/quant.h); the
 * bytes per value are those of the GGUF types (34 and 18 per 32), taken apart into values and scales.
 * With r = position % 256, g = r / 16, l = r % 16 (lane), d = dim, D = head dim:
 *   K F32, F16, BF16  element [g][d][l]                 of [16][D][16]
 *   K Q8_0            byte d%4 of u32 [g][d/4][l]       of [16][D/4][16]
 *   K Q4_0            nibble of u32 [g][d/8][l]         of [16][D/8][16], bits 4*((d%8)/2) + 16*(d%2), value code - 8
 *   K scales          f16 [g][d/32][l]                  of [16][D/32][16]
 *   V                 blocks of 32 dims; block b = d/32 is [256][w] elements, w = 32, in a last one of 16 dims or less 16
 *   V Q4_0            byte d%16 of [r][16], low nibble for d%32 < 16, value code - 8
 *   V scales          f16 [b][r]                        of [D/32][256]
 * So a vector lane (or a GPU lane) owns a position in scores and a dim in outputs: no sums across lanes. V dims are
 * padded with zeros to a multiple of 16.
 * Quantised K (V) is stored in a rotated basis where rotate_k (rotate_v) says so: kv_rotate before packing. The rotation
 * is orthonormal: the same rotation of q leaves scores unchanged, and the output is rotated back.
 *
 * A layer with a sliding window keeps a ring of pages: position p is in slot (p / 256) % n_slot. Pages of a layer are one
 * position-ordered range of n_slot * page_bytes.
 * Not thread-safe, except that different positions or heads may be written concurrently. */
#ifndef LH_CORE_KV_H
#define LH_CORE_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KV_PAGE = 256, KV_LANES = 16, KV_BLOCK = 32, KV_MAX_DIM = 1024 };

/* What a layer needs. n_kv == 0: the layer has no attention and no KV. */
struct kv_shape {
    int n_kv;
    int head_dim_k, head_dim_v; /* multiples of 8, at most KV_MAX_DIM */
    int64_t window;             /* sliding window, 0: none */
};

struct kv_spec {
    int n_layer;
    const struct kv_shape *shapes; /* [n_layer] */
    int64_t n_ctx;                 /* positions, > 0 */
    int n_tok;                     /* most tokens of one pass: how much a window's ring must hold besides the window */
    int type_k, type_v;            /* enum quant_type */
    const bool *held;              /* ?[n_layer] layers whose pages kv_open allocates; NULL: all. The others' bases stay NULL */
};

struct kv_layer {
    int n_kv, head_dim_k, head_dim_v;
    int type_k, type_v;
    bool rotate_k, rotate_v;
    bool ring;               /* fewer slots than the context has pages */
    int64_t window;
    int64_t n_slot;          /* pages held */
    size_t ks_off, v_off, vs_off; /* planes of a head; K values are at 0 */
    size_t head_bytes, page_bytes;
    size_t bytes;            /* n_slot * page_bytes */
    unsigned char *base;     /* host or device address; NULL in a plan */
};

struct kv {
    int n_layer;
    struct kv_layer *layers; /* [n_layer], owned */
    int64_t n_ctx;
    int64_t n;               /* positions filled: the next token is at position n */
    int64_t n_high;          /* most positions filled since n was 0: what a ring has overwritten depends on it */
    size_t bytes;            /* sum over the layers */
};

/* Fills layers[spec->n_layer] (base NULL) and *bytes, the sum. The planner prints it and kv_open allocates it.
 * ERR_UNSUPPORTED: type not usable for KV, or a quantised type with a head dim that is not a multiple of 32.
 * ERR_ARG: a size out of range. ERR_BUDGET: the sum overflows. */
int kv_plan(struct kv_layer *layers, size_t *bytes, const struct kv_spec *spec);

/* Allocates the pages in host memory, untouched (sparse until written). The spec is not kept. kv->bytes counts all layers. */
int kv_open(struct kv **out, const struct kv_spec *spec);
void kv_close(struct kv *kv);

/* n tokens were stored in every layer. ERR_ARG: beyond n_ctx. */
int kv_advance(struct kv *kv, int64_t n_tok);

/* Forgets positions n.. (rollback). 0 always works. ERR_ARG: n > kv->n, or a ring no longer has the window before n. */
int kv_truncate(struct kv *kv, int64_t n);
bool kv_can_truncate(const struct kv *kv, int64_t n);

/* Start of the page that holds position p of layer il, and of one head in it. */
static inline unsigned char *kv_page(const struct kv *kv, int il, int64_t p) {
    const struct kv_layer *l = &kv->layers[il];
    int64_t page = p / KV_PAGE;
    return l->base + (size_t)(l->ring ? page % l->n_slot : page) * l->page_bytes;
}
static inline unsigned char *kv_head(const struct kv *kv, int il, int64_t p, int head) {
    return kv_page(kv, il, p) + (size_t)head * kv->layers[il].head_bytes;
}

/* Of one position of a layer, all KV heads: stored bytes (a window counts like any other position), and values. */
static inline double kv_bytes_per_token(const struct kv *kv, int il) {
    return (double)kv->layers[il].page_bytes / KV_PAGE;
}
static inline double kv_dims(const struct kv *kv, int il) {
    const struct kv_layer *l = &kv->layers[il];
    return (double)l->n_kv * (l->head_dim_k + l->head_dim_v);
}
static inline double kv_head_dims(const struct kv *kv, int il) {
    return (double)kv->layers[il].head_dim_k + kv->layers[il].head_dim_v;
}

/* x[dim] times the orthonormal Hadamard matrix of each block of the largest power of two that divides dim (at most 256).
 * Its own inverse. */
void kv_rotate(float *x, int dim);

/* Reference: stores k[head_dim_k] and v[head_dim_v] of one position and head; cpu/kern_attn.c gives the same bytes.
 * Rounding: to nearest even for F16 and BF16; Q8_0 as the GGUF quantiser, Q4_0
 * as core/kv_q4.h. Finite values only. */
void kv_put_ref(struct kv *kv, int il, int64_t pos, int head, const float *k, const float *v);

/* Largest |x| that a type can hold with finite bits. */
float kv_type_max(int type);

enum kv_which { KV_K, KV_V };
/* dst[head_dim] = what is stored, decoded and rotated back. */
void kv_get(const struct kv *kv, int il, int64_t pos, int head, enum kv_which which, float *dst);

/* Fills n positions of every layer with plausible values (K and V about N(0,1)) and sets kv->n: a context without a
 * prefill, for benchmarks. n <= n_ctx. About as fast as memcpy; the same bits for the same seed. */
int kv_fill_synthetic(struct kv *kv, int64_t n, uint64_t seed);

#endif
