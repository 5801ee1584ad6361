/* tokenizer_spm.c: SentencePiece-style BPE: neighbours whose text together is a token are joined, highest score first;
 * characters that are no tokens go out as bytes. Spaces are U+2581 in the vocabulary. */
#include "core/tokenizer_impl.h"

#include <math.h>
#include <stdlib.h>

#include "core/err.h"
#include "core/tokenizer_merge.h"
#include "core/utf8.h"

#define SPACE "\xE2\x96\x81" /* U+2581 */
#define N_SPACE 3

struct scored {
    float score;
    int32_t id;
};

static int by_score(const void *a, const void *b) {
    const struct scored *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

/* Scores become ranks, so that a heap of integers orders the joins. */
static int rank_tokens(struct tokenizer *t, const float *scores) {
    t->rank = calloc((size_t)t->n_vocab, sizeof *t->rank);
    struct scored *s = malloc((size_t)t->n_vocab * sizeof *s);
    int rc = t->rank && s ? 0 : err_set(ERR_NOMEM, "tokenizer: out of memory for %d scores", t->n_vocab);
    for (int32_t i = 0; !rc && i < t->n_vocab; i++) {
        s[i] = (struct scored){scores ? scores[i] : 0, i};
        if (isnan(s[i].score)) rc = err_set(ERR_FORMAT, "tokenizer.ggml.scores: the score of token %d is not a number", i);
    }
    if (!rc) {
        qsort(s, (size_t)t->n_vocab, sizeof *s, by_score);
        uint32_t rank = 0;
        for (int32_t i = 0; i < t->n_vocab; i++) {
            if (i && s[i].score != s[i - 1].score) rank++;
            t->rank[s[i].id] = rank;
        }
    }
    free(s);
    return rc;
}

/* Notes which bytes stand before a space inside of tokens: a text can be cut before all other spaces, and the parts
 * encoded (and remembered) one by one, because no join ever crosses such a cut. */
static void find_inner_spaces(struct tokenizer *t) {
    for (int32_t id = 0; id < t->n_vocab; id++) {
        const char *p = t->sym.bytes + t->sym.off[id];
        size_t n = t->sym.off[id + 1] - t->sym.off[id];
        for (size_t i = 1; i + N_SPACE <= n; i++)
            if (!memcmp(p + i, SPACE, N_SPACE)) t->joins_space[(unsigned char)p[i - 1]] = true;
    }
}

int tok_spm_open(struct tokenizer *t, const struct tokenizer_spec *spec) {
    for (unsigned b = 0; b < 256; b++) {
        static const char hex[] = "0123456789ABCDEF";
        const char text[] = {'<', '0', 'x', hex[b >> 4], hex[b & 15], '>'};
        t->byte_token[b] = tok_symbols_find(&t->sym, text, sizeof text);
    }
    t->space_prefix = spec->add_space_prefix != 0;
    t->n_ranks = (size_t)t->n_vocab;
    find_inner_spaces(t);
    return rank_tokens(t, spec->scores);
}

/* --- one word, translated --- */

struct spm_word {
    const struct tokenizer *t;
    const char *p; /* with U+2581 for spaces */
};

static void rank_pair(const void *ctx, struct merge_node *node, uint32_t i) {
    const struct spm_word *w = ctx;
    size_t n = node[node[i].next].next - i;
    if (n > w->t->max_text) return;
    int32_t id = tok_symbols_find(&w->t->sym, w->p + i, n);
    if (id >= 0) node[i].rank = w->t->rank[id];
}

static int emit_bytes(struct tok_pass *ps, const char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int32_t id = ps->t->byte_token[(unsigned char)p[i]];
        if (id < 0) id = ps->t->unk;
        int rc = id < 0 ? 0 : tok_pass_emit(ps, id);
        if (rc) return rc;
    }
    return 0;
}

static int encode_translated(struct tok_pass *ps, const char *p, size_t n) {
    int rc = tok_pass_reserve_nodes(ps, n);
    if (rc) return rc;
    struct merge_node *node = ps->node;
    struct spm_word w = {ps->t, p};
    for (uint32_t i = 0, prev = MERGE_NONE, next; i < n; prev = i, i = next) {
        uint32_t cp;
        int len = utf8_decode(p + i, n - i, &cp);
        next = i + (uint32_t)(len ? len : 1); /* an invalid byte is a character of its own */
        node[i] = (struct merge_node){prev, next, MERGE_NONE, -1};
    }
    merge_word(node, (uint32_t)n, ps->queue, &(struct merge_rule){rank_pair, &w, NULL});
    for (uint32_t i = 0; i < n; i = node[i].next) {
        int32_t id = tok_symbols_find(&ps->t->sym, p + i, node[i].next - i);
        rc = id >= 0 ? tok_pass_emit(ps, id) : emit_bytes(ps, p + i, node[i].next - i);
        if (rc) return rc;
    }
    return 0;
}

/* --- words of a text --- */

static size_t translate(char *out, const char *p, size_t n) {
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == ' ') {
            memcpy(out + m, SPACE, N_SPACE);
            m += N_SPACE;
        } else {
            out[m++] = p[i];
        }
    }
    return m;
}

static int encode_word(struct tok_pass *ps, const char *word, size_t n) {
    int rc = tok_pass_reserve_word(ps, N_SPACE * n);
    return rc ? rc : encode_translated(ps, ps->word, translate(ps->word, word, n));
}

/* The first word of a range, with a space before it that the text does not have. */
static int encode_prefixed(struct tok_pass *ps, const char *word, size_t n) {
    if (n > TOK_MAX_WORD) return encode_word(ps, word, n); /* refuses it */
    int rc = tok_pass_reserve_word(ps, N_SPACE * (n + 1));
    if (rc) return rc;
    memcpy(ps->word, SPACE, N_SPACE);
    return encode_translated(ps, ps->word, N_SPACE + translate(ps->word + N_SPACE, word, n));
}

static size_t word_end(const struct tok_pass *ps, size_t i, size_t end) {
    const bool *joins = ps->t->joins_space;
    for (i++; i < end; i++) {
        if (ps->text[i] != ' ') continue;
        unsigned char before = (unsigned char)ps->text[i - 1];
        if (!joins[before == ' ' ? 0x81 : before]) break; /* a space before it has the last byte of U+2581 */
    }
    return i;
}

int tok_spm_encode(struct tok_pass *ps, size_t begin, size_t end) {
    if (ps->t->space_prefix) {
        size_t to = word_end(ps, begin, end);
        if (ps->text[begin] == ' ' && !ps->t->joins_space[0x81]) to = begin; /* the added space stands alone */
        int rc = encode_prefixed(ps, ps->text + begin, to - begin);
        if (rc) return rc;
        begin = to;
    }
    while (begin < end) {
        size_t to = word_end(ps, begin, end);
        int rc = tok_pass_word(ps, begin, to, encode_word);
        if (rc) return rc;
        begin = to;
    }
    return 0;
}
