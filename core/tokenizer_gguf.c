/* tokenizer_gguf.c: the tokenizer.ggml.* keys of a GGUF file as a struct tokenizer_spec. Checks what only the file can
 * get wrong (presence, type, length, range); tokenizer_open checks the rest. */
#include <stdlib.h>
#include <string.h>

#include "core/err.h"
#include "core/gguf.h"
#include "core/tokenizer.h"

#define KEY(name) "tokenizer.ggml." name

struct source {
    const struct gguf *g;
    struct tokenizer_spec spec;
    char model[64], pre[64];
    struct tok_str *tokens, *merges;
    float *scores;
    int32_t *types;
};

/* A short string as a C string; GGUF_ABSENT when there is no such key. A NUL inside makes it an unknown name. */
static int read_name(const struct source *s, const char *key, char dst[64]) {
    const char *p;
    size_t n;
    int rc = gguf_str(s->g, key, &p, &n);
    if (!rc) gguf_printable(dst, 64, p, n);
    return rc;
}

/* An array of strings; GGUF_ABSENT when there is no such key. */
static int read_strings(const struct source *s, const char *key, struct tok_str **out, int32_t *n) {
    const struct gguf_kv *kv;
    int rc = gguf_arr(s->g, key, &kv);
    if (rc) return rc;
    if (kv->elem_type != GGUF_STR)
        return err_set(ERR_FORMAT, "%s: %s is an array of %s, expected strings", gguf_path(s->g, 0), key,
                       gguf_type_name(kv->elem_type));
    if (kv->n > INT32_MAX / 2)
        return err_set(ERR_FORMAT, "%s: %s has %lld entries, limit 2^30", gguf_path(s->g, 0), key, (long long)kv->n);
    *out = calloc((size_t)kv->n + 1, sizeof **out);
    if (!*out) return err_set(ERR_NOMEM, "%s: out of memory for %lld entries of %s", gguf_path(s->g, 0), (long long)kv->n, key);
    for (int64_t i = 0; i < kv->n; i++) (*out)[i].p = gguf_elem_str(kv, i, &(*out)[i].n);
    *n = (int32_t)kv->n;
    return 0;
}

static int read_required(const struct source *s, const char *key, struct tok_str **out, int32_t *n) {
    int rc = read_strings(s, key, out, n);
    return rc == GGUF_ABSENT ? err_set(ERR_FORMAT, "%s: no %s", gguf_path(s->g, 0), key) : rc;
}

/* A number per token; GGUF_ABSENT when there is no such key. */
static int find_per_token(const struct source *s, const char *key, const struct gguf_kv **kv) {
    int rc = gguf_arr(s->g, key, kv);
    if (!rc && (*kv)->n != s->spec.n_vocab)
        return err_set(ERR_FORMAT, "%s: %s has %lld entries, the vocabulary %d", gguf_path(s->g, 0), key,
                       (long long)(*kv)->n, s->spec.n_vocab);
    return rc;
}

static int read_scores(struct source *s) {
    const struct gguf_kv *kv;
    int rc = find_per_token(s, KEY("scores"), &kv);
    if (rc) return rc == GGUF_ABSENT ? 0 : rc;
    s->scores = malloc((size_t)kv->n * sizeof *s->scores);
    if (!s->scores) return err_set(ERR_NOMEM, "%s: out of memory for the vocabulary", gguf_path(s->g, 0));
    for (int64_t i = 0; i < kv->n; i++) {
        double v;
        if (!gguf_elem_f64(kv, i, &v))
            return err_set(ERR_FORMAT, "%s: %s is an array of %s, expected numbers", gguf_path(s->g, 0), KEY("scores"),
                           gguf_type_name(kv->elem_type));
        s->scores[i] = (float)v;
    }
    s->spec.scores = s->scores;
    return 0;
}

