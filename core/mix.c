/* mix.c: see mix.h. The rules are those that the common quantising tool follows; the byte totals of published files are
 * the check (tests/test_mix.c). */
#include "core/mix.h"

#include "core/quant.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static const struct {
    const char *name;
    int base, file_type;
} mixes[MIX_COUNT] = {
#define X(name, base, file_type) [MIX_##name] = {#name, QT_##base, file_type},
    MIX_LIST(X)
#undef X
};

const char *mix_name(enum mix mix) {
    return mixes[mix].name;
}

int mix_base_type(enum mix mix) {
    return mixes[mix].base;
}

int mix_file_type(enum mix mix) {
    return mixes[mix].file_type;
}

int mix_from_name(const char *name) {
    if (!strcasecmp(name, "q3_k")) return MIX_Q3_K_M;
    if (!strcasecmp(name, "q4_k")) return MIX_Q4_K_M;
    if (!strcasecmp(name, "q5_k")) return MIX_Q5_K_M;
    for (int i = 0; i < MIX_COUNT; i++)
        if (!strcasecmp(mixes[i].name, name)) return i;
    return -1;
}

static bool ends_with(const char *s, const char *end) {
    size_t a = strlen(s), b = strlen(end);
    return a >= b && !strcmp(s + a - b, end);
}

/* What the rules distinguish. */
enum role { ROLE_KEEP, ROLE_OUTPUT, ROLE_ATTN_V, ROLE_ATTN_K, ROLE_ATTN_OUTPUT, ROLE_FFN_DOWN, ROLE_OTHER };

static enum role role_of(const char *name, int n_dims, bool tied) {
    static const char *const keep[] = {"_norm.weight",      "ffn_gate_inp.weight",      "ffn_gate_inp_shexp.weight",
                                       "ssm_conv1d.weight", "position_embd.weight",     "token_types.weight",
                                       "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"};
    if (n_dims < 2 || !ends_with(name, "weight")) return ROLE_KEEP;
    for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
        if (ends_with(name, keep[i])) return ROLE_KEEP;
    if (!strcmp(name, tied ? "token_embd.weight" : "output.weight")) return ROLE_OUTPUT;
    if (ends_with(name, ".attn_v.weight") || ends_with(name, ".attn_qkv.weight")) return ROLE_ATTN_V;
    if (ends_with(name, ".attn_k.weight")) return ROLE_ATTN_K;
    if (ends_with(name, ".attn_output.weight")) return ROLE_ATTN_OUTPUT;
    if (strstr(name, ".ffn_down")) return ROLE_FFN_DOWN;
    return ROLE_OTHER;
}

