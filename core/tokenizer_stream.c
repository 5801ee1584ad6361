/* tokenizer_stream.c: ids to text, at once or as they come. */
#include "core/tokenizer_impl.h"

#include <stdlib.h>

#include "core/err.h"
#include "core/utf8.h"

const char *tokenizer_piece(const struct tokenizer *t, int32_t id, unsigned flags, size_t *n) {
    *n = 0;
    if (id < 0 || id >= t->n_vocab) return "";
    bool hidden = t->type[id] == TOK_CONTROL || t->type[id] == TOK_UNKNOWN;
    if (hidden && !(flags & TOK_SHOW_SPECIAL)) return "";
    *n = t->piece_off[id + 1] - t->piece_off[id];
    return t->piece + t->piece_off[id];
}

struct tok_stream {
    const struct tokenizer *t;
    unsigned flags;
    bool at_start; /* no byte has come yet */
    size_t n_held;
    char *buf; /* [cap] held bytes and a piece */
    char *out; /* [cap * 3 + 1] what the caller gets; a bad byte becomes three */
};

int tok_stream_open(struct tok_stream **out, const struct tokenizer *t, unsigned flags) {
    struct tok_stream *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "tokenizer: out of memory for a text stream");
    size_t cap = t->max_piece + 4;
    s->t = t;
    s->flags = flags;
    s->buf = malloc(cap);
    s->out = malloc(cap * 3 + 1);
    if (!s->buf || !s->out) {
        tok_stream_close(s);
        return err_set(ERR_NOMEM, "tokenizer: out of memory for a text stream");
    }
    tok_stream_reset(s);
    *out = s;
    return 0;
}

void tok_stream_close(struct tok_stream *s) {
    if (!s) return;
    free(s->buf);
    free(s->out);
    free(s);
}

void tok_stream_reset(struct tok_stream *s) {
    s->n_held = 0;
    s->at_start = !(s->flags & TOK_CONTINUES);
}

/* Copies buf[0 .. n) to out, replacing bad bytes if that is wanted. */
static void give(struct tok_stream *s, size_t n, const char **text, size_t *n_text) {
    size_t m = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(s->buf + i, n - i, &cp);
        if (!len && s->flags & TOK_VALID_UTF8) {
            m += (size_t)utf8_encode(0xFFFD, s->out + m);
            i++;
            continue;
        }
        for (int k = len ? len : 1; k > 0; k--) s->out[m++] = s->buf[i++];
    }
    s->out[m] = 0;
    *text = s->out;
    *n_text = m;
}

/* The piece of an id, without the space that encoding put before the first word. */
static const char *piece_of(struct tok_stream *s, int32_t id, size_t *n) {
    const char *p = tokenizer_piece(s->t, id, s->flags, n);
    if (!*n || !s->at_start) return p;
    s->at_start = false;
    bool added = s->t->model == TOK_MODEL_SPM && s->t->space_prefix && s->t->type[id] == TOK_NORMAL && *p == ' ';
    *n -= added;
    return p + added;
}

void tok_stream_push(struct tok_stream *s, int32_t id, const char **text, size_t *n) {
    size_t n_piece;
    const char *p = piece_of(s, id, &n_piece);
    memcpy(s->buf + s->n_held, p, n_piece);
    size_t all = s->n_held + n_piece, cut = utf8_cut_bytes(s->buf, all);
    give(s, all - cut, text, n);
    memmove(s->buf, s->buf + all - cut, cut);
    s->n_held = cut;
}

void tok_stream_finish(struct tok_stream *s, const char **text, size_t *n) {
    give(s, s->n_held, text, n);
    tok_stream_reset(s);
}

/* --- all at once --- */

struct growing {
    char *p;
    size_t n, cap;
};

static int append(struct growing *g, const char *p, size_t n) {
    if (g->cap - g->n < n + 1) {
        size_t cap = (g->cap + n + 1) * 2;
        char *q = realloc(g->p, cap);
        if (!q) return err_set(ERR_NOMEM, "tokenizer: out of memory for %zu bytes of text", cap);
        g->p = q;
        g->cap = cap;
    }
    memcpy(g->p + g->n, p, n);
    g->n += n;
    g->p[g->n] = 0;
    return 0;
}

int tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids, unsigned flags, char **text,
                     size_t *n) {
    *text = NULL;
    *n = 0;
    struct growing g = {0};
    struct tok_stream *s;
    int rc = tok_stream_open(&s, t, flags);
    if (rc) return rc;
    const char *p;
    size_t m;
    rc = append(&g, "", 0);
    for (size_t i = 0; !rc && i < n_ids; i++) {
        tok_stream_push(s, ids[i], &p, &m);
        rc = append(&g, p, m);
    }
    tok_stream_finish(s, &p, &m);
    if (!rc) rc = append(&g, p, m);
    tok_stream_close(s);
    if (rc) {
        free(g.p);
        return rc;
    }
    *text = g.p;
    *n = g.n;
    return 0;
}
