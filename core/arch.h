/* arch.h: what distinguishes the model families, one row each. Everything a file does not say follows from its
 * architecture; a llama-like family is added by a row here and, for a new mechanism, a flag that the decoder reads from
 * struct model. */
#ifndef LH_CORE_ARCH_H
#define LH_CORE_ARCH_H

#include "core/ops.h"

#include <stddef.h>

enum arch_flag {
    ARCH_QKV_BIAS = 1 << 0,      /* biases of q, k, v are required (everywhere else optional) */
    ARCH_QK_NORM = 1 << 1,       /* each q and k head is normalised before RoPE */
    ARCH_POST_NORM = 1 << 2,     /* the results of attention and FFN are normalised before they are added */
    ARCH_EMBD_SCALE = 1 << 3,    /* embeddings are multiplied by sqrt(dim) */
    ARCH_MAY_EXPERTS = 1 << 4,   /* expert_count > 0 makes every FFN a mixture of experts */
    ARCH_MUST_EXPERTS = 1 << 5,  /* every FFN is one */
    ARCH_EXPERT_NORM = 1 << 6,   /* weights of the chosen experts are divided by their sum */
    ARCH_FUSED_GATE = 1 << 7,    /* ffn_up holds the gate's rows, then those of up */
    ARCH_BIG_SCALE = 1 << 8,     /* 62 layers: q.k is scaled by 1/sqrt(dim / n_head), not by the head size (gemma3 27B) */
    ARCH_SHARED_EXPERT = 1 << 9, /* beside the chosen experts every token uses one with a gate of its own */
    ARCH_HYBRID = 1 << 10,       /* Gated DeltaNet layers with gated attention in between; blocks for multi-token prediction */
    ARCH_TILED = 1 << 11,        /* value head j of a Gated DeltaNet layer reads key head j % n_key (struct delta_shape) */
};

struct arch {
    const char *name; /* value of general.architecture */
    enum rope_pairing pairing;
    enum act act;
    unsigned flags;      /* enum arch_flag */
    int window_period;   /* of every so many layers the last is global and the others have the sliding window; 0: no
                            windows, the key is ignored */
    double window_base;  /* RoPE base of the layers with a window, unless the file says another */
};

/* NULL: unknown. Bytes with a length, as they come from a file. */
const struct arch *arch_find(const char *name, size_t bytes);
/* The i-th row; NULL past the end. */
const struct arch *arch_at(int i);

#endif
