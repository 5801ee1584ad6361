/* chat_llama.c: the Llama 2, 3 and 3.1+ chat formats. */
#include "core/chat_impl.h"

#include "core/err.h"

#include <stdio.h>

/* [INST] and <<SYS>> are ordinary text here; each pair of turns stands between BOS and EOS. */
int chat_render_llama2(struct chat_sink *s, const struct chat_call *c) {
    int start, rc = chat_refuse_tools(c);
    if (!rc) rc = chat_check_turns(c, &start);
    if (rc) return rc;
    chat_note_no_thinking(c);
    for (int i = start; i < c->n; i++) {
        if (c->msg[i].role == CHAT_ASSISTANT) {
            chat_text(s, " ");
            chat_put(s, chat_trim(c->msg[i].content));
            chat_text(s, " ");
            chat_mark(s, c->eos);
            continue;
        }
        if (i > start || c->prompt->adds_bos) chat_mark(s, c->bos);
        chat_text(s, "[INST] ");
        if (i == start && start) {
            chat_text(s, "<<SYS>>\n");
            chat_put(s, c->msg[0].content);
            chat_text(s, "\n<</SYS>>\n\n");
        }
        chat_put(s, chat_trim(c->msg[i].content));
        chat_text(s, " [/INST]");
    }
    return 0;
}

static void open_turn(struct chat_sink *s, const char *role) {
    chat_mark(s, "<|start_header_id|>");
    chat_text(s, role);
    chat_mark(s, "<|end_header_id|>");
    chat_text(s, "\n\n");
}

static void put_turn(struct chat_sink *s, const struct chat_message *m) {
    static const char *const role[] = {"system", "user", "assistant", "ipython"};
    open_turn(s, role[m->role]);
    chat_put(s, chat_trim(m->content));
    chat_mark(s, "<|eot_id|>");
}

int chat_render_llama3(struct chat_sink *s, const struct chat_call *c) {
    int rc = chat_refuse_tools(c);
    if (rc) return rc;
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    for (int i = 0; i < c->n; i++) put_turn(s, &c->msg[i]);
    if (c->o->add_generation_prompt) open_turn(s, "assistant");
    return 0;
}

/* From 3.1 on there is always a system turn, with two dates. */
static void put_system(struct chat_sink *s, const struct chat_call *c, struct chat_str text) {
    open_turn(s, "system");
    if (c->o->n_tools) chat_text(s, "Environment: ipython\n");
    chat_text(s, "Cutting Knowledge Date: December 2023\nToday Date: ");
    if (c->t->traits & CHAT_T_TODAY)
        chat_put_date_dmy(s, c->o);
    else
        chat_text(s, "26 Jul 2024");
    chat_text(s, "\n\n");
    chat_put(s, chat_trim(text));
    chat_mark(s, "<|eot_id|>");
}

/* The tool list stands in the first user turn, before its text. */
static int put_first_turn_with_tools(struct chat_sink *s, const struct chat_call *c, int i) {
    if (i >= c->n)
        return err_set(ERR_ARG, "chat template %s puts tools into the first user message, and there is none",
                       c->t->family->name);
    open_turn(s, "user");
    chat_text(s, "Given the following functions, please respond with a JSON for a function call with its proper arguments "
                 "that best answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": "
                 "dictionary of argument name and its value}.Do not use variables.\n\n");
    for (int k = 0; k < c->o->n_tools; k++) {
        char what[32];
        snprintf(what, sizeof what, "tool %d", k + 1);
        int rc = chat_put_json(s, c->o->tools[k], 4, what);
        if (rc) return rc;
        chat_text(s, "\n\n");
    }
    chat_put(s, chat_trim(c->msg[i].content));
    chat_mark(s, "<|eot_id|>");
    return 0;
}

static int put_call(struct chat_sink *s, const struct chat_call *c, const struct chat_message *m) {
    if (m->n_tool_calls != 1)
        return err_set(ERR_ARG, "chat template %s allows one tool call per message, got %d", c->t->family->name,
                       m->n_tool_calls);
    open_turn(s, "assistant");
    chat_text(s, "{\"name\": \"");
    chat_put(s, m->tool_calls[0].name);
    chat_text(s, "\", \"parameters\": ");
    int rc = chat_put_json(s, m->tool_calls[0].arguments, 0, "tool call arguments");
    chat_text(s, "}");
    chat_mark(s, "<|eot_id|>");
    return rc;
}

int chat_render_llama31(struct chat_sink *s, const struct chat_call *c) {
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    int i = c->n && c->msg[0].role == CHAT_SYSTEM;
    put_system(s, c, i ? c->msg[0].content : (struct chat_str){0});
    int rc = c->o->n_tools ? put_first_turn_with_tools(s, c, i++) : 0;
    for (; !rc && i < c->n; i++) {
        const struct chat_message *m = &c->msg[i];
        if (m->n_tool_calls) {
            rc = put_call(s, c, m);
        } else if (m->role == CHAT_TOOL) {
            open_turn(s, "ipython");
            chat_put_quoted(s, m->content);
            chat_mark(s, "<|eot_id|>");
        } else {
            put_turn(s, m);
        }
    }
    if (c->o->add_generation_prompt) open_turn(s, "assistant");
    return rc;
}
