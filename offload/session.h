/* session.h: how a session is made of memory; shared by the planner, which adds it up, and the engine, which allocates it. */
#ifndef LH_OFFLOAD_SESSION_H
#define LH_OFFLOAD_SESSION_H

#include "core/kv.h"
#include "core/model.h"
#include "cpu/cpu.h"
#include "offload/plan.h"

/* The KV that a plan asks for. *shapes [n_layer] is new and spec points to it: free(). */
int session_kv_spec(struct kv_spec *spec, struct kv_shape **shapes, const struct model *m, const struct plan *p);

/* Options of the CPU back end for a plan (cores left out). */
struct cpu_opts session_cpu_opts(const struct model *m, const struct plan *p);

/* Hidden states, logits, decoder and back end scratch. SIZE_MAX: overflow. */
size_t session_scratch_bytes(const struct model *m, const struct plan *p);

/* What a session has moved since it was opened, and on what terms. */
struct run_stats {
    size_t kv_pageable_bytes; /* of the KV in host memory: could not be page-locked */
    bool flags;               /* GPU and CPU tell each other by flags in memory; false: by events, which takes longer */
    double streamed_bytes;  /* weights that crossed the link */
    double pageable_bytes;  /* of them from memory that is not page-locked */
    long switches;          /* changes of phase */
};

#endif
