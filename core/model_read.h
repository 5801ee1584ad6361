/* model_read.h: the two halves of model_open. core/model.c reads metadata, core/model_tensors.c the tensor records. */
#ifndef LH_CORE_MODEL_READ_H
#define LH_CORE_MODEL_READ_H

#include "core/arch.h"
#include "core/gguf.h"
#include "core/model.h"

/* What the metadata says beyond struct model. */
struct model_read {
    const struct gguf *g;
    const struct arch *arch;
    struct model *m;
    int64_t n_tokens; /* of the vocabulary in the file; 0: it has none */
};

/* Finds every tensor of the model, checks type and exact shape, and sums parameters and bytes. Needs all else of *m. */
int model_read_tensors(const struct model_read *r);

/* Sets n_params and file_bytes. */
void model_count(struct model *m);

#endif
