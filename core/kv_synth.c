/* kv_synth.c: a context without a prefill. A few heads of random values are packed once per layer; every page is then put
 * together from their 16-position groups (K) and dim blocks (V), chosen at random, at the speed of memcpy. */
#include "core/err.h"
#include "core/kv.h"
#include "core/quant.h"

#include <math.h>
#include <string.h>

enum { TEMPLATES = 4, GROUPS = KV_PAGE / KV_LANES };

static uint64_t next(uint64_t *s) {
    uint64_t z = (*s += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Sum of eight 8-bit uniforms: close to N(0,1), no libm, so the same on every machine. */
static float normal(uint64_t *s) {
    uint64_t z = next(s);
    int sum = 0;
    for (int i = 0; i < 8; i++) sum += (int)(z >> (8 * i) & 255);
    return ((float)sum - 1020.0f) * (1.0f / 209.0f);
}

static void fill_templates(struct kv *t, uint64_t *seed) {
    float k[KV_MAX_DIM], v[KV_MAX_DIM];
    const struct kv_layer *l = &t->layers[0];
    for (int head = 0; head < TEMPLATES; head++)
        for (int p = 0; p < KV_PAGE; p++) {
            for (int d = 0; d < l->head_dim_k; d++) k[d] = normal(seed);
            for (int d = 0; d < l->head_dim_v; d++) v[d] = normal(seed);
            kv_put_ref(t, 0, p, head, k, v);
        }
}

static const unsigned char *pick(const struct kv *t, uint64_t *seed) {
    return t->layers[0].base + next(seed) % TEMPLATES * t->layers[0].head_bytes;
}

static void fill_head(unsigned char *h, const struct kv *t, uint64_t *seed) {
    const struct kv_layer *l = &t->layers[0];
    size_t kg = l->ks_off / GROUPS, sg = (l->v_off - l->ks_off) / GROUPS;
    for (size_t g = 0; g < GROUPS; g++) {
        const unsigned char *src = pick(t, seed);
        size_t from = next(seed) % GROUPS;
        memcpy(h + g * kg, src + from * kg, kg);
        memcpy(h + l->ks_off + g * sg, src + l->ks_off + from * sg, sg);
    }
    size_t n_block = (size_t)(l->head_dim_v + KV_BLOCK - 1) / KV_BLOCK, whole = (size_t)l->head_dim_v / KV_BLOCK;
    size_t vb = whole ? (l->vs_off - l->v_off) / (size_t)((l->head_dim_v + 15) / 16) * 2 : 0;
    size_t vsb = whole ? (l->head_bytes - l->vs_off) / whole : 0;
    for (size_t b = 0; b < n_block; b++) {
        const unsigned char *src = pick(t, seed);
        size_t from = b < whole ? next(seed) % whole : b;
        size_t end = (b + 1) * vb < l->vs_off - l->v_off && vb ? vb : l->vs_off - l->v_off - b * vb;
        memcpy(h + l->v_off + b * vb, src + l->v_off + from * vb, end);
        if (b < whole) memcpy(h + l->vs_off + b * vsb, src + l->vs_off + from * vsb, vsb);
    }
}

static int fill_layer(struct kv *kv, int il, int64_t n, uint64_t seed) {
    struct kv_layer *l = &kv->layers[il];
    if (!l->n_kv) return 0;
    struct kv_shape shape = {.n_kv = TEMPLATES, .head_dim_k = l->head_dim_k, .head_dim_v = l->head_dim_v};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = KV_PAGE, .n_tok = 1, .type_k = l->type_k, .type_v = l->type_v};
    struct kv *t;
    int rc = kv_open(&t, &spec);
    if (rc) return rc;
    fill_templates(t, &seed);
    int64_t last = (n + KV_PAGE - 1) / KV_PAGE, first = last > l->n_slot ? last - l->n_slot : 0;
    for (int64_t page = first; page < last; page++)
        for (int head = 0; head < l->n_kv; head++) fill_head(kv_head(kv, il, page * KV_PAGE, head), t, &seed);
    kv_close(t);
    return 0;
}

int kv_fill_synthetic(struct kv *kv, int64_t n, uint64_t seed) {
    if (n < 0 || n > kv->n_ctx)
        return err_set(ERR_ARG, "cannot fill %lld positions of a context of %lld", (long long)n, (long long)kv->n_ctx);
    for (int il = 0; il < kv->n_layer; il++) {
        int rc = fill_layer(kv, il, n, seed + (uint64_t)il * 0x632be59bd9b4e019u);
        if (rc) return rc;
    }
    kv->n = kv->n_high = n;
    return 0;
}
