/* chat.c: recognises a template text, opens families by name, renders in two passes. The families themselves are in
 * chat_qwen.c, chat_llama.c, chat_mistral.c and chat_more.c. */
#include "core/chat_impl.h"

#include "core/err.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define QWEN_STOPS {"<|im_end|>", "<|endoftext|>"}
#define LLAMA3_STOPS {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}
#define DEEPSEEK_BOS "<｜begin▁of▁sentence｜>"
#define DEEPSEEK_EOS "<｜end▁of▁sentence｜>"

static const char qwen25_system[] = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";
static const char smollm2_system[] = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

/* name, aliases, renderer, traits when opened by name, BOS, EOS, default system text, stops. */
static const struct chat_family families[] = {
    {"chatml", "", chat_render_chatml, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"smollm2", "", chat_render_chatml, 0, "", "<|im_end|>", smollm2_system, QWEN_STOPS},
    {"qwen2.5", "qwen25", chat_render_qwen25, CHAT_T_TOOLS, "", "<|im_end|>", qwen25_system, QWEN_STOPS},
    {"qwen3", "", chat_render_qwen3, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"qwen3-thinking", "", chat_render_qwen3_thinking, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"qwen3-coder", "", chat_render_qwen3_coder, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"qwen3.5", "qwen3.6,qwen35,qwen36", chat_render_qwen35, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"qwen3.8", "qwen38", chat_render_qwen38, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"qwq", "", chat_render_qwq, 0, "", "<|im_end|>", NULL, QWEN_STOPS},
    {"llama2", "llama2-sys,llama2-sys-bos,llama2-sys-strip", chat_render_llama2, CHAT_T_BOS, "<s>", "</s>", NULL, {"</s>"}},
    {"llama3", "", chat_render_llama3, CHAT_T_BOS, "<|begin_of_text|>", "<|eot_id|>", NULL, LLAMA3_STOPS},
    {"llama3.1", "llama3.3", chat_render_llama31, CHAT_T_BOS, "<|begin_of_text|>", "<|eot_id|>", NULL, LLAMA3_STOPS},
    {"llama3.2", "", chat_render_llama31, CHAT_T_BOS | CHAT_T_TODAY, "<|begin_of_text|>", "<|eot_id|>", NULL, LLAMA3_STOPS},
    {"gemma", "gemma2,gemma3", chat_render_gemma, CHAT_T_BOS, "<bos>", "<eos>", NULL, {"<end_of_turn>", "<eos>"}},
    {"mistral-v1", "", chat_render_mistral_v1, CHAT_T_BOS, "<s>", "</s>", NULL, {"</s>"}},
    {"mistral-v3", "", chat_render_mistral_v3, CHAT_T_BOS | CHAT_T_TOOLS, "<s>", "</s>", NULL, {"</s>"}},
    {"mistral-v3-tekken", "", chat_render_mistral_v3_tekken, CHAT_T_BOS | CHAT_T_TOOLS, "<s>", "</s>", NULL, {"</s>"}},
    {"mistral-v7", "", chat_render_mistral_v7, CHAT_T_BOS, "<s>", "</s>", NULL, {"</s>"}},
    {"mistral-v7-tekken", "", chat_render_mistral_v7_tekken, CHAT_T_BOS, "<s>", "</s>", NULL, {"</s>"}},
    {"phi3", "phi3.5", chat_render_phi3, 0, "<s>", "<|endoftext|>", NULL, {"<|end|>", "<|endoftext|>"}},
    {"phi4", "", chat_render_phi4, 0, "", "<|im_end|>", NULL, {"<|im_end|>", "<|endoftext|>"}},
    {"phi4-mini", "", chat_render_phi4_mini, 0, "", "<|endoftext|>", NULL, {"<|end|>", "<|endoftext|>"}},
    {"deepseek-r1", "", chat_render_deepseek_r1, CHAT_T_BOS, DEEPSEEK_BOS, DEEPSEEK_EOS, NULL, {DEEPSEEK_EOS}},
    {"deepseek3", "deepseek-v3", chat_render_deepseek, CHAT_T_BOS, DEEPSEEK_BOS, DEEPSEEK_EOS, NULL, {DEEPSEEK_EOS}},
};
enum { N_FAMILIES = sizeof families / sizeof *families };

