/* model_tensors.c: the tensor records of a model. A tensor that is needed must have exactly the shape that follows from
 * the metadata, and a type that we can read; tensors that are not needed are left alone, whatever they are. */
#include "core/err.h"
#include "core/model_read.h"
#include "core/quant.h"

#include <stdio.h>
#include <string.h>

enum need { MAY, MUST };
enum kind { MATRIX, VECTOR };

struct shape {
    int64_t cols, rows, stack; /* dims[0], dims[1], dims[2] */
};

static struct shape vec(int64_t n) { return (struct shape){n, 1, 1}; }
static struct shape mat(int64_t cols, int64_t rows) { return (struct shape){cols, rows, 1}; }

static int check_shape(const struct model_read *r, const struct gguf_tensor *t, struct shape s) {
    if (t->dims[0] == s.cols && t->dims[1] == s.rows && t->dims[2] == s.stack && t->dims[3] == 1) return 0;
    return err_set(ERR_FORMAT, "%s: tensor %s has shape {%lld, %lld, %lld, %lld}, the metadata asks for {%lld, %lld, %lld, 1}",
                   gguf_path(r->g, t->shard), t->name, (long long)t->dims[0], (long long)t->dims[1], (long long)t->dims[2],
                   (long long)t->dims[3], (long long)s.cols, (long long)s.rows, (long long)s.stack);
}

static int check_type(const struct model_read *r, const struct gguf_tensor *t, enum kind kind) {
    const char *path = gguf_path(r->g, t->shard);
    const struct quant_info *q = quant_info(t->type);
    if (!q) return err_set(ERR_UNSUPPORTED, "%s: tensor %s has the unknown type %d", path, t->name, (int)t->type);
    if (kind == VECTOR && t->type != QT_F32 && t->type != QT_F16 && t->type != QT_BF16)
        return err_set(ERR_UNSUPPORTED, "%s: tensor %s is %s; a vector must be F32, F16 or BF16", path, t->name, q->name);
    if (!q->decodable)
        return err_set(ERR_UNSUPPORTED, "%s: tensor %s is %s, a type that this program cannot decode", path, t->name, q->name);
    return 0;
}

/* NVFP4 files may carry a factor per tensor, which must not be dropped silently. */
static int check_no_scale(const struct model_read *r, const char *name) {
    char scale[GGUF_MAX_NAME + 1];
    size_t n = strlen(name), cut = strlen("weight");
    if (n <= cut || strcmp(name + n - cut, "weight")) return 0;
    snprintf(scale, sizeof scale, "%.*sscale", (int)(n - cut), name);
    if (!gguf_tensor_find(r->g, scale)) return 0;
    return err_set(ERR_UNSUPPORTED, "%s: tensor %s: factors per tensor are not supported", gguf_path(r->g, 0), scale);
}

/* Fills *out (all zero when the tensor is absent and MAY be). */
static int take(const struct model_read *r, struct tensor *out, const char *name, enum kind kind, struct shape s, enum need need) {
    const struct gguf_tensor *t = gguf_tensor_find(r->g, name);
    memset(out, 0, sizeof *out);
    if (!t) return need == MUST ? err_set(ERR_FORMAT, "%s: tensor %s is missing", gguf_path(r->g, 0), name) : 0;
    int rc = check_type(r, t, kind);
    if (!rc) rc = check_shape(r, t, s);
    if (!rc && kind == MATRIX) rc = check_no_scale(r, name);
    if (rc) return rc;
    *out = (struct tensor){.type = t->type, .rows = s.rows, .cols = s.cols, .stack = s.stack, .shard = t->shard,
                           .offset = t->offset, .bytes = t->bytes, .stride = t->bytes / (size_t)s.stack};
    return 0;
}

static const char *layer_name(char *buf, size_t cap, int il, const char *suffix) {
    snprintf(buf, cap, "blk.%d.%s", il, suffix);
    return buf;
}

