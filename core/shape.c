/* shape.c: see shape.h. Tensor names and dims follow the GGUF conventions of each architecture. */
#include "core/shape.h"

#include "core/err.h"
#include "core/quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Families: what their members share. A row of the table adds the rest. */
#define QWEN2 .arch = "qwen2", .n_ctx = 32768, .rope_base = 1e6, .eps = 1e-6, .head_dim = 128, .n_rot = 128, ATTN_ONLY
#define QWEN3                                                                                                          \
    .arch = "qwen3", .n_ctx = 40960, .rope_base = 1e6, .eps = 1e-6, .head_dim = 128, .n_rot = 128, .n_vocab = 151936,  \
    ATTN_ONLY
#define QWEN3_30B                                                                                                      \
    .arch = "qwen3moe", .n_layer = 48, .dim = 2048, .n_head = 32, .n_kv = 4, .head_dim = 128, .n_rot = 128,            \
    .n_vocab = 151936, .eps = 1e-6, .n_expert = 128, .n_expert_used = 8, .n_ff_expert = 768, ATTN_ONLY
#define QWEN3_4B .n_layer = 36, .dim = 2560, .n_ff = 9728, .n_head = 32, .n_kv = 8, .tied = true
#define HYBRID                                                                                                         \
    .n_ctx = 262144, .rope_base = 1e7, .eps = 1e-6, .head_dim = 256, .n_rot = 64, .full_interval = 4,                  \
    .state_dim = 128, .n_conv = 4, .n_key_head = 16, .rope_factor = 1
#define QWEN35 .arch = "qwen35", .n_vocab = 248320, HYBRID
#define QWEN35_27B QWEN35, .n_layer = 64, .dim = 5120, .n_ff = 17408, .n_head = 24, .n_kv = 4, .n_value_head = 48
#define ATTN_ONLY .full_interval = 1, .rope_factor = 1

