/* model.h: what a model is: shapes, flags and file offsets. No pointers to weights, no device, nothing computed.
 * A struct model is plain data after model_open and may be read by any thread. */
#ifndef LH_CORE_MODEL_H
#define LH_CORE_MODEL_H

#include "core/ops.h"
#include "core/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf;

enum { MODEL_MAX_LAYER = 1024, MODEL_MAX_EXPERT = 1024, MODEL_MAX_HEAD = 1024 };

/* Tensors of a layer: enum, name after "blk.N.". Matrices are kept in strips, vectors (VEC) as f32. Some are rows of a
 * tensor of another name: ATTN_GATE lies in attn_q, DELTA_ALPHA and DELTA_BETA may lie in ssm_ba, and FFN_NORM of hybrids is
 * post_attention_norm. DELTA_CONV is a matrix in the file and a vector [conv_dim * n_conv] here. */
#define LAYER_TENSOR_LIST(MAT, VEC)                                                                                    \
    MAT(MTP_EMBD, "nextn.embed_tokens.weight")                                                                         \
    VEC(MTP_EMBD_NORM, "nextn.enorm.weight")                                                                           \
    VEC(MTP_H_NORM, "nextn.hnorm.weight")                                                                              \
    MAT(MTP_PROJ, "nextn.eh_proj.weight")                                                                              \
    VEC(ATTN_NORM, "attn_norm.weight")                                                                                 \
    MAT(ATTN_Q, "attn_q.weight")                                                                                       \
    MAT(ATTN_GATE, "attn_q.weight")                                                                                    \
    MAT(ATTN_K, "attn_k.weight")                                                                                       \
    MAT(ATTN_V, "attn_v.weight")                                                                                       \
    MAT(ATTN_OUT, "attn_output.weight")                                                                                \
    VEC(ATTN_Q_BIAS, "attn_q.bias")                                                                                    \
    VEC(ATTN_K_BIAS, "attn_k.bias")                                                                                    \
    VEC(ATTN_V_BIAS, "attn_v.bias")                                                                                    \
    VEC(ATTN_OUT_BIAS, "attn_output.bias")                                                                             \
    VEC(ATTN_Q_NORM, "attn_q_norm.weight")                                                                             \
    VEC(ATTN_K_NORM, "attn_k_norm.weight")                                                                             \
    MAT(DELTA_QKV, "attn_qkv.weight")                                                                                  \
    MAT(DELTA_Z, "attn_gate.weight")                                                                                   \
    VEC(DELTA_CONV, "ssm_conv1d.weight")                                                                               \
    VEC(DELTA_DT, "ssm_dt.bias")                                                                                       \
    VEC(DELTA_RATE, "ssm_a")                                                                                           \
    MAT(DELTA_ALPHA, "ssm_alpha.weight")                                                                               \
    MAT(DELTA_BETA, "ssm_beta.weight")                                                                                 \
    VEC(DELTA_NORM, "ssm_norm.weight")                                                                                 \
    MAT(DELTA_OUT, "ssm_out.weight")                                                                                   \
    VEC(POST_ATTN_NORM, "post_attention_norm.weight")                                                                  \
    VEC(FFN_NORM, "ffn_norm.weight")                                                                                   \
    MAT(FFN_GATE, "ffn_gate.weight")                                                                                   \
    MAT(FFN_UP, "ffn_up.weight")                                                                                       \
    MAT(FFN_DOWN, "ffn_down.weight")                                                                                   \
    VEC(FFN_GATE_BIAS, "ffn_gate.bias")                                                                                \
    VEC(FFN_UP_BIAS, "ffn_up.bias")                                                                                    \
    VEC(FFN_DOWN_BIAS, "ffn_down.bias")                                                                                \
    VEC(POST_FFN_NORM, "post_ffw_norm.weight")                                                                         \
    MAT(MOE_ROUTER, "ffn_gate_inp.weight")                                                                             \
    MAT(MOE_GATE, "ffn_gate_exps.weight")                                                                              \
    MAT(MOE_UP, "ffn_up_exps.weight")                                                                                  \
    MAT(MOE_DOWN, "ffn_down_exps.weight")                                                                              \
    MAT(SHARED_ROUTER, "ffn_gate_inp_shexp.weight")                                                                    \
    MAT(SHARED_GATE, "ffn_gate_shexp.weight")                                                                          \
    MAT(SHARED_UP, "ffn_up_shexp.weight")                                                                              \
    MAT(SHARED_DOWN, "ffn_down_shexp.weight")                                                                          \
    VEC(MTP_OUT_NORM, "nextn.shared_head_norm.weight")                                                                 \
    MAT(MTP_OUT, "nextn.shared_head_head.weight")

