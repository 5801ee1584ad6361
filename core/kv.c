/* kv.c: sizes, allocation and bookkeeping of the KV pages (kv.h). Packing of values is in kv_pack.c. */
#include "core/kv.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/quant.h"

#include <stdlib.h>
#include <string.h>

static int type_check(const char *what, int type, int dim) {
    bool plain = type == QT_F32 || type == QT_F16 || type == QT_BF16;
    if (!plain && type != QT_Q8_0 && type != QT_Q4_0)
        return err_set(ERR_UNSUPPORTED, "KV cache: %s of type %s is not supported (f32, f16, bf16, q8_0, q4_0 are)", what,
                       quant_name(type));
    if (dim < 8 || dim > KV_MAX_DIM || dim % 8)
        return err_set(ERR_UNSUPPORTED, "KV cache: head size %d of %s is not a multiple of 8 in 8..%d", dim, what, KV_MAX_DIM);
    if (!plain && dim % KV_BLOCK)
        return err_set(ERR_UNSUPPORTED, "KV cache: %s of type %s needs a head size that is a multiple of %d, this model has %d;"
                       " use f16", what, quant_name(type), KV_BLOCK, dim);
    return 0;
}

/* Bytes of the values and of the scales of KV_PAGE positions of one head. dim is at most KV_MAX_DIM: no overflow. */
static size_t values_bytes(int type, int dim) {
    size_t n = (size_t)KV_PAGE * (size_t)dim;
    return type == QT_F32 ? 4 * n : type == QT_Q8_0 ? n : type == QT_Q4_0 ? n / 2 : 2 * n;
}
static size_t scales_bytes(int type, int dim) {
    return type == QT_Q8_0 || type == QT_Q4_0 ? (size_t)KV_PAGE * (size_t)(dim / KV_BLOCK) * 2 : 0;
}

static int64_t pages(int64_t positions) { return (positions + KV_PAGE - 1) / KV_PAGE; }

static int layer_plan(struct kv_layer *l, const struct kv_spec *spec, const struct kv_shape *s, int il) {
    memset(l, 0, sizeof *l);
    if (s->n_kv == 0) return 0;
    if (s->n_kv < 0 || s->n_kv > 65536 || s->window < 0)
        return err_set(ERR_ARG, "KV cache: layer %d has %d KV heads and window %lld", il, s->n_kv, (long long)s->window);
    int rc = type_check("K", spec->type_k, s->head_dim_k);
    if (!rc) rc = type_check("V", spec->type_v, s->head_dim_v);
    if (rc) return rc;
    *l = (struct kv_layer){.n_kv = s->n_kv, .head_dim_k = s->head_dim_k, .head_dim_v = s->head_dim_v, .window = s->window,
                           .type_k = spec->type_k, .type_v = spec->type_v};
    /* 4-bit codes gain most from spreading outlier channels; 8-bit ones are near lossless as they are, and a rotation
     * makes exactly representable rows inexact. */
    l->rotate_k = spec->type_k == QT_Q4_0;
    l->rotate_v = spec->type_v == QT_Q4_0;
    int dim_v = (s->head_dim_v + KV_LANES - 1) / KV_LANES * KV_LANES;
    l->ks_off = values_bytes(spec->type_k, s->head_dim_k);
    l->v_off = l->ks_off + scales_bytes(spec->type_k, s->head_dim_k);
    l->vs_off = l->v_off + values_bytes(spec->type_v, dim_v);
    l->head_bytes = l->vs_off + scales_bytes(spec->type_v, dim_v);
    l->page_bytes = (size_t)s->n_kv * l->head_bytes;
    l->n_slot = pages(spec->n_ctx);
    if (s->window && s->window < spec->n_ctx) {
        /* The window of the first token of a pass and the pass itself may start anywhere in a page. */
        int64_t need = pages(s->window + spec->n_tok) + 1;
        l->ring = need < l->n_slot;
        if (l->ring) l->n_slot = need;
    }
    if (!size_mul(&l->bytes, (size_t)l->n_slot, l->page_bytes))
        return err_set(ERR_BUDGET, "KV cache: %lld positions of layer %d overflow the address space", (long long)spec->n_ctx, il);
    return 0;
}

