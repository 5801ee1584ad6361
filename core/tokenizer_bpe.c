/* tokenizer_bpe.c: byte-level BPE: from a range of text to ids, by way of words (tokenizer_pre.c) and ranked merges. */
#include "core/tokenizer_impl.h"

#include <stdlib.h>

#include "core/err.h"
#include "core/tokenizer_merge.h"
#include "core/utf8.h"

/* --- the table of merges --- */

static size_t pair_slot(const struct tokenizer *t, uint64_t pair) {
    uint64_t h = pair * 0x9E3779B97F4A7C15u;
    size_t i = (size_t)(h ^ h >> 32) & t->merge_mask;
    while (t->merge[i].pair != pair && t->merge[i].pair != UINT64_MAX) i = (i + 1) & t->merge_mask;
    return i;
}

static uint64_t pair_key(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

/* The byte that the first or last character of a text stands for; -1: none, so no text ever gets there. */
static int first_byte(const char *p, size_t n) {
    uint32_t cp;
    return utf8_decode(p, n, &cp) ? tok_char_byte(cp) : -1;
}

static int last_byte(const char *p, size_t n) {
    size_t k = 1;
    while (k < n && k < 4 && utf8_is_tail(p + n - k)) k++;
    return first_byte(p + n - k, k);
}

/* `buf` has room for the line. */
static int add_merge(struct tokenizer *t, struct tok_str line, int32_t rank, char *buf) {
    const char *sep = line.n > 2 ? memchr(line.p + 1, ' ', line.n - 2) : NULL;
    if (!sep)
        return err_set(ERR_FORMAT, "tokenizer.ggml.merges: entry %d is not two parts with a space between them", rank);
    size_t n_left = (size_t)(sep - line.p), n_right = line.n - n_left - 1;
    memcpy(buf, line.p, n_left);
    memcpy(buf + n_left, sep + 1, n_right);
    int32_t left, right, joined;
    int rc = tok_symbols_intern(&t->sym, line.p, n_left, &left);
    if (!rc) rc = tok_symbols_intern(&t->sym, sep + 1, n_right, &right);
    if (!rc) rc = tok_symbols_intern(&t->sym, buf, n_left + n_right, &joined);
    if (rc) return rc;
    t->joined[rank] = joined;
    struct merge_slot *m = &t->merge[pair_slot(t, pair_key(left, right))];
    if (m->pair == UINT64_MAX) *m = (struct merge_slot){pair_key(left, right), (uint32_t)rank};
    int x = last_byte(line.p, n_left), y = first_byte(sep + 1, n_right);
    if (x >= 0 && y >= 0) t->meets[x][y / 8] |= (uint8_t)(1 << y % 8);
    return 0;
}

static int add_merges(struct tokenizer *t, const struct tokenizer_spec *spec) {
    size_t slots = 256, longest = 0;
    while (slots < 2 * (size_t)spec->n_merges) slots *= 2;
    t->merge = malloc(slots * sizeof *t->merge);
    t->joined = calloc((size_t)spec->n_merges + 1, sizeof *t->joined);
    if (!t->merge || !t->joined) return err_set(ERR_NOMEM, "tokenizer: out of memory for %d merges", spec->n_merges);
    t->merge_mask = slots - 1;
    t->n_ranks = (size_t)spec->n_merges;
    for (size_t i = 0; i < slots; i++) t->merge[i].pair = UINT64_MAX;
    for (int32_t i = 0; i < spec->n_merges; i++)
        if (spec->merges[i].n > longest) longest = spec->merges[i].n;
    char *buf = malloc(longest + 1);
    int rc = buf ? 0 : err_set(ERR_NOMEM, "tokenizer: out of memory for %d merges", spec->n_merges);
    for (int32_t i = 0; !rc && i < spec->n_merges; i++) rc = add_merge(t, spec->merges[i], i, buf);
    free(buf);
    return rc;
}

int tok_bpe_open(struct tokenizer *t, const struct tokenizer_spec *spec) {
    if (spec->n_merges < 0 || (spec->n_merges && !spec->merges))
        return err_set(ERR_ARG, "tokenizer.ggml.merges: missing, %d entries expected", spec->n_merges);
    int rc = pre_open(&t->pre, spec->pre, PRE_FASTEST);
    if (rc) return rc;
    t->ignore_merges = pre_ignores_merges(t->pre);
    for (unsigned b = 0; b < 256; b++) {
        char c[4];
        rc = tok_symbols_intern(&t->sym, c, (size_t)utf8_encode(tok_byte_char(b), c), &t->byte_sym[b]);
        if (rc) return rc;
    }
    return add_merges(t, spec);
}

/* --- one word --- */

static void rank_pair(const void *ctx, struct merge_node *node, uint32_t i) {
    const struct tokenizer *t = ctx;
    const struct merge_slot *m = &t->merge[pair_slot(t, pair_key(node[i].sym, node[node[i].next].sym))];
    if (m->pair != UINT64_MAX) node[i].rank = m->rank;
}

/* A symbol that is no token goes out byte by byte; a byte that is no token cannot be said. */
static int emit_bytes(struct tok_pass *ps, const char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int32_t sym = ps->t->byte_sym[(unsigned char)p[i]];
        int rc = sym < ps->t->n_vocab ? tok_pass_emit(ps, sym) : 0;
        if (rc) return rc;
    }
    return 0;
}

