/* decoder.h: the one forward pass, in straight lines over an ops table. It knows no device and no placement.
 *
 * A decoder binds a model, a back end's ops, the addresses of the weights, a KV and scratch memory. The run loop calls
 * decoder_embed, then for each layer decoder_mixer and decoder_ffn, then decoder_head; x is the residual stream.
 * Parts take any run of tokens of the pass (chunks), in order. Formulas: RMSNorm, RoPE, GQA attention and SwiGLU as in
 * the model papers; each line names its tensors. Not thread-safe: one driver thread. Nothing is allocated after open. */
#ifndef LH_CORE_DECODER_H
#define LH_CORE_DECODER_H

#include "core/model.h"
#include "core/ops.h"

struct kv;
struct state;

/* Addresses of the weights for one back end. Vectors are f32, matrices are in strips. NULL: absent (all of them in a
 * dry run with the cost table). */
struct layer_weights {
    const void *at[LT_COUNT];
};
struct weights {
    const void *embd, *out; /* out == embd when tied */
    const float *out_norm, *out_bias;
    struct layer_weights *layers; /* [n_block] */
};

struct decoder {
    const struct model *model;
    struct ops *ops;
    const struct weights *w;
    struct kv *kv;
    struct state *state;  /* ?of the Gated DeltaNet layers */
    int chunk;            /* most tokens of one call of a part */
    int pass;             /* most tokens between decoder_begin and the head */
    int64_t pos0;         /* of the pass under way */
    double *inv_freq[2];  /* host [n_rot/2], owned */
    float mscale[2];
    /* Scratch, in the memory of the ops. */
    float *cs[2];         /* [pass, n_rot/2, 2] */
    float *h;             /* [chunk, dim] normed input of a part */
    float *q, *k, *v, *o; /* [chunk, heads * head_dim]; in Gated DeltaNet layers q is u and o is y of struct delta_args */
    float *z;             /* [chunk, heads * head_dim] gates of the mixer's output */
    float *alpha, *beta;  /* [chunk, n_value] */
    float *d;             /* [chunk, dim] what a part adds to x */
    float *gate, *up;     /* [chunk, n_ff] */
    float *router;        /* [chunk, n_expert] */
    float *expert_w;      /* [chunk, n_used] */
    int32_t *expert_ids;  /* [chunk, n_used] */
    float *shared_gate;   /* [chunk] */
    float *part;          /* [chunk, dim] a further summand of an FFN; lies where q does, which is free by then */
    float *pair, *joined; /* [2 * chunk, dim] and [chunk, 2 * dim]: embeddings and hidden states of decoder_mtp */
    int32_t *join;        /* host [2 * chunk] order of the rows of `joined` in `pair`, owned */
    /* Of decoder_follow: normed states of positions states_pos + row, rows states_first .. n_states; behind them, at chunk + 1 and
     * chunk + 2, that of position kept_pos (-1: none) and the last draft's. */
    float *states;        /* [chunk + 3, dim] */
    float *draft;         /* [n_vocab] logits */
    int64_t states_pos, kept_pos;
    int states_first, n_states;
};

/* Bytes of scratch for chunks of `chunk` and passes of `pass` tokens. SIZE_MAX on overflow. */
size_t decoder_scratch_bytes(const struct model *m, int chunk, int pass);

/* Largest sizes that this model will ask of a back end. */
void decoder_limits(struct ops_limits *out, const struct model *m, int chunk, int64_t n_ctx);

/* scratch: decoder_scratch_bytes of memory of the back end, 64-byte aligned (NULL in dry runs); stays the caller's.
 * state: that of the sequence whose KV is `kv`; NULL for models without (core/state.h) and in dry runs.
 * n_ctx is the configured context (longrope picks its factors by it). rope_freqs: ?host f32 divisors [n_rot/2]. */
int decoder_open(struct decoder **out, const struct model *m, struct ops *ops, const struct weights *w, struct kv *kv,
                 struct state *state, int chunk, int pass, int64_t n_ctx, const float *rope_freqs, void *scratch);
void decoder_close(struct decoder *d);

/* Starts a pass of n_tok tokens at positions pos0..: fills the rotation tables. */
int decoder_begin(struct decoder *d, int64_t pos0, int n_tok);

/* x [n, dim] = embeddings of ids (host) for n <= pass tokens. */
int decoder_embed(struct decoder *d, float *x, const int32_t *ids, int n);

/* x [n, dim] += part(x) for n <= chunk tokens, the first of which is token t0 of the pass. */
int decoder_mixer(struct decoder *d, int il, float *x, int t0, int n);
int decoder_ffn(struct decoder *d, int il, float *x, int t0, int n);

/* decoder_ffn in steps, for FFNs whose weights are in several places: what the parts give is added up in d->d.
 * A part is a run of inner rows of a dense FFN (rows of gate and up, columns of down), or a run of experts. */
struct ffn_part {
    int64_t row0, rows;           /* dense */
    int expert0, n_expert;        /* experts */
    const void *gate, *up, *down; /* their matrices, or stacks, alone */
};
int decoder_ffn_in(struct decoder *d, int il, const float *x, int n); /* d->h = RMSNorm(x), and which experts are chosen */
int decoder_ffn_part(struct decoder *d, int il, float *y, const struct ffn_part *p, int n); /* y [n, dim] = its summand */
int decoder_ffn_out(struct decoder *d, int il, float *x, int n); /* x += RMSNorm?(d->d) + the expert that all tokens use */

/* h [n, dim] = RMSNorm(x; output_norm): the hidden states that decoder_head multiplies, and what decoder_mtp starts from. */
int decoder_norm(struct decoder *d, float *h, const float *x, int n);
/* logits [n, n_vocab] of n <= chunk rows of x. */
int decoder_head(struct decoder *d, float *logits, const float *x, int n);

/* Multi-token prediction, for models with it (model_use_mtp): block `i` of n_mtp for n <= chunk tokens of a pass that
 * decoder_begin has started. Row t holds h[t] [dim], the normed state of position p = pos0 + t0 + t (decoder_norm, or an
 * earlier h_out) and ids[t], the token at p + 1; its KV goes to position p of the block's own layer, after those of all
 * positions before. Gives h_out [n, dim], the normed state, and logits [n, n_vocab] of the token at p + 2; h_out may be h.
 * (Positions enter by their differences only, so the block may count from p or p + 1 alike.) */
int decoder_mtp(struct decoder *d, int i, float *logits, float *h_out, const float *h, const int32_t *ids, int t0, int n);

/* The same along a text, with block 0. After the layers of a pass, x [n, dim] its residual stream, n <= chunk: enters its
 * positions into the block's KV, but for the last, whose next token is not known, and keeps their normed states.
 * (The head may follow; the tables of decoder_begin are overwritten.) */
int decoder_follow(struct decoder *d, const float *x, const int32_t *ids, int64_t pos0, int n);
/* Keeps the normed state of position pos - 1 for a text that comes back to pos: it outlives the next passes. */
int decoder_keep(struct decoder *d, int64_t pos);
void decoder_forget(struct decoder *d); /* no state is known any more */
/* d->draft = logits of the token at pos + k + 1, where pos tokens have been followed. k = 0: id is the token at pos; then, for
 * k = 1, 2, ...: the one chosen from the logits of k - 1. Writes the block's KV of position pos - 1 + k, which the text will
 * overwrite. ERR_ARG: the state of position pos - 1 is not known. */
int decoder_draft(struct decoder *d, int32_t id, int64_t pos, int k);

#endif
