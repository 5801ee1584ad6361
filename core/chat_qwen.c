/* chat_qwen.c: ChatML and the Qwen families built on it. One message loop; a family is a set of answers to: is there a
 * default system turn, how does the tool list look, what becomes of old thinking, how does the answer begin.
 * Facts from the templates that the models carry. */
#include "core/chat_impl.h"

#include "core/err.h"

#include <stdio.h>

/* What differs between the families. */
struct style {
    bool trims;           /* contents are stripped on both sides */
    bool strict;          /* system first, a real user message must exist (otherwise the template raises) */
    bool xml_tools;       /* calls as <function=...>, the tool block before the system text */
    bool tools_gap;       /* a blank line before the tool block even without a system text */
    bool history_thinks;  /* answers after the last question keep their thinking */
    bool empty_thinks;    /* ... also when it is empty */
    bool keeps_thinking;  /* all answers keep it */
    bool content_thinks;  /* thinking may stand inside the content, up to </think> */
    bool drops_thinking;  /* all answers but the last message lose their text up to </think> */
    bool drops_empty;     /* an empty system message makes no system turn */
    const char *effort;   /* instruction that opens the system turn, "" for none */
    const char *answer;   /* what the answer begins with */
};

static const char json_tools_head[] =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
static const char json_tools_tail[] =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"
    "</tool_call>";
static const char xml_tools_head[] = "# Tools\n\nYou have access to the following functions:\n\n<tools>";
static const char xml_tools_tail[] =
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>";

static const char *role_name(enum chat_role role) {
    static const char *const name[] = {"system", "user", "assistant", "tool"};
    return name[role];
}

static void open_turn(struct chat_sink *s, const char *role) {
    chat_mark(s, "<|im_start|>");
    chat_text(s, role);
}

static void close_turn(struct chat_sink *s) {
    chat_mark(s, "<|im_end|>");
    chat_text(s, "\n");
}

static void put_turn(struct chat_sink *s, const char *role, struct chat_str content) {
    open_turn(s, role);
    chat_text(s, "\n");
    chat_put(s, content);
    close_turn(s);
}

static struct chat_str content_of(const struct chat_message *m, const struct style *y) {
    return y->trims ? chat_trim(m->content) : m->content;
}

/* --- system turn and tool list ------------------------------------------------------------------------------------------- */

static int put_tool_list(struct chat_sink *s, const struct chat_call *c, const char *head, const char *tail) {
    chat_text(s, head);
    for (int i = 0; i < c->o->n_tools; i++) {
        char what[32];
        snprintf(what, sizeof what, "tool %d", i + 1);
        chat_text(s, "\n");
        int rc = chat_put_json(s, c->o->tools[i], 0, what);
        if (rc) return rc;
    }
    chat_text(s, tail);
    return 0;
}

static void put_system_text(struct chat_sink *s, const struct chat_call *c, struct chat_str given, bool has_system) {
    if (has_system)
        chat_put(s, given);
    else if (c->t->default_system)
        chat_put_dated(s, c->t->default_system, c->o);
}

static int put_system(struct chat_sink *s, const struct chat_call *c, const struct style *y) {
    bool has_system = c->n && c->msg[0].role == CHAT_SYSTEM;
    struct chat_str given = has_system ? content_of(&c->msg[0], y) : (struct chat_str){0};
    bool text = has_system ? given.bytes || !y->drops_empty : c->t->default_system != NULL;
    bool effort = *y->effort != 0;
    if (!c->o->n_tools && !text && !effort) return 0;
    open_turn(s, "system");
    chat_text(s, "\n");
    if (effort) {
        chat_text(s, y->effort);
        if (c->o->n_tools || text) chat_text(s, "\n\n");
    }
    int rc = 0;
    if (y->xml_tools && c->o->n_tools) {
        rc = put_tool_list(s, c, xml_tools_head, xml_tools_tail);
        if (given.bytes) chat_text(s, "\n\n");
        chat_put(s, given);
    } else {
        put_system_text(s, c, given, has_system);
        if (c->o->n_tools) {
            if (text || y->tools_gap) chat_text(s, "\n\n");
            rc = put_tool_list(s, c, json_tools_head, json_tools_tail);
        }
    }
    close_turn(s);
    return rc;
}

/* --- tool calls ------------------------------------------------------------------------------------------------------------ */

