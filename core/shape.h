/* shape.h: built-in shapes of well-known models: enough to plan, to size memory and to write files of random weights
 * without having the model. Numbers are those of the published models; the byte totals are tested.
 * Static, read-only data; all functions are thread-safe. */
#ifndef LH_CORE_SHAPE_H
#define LH_CORE_SHAPE_H

#include "core/mix.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct shape {
    const char *name;    /* "qwen3.8-27b" */
    const char *aliases; /* other names, separated by spaces; "" if none */
    const char *arch;    /* general.architecture */
    int n_layer;         /* of the main model */
    int n_mtp;           /* multi-token-prediction blocks after them */
    int dim, n_ff;       /* n_ff: 0 when every layer has experts */
    int n_head, n_kv, head_dim;
    int n_vocab;
    int64_t n_ctx;
    double rope_base, eps;
    int n_rot; /* rotated dims of a head */
    bool tied; /* no output.weight */
    int n_expert, n_expert_used, n_ff_expert, n_ff_shared;
    int full_interval; /* every n-th layer has attention, the others Gated DeltaNet; 1: all have attention */
    int n_key_head, n_value_head, state_dim, n_conv; /* Gated DeltaNet */
    int window, window_pattern; /* sliding window; layer il is global iff il % pattern == pattern - 1 */
    double rope_base_local;     /* of the sliding-window layers */
    double rope_factor;         /* linear scaling stored in the file, 1: none */
    double rope_divisor_factor; /* llama 3.x rope_freqs.weight: its factor, 0: no such tensor */
    /* Known from an announcement only: the totals that it gives, at 4 bits (SHAPE_PUBLISHED_MIX, also called "q4"). The
     * FFN width and the vocabulary are made up to come near them: parameters within 0.1 %, bytes within 2 %. 0: the sums
     * over the tensors are the model's own. */
    double published_params, published_bytes;
};

#define SHAPE_PUBLISHED_MIX MIX_IQ4_XS

int shape_count(void);
const struct shape *shape_at(int i); /* 0 <= i < shape_count() */

/* By name or alias, any case. NULL: unknown. */
const struct shape *shape_find(const char *name);

/* "NAME:MIX", e.g. "qwen3.8-27b:q4_k_m"; without ":MIX" it is Q4_K_M, of an announced shape "q4". ERR_ARG names the known shapes or mixes. */
int shape_parse(const struct shape **shape, enum mix *mix, const char *text);

struct shape_tensor {
    char name[64];
    int n_dims;
    int64_t dims[4]; /* dims[0] varies fastest */
    int type;        /* enum quant_type */
    size_t bytes;
};

/* Calls fn for every tensor: globals, then blocks in order, sorted by name within each. fn returns 0 to go on; any other
 * value ends the walk and is returned. n_layer: layers of the main model to include, 0 for all (for shortened files). */
typedef int (*shape_tensor_fn)(void *ctx, const struct shape_tensor *t);
int shape_tensors(const struct shape *s, enum mix mix, bool pure, int n_layer, shape_tensor_fn fn, void *ctx);

/* Sums over all tensors. */
struct shape_totals {
    uint64_t params, bytes;
    int n_tensors;
};
void shape_totals(struct shape_totals *out, const struct shape *s, enum mix mix);

/* Attention layers among the first n_layer, MTP blocks not counted. */
int shape_n_attn(const struct shape *s);

#endif