/* The first and last eighth, and every third between: where the _M mixes spend more bits. */
static bool more(int i, int n) {
    return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

static bool is_narrow(enum mix mix) { /* 4 bits and fewer */
    switch (mix) {
    case MIX_Q4_K_M:
    case MIX_Q4_K_S:
    case MIX_IQ4_NL:
    case MIX_IQ4_XS:
    case MIX_Q3_K_M:
    case MIX_Q2_K:
        return true;
    default:
        return false;
    }
}

static int attn_v_type(const struct mix_state *s, int v) {
    const struct mix_model *m = &s->model;
    bool grouped = m->n_kv > 0 && m->n_head / m->n_kv >= 4;
    int type = mixes[s->mix].base;
    switch (s->mix) {
    case MIX_Q5_K_M:
    case MIX_Q4_K_M:
        if (more(v, m->n_attn_v)) type = QT_Q6_K;
        break;
    case MIX_Q4_K_S:
        if (v < 4) type = QT_Q5_K;
        break;
    case MIX_Q3_K_M:
        type = v < 2 ? QT_Q5_K : QT_Q4_K;
        break;
    case MIX_Q2_K:
        type = grouped ? QT_Q4_K : QT_Q3_K;
        break;
    case MIX_IQ4_NL:
    case MIX_IQ4_XS:
        if (grouped) type = QT_Q5_K;
        break;
    default:
        break;
    }
    /* Models of the 70B class share each V among eight heads: a small matrix that matters. */
    if (m->n_block == 80 && m->n_expert == 0 && (type == QT_Q3_K || type == QT_Q4_K)) type = QT_Q5_K;
    return m->n_expert == 8 ? QT_Q8_0 : type;
}

static int ffn_down_type(const struct mix_state *s, int f) {
    int n = s->model.n_block, base = mixes[s->mix].base;
    switch (s->mix) {
    case MIX_Q5_K_M:
    case MIX_Q4_K_M:
        return more(f, n) ? QT_Q6_K : base;
    case MIX_Q4_K_S:
    case MIX_IQ4_NL:
    case MIX_IQ4_XS:
        return f < n / 8 ? QT_Q5_K : base;
    case MIX_Q3_K_M:
        return f < n / 16 ? QT_Q5_K : QT_Q4_K;
    case MIX_Q2_K:
        return QT_Q3_K;
    default:
        return base;
    }
}

static int attn_output_type(const struct mix_state *s) {
    if (s->model.n_expert == 8 && is_narrow(s->mix)) return QT_Q5_K;
    if (s->mix == MIX_Q3_K_M) return QT_Q4_K;
    if (s->mix == MIX_Q2_K) return QT_Q3_K;
    return mixes[s->mix].base;
}

static int block_number(const char *name) {
    int n = 0;
    return sscanf(name, "blk.%d.", &n) == 1 ? n : 0;
}

static int wanted_type(struct mix_state *s, const char *name, enum role role) {
    int v = s->n_attn_v, f = s->model.n_expert ? block_number(name) : s->n_ffn_down;
    s->n_attn_v += role == ROLE_ATTN_V;
    s->n_ffn_down += role == ROLE_FFN_DOWN;
    int base = mixes[s->mix].base;
    if (s->pure || quant_info(base)->block_elems == 1) return base;
    if (s->mix == MIX_MXFP4_MOE) return strstr(name, "_exps.") ? QT_MXFP4 : QT_Q8_0;
    switch (role) {
    case ROLE_OUTPUT:
        return base == QT_Q8_0 || base == QT_MXFP4 || base == QT_NVFP4 ? QT_Q8_0 : QT_Q6_K;
    case ROLE_ATTN_V:
        return attn_v_type(s, v);
    case ROLE_ATTN_K:
        return s->model.n_expert == 8 ? QT_Q8_0 : base;
    case ROLE_ATTN_OUTPUT:
        return attn_output_type(s);
    case ROLE_FFN_DOWN:
        return ffn_down_type(s, f);
    default:
        return base;
    }
}

/* A type with blocks of 32 in place of one with larger blocks. */
static int smaller_block(int type, enum role role) {
    if (role == ROLE_OUTPUT) return QT_Q8_0;
    switch (type) {
    case QT_Q2_K:
    case QT_Q3_K:
    case QT_TQ2_0:
        return QT_Q4_0;
    case QT_IQ4_XS:
        return QT_IQ4_NL;
    case QT_Q4_K:
        return QT_Q5_0;
    case QT_Q5_K:
        return QT_Q5_1;
    default:
        return QT_Q8_0;
    }
}

void mix_begin(struct mix_state *s, enum mix mix, bool pure, const struct mix_model *model) {
    *s = (struct mix_state){.mix = mix, .pure = pure, .model = *model};
}

int mix_type(struct mix_state *s, const char *name, int n_dims, const int64_t *dims) {
    enum role role = role_of(name, n_dims, s->model.tied);
    if (role == ROLE_KEEP) return QT_F32;
    int type = wanted_type(s, name, role);
    if (dims[0] % quant_info(type)->block_elems == 0) return type;
    type = quant_info(type)->block_elems > 32 ? smaller_block(type, role) : type;
    return dims[0] % quant_info(type)->block_elems == 0 ? type : QT_F16;
}
