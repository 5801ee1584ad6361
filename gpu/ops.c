/* ops.c: the GPU's table of operations (core/ops.h): checks shapes, keeps scratch, launches on one stream. Few tokens go through
 * matvec.cu and attn_decode.cu, from PREFILL_MIN_TOK on through gemm.c and attn_prefill.cu. */
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"
#include "gpu/impl.h"
#include "gpu/kernels.h"
#include "gpu/sizes.h"

#include <stdlib.h>

enum { MAX_DELTA_HEADS = 65535 }; /* blocks of a grid in y */
enum { BAD_PUT, BAD_ATTN, BAD_EXPERT, N_BAD = GPU_N_BAD };
_Static_assert(BAD_EXPERT + 1 == GPU_N_BAD, "");

struct gpu_ops {
    struct ops ops; /* first: a struct ops * given to an operation is the struct gpu_ops * */
    struct gpu *g;
    struct gpu_stream *stream;
    struct ops_limits limits;
    struct gpu_xq *d_xq;        /* [n_choice, cols / 32] quantised inputs */
    int32_t *d_held;            /* [n_choice] experts of choices among those that are held */
    float *d_gate, *d_up;       /* [n_choice, cols] of experts; up takes the output of down as well */
    float *d_part;              /* attention: [ATTN_TOKENS * n_head, runs, head_dim + 2] */
    void *d_delta;              /* Gated DeltaNet layers in chunks */
    struct gpu_gemm *gemm;      /* NULL: opened for fewer than PREFILL_MIN_TOK tokens */
    unsigned char *d_pass;      /* scratch of one call of many tokens: of gemm.c, or of attention */
    unsigned long long *d_bad;  /* [N_BAD] smallest positions of what went wrong */
    unsigned long long *bad;    /* pinned copy */
    struct gpu_kv_hook hook;    /* empty: the table's own kv_put and attn */
    struct {                    /* attention piece by piece, between gpu_pages_begin and _end */
        bool open;
        enum gpu_pages_way way;
        struct attn_args_gpu few;
        struct attn_prefill_args many;
    } pages;
};

/* 0, or the code of a failed launch. */
static int launched(struct gpu_ops *o, cudaError_t e, const char *what) {
    return e == cudaSuccess ? 0 : gpu_failed(o->g, e, what, 0);
}

static int usable(struct gpu_ops *o) { return o->g->lost ? gpu_is_lost(o->g) : 0; }

/* --- element-wise -------------------------------------------------------------------------------------------------------- */

static int mat_of(struct gpu_mat *out, const struct mat *m) {
    struct strip_layout l;
    if (!m->data || !strip_layout(&l, m->type, m->rows, m->cols))
        return err_set(ERR_ARG, "gpu: a matrix [%lld, %lld] of type %s has no kernel", (long long)m->rows, (long long)m->cols,
                       quant_name(m->type));
    *out = (struct gpu_mat){.data = m->data, .strip_bytes = l.strip_bytes, .scales_off = l.scales_off, .rows = m->rows,
                            .cols = m->cols, .n_block = l.n_block, .type = m->type};
    return 0;
}

static int op_embed(struct ops *ops, float *x, const struct mat *embd, const int32_t *ids, int n_tok, float scale) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    struct gpu_mat m;
    int rc = usable(o);
    if (!rc) rc = mat_of(&m, embd);
    for (int i = 0; i < n_tok && !rc; i++)
        if (ids[i] < 0 || ids[i] >= embd->rows)
            rc = err_set(ERR_ARG, "embed: id %d is outside 0..%lld", ids[i], (long long)embd->rows - 1);
    for (int i = 0; i < n_tok && !rc; i += LAUNCH_IDS)
        rc = launched(o, embed_launch(x + i * embd->cols, &m, ids + i, n_tok - i < LAUNCH_IDS ? n_tok - i : LAUNCH_IDS, scale,
                                      o->stream->s), "embed");
    return rc;
}

static int op_gather(struct ops *ops, float *y, const float *x, const int32_t *rows, int n, int64_t dim) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    for (int i = 0; i < n && !rc; i += LAUNCH_IDS)
        rc = launched(o, gather_launch(y + i * dim, x, rows + i, n - i < LAUNCH_IDS ? n - i : LAUNCH_IDS, dim, o->stream->s),
                      "gather");
    return rc;
}

static int op_rmsnorm(struct ops *ops, float *y, const float *x, const float *w, int64_t n_row, int dim, float eps) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    return rc ? rc : launched(o, rmsnorm_launch(y, x, w, n_row, dim, eps, o->stream->s), "rmsnorm");
}

