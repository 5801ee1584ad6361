/* claim_model.c: what a model holds and reads, from a built-in shape, from a file's directory, or by hand. See claim.h. */
#include "core/err.h"
#include "core/state.h"
#include "offload/claim.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One more layer that keeps KV. */
static void add_attention(struct claim_model *m, double n_head, double n_kv, double dim_k, double dim_v, int64_t window) {
    double flops = 2 * n_head * (dim_k + dim_v); /* q.k and p.v, a multiplication and an addition each */
    if (!m->n_attn++) {
        m->n_head = (int)n_head;
        m->n_kv = (int)n_kv;
        m->head_dim_k = (int)dim_k;
        m->head_dim_v = (int)dim_v;
    }
    if (window) {
        m->window = window;
        m->window_k_values += n_kv * dim_k;
        m->window_v_values += n_kv * dim_v;
        m->window_attn_flops += flops;
    } else {
        m->k_values += n_kv * dim_k;
        m->v_values += n_kv * dim_v;
        m->attn_flops += flops;
    }
}

/* --- built-in shapes --------------------------------------------------------------------------------------------------------- */

struct walk {
    struct claim_model *m;
    const struct shape *s;
};

static int add_tensor(void *ctx, const struct shape_tensor *t) {
    struct walk *w = ctx;
    int block = -1;
    double n = (double)t->dims[0] * (double)t->dims[1] * (double)t->dims[2], bytes = (double)t->bytes;
    sscanf(t->name, "blk.%d.", &block);
    bool embed = !strcmp(t->name, "token_embd.weight"), output = !strcmp(t->name, "output.weight");
    double used = strstr(t->name, "_exps.") ? (double)w->s->n_expert_used / w->s->n_expert : 1;
    if (block >= w->s->n_layer) return 0;
    w->m->params += n;
    w->m->weight_bytes += bytes;
    w->m->active_params += n * used;
    if (embed || output) w->m->lazy_params += n;
    if (embed && !w->s->tied)
        w->m->embed_bytes = bytes;
    else
        w->m->read_bytes += bytes * used;
    return 0;
}

void claim_model_of_shape(struct claim_model *m, const struct shape *s, enum mix mix) {
    *m = (struct claim_model){.n_layer = s->n_layer, .n_ctx_train = s->n_ctx};
    struct walk w = {m, s};
    bool published = s->published_bytes > 0 && mix == SHAPE_PUBLISHED_MIX;
    snprintf(m->name, sizeof m->name, "%s:%s", s->name, published ? "q4" : mix_name(mix));
    shape_tensors(s, mix, false, 0, add_tensor, &w);
    if (s->published_params > 0) m->params = m->active_params = s->published_params;
    if (published) m->weight_bytes = m->read_bytes = s->published_bytes;
    int n_delta = 0;
    for (int il = 0; il < s->n_layer; il++) {
        bool global = !s->window || il % s->window_pattern == s->window_pattern - 1;
        if ((il + 1) % s->full_interval)
            n_delta++;
        else
            add_attention(m, s->n_head, s->n_kv, s->head_dim, s->head_dim, global ? 0 : s->window);
    }
    double keys = (double)s->n_key_head * s->state_dim, values = (double)s->n_value_head * s->state_dim;
    m->state_bytes = 4.0 * n_delta * (values * s->state_dim + (s->n_conv - 1) * (2 * keys + values));
}

/* --- files ---------------------------------------------------------------------------------------------------------------------- */

static double weights_of(const struct tensor *t) { return (double)t->rows * (double)t->cols * (double)t->stack; }

/* Experts that a token does not use, of layer l: *params and *bytes. */
static void unused_experts(const struct model *m, const struct layer *l, double *params, double *bytes) {
    static const enum layer_tensor stacks[] = {LT_MOE_GATE, LT_MOE_UP, LT_MOE_DOWN};
    double unused = m->n_expert > 0 ? 1 - (double)m->n_expert_used / m->n_expert : 0;
    for (int i = 0; i < 3; i++) {
        const struct tensor *t = &l->t[stacks[i]];
        if (!t->bytes) continue;
        *params += weights_of(t) * unused;
        *bytes += (double)t->bytes * unused;
    }
}