static const struct shape shapes[] = {
    {.name = "qwen2.5-7b",
     QWEN2,
     .n_layer = 28,
     .dim = 3584,
     .n_ff = 18944,
     .n_head = 28,
     .n_kv = 4,
     .n_vocab = 152064},
    {.name = "qwen2.5-14b",
     QWEN2,
     .n_layer = 48,
     .dim = 5120,
     .n_ff = 13824,
     .n_head = 40,
     .n_kv = 8,
     .n_vocab = 152064},
    {.name = "qwen2.5-32b",
     QWEN2,
     .n_layer = 64,
     .dim = 5120,
     .n_ff = 27648,
     .n_head = 40,
     .n_kv = 8,
     .n_vocab = 152064},
    {.name = "qwen3-0.6b", QWEN3, .n_layer = 28, .dim = 1024, .n_ff = 3072, .n_head = 16, .n_kv = 8, .tied = true},
    {.name = "qwen3-1.7b", QWEN3, .n_layer = 28, .dim = 2048, .n_ff = 6144, .n_head = 16, .n_kv = 8, .tied = true},
    {.name = "qwen3-4b", QWEN3, QWEN3_4B},
    {.name = "qwen3-8b", QWEN3, .n_layer = 36, .dim = 4096, .n_ff = 12288, .n_head = 32, .n_kv = 8},
    {.name = "qwen3-14b", QWEN3, .n_layer = 40, .dim = 5120, .n_ff = 17408, .n_head = 40, .n_kv = 8},
    {.name = "qwen3-32b", QWEN3, .n_layer = 64, .dim = 5120, .n_ff = 25600, .n_head = 64, .n_kv = 8},
    {.name = "qwen3-30b-a3b", QWEN3_30B, .n_ctx = 40960, .rope_base = 1e6},
    {.name = "qwen3-30b-a3b-2507", QWEN3_30B, .n_ctx = 262144, .rope_base = 1e7},
    {.name = "qwen3.8-27b", .aliases = "qwen3.6-27b qwen3.5-27b", QWEN35_27B},
    {.name = "qwen3.8-27b-mtp", .aliases = "qwen3.6-27b-mtp qwen3.5-27b-mtp", QWEN35_27B, .n_mtp = 1},
    {.name = "qwen3.5-9b",
     QWEN35,
     .n_layer = 32,
     .dim = 4096,
     .n_ff = 12288,
     .n_head = 16,
     .n_kv = 4,
     .n_value_head = 32},
    {.name = "qwen3.5-4b",
     QWEN35,
     .n_layer = 32,
     .dim = 2560,
     .n_ff = 9216,
     .n_head = 16,
     .n_kv = 4,
     .n_value_head = 32,
     .tied = true},
    {.name = "qwen3.5-0.8b",
     QWEN35,
     .n_layer = 24,
     .dim = 1024,
     .n_ff = 3584,
     .n_head = 8,
     .n_kv = 2,
     .n_value_head = 16,
     .tied = true},
    {.name = "qwen3.6-35b-a3b",
     .aliases = "qwen3.5-35b-a3b",
     .arch = "qwen35moe",
     .n_vocab = 248320,
     HYBRID,
     .n_layer = 40,
     .dim = 2048,
     .n_head = 16,
     .n_kv = 2,
     .n_value_head = 32,
     .n_expert = 256,
     .n_expert_used = 8,
     .n_ff_expert = 512,
     .n_ff_shared = 512},
    {.name = "qwen3-next-80b-a3b",
     .arch = "qwen3next",
     .n_vocab = 151936,
     HYBRID,
     .n_layer = 48,
     .dim = 2048,
     .n_head = 16,
     .n_kv = 2,
     .n_value_head = 32,
     .n_expert = 512,
     .n_expert_used = 10,
     .n_ff_expert = 512,
     .n_ff_shared = 512},
    {.name = "llama-3.1-8b",
     .arch = "llama",
     ATTN_ONLY,
     .n_layer = 32,
     .dim = 4096,
     .n_ff = 14336,
     .n_head = 32,
     .n_kv = 8,
     .head_dim = 128,
     .n_rot = 128,
     .n_vocab = 128256,
     .n_ctx = 131072,
     .rope_base = 5e5,
     .eps = 1e-5,
     .rope_divisor_factor = 8},
    {.name = "mistral-small-24b",
     .aliases = "mistral-small-24b-2501",
     .arch = "llama",
     ATTN_ONLY,
     .n_layer = 40,
     .dim = 5120,
     .n_ff = 32768,
     .n_head = 32,
     .n_kv = 8,
     .head_dim = 128,
     .n_rot = 128,
     .n_vocab = 131072,
     .n_ctx = 32768,
     .rope_base = 1e8,
     .eps = 1e-5},
    {.name = "gemma3-27b",
     .aliases = "gemma-3-27b",
     .arch = "gemma3",
     .n_layer = 62,
     .dim = 5376,
     .n_ff = 21504,
     .n_head = 32,
     .n_kv = 16,
     .head_dim = 128,
     .n_rot = 128,
     .n_vocab = 262144,
     .n_ctx = 131072,
     .rope_base = 1e6,
     .rope_base_local = 1e4,
     .eps = 1e-6,
     .tied = true,
     .full_interval = 1,
     .rope_factor = 8,
     .window = 1024,
     .window_pattern = 6},
    {.name = "generic-27b",
     .arch = "llama",
     ATTN_ONLY,
     .n_layer = 40,
     .dim = 5120,
     .n_ff = 38912,
     .n_head = 40,
     .n_kv = 4,
     .head_dim = 128,
     .n_rot = 128,
     .n_vocab = 152064,
     .n_ctx = 262144,
     .rope_base = 1e6,
     .eps = 1e-6,
     .tied = true,
     .published_params = 27e9,
     .published_bytes = 14.5e9},
};

enum { N_SHAPE = sizeof shapes / sizeof *shapes };

int shape_count(void) {
    return N_SHAPE;
}

const struct shape *shape_at(int i) {
    return &shapes[i];
}

/* Is `name` (n bytes) one of the words of `list`? */
static bool in_words(const char *list, const char *name, size_t n) {
    while (list && *list) {
        size_t word = strcspn(list, " ");
        if (word == n && !strncasecmp(list, name, n)) return true;
        list += word + (list[word] == ' ');
    }
    return false;
}

static const struct shape *find(const char *name, size_t n) {
    for (int i = 0; i < N_SHAPE; i++)
        if (in_words(shapes[i].name, name, n) || in_words(shapes[i].aliases, name, n)) return &shapes[i];
    return NULL;
}

const struct shape *shape_find(const char *name) {
    return find(name, strlen(name));
}