static int op_add(struct ops *ops, float *x, const float *d, int64_t n) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    return rc ? rc : launched(o, add_launch(x, d, n, o->stream->s), "add");
}

static int op_glu(struct ops *ops, float *y, const float *gate, const float *up, int64_t n, enum act act) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    return rc ? rc : launched(o, glu_launch(y, gate, up, n, (int)act, o->stream->s), "glu");
}

static int op_add_gated(struct ops *ops, float *x, const float *d, const float *gate, int n_tok, int64_t dim) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    return rc ? rc : launched(o, add_gated_launch(x, d, gate, n_tok, dim, o->stream->s), "add_gated");
}

static int op_softcap(struct ops *ops, float *x, int64_t n, float cap) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    return rc ? rc : launched(o, softcap_launch(x, n, cap, o->stream->s), "softcap");
}

static int op_rope_table(struct ops *ops, float *cs, const double *inv_freq, int n_pair, float mscale, int64_t pos0, int n_tok) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    for (int i = 0; i < n_pair && !rc; i += LAUNCH_FREQS) {
        int n = n_pair - i < LAUNCH_FREQS ? n_pair - i : LAUNCH_FREQS;
        rc = launched(o, rope_table_launch(cs, inv_freq + i, i, n, n_pair, mscale, pos0, n_tok, o->stream->s), "rope_table");
    }
    return rc;
}

static int op_rope(struct ops *ops, const struct rope_args *a) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    if (rc) return rc;
    if (a->n_rot < 0 || a->n_rot % 2 || a->n_rot > a->head_dim)
        return err_set(ERR_ARG, "rope: %d rotated dims of %d", a->n_rot, a->head_dim);
    return launched(o, rope_launch(a->x, a->n_tok, a->n_head, a->head_dim, a->norm, a->eps, a->cs, a->n_rot,
                                   a->pairing == ROPE_NEOX, o->stream->s), "rope");
}

static int op_route(struct ops *ops, int32_t *ids, float *weight, const float *logits, int n_tok, int n_expert, int n_used,
                    bool normalise) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    if (rc) return rc;
    if (n_used < 1 || n_used > n_expert || n_expert > 1024)
        return err_set(ERR_ARG, "route: %d of %d experts (at most 1024)", n_used, n_expert);
    return launched(o, route_launch(ids, weight, logits, n_tok, n_expert, n_used, normalise, o->stream->s), "route");
}

/* --- products ------------------------------------------------------------------------------------------------------------ */

static bool is_plain(int type) { return type == QT_F32 || type == QT_F16 || type == QT_BF16; }

static int quantise(struct gpu_ops *o, const float *x, int64_t n_row, int64_t cols) {
    return launched(o, quantise_launch(o->d_xq, x, n_row * (cols / 32), o->stream->s), "quantise");
}

static int op_matmul(struct ops *ops, const struct matmul *m) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    if (rc) return rc;
    if (m->n < 1 || m->n > MATMUL_MAX || m->n_tok < 1 || m->n_tok > o->limits.n_tok || m->cols > o->limits.cols)
        return err_set(ERR_ARG, "matmul: %d outputs, %d tokens, %lld inputs (opened for %d, %d, %lld)", m->n, m->n_tok,
                       (long long)m->cols, MATMUL_MAX, o->limits.n_tok, (long long)o->limits.cols);
    struct gpu_mat w[MATMUL_MAX];
    bool quantised = false;
    for (int i = 0; i < m->n; i++) {
        if (m->out[i].w->cols != m->cols || m->out[i].w->rows > o->limits.rows)
            return err_set(ERR_ARG, "matmul: weights [%lld, %lld] for %lld inputs (opened for %lld rows)",
                           (long long)m->out[i].w->rows, (long long)m->out[i].w->cols, (long long)m->cols,
                           (long long)o->limits.rows);
        rc = mat_of(&w[i], m->out[i].w);
        if (rc) return rc;
        quantised |= !is_plain(w[i].type);
    }
    if (m->n_tok >= PREFILL_MIN_TOK) return gpu_gemm_matmul(o->gemm, m, w);
    if (quantised) rc = quantise(o, m->x, m->n_tok, m->cols);
    for (int i = 0; i < m->n && !rc; i++) {
        struct matvec_args a = {.w = w[i], .xq = o->d_xq, .x = m->x, .y = m->out[i].y, .bias = m->out[i].bias, .n_col = m->n_tok};
        rc = launched(o, matvec_launch(&a, o->stream->s), "matmul");
    }
    return rc;
}

