/* tokenizer.c: opening a vocabulary, encoding a text (special tokens, then the ranges between them), accessors.
 * How a range becomes ids is in tokenizer_bpe.c and tokenizer_spm.c. */
#include "core/tokenizer_impl.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/err.h"
#include "core/mem.h"
#include "core/tokenizer_merge.h"

/* --- open --- */

static int add_tokens(struct tokenizer *t, const struct tokenizer_spec *spec) {
    size_t bytes = 0;
    for (int32_t i = 0; i < t->n_vocab; i++) bytes += spec->tokens[i].n;
    int rc = tok_symbols_open(&t->sym, (size_t)t->n_vocab, bytes);
    for (int32_t i = 0; !rc && i < t->n_vocab; i++) {
        char empty[24];
        struct tok_str s = spec->tokens[i];
        if (!s.n) s = (struct tok_str){empty, (size_t)snprintf(empty, sizeof empty, "[EMPTY_%d]", i)};
        rc = tok_symbols_add(&t->sym, s.p, s.n);
    }
    return rc;
}

static int set_types(struct tokenizer *t, const int32_t *types) {
    t->type = malloc((size_t)t->n_vocab);
    t->eog = calloc((size_t)t->n_vocab, 1);
    if (!t->type || !t->eog) return err_set(ERR_NOMEM, "tokenizer: out of memory for %d tokens", t->n_vocab);
    for (int32_t i = 0; i < t->n_vocab; i++) {
        int32_t type = types ? types[i] : TOK_NORMAL;
        if (type < 0 || type > TOK_BYTE)
            return err_set(ERR_FORMAT, "tokenizer.ggml.token_type: type of token %d is %d, known are 1 to %d", i, type, TOK_BYTE);
        t->type[i] = (uint8_t)(type ? type : TOK_NORMAL); /* 0, "undefined", is an ordinary word */
    }
    return 0;
}

/* An id from the file, or the default of the model where the file has none. */
static int set_id(const struct tokenizer *t, int32_t *out, const char *key, int32_t id, int32_t fallback) {
    if (id < -1 || id >= t->n_vocab)
        return err_set(ERR_FORMAT, "tokenizer.ggml.%s: id %d, the vocabulary has %d tokens", key, id, t->n_vocab);
    *out = id >= 0 ? id : fallback < t->n_vocab ? fallback : -1;
    return 0;
}

static int set_ids(struct tokenizer *t, const struct tokenizer_spec *s) {
    bool spm = t->model == TOK_MODEL_SPM;
    /* Model gpt2 without a bos or eos: 11, which is right for Falcon and a comma elsewhere. */
    int32_t bpe_default = t->n_vocab > 11 && t->type[11] == TOK_CONTROL ? 11 : -1;
    int rc = set_id(t, &t->bos, "bos_token_id", s->bos, spm ? 1 : bpe_default);
    if (!rc) rc = set_id(t, &t->eos, "eos_token_id", s->eos, spm ? 2 : bpe_default);
    if (!rc) rc = set_id(t, &t->unk, "unknown_token_id", s->unk, spm ? 0 : -1);
    if (!rc) rc = set_id(t, &t->eot, "eot_token_id", s->eot, -1);
    if (!rc) rc = set_id(t, &t->eom, "eom_token_id", s->eom, -1);
    if (!rc) rc = set_id(t, &t->pad, "padding_token_id", s->pad, -1);
    bool add_bos = spm || (t->pre && pre_adds_bos(t->pre));
    t->add_bos = t->bos >= 0 && (s->add_bos < 0 ? add_bos : s->add_bos);
    t->add_eos = t->eos >= 0 && s->add_eos > 0;
    return rc;
}

/* Texts of tokens that end a generation, in any vocabulary. */
static const char *const eog_texts[] = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\xEF\xBD\x9C" "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>", /* DeepSeek */
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
};

