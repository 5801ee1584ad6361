/* claim.h: takes a claim about speed and context apart: arithmetic on what a GPU can do and what a model must read, no
 * measurement and no device. Verdicts are about one sequence, one token per pass, exact attention, unless the claim says
 * otherwise: what would change them is in the open questions. Every ceiling is an upper bound for any engine, so a figure
 * is called impossible only when no engine can reach it. Pure functions, thread-safe.
 *
 *   KV(n)      = sum over attention layers of n_kv * (dim of k * bytes of k + dim of v * bytes of v) * n
 *                (layers with a sliding window: min(n, window) positions)
 *   read(n)    = weights read per token + KV(n) + 2 * state
 *                (the token embedding is not read unless it is also the output matrix; of experts only the used ones)
 *   outside(n) = weights read + KV(n) + state - VRAM: what must at least lie in host memory
 *   decode(n) <= min(VRAM bandwidth / (read - outside), DRAM bandwidth / outside): the link, too, reads DRAM
 *   prefill(p) <= peak / (2 * parameters + attention flops per position * p / 2), averaged over a prompt of p tokens */
#ifndef LH_OFFLOAD_CLAIM_H
#define LH_OFFLOAD_CLAIM_H

#include "core/mix.h"
#include "core/model.h"
#include "core/shape.h"
#include "offload/machine.h"

#include <stdbool.h>
#include <stdint.h>

/* What a model must hold and read in plain decoding: blocks that predict further tokens are left out. */
struct claim_model {
    char name[128];
    double params;          /* all */
    double active_params;   /* of a token: all, but of experts only the used ones */
    double lazy_params;     /* of those: looked up, or needed for the last position of a prompt only (embedding, output) */
    double weight_bytes;    /* all */
    double read_bytes;      /* weights read for one decoded token */
    double embed_bytes;     /* token embedding that may lie in host memory at no cost; 0: it is also the output matrix */
    double state_bytes;     /* recurrent state of one sequence */
    int n_layer, n_attn;
    int n_head, n_kv, head_dim_k, head_dim_v; /* of its attention layers (of the first, where they differ) */
    /* Sums over attention layers. Values stored per token; flops per token and position that it sees. */
    double k_values, v_values, attn_flops;
    double window_k_values, window_v_values, window_attn_flops; /* layers with a sliding window, not in the above */
    int64_t window;
    int64_t n_ctx_train;    /* 0: unknown */
};

void claim_model_of_shape(struct claim_model *out, const struct shape *s, enum mix mix);
void claim_model_of_file(struct claim_model *out, const struct model *m);

/* "NAME:MIX" of core/shape.h, or by hand:
 * "custom:layers=40,heads=40,kv_heads=4,head_dim=128,width=5120,params=27e9,weight_bytes=14.5e9"; the names before it are
 * required, optional are attn_layers (layers), embed_bytes (0) and state_bytes (0). ERR_ARG: unknown, missing or twice
 * given names, numbers out of range, shapes that cannot be (more KV heads than heads). */
int claim_model_parse(struct claim_model *out, const char *text);

/* What a claim is held against. 0: not known; a figure that needs it is refused. */
struct claim_rates {
    char name[MACHINE_NAME];      /* of the GPU or machine, or "rates by hand" */
    double vram_bytes;            /* as the driver reports */
    double vram_most_bytes;       /* upper bound: what the box says; >= vram_bytes */
    double runtime_bytes, vram_gbps, peak_tflops;
    double link_gbps, dram_gbps;
    double host_bytes;            /* all nodes; 0: not known, no limit is applied */
    enum machine_origin gpu, link, host; /* where the rates come from */
};

void claim_rates_of(struct claim_rates *out, const struct machine *m);

/* What is claimed. 0 (depth: -1): nothing is said about it. */
struct claim {
    int64_t ctx;
    double decode_ts;
    int64_t depth;                /* at which decode_ts was taken */
    double prefill_ts;
    int64_t prompt;               /* over which prefill_ts was averaged */
    int64_t attended;             /* tokens that a sparse method reads of the context */
    bool all_vram;
    int type_k, type_v;           /* enum quant_type of the KV */
};

enum claim_verdict { CLAIM_POSSIBLE, CLAIM_ONLY_IF, CLAIM_IMPOSSIBLE };

/* Decode at one depth. All of it upper bounds in tokens/s, 0: the rate is not known. */
struct claim_decode {
    int64_t depth;
    double kv_bytes, read_bytes, outside_bytes;
    double vram_ts;               /* by what is read from VRAM */
    double dram_ts, link_ts;      /* by what lies outside it; 0 when nothing does */
    double kept_bytes;            /* outside_bytes, with room kept for runtime, scratch and headroom */
    double kept_dram_ts, kept_link_ts;
    double ceiling_ts;
};

struct claim_figure {
    const char *figure;           /* memory, context, decode, prefill, attended, together; beside decode and prefill at a depth
                                     decode_depth_0 and prefill_short */
    double claimed, ceiling;      /* ceiling: the most that is possible */
    const char *unit;             /* bytes, tokens, tokens/s */
    int64_t tokens;               /* depth or prompt length that it is about, -1: none */
    enum claim_verdict verdict;
    enum machine_origin origin;   /* of the rate that sets the ceiling */
    char why[560];
};

enum { CLAIM_MAX_FIGURE = 8, CLAIM_MAX_QUESTION = 12 };

struct claim_report {
    struct claim_figure figures[CLAIM_MAX_FIGURE];
    int n_figure;
    const char *questions[CLAIM_MAX_QUESTION];
    int n_question;
    int64_t n_tok;                /* the KV of so many tokens is in the memory below */
    double kv_bytes_per_tok;      /* of the next token; windows that are full no longer grow */
    double weight_bytes, kv_bytes, state_bytes, scratch_bytes, runtime_bytes, headroom_bytes;
    int64_t ctx_in_vram;          /* most tokens whose KV fits beside weights, state, scratch and runtime */
    struct claim_decode at_0, at_depth; /* at_depth: the claimed depth, or else the claimed context; depth 0 without both */
};

/* ERR_ARG: nothing is claimed, or a rate that the claim needs is not known (names the options that give it). */
int claim_examine(struct claim_report *out, const struct claim *c, const struct claim_model *m, const struct claim_rates *r);

/* The terms of the figures, for tests and plots. */
double claim_kv_bytes(const struct claim_model *m, const struct claim *c, int64_t n_tok);
struct claim_decode claim_decode_at(const struct claim *c, const struct claim_model *m, const struct claim_rates *r, int64_t depth);
double claim_prefill_ts(const struct claim_model *m, const struct claim_rates *r, int64_t prompt);

const char *claim_verdict_name(enum claim_verdict v); /* "possible", "only-if", "impossible" */

#endif