static int check_experts(const struct gpu_ops *o, const struct experts_args *a) {
    const struct ops_limits *l = &o->limits;
    if (a->first < 0 || a->n_held < 0 || a->first > a->n_expert - a->n_held || (!a->n_held && a->first))
        return err_set(ERR_ARG, "experts: %d from number %d on of %d are held", a->n_held, a->first, a->n_expert);
    if (a->n_tok < 1 || a->n_tok > l->n_tok || a->n_expert < 1 || a->n_expert > l->n_expert || a->n_used < 1 ||
        a->n_used > l->n_expert_used)
        return err_set(ERR_ARG, "experts: %d tokens, %d of %d experts (opened for %d, %d of %d)", a->n_tok, a->n_used,
                       a->n_expert, l->n_tok, l->n_expert_used, l->n_expert);
    if (a->up.rows != a->gate.rows || a->up.cols != a->gate.cols || a->down.cols != a->gate.rows ||
        a->down.rows != a->gate.cols || a->gate.cols > l->cols || a->gate.rows > l->cols)
        return err_set(ERR_ARG, "experts: gate [%lld, %lld], up [%lld, %lld], down [%lld, %lld] (opened for %lld inputs)",
                       (long long)a->gate.rows, (long long)a->gate.cols, (long long)a->up.rows, (long long)a->up.cols,
                       (long long)a->down.rows, (long long)a->down.cols, (long long)l->cols);
    return 0;
}

static size_t expert_bytes(const struct gpu_mat *w) {
    return (size_t)((w->rows + STRIP_ROWS - 1) / STRIP_ROWS) * w->strip_bytes;
}

/* y[choice] = W[ids[choice]] x[choice / x_div] of a stack, choice by choice. x: rows of f32. */
static int choice_product(struct gpu_ops *o, float *y, const struct gpu_mat *w, const float *x, const struct experts_args *a, int x_div,
                          enum gpu_gemm_input input) {
    struct matvec_args v = {.w = *w, .xq = o->d_xq, .x = x, .y = y, .n_col = (int64_t)a->n_tok * a->n_used, .ids = a->ids,
                            .x_div = x_div, .n_expert = a->n_expert, .expert_bytes = expert_bytes(w), .bad = a->ids == o->d_held ? NULL : o->d_bad + BAD_EXPERT};
    int rc = is_plain(w->type) || input == GEMM_SAME_ROWS ? 0 : quantise(o, x, v.n_col / x_div, w->cols);
    return rc ? rc : launched(o, matvec_launch(&v, o->stream->s), "experts");
}

/* Whether the choices are worth grouping by expert: each expert's weights would otherwise be read once per choice. As in
 * PREFILL_MIN_TOK, decoding all of them costs about as much as four readings. F32 experts keep their precision and are taken
 * choice by choice. */
static bool is_grouped(const struct experts_args *a, const struct gpu_mat *w) {
    return w->type != QT_F32 && a->n_tok >= PREFILL_MIN_TOK && (int64_t)a->n_tok * a->n_used >= 4 * (int64_t)a->n_expert;
}

/* Some of the experts only: their choices by new numbers, the others' negative. Products of many tokens leave those out, and
 * what is not written must be no NaN. */
static int take_held(struct gpu_ops *o, struct experts_args *held, const struct experts_args *a) {
    const size_t n_choice = (size_t)a->n_tok * (size_t)a->n_used;
    *held = *a;
    if (!a->n_held || a->n_held == a->n_expert) return 0;
    held->ids = o->d_held;
    held->n_expert = a->n_held;
    int rc = launched(o, expert_held_launch(o->d_held, a->ids, (int)n_choice, a->n_expert, a->first, a->n_held, o->d_bad + BAD_EXPERT, o->stream->s),
                      "experts");
    if (rc || a->n_tok < PREFILL_MIN_TOK) return rc;
    rc = gpu_fill(o->stream, o->d_gate, 0, n_choice * (size_t)a->gate.rows * sizeof(float));
    return rc ? rc : gpu_fill(o->stream, o->d_up, 0, n_choice * (size_t)a->gate.rows * sizeof(float));
}