int shape_parse(const struct shape **shape, enum mix *mix, const char *text) {
    char known[900] = "";
    size_t n = strcspn(text, ":");
    const struct shape *s = find(text, n);
    if (!s) {
        for (int i = 0, at = 0; i < N_SHAPE && at < (int)sizeof known; i++)
            at += snprintf(known + at, sizeof known - (size_t)at, "%s%s", i ? ", " : "", shapes[i].name);
        return err_set(ERR_ARG, "shape %.*s is unknown; known are %s", (int)n, text, known);
    }
    bool published = s->published_bytes > 0 && (!text[n] || !strcasecmp(text + n, ":q4"));
    int m = published ? SHAPE_PUBLISHED_MIX : text[n] ? mix_from_name(text + n + 1) : MIX_Q4_K_M;
    if (m < 0) {
        for (int i = 0, at = 0; i < MIX_COUNT && at < (int)sizeof known; i++)
            at += snprintf(known + at, sizeof known - (size_t)at, "%s%s", i ? ", " : "", mix_name((enum mix)i));
        return err_set(ERR_ARG, "shape %s: type %s is unknown; known are %s", text, text + n + 1, known);
    }
    *shape = s;
    *mix = (enum mix)m;
    return 0;
}

/* --- tensors ------------------------------------------------------------------------------------------------------------ */

enum { MAX_BLOCK_TENSORS = 32 };

/* Tensors of one block before they are sorted. */
struct list {
    struct shape_tensor t[MAX_BLOCK_TENSORS];
    int n;
    int block; /* -1: globals */
};

static void add(struct list *l, const char *name, int64_t d0, int64_t d1, int64_t d2) {
    struct shape_tensor *t = &l->t[l->n++];
    if (l->block < 0)
        snprintf(t->name, sizeof t->name, "%s", name);
    else
        snprintf(t->name, sizeof t->name, "blk.%d.%s", l->block, name);
    t->n_dims = d2 ? 3 : d1 ? 2 : 1;
    t->dims[0] = d0;
    t->dims[1] = d1 ? d1 : 1;
    t->dims[2] = d2 ? d2 : 1;
    t->dims[3] = 1;
}

static bool is_hybrid(const struct shape *s) {
    return s->full_interval > 1;
}

static void add_attention(struct list *l, const struct shape *s) {
    int64_t d = s->dim, q = (int64_t)s->n_head * s->head_dim, kv = (int64_t)s->n_kv * s->head_dim;
    /* In hybrids each query head brings a gate of its size. */
    add(l, "attn_q.weight", d, is_hybrid(s) ? 2 * q : q, 0);
    add(l, "attn_k.weight", d, kv, 0);
    add(l, "attn_v.weight", d, kv, 0);
    add(l, "attn_output.weight", q, d, 0);
    if (!strcmp(s->arch, "qwen2")) {
        add(l, "attn_q.bias", q, 0, 0);
        add(l, "attn_k.bias", kv, 0, 0);
        add(l, "attn_v.bias", kv, 0, 0);
    }
    if (strcmp(s->arch, "qwen2") && strcmp(s->arch, "llama")) {
        add(l, "attn_q_norm.weight", s->head_dim, 0, 0);
        add(l, "attn_k_norm.weight", s->head_dim, 0, 0);
    }
}

static void add_delta(struct list *l, const struct shape *s) {
    int64_t d = s->dim, hv = s->n_value_head;
    int64_t kd = (int64_t)s->n_key_head * s->state_dim, vd = hv * s->state_dim;
    add(l, "attn_qkv.weight", d, 2 * kd + vd, 0);
    add(l, "attn_gate.weight", d, vd, 0);
    add(l, "ssm_conv1d.weight", s->n_conv, 2 * kd + vd, 0);
    add(l, "ssm_dt.bias", hv, 0, 0);
    add(l, "ssm_a", hv, 0, 0);
    if (!strcmp(s->arch, "qwen3next")) {
        add(l, "ssm_ba.weight", d, 2 * hv, 0);
    } else {
        add(l, "ssm_alpha.weight", d, hv, 0);
        add(l, "ssm_beta.weight", d, hv, 0);
    }
    add(l, "ssm_norm.weight", s->state_dim, 0, 0);
    add(l, "ssm_out.weight", vd, d, 0);
}

static void add_ffn(struct list *l, const struct shape *s) {
    int64_t d = s->dim, e = s->n_expert, fe = s->n_ff_expert, fs = s->n_ff_shared;
    if (!e) {
        add(l, "ffn_gate.weight", d, s->n_ff, 0);
        add(l, "ffn_up.weight", d, s->n_ff, 0);
        add(l, "ffn_down.weight", s->n_ff, d, 0);
        return;
    }
    add(l, "ffn_gate_inp.weight", d, e, 0);
    add(l, "ffn_gate_exps.weight", d, fe, e);
    add(l, "ffn_up_exps.weight", d, fe, e);
    add(l, "ffn_down_exps.weight", fe, d, e);
    if (!fs) return;
    add(l, "ffn_gate_inp_shexp.weight", d, 0, 0);
    add(l, "ffn_gate_shexp.weight", d, fs, 0);
    add(l, "ffn_up_shexp.weight", d, fs, 0);
    add(l, "ffn_down_shexp.weight", fs, d, 0);
}