static int put_json_call(struct chat_sink *s, const struct chat_tool_call *call) {
    chat_text(s, "<tool_call>\n{\"name\": \"");
    chat_put(s, call->name);
    chat_text(s, "\", \"arguments\": ");
    int rc = chat_put_json(s, call->arguments, 0, "tool call arguments");
    chat_text(s, "}\n</tool_call>");
    return rc;
}

static int put_xml_call(struct chat_sink *s, const struct chat_tool_call *call) {
    chat_text(s, "<tool_call>\n<function=");
    chat_put(s, call->name);
    chat_text(s, ">\n");
    struct chat_json_walk walk = {.rest = call->arguments};
    struct chat_str key, value;
    int more = 0;
    while (walk.rest.bytes && (more = chat_json_next(&walk, &key, &value, "tool call arguments")) > 0) {
        chat_text(s, "<parameter=");
        chat_put_unescaped(s, key);
        chat_text(s, ">\n");
        chat_put_value(s, value);
        chat_text(s, "\n</parameter>\n");
    }
    chat_text(s, "</function>\n</tool_call>");
    return more;
}

static int put_calls(struct chat_sink *s, const struct chat_message *m, const struct style *y, bool after_content) {
    for (int i = 0; i < m->n_tool_calls; i++) {
        if (i)
            chat_text(s, "\n");
        else if (after_content)
            chat_text(s, y->xml_tools ? "\n\n" : "\n");
        int rc = y->xml_tools ? put_xml_call(s, &m->tool_calls[i]) : put_json_call(s, &m->tool_calls[i]);
        if (rc) return rc;
    }
    return 0;
}

static void put_tool_result(struct chat_sink *s, const struct chat_call *c, int i, const struct style *y) {
    if (!i || c->msg[i - 1].role != CHAT_TOOL) open_turn(s, "user");
    chat_text(s, "\n<tool_response>\n");
    chat_put(s, content_of(&c->msg[i], y));
    chat_text(s, "\n</tool_response>");
    if (i + 1 == c->n || c->msg[i + 1].role != CHAT_TOOL) close_turn(s);
}

/* --- answers in the history -------------------------------------------------------------------------------------------------- */

/* Index of the last user message that is a question, not a wrapped tool result; -1 when there is none. */
static int last_question(const struct chat_call *c, const struct style *y) {
    for (int i = c->n - 1; i >= 0; i--) {
        if (c->msg[i].role != CHAT_USER) continue;
        struct chat_str content = content_of(&c->msg[i], y);
        if (!chat_starts(content, "<tool_response>") || !chat_ends(content, "</tool_response>")) return i;
    }
    return -1;
}

/* Thinking and content of an answer, apart. */
static void split_answer(const struct chat_message *m, const struct style *y, struct chat_str *thought,
                         struct chat_str *content) {
    *content = content_of(m, y);
    *thought = m->reasoning;
    if (!m->reasoning.text && y->content_thinks && chat_has(*content, "</think>")) {
        struct chat_str before = chat_trim_newlines(chat_before_first(*content, "</think>"), false, true);
        *thought = chat_after_last(before, "<think>");
        *content = chat_trim_newlines(chat_after_last(*content, "</think>"), true, false);
    }
    *thought = y->trims ? chat_trim(*thought) : chat_trim_newlines(*thought, true, true);
}

static int put_answer(struct chat_sink *s, const struct chat_call *c, int i, int question, const struct style *y) {
    struct chat_str thought, content;
    split_answer(&c->msg[i], y, &thought, &content);
    bool last = i + 1 == c->n;
    bool thinks = y->keeps_thinking || (y->history_thinks && i > question && (last || thought.bytes || y->empty_thinks));
    if (y->drops_thinking && !last) content = chat_trim_newlines(chat_after_last(content, "</think>"), true, false);
    open_turn(s, "assistant");
    chat_text(s, "\n");
    if (thinks) {
        chat_text(s, "<think>\n");
        chat_put(s, thought);
        chat_text(s, "\n</think>\n\n");
    }
    chat_put(s, thinks && !y->trims ? chat_trim_newlines(content, true, false) : content);
    bool after_content = y->drops_thinking ? c->msg[i].content.bytes > 0 : content.bytes > 0;
    int rc = put_calls(s, &c->msg[i], y, after_content);
    close_turn(s);
    return rc;
}

