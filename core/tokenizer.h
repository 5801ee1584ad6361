/* tokenizer.h: text to token ids and back. Byte-level BPE (GGUF model "gpt2") and SentencePiece-style BPE with byte
 * fallback (GGUF model "llama"). Rendering of chat templates is chat.h's business.
 *
 * A tokenizer is immutable after tokenizer_open: any number of threads may use it at once. Texts are bytes with an
 * explicit length: NUL is an ordinary character, and an invalid UTF-8 byte is an ordinary symbol that keeps its value,
 * so that decode(encode(text)) == text for every text (exceptions: U+2581 with model "llama", where it means space).
 * Time is linear in the text, whatever the number of special tokens and however long a run of one character.
 * Functions return 0 or a negative enum err unless said otherwise; err_text() has the reason. */
#ifndef LH_CORE_TOKENIZER_H
#define LH_CORE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tokenizer;

struct tok_str {
    const char *p; /* [n] any bytes, no NUL needed */
    size_t n;
};

enum tok_type { /* the values of tokenizer.ggml.token_type */
    TOK_NORMAL = 1,
    TOK_UNKNOWN = 2,
    TOK_CONTROL = 3, /* cut out of the text only with TOK_PARSE_SPECIAL */
    TOK_USER = 4,    /* always cut out of the text */
    TOK_UNUSED = 5,
    TOK_BYTE = 6,
};

/* What a vocabulary is made of. Borrowed during tokenizer_open only: everything is copied.
 * Start from TOKENIZER_SPEC_NONE, in which every optional thing is absent. */
struct tokenizer_spec {
    const char *model; /* "gpt2" or "llama" */
    const char *pre;   /* pre-tokenizer of model gpt2; NULL: "default" */
    int32_t n_vocab;
    const struct tok_str *tokens; /* [n_vocab]; an empty text becomes "[EMPTY_<id>]" */
    const float *scores;          /* [n_vocab] or NULL: all 0; read by model llama only */
    const int32_t *types;         /* [n_vocab] enum tok_type, or NULL: all normal */
    const struct tok_str *merges; /* [n_merges] "left right"; read by model gpt2 only */
    int32_t n_merges;
    int32_t bos, eos, eot, eom, unk, pad;      /* ids, -1: absent (then the model's own default) */
    int32_t fim_pad, fim_rep, fim_sep;         /* ids of code infill that end a generation, -1: absent */
    int add_bos, add_eos, add_space_prefix;    /* 0, 1, or -1: absent (then the model's own default) */
};
#define TOKENIZER_SPEC_NONE                                                                                            \
    ((struct tokenizer_spec){.bos = -1, .eos = -1, .eot = -1, .eom = -1, .unk = -1, .pad = -1, .fim_pad = -1,          \
                             .fim_rep = -1, .fim_sep = -1, .add_bos = -1, .add_eos = -1, .add_space_prefix = -1})

/* ERR_UNSUPPORTED: a model or pre-tokenizer that this program does not have (the sentence names it). ERR_FORMAT: an id,
 * type or score that cannot be. ERR_ARG: a missing table. ERR_NOMEM. Equal texts: the first id encodes, all decode. */
int tokenizer_open(struct tokenizer **out, const struct tokenizer_spec *spec);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */

enum tok_flags {
    /* encode: put bos before and eos after, each where the model wants it. A text that begins with the text of bos,
     * recognised as such (TOK_PARSE_SPECIAL), gets no second one. */
    TOK_ADD_SPECIAL = 1,
    TOK_PARSE_SPECIAL = 2, /* encode: texts of control and unknown tokens become those tokens (rendered templates) */
    TOK_SHOW_SPECIAL = 4,  /* decode: control and unknown tokens give their text instead of nothing */
    TOK_CONTINUES = 8,     /* decode: the ids go on after others, so the first keeps its leading space (model llama) */
    TOK_VALID_UTF8 = 16,   /* decode: each byte that is not part of a valid character becomes U+FFFD */
};

