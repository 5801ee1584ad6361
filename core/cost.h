/* cost.h: an ops table that computes nothing and counts what a back end would move and do. A dry run of the decoder on it
 * is the planner's only source of bytes and flops, so the estimate cannot drift from the code. */
#ifndef LH_CORE_COST_H
#define LH_CORE_COST_H

#include "core/ops.h"

struct cost {
    struct ops ops;      /* first: given to a decoder as its ops */
    /* Totals since cost_reset; the caller takes differences to attribute them to units. */
    double weight_bytes; /* weights read, once per call: strip bytes; of experts only the chosen ones of one token
                            times min(n_tok, n_expert / n_used) */
    double kv_read_bytes, kv_write_bytes;
    double state_bytes;  /* recurrent state read and written, once each per call */
    double act_bytes;    /* activations read and written */
    double matmul_flops; /* 2 per weight and token */
    double attn_flops;   /* 4 per (query head, dim, visible position) */
    double delta_flops;  /* of the delta rule token by token: 8 per element of S and token */
    long calls;
};

void cost_open(struct cost *c);
void cost_reset(struct cost *c);

#endif
