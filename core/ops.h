/* ops.h: the operations of a decoder layer, as a table that each back end fills.
 *
 * core/decoder.c is written once against this table; `cpu` computes, `gpu` enqueues, `cost` counts bytes and flops.
 * All activations are f32, row-major, last dimension contiguous, one row per token. Pointers are in the memory of the
 * back end; the cost table never dereferences them. Operations of one table run in the order of the calls. A table
 * belongs to one session and one driver thread. Every function returns 0 or a negative enum err. Sizes that a back end
 * was not opened for (core/ops.h, struct ops_limits) are ERR_ARG.
 *
 * Arithmetic contract (both back ends, so that placement does not change results):
 *   matmul  F32, F16, BF16 weights: weights widened to f32 (exact), x in f32, products summed in f32.
 *           Quantised weights: x is quantised per 32 elements: d = max|x| / 127 (f32), q = round_half_even(x / d) as int8
 *           (d = 0: q = 0); integer products are exact inside a 32- or 16-element scale group, then scaled and summed in
 *           f32. The result of a token does not depend on which other tokens share the call.
 *   attn    scores, softmax and output sums in f32 whatever the KV type; q against quantised K in at least 16 bits.
 *   GPU, calls of PREFILL_MIN_TOK (gpu/sizes.h) tokens or more: x and weights, q, K, V and softmax weights become half (11 bits,
 *           to nearest), with an exact power of two per token, per row of weights, per query row, and per page and head where
 *           a value would leave half's range; products exact, sums and softmax in f32. F32 matmul weights as above. The order
 *           of a token's sums depends on the shapes of the call, not on the other tokens' values.
 *   norms, RoPE, activations, router: f32 (sums of norms may be kept in double).
 *   delta   everything in f32, state included; sums of decay rates may be kept in double. */
#ifndef LH_CORE_OPS_H
#define LH_CORE_OPS_H

#include "core/tensor.h"

#include <stdbool.h>
#include <stdint.h>

struct kv;

/* Gated DeltaNet layers of a model. */
struct delta_shape {
    int n_key, n_value; /* heads of q and k, heads of v; n_key divides n_value */
    int dim;            /* of every head, a multiple of 16, at most DELTA_MAX_DIM */
    int n_conv;         /* taps of the convolution: DELTA_CONV */
    bool tiled;         /* value head j reads key head j % n_key; otherwise j / (n_value / n_key) */
};
enum { DELTA_CONV = 4, DELTA_MAX_DIM = 256 };
static inline int64_t delta_conv_dim(const struct delta_shape *s) { return (2 * (int64_t)s->n_key + s->n_value) * s->dim; }
static inline int delta_key_head(const struct delta_shape *s, int j) {
    return s->tiled ? j % s->n_key : j / (s->n_value / s->n_key);
}

/* Largest sizes that a session will ask for; back ends size their scratch with it at open. */
struct ops_limits {
    int n_tok;         /* tokens per call */
    int64_t cols;      /* input features of any matmul */
    int64_t rows;      /* output features of any matmul, the vocabulary included */
    int n_head, n_kv;  /* query heads, KV heads of any layer */
    int head_dim;      /* largest of K and V */
    int64_t n_ctx;     /* positions */
    int n_expert;      /* experts per layer, 0: none */
    int n_expert_used; /* experts per token */
    struct delta_shape delta; /* n_value 0: none */
};

enum act { ACT_SILU, ACT_GELU, ACT_SIGMOID }; /* x*sigma(x); 0.5x(1+tanh(0.7978845608(x+0.044715x^3))); sigma(x) */
enum rope_pairing { ROPE_NORM, ROPE_NEOX };  /* pair i is (2i, 2i+1) or (i, i + n_rot/2) */

/* Several products of one x: y[i][n_tok, w[i].rows] = x W[i]^T + bias[i]. x is quantised once for all of them. */
enum { MATMUL_MAX = 4 };
struct matmul {
    const float *x; /* [n_tok, cols] */
    int64_t cols;
    int n_tok, n;   /* n <= MATMUL_MAX */
    struct {
        const struct mat *w;
        float *y;          /* [n_tok, w->rows] */
        const float *bias; /* ?[w->rows] */
    } out[MATMUL_MAX];
};

/* Norm and rotation of one group of heads. */
struct rope_args {
    float *x;           /* [n_tok, n_head, head_dim], in place */
    int n_tok, n_head, head_dim;
    const float *norm;  /* ?[head_dim]: RMSNorm of each head first */
    float eps;
    const float *cs;    /* [n_tok, n_rot/2, 2] cos and sin, already times the YaRN magnitude: from rope_table */
    int n_rot;          /* rotated dims at the front of each head, even */
    enum rope_pairing pairing;
};

/* Causal attention of n_tok queries at positions pos0.. over the layer's KV, their own keys included (kv_put first). */
struct attn_args {
    float *o;        /* [n_tok, n_head, head_dim_v] */
    const float *q;  /* [n_tok, n_head, head_dim_k] */
    struct kv *kv;
    int il;          /* layer */
    int64_t pos0;
    int n_tok, n_head;
    float scale;     /* of q.k */
    int64_t window;  /* 0: all; else key allowed iff pos_q - pos_k < window */
};

/* Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024) of the next n_tok tokens of a sequence. For each token in order:
 *   c = silu(sum over i of conv[ch][i] * input[i]) per channel, input = the last n_conv values of u; c is q, k, v by head
 *   q, k: each head divided by max(its length, eps); q also by sqrt(dim)
 *   and for value head j, with q and k of its key head:
 *   beta = sigma(b_j), decay = e^(rate_j * softplus(a_j + dt_j)), softplus(y) = y > 20 ? y : ln(1 + e^y)
 *   S = decay S;  e = beta (v - S^T k);  S += k e^T;  o = S^T q
 *   y_j = RMSNorm(o; norm, eps) * silu(z_j)
 * Tokens may be taken one at a time or in chunks: with G_i the sums of ln decay inside a chunk that starts with S,
 *   A_ij = beta_i (k_i . k_j) e^(G_i - G_j) for j < i;  (I + A) D = R, R_i = beta_i (v_i - e^(G_i) S^T k_i)
 *   o_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) D_j;  S' = e^(G_C) S + sum of e^(G_C - G_j) k_j D_j^T. */
struct delta_args {
    float *y;               /* [n_tok, n_value, dim] */
    float *u;               /* [n_tok, conv_dim]: heads of q, of k, of v before the convolution; overwritten */
    const float *z;         /* [n_tok, n_value, dim] */
    const float *b, *a;     /* [n_tok, n_value] */
    const float *conv;      /* [conv_dim, n_conv], the last tap is that of the present input */
    const float *dt, *rate; /* [n_value]; rate <= 0 */
    const float *norm;      /* [dim] */
    float *last;            /* [n_conv - 1, conv_dim] u of the tokens before, oldest first; updated */
    float *s;               /* [n_value, dim of v, dim of k]: S^T of each value head; updated */
    struct delta_shape shape;
    int n_tok;
    float eps;
};

/* Expert FFN of n_tok tokens: y = sum over chosen experts of weight * down(act(gate x) * up x); of those that the stacks hold,
 * n_held from number `first` on, where they hold only some: others add nothing. */
struct experts_args {
    float *y;            /* [n_tok, dim], overwritten */
    const float *x;      /* [n_tok, dim] */
    const int32_t *ids;  /* [n_tok, n_used] */
    const float *weight; /* [n_tok, n_used] */
    int n_tok, n_used, n_expert;
    int first, n_held; /* n_held 0: all n_expert, first is 0 */
    /* Expert e of a stack is the mat with data = stack.data + (e - first) * strip_bytes(type, rows, cols). */
    struct mat gate, up, down;
    enum act act;
};

struct ops {
    const char *name; /* "cpu", "gpu", "cost" */

    /* x[n_tok, dim] = scale * rows `ids` of embd (host array [n_tok], each < embd->rows). */
    int (*embed)(struct ops *o, float *x, const struct mat *embd, const int32_t *ids, int n_tok, float scale);
    /* y = w * x / sqrt(mean(x^2) + eps) per row of dim elements. y may be x. */
    int (*rmsnorm)(struct ops *o, float *y, const float *x, const float *w, int64_t n_row, int dim, float eps);
    /* x += d, n elements. */
    int (*add)(struct ops *o, float *x, const float *d, int64_t n);
    int (*matmul)(struct ops *o, const struct matmul *m);
    /* cs[n_tok, n_pair, 2] = mscale * (cos, sin)((pos0 + t) * inv_freq[i]), angles in double with full range reduction.
     * inv_freq is a host array [n_pair] of double. */
    int (*rope_table)(struct ops *o, float *cs, const double *inv_freq, int n_pair, float mscale, int64_t pos0, int n_tok);
    int (*rope)(struct ops *o, const struct rope_args *a);
    /* Stores k [n_tok, n_kv, head_dim_k] and v [n_tok, n_kv, head_dim_v] at positions pos0.. of layer il. */
    int (*kv_put)(struct ops *o, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v);
    int (*attn)(struct ops *o, const struct attn_args *a);
    int (*delta)(struct ops *o, const struct delta_args *a);
    /* y = act(gate) * up, n elements. y may be gate or up. */
    int (*glu)(struct ops *o, float *y, const float *gate, const float *up, int64_t n, enum act act);
    /* Softmax over the n_expert logits of each token; the n_used largest (ties: lower id), in decreasing order, with
     * their probabilities, divided by their sum when `normalise`. */
    int (*route)(struct ops *o, int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used,
                 bool normalise);
    int (*experts)(struct ops *o, const struct experts_args *a);
    /* x[t] += sigma(gate[t]) * d[t]: rows of dim elements, one gate per row. */
    int (*add_gated)(struct ops *o, float *x, const float *d, const float *gate, int n_tok, int64_t dim);
    /* Rows of x [*, dim] at `rows` (host array [n]) gathered into y [n, dim]. */
    int (*gather)(struct ops *o, float *y, const float *x, const int32_t *rows, int n, int64_t dim);
    /* x[i] = cap * tanh(x[i] / cap) for the logit cap of some models. */
    int (*softcap)(struct ops *o, float *x, int64_t n, float cap);
};

#endif
