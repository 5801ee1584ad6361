/* tokenizer_vocab.c: the texts of a vocabulary, the hash from text to number, and the bytes that each token decodes to. */
#include "core/tokenizer_impl.h"

#include <stdlib.h>

#include "core/err.h"
#include "core/utf8.h"

static int out_of_memory(void) { return err_set(ERR_NOMEM, "tokenizer: out of memory for the vocabulary"); }

static size_t slot_of(uint64_t hash, size_t mask) { return (size_t)(hash & mask); }

static uint64_t slot_value(uint64_t hash, int32_t sym) { return (hash & ~(uint64_t)0xFFFFFFFF) | (uint32_t)(sym + 1); }

int tok_symbols_open(struct tok_symbols *s, size_t n_hint, size_t bytes_hint) {
    *s = (struct tok_symbols){.cap = (int32_t)n_hint + 64, .cap_bytes = bytes_hint + 64};
    size_t slots = 256;
    while (slots < 2 * n_hint) slots *= 2;
    s->mask = slots - 1;
    s->bytes = malloc(s->cap_bytes);
    s->off = calloc((size_t)s->cap + 1, sizeof *s->off);
    s->slot = calloc(slots, sizeof *s->slot);
    return s->bytes && s->off && s->slot ? 0 : out_of_memory();
}

void tok_symbols_close(struct tok_symbols *s) {
    free(s->bytes);
    free(s->off);
    free(s->slot);
}

int32_t tok_symbols_find(const struct tok_symbols *s, const char *p, size_t n) {
    uint64_t hash = tok_hash(p, n);
    for (size_t i = slot_of(hash, s->mask); s->slot[i]; i = (i + 1) & s->mask) {
        if ((s->slot[i] ^ hash) >> 32) continue;
        int32_t sym = (int32_t)((uint32_t)s->slot[i] - 1);
        if (s->off[sym + 1] - s->off[sym] == n && !memcmp(s->bytes + s->off[sym], p, n)) return sym;
    }
    return -1;
}

static void insert(struct tok_symbols *s, int32_t sym) {
    uint64_t hash = tok_hash(s->bytes + s->off[sym], s->off[sym + 1] - s->off[sym]);
    size_t i = slot_of(hash, s->mask);
    while (s->slot[i]) i = (i + 1) & s->mask;
    s->slot[i] = slot_value(hash, sym);
}

static int grow(struct tok_symbols *s, size_t n) {
    if (s->n == s->cap) {
        if (s->cap > INT32_MAX / 2) return err_set(ERR_FORMAT, "tokenizer: more than 2^30 symbols");
        size_t *off = realloc(s->off, ((size_t)s->cap * 2 + 1) * sizeof *off);
        if (!off) return out_of_memory();
        s->off = off;
        s->cap *= 2;
    }
    size_t used = s->off[s->n];
    if (n > s->cap_bytes - used) {
        size_t want = (used + n) * 2;
        char *bytes = realloc(s->bytes, want);
        if (!bytes) return out_of_memory();
        s->bytes = bytes;
        s->cap_bytes = want;
    }
    if ((size_t)s->n * 2 > s->mask) { /* at most half full */
        size_t slots = (s->mask + 1) * 2;
        uint64_t *slot = calloc(slots, sizeof *slot);
        if (!slot) return out_of_memory();
        uint64_t *old = s->slot;
        size_t n_old = s->mask + 1;
        s->slot = slot;
        s->mask = slots - 1;
        for (size_t i = 0; i < n_old; i++)
            if (old[i]) insert(s, (int32_t)((uint32_t)old[i] - 1));
        free(old);
    }
    return 0;
}

static int append(struct tok_symbols *s, const char *p, size_t n, bool in_hash) {
    int rc = grow(s, n);
    if (rc) return rc;
    memcpy(s->bytes + s->off[s->n], p, n);
    s->off[s->n + 1] = s->off[s->n] + n;
    s->n++;
    if (in_hash) insert(s, s->n - 1);
    return 0;
}