/* First rule whose words all occur (and `none` does not) decides; name NULL refuses. `qwen`: only for qwen* architectures,
 * because other makers reuse the same marker words in different templates. */
static const struct rule {
    const char *all[3], *none;
    bool qwen;
    const char *name;
} rules[] = {
    {{"<|im_start|>", "<|im_sep|>"}, NULL, false, "phi4"},
    {{"<|im_start|>", "<end_of_utterance>"}, NULL, false, NULL}, /* SmolVLM: <|im_start|> is its BOS, not ChatML */
    {{"<|im_start|>", "reasoning_instructions"}, NULL, true, "qwen3.8"},
    {{"<|im_start|>", "<parameter=", "<think>"}, NULL, true, "qwen3.5"},
    {{"<|im_start|>", "<parameter="}, NULL, true, "qwen3-coder"},
    {{"<|im_start|>assistant\\n<think>\\n"}, "reasoning_content", true, "qwq"},
    {{"<|im_start|>assistant\\n<think>\\n"}, NULL, true, "qwen3-thinking"},
    {{"<|im_start|>assistant\n<think>\n"}, NULL, true, "qwen3-thinking"},
    {{"<|im_start|>", "enable_thinking"}, NULL, true, "qwen3"},
    {{"<|im_start|>", "You are Qwen, created by Alibaba Cloud"}, NULL, true, "qwen2.5"},
    {{"<|im_start|>", "named SmolLM, trained by Hugging Face"}, "<think>", false, "smollm2"},
    {{"<|im_start|>"}, NULL, false, "chatml"},
    {{"[INST]", "[SYSTEM_PROMPT]", "[INST] "}, NULL, false, "mistral-v7"},
    {{"[INST]", "[SYSTEM_PROMPT]"}, NULL, false, "mistral-v7-tekken"},
    {{"[INST]", "<<SYS>>"}, NULL, false, "llama2"},
    {{" [INST]"}, NULL, false, "mistral-v1"},
    {{"\"[INST]\""}, NULL, false, "mistral-v3-tekken"},
    {{"[INST]"}, NULL, false, "mistral-v3"},
    {{"<|assistant|>\\n", "<|end|>"}, NULL, false, "phi3"},
    {{"<|assistant|>\n", "<|end|>"}, NULL, false, "phi3"},
    {{"<|assistant|>", "<|end|>"}, NULL, false, "phi4-mini"},
    {{"<start_of_turn>"}, NULL, false, "gemma"},
    {{"<|start_header_id|>", "Cutting Knowledge Date", "strftime_now"}, NULL, false, "llama3.2"},
    {{"<|start_header_id|>", "Cutting Knowledge Date"}, NULL, false, "llama3.1"},
    {{"<|start_header_id|>"}, NULL, false, "llama3"},
    {{"<｜User｜>", "<｜Assistant｜><think>"}, NULL, false, "deepseek-r1"},
    {{"<｜User｜>", "<｜Assistant｜>"}, "thinking", false, "deepseek3"},
};

static bool rule_fits(const struct rule *r, struct chat_str text, bool qwen) {
    if (r->qwen && !qwen) return false;
    for (int i = 0; i < 3 && r->all[i]; i++)
        if (!chat_has(text, r->all[i])) return false;
    return !r->none || !chat_has(text, r->none);
}

static bool name_in(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *p = list; *p; p += strcspn(p, ",")) {
        if (*p == ',') p++;
        if (n && n == strcspn(p, ",") && !memcmp(p, name, n)) return true;
    }
    return false;
}

static const struct chat_family *family_named(const char *name) {
    for (int i = 0; i < N_FAMILIES; i++)
        if (!strcmp(families[i].name, name) || name_in(families[i].aliases, name)) return &families[i];
    return NULL;
}

