/* tokenizer_impl.h: what the tokenizer's files share. Private to core/tokenizer*.c and its tests.
 *   tokenizer_vocab.c    texts of tokens, hash from text to id, decoded pieces
 *   tokenizer_pre.c      splitting a text into words: names, expressions, PCRE2
 *   tokenizer_scan.c     the same by hand for the families that matter most
 *   tokenizer_special.c  cutting out special tokens
 *   tokenizer_bpe.c, tokenizer_spm.c   word to ids
 *   tokenizer_stream.c   ids to text
 *   tokenizer.c          open, encode, accessors */
#ifndef LH_CORE_TOKENIZER_IMPL_H
#define LH_CORE_TOKENIZER_IMPL_H

#include "core/tokenizer.h"

#include <string.h>

/* --- strings and their numbers --- */

/* Symbols are texts with a number. The tokens come first (symbol == id); byte-level BPE adds those parts of merges that
 * are no tokens. Equal texts may have several numbers, the hash knows the first. */
struct tok_symbols {
    char *bytes; /* all texts, one after the other */
    size_t cap_bytes;
    size_t *off; /* [n + 1] symbol i is bytes[off[i] .. off[i + 1]) */
    int32_t n, cap;
    uint64_t *slot; /* [mask + 1] open addressing: high half of the hash, symbol + 1; 0: empty */
    size_t mask;
};

int tok_symbols_open(struct tok_symbols *s, size_t n_hint, size_t bytes_hint);
void tok_symbols_close(struct tok_symbols *s);
int tok_symbols_add(struct tok_symbols *s, const char *p, size_t n);                  /* always a new number */
int tok_symbols_intern(struct tok_symbols *s, const char *p, size_t n, int32_t *sym); /* a new one only if needed */
int32_t tok_symbols_find(const struct tok_symbols *s, const char *p, size_t n);       /* -1: none */

static inline uint64_t tok_load(const char *p, size_t n) { /* n <= 8 bytes as a number, any injective way */
    uint64_t w = 0;
    if (n == 8) {
        memcpy(&w, p, 8);
    } else if (n >= 4) {
        uint32_t a, b;
        memcpy(&a, p, 4);
        memcpy(&b, p + n - 4, 4);
        w = (uint64_t)a << 32 | b;
    } else if (n) {
        w = (uint64_t)(unsigned char)p[0] << 16 | (uint64_t)(unsigned char)p[n / 2] << 8 | (unsigned char)p[n - 1];
    }
    return w;
}

