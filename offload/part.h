/* part.h: a model cut by a plan into parts, each of which has one place in each phase: a mixer, the norms (router, shared
 * expert) of an FFN, a run of inner rows of a dense FFN, a run of experts, the embedding, the output. Homes are allocated
 * and filled, rings are fed and passes are driven by this list. Plain data after parts_open. */
#ifndef LH_OFFLOAD_PART_H
#define LH_OFFLOAD_PART_H

#include "core/model.h"
#include "offload/plan.h"

enum part_kind { PART_EMBED, PART_MIXER, PART_REST, PART_ROWS, PART_EXPERTS, PART_HEAD };

/* Tensors outside of layers, numbered after enum layer_tensor. */
enum { PT_EMBD = LT_COUNT, PT_OUT_NORM, PT_OUT, PT_OUT_BIAS };

/* What a part holds of a tensor: some rows and columns of each of some matrices of its stack. */
struct part_tensor {
    const struct tensor *t;
    int id;               /* enum layer_tensor, or PT_... */
    bool vector;
    int64_t row0, rows, col0, cols;
    int matrix0, n_matrix;
    size_t offset, bytes; /* in the part's home, multiples of UNIT_ALIGN (core/unit.h); n_matrix equal pieces */
};

struct part {
    enum part_kind kind;
    int il;                      /* -1: outside of layers */
    int64_t row0, rows;          /* PART_ROWS */
    int expert0, n_expert;       /* PART_EXPERTS */
    uint8_t place[PLAN_PHASES];  /* enum plan_place */
    bool on_host;                /* host memory has it: it is not in VRAM in both phases, or rows are looked up there */
    size_t bytes;
    int n_tensor;
    struct part_tensor *tensors;
};

struct part_layer {
    int mixer, rest;             /* numbers of parts */
    int ffn, n_ffn;              /* those of PART_ROWS or PART_EXPERTS that follow each other: VRAM, CPU, streamed in decode; streamed experts in groups */
};

struct parts {
    struct part *v;              /* [n] in the order of a pass */
    int n;
    struct part_layer *layers;   /* [n_block] */
    int embed, head;             /* embed == head: tied, the matrix is PT_OUT */
    uint8_t embed_place[PLAN_PHASES]; /* VRAM: the GPU looks rows up; otherwise the host */
    void *memory;
};

/* p NULL, or without a GPU: everything is the CPU's. m is borrowed. ERR_ARG: the plan is not one of this model, splits where
 * strips cannot be split, or has in prefill what this program does not do (see plan.h). */
int parts_open(struct parts *out, const struct model *m, const struct plan *p);
void parts_close(struct parts *ps);

/* Bytes of part i and of the groups of experts after it that share its places: they lie in VRAM as one. 0: it is such a group. */
size_t part_run(const struct parts *ps, int i);

/* Is it in VRAM whatever the phase? */
static inline bool part_fixed(const struct part *p) { return p->place[PLAN_PREFILL] == PLAN_VRAM && p->place[PLAN_DECODE] == PLAN_VRAM; }

#endif