static int op_experts(struct ops *ops, const struct experts_args *all) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    struct gpu_mat gate, up, down;
    struct experts_args held;
    const struct experts_args *a = &held;
    int rc = usable(o);
    if (!rc) rc = check_experts(o, all);
    if (!rc) rc = take_held(o, &held, all);
    if (!rc) rc = mat_of(&gate, &a->gate);
    if (!rc) rc = mat_of(&up, &a->up);
    if (!rc) rc = mat_of(&down, &a->down);
    if (rc) return rc;
    const int n_choice = a->n_tok * a->n_used;
    const bool g = is_grouped(a, &gate), u = is_grouped(a, &up), d = is_grouped(a, &down);
    const bool some = a->ids == o->d_held;
    if (g || u || d) rc = gpu_gemm_group(o->gemm, a->ids, n_choice, a->n_expert, some ? NULL : o->d_bad + BAD_EXPERT);
    if (!rc)
        rc = g ? gpu_gemm_experts(o->gemm, o->d_gate, &gate, expert_bytes(&gate), a->x, a->n_tok, a->n_used, GEMM_NEW_ROWS)
               : choice_product(o, o->d_gate, &gate, a->x, a, a->n_used, GEMM_NEW_ROWS);
    enum gpu_gemm_input input = u == g && is_plain(up.type) == is_plain(gate.type) ? GEMM_SAME_ROWS : GEMM_NEW_ROWS;
    if (!rc)
        rc = u ? gpu_gemm_experts(o->gemm, o->d_up, &up, expert_bytes(&up), a->x, a->n_tok, a->n_used, input)
               : choice_product(o, o->d_up, &up, a->x, a, a->n_used, input);
    if (!rc) rc = op_glu(ops, o->d_gate, o->d_gate, o->d_up, (int64_t)n_choice * gate.rows, a->act);
    if (!rc)
        rc = d ? gpu_gemm_experts(o->gemm, o->d_up, &down, expert_bytes(&down), o->d_gate, n_choice, 1, GEMM_NEW_ROWS)
               : choice_product(o, o->d_up, &down, o->d_gate, a, 1, GEMM_NEW_ROWS);
    if (rc) return rc;
    return launched(o, expert_sum_launch(a->y, o->d_up, a->weight, some ? a->ids : NULL, a->n_tok, a->n_used, gate.cols, o->stream->s), "experts");
}

/* --- KV and attention ---------------------------------------------------------------------------------------------------- */

/* Positions pos0 .. pos0 + n_tok of layer il exist and are held together. */
static int check_range(const struct kv *kv, int il, int64_t pos0, int n_tok) {
    if (il < 0 || il >= kv->n_layer || !kv->layers[il].n_kv) return err_set(ERR_ARG, "layer %d has no KV cache", il);
    if (pos0 < 0 || n_tok < 1 || pos0 > kv->n_ctx - n_tok)
        return err_set(ERR_ARG, "positions %lld..%lld are outside the context of %lld", (long long)pos0,
                       (long long)pos0 + n_tok - 1, (long long)kv->n_ctx);
    const struct kv_layer *l = &kv->layers[il];
    if (l->ring && (l->window + n_tok + KV_PAGE - 1) / KV_PAGE + 1 > l->n_slot)
        return err_set(ERR_ARG, "layer %d: %d tokens in one call, but its window was opened for fewer", il, n_tok);
    if (l->head_dim_k > GPU_MAX_HEAD_DIM || l->head_dim_v > GPU_MAX_HEAD_DIM)
        return err_set(ERR_UNSUPPORTED, "layer %d: heads of %d/%d dims; the GPU kernels take %d", il, l->head_dim_k, l->head_dim_v,
                       GPU_MAX_HEAD_DIM);
    return 0;
}

static struct gpu_kv gpu_kv_of(const struct kv_layer *l) {
    return (struct gpu_kv){.base = l->base, .n_slot = l->n_slot, .ring = l->ring, .n_kv = l->n_kv, .dim_k = l->head_dim_k,
                           .dim_v = l->head_dim_v, .type_k = l->type_k, .type_v = l->type_v, .rotate_k = l->rotate_k,
                           .rotate_v = l->rotate_v, .ks_off = l->ks_off, .v_off = l->v_off, .vs_off = l->vs_off,
                           .head_bytes = l->head_bytes, .page_bytes = l->page_bytes};
}

static int op_kv_put(struct ops *ops, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    if (o->hook.put && !rc) return o->hook.put(o->hook.arg, kv, il, pos0, n_tok, k, v);
    if (!rc) rc = check_range(kv, il, pos0, n_tok);
    if (rc) return rc;
    const struct kv_layer *l = &kv->layers[il];
    struct gpu_kv g = gpu_kv_of(l);
    return launched(o, kv_put_launch(&g, pos0, n_tok, k, v, kv_type_max(l->type_k), kv_type_max(l->type_v), o->d_bad + BAD_PUT,
                                     o->stream->s), "kv_put");
}

