/* chat_mistral.c: the Mistral formats v1, v3 and v7, with and without the tekken tokenizer: they differ in spaces, in what is
 * a control token, and in where the system text goes. Before v7 it is put before the first user text, as llama.cpp does;
 * the makers put it before the last one, which would change the whole history (and void its KV) at every turn. */
#include "core/chat_impl.h"

#include "core/err.h"

#include <stdio.h>

struct style {
    const char *before_inst, *after_inst, *before_close, *before_answer;
    bool control;      /* the bracket words are control tokens */
    bool trims_answer;
    bool system_block; /* [SYSTEM_PROMPT] */
    bool call_ids;     /* tool calls as name[CALL_ID]id[ARGS]json instead of a JSON list */
};

static void bracket(struct chat_sink *s, const struct style *y, const char *word) {
    chat_put_bytes(s, word, strlen(word), y->control);
}

static int check_id(const struct chat_call *c, struct chat_str id) {
    if (id.bytes == 9) return 0;
    return err_set(ERR_ARG, "chat template %s: a tool call id must have 9 characters, got %zu", c->t->family->name, id.bytes);
}

static int put_tool_list(struct chat_sink *s, const struct chat_call *c, const struct style *y) {
    bracket(s, y, "[AVAILABLE_TOOLS]");
    chat_text(s, y->after_inst);
    chat_text(s, "[");
    for (int i = 0; i < c->o->n_tools; i++) {
        char what[32];
        snprintf(what, sizeof what, "tool %d", i + 1);
        if (i) chat_text(s, ", ");
        int rc = chat_put_json(s, c->o->tools[i], 0, what);
        if (rc) return rc;
    }
    chat_text(s, "]");
    bracket(s, y, "[/AVAILABLE_TOOLS]");
    return 0;
}

static int put_call_list(struct chat_sink *s, const struct chat_call *c, const struct chat_message *m,
                         const struct style *y) {
    bracket(s, y, "[TOOL_CALLS]");
    chat_text(s, y->after_inst);
    for (int i = 0; i < m->n_tool_calls; i++) {
        const struct chat_tool_call *call = &m->tool_calls[i];
        int rc = check_id(c, call->id);
        chat_text(s, i ? ", {\"name\": " : "[{\"name\": ");
        chat_put_quoted(s, call->name);
        chat_text(s, ", \"arguments\": ");
        if (!rc) rc = chat_put_json(s, call->arguments, 0, "tool call arguments");
        if (rc) return rc;
        chat_text(s, ", \"id\": \"");
        chat_put(s, call->id);
        chat_text(s, "\"}");
    }
    chat_text(s, "]");
    return 0;
}

static int put_calls(struct chat_sink *s, const struct chat_call *c, const struct chat_message *m, const struct style *y) {
    int rc = 0;
    if (!y->call_ids) rc = put_call_list(s, c, m, y);
    for (int i = 0; y->call_ids && !rc && i < m->n_tool_calls; i++) {
        const struct chat_tool_call *call = &m->tool_calls[i];
        chat_mark(s, "[TOOL_CALLS]");
        chat_put(s, call->name);
        rc = check_id(c, call->id);
        chat_mark(s, "[CALL_ID]");
        chat_put(s, call->id);
        chat_mark(s, "[ARGS]");
        if (!rc) rc = chat_put_json(s, call->arguments, 0, "tool call arguments");
    }
    chat_mark(s, c->eos);
    return rc;
}

static int put_tool_result(struct chat_sink *s, const struct chat_call *c, const struct chat_message *m,
                           const struct style *y) {
    int rc = check_id(c, m->tool_call_id);
    bracket(s, y, "[TOOL_RESULTS]");
    if (y->call_ids) {
        chat_put(s, m->tool_call_id);
        chat_mark(s, "[TOOL_CONTENT]");
        chat_put(s, m->content);
    } else {
        chat_text(s, y->after_inst);
        chat_text(s, "{\"content\": ");
        chat_put(s, m->content);
        chat_text(s, ", \"call_id\": \"");
        chat_put(s, m->tool_call_id);
        chat_text(s, "\"}");
    }
    bracket(s, y, "[/TOOL_RESULTS]");
    return rc;
}

