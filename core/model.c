/* model.c: struct model from GGUF metadata. Every number that becomes a size, a divisor or an index is bounded here;
 * tensors are model_tensors.c. Meaning of the keys: the GGUF documentation and the converters that write them. */
#include "core/model.h"

#include "core/err.h"
#include "core/model_read.h"
#include "core/rope.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Far above any published model; what the kernels and 32-bit row counts can take. */
enum { MAX_DIM = 1 << 20, MAX_FF = 1 << 24, MAX_HEAD_DIM = 1024, MAX_VOCAB = 1 << 24 };
#define MAX_CTX ((int64_t)1 << 40)

enum need { MAY, MUST };

/* --- single keys -------------------------------------------------------------------------------------------------- */

static const char *full_key(char *buf, size_t cap, const struct model_read *r, const char *suffix) {
    snprintf(buf, cap, "%s.%s", r->arch->name, suffix);
    return buf;
}

static int missing(const struct model_read *r, const char *key) {
    return err_set(ERR_FORMAT, "%s: key %s is missing", gguf_path(r->g, 0), key);
}

static int out_of_range(const struct model_read *r, const char *key, double v, double lo, double hi) {
    return err_set(ERR_FORMAT, "%s: key %s is %.10g, must be %.10g to %.10g", gguf_path(r->g, 0), key, v, lo, hi);
}

/* *v keeps its value when the key is absent and MAY be so. */
static int key_int(const struct model_read *r, int64_t *v, const char *suffix, int64_t lo, int64_t hi, enum need need) {
    char key[128];
    uint64_t u;
    int rc = gguf_u64(r->g, full_key(key, sizeof key, r, suffix), &u);
    if (rc == GGUF_ABSENT) return need == MUST ? missing(r, key) : 0;
    if (rc) return rc;
    if (u < (uint64_t)lo || u > (uint64_t)hi) return out_of_range(r, key, (double)u, (double)lo, (double)hi);
    *v = (int64_t)u;
    return 0;
}

static int key_float(const struct model_read *r, double *v, const char *suffix, double lo, double hi, enum need need) {
    char key[128];
    double f;
    int rc = gguf_f64(r->g, full_key(key, sizeof key, r, suffix), &f);
    if (rc == GGUF_ABSENT) return need == MUST ? missing(r, key) : 0;
    if (rc) return rc;
    if (!(f >= lo && f <= hi)) return out_of_range(r, key, f, lo, hi); /* NaN as well */
    *v = f;
    return 0;
}

/* A number per layer: one for all, or an array of at least n. v[n] keeps its values when the key is absent. */
static int key_layers(const struct model_read *r, int64_t *v, int n, const char *suffix, int64_t lo, int64_t hi, enum need need) {
    char key[128];
    const struct gguf_kv *kv = gguf_find(r->g, full_key(key, sizeof key, r, suffix));
    if (!kv) return need == MUST ? missing(r, key) : 0;
    bool array = kv->type == GGUF_ARR;
    if (array && kv->n < n)
        return err_set(ERR_FORMAT, "%s: key %s has %lld elements for %d layers", gguf_path(r->g, 0), key, (long long)kv->n, n);
    for (int i = 0; i < n; i++) {
        if (!gguf_elem_i64(kv, array ? i : 0, &v[i]))
            return err_set(ERR_FORMAT, "%s: key %s is not made of integers", gguf_path(r->g, 0), key);
        if (v[i] < lo || v[i] > hi) return out_of_range(r, key, (double)v[i], (double)lo, (double)hi);
    }
    return 0;
}

/* A key whose effect this program does not have: only the given harmless value (or 0) is accepted. */
static int key_must_be(const struct model_read *r, const char *suffix, double harmless) {
    char key[128];
    double f = 0;
    int rc = gguf_f64(r->g, full_key(key, sizeof key, r, suffix), &f);
    if (rc < 0) return rc;
    if (rc == GGUF_ABSENT || f == 0 || f == harmless) return 0;
    return err_set(ERR_UNSUPPORTED, "%s: key %s is %g; only %g is supported", gguf_path(r->g, 0), key, f, harmless);
}

/* --- the model as a whole ----------------------------------------------------------------------------------------- */

