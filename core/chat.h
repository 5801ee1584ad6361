/* chat.h: chat templates without a template engine. The template text of a model file is only searched for known
 * substrings (linear time, nothing in it is executed); the family it names is written by straight C. What is not
 * recognised is refused with a sentence that offers `--chat-template NAME`: there is no silent guess.
 *
 * A rendered prompt is one text and a list of pieces. Special pieces hold nothing but control-token texts written by the
 * template and are the only ones to be tokenised with parse_special; all else (message contents, role words, newlines)
 * is in plain pieces, so that no message can forge a control token. Pieces are split at control tokens only: tokenising
 * them one by one gives the ids that tokenising the whole text gives.
 *
 * Thread-safe for different templates; a template is read-only after opening and may render in many threads.
 * Functions return 0 or a negative enum err; err_text() has the reason. */
#ifndef LH_CORE_CHAT_H
#define LH_CORE_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

struct chat_template;

/* Text with a length (may hold NUL bytes). text NULL means absent. */
struct chat_str {
    const char *text;
    size_t bytes;
};
static inline struct chat_str chat_str_of(const char *s) { return (struct chat_str){s, s ? strlen(s) : 0}; }

enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_TOOL };

struct chat_tool_call {
    struct chat_str id;        /* ? only the Mistral families print it */
    struct chat_str name;
    struct chat_str arguments; /* JSON text of an object */
};

struct chat_message {
    enum chat_role role;
    struct chat_str content;                 /* absent = empty */
    struct chat_str reasoning;               /* ? assistant: thinking kept apart from the content */
    const struct chat_tool_call *tool_calls; /* [n_tool_calls]? assistant */
    int n_tool_calls;
    struct chat_str tool_call_id;            /* ? tool: which call this answers; only the Mistral families print it */
};

enum chat_switch { CHAT_AUTO, CHAT_ON, CHAT_OFF }; /* AUTO: what the template does when it is not told */

struct chat_options {
    bool add_generation_prompt;        /* append the start of the assistant's turn */
    enum chat_switch thinking;         /* enable_thinking */
    enum chat_switch preserve_thinking; /* keep thinking in the history: qwen3.5 (AUTO: off), qwen3.8 (AUTO: on) */
    const char *effort;                /* ? reasoning effort: xhigh, medium, low; only qwen3.8. NULL: its default */
    const struct chat_str *tools;      /* [n_tools]? JSON text of each tool object, {"type": "function", ...} */
    int n_tools;
    const char *bos_text;              /* ? text of the vocabulary's BOS token. NULL: the family's usual; "": none */
    const char *eos_text;              /* ? text of its EOS token, same rules */
    struct { int year, month, day; } date; /* for templates that print today's date; year 0: the local date */
};

struct chat_piece {
    size_t at, bytes; /* range of chat_prompt.text */
    bool special;     /* tokenise with parse_special */
};

struct chat_prompt {
    char *text; /* all pieces joined, then a NUL */
    size_t bytes;
    struct chat_piece *pieces; /* [n_pieces], in order, none empty, together exactly text */
    int n_pieces;
    bool adds_bos;         /* the first piece begins with BOS: the tokenizer must not add a second one */
    bool thinking_open;    /* the answer begins inside a thinking block, which ends with </think> */
    const char *note;      /* ? one sentence for the user: what was asked and is not what the prompt does (static) */
};

/* Recognises a template text ([bytes], from the model file's tokenizer.chat_template; NULL or empty: the file has none) of
 * a model with architecture `arch` (general.architecture). Keeps no pointer.
 * ERR_UNSUPPORTED: not one of the known families, or absent; the sentence offers --chat-template and lists the names. */
int chat_open(struct chat_template **out, const char *text, size_t bytes, const char *arch);

/* A family by name (chat_names(), or llama.cpp's name for it). The template text is optional: literals that models carry in
 * it (default system prompts) are then taken from it. ERR_ARG: no such name; the sentence lists them. */
int chat_open_named(struct chat_template **out, const char *name, const char *text, size_t bytes);

void chat_close(struct chat_template *t);

/* All names, "chatml, qwen2.5, ..." (static). */
const char *chat_names(void);

/* Name of the family. */
const char *chat_name(const struct chat_template *t);

/* Sentence for the user when the family was not recognised with certainty; NULL otherwise. Lives as long as t. */
const char *chat_note(const struct chat_template *t);

/* Texts of the control tokens that end an answer, NULL-terminated (static). They are added to the model file's own. */
const char *const *chat_stops(const struct chat_template *t);

/* Writes messages [n] as the template does. Contents are copied once. Release with chat_prompt_free.
 * ERR_ARG: what the template itself refuses (order of roles, effort), JSON that is none.
 * ERR_UNSUPPORTED: tools for a family whose tool format is not known here. */
int chat_render(struct chat_prompt *out, const struct chat_template *t, const struct chat_message *messages, int n,
                const struct chat_options *options);
void chat_prompt_free(struct chat_prompt *p);

#ifdef __cplusplus
}
#endif
#endif