/* *ids gets a new array of *n_ids ids, never NULL on success; release with free(). NULL and 0 on failure.
 * ERR_ARG: one word of the text is longer than 256 MiB. ERR_NOMEM. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, unsigned flags, int32_t **ids,
                     size_t *n_ids);

/* A range of bytes [begin, end) of a text. */
struct tok_span {
    size_t begin, end;
};

/* The same for a rendered template with messages that are not trusted: inside the `plain` ranges (ascending, disjoint)
 * control and unknown tokens are not recognised, nor where a text reaches into one. Ids equal those of
 * tokenizer_encode whenever the messages hold no text of a special token. ERR_ARG: ranges out of order. */
int tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t n, unsigned flags,
                           const struct tok_span *plain, size_t n_plain, int32_t **ids, size_t *n_ids);

/* The bytes that one token stands for, whatever surrounds it: possibly part of a UTF-8 character, possibly none.
 * flags: TOK_SHOW_SPECIAL. Valid as long as the tokenizer. An id outside of the vocabulary gives no bytes. */
const char *tokenizer_piece(const struct tokenizer *t, int32_t id, unsigned flags, size_t *n);

/* Text of ids[0 .. n_ids): *text gets a new array of *n bytes and a NUL after them; release with free(). */
int tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids, unsigned flags, char **text,
                     size_t *n);

/* Streaming decoder: gives text as ids come, holding back the bytes of a character that is not complete yet (at most
 * 3). Belongs to one thread; keeps a pointer to the tokenizer. */
struct tok_stream;
int tok_stream_open(struct tok_stream **out, const struct tokenizer *t, unsigned flags);
void tok_stream_close(struct tok_stream *s); /* NULL is fine */
void tok_stream_reset(struct tok_stream *s); /* as after tok_stream_open */
/* *text: [*n] bytes, NUL-terminated, valid until the next call; *n may be 0. Never allocates. */
void tok_stream_push(struct tok_stream *s, int32_t id, const char **text, size_t *n);
/* The bytes held back at the end of a generation that stopped inside a character; then as after tok_stream_open. */
void tok_stream_finish(struct tok_stream *s, const char **text, size_t *n);

/* Does this id end a generation (eos, end of turn, ...)? */
bool tokenizer_is_eog(const struct tokenizer *t, int32_t id);

/* The text as the vocabulary has it (byte-level characters and U+2581 not translated). NULL, 0: no such id. */
const char *tokenizer_token_text(const struct tokenizer *t, int32_t id, size_t *n);
enum tok_type tokenizer_token_type(const struct tokenizer *t, int32_t id); /* TOK_UNUSED: no such id */

/* The (first) id whose vocabulary text is exactly this string, or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text);

int32_t tokenizer_n_vocab(const struct tokenizer *t);
int32_t tokenizer_bos(const struct tokenizer *t); /* -1: none; so the others */
int32_t tokenizer_eos(const struct tokenizer *t);
int32_t tokenizer_eot(const struct tokenizer *t);
int32_t tokenizer_eom(const struct tokenizer *t);
int32_t tokenizer_unk(const struct tokenizer *t);
int32_t tokenizer_pad(const struct tokenizer *t);
bool tokenizer_add_bos(const struct tokenizer *t);
bool tokenizer_add_eos(const struct tokenizer *t);

/* Fills a spec from a GGUF file's tokenizer.ggml.* keys and opens it (tokenizer_gguf.c). ERR_FORMAT names the key:
 * missing or mistyped list, scores or types of another length, special ids outside of the vocabulary. */
struct gguf;
int tokenizer_from_gguf(struct tokenizer **out, const struct gguf *g);
/* The same with another pre-tokenizer than the file names, for files with a wrong one; NULL: the file's. */
int tokenizer_from_gguf_as(struct tokenizer **out, const struct gguf *g, const char *pre);

#ifdef __cplusplus
}
#endif
#endif