static int read_types(struct source *s) {
    const struct gguf_kv *kv;
    int rc = find_per_token(s, KEY("token_type"), &kv);
    if (rc) return rc == GGUF_ABSENT ? 0 : rc;
    s->types = malloc((size_t)kv->n * sizeof *s->types);
    if (!s->types) return err_set(ERR_NOMEM, "%s: out of memory for the vocabulary", gguf_path(s->g, 0));
    for (int64_t i = 0; i < kv->n; i++) {
        int64_t v;
        if (!gguf_elem_i64(kv, i, &v) || v < INT32_MIN || v > INT32_MAX)
            return err_set(ERR_FORMAT, "%s: %s entry %lld is not a token type", gguf_path(s->g, 0), KEY("token_type"),
                           (long long)i);
        s->types[i] = (int32_t)v;
    }
    s->spec.types = s->types;
    return 0;
}

static int read_id(const struct source *s, int32_t *id, const char *key) {
    uint64_t v;
    int rc = gguf_u64(s->g, key, &v);
    if (rc) return rc == GGUF_ABSENT ? 0 : rc;
    if (v >= (uint64_t)s->spec.n_vocab)
        return err_set(ERR_FORMAT, "%s: %s is %llu, the vocabulary has %d tokens", gguf_path(s->g, 0), key,
                       (unsigned long long)v, s->spec.n_vocab);
    *id = (int32_t)v;
    return 0;
}

static int read_ids(struct source *s) {
    const struct {
        int32_t *id;
        const char *key;
    } ids[] = {
        {&s->spec.bos, KEY("bos_token_id")},         {&s->spec.eos, KEY("eos_token_id")},
        {&s->spec.eot, KEY("eot_token_id")},         {&s->spec.eom, KEY("eom_token_id")},
        {&s->spec.unk, KEY("unknown_token_id")},     {&s->spec.pad, KEY("padding_token_id")},
        {&s->spec.fim_pad, KEY("fim_pad_token_id")}, {&s->spec.fim_rep, KEY("fim_rep_token_id")},
        {&s->spec.fim_sep, KEY("fim_sep_token_id")},
    };
    int rc = 0;
    for (size_t i = 0; !rc && i < sizeof ids / sizeof *ids; i++) rc = read_id(s, ids[i].id, ids[i].key);
    return rc;
}

static int read_switch(const struct source *s, int *out, const char *key) {
    bool v;
    int rc = gguf_bool(s->g, key, &v);
    if (!rc) *out = v;
    return rc == GGUF_ABSENT ? 0 : rc;
}

static int read_all(struct source *s, const char *pre) {
    int rc = read_name(s, KEY("model"), s->model);
    if (rc == GGUF_ABSENT) return err_set(ERR_FORMAT, "%s: no %s", gguf_path(s->g, 0), KEY("model"));
    s->spec.model = s->model;
    if (!rc) rc = read_name(s, KEY("pre"), s->pre);
    if (rc < 0) return rc;
    s->spec.pre = pre ? pre : rc ? NULL : s->pre;
    rc = read_required(s, KEY("tokens"), &s->tokens, &s->spec.n_vocab);
    s->spec.tokens = s->tokens;
    if (!rc && s->spec.n_vocab == 0) rc = err_set(ERR_FORMAT, "%s: %s is empty", gguf_path(s->g, 0), KEY("tokens"));
    if (!rc && !strcmp(s->model, "gpt2")) rc = read_required(s, KEY("merges"), &s->merges, &s->spec.n_merges);
    s->spec.merges = s->merges;
    if (!rc) rc = read_scores(s);
    if (!rc) rc = read_types(s);
    if (!rc) rc = read_ids(s);
    if (!rc) rc = read_switch(s, &s->spec.add_bos, KEY("add_bos_token"));
    if (!rc) rc = read_switch(s, &s->spec.add_eos, KEY("add_eos_token"));
    return rc ? rc : read_switch(s, &s->spec.add_space_prefix, KEY("add_space_prefix"));
}

int tokenizer_from_gguf_as(struct tokenizer **out, const struct gguf *g, const char *pre) {
    struct source s = {.g = g, .spec = TOKENIZER_SPEC_NONE};
    int rc = read_all(&s, pre);
    if (!rc) rc = tokenizer_open(out, &s.spec);
    free(s.tokens);
    free(s.merges);
    free(s.scores);
    free(s.types);
    return rc;
}

int tokenizer_from_gguf(struct tokenizer **out, const struct gguf *g) { return tokenizer_from_gguf_as(out, g, NULL); }