void claim_model_of_file(struct claim_model *c, const struct model *m) {
    double idle_params = 0, idle_bytes = 0;
    *c = (struct claim_model){.n_layer = m->n_layer, .n_ctx_train = m->n_ctx_train, .params = (double)m->n_params,
                              .weight_bytes = (double)m->file_bytes,
                              .state_bytes = (double)state_bytes(m)};
    snprintf(c->name, sizeof c->name, "%s", m->name[0] ? m->name : m->arch);
    for (char *p = c->name; *p; p++)
        if (!isprint((unsigned char)*p)) *p = '?';
    for (int il = 0; il < m->n_layer; il++) {
        const struct layer *l = &m->layers[il];
        if (l->n_kv) add_attention(c, l->n_head, l->n_kv, l->head_dim_k, l->head_dim_v, l->window);
        unused_experts(m, l, &idle_params, &idle_bytes);
    }
    c->embed_bytes = m->out.bytes ? (double)m->embd.bytes : 0;
    c->active_params = c->params - idle_params;
    c->read_bytes = c->weight_bytes - c->embed_bytes - idle_bytes;
    c->lazy_params = weights_of(&m->embd) + (m->out.bytes ? weights_of(&m->out) : 0);
}

/* --- by hand -------------------------------------------------------------------------------------------------------------------- */

enum custom { LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, PARAMS, WEIGHT_BYTES, N_REQUIRED, ATTN_LAYERS = N_REQUIRED, EMBED_BYTES, STATE_BYTES, N_CUSTOM };

static const struct {
    const char *key;
    double min, max;
    bool whole;
} custom[N_CUSTOM] = {
    [LAYERS] = {"layers", 1, MODEL_MAX_LAYER, true},
    [HEADS] = {"heads", 1, MODEL_MAX_HEAD, true},
    [KV_HEADS] = {"kv_heads", 1, MODEL_MAX_HEAD, true},
    [HEAD_DIM] = {"head_dim", 8, 1024, true},
    [WIDTH] = {"width", 8, 1 << 20, true},
    [PARAMS] = {"params", 1e3, 1e14, false},
    [WEIGHT_BYTES] = {"weight_bytes", 1e3, 1e15, false},
    [ATTN_LAYERS] = {"attn_layers", 1, MODEL_MAX_LAYER, true},
    [EMBED_BYTES] = {"embed_bytes", 0, 1e12, false},
    [STATE_BYTES] = {"state_bytes", 0, 1e12, false},
};

/* One "key=number" of n characters. */
static int read_custom(double v[N_CUSTOM], bool given[N_CUSTOM], const char *item, size_t n) {
    char text[64], *end;
    if (n >= sizeof text) return err_set(ERR_ARG, "custom shape: %.40s...: must be key=number", item);
    memcpy(text, item, n);
    text[n] = 0;
    char *eq = strchr(text, '=');
    if (!eq) return err_set(ERR_ARG, "custom shape: '%s' must be key=number", text);
    *eq = 0;
    int k = 0;
    while (k < N_CUSTOM && strcmp(custom[k].key, text)) k++;
    if (k == N_CUSTOM)
        return err_set(ERR_ARG, "custom shape: %s is unknown; known are layers, heads, kv_heads, head_dim, width, params, weight_bytes, "
                                "attn_layers, embed_bytes, state_bytes", text);
    if (given[k]) return err_set(ERR_ARG, "custom shape: %s is given twice", text);
    given[k] = true;
    v[k] = strtod(eq + 1, &end);
    if (end == eq + 1 || *end) return err_set(ERR_ARG, "custom shape: %s=%s: must be a number", text, eq + 1);
    if (!(v[k] >= custom[k].min && v[k] <= custom[k].max))
        return err_set(ERR_ARG, "custom shape: %s=%s: must be between %g and %g", text, eq + 1, custom[k].min, custom[k].max);
    if (custom[k].whole && v[k] != floor(v[k])) return err_set(ERR_ARG, "custom shape: %s=%s: must be a whole number", text, eq + 1);
    return 0;
}