static int check_attn(const struct gpu_ops *o, const struct attn_args *a) {
    int rc = check_range(a->kv, a->il, a->pos0, a->n_tok);
    if (rc) return rc;
    const struct kv_layer *l = &a->kv->layers[a->il];
    const struct ops_limits *lim = &o->limits;
    if (a->n_head < 1 || a->n_head % l->n_kv || a->n_head > lim->n_head || l->head_dim_k > lim->head_dim ||
        l->head_dim_v > lim->head_dim || l->n_kv > lim->n_kv || a->kv->n_ctx > lim->n_ctx || a->n_tok > lim->n_tok)
        return err_set(ERR_ARG, "attention of layer %d: %d tokens, %d query heads of size %d/%d over %d KV heads, context %lld; opened"
                       " for %d, %d of size %d over %d, context %lld", a->il, a->n_tok, a->n_head, l->head_dim_k, l->head_dim_v,
                       l->n_kv, (long long)a->kv->n_ctx, lim->n_tok, lim->n_head, lim->head_dim, lim->n_kv, (long long)lim->n_ctx);
    if (a->window < 0 || (l->ring && (a->window == 0 || a->window > l->window)))
        return err_set(ERR_ARG, "attention of layer %d asks for a window of %lld, its KV cache keeps %lld", a->il,
                       (long long)a->window, (long long)l->window);
    return 0;
}

/* Tokens t0 .. t0 + n of the call. */
static int attn_step(struct gpu_ops *o, const struct attn_args *a, int t0, int n) {
    const struct kv_layer *l = &a->kv->layers[a->il];
    size_t row = (size_t)t0 * (size_t)a->n_head;
    struct attn_args_gpu g = {.kv = gpu_kv_of(l), .o = a->o + row * (size_t)l->head_dim_v, .q = a->q + row * (size_t)l->head_dim_k,
                              .part = o->d_part, .pos0 = a->pos0 + t0, .window = a->window, .n_tok = n, .n_head = a->n_head,
                              .scale = a->scale, .bad = o->d_bad + BAD_ATTN};
    return launched(o, attn_decode_launch(&g, o->stream->s), "attention");
}

static struct attn_prefill_args many_args(struct gpu_ops *o, const struct kv_layer *l, const struct attn_args *a) {
    const struct gpu_attn_scratch at = gpu_attn_scratch_of(&o->limits);
    struct attn_prefill_args g = {.kv = gpu_kv_of(l), .o = a->o, .q = a->q, .pos0 = a->pos0, .window = a->window,
                                  .smem_bytes = o->g->info.smem_bytes, .n_tok = a->n_tok, .n_head = a->n_head, .first = 1,
                                  .scale = a->scale, .bad = o->d_bad + BAD_ATTN};
    g.q_half = (uint16_t *)(void *)(o->d_pass + at.q);
    g.q_exp = (int *)(void *)(o->d_pass + at.q_exp);
    g.state = (float *)(void *)(o->d_pass + at.state);
    g.stage = (uint16_t *)(void *)(o->d_pass + at.stage);
    g.stage_exp = (int *)(void *)(o->d_pass + at.stage_exp);
    return g;
}

/* Pages first .. end: F16 pages all at once where they are, others in batches that fit the scratch. */
static int many_pages(struct gpu_ops *o, struct attn_prefill_args *g, int64_t first, int64_t end, bool last) {
    const size_t page = attn_stage_halves(&g->kv) * sizeof(uint16_t);
    const int64_t batch = page ? (int64_t)(gpu_attn_scratch_of(&o->limits).stage_bytes / page) : end - first;
    int rc = 0;
    for (; first < end && !rc; first = g->page_end, g->first = 0) {
        g->page_first = first;
        g->page_end = end - first > batch ? first + batch : end;
        g->last = last && g->page_end == end;
        rc = launched(o, attn_prefill_launch(g, o->stream->s), "attention");
    }
    return rc;
}

static int attn_many(struct gpu_ops *o, const struct attn_args *a) {
    struct attn_prefill_args g = many_args(o, &a->kv->layers[a->il], a);
    const int64_t lo = a->window && a->pos0 + 1 > a->window ? a->pos0 + 1 - a->window : 0;
    return many_pages(o, &g, lo / KV_PAGE, (a->pos0 + a->n_tok - 1) / KV_PAGE + 1, true);
}

