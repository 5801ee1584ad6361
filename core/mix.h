/* mix.h: which tensor gets which packed type in the usual mixes ("Q4_K_M"), without importance data. Only for writing
 * files and for planning from a shape: a file that exists says its types itself.
 * Pure functions on caller-owned state; thread-safe. */
#ifndef LH_CORE_MIX_H
#define LH_CORE_MIX_H

#include <stdbool.h>
#include <stdint.h>

/* X(NAME, base type in core/quant.h, general.file_type). MXFP4 and NVFP4 here are uniform; MXFP4_MOE packs expert stacks
 * only. */
#define MIX_LIST(X)                                                                                                    \
    X(F32, F32, 0)                                                                                                     \
    X(F16, F16, 1)                                                                                                     \
    X(BF16, BF16, 32)                                                                                                  \
    X(Q8_0, Q8_0, 7)                                                                                                   \
    X(Q6_K, Q6_K, 18)                                                                                                  \
    X(Q5_K_M, Q5_K, 17)                                                                                                \
    X(Q5_K_S, Q5_K, 16)                                                                                                \
    X(Q5_1, Q5_1, 9)                                                                                                   \
    X(Q5_0, Q5_0, 8)                                                                                                   \
    X(Q4_K_M, Q4_K, 15)                                                                                                \
    X(Q4_K_S, Q4_K, 14)                                                                                                \
    X(Q4_1, Q4_1, 3)                                                                                                   \
    X(Q4_0, Q4_0, 2)                                                                                                   \
    X(IQ4_NL, IQ4_NL, 25)                                                                                              \
    X(IQ4_XS, IQ4_XS, 30)                                                                                              \
    X(Q3_K_M, Q3_K, 12)                                                                                                \
    X(Q2_K, Q2_K, 10)                                                                                                  \
    X(MXFP4_MOE, MXFP4, 38)                                                                                            \
    X(MXFP4, MXFP4, 38)                                                                                                \
    X(NVFP4, NVFP4, 39)                                                                                                \
    X(TQ2_0, TQ2_0, 37)

/* clang-format off */
enum mix {
#define X(name, base, file_type) MIX_##name,
    MIX_LIST(X)
#undef X
    MIX_COUNT
};
/* clang-format on */

const char *mix_name(enum mix mix);
int mix_base_type(enum mix mix); /* enum quant_type of most tensors */
int mix_file_type(enum mix mix); /* value of general.file_type */

/* Mix of this name in any case; "q3_k", "q4_k" and "q5_k" mean the _M mixes. -1: unknown. */
int mix_from_name(const char *name);

/* What the rules ask of a model. */
struct mix_model {
    int n_block; /* blk.N, multi-token-prediction blocks included */
    int n_head, n_kv;
    int n_expert; /* 0: dense */
    int n_attn_v; /* attn_v and attn_qkv matrices in all blocks together */
    bool tied;    /* no output.weight: token_embd.weight stands for it */
};

struct mix_state {
    enum mix mix;
    bool pure;
    struct mix_model model;
    int n_attn_v, n_ffn_down; /* seen so far */
};

/* pure: the base type for every matrix, output and embedding included. */
void mix_begin(struct mix_state *s, enum mix mix, bool pure, const struct mix_model *model);

/* Type for the next tensor. Tensors of blocks must be given in the order of block numbers (any order within a block):
 * some rules count. Small and sensitive tensors stay F32. Where rows do not fill whole blocks, a type with smaller ones
 * (of about the same size) is given, F16 in the end. */
int mix_type(struct mix_state *s, const char *name, int n_dims, const int64_t *dims);

#endif