static int read_arch(struct model_read *r) {
    const char *p, *type;
    size_t n, type_n;
    char shown[64];
    int rc = gguf_str(r->g, "general.type", &type, &type_n);
    if (rc < 0) return rc;
    if (rc == 0 && (type_n != 5 || memcmp(type, "model", 5)))
        return err_set(ERR_UNSUPPORTED, "%s: key general.type is \"%s\": this file is not a language model", gguf_path(r->g, 0),
                       gguf_printable(shown, sizeof shown, type, type_n));
    rc = gguf_str(r->g, "general.architecture", &p, &n);
    if (rc == GGUF_ABSENT) return missing(r, "general.architecture");
    if (rc) return rc;
    r->arch = arch_find(p, n);
    gguf_printable(shown, sizeof shown, p, n);
    if (!r->arch)
        return err_set(ERR_UNSUPPORTED, "%s: key general.architecture is \"%s\", which this program does not know",
                       gguf_path(r->g, 0), shown);
    snprintf(r->m->arch, sizeof r->m->arch, "%s", r->arch->name);
    if (!gguf_str(r->g, "general.name", &p, &n)) gguf_printable(r->m->name, sizeof r->m->name, p, n);
    return 0;
}

static int read_vocab(struct model_read *r) {
    const struct gguf_kv *tokens;
    int rc = gguf_arr(r->g, "tokenizer.ggml.tokens", &tokens);
    if (rc == GGUF_ABSENT) return 0; /* a bench needs none */
    if (rc) return rc;
    if (tokens->elem_type != GGUF_STR)
        return err_set(ERR_FORMAT, "%s: key tokenizer.ggml.tokens is an array of %s, must be of strings", gguf_path(r->g, 0),
                       gguf_type_name(tokens->elem_type));
    if (tokens->n < 1 || tokens->n > MAX_VOCAB) return out_of_range(r, "tokenizer.ggml.tokens", (double)tokens->n, 1, MAX_VOCAB);
    r->n_tokens = tokens->n;
    return 0;
}

static int read_sizes(struct model_read *r) {
    struct model *m = r->m;
    int64_t blocks, dim, nextn = 0;
    double eps, softcap = 0;
    int rc = key_int(r, &m->n_ctx_train, "context_length", 1, MAX_CTX, MUST);
    if (!rc) rc = key_int(r, &dim, "embedding_length", 1, MAX_DIM, MUST);
    if (!rc) rc = key_int(r, &blocks, "block_count", 1, MODEL_MAX_LAYER, MUST);
    if (!rc) rc = key_int(r, &nextn, "nextn_predict_layers", 0, blocks - 1, MAY);
    if (!rc) rc = key_float(r, &eps, "attention.layer_norm_rms_epsilon", 0, 1, MUST);
    if (!rc) rc = key_float(r, &softcap, "final_logit_softcapping", 0, 1e6, MAY);
    if (!rc) rc = key_must_be(r, "attn_logit_softcapping", 0);
    if (rc) return rc;
    m->dim = (int)dim;
    m->n_layer = m->n_block = (int)(blocks - nextn); /* blocks that predict further tokens come last and are not layers */
    m->n_mtp = r->arch->flags & ARCH_HYBRID ? (int)nextn : 0;
    m->eps = (float)eps;
    m->logit_softcap = (float)softcap;
    m->act = r->arch->act;
    m->embd_scale = r->arch->flags & ARCH_EMBD_SCALE ? sqrtf((float)dim) : 1;
    return 0;
}