static int op_attn(struct ops *ops, const struct attn_args *a) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    int rc = usable(o);
    if (o->hook.attn && !rc) return o->hook.attn(o->hook.arg, a);
    if (!rc) rc = check_attn(o, a);
    if (!rc && a->n_tok >= PREFILL_MIN_TOK) return attn_many(o, a);
    /* Every step uses the same scratch: the stream keeps them in order. */
    for (int t = 0; t < a->n_tok && !rc; t += ATTN_TOKENS) rc = attn_step(o, a, t, a->n_tok - t < ATTN_TOKENS ? a->n_tok - t : ATTN_TOKENS);
    return rc;
}

/* --- KV in several places ------------------------------------------------------------------------------------------------ */

void gpu_ops_hook(struct gpu_ops *o, const struct gpu_kv_hook *h) { o->hook = h ? *h : (struct gpu_kv_hook){0}; }

static struct gpu_kv gpu_kv_at(const struct kv_layer *l, const struct gpu_pages *p) {
    struct gpu_kv g = gpu_kv_of(l);
    g.base = p->d_base;
    g.n_slot = p->n_slot;
    g.ring = 1;
    return g;
}

static int check_pages(const struct gpu_pages *p) {
    if (p->d_base && p->first >= 0 && p->end > p->first && p->end - p->first <= p->n_slot) return 0;
    return err_set(ERR_ARG, "pages %lld..%lld of a layer do not fit a place for %lld", (long long)p->first, (long long)p->end - 1,
                   (long long)p->n_slot);
}

int gpu_pages_put(struct gpu_ops *o, const struct kv_layer *l, const struct gpu_pages *to, int64_t pos0, int n_tok, const float *k,
                  const float *v) {
    int rc = usable(o);
    if (!rc) rc = check_pages(to);
    if (rc) return rc;
    if (n_tok < 1 || pos0 / KV_PAGE < to->first || (pos0 + n_tok - 1) / KV_PAGE >= to->end)
        return err_set(ERR_ARG, "positions %lld..%lld are not in pages %lld..%lld", (long long)pos0, (long long)pos0 + n_tok - 1,
                       (long long)to->first, (long long)to->end - 1);
    struct gpu_kv g = gpu_kv_at(l, to);
    return launched(o, kv_put_launch(&g, pos0, n_tok, k, v, kv_type_max(l->type_k), kv_type_max(l->type_v), o->d_bad + BAD_PUT,
                                     o->stream->s), "kv_put");
}

/* Runs of pages that the scratch has room for with this many query rows. */
static int64_t run_room(const struct gpu_ops *o, const struct kv_layer *l, const struct attn_args *a) {
    const struct ops_limits *lim = &o->limits;
    int64_t floats = (int64_t)ATTN_TOKENS * lim->n_head * attn_runs_at_most(lim->n_ctx) * (lim->head_dim + 2);
    return floats / ((int64_t)a->n_tok * a->n_head * (l->head_dim_v + 2));
}

int gpu_pages_begin(struct gpu_ops *o, const struct kv_layer *l, const struct attn_args *a, enum gpu_pages_way way) {
    const struct ops_limits *lim = &o->limits;
    int rc = usable(o);
    if (rc) return rc;
    o->pages.open = false;
    if (a->n_tok < 1 || a->n_head < 1 || a->n_head % l->n_kv || a->n_head > lim->n_head || l->head_dim_k > lim->head_dim ||
        l->head_dim_v > lim->head_dim || a->pos0 < 0 || a->window < 0)
        return err_set(ERR_ARG, "attention of layer %d: %d query heads of size %d/%d over %d KV heads; opened for %d heads of size %d",
                       a->il, a->n_head, l->head_dim_k, l->head_dim_v, l->n_kv, lim->n_head, lim->head_dim);
    o->pages.way = way;
    if (way == GPU_PAGES_MANY) {
        if (a->n_tok > lim->n_tok || lim->n_tok < PREFILL_MIN_TOK || l->n_kv > lim->n_kv)
            return err_set(ERR_ARG, "attention of layer %d in pieces: %d tokens over %d KV heads; opened for %d over %d, and for many from %d on",
                           a->il, a->n_tok, l->n_kv, lim->n_tok, lim->n_kv, PREFILL_MIN_TOK);
        o->pages.many = many_args(o, l, a);
    } else {
        o->pages.few = (struct attn_args_gpu){.kv = gpu_kv_of(l), .o = a->o, .q = a->q, .part = o->d_part, .pos0 = a->pos0,
                                              .window = a->window, .n_tok = a->n_tok, .n_head = a->n_head, .scale = a->scale,
                                              .part_stride = run_room(o, l, a), .bad = o->d_bad + BAD_ATTN};
        if (a->n_tok > GPU_PAGES_FEW_TOKENS || o->pages.few.part_stride < 2)
            return err_set(ERR_ARG, "attention of layer %d in pieces: %d tokens are not few (at most %d)", a->il, a->n_tok,
                           GPU_PAGES_FEW_TOKENS);
    }
    o->pages.open = true;
    return 0;
}

