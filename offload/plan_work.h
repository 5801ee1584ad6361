/* plan_work.h: a model as the planner sees it: bytes that are placed, bytes and operations of a token. Sizes come from the
 * units and from the functions that allocate, reads and operations from a dry run of the decoder on the cost table: there
 * is no second estimate. For offload/plan*.c, timeline.c and their tests, which may change the numbers. */
#ifndef LH_OFFLOAD_PLAN_WORK_H
#define LH_OFFLOAD_PLAN_WORK_H

#include "offload/plan.h"

#include <stdbool.h>

/* Something that has a home. */
struct plan_piece {
    size_t bytes;       /* in its home */
    double read, flops; /* of one decoded token */
    double cpu_gbps;    /* measured rate of the CPU for its types; 0: none */
};

struct plan_work_layer {
    struct plan_piece mixer, rest, ff, experts; /* rest: of the FFN unit, see plan.h; experts: all of them */
    int n_ff, n_quanta;     /* inner rows; parts of PLAN_ROWS rows, 1: whole or not at all, 0: no dense FFN */
    size_t quantum_bytes;
    int n_expert, n_used;
    int kv_pages;           /* at n_ctx; 0: no attention */
    size_t page_bytes;
    int64_t window;         /* 0: none */
    double attn_flops;      /* per position that a token sees */
    double attn_cpu_gbps;   /* measured; 0: none */
    bool delta;
    size_t state_bytes;     /* read and written once per token and sequence */
    double delta_flops;
    int calls;              /* operations, of which each is at least one launch */
};

struct plan_work {
    const struct model *m;
    struct plan_request r;     /* with everything that was left open filled in; chunk_tokens: at most */
    bool chunk_fixed;          /* exactly so many */
    struct plan_work_layer *layers; /* [n_layer], owned */
    int n_layer;               /* n_block of the model */
    struct plan_piece embed, head;
    bool tied;                 /* head is the embedding: one home */
    int calls;                 /* embedding and head */
    size_t state_bytes;        /* of all layers */
    double linear_flops;       /* of a token of prefill: products and delta rule, head left out */
    double weight_bytes_per_tok, kv_bytes_per_position, state_bytes_per_tok; /* as in struct plan */
    double file_bytes;
};

int plan_work_open(struct plan_work *out, const struct model *m, const struct plan_request *r);
void plan_work_close(struct plan_work *w);
/* That of a plan which was made with r. ERR_ARG: r has no machine. */
int plan_work_of(struct plan_work *out, const struct plan *p, const struct model *m, const struct plan_request *r);

/* Bytes of the three parts of a layer's dense FFN. */
void plan_ff_bytes(size_t bytes[PLAN_PLACES], const struct plan_work_layer *l, const int32_t rows[PLAN_PLACES]);
/* Bytes of experts by place. */
void plan_expert_bytes(size_t bytes[PLAN_PLACES], const struct plan_work_layer *l, const int16_t n[PLAN_PLACES]);

/* Scratch of a phase: of the GPU (decoder, operations, logits, partial results), and the hidden states of a pass; of the
 * CPU for the parts that it computes in decode, with what is exchanged. SIZE_MAX: overflow. */
size_t plan_gpu_scratch(const struct plan_work *w, int chunk_tokens, int pass_tokens);
size_t plan_gpu_hidden(const struct plan_work *w, int pass_tokens);
size_t plan_host_scratch(const struct plan_work *w, int pass_tokens);

/* VRAM of a phase: weights, KV, state, ring and staging by its placement, and the sum with whatever else *t has. */
void plan_vram_table(struct plan_table *t, const struct plan_work *w, const struct plan_phase *ph);
/* Host memory of both phases together, what of it copies need pinned, and what changes its home between them. */
void plan_host_table(struct plan_table *t, size_t *pinned, const struct plan_work *w, const struct plan_phase *prefill, const struct plan_phase *decode);
size_t plan_rehome_bytes(const struct plan_work *w, const struct plan_phase *prefill, const struct plan_phase *decode);
void plan_table_sum(struct plan_table *t);
/* Ring and staging slots that the placement of ph needs. */
void plan_ring(struct plan_phase *ph, const struct plan_work *w);

/* --- time (plan_time.c) ---------------------------------------------------------------------------------------------------- */

/* What the machine does, for n tokens per decode pass: bytes and operations per second. */
struct plan_rates {
    double vram, matvec, attn;      /* VRAM: peak, reached by products, by attention */
    double link, d2h, dram;         /* H2D; DRAM with copies */
    double slowed_s;                /* how much longer the CPU takes for a byte that is copied while it works */
    double locked, link_pageable;   /* bytes that may be page-locked; the rate of others */
    double cpu, cpu_ops, cpu_attn_flops;
    double handover_s, launch_s, copy_s;
    double gemm, attn_prefill;      /* flops */
    int n_tok;
};
void plan_rates_of(struct plan_rates *out, const struct plan_work *w);
/* Seconds to copy `bytes` of n that are copied in turn, as many of them locked as may be. */
double plan_copy_s(const struct plan_rates *r, double bytes, double n);

/* Seconds on either side. */
double plan_gpu_s(const struct plan_rates *r, const struct plan_piece *p);
double plan_cpu_s(const struct plan_rates *r, const struct plan_piece *p);
double plan_page_gpu_s(const struct plan_rates *r, const struct plan_work_layer *l);
double plan_page_cpu_s(const struct plan_rates *r, const struct plan_work_layer *l);

/* A decode pass at `depth` with the placement of ph. */
void plan_decode_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t depth);
/* Prefill of `prompt` tokens; *bound: of most of it. */
double plan_prefill_s(enum plan_bound *bound, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t prompt,
                      double outside, int samples); /* bytes outside VRAM; at most so many passes are looked at */
/* One of its passes: tokens pos .. pos + n. */
void plan_prefill_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, const struct plan_phase *ph, int64_t pos, int n,
                       double outside);
/* Both phases on a machine without a GPU. */
void plan_cpu_step(struct plan_step *out, const struct plan_work *w, const struct plan_rates *r, int64_t depth);
double plan_cpu_prefill_s(const struct plan_work *w, const struct plan_rates *r, int64_t prompt);

/* --- search (plan_search.c) -------------------------------------------------------------------------------------------------- */

enum plan_effort { PLAN_FITS, PLAN_BEST };
/* Both phases of p, of which the fields that the request gives are set. PLAN_FITS: any that fit. PLAN_TOO_BIG: there are
 * none; no sentence. ERR_ARG as plan_make. */
enum { PLAN_TOO_BIG = 1 };
int plan_search(struct plan *p, const struct plan_work *w, enum plan_effort effort);
/* The phase of prefill and what depends on both, for a phase of decode that is there. false: nothing fits. */
bool plan_prefill(struct plan *p, const struct plan_work *w, const struct plan_rates *r, enum plan_effort effort);

/* Fills why (plan_why.c). */
void plan_explain(struct plan *p, const struct plan_work *w);

/* --- pins (plan_pins.c) -------------------------------------------------------------------------------------------------------- */

enum { PLAN_FREE = PLAN_PLACES };
/* Where the user wants what: PLAN_FREE, or a place. */
struct plan_pins {
    struct plan_pin_layer {
        uint8_t mixer, rest, ff, kv;   /* kv: PLAN_CPU or PLAN_FREE */
        int16_t experts_cpu;           /* so many, the others in VRAM; -1: free */
    } layers[MODEL_MAX_LAYER];
    uint8_t head;
};
int plan_pins_read(struct plan_pins *out, const struct plan_work *w);

#endif
