/* engine.h: the public C API. An engine is an opened model with its tokenizer and, once loaded, its weights; a session is
 * one timeline of tokens on it.
 *
 * Opening reads the directory of the file only; engine_load reads the weights. A session owns its KV, scratch and
 * threads; everything is allocated by session_open, nothing afterwards. An engine may be shared by sessions; a session
 * belongs to one driver thread. Functions return 0 or a negative enum err (core/err.h) with a sentence in err_text(). */
#ifndef LH_OFFLOAD_ENGINE_H
#define LH_OFFLOAD_ENGINE_H

#include "core/err.h"
#include "core/model.h"
#include "core/rope.h"
#include "core/tokenizer.h"
#include "offload/home.h"
#include "offload/plan.h"
#include "offload/topo.h"

#include <signal.h>

struct engine;
struct session;
struct run_stats;

/* Opens model file `path` (shard 0 of a split one). rope: ?user's RoPE options, applied to the model. */
int engine_open(struct engine **out, const char *path, const struct rope_user *rope);
/* A built-in shape instead of a file, "NAME:MIX" (core/shape.h): weights are random, made when they are loaded, and there is
 * no tokenizer. For plans and speeds. */
int engine_open_shape(struct engine **out, const char *shape, const struct rope_user *rope);
void engine_close(struct engine *e);

const struct gguf *engine_gguf(const struct engine *e);
const struct model *engine_model(const struct engine *e);
const struct topo *engine_topo(const struct engine *e);

/* Loads the blocks for multi-token prediction too: before plan_make and engine_load. ERR_UNSUPPORTED: the model has none. */
int engine_use_mtp(struct engine *e);

/* The card for plans with a GPU: before engine_load; 0 by itself. engine_load fails with ERR_DEVICE when it cannot be used. */
void engine_use_gpu(struct engine *e, int index);

/* The tokenizer, made at the first call: a bench needs none. Owned by the engine. */
int engine_tokenizer(struct engine *e, const struct tokenizer **out);

/* Reads the weights with p->n_thread threads to where the plan has them: without a GPU all into host memory, for sessions of
 * any plan without a GPU; with one into VRAM and host memory, for sessions of this plan, one at a time. progress and stop as in
 * home.h. Once per engine. ERR_BUDGET: the arena of the plan, or host memory, cannot be had; nothing is left behind, and the
 * caller may plan again with less. ERR_DEVICE. */
int engine_load(struct engine *e, const struct plan *p, progress_fn progress, void *arg, const volatile sig_atomic_t *stop);
/* Of the host's weights that copies read: bytes that could not be page-locked. They go through a small locked buffer, slower. */
size_t engine_pageable_bytes(const struct engine *e);
double engine_load_s(const struct engine *e); /* seconds that it took */
/* ERR_NUMERIC: these kernels do not compute what the generic ones do on the weights in host memory. After engine_load. */
int engine_check_kernels(const struct engine *e, enum isa isa);

/* Which positions get logits. */
enum session_logits { LOGITS_NONE, LOGITS_LAST, LOGITS_ALL };

/* What session_eval calls back; every field may be NULL. On the driver thread. */
struct session_hooks {
    /* Logits [n_vocab] of position pos, in order (LOGITS_ALL, or the last one). A negative result ends the evaluation. */
    int (*logits)(void *arg, int64_t pos, const float *logits);
    void (*progress)(void *arg, int done, int total); /* tokens of this call */
    void *arg;
    const volatile sig_atomic_t *stop; /* non-zero: ERR_INTERRUPTED at the next layer; the pass under way is taken back. (A
                                          pass of one token of a model with recurrent state is finished first.) */
};

/* The weights must be loaded. ERR_NOMEM, ERR_BUDGET: leaves nothing behind. ERR_ARG: they were loaded for another plan. */
int session_open(struct session **out, struct engine *e, const struct plan *p);
void session_close(struct session *s);

/* Evaluates n tokens at positions session_pos.. in passes of at most chunk_tokens; with a GPU of the plan's pass_tokens, those of
 * prefill where n is more than a pass of decode takes.
 * ERR_ARG: more than n_ctx positions, an id outside of the vocabulary. ERR_NUMERIC: not finite (names layer, position).
 * On failure the tokens of completed passes stay (a recurrent state may have to be truncated: session_nearest). */
int session_eval(struct session *s, const int32_t *ids, int n, enum session_logits want, const struct session_hooks *hooks);

/* Logits [n_vocab] of the last position evaluated with LOGITS_LAST or LOGITS_ALL. */
const float *session_logits(const struct session *s);

/* Drafts with the model's own block for multi-token prediction, which engine_use_mtp has loaded and every evaluation keeps up to
 * date. id: the token at session_pos, chosen but not evaluated. out [n]: the tokens after it, each the most likely one given those
 * before. hooks: ?logits is called with the block's [n_vocab] for each and its position. Nothing of the session changes; what the
 * drafts are worth is for session_eval to say.
 * ERR_ARG: no block is loaded, nothing has been evaluated, more than n_ctx positions. ERR_UNSUPPORTED: the plan has a GPU. */
int session_draft(struct session *s, int32_t *out, int32_t id, int n, const struct session_hooks *hooks);

int64_t session_pos(const struct session *s);
/* Forgets everything from position pos on. 0 and the present position always work. ERR_ARG: pos is not within the text so
 * far, a sliding window has moved on, or the model has a recurrent state (Gated DeltaNet), which goes back only to where it
 * was saved: the last session_mark, without one the start of the last pass of more than one token. */
int session_truncate(struct session *s, int64_t pos);
/* The largest position up to pos that session_truncate takes. */
int64_t session_nearest(const struct session *s, int64_t pos);
/* Saves the recurrent state, so that session_truncate comes back to the present position, bit for bit; until it goes back
 * behind it. Without a recurrent state this does nothing. */
int session_mark(struct session *s);
/* Fills positions 0..n-1 with plausible random KV instead of a prefill. What follows is a speed, never an answer. */
int session_fill_synthetic(struct session *s, int64_t n, uint64_t seed);
/* What passes have moved since the session was opened (offload/session.h). */
void session_stats(const struct session *s, struct run_stats *stats);
/* Lets the worker threads sleep until the next call. */
void session_rest(struct session *s);

#endif