const char *chat_names(void) {
    static _Thread_local char list[512];
    size_t n = 0;
    for (int i = 0; i < N_FAMILIES; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "", families[i].name);
    return list;
}

/* --- literals that a template text carries --------------------------------------------------------------------------------- */

/* Copies a piece of Jinja string literal, resolving its backslash escapes, behind what *out holds ([*n] bytes, room for all). */
static void literal_append(char *out, size_t *n, const char *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        char ch = p[i];
        if (ch == '\\' && i + 1 < bytes) {
            ch = p[++i];
            if (ch == 'n') ch = '\n';
            if (ch == 't') ch = '\t';
        }
        if (ch && ch != CHAT_TODAY_MARK) out[(*n)++] = ch;
    }
    out[*n] = 0;
}

/* The text between `head` and "<|im_end|>" where they stand in one literal: no quote, brace or other mark between. */
static char *literal_between(struct chat_str text, const char *head) {
    struct chat_str rest = text;
    for (const char *at; rest.bytes && (at = memmem(rest.text, rest.bytes, head, strlen(head)));) {
        const char *start = at + strlen(head), *end = rest.text + rest.bytes, *p = start;
        while (p < end && !strchr("<'\"{}", *p)) p += *p == '\\' && p + 1 < end ? 2 : 1;
        rest = (struct chat_str){p, (size_t)(end - p)};
        if (p == start || !chat_starts(rest, "<|im_end|>")) continue;
        char *out = malloc((size_t)(p - start) + 1);
        size_t n = 0;
        if (out) literal_append(out, &n, start, (size_t)(p - start));
        return out;
    }
    return NULL;
}

/* Value of `set default_system_message = "..." + today + "..."`: string literals and the word today, joined by +.
 * NULL when it is anything else. */
static char *literal_default_system(struct chat_str text) {
    static const char head[] = "set default_system_message = ";
    const char *p = text.bytes ? memmem(text.text, text.bytes, head, strlen(head)) : NULL;
    if (!p) return NULL;
    const char *end = text.text + text.bytes;
    char *out = malloc((size_t)(end - p) + 1);
    size_t n = 0;
    if (!out) return NULL;
    for (p += strlen(head); p < end;) {
        if (*p == '"' || *p == '\'') {
            const char *start = ++p;
            while (p < end && *p != start[-1]) p += *p == '\\' && p + 1 < end ? 2 : 1;
            literal_append(out, &n, start, (size_t)(p - start));
            if (p < end) p++;
        } else if (end - p > 5 && !memcmp(p, "today", 5)) {
            out[n++] = CHAT_TODAY_MARK;
            p += 5;
        } else {
            break;
        }
        while (p < end && (*p == ' ' || *p == '\n')) p++;
        if (end - p >= 2 && ((p[0] == '%' && p[1] == '}') || (p[0] == '-' && p[1] == '%'))) {
            out[n] = 0;
            return out;
        }
        if (p == end || *p++ != '+') break;
        while (p < end && (*p == ' ' || *p == '\n')) p++;
    }
    free(out);
    return NULL;
}

/* The literal assigned to reasoning_instructions that begins with `begin`. */
static char *literal_effort(struct chat_str text, const char *begin) {
    static const char head[] = "set reasoning_instructions = '";
    struct chat_str rest = text;
    for (const char *at; rest.bytes && (at = memmem(rest.text, rest.bytes, head, strlen(head)));) {
        const char *end = rest.text + rest.bytes;
        rest.text = at + strlen(head);
        rest.bytes = (size_t)(end - rest.text);
        const char *quote = rest.bytes ? memchr(rest.text, '\'', rest.bytes) : NULL;
        if (!quote) return NULL;
        size_t bytes = (size_t)(quote - rest.text), n = 0;
        char *out = chat_starts((struct chat_str){rest.text, bytes}, begin) ? malloc(bytes + 1) : NULL;
        if (out) {
            literal_append(out, &n, rest.text, bytes);
            return out;
        }
    }
    return NULL;
}

static char *copy_of(const char *s) { return s ? strdup(s) : NULL; }