static void put_system_block(struct chat_sink *s, const struct chat_call *c, bool given, const struct style *y) {
    if (!given && !c->t->default_system) return;
    chat_mark(s, "[SYSTEM_PROMPT]");
    chat_text(s, y->after_inst);
    if (given)
        chat_put(s, c->msg[0].content);
    else
        chat_put_dated(s, c->t->default_system, c->o);
    chat_mark(s, "[/SYSTEM_PROMPT]");
}

static void put_user(struct chat_sink *s, const struct chat_call *c, int i, int start, const struct style *y) {
    chat_text(s, y->before_inst);
    bracket(s, y, "[INST]");
    chat_text(s, y->after_inst);
    if (i == start && start && !y->system_block) {
        chat_put(s, c->msg[0].content);
        chat_text(s, "\n\n");
    }
    chat_put(s, c->msg[i].content);
    chat_text(s, y->before_close);
    bracket(s, y, "[/INST]");
}

static int last_user(const struct chat_call *c) {
    int i = c->n - 1;
    while (i >= 0 && c->msg[i].role != CHAT_USER) i--;
    return i;
}

static int put_mistral(struct chat_sink *s, const struct chat_call *c, const struct style *y) {
    int start, rc = c->t->traits & CHAT_T_TOOLS ? 0 : chat_refuse_tools(c);
    if (!rc) rc = chat_check_turns(c, &start);
    if (rc) return rc;
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    if (y->system_block) put_system_block(s, c, start > 0, y);
    int tools_at = c->o->n_tools ? last_user(c) : -1;
    for (int i = start; !rc && i < c->n; i++) {
        const struct chat_message *m = &c->msg[i];
        if (i == tools_at) rc = put_tool_list(s, c, y);
        if (rc) return rc;
        if (m->role == CHAT_USER) {
            put_user(s, c, i, start, y);
        } else if (m->role == CHAT_TOOL) {
            rc = put_tool_result(s, c, m, y);
        } else if (m->n_tool_calls) {
            rc = put_calls(s, c, m, y);
        } else {
            chat_text(s, y->before_answer);
            chat_put(s, y->trims_answer ? chat_trim(m->content) : m->content);
            chat_mark(s, c->eos);
        }
    }
    return rc;
}

int chat_render_mistral_v1(struct chat_sink *s, const struct chat_call *c) {
    return put_mistral(s, c, &(struct style){.before_inst = " ", .after_inst = " ", .before_close = " ", .before_answer = " "});
}

int chat_render_mistral_v3(struct chat_sink *s, const struct chat_call *c) {
    return put_mistral(s, c, &(struct style){.before_inst = "", .after_inst = " ", .before_close = "", .before_answer = " ",
                                             .control = true, .trims_answer = true});
}

int chat_render_mistral_v3_tekken(struct chat_sink *s, const struct chat_call *c) {
    return put_mistral(s, c, &(struct style){.before_inst = "", .after_inst = "", .before_close = "", .before_answer = "",
                                             .control = true});
}

int chat_render_mistral_v7(struct chat_sink *s, const struct chat_call *c) {
    return put_mistral(s, c, &(struct style){.before_inst = "", .after_inst = " ", .before_close = "", .before_answer = " ",
                                             .control = true, .system_block = true});
}

int chat_render_mistral_v7_tekken(struct chat_sink *s, const struct chat_call *c) {
    return put_mistral(s, c, &(struct style){.before_inst = "", .after_inst = "", .before_close = "", .before_answer = "",
                                             .control = true, .system_block = true, .call_ids = true});
}