static int set_eog(struct tokenizer *t, const struct tokenizer_spec *s) {
    for (size_t i = 0; i < sizeof eog_texts / sizeof *eog_texts; i++) {
        int32_t id = tokenizer_find(t, eog_texts[i]);
        /* Qwen's vocabulary has the word "</s>", as it occurs in HTML: no end of anything. */
        if (id >= 0 && !(t->type[id] == TOK_NORMAL && !strcmp(eog_texts[i], "</s>"))) t->eog[id] = 1;
    }
    const struct {
        const char *key;
        int32_t id;
    } ends[] = {{"eos_token_id", t->eos},
                {"eot_token_id", t->eot},
                {"eom_token_id", t->eom},
                {"fim_pad_token_id", s->fim_pad},
                {"fim_rep_token_id", s->fim_rep},
                {"fim_sep_token_id", s->fim_sep}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        int32_t id = -1;
        int rc = set_id(t, &id, ends[i].key, ends[i].id, -1);
        if (rc) return rc;
        if (id >= 0) t->eog[id] = 1;
    }
    /* gpt-oss: a message ends with <|end|> and the model goes on to the next one. */
    int32_t end = tokenizer_find(t, "<|end|>");
    if (end >= 0 && tokenizer_find(t, "<|return|>") >= 0 && tokenizer_find(t, "<|call|>") >= 0) t->eog[end] = end == t->eos;
    return 0;
}

static int open_model(struct tokenizer *t, const struct tokenizer_spec *spec) {
    int rc = add_tokens(t, spec);
    if (!rc) rc = set_types(t, spec->types);
    if (!rc) rc = tok_pieces_open(t);
    if (!rc) rc = t->model == TOK_MODEL_BPE ? tok_bpe_open(t, spec) : tok_spm_open(t, spec);
    if (!rc) rc = set_ids(t, spec);
    if (!rc) rc = set_eog(t, spec);
    return rc ? rc : special_open(&t->special, &t->sym, t->type, t->n_vocab);
}