enum layer_tensor {
#define X(id, name) LT_##id,
    LAYER_TENSOR_LIST(X, X)
#undef X
        LT_COUNT
};

/* Name after "blk.N.", and whether it is a vector. */
const char *layer_tensor_name(enum layer_tensor t);
bool layer_tensor_is_vector(enum layer_tensor t);

enum mixer { MIXER_ATTN, MIXER_DELTA };
enum ffn { FFN_DENSE, FFN_EXPERTS };

struct layer {
    enum mixer mixer;
    enum ffn ffn;
    int n_head, n_kv;            /* query heads, KV heads; 0 in a MIXER_DELTA layer */
    int head_dim_k, head_dim_v;
    int n_ff;                    /* FFN width, of one expert where there are experts */
    int64_t window;              /* sliding window, 0: none */
    int rope;                    /* index into model.ropes */
    struct tensor t[LT_COUNT];   /* bytes == 0: absent */
};

/* RoPE parameters as the file gives them; core/rope.h turns them into frequencies. */
enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_YARN, ROPE_SCALING_LONGROPE };
struct rope {
    enum rope_pairing pairing;
    int n_rot;
    double base;
    enum rope_scaling scaling;
    double factor;               /* >= 1; 1: none */
    int64_t n_ctx_orig;
    double attn_factor;          /* extra magnitude, 1 */
    double ext_factor;           /* YaRN blend, 1 */
    double beta_fast, beta_slow; /* YaRN, 32 and 1 */
};

struct model {
    char arch[32];
    char name[128];              /* general.name, cut; "" if absent */
    int n_layer;                 /* layers of the main model */
    int n_mtp;                   /* blocks after them that predict further tokens (multi-token prediction), 0: none */
    int n_block;                 /* blocks that are loaded and have KV: n_layer, or n_layer + n_mtp by model_use_mtp */
    int dim;
    int n_vocab;
    int64_t n_ctx_train;
    float eps;                   /* of every RMSNorm */
    float embd_scale;            /* 1 except gemma */
    float attn_scale;            /* of q.k */
    float logit_softcap;         /* 0: none */
    enum act act;
    int n_expert, n_expert_used; /* 0: dense */
    bool expert_normalise;
    int n_ff_shared;             /* width of the expert that every token uses, 0: none */
    struct delta_shape delta;    /* n_value 0: no MIXER_DELTA layers */
    struct rope ropes[2];        /* [0] global, [1] of sliding-window layers */
    int n_rope;
    struct tensor embd, out_norm, out;            /* out.bytes == 0: tied, use embd */
    struct tensor out_bias;                       /* rare */
    struct tensor rope_freqs;                     /* ?[n_rot/2] f32 divisors (llama 3.x) */
    struct tensor rope_long, rope_short;          /* ?longrope divisors */
    struct layer *layers;        /* [n_layer + n_mtp], owned */
    uint64_t n_params;           /* weights of the n_block blocks and the tensors above */
    size_t file_bytes;           /* their bytes in the file */
};

/* Reads shapes and offsets of an opened GGUF, checking every number that is used as a size (spec: each tensor must have
 * exactly the derived shape). ERR_FORMAT, ERR_UNSUPPORTED: names the key or tensor, the value and the limit. */
int model_open(struct model *out, const struct gguf *g);
void model_close(struct model *m);

/* Takes the blocks for multi-token prediction in: before anything is planned or loaded. ERR_UNSUPPORTED: there are none. */
int model_use_mtp(struct model *m);

#endif