static int read_experts(struct model_read *r) {
    struct model *m = r->m;
    int64_t n = 0, used = 0;
    bool must = r->arch->flags & ARCH_MUST_EXPERTS, may = r->arch->flags & (ARCH_MUST_EXPERTS | ARCH_MAY_EXPERTS);
    if (!may) return key_must_be(r, "expert_count", 0);
    int rc = key_int(r, &n, "expert_count", must, MODEL_MAX_EXPERT, must ? MUST : MAY);
    if (rc || !n) return rc;
    rc = key_int(r, &used, "expert_used_count", 1, n, MUST);
    if (!rc) rc = key_must_be(r, "expert_weights_scale", 1);
    if (!rc) rc = key_must_be(r, "expert_gating_func", 1); /* softmax */
    if (!rc) rc = key_must_be(r, "expert_shared_count", 0);
    if (rc) return rc;
    m->n_expert = (int)n;
    m->n_expert_used = (int)used;
    m->expert_normalise = r->arch->flags & ARCH_EXPERT_NORM;
    return 0;
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

static int blocks_of(const struct model *m) { return m->n_layer + m->n_mtp; }

static int read_delta_shape(struct model_read *r) {
    struct delta_shape *s = &r->m->delta;
    int64_t n_key, n_value, dim, inner, conv;
    char key[128];
    int rc = key_int(r, &conv, "ssm.conv_kernel", 1, 64, MUST);
    if (!rc) rc = key_int(r, &dim, "ssm.state_size", 1, 1 << 20, MUST);
    if (!rc) rc = key_int(r, &n_key, "ssm.group_count", 1, MODEL_MAX_HEAD, MUST);
    if (!rc) rc = key_int(r, &n_value, "ssm.time_step_rank", 1, MODEL_MAX_HEAD, MUST);
    if (!rc) rc = key_int(r, &inner, "ssm.inner_size", 1, INT32_MAX, MUST);
    if (rc) return rc;
    if (conv != DELTA_CONV) return key_must_be(r, "ssm.conv_kernel", DELTA_CONV);
    if (dim % 16 || dim > DELTA_MAX_DIM)
        return err_set(ERR_UNSUPPORTED, "%s: key %s is %lld; supported are multiples of 16 up to %d", gguf_path(r->g, 0),
                       full_key(key, sizeof key, r, "ssm.state_size"), (long long)dim, DELTA_MAX_DIM);
    if (n_value % n_key || inner != n_value * dim)
        return err_set(ERR_FORMAT, "%s: keys %s.ssm: %lld key heads, %lld value heads of %lld and inner size %lld do not go together",
                       gguf_path(r->g, 0), r->arch->name, (long long)n_key, (long long)n_value, (long long)dim, (long long)inner);
    *s = (struct delta_shape){.n_key = (int)n_key, .n_value = (int)n_value, .dim = (int)dim, .n_conv = DELTA_CONV,
                              .tiled = r->arch->flags & ARCH_TILED};
    return 0;
}

/* Every interval-th layer has attention, unless a truth value per layer says otherwise; the blocks after them have it. */
static int read_mixers(struct model_read *r, int64_t *v) {
    struct model *m = r->m;
    int64_t interval = 4;
    if (!(r->arch->flags & ARCH_HYBRID)) return 0;
    int rc = read_delta_shape(r);
    if (!rc) rc = key_int(r, &interval, "full_attention_interval", 1, MODEL_MAX_LAYER, MAY);
    for (int i = 0; i < m->n_layer; i++) v[i] = (i + 1) % interval != 0;
    if (!rc) rc = key_layers(r, v, m->n_layer, "attention.recurrent_layers", 0, 1, MAY);
    for (int i = 0; i < m->n_layer && !rc; i++) m->layers[i].mixer = v[i] ? MIXER_DELTA : MIXER_ATTN;
    return rc;
}

/* Some files give layers without attention 0 heads. */
static int settle_heads(struct model_read *r, struct layer *l, int il, const char *kv_key) {
    if (l->mixer == MIXER_DELTA) {
        l->n_head = l->n_kv = 0;
        return 0;
    }
    if (!l->n_head || !l->n_kv || l->n_head % l->n_kv)
        return err_set(ERR_FORMAT, "%s: key %s: %d KV heads do not divide the %d heads of layer %d", gguf_path(r->g, 0), kv_key,
                       l->n_kv, l->n_head, il);
    return 0;
}

static int read_heads(struct model_read *r, int64_t *v) {
    struct model *m = r->m;
    char key[128], kv_key[128];
    int64_t dim_k = 0, dim_v = 0;
    int n = blocks_of(m), least = r->arch->flags & ARCH_HYBRID ? 0 : 1;
    full_key(key, sizeof key, r, "attention.head_count");
    full_key(kv_key, sizeof kv_key, r, "attention.head_count_kv");
    int rc = key_layers(r, v, n, "attention.head_count", least, MODEL_MAX_HEAD, MUST);
    for (int i = 0; i < n && !rc; i++) m->layers[i].n_head = (int)v[i];
    if (!rc) rc = key_layers(r, v, n, "attention.head_count_kv", least, MODEL_MAX_HEAD, MAY);
    for (int i = 0; i < n && !rc; i++) m->layers[i].n_kv = (int)v[i];
    if (!rc) rc = key_int(r, &dim_k, "attention.key_length", 1, MAX_HEAD_DIM, MAY);
    if (!rc) rc = key_int(r, &dim_v, "attention.value_length", 1, MAX_HEAD_DIM, MAY);
    if (!rc && (!dim_k || !dim_v) && !m->layers[0].n_head)
        return err_set(ERR_FORMAT, "%s: key %s: the first layer has no heads, and key_length and value_length are not both given",
                       gguf_path(r->g, 0), key);
    for (int i = 0, first = m->layers[0].n_head; i < n && !rc; i++) {
        struct layer *l = &m->layers[i];
        int each = first ? m->dim / first : 0;
        if ((!dim_k || !dim_v) && m->dim % first)
            return err_set(ERR_FORMAT, "%s: key %s: %d heads do not divide the width %d, and key_length and value_length are not "
                           "both given", gguf_path(r->g, 0), key, first, m->dim);
        if ((!dim_k || !dim_v) && each > MAX_HEAD_DIM)
            return err_set(ERR_FORMAT, "%s: key %s: %d heads of width %d; a head has at most %d", gguf_path(r->g, 0), key, first,
                           each, MAX_HEAD_DIM);
        rc = settle_heads(r, l, i, kv_key);
        l->head_dim_k = dim_k ? (int)dim_k : each;
        l->head_dim_v = dim_v ? (int)dim_v : each;
    }
    return rc;
}

/* The key may be missing; the tensor says it as well. */
static int read_shared_expert(struct model_read *r) {
    const struct gguf_tensor *t = gguf_tensor_find(r->g, "blk.0.ffn_gate_shexp.weight");
    int64_t ff = t && t->dims[1] <= MAX_FF ? t->dims[1] : 0;
    if (!(r->arch->flags & ARCH_SHARED_EXPERT)) return 0;
    int rc = key_int(r, &ff, "expert_shared_feed_forward_length", 1, MAX_FF, ff ? MAY : MUST);
    r->m->n_ff_shared = (int)ff;
    return rc;
}

static int read_ffn(struct model_read *r, int64_t *v) {
    struct model *m = r->m;
    int64_t expert_ff = 0;
    int n = blocks_of(m), rc = m->n_expert ? key_int(r, &expert_ff, "expert_feed_forward_length", 1, MAX_FF, MAY) : 0;
    if (!rc) rc = read_shared_expert(r);
    for (int i = 0; i < n; i++) v[i] = expert_ff;
    if (!rc && !expert_ff) rc = key_layers(r, v, n, "feed_forward_length", 1, MAX_FF, MUST);
    for (int i = 0; i < n && !rc; i++) {
        m->layers[i].ffn = m->n_expert ? FFN_EXPERTS : FFN_DENSE;
        m->layers[i].n_ff = (int)v[i];
    }
    return rc;
}

/* Which layers see a window only. The pattern is a period, or a truth value per layer. */
static int read_windows(struct model_read *r, int64_t *v) {
    struct model *m = r->m;
    char key[128];
    int64_t window = 0, period = r->arch->window_period;
    if (!period) return 0;
    int rc = key_int(r, &window, "attention.sliding_window", 0, MAX_CTX, MAY);
    if (rc || !window) return rc;
    const struct gguf_kv *kv = gguf_find(r->g, full_key(key, sizeof key, r, "attention.sliding_window_pattern"));
    bool array = kv && kv->type == GGUF_ARR;
    rc = array ? key_layers(r, v, m->n_layer, "attention.sliding_window_pattern", 0, 1, MUST)
               : key_int(r, &period, "attention.sliding_window_pattern", 1, MODEL_MAX_LAYER, MAY);
    if (rc) return rc;
    for (int i = 0; i < m->n_layer; i++) {
        bool local = array ? v[i] : i % period < period - 1;
        if (!local) continue;
        m->layers[i].window = window;
        m->layers[i].rope = 1;
        m->n_rope = 2;
    }
    return 0;
}

static int read_attn_scale(struct model_read *r) {
    const struct layer *l = &r->m->layers[0];
    double scale = 0;
    int rc = key_float(r, &scale, "attention.scale", 0, 1e3, MAY);
    if (rc) return rc;
    if (scale == 0) {
        bool big = r->arch->flags & ARCH_BIG_SCALE && r->m->n_layer == 62;
        scale = 1 / sqrt(big ? (double)r->m->dim / l->n_head : l->head_dim_k);
    }
    r->m->attn_scale = (float)scale;
    return 0;
}

/* --- RoPE --------------------------------------------------------------------------------------------------------- */

static int read_rope_kind(const struct model_read *r, struct rope *p) {
    char key[128], shown[64];
    const char *name;
    size_t n;
    int rc = gguf_str(r->g, full_key(key, sizeof key, r, "rope.scaling.type"), &name, &n);
    p->scaling = ROPE_SCALING_LINEAR;
    if (rc == GGUF_ABSENT) return 0;
    if (rc) return rc;
    int kind = rope_scaling_from_name(name, n);
    if (kind < 0)
        return err_set(ERR_UNSUPPORTED, "%s: key %s is \"%s\"; known are none, linear, yarn and longrope", gguf_path(r->g, 0), key,
                       gguf_printable(shown, sizeof shown, name, n));
    p->scaling = (enum rope_scaling)kind;
    return 0;
}

static int read_rope_factor(const struct model_read *r, struct rope *p) {
    char key[128];
    p->factor = 0;
    int rc = key_float(r, &p->factor, "rope.scale_linear", 0, 1e6, MAY); /* an old spelling */
    if (!rc) rc = key_float(r, &p->factor, "rope.scaling.factor", 0, 1e6, MAY);
    if (rc) return rc;
    if (p->factor == 0) p->factor = 1;
    if (p->factor < 1)
        return err_set(ERR_UNSUPPORTED, "%s: key %s is %g; factors below 1 are not supported", gguf_path(r->g, 0),
                       full_key(key, sizeof key, r, "rope.scaling.factor"), p->factor);
    return 0;
}

static int read_rope(struct model_read *r) {
    struct model *m = r->m;
    struct rope *p = &m->ropes[0];
    int64_t n_rot = m->layers[0].head_dim_k;
    double yarn_attn = 1;
    char key[128];
    *p = (struct rope){.pairing = r->arch->pairing, .base = 10000, .n_ctx_orig = m->n_ctx_train, .attn_factor = 1,
                       .ext_factor = 1, .beta_fast = 32, .beta_slow = 1};
    int rc = key_int(r, &n_rot, "rope.dimension_count", 2, m->layers[0].head_dim_k, MAY);
    if (!rc && n_rot % 2)
        rc = err_set(ERR_FORMAT, "%s: key %s is %lld, must be even", gguf_path(r->g, 0),
                     full_key(key, sizeof key, r, "rope.dimension_count"), (long long)n_rot);
    if (!rc) rc = key_float(r, &p->base, "rope.freq_base", 1.0001, 1e15, MAY);
    if (!rc) rc = read_rope_kind(r, p);
    if (!rc) rc = read_rope_factor(r, p);
    if (!rc) rc = key_int(r, &p->n_ctx_orig, "rope.scaling.original_context_length", 1, MAX_CTX, MAY);
    if (!rc) rc = key_float(r, &p->attn_factor, "rope.scaling.attn_factor", 1e-6, 1e6, MAY);
    if (!rc) rc = key_float(r, &yarn_attn, "rope.scaling.yarn_attn_factor", 1e-6, 1e6, MAY);
    if (!rc) rc = key_float(r, &p->ext_factor, "rope.scaling.yarn_ext_factor", 0, 1, MAY);
    if (!rc) rc = key_float(r, &p->beta_fast, "rope.scaling.yarn_beta_fast", 1e-6, 1e6, MAY);
    if (!rc) rc = key_float(r, &p->beta_slow, "rope.scaling.yarn_beta_slow", 1e-6, p->beta_fast, MAY);
    if (rc) return rc;
    p->n_rot = (int)n_rot;
    p->attn_factor *= yarn_attn;
    if (p->scaling == ROPE_SCALING_LINEAR && p->factor == 1) p->scaling = ROPE_SCALING_NONE;
    if (p->scaling == ROPE_SCALING_NONE) p->factor = 1;

    m->ropes[1] = *p; /* windows are short: never scaled */
    m->ropes[1].scaling = ROPE_SCALING_NONE;
    m->ropes[1].factor = m->ropes[1].attn_factor = 1;
    m->ropes[1].base = r->arch->window_base;
    return m->n_rope == 2 ? key_float(r, &m->ropes[1].base, "rope.freq_base_swa", 1.0001, 1e15, MAY) : 0;
}

/* Positions of images have three components, and the sections say which pair turns by which. In a text all are the same,
 * so that this is plain NEOX, unless a pair has none of the three. */
static int check_sections(const struct model_read *r) {
    char key[128];
    int64_t s[3];
    const struct gguf_kv *kv = gguf_find(r->g, full_key(key, sizeof key, r, "rope.dimension_sections"));
    if (!kv) return 0;
    for (int i = 0; i < 3; i++)
        if (kv->type != GGUF_ARR || kv->n < 3 || !gguf_elem_i64(kv, i, &s[i]))
            return err_set(ERR_FORMAT, "%s: key %s is not an array of 3 or 4 integers", gguf_path(r->g, 0), key);
    for (int i = 0; i < r->m->ropes[0].n_rot / 2; i++)
        if (i / 3 >= s[i % 3])
            return err_set(ERR_UNSUPPORTED, "%s: key %s leaves pair %d of %d without a section", gguf_path(r->g, 0), key, i,
                           r->m->ropes[0].n_rot / 2);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static int read_layers(struct model_read *r) {
    struct model *m = r->m;
    int64_t *v = calloc((size_t)blocks_of(m), sizeof *v);
    m->layers = calloc((size_t)blocks_of(m), sizeof *m->layers);
    m->n_rope = 1;
    int rc = v && m->layers ? 0 : err_set(ERR_NOMEM, "%s: no memory for %d layers", gguf_path(r->g, 0), blocks_of(m));
    if (!rc) rc = read_mixers(r, v);
    if (!rc) rc = read_heads(r, v);
    if (!rc) rc = read_ffn(r, v);
    if (!rc) rc = read_windows(r, v);
    if (!rc) rc = read_attn_scale(r);
    if (!rc) rc = read_rope(r);
    if (!rc && r->arch->flags & ARCH_HYBRID) rc = check_sections(r);
    free(v);
    return rc;
}

int model_open(struct model *out, const struct gguf *g) {
    struct model_read r = {.g = g, .m = out};
    memset(out, 0, sizeof *out);
    if (!gguf_n_tensors(g))
        return err_set(ERR_FORMAT, "%s: holds no tensors (token_embd.weight is missing): it may be a vocabulary, but not a model to run",
                       gguf_path(g, 0));
    int rc = read_arch(&r);
    if (!rc) rc = read_sizes(&r);
    if (!rc) rc = read_vocab(&r);
    if (!rc) rc = read_experts(&r);
    if (!rc) rc = read_layers(&r);
    if (!rc) rc = model_read_tensors(&r);
    if (rc) model_close(out);
    return rc;
}

int model_use_mtp(struct model *m) {
    if (!m->n_mtp) return err_set(ERR_UNSUPPORTED, "this model has no block for multi-token prediction");
    m->n_block = m->n_layer + m->n_mtp;
    model_count(m);
    return 0;
}

void model_close(struct model *m) {
    free(m->layers);
    memset(m, 0, sizeof *m);
}

const char *layer_tensor_name(enum layer_tensor t) {
    static const char *const names[] = {
#define X(id, name) [LT_##id] = name,
        LAYER_TENSOR_LIST(X, X)
#undef X
    };
    return names[t];
}

bool layer_tensor_is_vector(enum layer_tensor t) {
    switch (t) {
#define MAT(id, name)
#define VEC(id, name) case LT_##id:
        LAYER_TENSOR_LIST(MAT, VEC)
#undef MAT
#undef VEC
        return true;
    default: return false;
    }
}