static bool has_attention(const struct shape *s, int il) {
    return il >= s->n_layer || (il + 1) % s->full_interval == 0;
}

static void add_block(struct list *l, const struct shape *s, bool attention, bool mtp) {
    int64_t d = s->dim;
    add(l, "attn_norm.weight", d, 0, 0);
    if (attention)
        add_attention(l, s);
    else
        add_delta(l, s);
    /* The norm before the FFN is called post_attention_norm in hybrids; gemma3 has both of these and one after it. */
    bool gemma = !strcmp(s->arch, "gemma3");
    if (is_hybrid(s) || gemma) add(l, "post_attention_norm.weight", d, 0, 0);
    if (!is_hybrid(s)) add(l, "ffn_norm.weight", d, 0, 0);
    if (gemma) add(l, "post_ffw_norm.weight", d, 0, 0);
    add_ffn(l, s);
    if (!mtp) return;
    add(l, "nextn.eh_proj.weight", 2 * d, d, 0);
    add(l, "nextn.enorm.weight", d, 0, 0);
    add(l, "nextn.hnorm.weight", d, 0, 0);
    add(l, "nextn.shared_head_norm.weight", d, 0, 0);
}

static void add_globals(struct list *l, const struct shape *s) {
    add(l, "token_embd.weight", s->dim, s->n_vocab, 0);
    add(l, "output_norm.weight", s->dim, 0, 0);
    if (!s->tied) add(l, "output.weight", s->dim, s->n_vocab, 0);
    if (s->rope_divisor_factor > 0) add(l, "rope_freqs.weight", s->n_rot / 2, 0, 0);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct shape_tensor *)a)->name, ((const struct shape_tensor *)b)->name);
}

static int emit(struct list *l, struct mix_state *mix, shape_tensor_fn fn, void *ctx) {
    qsort(l->t, (size_t)l->n, sizeof l->t[0], by_name);
    int rc = 0;
    for (int i = 0; i < l->n && !rc; i++) {
        struct shape_tensor *t = &l->t[i];
        t->type = mix_type(mix, t->name, t->n_dims, t->dims);
        size_t row = 0;
        quant_row_bytes(&row, t->type, t->dims[0]); /* mix_type gives a type that fits the row */
        t->bytes = row * (size_t)(t->dims[1] * t->dims[2]);
        rc = fn(ctx, t);
    }
    return rc;
}

int shape_tensors(const struct shape *s, enum mix mix, bool pure, int n_layer, shape_tensor_fn fn, void *ctx) {
    int main_layers = n_layer > 0 && n_layer < s->n_layer ? n_layer : s->n_layer;
    struct mix_model model = {.n_block = main_layers + s->n_mtp,
                              .n_head = s->n_head,
                              .n_kv = s->n_kv,
                              .n_expert = s->n_expert,
                              .n_attn_v = main_layers + s->n_mtp, /* every block has attn_v or attn_qkv */
                              .tied = s->tied};
    struct mix_state state;
    mix_begin(&state, mix, pure, &model);
    struct list *l = malloc(sizeof *l);
    if (!l) return err_set(ERR_NOMEM, "shape %s: out of memory", s->name);
    l->n = 0;
    l->block = -1;
    add_globals(l, s);
    int rc = emit(l, &state, fn, ctx);
    for (int b = 0; b < model.n_block && !rc; b++) {
        bool mtp = b >= main_layers;
        l->n = 0;
        l->block = b;
        add_block(l, s, mtp || has_attention(s, b), mtp);
        rc = emit(l, &state, fn, ctx);
    }
    free(l);
    return rc;
}

static int add_up(void *ctx, const struct shape_tensor *t) {
    struct shape_totals *sum = ctx;
    sum->params += (uint64_t)(t->dims[0] * t->dims[1] * t->dims[2]);
    sum->bytes += t->bytes;
    sum->n_tensors++;
    return 0;
}

void shape_totals(struct shape_totals *out, const struct shape *s, enum mix mix) {
    *out = (struct shape_totals){0};
    shape_tensors(s, mix, false, 0, add_up, out);
}

int shape_n_attn(const struct shape *s) {
    int n = 0;
    for (int il = 0; il < s->n_layer; il++) n += has_attention(s, il);
    return n;
}