int tokenizer_open(struct tokenizer **out, const struct tokenizer_spec *spec) {
    if (!spec->model) return err_set(ERR_FORMAT, "tokenizer.ggml.model: missing");
    bool bpe = !strcmp(spec->model, "gpt2");
    if (!bpe && strcmp(spec->model, "llama"))
        return err_set(ERR_UNSUPPORTED, "tokenizer.ggml.model: no tokenizer \"%.64s\" here, only gpt2 and llama", spec->model);
    if (spec->n_vocab < 1 || !spec->tokens) return err_set(ERR_FORMAT, "tokenizer.ggml.tokens: no tokens");
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_set(ERR_NOMEM, "tokenizer: out of memory");
    t->model = bpe ? TOK_MODEL_BPE : TOK_MODEL_SPM;
    t->n_vocab = spec->n_vocab;
    int rc = open_model(t, spec);
    if (rc) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

void tokenizer_close(struct tokenizer *t) {
    if (!t) return;
    special_close(t->special);
    pre_close(t->pre);
    tok_symbols_close(&t->sym);
    free(t->type);
    free(t->eog);
    free(t->piece);
    free(t->piece_off);
    free(t->merge);
    free(t->joined);
    free(t->rank);
    free(t);
}

/* --- scratch of a pass --- */

static int no_memory(const struct tok_pass *ps) {
    return err_set(ERR_NOMEM, "tokenizer: out of memory after %zu tokens", ps->n_ids);
}

int tok_pass_emit(struct tok_pass *ps, int32_t id) {
    if (ps->n_ids == ps->cap_ids) {
        size_t cap = ps->cap_ids * 2;
        int32_t *ids = realloc(ps->ids, cap * sizeof *ids);
        if (!ids) return no_memory(ps);
        ps->ids = ids;
        ps->cap_ids = cap;
    }
    ps->ids[ps->n_ids++] = id;
    return 0;
}

static size_t grown(size_t cap, size_t n) {
    if (cap < MERGE_LONG) cap = MERGE_LONG;
    while (cap < n) cap *= 2;
    return cap;
}

static void queue_free(struct merge_queue *q) {
    if (!q) return;
    mem_free(q->fifo);
    mem_free(q->ranks);
    mem_free(q->pool);
    mem_free(q->heap);
    free(q);
}

/* mem_alloc: words of megabytes need tens of megabytes, and faulting them in page by page would cost more than the
 * merging. */
static void *scratch(size_t n, size_t bytes) { return mem_alloc(size_mul3(n, bytes, 1), 64, "a long word"); }

int tok_pass_reserve_nodes(struct tok_pass *ps, size_t n) {
    if (n <= ps->cap_nodes) return 0;
    size_t cap = grown(ps->cap_nodes, n);
    ps->cap_nodes = 0;
    mem_free(ps->node);
    queue_free(ps->queue);
    ps->node = scratch(cap, sizeof *ps->node);
    struct merge_queue *q = ps->queue = calloc(1, sizeof *q);
    if (!ps->node || !q) return no_memory(ps);
    q->heap = scratch(cap, 2 * sizeof *q->heap);
    if (!q->heap) return no_memory(ps);
    if (cap > MERGE_LONG) {
        q->pool = scratch(3 * cap + 1, sizeof *q->pool);
        q->fifo = scratch(ps->t->n_ranks + 1, sizeof *q->fifo);
        q->ranks = scratch(ps->t->n_ranks + 1, sizeof *q->ranks);
        if (!q->pool || !q->fifo || !q->ranks) return no_memory(ps);
    }
    ps->cap_nodes = cap;
    return 0;
}

int tok_pass_reserve_word(struct tok_pass *ps, size_t n) {
    if (n <= ps->cap_word) return 0;
    size_t cap = grown(ps->cap_word, n);
    free(ps->word);
    ps->cap_word = 0;
    ps->word = malloc(cap);
    if (!ps->word) return no_memory(ps);
    ps->cap_word = cap;
    return 0;
}

static int repeat(struct tok_pass *ps, const struct tok_cache_slot *c) {
    for (uint32_t i = 0; i < c->n_ids; i++) {
        int rc = tok_pass_emit(ps, ps->ids[c->first + i]);
        if (rc) return rc;
    }
    return 0;
}

int tok_pass_word(struct tok_pass *ps, size_t begin, size_t end, tok_word_fn encode) {
    const char *word = ps->text + begin;
    size_t n = end - begin;
    if (n > TOK_MAX_WORD) return err_set(ERR_ARG, "text: the word at byte %zu has %zu bytes, limit 256 MiB", begin, n);
    uint64_t hash = tok_hash(word, n);
    struct tok_cache_slot *c = &ps->cache[hash & ps->cache_mask];
    if (c->hash == hash && c->n_text == n && !memcmp(ps->text + c->text, word, n)) return repeat(ps, c);
    size_t first = ps->n_ids;
    int rc = encode(ps, word, n);
    if (!rc) *c = (struct tok_cache_slot){hash, begin, first, (uint32_t)n, (uint32_t)(ps->n_ids - first)};
    return rc;
}

static int pass_open(struct tok_pass *ps, const struct tokenizer *t, const char *text, size_t n) {
    size_t slots = 64; /* a slot per 8 bytes of text, at most 2 MiB of them */
    while (slots < n / 8 && slots < 65536) slots *= 2;
    *ps = (struct tok_pass){.t = t, .text = text, .cap_ids = 16 + n / 4, .cache_mask = slots - 1};
    ps->ids = malloc(ps->cap_ids * sizeof *ps->ids);
    ps->cache = calloc(slots, sizeof *ps->cache);
    return ps->ids && ps->cache ? 0 : err_set(ERR_NOMEM, "tokenizer: out of memory for %zu bytes of text", n);
}

static void pass_close(struct tok_pass *ps) {
    free(ps->cache);
    mem_free(ps->node);
    queue_free(ps->queue);
    free(ps->word);
    free(ps->ids);
}

/* --- encode --- */

static int encode_range(struct tok_pass *ps, size_t begin, size_t end) {
    if (begin == end) return 0;
    return ps->t->model == TOK_MODEL_BPE ? tok_bpe_encode(ps, begin, end) : tok_spm_encode(ps, begin, end);
}

static int encode_cut(struct tok_pass *ps, size_t n, unsigned flags, const struct tok_cut *cuts, size_t n_cuts) {
    const struct tokenizer *t = ps->t;
    bool has_bos = n_cuts && cuts[0].begin == 0 && cuts[0].id == t->bos;
    int rc = 0;
    if (flags & TOK_ADD_SPECIAL && t->add_bos && !has_bos) rc = tok_pass_emit(ps, t->bos);
    size_t at = 0;
    for (size_t i = 0; !rc && i < n_cuts; i++) {
        rc = encode_range(ps, at, cuts[i].begin);
        if (!rc) rc = tok_pass_emit(ps, cuts[i].id);
        at = cuts[i].end;
    }
    if (!rc) rc = encode_range(ps, at, n);
    if (!rc && flags & TOK_ADD_SPECIAL && t->add_eos) rc = tok_pass_emit(ps, t->eos);
    return rc;
}

static int check_spans(const struct tok_span *plain, size_t n_plain, size_t n) {
    size_t at = 0;
    for (size_t i = 0; i < n_plain; i++) {
        if (plain[i].begin < at || plain[i].end < plain[i].begin || plain[i].end > n)
            return err_set(ERR_ARG, "text: plain range %zu is %zu to %zu, the one before ends at %zu and the text at %zu", i,
                           plain[i].begin, plain[i].end, at, n);
        at = plain[i].end;
    }
    return 0;
}

int tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t n, unsigned flags,
                           const struct tok_span *plain, size_t n_plain, int32_t **ids, size_t *n_ids) {
    *ids = NULL;
    *n_ids = 0;
    struct tok_cut *cuts = NULL;
    size_t n_cuts = 0;
    struct tok_pass ps = {0};
    int rc = check_spans(plain, n_plain, n);
    if (!rc) rc = special_find(t->special, text, n, flags & TOK_PARSE_SPECIAL, plain, n_plain, &cuts, &n_cuts);
    if (!rc) rc = pass_open(&ps, t, text, n);
    if (!rc) rc = encode_cut(&ps, n, flags, cuts, n_cuts);
    if (!rc) {
        *ids = ps.ids;
        *n_ids = ps.n_ids;
        ps.ids = NULL;
    }
    pass_close(&ps);
    free(cuts);
    return rc;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, unsigned flags, int32_t **ids,
                     size_t *n_ids) {
    return tokenizer_encode_spans(t, text, n, flags, NULL, 0, ids, n_ids);
}