static int take_layer(const struct model_read *r, int il, enum layer_tensor id, struct shape s, enum need need) {
    char name[GGUF_MAX_NAME + 1];
    enum kind kind = layer_tensor_is_vector(id) ? VECTOR : MATRIX;
    return take(r, &r->m->layers[il].t[id], layer_name(name, sizeof name, il, layer_tensor_name(id)), kind, s, need);
}

static bool has_layer(const struct model_read *r, int il, const char *suffix) {
    char name[GGUF_MAX_NAME + 1];
    return gguf_tensor_find(r->g, layer_name(name, sizeof name, il, suffix)) != NULL;
}

/* Rows row0 .. row0+rows of every matrix of `whole`; of a vector, its elements. */
static struct tensor slice(const struct tensor *whole, int64_t row0, int64_t rows) {
    struct tensor t = *whole;
    bool vector = whole->rows == 1;
    int64_t n = vector ? whole->cols : whole->rows;
    size_t row_bytes = whole->bytes / (size_t)whole->stack / (size_t)n;
    if (vector)
        t.cols = rows;
    else
        t.rows = rows;
    t.offset += (uint64_t)row0 * row_bytes;
    t.bytes = (size_t)(rows * whole->stack) * row_bytes;
    return t;
}

/* Every second group of `group` rows of a matrix, from the first (which = 0) or the second one on. */
static struct tensor every_second(const struct tensor *whole, int64_t group, int which) {
    struct tensor t = slice(whole, which * group, whole->rows / 2);
    t.group = group;
    t.group_stride = whole->bytes / (size_t)whole->rows * (size_t)(2 * group);
    return t;
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* q, k and v as three tensors, or their rows as one. */
static int take_qkv(const struct model_read *r, int il, const char *fused, const enum layer_tensor id[3], enum kind kind,
                    enum need need) {
    struct layer *l = &r->m->layers[il];
    int gated = kind == MATRIX && r->arch->flags & ARCH_HYBRID ? 2 : 1; /* each query head is followed by its gate */
    int64_t rows[3] = {(int64_t)gated * l->n_head * l->head_dim_k, (int64_t)l->n_kv * l->head_dim_k, (int64_t)l->n_kv * l->head_dim_v};
    int64_t all = rows[0] + rows[1] + rows[2], at = 0;
    int rc = 0;
    if (has_layer(r, il, layer_tensor_name(id[0])) || !has_layer(r, il, fused)) {
        for (int i = 0; i < 3 && !rc; i++)
            rc = take_layer(r, il, id[i], kind == VECTOR ? vec(rows[i]) : mat(r->m->dim, rows[i]), need);
        return rc;
    }
    char name[GGUF_MAX_NAME + 1];
    struct tensor whole;
    rc = take(r, &whole, layer_name(name, sizeof name, il, fused), kind, kind == VECTOR ? vec(all) : mat(r->m->dim, all), MUST);
    for (int i = 0; i < 3 && !rc; at += rows[i], i++) l->t[id[i]] = slice(&whole, at, rows[i]);
    return rc;
}

static int take_attn(const struct model_read *r, int il) {
    static const enum layer_tensor weights[3] = {LT_ATTN_Q, LT_ATTN_K, LT_ATTN_V};
    static const enum layer_tensor biases[3] = {LT_ATTN_Q_BIAS, LT_ATTN_K_BIAS, LT_ATTN_V_BIAS};
    struct layer *l = &r->m->layers[il];
    int dim = r->m->dim;
    unsigned flags = r->arch->flags;
    int rc = take_layer(r, il, LT_ATTN_NORM, vec(dim), MUST);
    if (!rc) rc = take_qkv(r, il, "attn_qkv.weight", weights, MATRIX, MUST);
    if (!rc && flags & ARCH_HYBRID) {
        struct tensor q = l->t[LT_ATTN_Q];
        l->t[LT_ATTN_Q] = every_second(&q, l->head_dim_k, 0);
        l->t[LT_ATTN_GATE] = every_second(&q, l->head_dim_k, 1);
    }
    if (!rc) rc = take_qkv(r, il, "attn_qkv.bias", biases, VECTOR, flags & ARCH_QKV_BIAS ? MUST : MAY);
    if (!rc) rc = take_layer(r, il, LT_ATTN_OUT, mat((int64_t)l->n_head * l->head_dim_v, dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_ATTN_OUT_BIAS, vec(dim), MAY);
    if (!rc && flags & ARCH_QK_NORM) rc = take_layer(r, il, LT_ATTN_Q_NORM, vec(l->head_dim_k), MUST);
    if (!rc && flags & ARCH_QK_NORM) rc = take_layer(r, il, LT_ATTN_K_NORM, vec(l->head_dim_k), MUST);
    if (!rc && flags & ARCH_POST_NORM) rc = take_layer(r, il, LT_POST_ATTN_NORM, vec(dim), MUST);
    return rc;
}

/* --- Gated DeltaNet ------------------------------------------------------------------------------------------------- */

/* beta and alpha of the value heads of each key head in turn. */
static int take_ba(const struct model_read *r, int il) {
    char name[GGUF_MAX_NAME + 1];
    struct layer *l = &r->m->layers[il];
    const struct delta_shape *s = &r->m->delta;
    struct tensor ba;
    int rc = take(r, &ba, layer_name(name, sizeof name, il, "ssm_ba.weight"), MATRIX, mat(r->m->dim, 2 * (int64_t)s->n_value), MUST);
    if (rc) return rc;
    l->t[LT_DELTA_BETA] = every_second(&ba, s->n_value / s->n_key, 0);
    l->t[LT_DELTA_ALPHA] = every_second(&ba, s->n_value / s->n_key, 1);
    return 0;
}

static int take_delta(const struct model_read *r, int il) {
    const struct delta_shape *s = &r->m->delta;
    struct tensor *conv = &r->m->layers[il].t[LT_DELTA_CONV];
    int64_t dim = r->m->dim, inner = (int64_t)s->n_value * s->dim, channels = delta_conv_dim(s);
    if (has_layer(r, il, "ssm_in.weight") && !has_layer(r, il, layer_tensor_name(LT_DELTA_QKV)))
        return err_set(ERR_UNSUPPORTED, "%s: tensor blk.%d.ssm_in.weight: made by an early converter; convert the model again",
                       gguf_path(r->g, 0), il);
    int rc = take_layer(r, il, LT_ATTN_NORM, vec(dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_QKV, mat(dim, channels), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_Z, mat(dim, inner), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_CONV, mat(s->n_conv, channels), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_DT, vec(s->n_value), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_RATE, vec(s->n_value), MUST);
    if (!rc && has_layer(r, il, "ssm_ba.weight")) {
        rc = take_ba(r, il);
    } else {
        if (!rc) rc = take_layer(r, il, LT_DELTA_ALPHA, mat(dim, s->n_value), MUST);
        if (!rc) rc = take_layer(r, il, LT_DELTA_BETA, mat(dim, s->n_value), MUST);
    }
    if (!rc) rc = take_layer(r, il, LT_DELTA_NORM, vec(s->dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_DELTA_OUT, mat(inner, dim), MUST);
    conv->cols *= conv->rows; /* a vector from here on */
    conv->rows = 1;
    return rc;
}

/* --- FFN ---------------------------------------------------------------------------------------------------------- */

static int take_dense(const struct model_read *r, int il) {
    struct layer *l = &r->m->layers[il];
    int dim = r->m->dim, ff = l->n_ff;
    int rc;
    if (r->arch->flags & ARCH_FUSED_GATE && !has_layer(r, il, "ffn_gate.weight")) {
        struct tensor *up = &l->t[LT_FFN_UP];
        rc = take_layer(r, il, LT_FFN_UP, mat(dim, (int64_t)2 * ff), MUST);
        if (rc) return rc;
        l->t[LT_FFN_GATE] = slice(up, 0, ff);
        *up = slice(up, ff, ff);
    } else {
        rc = take_layer(r, il, LT_FFN_GATE, mat(dim, ff), MUST);
        if (!rc) rc = take_layer(r, il, LT_FFN_UP, mat(dim, ff), MUST);
    }
    if (!rc) rc = take_layer(r, il, LT_FFN_DOWN, mat(ff, dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_FFN_GATE_BIAS, vec(ff), MAY);
    if (!rc) rc = take_layer(r, il, LT_FFN_UP_BIAS, vec(ff), MAY);
    if (!rc) rc = take_layer(r, il, LT_FFN_DOWN_BIAS, vec(dim), MAY);
    return rc;
}

static int take_experts(const struct model_read *r, int il) {
    struct layer *l = &r->m->layers[il];
    int dim = r->m->dim, ff = l->n_ff, n = r->m->n_expert;
    int rc = take_layer(r, il, LT_MOE_ROUTER, mat(dim, n), MUST);
    if (rc) return rc;
    if (has_layer(r, il, "ffn_gate_up_exps.weight") && !has_layer(r, il, layer_tensor_name(LT_MOE_GATE))) {
        char name[GGUF_MAX_NAME + 1];
        struct tensor whole;
        layer_name(name, sizeof name, il, "ffn_gate_up_exps.weight");
        rc = take(r, &whole, name, MATRIX, (struct shape){dim, (int64_t)2 * ff, n}, MUST);
        if (rc) return rc;
        l->t[LT_MOE_GATE] = slice(&whole, 0, ff);
        l->t[LT_MOE_UP] = slice(&whole, ff, ff);
    } else {
        rc = take_layer(r, il, LT_MOE_GATE, (struct shape){dim, ff, n}, MUST);
        if (!rc) rc = take_layer(r, il, LT_MOE_UP, (struct shape){dim, ff, n}, MUST);
    }
    if (!rc) rc = take_layer(r, il, LT_MOE_DOWN, (struct shape){ff, dim, n}, MUST);
    return rc;
}

static int take_shared(const struct model_read *r, int il) {
    int dim = r->m->dim, ff = r->m->n_ff_shared;
    int rc = take_layer(r, il, LT_SHARED_ROUTER, mat(dim, 1), MUST);
    if (!rc) rc = take_layer(r, il, LT_SHARED_GATE, mat(dim, ff), MUST);
    if (!rc) rc = take_layer(r, il, LT_SHARED_UP, mat(dim, ff), MUST);
    if (!rc) rc = take_layer(r, il, LT_SHARED_DOWN, mat(ff, dim), MUST);
    return rc;
}

static int take_ffn(const struct model_read *r, int il) {
    struct layer *l = &r->m->layers[il];
    char name[GGUF_MAX_NAME + 1];
    const char *norm = r->arch->flags & ARCH_HYBRID ? "post_attention_norm.weight" : layer_tensor_name(LT_FFN_NORM);
    int rc = take(r, &l->t[LT_FFN_NORM], layer_name(name, sizeof name, il, norm), VECTOR, vec(r->m->dim), MUST);
    if (!rc) rc = l->ffn == FFN_EXPERTS ? take_experts(r, il) : take_dense(r, il);
    if (!rc && r->m->n_ff_shared) rc = take_shared(r, il);
    if (!rc && r->arch->flags & ARCH_POST_NORM) rc = take_layer(r, il, LT_POST_FFN_NORM, vec(r->m->dim), MUST);
    return rc;
}

/* --- multi-token prediction ----------------------------------------------------------------------------------------- */

static int take_mtp(const struct model_read *r, int il) {
    int64_t dim = r->m->dim, vocab = r->m->n_vocab;
    int rc = take_layer(r, il, LT_MTP_EMBD_NORM, vec(dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_MTP_H_NORM, vec(dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_MTP_PROJ, mat(2 * dim, dim), MUST);
    if (!rc) rc = take_layer(r, il, LT_MTP_EMBD, mat(dim, vocab), MAY);
    if (!rc) rc = take_layer(r, il, LT_MTP_OUT_NORM, vec(dim), MAY);
    if (!rc) rc = take_layer(r, il, LT_MTP_OUT, mat(dim, vocab), MAY);
    return rc;
}

/* --- the model ---------------------------------------------------------------------------------------------------- */

static int check_vocab(const struct model_read *r, const char *name, int64_t rows) {
    if (!r->n_tokens || rows == r->n_tokens) return 0;
    return err_set(ERR_FORMAT, "%s: tensor %s has %lld rows, but tokenizer.ggml.tokens lists %lld tokens", gguf_path(r->g, 0), name,
                   (long long)rows, (long long)r->n_tokens);
}

static int take_globals(const struct model_read *r) {
    struct model *m = r->m;
    const struct gguf_tensor *embd = gguf_tensor_find(r->g, "token_embd.weight");
    int64_t vocab = embd ? embd->dims[1] : 0, pairs = m->ropes[0].n_rot / 2;
    if (vocab > INT32_MAX / 2)
        return err_set(ERR_FORMAT, "%s: tensor token_embd.weight has %lld rows, the limit is %d", gguf_path(r->g, 0),
                       (long long)vocab, INT32_MAX / 2);
    int rc = take(r, &m->embd, "token_embd.weight", MATRIX, mat(m->dim, vocab), MUST);
    if (!rc) rc = check_vocab(r, "token_embd.weight", vocab);
    if (!rc) rc = take(r, &m->out_norm, "output_norm.weight", VECTOR, vec(m->dim), MUST);
    if (!rc) rc = take(r, &m->out, "output.weight", MATRIX, mat(m->dim, vocab), MAY);
    if (!rc) rc = take(r, &m->out_bias, "output.bias", VECTOR, vec(vocab), MAY);
    if (!rc) rc = take(r, &m->rope_freqs, "rope_freqs.weight", VECTOR, vec(pairs), MAY);
    if (!rc) rc = take(r, &m->rope_long, "rope_factors_long.weight", VECTOR, vec(pairs), MAY);
    if (!rc) rc = take(r, &m->rope_short, "rope_factors_short.weight", VECTOR, vec(pairs), MAY);
    m->n_vocab = (int)vocab;
    return rc;
}

/* Files with longrope factors need not say so in rope.scaling.type. */
static int settle_longrope(const struct model_read *r) {
    struct model *m = r->m;
    bool both = m->rope_long.bytes && m->rope_short.bytes;
    if ((m->rope_long.bytes || m->rope_short.bytes || m->ropes[0].scaling == ROPE_SCALING_LONGROPE) && !both)
        return err_set(ERR_FORMAT, "%s: longrope needs both tensors rope_factors_long.weight and rope_factors_short.weight",
                       gguf_path(r->g, 0));
    if (both) m->ropes[0].scaling = ROPE_SCALING_LONGROPE;
    return 0;
}

static void count(struct model *m, const struct tensor *t) {
    if (!t->bytes) return;
    m->n_params += (uint64_t)t->rows * (uint64_t)t->cols * (uint64_t)t->stack;
    m->file_bytes += t->bytes;
}

void model_count(struct model *m) {
    const struct tensor *globals[] = {&m->embd, &m->out_norm, &m->out, &m->out_bias, &m->rope_freqs, &m->rope_long, &m->rope_short};
    m->n_params = m->file_bytes = 0;
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++) count(m, globals[i]);
    for (int il = 0; il < m->n_block; il++)
        for (int t = 0; t < LT_COUNT; t++) count(m, &m->layers[il].t[t]);
}

int model_read_tensors(const struct model_read *r) {
    struct model *m = r->m;
    if (m->n_mtp && !has_layer(r, 0, layer_tensor_name(LT_ATTN_NORM)) && has_layer(r, m->n_layer, layer_tensor_name(LT_MTP_PROJ)))
        return err_set(ERR_UNSUPPORTED, "%s: holds only a model's block for multi-token prediction, not the model", gguf_path(r->g, 0));
    int rc = take_globals(r);
    if (!rc) rc = settle_longrope(r);
    for (int il = 0; il < m->n_layer + m->n_mtp && !rc; il++) {
        rc = m->layers[il].mixer == MIXER_DELTA ? take_delta(r, il) : take_attn(r, il);
        if (!rc) rc = take_ffn(r, il);
        if (!rc && il >= m->n_layer) rc = take_mtp(r, il);
    }
    if (!rc) model_count(m);
    return rc;
}