int tok_symbols_add(struct tok_symbols *s, const char *p, size_t n) {
    return append(s, p, n, tok_symbols_find(s, p, n) < 0);
}

int tok_symbols_intern(struct tok_symbols *s, const char *p, size_t n, int32_t *sym) {
    *sym = tok_symbols_find(s, p, n);
    if (*sym >= 0) return 0;
    *sym = s->n;
    return append(s, p, n, true);
}

/* --- bytes and characters --- */

static bool is_self(unsigned b) { return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; }

uint32_t tok_byte_char(unsigned byte) {
    if (is_self(byte)) return byte;
    uint32_t cp = 0x100;
    for (unsigned b = 0; b < byte; b++) cp += !is_self(b);
    return cp;
}

int tok_char_byte(uint32_t cp) {
    if (cp < 0x100) return is_self(cp) ? (int)cp : -1;
    if (cp < 0x121) return (int)(cp - 0x100);            /* 00..20 */
    if (cp < 0x143) return (int)(cp - 0x121 + 0x7F);     /* 7F..A0 */
    return cp == 0x143 ? 0xAD : -1;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int tok_byte_text(const char *p, size_t n) {
    if (n != 6 || memcmp(p, "<0x", 3) || p[5] != '>' || hex(p[3]) < 0 || hex(p[4]) < 0) return -1;
    return hex(p[3]) * 16 + hex(p[4]);
}

/* --- pieces --- */

/* Byte-level text to bytes. Characters that stand for no byte (only odd vocabularies have them) stay as they are. */
static size_t decode_bpe(char *out, const char *p, size_t n) {
    size_t m = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(p + i, n - i, &cp), byte = len ? tok_char_byte(cp) : -1;
        if (byte >= 0) {
            out[m++] = (char)byte;
            i += (size_t)len;
            continue;
        }
        for (int k = len ? len : 1; k > 0; k--) out[m++] = p[i++];
    }
    return m;
}

static size_t decode_spm(char *out, const char *p, size_t n) {
    size_t m = 0;
    for (size_t i = 0; i < n;) {
        if (n - i >= 3 && !memcmp(p + i, "\xE2\x96\x81", 3)) {
            out[m++] = ' ';
            i += 3;
        } else {
            out[m++] = p[i++];
        }
    }
    return m;
}

static size_t decode(const struct tokenizer *t, int32_t id, char *out) {
    const char *p = t->sym.bytes + t->sym.off[id];
    size_t n = t->sym.off[id + 1] - t->sym.off[id];
    int byte = t->type[id] == TOK_BYTE ? tok_byte_text(p, n) : -1;
    if (byte >= 0) {
        *out = (char)byte;
        return 1;
    }
    if (t->type[id] == TOK_UNUSED) return 0;
    if (t->type[id] == TOK_NORMAL || t->type[id] == TOK_BYTE)
        return t->model == TOK_MODEL_BPE ? decode_bpe(out, p, n) : decode_spm(out, p, n);
    memcpy(out, p, n);
    return n;
}

int tok_pieces_open(struct tokenizer *t) {
    t->piece = malloc(t->sym.off[t->n_vocab] + 1); /* decoding never lengthens */
    t->piece_off = calloc((size_t)t->n_vocab + 1, sizeof *t->piece_off);
    if (!t->piece || !t->piece_off) return out_of_memory();
    for (int32_t i = 0; i < t->n_vocab; i++) {
        size_t n = decode(t, i, t->piece + t->piece_off[i]), n_text = t->sym.off[i + 1] - t->sym.off[i];
        t->piece_off[i + 1] = t->piece_off[i] + n;
        if (n > t->max_piece) t->max_piece = n;
        if (n_text > t->max_text) t->max_text = n_text;
    }
    return 0;
}
