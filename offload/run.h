/* run.h: executes passes of one sequence as a plan says: the one pass loop. It owns what a sequence needs besides the weights:
 * KV, recurrent state, hidden states, scratch, a decoder per back end, the pipe. Of positions it knows what lies in the KV;
 * what may be evaluated when, and going back, is the session's business (engine.c).
 *
 * A pass takes its tokens through all layers, unit by unit; a unit takes them in chunks, so that weights which are streamed
 * cross the link once per pass. Each unit runs where its weights are, or on the GPU when they are streamed; the hidden states
 * follow it. Two phases share the VRAM arena: between them weights, KV and state change places (run_enter).
 * Not thread-safe: one driver thread. Functions return 0 or a negative enum err. */
#ifndef LH_OFFLOAD_RUN_H
#define LH_OFFLOAD_RUN_H

#include "core/kv.h"
#include "offload/home.h"
#include "offload/plan.h"
#include "offload/topo.h"

#include <signal.h>

struct run;

/* All borrowed; plan is copied. gpu and arena: ?of the home, when the plan has a GPU. rope_freqs: ?[n_rot/2]. */
struct run_opts {
    const struct model *model;
    const struct plan *plan;
    struct home *home;
    struct gpu *gpu;
    struct gpu_arena *arena;
    const struct topo *topo;
    const float *rope_freqs;
};

/* ERR_NOMEM, ERR_BUDGET (the arena has less than the plan says, or is in use), ERR_ARG, ERR_UNSUPPORTED (a placement that is
 * not carried out): leaves nothing behind. */
int run_open(struct run **out, const struct run_opts *o);
void run_close(struct run *r);

/* Bytes that a phase takes of the arena, weights included: what home and run carve. SIZE_MAX: overflow. */
int run_vram_bytes(size_t *bytes, const struct model *m, const struct plan *p, enum plan_phase_id phase);

/* Positions that are filled. The caller advances and truncates; run_pass does not. */
struct kv *run_kv(struct run *r);

/* The phase that passes run in from now on. Waits for the device and copies what changes places. Without a GPU, or when both
 * phases place everything alike, there is nothing to do. ERR_DEVICE: what the phase before had in VRAM is lost. */
int run_enter(struct run *r, enum plan_phase_id phase);
enum plan_phase_id run_phase(const struct run *r, int n); /* suits a call of n tokens */
int run_pass_tokens(const struct run *r);                 /* most tokens of a pass now */

/* What a pass wants besides its tokens. */
struct run_want {
    bool head;                          /* run_head will follow */
    const volatile sig_atomic_t *stop;  /* ?non-zero: ERR_INTERRUPTED at the next layer */
    bool whole;                         /* only before the first one */
};

/* The layers for n <= run_pass_tokens tokens at positions run_kv()->n... The hidden states of the last are finite, or
 * ERR_NUMERIC. When it fails the recurrent state is of no position; KV of earlier positions is as before unless a window's
 * ring was overwritten (run_spoils). */
int run_pass(struct run *r, const int32_t *ids, int n, const struct run_want *want);

/* Logits of tokens first .. n of the last pass, whose first position is pos0, given out one after the other; the last one's
 * stay at run_logits. A negative result of emit ends it. ERR_NUMERIC: not finite. */
typedef int (*run_emit)(void *arg, int64_t pos, const float *logits);
int run_head(struct run *r, int first, int n, int64_t pos0, run_emit emit, void *arg);
const float *run_logits(const struct run *r); /* [n_vocab] */

/* Multi-token prediction (decoder_draft), where its block is loaded: logits [n_vocab] of the token at run_kv()->n + k + 1, valid
 * until the next call. ERR_UNSUPPORTED: with a GPU. */
int run_draft(struct run *r, const float **logits, int32_t id, int k);

/* Would a failed pass of n tokens overwrite positions before it? (The ring of a window holds one chunk more than the window.) */
bool run_spoils(const struct run *r, int n);

/* Recurrent state. */
bool run_has_state(const struct run *r);
enum run_state { RUN_SAVE, RUN_RESTORE, RUN_RESET };
int run_state(struct run *r, enum run_state what);

/* Fills n positions of KV and the recurrent state with plausible random values, and sets run_kv()->n. */
int run_fill_synthetic(struct run *r, int64_t n, uint64_t seed);

void run_rest(struct run *r); /* worker threads sleep until the next pass */

struct run_stats; /* session.h */
void run_stats_get(const struct run *r, struct run_stats *s);

#endif