/* Pages of one piece, at most so many that their runs have room. */
static int attend_few(struct gpu_ops *o, struct attn_args_gpu *g) {
    int64_t runs = attn_runs_of_pages(g->page_end - g->page_first);
    int rc = 0;
    if (g->n_run + runs > g->part_stride) { /* n_run: those that are there */
        rc = launched(o, attn_fold_launch(g, o->stream->s), "attention");
        g->n_run = 1;
    }
    if (rc) return rc;
    g->run_at = g->n_run;
    rc = launched(o, attn_pages_launch(g, o->stream->s), "attention");
    g->n_run += runs;
    return rc;
}

int gpu_pages_attend(struct gpu_ops *o, const struct gpu_pages *p, enum gpu_pages_turn turn) {
    struct attn_args_gpu *g = &o->pages.few;
    bool many = o->pages.way == GPU_PAGES_MANY;
    int rc = o->pages.open ? usable(o) : err_set(ERR_ARG, "attention in pieces was not begun");
    if (!rc) rc = check_pages(p);
    if (rc) return rc;
    struct gpu_kv *kv = many ? &o->pages.many.kv : &g->kv;
    kv->base = p->d_base;
    kv->n_slot = p->n_slot;
    kv->ring = 1;
    if (many) return many_pages(o, &o->pages.many, p->first, p->end, turn == GPU_PAGES_LAST);
    for (int64_t at = p->first; at < p->end && !rc; at = g->page_end) {
        g->page_first = at;
        g->page_end = p->end;
        while (attn_runs_of_pages(g->page_end - at) > g->part_stride - 1) g->page_end = at + (g->page_end - at) / 2;
        rc = attend_few(o, g);
    }
    return rc;
}

int gpu_pages_add(struct gpu_ops *o, const float *d_part) {
    if (!o->pages.open || o->pages.way == GPU_PAGES_MANY || o->pages.few.more)
        return err_set(ERR_ARG, "a partial result of attention that has no place");
    o->pages.few.more = d_part;
    return 0;
}

int gpu_pages_end(struct gpu_ops *o) {
    int rc = o->pages.open ? usable(o) : err_set(ERR_ARG, "attention in pieces was not begun");
    o->pages.open = false;
    if (rc) return rc;
    if (o->pages.way == GPU_PAGES_FEW) return launched(o, attn_merge_launch(&o->pages.few, o->stream->s), "attention");
    return o->pages.many.last ? 0 : err_set(ERR_ARG, "attention in pieces of many tokens: its last piece is missing");
}

static int op_delta(struct ops *ops, const struct delta_args *a) {
    struct gpu_ops *o = (struct gpu_ops *)ops;
    const struct delta_shape *s = &a->shape, *l = &o->limits.delta;
    int rc = usable(o);
    if (rc) return rc;
    if (a->n_tok < 1 || a->n_tok > o->limits.n_tok || s->dim != l->dim || s->n_conv != DELTA_CONV || s->n_key < 1 ||
        s->n_key > l->n_key || s->n_value < s->n_key || s->n_value > l->n_value || s->n_value % s->n_key)
        return err_set(ERR_ARG, "delta: %d tokens, %d key and %d value heads of %d (opened for %d tokens, %d and %d heads of %d)",
                       a->n_tok, s->n_key, s->n_value, s->dim, o->limits.n_tok, l->n_key, l->n_value, l->dim);
    struct delta_args_gpu g = {.y = a->y, .u = a->u, .z = a->z, .b = a->b, .a = a->a, .conv = a->conv, .dt = a->dt, .rate = a->rate,
                               .norm = a->norm, .last = a->last, .s = a->s, .n_key = s->n_key, .n_value = s->n_value, .dim = s->dim,
                               .tiled = s->tiled, .n_tok = a->n_tok, .eps = a->eps};
    return launched(o, delta_launch(&g, o->d_delta, o->stream->s), "delta");
}