/* --- accessors --- */

static bool has(const struct tokenizer *t, int32_t id) { return id >= 0 && id < t->n_vocab; }

bool tokenizer_is_eog(const struct tokenizer *t, int32_t id) { return has(t, id) && t->eog[id]; }

const char *tokenizer_token_text(const struct tokenizer *t, int32_t id, size_t *n) {
    *n = has(t, id) ? t->sym.off[id + 1] - t->sym.off[id] : 0;
    return has(t, id) ? t->sym.bytes + t->sym.off[id] : NULL;
}

enum tok_type tokenizer_token_type(const struct tokenizer *t, int32_t id) {
    return has(t, id) ? (enum tok_type)t->type[id] : TOK_UNUSED;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text) {
    int32_t sym = tok_symbols_find(&t->sym, text, strlen(text));
    return sym < t->n_vocab ? sym : -1;
}

int32_t tokenizer_n_vocab(const struct tokenizer *t) { return t->n_vocab; }
int32_t tokenizer_bos(const struct tokenizer *t) { return t->bos; }
int32_t tokenizer_eos(const struct tokenizer *t) { return t->eos; }
int32_t tokenizer_eot(const struct tokenizer *t) { return t->eot; }
int32_t tokenizer_eom(const struct tokenizer *t) { return t->eom; }
int32_t tokenizer_unk(const struct tokenizer *t) { return t->unk; }
int32_t tokenizer_pad(const struct tokenizer *t) { return t->pad; }
bool tokenizer_add_bos(const struct tokenizer *t) { return t->add_bos; }
bool tokenizer_add_eos(const struct tokenizer *t) { return t->add_eos; }
