/* unit.h: a model cut into units, the smallest things that are placed or moved, with the exact bytes that each takes in
 * its home: matrices in strips (core/strip.h), vectors as f32 padded to 64 bytes. A tensor belongs to one unit. */
#ifndef LH_CORE_UNIT_H
#define LH_CORE_UNIT_H

#include "core/gguf.h"
#include "core/model.h"

enum { UNIT_ALIGN = 64 };

enum unit_kind {
    UNIT_EMBED,  /* token embedding, RoPE divisors; also the head's matrix when it is tied */
    UNIT_ATTN,   /* norms, projections and biases of one layer's attention or Gated DeltaNet */
    UNIT_FFN,    /* norms and dense FFN of one layer, or its router and shared expert where there are experts */
    UNIT_EXPERT, /* gate, up and down of one expert of one layer */
    UNIT_HEAD,   /* final norm, output matrix and bias */
};

struct unit_tensor {
    struct tensor t; /* of an expert: its own matrix, stack 1 */
    bool vector;
    size_t offset, bytes; /* in the unit's home; multiples of UNIT_ALIGN */
};

struct unit {
    enum unit_kind kind;
    int il, expert;              /* -1 where it has none */
    int n_tensor;
    struct unit_tensor *tensors; /* [n_tensor], in the same block of memory as the units */
    size_t home_bytes;           /* sum of the tensors' bytes */
    size_t file_bytes;           /* what is read to fill it */
    bool tied;                   /* UNIT_HEAD: the matrix is that of UNIT_EMBED and not counted here */
};

/* Units in the order in which a pass needs them: embed, then attn, ffn, experts of each layer, then head. Each tensor of
 * the model occurs once, so the home bytes are exactly what all weights take in one place. *units is released
 * with one free(). ERR_NOMEM. ERR_UNSUPPORTED: a matrix that the strip layout cannot hold. */
int model_units(struct unit **units, int *n, const struct model *m);

const char *unit_kind_name(enum unit_kind k); /* "embed", "attn", "ffn", "expert", "head" */

/* Home bytes of a tensor alone: all matrices of its stack, or the padded vector. 0: absent. SIZE_MAX: it cannot be held. */
size_t tensor_home_bytes(const struct tensor *t, bool vector);

/* Does the model read (a part of) this tensor of its file? The others are ignored by model_open. */
bool model_uses(const struct model *m, const struct gguf_tensor *t);

#endif