/* Fills the literals of t: from the text where it has them, else the usual ones of the family. */
static int take_literals(struct chat_template *t, struct chat_str text) {
    const char *name = t->family->name;
    if (!strncmp(name, "mistral-v7", 10)) {
        t->default_system = literal_default_system(text);
        if (!t->default_system)
            t->note = "the default system prompt of this chat template is not used; give one with -sys if you want it";
    } else if (!strcmp(name, "qwen3.8")) {
        t->effort_xhigh = literal_effort(text, "Reasoning effort is set to xhigh.");
        t->effort_low = literal_effort(text, "Reasoning effort is set to low.");
        if (!t->effort_xhigh)
            t->effort_xhigh = copy_of("Reasoning effort is set to xhigh. Please think carefully through the task, validate "
                                      "key assumptions, consider plausible alternatives, and prioritize correctness, "
                                      "consistency, and clarity in the final answer.");
        if (!t->effort_low)
            t->effort_low = copy_of("Reasoning effort is set to low. Keep your thinking brief and focused, moving directly "
                                    "to the conclusion without unnecessary elaboration.");
        if (!t->effort_xhigh || !t->effort_low) return err_set(ERR_NOMEM, "chat template: out of memory");
    } else if (t->family->render == chat_render_chatml || t->family->default_system) {
        bool conditional = t->family->default_system || chat_has(text, "!= 'system'") || chat_has(text, "!= \"system\"");
        if (conditional) t->default_system = literal_between(text, "<|im_start|>system\\n");
        if (conditional && !t->default_system) t->default_system = literal_between(text, "<|im_start|>system\n");
        if (!t->default_system) t->default_system = copy_of(t->family->default_system);
    }
    return 0;
}

static int traits_of(const struct chat_family *f, struct chat_str text, bool qwen) {
    int traits = f->traits & ~(CHAT_T_BOS | CHAT_T_TOOLS);
    bool prints_bos = *f->bos || f->render == chat_render_chatml;
    if (prints_bos && (chat_has(text, "bos_token") || (*f->bos && chat_has(text, f->bos)))) traits |= CHAT_T_BOS;
    if (!strncmp(f->name, "phi", 3) && chat_has(text, "eos_token")) traits |= CHAT_T_EOS_AT_END;
    if (chat_has(text, "if not enable_thinking")) traits |= CHAT_T_UNSET_CLOSES;
    struct chat_str tail = chat_after_last(text, "if add_generation_prompt");
    if (chat_has(tail, "enable_thinking is true") && !chat_has(tail, "enable_thinking is false"))
        traits |= CHAT_T_THINK_OFF;
    bool json = qwen && chat_has(text, "You may call one or more functions to assist with the user query.");
    bool list = strncmp(f->name, "mistral-v3", 10) == 0 && chat_has(text, "[AVAILABLE_TOOLS]");
    bool args = !strcmp(f->name, "mistral-v7-tekken") && chat_has(text, "[ARGS]");
    if (json || list || args) traits |= CHAT_T_TOOLS;
    return traits;
}

/* ChatML is the widest row: say so when the text does more than plain ChatML. */
static const char *chatml_note(struct chat_str text, bool qwen) {
    static const char *const signs[] = {"<think>", "enable_thinking", "<parameter=", "reasoning"};
    for (size_t i = 0; !qwen && i < sizeof signs / sizeof *signs; i++)
        if (chat_has(text, signs[i]))
            return "this model's chat template is not known exactly; plain ChatML is used, its thinking and tool parts are not";
    return NULL;
}

