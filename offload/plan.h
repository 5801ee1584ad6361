/* plan.h: where everything goes and how many bytes it takes. Placement is data: plan_make is a pure function, the loader
 * and the session allocate exactly what it says, and `longhaul plan` prints it. This first form has one place, the host. */
#ifndef LH_OFFLOAD_PLAN_H
#define LH_OFFLOAD_PLAN_H

#include "core/model.h"
#include "cpu/isa.h"

#include <stddef.h>
#include <stdint.h>

/* What is asked for. Zero means: choose. */
struct plan_request {
    int64_t n_ctx;        /* positions; > 0 */
    int type_k, type_v;   /* enum quant_type of the KV */
    int chunk_tokens;     /* most tokens of one pass */
    int logits_rows;      /* rows of logits kept at a time, >= 1 */
    int n_thread;
    enum isa isa;
    size_t host_limit;    /* bytes that may be used in all; SIZE_MAX: unlimited */
};

struct plan {
    int64_t n_ctx;
    int type_k, type_v;
    int chunk_tokens, logits_rows, n_thread;
    enum isa isa;
    /* Host bytes, exact: what is allocated. */
    size_t weights_bytes;
    size_t kv_bytes;      /* for n_ctx positions of every layer */
    size_t state_bytes;   /* recurrent state of Gated DeltaNet layers, 0: none */
    size_t saved_bytes;   /* its copy, to go back to */
    size_t scratch_bytes; /* activations, logits, back end scratch */
    size_t load_bytes;    /* read buffers, only while loading */
    size_t runtime_bytes; /* program, tokenizer, thread stacks: an allowance */
    size_t host_bytes;    /* most that is in use at once: the sum, read buffers counted instead of KV and scratch if larger */
    size_t host_limit;
    /* Of one decoded token, from a dry run on the cost table. */
    double weight_bytes_per_tok;
    double kv_bytes_per_position; /* read for each position in the context (windows not counted in) */
    double state_bytes_per_tok;   /* recurrent state read; as much is written */
};

/* ERR_BUDGET: does not fit; *out is filled and the sentence has need, limit, shortfall and what would fit.
 * ERR_ARG: an impossible request. ERR_UNSUPPORTED: a KV type that this model's heads cannot have. */
int plan_make(struct plan *out, const struct model *m, const struct plan_request *r);

/* Largest n_ctx (a multiple of 256, or n_ctx_most itself) that fits r->host_limit, at most n_ctx_most; 0: none does. */
int64_t plan_max_ctx(const struct model *m, const struct plan_request *r, int64_t n_ctx_most);

#endif
