/* run_impl.h: inside of a run, for run.c (the pass) and run_open.c (memory and phases). */
#ifndef LH_OFFLOAD_RUN_IMPL_H
#define LH_OFFLOAD_RUN_IMPL_H

#include "core/decoder.h"
#include "core/state.h"
#include "cpu/cpu.h"
#include "gpu/gpu.h"
#include "offload/kv_store.h"
#include "offload/pipe.h"
#include "offload/run.h"

/* A back end and what it works on, in its own memory. */
struct side {
    struct ops *ops;
    struct decoder *d;
    const struct weights *w;
    struct kv *kv;                /* with a GPU those of the store */
    struct state *state, *saved;  /* ?of the layers that have them here */
    void *scratch;                /* of the decoder */
    float *x;                     /* [pass, dim] */
    float *logits;                /* [logits_rows, n_vocab] */
};

/* Loads of the pipe that a unit takes, in order. */
struct unit_loads {
    int first, n;
};

struct run {
    struct run_opts o;
    struct plan plan;
    const struct model *m;
    const struct parts *parts;
    struct cpu *cpu_end;
    int *cores;
    int cpu_chunk, cpu_pass;      /* most tokens of the CPU's decoder */
    struct side cpu, gpu;         /* gpu is empty without one */
    bool has_gpu, one_phase;
    int phase;                    /* enum plan_phase_id, -1: none is set up */
    bool x_on_gpu;                /* where the hidden states are */
    float *gpu_sum;               /* host [cpu_chunk, dim]: what the GPU adds to an FFN of the CPU */
    const float *last;            /* logits */

    /* With a GPU. */
    struct kv_store *store;
    struct weights w;             /* gpu.w; layers owned */
    struct gpu_stream *stream;    /* of all kernels and hand-overs */
    struct gpu_event *handed;     /* a copy to the host that the CPU waits for */
    struct gpu_ops *ops;
    size_t mark_open, mark;       /* of the arena: at open; after what both phases keep */
    struct pipe *pipe;            /* ? */
    struct pipe_load *loads;
    struct pipe_piece *pieces;
    int n_load;
    struct unit_loads *mixer, *ffn; /* [n_layer] */
    struct unit_loads head;
    int *load_of;                 /* [parts.n], -1: not streamed in this phase */
    size_t *in_load;              /* [parts.n] offset */
    const void **load_at;         /* [n_load] address of those that are held */
    int got;                      /* loads taken in this pass */
    long switches;
    double streamed, pageable;    /* of pipes that are closed */
};

/* run_open.c */
int run_chunk(const struct run *r);           /* most tokens of a call of a part now */
enum plan_place run_place(const struct run *r, const struct part *p);
/* Does the block for multi-token prediction follow the text? */
static inline bool run_follows(const struct run *r) { return r->m->n_block > r->m->n_layer && !r->has_gpu; }

#endif