static int check_custom(const double v[N_CUSTOM]) {
    double bits = v[WEIGHT_BYTES] * 8 / v[PARAMS];
    if (v[KV_HEADS] > v[HEADS]) return err_set(ERR_ARG, "custom shape: kv_heads=%g: more than heads=%g", v[KV_HEADS], v[HEADS]);
    if (fmod(v[HEADS], v[KV_HEADS]) != 0)
        return err_set(ERR_ARG, "custom shape: heads=%g: must be a multiple of kv_heads=%g", v[HEADS], v[KV_HEADS]);
    if (v[ATTN_LAYERS] > v[LAYERS]) return err_set(ERR_ARG, "custom shape: attn_layers=%g: more than layers=%g", v[ATTN_LAYERS], v[LAYERS]);
    if (v[EMBED_BYTES] >= v[WEIGHT_BYTES])
        return err_set(ERR_ARG, "custom shape: embed_bytes=%g: must be below weight_bytes=%g", v[EMBED_BYTES], v[WEIGHT_BYTES]);
    if (bits < 1 || bits > 33)
        return err_set(ERR_ARG, "custom shape: weight_bytes=%g for params=%g is %.3g bits per weight, must be between 1 and 33",
                       v[WEIGHT_BYTES], v[PARAMS], bits);
    /* Queries, keys, values and the output projection of every attention layer are among the parameters. */
    double attn = v[ATTN_LAYERS] * v[WIDTH] * v[HEAD_DIM] * 2 * (v[HEADS] + v[KV_HEADS]);
    if (attn > v[PARAMS])
        return err_set(ERR_ARG, "custom shape: params=%g: attention of width %g with %g heads of %g in %g layers alone has %.3g", v[PARAMS],
                       v[WIDTH], v[HEADS], v[HEAD_DIM], v[ATTN_LAYERS], attn);
    return 0;
}

static int parse_custom(struct claim_model *m, const char *text) {
    double v[N_CUSTOM] = {0};
    bool given[N_CUSTOM] = {false};
    for (const char *at = text;; at++) {
        size_t n = strcspn(at, ",");
        int rc = read_custom(v, given, at, n);
        if (rc) return rc;
        at += n;
        if (!*at) break;
    }
    for (int k = 0; k < N_REQUIRED; k++)
        if (!given[k]) return err_set(ERR_ARG, "custom shape: %s is missing", custom[k].key);
    if (!given[ATTN_LAYERS]) v[ATTN_LAYERS] = v[LAYERS];
    int rc = check_custom(v);
    if (rc) return rc;
    *m = (struct claim_model){.name = "custom", .n_layer = (int)v[LAYERS], .params = v[PARAMS], .active_params = v[PARAMS],
                              .weight_bytes = v[WEIGHT_BYTES], .read_bytes = v[WEIGHT_BYTES] - v[EMBED_BYTES],
                              .embed_bytes = v[EMBED_BYTES], .state_bytes = v[STATE_BYTES]};
    for (int il = 0; il < (int)v[ATTN_LAYERS]; il++) add_attention(m, v[HEADS], v[KV_HEADS], v[HEAD_DIM], v[HEAD_DIM], 0);
    return 0;
}

int claim_model_parse(struct claim_model *m, const char *text) {
    if (!strncmp(text, "custom:", 7)) return parse_custom(m, text + 7);
    const struct shape *s;
    enum mix mix;
    int rc = shape_parse(&s, &mix, text);
    if (!rc) claim_model_of_shape(m, s, mix);
    return rc;
}
