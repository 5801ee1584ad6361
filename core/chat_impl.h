/* chat_impl.h: what the chat_*.c files share: the output sink, JSON printing, the opened template. Not for others. */
#ifndef LH_CORE_CHAT_IMPL_H
#define LH_CORE_CHAT_IMPL_H

#include "core/chat.h"

/* Facts read from a template text (or assumed for a name). */
enum {
    CHAT_T_BOS = 1 << 0,           /* prints the BOS token */
    CHAT_T_EOS_AT_END = 1 << 1,    /* prints EOS when it does not open an answer (phi3) */
    CHAT_T_THINK_OFF = 1 << 2,     /* thinking is off unless asked for (small qwen3.5) */
    CHAT_T_UNSET_CLOSES = 1 << 3,  /* thinking is closed by </think> unless it is on (QwQ, R1 as llama.cpp ships them) */
    CHAT_T_TODAY = 1 << 4,         /* prints today's date (llama 3.2) */
    CHAT_T_TOOLS = 1 << 5,         /* has the tool format that the family's renderer writes */
};

struct chat_sink;
struct chat_call; /* what a family's renderer works on */
typedef int (*chat_render_fn)(struct chat_sink *s, const struct chat_call *c);

struct chat_family {
    const char *name, *aliases;  /* aliases: "a,b" or "" */
    chat_render_fn render;
    int traits;                  /* when opened by name */
    const char *bos, *eos;       /* usual texts */
    const char *default_system;  /* when opened by name; CHAT_TODAY_MARK stands for the date */
    const char *stops[4];
};

struct chat_template {
    const struct chat_family *family;
    int traits;
    char *default_system; /* ? */
    char *effort_xhigh, *effort_low; /* ? qwen3.8 */
    const char *note;
};

struct chat_call {
    const struct chat_template *t;
    const struct chat_message *msg; /* [n] */
    int n;
    const struct chat_options *o;
    const char *bos, *eos;
    struct chat_prompt *prompt; /* the flags are set here */
};

/* Byte of a stored default system text that stands for today's date, YYYY-MM-DD. */
#define CHAT_TODAY_MARK '\1'

/* --- output: a first pass counts, a second one writes (chat_out.c) ----------------------------------------------------- */
struct chat_sink {
    char *text; /* NULL while counting */
    struct chat_piece *pieces;
    size_t bytes;
    int n_pieces;
    bool special; /* kind of the open piece */
    bool overflow;
};

void chat_put_bytes(struct chat_sink *s, const char *p, size_t n, bool special);
static inline void chat_mark(struct chat_sink *s, const char *token) { chat_put_bytes(s, token, strlen(token), true); }
static inline void chat_text(struct chat_sink *s, const char *text) { chat_put_bytes(s, text, strlen(text), false); }
static inline void chat_put(struct chat_sink *s, struct chat_str v) { chat_put_bytes(s, v.text, v.bytes, false); }

/* A default system text with its date filled in. */
void chat_put_dated(struct chat_sink *s, const char *text, const struct chat_options *o);
/* "01 Dec 2026" */
void chat_put_date_dmy(struct chat_sink *s, const struct chat_options *o);

/* --- strings as Python has them ------------------------------------------------------------------------------------------- */
struct chat_str chat_trim(struct chat_str s);                      /* str.strip(): Unicode white space */
struct chat_str chat_trim_newlines(struct chat_str s, bool left, bool right);
bool chat_starts(struct chat_str s, const char *prefix);
bool chat_ends(struct chat_str s, const char *suffix);
struct chat_str chat_after_last(struct chat_str s, const char *what);   /* s when it does not occur */
struct chat_str chat_before_first(struct chat_str s, const char *what); /* s when it does not occur */
bool chat_has(struct chat_str s, const char *what);

/* --- JSON (chat_json.c) ----------------------------------------------------------------------------------------------------- */
/* Prints JSON text as Python's json.dumps(ensure_ascii=False, indent=indent or None) would print the value; numbers stay as
 * they are written. `what` names it in the error. ERR_ARG: not JSON, or nested deeper than 100. */
int chat_put_json(struct chat_sink *s, struct chat_str json, int indent, const char *what);

/* Walks the members of a JSON object: *rest starts as the whole text. Returns 1 with key (raw, still escaped, without quotes)
 * and value (raw JSON text), 0 at the end, ERR_ARG. */
struct chat_json_walk {
    struct chat_str rest;
    bool inside;
};
int chat_json_next(struct chat_json_walk *w, struct chat_str *key, struct chat_str *value, const char *what);
/* Prints the text that a JSON string's inside stands for, or raw JSON when value is not a string. */
void chat_put_unescaped(struct chat_sink *s, struct chat_str inside);
/* Prints a text as a JSON string. */
void chat_put_quoted(struct chat_sink *s, struct chat_str text);
void chat_put_value(struct chat_sink *s, struct chat_str value);

/* --- families ------------------------------------------------------------------------------------------------------------------ */
int chat_render_chatml(struct chat_sink *s, const struct chat_call *c);   /* chat_qwen.c */
int chat_render_qwen25(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwq(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwen3(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwen3_thinking(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwen3_coder(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwen35(struct chat_sink *s, const struct chat_call *c);
int chat_render_qwen38(struct chat_sink *s, const struct chat_call *c);
int chat_render_llama2(struct chat_sink *s, const struct chat_call *c);   /* chat_llama.c */
int chat_render_llama3(struct chat_sink *s, const struct chat_call *c);
int chat_render_llama31(struct chat_sink *s, const struct chat_call *c);
int chat_render_gemma(struct chat_sink *s, const struct chat_call *c);    /* chat_more.c */
int chat_render_phi3(struct chat_sink *s, const struct chat_call *c);
int chat_render_phi4(struct chat_sink *s, const struct chat_call *c);
int chat_render_phi4_mini(struct chat_sink *s, const struct chat_call *c);
int chat_render_deepseek(struct chat_sink *s, const struct chat_call *c);
int chat_render_deepseek_r1(struct chat_sink *s, const struct chat_call *c);
int chat_render_mistral_v1(struct chat_sink *s, const struct chat_call *c); /* chat_mistral.c */
int chat_render_mistral_v3(struct chat_sink *s, const struct chat_call *c);
int chat_render_mistral_v3_tekken(struct chat_sink *s, const struct chat_call *c);
int chat_render_mistral_v7(struct chat_sink *s, const struct chat_call *c);
int chat_render_mistral_v7_tekken(struct chat_sink *s, const struct chat_call *c);

/* For families with strict turns: an optional system message, then user and assistant in turn (tool messages and answers
 * that are only calls do not count). *start gets the index after the system message. */
int chat_check_turns(const struct chat_call *c, int *start);
/* Shared by the families that have no tool format here: ERR_UNSUPPORTED when tools, tool calls or tool results are used. */
int chat_refuse_tools(const struct chat_call *c);
/* For families that always think: what the answer begins with. Closing the block at once exists only where the template
 * says so; otherwise switching off is ERR_ARG. */
int chat_always_thinking(const struct chat_call *c, const char **answer);
/* For families without a thinking switch: sets the prompt's note when one was asked for. */
void chat_note_no_thinking(const struct chat_call *c);

#endif