static int put_messages(struct chat_sink *s, const struct chat_call *c, const struct style *y) {
    int question = last_question(c, y);
    if (question < 0 && y->strict)
        return err_set(ERR_ARG, "chat template %s needs at least one user message", c->t->family->name);
    if (question < 0) question = c->n - 1;
    int rc = put_system(s, c, y);
    for (int i = 0; !rc && i < c->n; i++) {
        const struct chat_message *m = &c->msg[i];
        if (m->role == CHAT_ASSISTANT) {
            rc = put_answer(s, c, i, question, y);
        } else if (m->role == CHAT_TOOL) {
            put_tool_result(s, c, i, y);
        } else if (m->role == CHAT_USER || (i && !y->strict)) {
            put_turn(s, role_name(m->role), content_of(m, y));
        } else if (i) {
            rc = err_set(ERR_ARG, "chat template %s: the system message must be the first, it is message %d",
                         c->t->family->name, i + 1);
        }
    }
    if (rc || !c->o->add_generation_prompt) return rc;
    open_turn(s, "assistant");
    chat_text(s, "\n");
    chat_text(s, y->answer);
    return 0;
}

/* --- the families -------------------------------------------------------------------------------------------------------------- */

static bool thinking_wanted(const struct chat_call *c) {
    if (c->o->thinking == CHAT_AUTO) return !(c->t->traits & CHAT_T_THINK_OFF);
    return c->o->thinking == CHAT_ON;
}

static int put_plain(struct chat_sink *s, const struct chat_call *c, const struct style *y) {
    if (!(c->t->traits & CHAT_T_TOOLS)) {
        int rc = chat_refuse_tools(c);
        if (rc) return rc;
    }
    chat_note_no_thinking(c);
    return put_messages(s, c, y);
}

int chat_render_chatml(struct chat_sink *s, const struct chat_call *c) {
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    return put_plain(s, c, &(struct style){.effort = "", .answer = ""});
}

int chat_render_qwen25(struct chat_sink *s, const struct chat_call *c) {
    return put_plain(s, c, &(struct style){.effort = "", .answer = "", .tools_gap = true});
}

int chat_render_qwen3(struct chat_sink *s, const struct chat_call *c) {
    return put_messages(s, c, &(struct style){.history_thinks = true, .content_thinks = true, .effort = "",
                                              .answer = thinking_wanted(c) ? "" : "<think>\n\n</think>\n\n"});
}

int chat_render_qwen3_thinking(struct chat_sink *s, const struct chat_call *c) {
    struct style y = {.history_thinks = true, .content_thinks = true, .effort = ""};
    int rc = chat_always_thinking(c, &y.answer);
    return rc ? rc : put_messages(s, c, &y);
}

int chat_render_qwq(struct chat_sink *s, const struct chat_call *c) {
    struct style y = {.drops_thinking = true, .tools_gap = true, .effort = ""};
    int rc = chat_always_thinking(c, &y.answer);
    return rc ? rc : put_messages(s, c, &y);
}

int chat_render_qwen3_coder(struct chat_sink *s, const struct chat_call *c) {
    int rc = chat_refuse_tools(c); /* its tool list is a third format, rebuilt from the JSON schema field by field */
    chat_note_no_thinking(c);
    return rc ? rc : put_messages(s, c, &(struct style){.effort = "", .answer = ""});
}

static int put_qwen35(struct chat_sink *s, const struct chat_call *c, struct style *y) {
    bool thinks = thinking_wanted(c);
    y->trims = y->strict = y->xml_tools = y->history_thinks = y->empty_thinks = true;
    y->answer = thinks ? "<think>\n" : "<think>\n\n</think>\n\n";
    c->prompt->thinking_open = thinks && c->o->add_generation_prompt;
    return put_messages(s, c, y);
}

int chat_render_qwen35(struct chat_sink *s, const struct chat_call *c) {
    return put_qwen35(s, c, &(struct style){.content_thinks = true, .effort = "",
                                             .keeps_thinking = c->o->preserve_thinking == CHAT_ON});
}

static const char *const effort_names = "xhigh, medium, low";

int chat_render_qwen38(struct chat_sink *s, const struct chat_call *c) {
    const char *effort = c->o->effort ? c->o->effort : "xhigh";
    struct style y = {.effort = "", .drops_empty = true, .keeps_thinking = c->o->preserve_thinking != CHAT_OFF};
    if (!strcmp(effort, "xhigh"))
        y.effort = c->t->effort_xhigh;
    else if (!strcmp(effort, "low"))
        y.effort = c->t->effort_low;
    else if (strcmp(effort, "medium"))
        return err_set(ERR_ARG, "reasoning effort %.40s: chat template qwen3.8 knows %s", effort, effort_names);
    if (!thinking_wanted(c)) y.effort = "";
    return put_qwen35(s, c, &y);
}
