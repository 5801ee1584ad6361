/* chat_more.c: Gemma, Phi and DeepSeek chat formats, and what several families share. */
#include "core/chat_impl.h"

#include "core/err.h"

int chat_refuse_tools(const struct chat_call *c) {
    bool used = c->o->n_tools > 0;
    for (int i = 0; i < c->n; i++) used |= c->msg[i].n_tool_calls > 0 || c->msg[i].role == CHAT_TOOL;
    if (!used) return 0;
    return err_set(ERR_UNSUPPORTED, "tools: not known for chat template %s", c->t->family->name);
}

void chat_note_no_thinking(const struct chat_call *c) {
    if (c->o->thinking == CHAT_ON) c->prompt->note = "this chat template has no thinking switch: thinking was not switched on";
}

int chat_always_thinking(const struct chat_call *c, const char **answer) {
    bool closes = (c->t->traits & CHAT_T_UNSET_CLOSES) && c->o->thinking != CHAT_ON;
    if (c->o->thinking == CHAT_OFF && !closes)
        return err_set(ERR_ARG, "chat template %s always thinks: thinking cannot be switched off", c->t->family->name);
    *answer = closes ? "<think>\n</think>" : "<think>\n";
    c->prompt->thinking_open = c->o->add_generation_prompt && !closes;
    return 0;
}

int chat_check_turns(const struct chat_call *c, int *start) {
    bool want_user = true;
    *start = c->n && c->msg[0].role == CHAT_SYSTEM;
    for (int i = *start; i < c->n; i++) {
        const struct chat_message *m = &c->msg[i];
        if (m->role == CHAT_SYSTEM)
            return err_set(ERR_ARG, "chat template %s: the system message must be the first, it is message %d",
                           c->t->family->name, i + 1);
        if (m->role == CHAT_TOOL || m->n_tool_calls) continue;
        if ((m->role == CHAT_USER) != want_user)
            return err_set(ERR_ARG, "chat template %s: user and assistant must take turns, message %d is out of turn",
                           c->t->family->name, i + 1);
        want_user = !want_user;
    }
    return 0;
}

/* The system text stands before the first user text: Gemma 3 says so, Gemma 2 has no other place for it. */
int chat_render_gemma(struct chat_sink *s, const struct chat_call *c) {
    int start, rc = chat_refuse_tools(c);
    if (!rc) rc = chat_check_turns(c, &start);
    if (rc) return rc;
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    for (int i = start; i < c->n; i++) {
        chat_mark(s, "<start_of_turn>");
        chat_text(s, c->msg[i].role == CHAT_USER ? "user\n" : "model\n");
        if (i == start && start) {
            chat_put(s, c->msg[0].content);
            chat_text(s, "\n\n");
        }
        chat_put(s, chat_trim(c->msg[i].content));
        chat_mark(s, "<end_of_turn>");
        chat_text(s, "\n");
    }
    if (c->o->add_generation_prompt) {
        chat_mark(s, "<start_of_turn>");
        chat_text(s, "model\n");
    }
    return 0;
}

static int put_phi(struct chat_sink *s, const struct chat_call *c, const char *gap) {
    static const char *const head[] = {"<|system|>", "<|user|>", "<|assistant|>"};
    int rc = chat_refuse_tools(c);
    if (rc) return rc;
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    for (int i = 0; i < c->n; i++) {
        if (c->msg[i].role == CHAT_SYSTEM && !c->msg[i].content.bytes) continue;
        chat_mark(s, head[c->msg[i].role]);
        chat_text(s, gap);
        chat_put(s, c->msg[i].content);
        chat_mark(s, "<|end|>");
        chat_text(s, gap);
    }
    if (c->o->add_generation_prompt) {
        chat_mark(s, "<|assistant|>");
        chat_text(s, gap);
    } else if (c->t->traits & CHAT_T_EOS_AT_END) {
        chat_mark(s, c->eos);
    }
    return 0;
}

int chat_render_phi3(struct chat_sink *s, const struct chat_call *c) { return put_phi(s, c, "\n"); }
int chat_render_phi4_mini(struct chat_sink *s, const struct chat_call *c) { return put_phi(s, c, ""); }

static void open_phi4(struct chat_sink *s, const char *role) {
    chat_mark(s, "<|im_start|>");
    chat_text(s, role);
    chat_mark(s, "<|im_sep|>");
}

int chat_render_phi4(struct chat_sink *s, const struct chat_call *c) {
    static const char *const role[] = {"system", "user", "assistant"};
    int rc = chat_refuse_tools(c);
    if (rc) return rc;
    chat_note_no_thinking(c);
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    for (int i = 0; i < c->n; i++) {
        open_phi4(s, role[c->msg[i].role]);
        chat_put(s, c->msg[i].content);
        chat_mark(s, "<|im_end|>");
    }
    if (c->o->add_generation_prompt) open_phi4(s, "assistant");
    return 0;
}

/* System texts open the prompt with no mark; the last one wins, as in the template. */
static int put_deepseek(struct chat_sink *s, const struct chat_call *c, const char *answer) {
    int rc = chat_refuse_tools(c);
    if (rc) return rc;
    if (c->prompt->adds_bos) chat_mark(s, c->bos);
    for (int i = c->n - 1; i >= 0; i--) {
        if (c->msg[i].role != CHAT_SYSTEM) continue;
        chat_put(s, c->msg[i].content);
        break;
    }
    for (int i = 0; i < c->n; i++) {
        if (c->msg[i].role == CHAT_USER) {
            chat_mark(s, "<｜User｜>");
            chat_put(s, c->msg[i].content);
        } else if (c->msg[i].role == CHAT_ASSISTANT) {
            chat_mark(s, "<｜Assistant｜>");
            chat_put(s, chat_after_last(c->msg[i].content, "</think>"));
            chat_mark(s, c->eos);
        }
    }
    if (c->o->add_generation_prompt) {
        chat_mark(s, "<｜Assistant｜>");
        chat_text(s, answer);
    }
    return 0;
}

int chat_render_deepseek(struct chat_sink *s, const struct chat_call *c) {
    chat_note_no_thinking(c);
    return put_deepseek(s, c, "");
}

int chat_render_deepseek_r1(struct chat_sink *s, const struct chat_call *c) {
    const char *answer = "";
    int rc = chat_always_thinking(c, &answer);
    return rc ? rc : put_deepseek(s, c, answer);
}