/* *id: of a word that is a token as a whole, or -1. */
static int whole_word(struct tok_pass *ps, const char *word, size_t n, int32_t *id) {
    *id = -1;
    if (n > ps->t->max_text) return 0;
    int rc = tok_pass_reserve_word(ps, 2 * n);
    if (rc) return rc;
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t sym = ps->t->byte_sym[(unsigned char)word[i]];
        const char *c = ps->t->sym.bytes + ps->t->sym.off[sym];
        for (size_t k = ps->t->sym.off[sym + 1] - ps->t->sym.off[sym]; k > 0; k--) ps->word[m++] = *c++;
    }
    int32_t sym = tok_symbols_find(&ps->t->sym, ps->word, m);
    if (sym < ps->t->n_vocab) *id = sym;
    return 0;
}

static int merge_part(struct tok_pass *ps, const char *word, size_t n) {
    const struct tokenizer *t = ps->t;
    int rc = tok_pass_reserve_nodes(ps, n);
    if (rc) return rc;
    struct merge_node *node = ps->node;
    for (uint32_t i = 0; i < n; i++)
        node[i] = (struct merge_node){i ? i - 1 : MERGE_NONE, i + 1, MERGE_NONE, t->byte_sym[(unsigned char)word[i]]};
    merge_word(node, (uint32_t)n, ps->queue, &(struct merge_rule){rank_pair, t, t->joined});
    for (uint32_t i = 0; i < n; i = node[i].next) {
        rc = node[i].sym < t->n_vocab ? tok_pass_emit(ps, node[i].sym) : emit_bytes(ps, word + i, node[i].next - i);
        if (rc) return rc;
    }
    return 0;
}

/* A long word (base64, a minified line) is cut where two bytes meet that no merge ever joins: the parts do not know of
 * each other, and short ones stay in the cache. */
static int encode_word(struct tok_pass *ps, const char *word, size_t n) {
    const struct tokenizer *t = ps->t;
    int32_t id = -1;
    int rc = t->ignore_merges ? whole_word(ps, word, n, &id) : 0;
    if (rc || id >= 0) return rc ? rc : tok_pass_emit(ps, id);
    if (n <= MERGE_LONG) return merge_part(ps, word, n);
    for (size_t begin = 0, i = 1; !rc && i <= n; i++) {
        unsigned y = (unsigned char)word[i < n ? i : 0];
        if (i < n && t->meets[(unsigned char)word[i - 1]][y / 8] & 1 << y % 8) continue;
        rc = merge_part(ps, word + begin, i - begin);
        begin = i;
    }
    return rc;
}

/* --- a range of text --- */

struct range {
    struct tok_pass *ps;
    size_t begin;
};

static int take_word(void *ctx, size_t begin, size_t end) {
    struct range *r = ctx;
    return tok_pass_word(r->ps, r->begin + begin, r->begin + end, encode_word);
}

/* A valid copy of the text for the pre-tokenizer: every byte that is not part of a valid character becomes SUB, which
 * is, like U+FFFD, neither letter, mark, number, space nor punctuation, and one byte long. */
static char *valid_copy(const char *p, size_t n, size_t valid) {
    char *copy = malloc(n);
    if (!copy) return NULL;
    memcpy(copy, p, n);
    for (size_t i = valid; i < n;) {
        uint32_t cp;
        int len = utf8_decode(p + i, n - i, &cp);
        if (!len) copy[i] = 0x1A;
        i += len ? (size_t)len : 1;
    }
    return copy;
}

static size_t valid_bytes(const char *p, size_t n) {
    size_t i = 0;
    uint32_t cp;
    for (int len; i < n && (len = utf8_decode(p + i, n - i, &cp)); i += (size_t)len) {}
    return i;
}

int tok_bpe_encode(struct tok_pass *ps, size_t begin, size_t end) {
    const char *p = ps->text + begin;
    size_t n = end - begin, valid = valid_bytes(p, n);
    struct range r = {ps, begin};
    if (valid == n) return pre_split(ps->t->pre, p, n, take_word, &r);
    char *copy = valid_copy(p, n, valid);
    if (!copy) return err_set(ERR_NOMEM, "tokenizer: out of memory for %zu bytes of text", n);
    int rc = pre_split(ps->t->pre, copy, n, take_word, &r);
    free(copy);
    return rc;
}