static int make(struct chat_template **out, const struct chat_family *f, int traits, struct chat_str text, const char *note) {
    struct chat_template *t = calloc(1, sizeof *t);
    if (!t) return err_set(ERR_NOMEM, "chat template: out of memory");
    t->family = f;
    t->traits = traits;
    t->note = note;
    int rc = take_literals(t, text);
    if (rc) {
        chat_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

int chat_open(struct chat_template **out, const char *text, size_t bytes, const char *arch) {
    struct chat_str s = {text, text ? bytes : 0};
    bool qwen = arch && !strncmp(arch, "qwen", 4);
    if (!s.bytes)
        return err_set(ERR_UNSUPPORTED, "the model file has no chat template; choose one with --chat-template NAME (%s)",
                       chat_names());
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (!rule_fits(&rules[i], s, qwen)) continue;
        if (!rules[i].name) break;
        const struct chat_family *f = family_named(rules[i].name);
        const char *note = f->render == chat_render_chatml && !f->default_system ? chatml_note(s, qwen) : NULL;
        return make(out, f, traits_of(f, s, qwen), s, note);
    }
    return err_set(ERR_UNSUPPORTED,
                   "the model's chat template (%zu bytes) is not one this program knows; choose one with --chat-template NAME (%s)",
                   s.bytes, chat_names());
}

int chat_open_named(struct chat_template **out, const char *name, const char *text, size_t bytes) {
    const struct chat_family *f = family_named(name);
    if (!f) return err_set(ERR_ARG, "--chat-template %.60s: no such template, the names are %s", name, chat_names());
    return make(out, f, f->traits, (struct chat_str){text, text ? bytes : 0}, NULL);
}

void chat_close(struct chat_template *t) {
    if (!t) return;
    free(t->default_system);
    free(t->effort_xhigh);
    free(t->effort_low);
    free(t);
}

const char *chat_name(const struct chat_template *t) { return t->family->name; }
const char *chat_note(const struct chat_template *t) { return t->note; }
const char *const *chat_stops(const struct chat_template *t) { return t->family->stops; }

/* --- rendering ----------------------------------------------------------------------------------------------------------------- */

static int check_call(const struct chat_message *messages, int n, const struct chat_options *o) {
    if (n < 1 || !messages || !o) return err_set(ERR_ARG, "chat: no messages");
    if (o->date.year && (o->date.year < 0 || o->date.year > 9999 || o->date.month < 1 || o->date.month > 12 ||
                         o->date.day < 1 || o->date.day > 31))
        return err_set(ERR_ARG, "chat: %d-%d-%d is not a date", o->date.year, o->date.month, o->date.day);
    for (int i = 0; i < n; i++)
        if (messages[i].n_tool_calls && messages[i].role != CHAT_ASSISTANT)
            return err_set(ERR_ARG, "chat: message %d has tool calls and is not the assistant's", i + 1);
    return 0;
}

int chat_render(struct chat_prompt *out, const struct chat_template *t, const struct chat_message *messages, int n,
                const struct chat_options *o) {
    memset(out, 0, sizeof *out);
    int rc = check_call(messages, n, o);
    if (rc) return rc;
    struct chat_call c = {.t = t, .msg = messages, .n = n, .o = o, .prompt = out};
    c.bos = o->bos_text ? o->bos_text : t->family->bos;
    c.eos = o->eos_text ? o->eos_text : t->family->eos;
    out->adds_bos = (t->traits & CHAT_T_BOS) && *c.bos;
    if (o->effort && t->family->render != chat_render_qwen38)
        out->note = "this chat template has no reasoning effort: it was not set";
    struct chat_sink s = {0};
    rc = t->family->render(&s, &c);
    if (!rc && (s.overflow || s.bytes == SIZE_MAX)) rc = err_set(ERR_ARG, "chat: the messages are too long");
    if (rc) return rc;
    out->text = malloc(s.bytes + 1);
    out->pieces = calloc((size_t)s.n_pieces + 1, sizeof *out->pieces);
    if (!out->text || !out->pieces) {
        rc = err_set(ERR_NOMEM, "chat: no memory for a prompt of %zu bytes", s.bytes);
        goto out;
    }
    s = (struct chat_sink){.text = out->text, .pieces = out->pieces};
    rc = t->family->render(&s, &c);
    if (rc) goto out;
    out->text[s.bytes] = 0;
    out->bytes = s.bytes;
    out->n_pieces = s.n_pieces;
    return 0;
out:
    chat_prompt_free(out);
    return rc;
}

void chat_prompt_free(struct chat_prompt *p) {
    free(p->text);
    free(p->pieces);
    memset(p, 0, sizeof *p);
}