int kv_plan(struct kv_layer *layers, size_t *bytes, const struct kv_spec *spec) {
    if (spec->n_ctx < 1 || spec->n_ctx > (int64_t)1 << 40)
        return err_set(ERR_ARG, "context of %lld positions is outside 1..2^40", (long long)spec->n_ctx);
    if (spec->n_tok < 1 || spec->n_layer < 0)
        return err_set(ERR_ARG, "KV cache: %d tokens per pass, %d layers", spec->n_tok, spec->n_layer);
    size_t sum = 0;
    for (int il = 0; il < spec->n_layer; il++) {
        int rc = layer_plan(&layers[il], spec, &spec->shapes[il], il);
        if (rc) return rc;
        if (!size_add(&sum, sum, layers[il].bytes))
            return err_set(ERR_BUDGET, "KV cache: %lld positions of %d layers overflow the address space",
                           (long long)spec->n_ctx, spec->n_layer);
    }
    *bytes = sum;
    return 0;
}

int kv_open(struct kv **out, const struct kv_spec *spec) {
    struct kv *kv = calloc(1, sizeof *kv);
    if (!kv) return err_set(ERR_NOMEM, "KV cache: out of memory");
    kv->layers = calloc(spec->n_layer > 0 ? (size_t)spec->n_layer : 1, sizeof *kv->layers);
    int rc = kv->layers ? kv_plan(kv->layers, &kv->bytes, spec) : err_set(ERR_NOMEM, "KV cache: out of memory");
    if (rc) goto out;
    kv->n_layer = spec->n_layer;
    kv->n_ctx = spec->n_ctx;
    for (int il = 0; il < kv->n_layer; il++) {
        struct kv_layer *l = &kv->layers[il];
        if (!l->bytes || (spec->held && !spec->held[il])) continue;
        l->base = mem_alloc(l->bytes, 64, "KV cache");
        if (!l->base) {
            rc = ERR_NOMEM;
            goto out;
        }
    }
    *out = kv;
    return 0;
out:
    kv_close(kv);
    return rc;
}

void kv_close(struct kv *kv) {
    if (!kv) return;
    for (int il = 0; il < kv->n_layer; il++) mem_free(kv->layers[il].base);
    free(kv->layers);
    free(kv);
}

int kv_advance(struct kv *kv, int64_t n_tok) {
    if (n_tok < 0 || n_tok > kv->n_ctx - kv->n)
        return err_set(ERR_ARG, "context is full: %lld of %lld positions, %lld more were asked for", (long long)kv->n,
                       (long long)kv->n_ctx, (long long)n_tok);
    kv->n += n_tok;
    if (kv->n > kv->n_high) kv->n_high = kv->n;
    return 0;
}

/* First position of layer il that is still there. */
static int64_t oldest(const struct kv *kv, int il) {
    const struct kv_layer *l = &kv->layers[il];
    int64_t first = (pages(kv->n_high) - l->n_slot) * KV_PAGE;
    return l->ring && first > 0 ? first : 0;
}

/* The first layer whose ring has moved on too far; n_layer: none. */
static int obstacle(const struct kv *kv, int64_t n) {
    int il = 0;
    while (il < kv->n_layer && (n == 0 || n == kv->n || n - kv->layers[il].window + 1 >= oldest(kv, il) || !oldest(kv, il))) il++;
    return il;
}

bool kv_can_truncate(const struct kv *kv, int64_t n) { return n >= 0 && n <= kv->n && obstacle(kv, n) == kv->n_layer; }

int kv_truncate(struct kv *kv, int64_t n) {
    if (n < 0 || n > kv->n)
        return err_set(ERR_ARG, "cannot roll back to position %lld: %lld are filled", (long long)n, (long long)kv->n);
    int il = obstacle(kv, n);
    if (il < kv->n_layer)
        return err_set(ERR_ARG, "cannot roll back to position %lld: layer %d keeps a window of %lld and has positions from"
                       " %lld only", (long long)n, il, (long long)kv->layers[il].window, (long long)oldest(kv, il));
    if (n == kv->n) return 0;
    kv->n = n;
    if (n == 0) kv->n_high = 0;
    return 0;
}
