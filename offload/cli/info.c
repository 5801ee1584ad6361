/* info.c: see info.h. */
#include "offload/cli/info.h"

#include "core/chat.h"
#include "core/err.h"
#include "core/kv.h"
#include "core/quant.h"
#include "core/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A string key made printable; "" if absent or of another type. */
static void text_key(const struct gguf *g, const char *key, char *dst, size_t cap) {
    const struct gguf_kv *kv = gguf_find(g, key);
    size_t n;
    const char *p = kv && kv->type == GGUF_STR ? gguf_elem_str(kv, 0, &n) : NULL;
    dst[0] = 0;
    if (p) gguf_printable(dst, cap, p, n);
}

/* An integer of the architecture, of its first layer where it is an array; -1: absent. */
static int64_t arch_key(const struct info *i, const char *suffix) {
    char key[192];
    int64_t v;
    snprintf(key, sizeof key, "%s.%s", i->arch, suffix);
    const struct gguf_kv *kv = gguf_find(i->g, key);
    return kv && kv->n > 0 && kv->type != GGUF_STR && gguf_elem_i64(kv, 0, &v) ? v : -1;
}

static void read_sizes(struct info *i) {
    i->n_layer = arch_key(i, "block_count");
    i->dim = arch_key(i, "embedding_length");
    i->n_ff = arch_key(i, "feed_forward_length");
    i->n_head = arch_key(i, "attention.head_count");
    i->n_kv = arch_key(i, "attention.head_count_kv");
    i->n_ctx = arch_key(i, "context_length");
    i->n_expert = arch_key(i, "expert_count");
    i->n_expert_used = arch_key(i, "expert_used_count");
}

static struct info_type *type_row(struct info *i, int32_t type) {
    int k = 0;
    while (k < i->n_type && i->types[k].type != type) k++;
    if (k == INFO_TYPES) return &i->types[INFO_TYPES - 1]; /* that many unknown types are one pile of nonsense */
    if (k == i->n_type) i->types[i->n_type++] = (struct info_type){.type = type};
    return &i->types[k];
}

static int most_bytes_first(const void *a, const void *b) {
    const struct info_type *x = a, *y = b;
    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

static void count_tensors(struct info *i) {
    for (int k = 0; k < gguf_n_tensors(i->g); k++) {
        const struct gguf_tensor *t = gguf_tensor(i->g, k);
        struct info_type *row = type_row(i, t->type);
        uint64_t n = (uint64_t)(t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]); /* below 2^63: checked by gguf_open */
        row->n_tensor++;
        row->n_weight += n;
        row->bytes += t->bytes;
        i->n_weight += n;
        i->tensor_bytes += t->bytes;
        if (i->runs && !model_uses(&i->m, t)) i->n_unread++;
    }
    qsort(i->types, (size_t)i->n_type, sizeof *i->types, most_bytes_first);
}

/* Unknown architectures and files without tensors are described all the same; unsound ones are refused. */
static int read_model(struct info *i) {
    int rc = model_open(&i->m, i->g);
    i->runs = !rc;
    if (!rc) return 0;
    snprintf(i->why, sizeof i->why, "%s", err_text());
    return rc == ERR_UNSUPPORTED || (rc == ERR_FORMAT && !gguf_n_tensors(i->g)) ? 0 : rc;
}

static int read_tokenizer(struct info *i) {
    const struct gguf_kv *merges = gguf_find(i->g, "tokenizer.ggml.merges");
    text_key(i->g, "tokenizer.ggml.model", i->tok_model, sizeof i->tok_model);
    text_key(i->g, "tokenizer.ggml.pre", i->tok_pre, sizeof i->tok_pre);
    i->n_merges = merges && merges->type == GGUF_ARR ? merges->n : 0;
    if (!gguf_find(i->g, "tokenizer.ggml.model") && !gguf_find(i->g, "tokenizer.ggml.tokens")) return 0;
    int rc = tokenizer_from_gguf(&i->tok, i->g);
    if (rc != ERR_UNSUPPORTED) return rc;
    snprintf(i->tok_why, sizeof i->tok_why, "%s", err_text());
    return 0;
}

static int read_template(struct info *i) {
    const char *p;
    size_t n;
    struct chat_template *t = NULL;
    int rc = gguf_str(i->g, "tokenizer.chat_template", &p, &n);
    i->template_bytes = -1;
    if (rc) return rc < 0 ? rc : 0;
    i->template_bytes = (int64_t)n;
    rc = chat_open(&t, p, n, i->arch);
    if (!rc) snprintf(i->family, sizeof i->family, "%s", chat_name(t));
    chat_close(t);
    return rc == ERR_UNSUPPORTED ? 0 : rc;
}

static int kv_bytes(struct info *i) {
    static const int types[INFO_KV] = {QT_F32, QT_F16, QT_BF16, QT_Q8_0, QT_Q4_0};
    struct kv_shape *shapes = calloc((size_t)i->m.n_layer, sizeof *shapes);
    struct kv_layer *layers = calloc((size_t)i->m.n_layer, sizeof *layers);
    int rc = shapes && layers ? 0 : err_set(ERR_NOMEM, "out of memory");
    for (int k = 0; k < INFO_KV && !rc; k++) {
        size_t bytes;
        i->kv[k].type = types[k];
        for (int il = 0; il < i->m.n_layer; il++) {
            const struct layer *l = &i->m.layers[il];
            shapes[il] = (struct kv_shape){.n_kv = l->n_kv, .head_dim_k = l->head_dim_k, .head_dim_v = l->head_dim_v};
        }
        struct kv_spec spec = {.n_layer = i->m.n_layer, .shapes = shapes, .n_ctx = KV_PAGE, .n_tok = 1, .type_k = types[k],
                               .type_v = types[k]};
        if (kv_plan(layers, &bytes, &spec)) continue;
        for (int il = 0; il < i->m.n_layer; il++) {
            double one = (double)layers[il].page_bytes / KV_PAGE;
            i->kv[k].all += one;
            if (!i->m.layers[il].window) i->kv[k].global += one;
        }
    }
    free(shapes);
    free(layers);
    return rc;
}

int info_open(struct info *i, const char *path) {
    memset(i, 0, sizeof *i);
    int rc = gguf_open(&i->g, path);
    if (rc) return rc;
    for (int s = 0; s < gguf_n_shard(i->g); s++) i->file_bytes += gguf_file_bytes(i->g, s);
    text_key(i->g, "general.architecture", i->arch, sizeof i->arch);
    text_key(i->g, "general.name", i->name, sizeof i->name);
    read_sizes(i);
    rc = read_model(i);
    if (!rc) count_tensors(i);
    if (!rc) rc = read_tokenizer(i);
    if (!rc) rc = read_template(i);
    if (!rc && i->runs) rc = kv_bytes(i);
    if (rc) info_close(i);
    return rc;
}

void info_close(struct info *i) {
    tokenizer_close(i->tok);
    if (i->runs) model_close(&i->m);
    gguf_close(i->g);
    memset(i, 0, sizeof *i);
}