static int check_delta(const struct delta_shape *s) {
    if (!s->n_value || (s->dim >= 16 && s->dim % 16 == 0 && s->dim <= DELTA_MAX_DIM && s->n_value <= MAX_DELTA_HEADS && s->n_key >= 1 &&
                        s->n_key <= s->n_value))
        return 0;
    return err_set(ERR_ARG, "delta: %d key and %d value heads of %d (at most %d heads, of a multiple of 16 up to %d)", s->n_key,
                   s->n_value, s->dim, MAX_DELTA_HEADS, DELTA_MAX_DIM);
}

/* --- open and close ------------------------------------------------------------------------------------------------------ */

static const struct ops table = {
    .name = "gpu", .embed = op_embed, .rmsnorm = op_rmsnorm, .add = op_add, .matmul = op_matmul, .rope_table = op_rope_table,
    .rope = op_rope, .kv_put = op_kv_put, .attn = op_attn, .glu = op_glu, .route = op_route, .experts = op_experts,
    .gather = op_gather, .softcap = op_softcap, .add_gated = op_add_gated, .delta = op_delta,
};

/* Nothing bad so far. The fill is in stream order, so it comes after whatever used the words before. */
static int reset_bad(struct gpu_ops *o) { return gpu_fill(o->stream, o->d_bad, 0xff, N_BAD * sizeof *o->d_bad); }

int gpu_ops_open(struct gpu_ops **out, struct gpu *g, struct gpu_arena *a, struct gpu_stream *s, const struct ops_limits *l) {
    if (l->head_dim > GPU_MAX_HEAD_DIM)
        return err_set(ERR_UNSUPPORTED, "GPU kernels take heads of at most %d dims, this model has %d", GPU_MAX_HEAD_DIM, l->head_dim);
    if (check_delta(&l->delta)) return ERR_ARG;
    struct gpu_scratch at = gpu_scratch_of(l);
    if (at.bytes == SIZE_MAX) return err_set(ERR_BUDGET, "GPU scratch for %d tokens of %lld overflows", l->n_tok, (long long)l->cols);
    struct gpu_ops *o = calloc(1, sizeof *o);
    if (!o) return err_set(ERR_NOMEM, "gpu: out of host memory");
    *o = (struct gpu_ops){.ops = table, .g = g, .stream = s, .limits = *l};
    void *base = NULL;
    size_t mark = gpu_arena_used(a);
    int rc = gpu_host_alloc((void **)&o->bad, g, N_BAD * sizeof *o->bad);
    if (!rc) rc = gpu_alloc(&base, a, at.bytes, "scratch of the operations");
    if (!rc) {
        unsigned char *p = base;
        o->d_xq = (struct gpu_xq *)(void *)(p + at.xq);
        o->d_gate = (float *)(void *)(p + at.gate);
        o->d_up = (float *)(void *)(p + at.up);
        o->d_held = (int32_t *)(void *)(p + at.held);
        o->d_part = (float *)(void *)(p + at.part);
        o->d_delta = p + at.delta;
        o->d_bad = (unsigned long long *)(void *)(p + at.bad);
        o->d_pass = p + at.pass;
        if (l->n_tok >= PREFILL_MIN_TOK) rc = gpu_gemm_open(&o->gemm, g, s, l, p + at.blas, o->d_pass);
        if (!rc) rc = reset_bad(o);
    }
    if (rc) {
        gpu_arena_release(a, mark);
        gpu_ops_close(o);
        return rc;
    }
    *out = o;
    return 0;
}

void gpu_ops_close(struct gpu_ops *o) {
    if (!o) return;
    gpu_gemm_close(o->gemm);
    gpu_host_free(o->g, o->bad);
    free(o);
}

struct ops *gpu_ops_table(struct gpu_ops *o) { return &o->ops; }

int gpu_ops_check(struct gpu_ops *o) {
    int rc = gpu_copy_out(o->stream, o->bad, o->d_bad, N_BAD * sizeof *o->bad);
    if (!rc) rc = gpu_stream_sync(o->stream);
    if (rc) return rc;
    const unsigned long long none = ~0ull, put = o->bad[BAD_PUT], attn = o->bad[BAD_ATTN], expert = o->bad[BAD_EXPERT];
    if (put == none && attn == none && expert == none) return 0;
    rc = reset_bad(o);
    if (rc) return rc;
    if (put != none) return err_set(ERR_NUMERIC, "position %llu: a key or value cannot be stored in the KV cache's type", put);
    if (expert != none) return err_set(ERR_ARG, "experts: an expert that does not exist was chosen");
    return err_set(ERR_NUMERIC, "position %llu: attention gave a NaN or an infinity", attn);
}