static inline uint64_t tok_hash(const char *p, size_t n) {
    uint64_t h = (n + 1) * 0x9E3779B97F4A7C15u;
    for (; n > 8; p += 8, n -= 8) {
        h = (h ^ tok_load(p, 8)) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    h = (h ^ tok_load(p, n)) * 0xD6E8FEB86659FD93u;
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
    return h ^ h >> 32;
}

/* --- pre-tokenizers --- */

enum pre_class { /* bits per code point */
    PRE_L = 1,   /* letter, general category L* */
    PRE_M = 2,   /* mark */
    PRE_N = 4,   /* number */
    PRE_W = 8,   /* Unicode White_Space */
    PRE_CRLF = 16,
    PRE_END = 128, /* not a character: the end of the text */
};

/* Gets the words of a text in order, as ranges of its bytes. A non-zero return ends the splitting and is passed on. */
typedef int (*pre_sink)(void *ctx, size_t begin, size_t end);

struct tok_pre;                              /* immutable, shared by threads */
enum pre_path { PRE_FASTEST, PRE_REGEX_ONLY }; /* the second is for tests: expressions even where a scanner exists */
/* name NULL: "default". ERR_UNSUPPORTED names an unknown one. */
int pre_open(struct tok_pre **out, const char *name, enum pre_path path);
void pre_close(struct tok_pre *p);
bool pre_adds_bos(const struct tok_pre *p);       /* default of add_bos */
bool pre_ignores_merges(const struct tok_pre *p); /* a word that is a token is emitted at once */
/* Splits `text`, which must be valid UTF-8. Bytes between the matches of an expression are words too, so the words
 * always cover the text. Allocates only what PCRE2 needs per call. */
int pre_split(const struct tok_pre *p, const char *text, size_t n, pre_sink sink, void *ctx);

/* How the hand scanner's families differ. */
struct scan_rule {
    uint8_t word;   /* enum pre_class bits that make a word: PRE_L, or PRE_L | PRE_M */
    int max_digits; /* numbers come in groups of at most this many characters */
};
/* End of the word that begins at `i` < n. cls: [0x110000] enum pre_class bits. */
size_t scan_word(const struct scan_rule *rule, const uint8_t *cls, const char *text, size_t i, size_t n);

/* --- special tokens --- */

struct tok_cut {
    size_t begin, end;
    int32_t id;
};
struct tok_special;
int special_open(struct tok_special **out, const struct tok_symbols *s, const uint8_t *type, int32_t n_vocab);
void special_close(struct tok_special *sp);
/* All special tokens of a text, ascending: the result of searching for every candidate in the order of decreasing
 * length (then ascending id), each from the left in what is still uncut. *cuts: malloc'ed, NULL if there are none. */
int special_find(const struct tok_special *sp, const char *text, size_t n, bool parse, const struct tok_span *plain,
                 size_t n_plain, struct tok_cut **cuts, size_t *n_cuts);

/* --- the tokenizer --- */

enum tok_model { TOK_MODEL_BPE, TOK_MODEL_SPM };

struct merge_slot {
    uint64_t pair; /* left symbol << 32 | right symbol; UINT64_MAX: empty */
    uint32_t rank;
};

struct tokenizer {
    enum tok_model model;
    int32_t n_vocab;
    struct tok_symbols sym;
    uint8_t *type;       /* [n_vocab] enum tok_type */
    uint8_t *eog;        /* [n_vocab] bool */
    char *piece;         /* decoded bytes of all tokens */
    size_t *piece_off;   /* [n_vocab + 1] */
    size_t max_piece;    /* longest decoded token, bytes */
    size_t max_text;     /* longest vocabulary text, bytes */
    struct tok_special *special;
    int32_t bos, eos, eot, eom, unk, pad;
    bool add_bos, add_eos;
    size_t n_ranks; /* ranks of joins are below this */
    /* byte-level BPE */
    struct tok_pre *pre;
    bool ignore_merges;
    int32_t byte_sym[256];    /* symbol of one byte */
    struct merge_slot *merge; /* [merge_mask + 1] */
    size_t merge_mask;
    int32_t *joined;      /* [n_ranks] symbol that a merge makes */
    uint8_t meets[256][32]; /* bit y of row x: some merge has a left part that ends with byte x, a right one that begins with y */
    /* SPM */
    uint32_t *rank;          /* [n_vocab] 0 for the highest score, equal for equal scores */
    int32_t byte_token[256]; /* -1: missing */
    bool space_prefix;
    bool joins_space[256]; /* some token has this byte directly before an inner U+2581 */
};

int tok_pieces_open(struct tokenizer *t); /* fills piece, piece_off, max_piece, max_text */
int tok_bpe_open(struct tokenizer *t, const struct tokenizer_spec *spec);
int tok_spm_open(struct tokenizer *t, const struct tokenizer_spec *spec);

/* Byte-level characters: U+0021..7E, A1..AC, AE..FF stand for themselves, the other 68 bytes for U+0100.. in order. */
uint32_t tok_byte_char(unsigned byte);
int tok_char_byte(uint32_t cp); /* -1: stands for no byte */

/* "<0xAB>" -> 0xAB, else -1 */
int tok_byte_text(const char *p, size_t n);

/* --- one encoding pass: scratch of one call, so that the tokenizer stays const --- */

#define TOK_MAX_WORD ((size_t)256 << 20) /* candidates of a word, 9 per byte at most, are counted in 32 bits */

struct tok_cache_slot {
    uint64_t hash;
    size_t text;  /* where in the text this word stood first */
    size_t first; /* where its ids are in ids[] */
    uint32_t n_text, n_ids;
};

struct merge_node;
struct merge_queue;
struct tok_pass {
    const struct tokenizer *t;
    const char *text; /* what is being encoded, original bytes */
    int32_t *ids;
    size_t n_ids, cap_ids;
    struct tok_cache_slot *cache; /* [cache_mask + 1] direct-mapped; n_text 0: empty */
    size_t cache_mask;
    struct merge_node *node; /* [cap_nodes] */
    size_t cap_nodes;
    struct merge_queue *queue; /* for words of cap_nodes bytes */
    char *word; /* [cap_word] translated word */
    size_t cap_word;
};

int tok_pass_emit(struct tok_pass *ps, int32_t id);
int tok_pass_reserve_nodes(struct tok_pass *ps, size_t n); /* node and queue */
int tok_pass_reserve_word(struct tok_pass *ps, size_t n);

/* Encodes the word text[begin .. end) with `encode` or repeats the ids it had before. */
typedef int (*tok_word_fn)(struct tok_pass *ps, const char *word, size_t n);
int tok_pass_word(struct tok_pass *ps, size_t begin, size_t end, tok_word_fn encode);

/* Appends the ids of text[begin .. end): not empty, no special token inside, one or an end of the text on either side. */
int tok_bpe_encode(struct tok_pass *ps, size_t begin, size_t end);
int tok_spm_encode(struct tok_pass *ps, size_t begin, size_t end);

#endif
