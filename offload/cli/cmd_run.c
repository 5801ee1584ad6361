/* cmd_run.c: text out of a model: completion, one chat turn, or a conversation. Also the machine-readable forms that tests
 * and scripts use (--json, --logits-out, --prompt-ids, --token-ids). */
#include "offload/cli/cli.h"

#include "core/chat.h"
#include "core/gguf.h"
#include "core/sampler.h"
#include "core/utf8.h"
#include "offload/cli/escape.h"
#include "gpu/gpu.h"
#include "offload/clock.h"
#include "offload/session.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum thinking { THINK_AUTO, THINK_ON, THINK_OFF };

struct run_opts {
    struct cli_opts m;
    const char *prompt, *file, *prompt_ids, *system, *chat_name, *logits_out, *effort;
    bool conversation, single_turn, no_conversation, token_ids, escape, ignore_eos, show_prompt, no_timings;
    int thinking;
    int64_t n_predict;
    struct sampler_params sampling;
    double temp, top_p, min_p, repeat_penalty, presence, frequency;
    int64_t top_k, repeat_last_n, seed;
    bool temp_seen;
    struct opt_list stops;
    const char *machine;
    int64_t vram_mib;
};

enum stop { STOP_EOS, STOP_LENGTH, STOP_STRING, STOP_INTERRUPTED };
static const char *const stop_names[] = {"eos", "length", "stop-string", "interrupted"};

/* Growing arrays of ids and bytes. */
struct ids {
    int32_t *p;
    size_t n, cap;
};
struct text {
    char *p;
    size_t n, cap;
};

static int ids_push(struct ids *a, const int32_t *p, size_t n) {
    if (a->n + n > a->cap) {
        size_t cap = (a->n + n) * 2 + 64;
        int32_t *q = realloc(a->p, cap * sizeof *q);
        if (!q) return err_set(ERR_NOMEM, "out of memory for %zu tokens", cap);
        a->p = q;
        a->cap = cap;
    }
    if (n) memcpy(a->p + a->n, p, n * sizeof *p);
    a->n += n;
    return 0;
}

static int text_push(struct text *t, const char *p, size_t n) {
    if (t->n + n + 1 > t->cap) {
        size_t cap = (t->n + n) * 2 + 256;
        char *q = realloc(t->p, cap);
        if (!q) return err_set(ERR_NOMEM, "out of memory for %zu bytes of text", cap);
        t->p = q;
        t->cap = cap;
    }
    if (n) memcpy(t->p + t->n, p, n);
    t->n += n;
    t->p[t->n] = 0;
    return 0;
}

/* Everything of one run. */
struct run {
    struct run_opts o;
    struct engine *engine;
    const struct tokenizer *tok;
    struct chat_template *chat;
    struct session *session;
    struct sampler *sampler;
    struct tok_stream *stream;
    struct plan_request request; /* what `plan` was made for */
    struct plan plan;
    struct machine machine;
    size_t vram_limit;         /* after an arena that could not be had */
    struct ids prompt, out;    /* prompt of the first turn; generated ids of all turns */
    struct text answer;        /* generated text of the latest turn */
    FILE *logits;
    bool noted;                /* what the template could not do has been said */
    enum stop stop;
    double prefill_s, decode_s, start_s, first_token_s;
    int64_t n_prefill, n_decode;
};

static int defaults(struct run_opts *o) {
    cli_defaults(&o->m);
    o->sampling = sampler_defaults();
    o->temp = o->sampling.temp;
    o->top_k = o->sampling.top_k;
    o->top_p = o->sampling.top_p;
    o->min_p = o->sampling.min_p;
    o->repeat_penalty = o->sampling.repeat_penalty;
    o->repeat_last_n = o->sampling.repeat_last_n;
    o->presence = o->sampling.presence_penalty;
    o->frequency = o->sampling.frequency_penalty;
    o->seed = -1;
    o->n_predict = -1;
    o->escape = true;
    return 0;
}

static int parse(struct run_opts *o, int argc, char **argv) {
    defaults(o);
    struct opt tab[] = {
        CLI_MODEL_OPTS(o->m),
        {.names = "--machine", .type = OPT_STRING, .dst = &o->machine, .metavar = "NAME|FILE", .help = "rates of this machine: use its GPU as planned for them"},
        {.names = "--vram-mib", .type = OPT_INT, .dst = &o->vram_mib, .metavar = "N", .help = "VRAM for weights, KV, state, scratch, ring", .min = 1, .max = 1LL << 30},
        {.names = "Prompt", .type = OPT_GROUP},
        {.names = "-p,--prompt", .type = OPT_STRING, .dst = &o->prompt, .no_env = true, .metavar = "TEXT", .help = "prompt (in a chat: the user's message, after that of -f)"},
        {.names = "-f,--file", .type = OPT_STRING, .dst = &o->file, .no_env = true, .metavar = "FILE", .help = "prompt from a file of any size; - is standard input"},
        {.names = "-n,--predict,--n-predict", .type = OPT_INT, .dst = &o->n_predict, .metavar = "N", .min = -1, .max = 1LL << 31, .help = "tokens to write; -1: until the model ends or the context is full"},
        {.names = "-cnv,--conversation", .type = OPT_FLAG, .dst = &o->conversation, .help = "chat until end of input (Ctrl-D)"},
        {.names = "-no-cnv,--no-conversation", .type = OPT_FLAG, .dst = &o->no_conversation, .help = "plain completion (the default)", .rare = true},
        {.names = "-st,--single-turn", .type = OPT_FLAG, .dst = &o->single_turn, .help = "chat: one answer, then exit"},
        {.names = "-sys,--system-prompt", .type = OPT_STRING, .dst = &o->system, .metavar = "TEXT", .help = "chat: system message"},
        {.names = "--chat-template", .type = OPT_STRING, .dst = &o->chat_name, .metavar = "NAME", .help = "chat: template by name instead of the file's"},
        {.names = "--thinking", .type = OPT_ENUM, .dst = &o->thinking, .choices = "auto,on,off", .metavar = "auto|on|off", .help = "chat: thinking, where the model has it"},
        {.names = "--reasoning-effort", .type = OPT_STRING, .dst = &o->effort, .metavar = "NAME", .help = "chat: xhigh, medium, low where the model has it", .rare = true},
        {.names = "-e,--escape", .type = OPT_FLAG, .dst = &o->escape, .help = "\\n, \\t, \\xHH ... in -p (default; --no-escape)", .rare = true},
        {.names = "-r,--reverse-prompt", .type = OPT_LIST, .dst = &o->stops, .metavar = "TEXT", .help = "stop when this text was written", .rare = true},
        {.names = "--ignore-eos", .type = OPT_FLAG, .dst = &o->ignore_eos, .help = "write on after an end token", .rare = true},
        {.names = "--display-prompt", .type = OPT_FLAG, .dst = &o->show_prompt, .help = "print the prompt first", .rare = true},
        {.names = "--prompt-ids", .type = OPT_STRING, .dst = &o->prompt_ids, .no_env = true, .metavar = "IDS|@FILE", .help = "token ids as they are, \"1,2,3\"", .rare = true},
        {.names = "Sampling", .type = OPT_GROUP},
        {.names = "--temp,--temperature", .type = OPT_DOUBLE, .dst = &o->temp, .metavar = "F", .help = "temperature (0.8); 0: greedy", .min = 0, .max = 1000},
        {.names = "--top-k", .type = OPT_INT, .dst = &o->top_k, .metavar = "N", .help = "best N tokens (40); 0: all", .min = 0, .max = 1 << 30},
        {.names = "--top-p", .type = OPT_DOUBLE, .dst = &o->top_p, .metavar = "F", .help = "cumulative probability (0.95)", .min = 0, .max = 1},
        {.names = "--min-p", .type = OPT_DOUBLE, .dst = &o->min_p, .metavar = "F", .help = "least share of the best (0.05)", .min = 0, .max = 1},
        {.names = "-s,--seed", .type = OPT_INT, .dst = &o->seed, .metavar = "N", .help = "seed (-1: random)", .min = -1, .max = 4294967295.0},
        {.names = "--repeat-penalty", .type = OPT_DOUBLE, .dst = &o->repeat_penalty, .metavar = "F", .help = "of seen tokens (1: off)", .min = 0.01, .max = 100, .rare = true},
        {.names = "--repeat-last-n", .type = OPT_INT, .dst = &o->repeat_last_n, .metavar = "N", .help = "how far back (64; -1: all)", .min = -1, .max = 1LL << 30, .rare = true},
        {.names = "--presence-penalty", .type = OPT_DOUBLE, .dst = &o->presence, .metavar = "F", .help = "once per seen token", .min = -2, .max = 2, .rare = true},
        {.names = "--frequency-penalty", .type = OPT_DOUBLE, .dst = &o->frequency, .metavar = "F", .help = "per occurrence", .min = -2, .max = 2, .rare = true},
        {.names = "Output", .type = OPT_GROUP},
        {.names = "--json", .type = OPT_FLAG, .dst = &o->m.json, .help = "one JSON object on standard output"},
        {.names = "--token-ids", .type = OPT_FLAG, .dst = &o->token_ids, .help = "print ids instead of text", .rare = true},
        {.names = "--logits-out", .type = OPT_STRING, .dst = &o->logits_out, .metavar = "FILE", .help = "float32 logits of every position", .rare = true},
        {.names = "--dry-run", .type = OPT_FLAG, .dst = &o->m.dry_run, .help = "plan, print, stop"},
        {.names = "--no-perf,--no-timings", .type = OPT_FLAG, .dst = &o->no_timings, .help = "no statistics at the end", .rare = true},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "run", .summary = "writes text from a prompt",
                           .usage = "-m FILE [-p TEXT | -f FILE | < TEXT] [-n N] [options]"};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc) return rc;
    o->sampling = (struct sampler_params){(float)o->temp, (int)o->top_k, (float)o->top_p, (float)o->min_p,
                                          (float)o->repeat_penalty, (int)o->repeat_last_n, (float)o->presence,
                                          (float)o->frequency, (uint32_t)o->seed};
    if (!o->m.model) return err_set(ERR_ARG, "no model: give -m FILE.gguf");
    if (o->no_conversation && (o->conversation || o->single_turn || o->system))
        return err_set(ERR_ARG, "-no-cnv excludes -cnv, -st and -sys");
    if (o->prompt_ids && (o->prompt || o->file)) return err_set(ERR_ARG, "--prompt-ids excludes -p and -f");
    if (o->prompt_ids && (o->conversation || o->single_turn || o->system))
        return err_set(ERR_ARG, "--prompt-ids is a completion's prompt as it is: it excludes -cnv, -st and -sys");
    rc = cli_utf8("-sys", o->system ? o->system : "", o->system ? strlen(o->system) : 0);
    for (int i = 0; i < o->stops.n && !rc; i++) rc = cli_utf8("-r", o->stops.item[i], strlen(o->stops.item[i]));
    if (rc) return rc;
    return sampler_params_check(&o->sampling);
}

static bool is_chat(const struct run_opts *o) { return o->conversation || o->single_turn || o->system; }

/* The prompt's text from -f, -p or standard input. *given: whether there was any source. */
static int prompt_text(const struct run_opts *o, struct text *t, bool *given) {
    *given = false;
    int rc = text_push(t, "", 0);
    if (!rc && (o->file || (!o->prompt && !o->conversation && !isatty(0)))) {
        char *p;
        size_t n;
        rc = cli_read_file(&p, &n, o->file ? o->file : "-");
        if (rc) return rc;
        rc = text_push(t, p, n);
        free(p);
        *given = true;
    }
    if (!rc && o->prompt) {
        char *p = strdup(o->prompt);
        if (!p) return err_set(ERR_NOMEM, "out of memory");
        rc = text_push(t, p, o->escape ? cli_unescape(p) : strlen(p));
        free(p);
        *given = true;
    }
    if (rc) return rc;
    return cli_utf8("the prompt", t->p, t->n);
}

static int parse_ids(struct ids *out, const char *arg, int n_vocab) {
    char *owned = NULL;
    if (*arg == '@') {
        size_t n;
        int rc = cli_read_file(&owned, &n, arg + 1);
        if (rc) return rc;
        arg = owned;
    }
    int rc = 0;
    const char *p = arg;
    while (!rc) {
        while (*p && strchr(" \t\r\n,[]", *p)) p++;
        if (!*p) break;
        char *end;
        errno = 0;
        long long v = strtoll(p, &end, 10);
        if (end == p || errno || v < 0 || v >= n_vocab) {
            rc = err_set(ERR_ARG, "--prompt-ids: '%.20s' is not a token id of this model (0..%d)", p, n_vocab - 1);
            break;
        }
        int32_t id = (int32_t)v;
        rc = ids_push(out, &id, 1);
        p = end;
    }
    free(owned);
    return rc;
}

static int open_chat(struct run *r) {
    const char *text = NULL, *arch = engine_model(r->engine)->arch;
    size_t bytes = 0;
    int rc = gguf_str(engine_gguf(r->engine), "tokenizer.chat_template", &text, &bytes);
    if (rc < 0) return rc;
    rc = r->o.chat_name ? chat_open_named(&r->chat, r->o.chat_name, text, bytes) : chat_open(&r->chat, text, bytes, arch);
    if (rc == ERR_UNSUPPORTED) return err_set(ERR_ARG, "%s", err_text()); /* an option mends it */
    if (!rc && chat_note(r->chat)) cli_note("%s", chat_note(r->chat));
    return rc;
}

/* A rendered conversation as ids: control tokens only where the template wrote them. */
static int chat_ids(struct run *r, const struct chat_message *msg, int n_msg, struct ids *out) {
    struct chat_prompt p;
    const char *token_text;
    size_t n;
    struct chat_options co = {.add_generation_prompt = true, .effort = r->o.effort};
    co.thinking = r->o.thinking == THINK_ON ? CHAT_ON : r->o.thinking == THINK_OFF ? CHAT_OFF : CHAT_AUTO;
    char bos[64] = "", eos[64] = "";
    if ((token_text = tokenizer_token_text(r->tok, tokenizer_bos(r->tok), &n))) snprintf(bos, sizeof bos, "%.*s", (int)n, token_text);
    if ((token_text = tokenizer_token_text(r->tok, tokenizer_eos(r->tok), &n))) snprintf(eos, sizeof eos, "%.*s", (int)n, token_text);
    co.bos_text = bos;
    co.eos_text = eos;
    int rc = chat_render(&p, r->chat, msg, n_msg, &co);
    if (rc) return rc;
    if (p.note && r->o.m.strict) {
        rc = err_set(ERR_STRICT, "%s (--strict)", p.note);
        chat_prompt_free(&p);
        return rc;
    }
    if (p.note && !r->noted) cli_note("%s", p.note);
    r->noted = r->noted || p.note;
    struct tok_span *plain = calloc((size_t)p.n_pieces + 1, sizeof *plain);
    size_t n_plain = 0;
    for (int i = 0; plain && i < p.n_pieces; i++)
        if (!p.pieces[i].special) plain[n_plain++] = (struct tok_span){p.pieces[i].at, p.pieces[i].at + p.pieces[i].bytes};
    int32_t *ids = NULL;
    size_t n_ids = 0;
    unsigned flags = TOK_PARSE_SPECIAL | (p.adds_bos ? 0 : TOK_ADD_SPECIAL);
    rc = plain ? tokenizer_encode_spans(r->tok, p.text, p.bytes, flags, plain, n_plain, &ids, &n_ids)
               : err_set(ERR_NOMEM, "out of memory");
    out->n = 0;
    if (!rc) rc = ids_push(out, ids, n_ids);
    free(ids);
    free(plain);
    chat_prompt_free(&p);
    return rc;
}

/* Ids of the first prompt; in a chat the messages so far are kept in `history` by the caller. */
static int completion_ids(struct run *r, const struct text *t, bool given) {
    if (r->o.prompt_ids) return parse_ids(&r->prompt, r->o.prompt_ids, engine_model(r->engine)->n_vocab);
    if (!given) return err_set(ERR_ARG, "no prompt: give -p TEXT, -f FILE, or text on standard input");
    int32_t *ids;
    size_t n;
    int rc = tokenizer_encode(r->tok, t->p, t->n, TOK_ADD_SPECIAL | TOK_PARSE_SPECIAL, &ids, &n);
    if (rc) return rc;
    rc = ids_push(&r->prompt, ids, n);
    free(ids);
    return rc;
}

/* What is asked of the planner. The GPU is used where its rates, and those of the machine around it, are given. */
static int request(struct run *r, struct plan_request *q, int64_t n_ctx) {
    const struct run_opts *o = &r->o;
    int n = 0, rc = cli_request(q, &o->m, r->engine, n_ctx, o->logits_out ? 8 : 1);
    if (rc || (!o->machine && !o->vram_mib)) return rc;
    if (!o->machine) return err_set(ERR_ARG, "--vram-mib %lld: say what the machine does with --machine NAME or FILE", (long long)o->vram_mib);
    if (o->m.dev != CLI_DEV_NONE && (rc = gpu_count(&n))) return rc;
    if (!n) return err_set(ERR_ARG, "--machine %.60s: there is no GPU to use; longhaul plan --machine predicts without one", o->machine);
    rc = machine_open(&r->machine, o->machine);
    q->machine = &r->machine;
    if (o->m.ngl_seen && o->m.ngl >= 0) q->pins |= PLAN_PIN_LAYERS, q->n_gpu_layers = o->m.ngl;
    engine_use_gpu(r->engine, o->m.dev > 0 ? o->m.dev : 0);
    q->vram_limit = r->vram_limit ? r->vram_limit : (size_t)o->vram_mib << 20;
    return rc;
}

/* The context to plan for. Unset: what a completion needs; else the trained context, or what fits, said aloud. */
static int choose_ctx(struct run *r, int64_t *n_ctx) {
    const struct model *m = engine_model(r->engine);
    struct run_opts *o = &r->o;
    if (o->m.ctx_seen && o->m.ctx > 0) {
        *n_ctx = o->m.ctx;
        return 0;
    }
    if (o->m.ctx_seen) {
        *n_ctx = m->n_ctx_train;
        return 0;
    }
    if (!is_chat(o) && o->n_predict >= 0) {
        *n_ctx = (int64_t)r->prompt.n + o->n_predict;
        if (*n_ctx < 1) *n_ctx = 1;
        return 0;
    }
    struct plan_request q;
    int rc = request(r, &q, m->n_ctx_train);
    if (rc) return rc;
    int64_t most = m->n_ctx_train > (int64_t)r->prompt.n + 1 ? m->n_ctx_train : (int64_t)r->prompt.n + 256;
    *n_ctx = plan_max_ctx(m, &q, most);
    if (*n_ctx && *n_ctx < most)
        cli_note("context of %lld tokens: the model's %lld do not fit the memory (-c N asks for a context)",
                 (long long)*n_ctx, (long long)most);
    if (!*n_ctx) *n_ctx = 256; /* plan_make gives the refusal with its figures */
    return 0;
}

static int make_plan(struct run *r) {
    int64_t n_ctx;
    int rc = choose_ctx(r, &n_ctx);
    if (!rc) rc = request(r, &r->request, n_ctx);
    if (!rc) rc = plan_make(&r->plan, engine_model(r->engine), &r->request);
    if (!rc && (int64_t)r->prompt.n > n_ctx)
        rc = err_set(ERR_ARG, "the prompt has %zu tokens, the context only %lld: raise -c", r->prompt.n, (long long)n_ctx);
    if (!rc && r->prompt.n == 0)
        rc = err_set(ERR_ARG, "%s: nothing to start from", r->o.prompt_ids ? "--prompt-ids holds no id"
                                                                            : "the prompt is empty and this model adds no beginning token");
    if (!rc) rc = cli_warn(&r->o.m, r->engine, &r->plan);
    return rc;
}

/* An answer, and a text after nothing but BOS, begins a text; any other goes on with its leading space. */
static unsigned text_flags(const struct run *r) {
    bool begins = is_chat(&r->o) || r->prompt.n == 0 || (r->prompt.n == 1 && r->prompt.p[0] == tokenizer_bos(r->tok));
    return begins ? 0 : TOK_CONTINUES;
}

static int write_logits(void *arg, int64_t pos, const float *logits) {
    (void)pos;
    struct run *r = arg;
    size_t n = (size_t)engine_model(r->engine)->n_vocab;
    if (fwrite(logits, sizeof *logits, n, r->logits) != n) return err_set(ERR_IO, "%s: cannot write: %s", r->o.logits_out, strerror(errno));
    return 0;
}


static void show_prefill(void *arg, int done, int total) {
    struct run *r = arg;
    (void)r;
    static struct cli_progress p;
    if (done == 0) cli_progress_begin(&p, "prefill", "tok", 1);
    cli_progress_show(&p, done, total);
    if (done == total) cli_progress_end(&p);
}

static int eval(struct run *r, const int32_t *ids, size_t n, bool prefill) {
    struct session_hooks h = {.logits = r->logits ? write_logits : NULL, .progress = prefill ? show_prefill : NULL, .arg = r, .stop = &cli_stop};
    double t = clock_s();
    int64_t before = session_pos(r->session);
    int rc = session_eval(r->session, ids, (int)n, r->logits ? LOGITS_ALL : LOGITS_LAST, &h);
    t = clock_s() - t;
    int64_t done = session_pos(r->session) - before;
    if (prefill) {
        r->prefill_s += t;
        r->n_prefill += done;
    } else {
        r->decode_s += t;
        r->n_decode += done;
    }
    return rc;
}

/* Text to the terminal or pipe as it comes. */
static int emit(struct run *r, const char *p, size_t n) {
    int rc = text_push(&r->answer, p, n);
    if (rc || r->o.m.json || r->o.token_ids || !n) return rc;
    if (fwrite(p, 1, n, stdout) != n || fflush(stdout)) return err_set(ERR_IO, "cannot write the text: %s", strerror(errno));
    return 0;
}

static bool stop_string(const struct run *r) {
    for (int i = 0; i < r->o.stops.n; i++) {
        size_t n = strlen(r->o.stops.item[i]);
        if (n && r->answer.n >= n && !memcmp(r->answer.p + r->answer.n - n, r->o.stops.item[i], n)) return true;
    }
    return false;
}

static bool ends(const struct run *r, int32_t id) {
    if (r->o.ignore_eos) return false;
    if (tokenizer_is_eog(r->tok, id)) return true;
    if (!r->chat) return false;
    const char *const *stop = chat_stops(r->chat);
    for (; stop && *stop; stop++)
        if (tokenizer_find(r->tok, *stop) == id) return true;
    return false;
}

/* Writes one answer after the logits of the prompt are there. */
static int generate(struct run *r) {
    int rc = 0;
    const char *p;
    size_t n;
    r->stop = STOP_LENGTH;
    r->answer.n = 0;
    for (int64_t i = 0; r->o.n_predict < 0 || i < r->o.n_predict; i++) {
        if (cli_stop) {
            r->stop = STOP_INTERRUPTED;
            break;
        }
        int id;
        if ((rc = sampler_sample(r->sampler, session_logits(r->session), &id))) return rc;
        if (!r->first_token_s) r->first_token_s = clock_s() - r->start_s;
        int32_t tid = id;
        if (ends(r, tid)) {
            r->stop = STOP_EOS;
            break;
        }
        sampler_accept(r->sampler, id);
        if ((rc = ids_push(&r->out, &tid, 1))) return rc;
        if (r->o.token_ids && !r->o.m.json) {
            printf("%s%d", r->out.n > 1 ? "," : "", id);
            fflush(stdout);
        }
        tok_stream_push(r->stream, tid, &p, &n);
        if ((rc = emit(r, p, n))) return rc;
        if (stop_string(r)) {
            r->stop = STOP_STRING;
            break;
        }
        if (session_pos(r->session) >= r->plan.n_ctx) break;
        if (r->o.n_predict >= 0 && i + 1 == r->o.n_predict && !r->logits && !is_chat(&r->o)) break; /* its logits are not needed */
        rc = eval(r, &tid, 1, false);
        if (rc == ERR_INTERRUPTED) {
            r->stop = STOP_INTERRUPTED;
            rc = 0;
            break;
        }
        if (rc) return rc;
    }
    tok_stream_finish(r->stream, &p, &n);
    return emit(r, p, n);
}

static int prefill(struct run *r, const struct ids *ids, size_t from) {
    for (size_t i = from; i < ids->n; i++) sampler_accept(r->sampler, ids->p[i]);
    return eval(r, ids->p + from, ids->n - from, true);
}

/* Messages of a conversation; texts are owned. */
struct history {
    struct chat_message *msg;
    int n;
};

static int history_add(struct history *h, enum chat_role role, const char *text, size_t n) {
    struct chat_message *q = realloc(h->msg, sizeof *q * (size_t)(h->n + 1));
    char *copy = malloc(n + 1);
    if (q) h->msg = q;
    if (!q || !copy) {
        free(copy);
        return err_set(ERR_NOMEM, "out of memory for the conversation");
    }
    memcpy(copy, text, n);
    copy[n] = 0;
    h->msg[h->n++] = (struct chat_message){.role = role, .content = {copy, n}};
    return 0;
}

static void history_free(struct history *h) {
    for (int i = 0; i < h->n; i++) free((char *)h->msg[i].content.text);
    free(h->msg);
}

/* The next user message from the terminal; *n = -1 at end of input. A line ending in a backslash goes on. */
static int read_user(struct text *t, bool *eof) {
    char *line = NULL;
    size_t cap = 0;
    t->n = 0;
    *eof = false;
    int rc = text_push(t, "", 0);
    for (;;) {
        if (isatty(0)) fputs(t->n ? "... " : "\n> ", stderr);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) {
            *eof = t->n == 0;
            break;
        }
        if (n && line[n - 1] == '\n') n--;
        bool more = n && line[n - 1] == '\\';
        if (more) line[n - 1] = '\n';
        if ((rc = text_push(t, line, (size_t)n))) break;
        if (!more && t->n) break;
    }
    free(line);
    return rc;
}

/* One turn: the whole history is rendered again and what the session already holds is kept. */
static int turn(struct run *r, struct history *h, struct ids *held) {
    struct ids now = {0};
    int rc = chat_ids(r, h->msg, h->n, &now);
    size_t same = 0;
    while (!rc && same < now.n && same < held->n && now.p[same] == held->p[same]) same++;
    if (!rc && same == now.n) same--; /* the last token's logits are needed */
    if (!rc && (int64_t)same < session_pos(r->session)) { /* or from further back, where a window or a recurrent state asks for it */
        same = (size_t)session_nearest(r->session, (int64_t)same);
        rc = session_truncate(r->session, (int64_t)same);
    }
    if (!rc && (int64_t)now.n > r->plan.n_ctx)
        rc = err_set(ERR_ARG, "the conversation has %zu tokens, the context only %lld: raise -c", now.n, (long long)r->plan.n_ctx);
    size_t answer_from = r->out.n;
    if (!rc) rc = prefill(r, &now, same);
    if (!rc) rc = generate(r);
    if (!rc && r->stop != STOP_INTERRUPTED) rc = history_add(h, CHAT_ASSISTANT, r->answer.p ? r->answer.p : "", r->answer.n);
    held->n = 0;
    if (!rc) rc = ids_push(held, now.p, now.n);
    if (!rc) rc = ids_push(held, r->out.p + answer_from, r->out.n - answer_from);
    if (!rc && (int64_t)held->n > session_pos(r->session)) held->n = (size_t)session_pos(r->session);
    free(now.p);
    return rc;
}

static int conversation(struct run *r, struct history *h, bool have_user) {
    struct ids held = {0};
    struct text line = {0};
    int rc = 0;
    for (bool first = true; !rc; first = false) {
        if (!first || !have_user) {
            bool eof;
            session_rest(r->session);
            rc = read_user(&line, &eof);
            if (rc || eof || cli_stop) break;
            if (cli_utf8("that line", line.p, line.n)) {
                cli_note("%s: not sent", err_text());
                continue;
            }
            rc = history_add(h, CHAT_USER, line.p, line.n);
        }
        if (!rc) rc = turn(r, h, &held);
        if (!r->o.m.json) printf("\n");
        fflush(stdout);
        if (r->o.single_turn || r->stop == STOP_INTERRUPTED) break;
    }
    free(held.p);
    free(line.p);
    return rc;
}

static void print_placement(const struct run *r) {
    const struct plan *p = &r->plan;
    struct run_stats moved;
    const struct plan_phase *d = &p->phase[PLAN_DECODE];
    session_stats(r->session, &moved);
    fprintf(stderr, "placement        : decode has %s of weights and %s of KV in VRAM, %s and %s on the host (%d thread%s, %s)\n",
            cli_bytes((double)d->vram.weights), cli_bytes((double)d->vram.kv), cli_bytes((double)d->host.weights), cli_bytes((double)d->host.kv),
            p->n_thread, p->n_thread == 1 ? "" : "s", isa_name(p->isa));
    fprintf(stderr, "streamed weights : %s in all, %s of it not page-locked; the phase changed %ld time%s\n", cli_bytes(moved.streamed_bytes),
            cli_bytes(moved.pageable_bytes), moved.switches, moved.switches == 1 ? "" : "s");
    fprintf(stderr, "hand-over        : by %s\n", moved.flags ? "flags in memory" : "events");
}

static void print_stats(const struct run *r) {
    const char *mark = clock_simulated() ? " (simulated)" : "";
    const struct plan *p = &r->plan;
    double total = clock_s() - r->start_s;
    double pp = r->n_prefill / (r->prefill_s > 0 ? r->prefill_s : 1e-9), tg = r->n_decode / (r->decode_s > 0 ? r->decode_s : 1e-9);
    fprintf(stderr, "\nload time        = %10.2f ms%s\n", engine_load_s(r->engine) * 1e3, mark);
    fprintf(stderr, "prompt eval time = %10.2f ms / %5lld tokens (%8.2f ms per token, %8.2f tokens per second)%s\n", r->prefill_s * 1e3,
            (long long)r->n_prefill, r->n_prefill ? r->prefill_s * 1e3 / (double)r->n_prefill : 0, r->n_prefill ? pp : 0, mark);
    fprintf(stderr, "eval time        = %10.2f ms / %5lld runs   (%8.2f ms per token, %8.2f tokens per second)%s\n", r->decode_s * 1e3,
            (long long)r->n_decode, r->n_decode ? r->decode_s * 1e3 / (double)r->n_decode : 0, r->n_decode ? tg : 0, mark);
    fprintf(stderr, "total time       = %10.2f ms / %5lld tokens; first token after %.2f ms%s\n", total * 1e3,
            (long long)(r->n_prefill + r->n_decode), r->first_token_s * 1e3, mark);
    int64_t pos = session_pos(r->session);
    double bytes = p->weight_bytes_per_tok + p->state_bytes_per_tok + p->kv_bytes_per_position * ((double)pos - 0.5 * (double)r->n_decode);
    if (p->gpu) print_placement(r);
    else fprintf(stderr, "placement        : weights %s and KV %s on the host, attended by the CPU (%d thread%s, %s)\n",
            cli_bytes((double)p->weights_bytes), cli_bytes((double)p->kv_bytes), p->n_thread, p->n_thread == 1 ? "" : "s", isa_name(p->isa));
    if (r->n_decode)
        fprintf(stderr, "decode traffic   : %s a token at depth %lld (weights %s) = %.1f GB/s read%s\n", cli_bytes(bytes), (long long)pos,
                cli_bytes(p->weight_bytes_per_tok), bytes * tg * 1e-9, mark);
    fprintf(stderr, "memory           : planned %s at most, peak resident %s\n", cli_bytes((double)p->host_bytes), cli_bytes((double)cli_rss_peak()));
}

static json_t *ids_json(const struct ids *a) {
    json_t *j = json_array();
    for (size_t i = 0; i < a->n; i++) json_array_append_new(j, json_integer(a->p[i]));
    return j;
}

static void print_json(const struct run *r) {
    char *text = NULL;
    size_t n = 0;
    if (r->out.n) tokenizer_decode(r->tok, r->out.p, r->out.n, TOK_VALID_UTF8 | text_flags(r), &text, &n);
    double pms = r->prefill_s * 1e3, tms = r->decode_s * 1e3;
    json_t *timings = json_pack("{s:i, s:I, s:f, s:f, s:f, s:I, s:f, s:f, s:f, s:f, s:f}", "cache_n", 0, "prompt_n", (json_int_t)r->n_prefill,
                                "prompt_ms", pms, "prompt_per_token_ms", r->n_prefill ? pms / (double)r->n_prefill : 0.0,
                                "prompt_per_second", pms > 0 ? 1e3 * (double)r->n_prefill / pms : 0.0, "predicted_n", (json_int_t)r->out.n,
                                "predicted_ms", tms, "predicted_per_token_ms", r->n_decode ? tms / (double)r->n_decode : 0.0,
                                "predicted_per_second", tms > 0 ? 1e3 * (double)r->n_decode / tms : 0.0,
                                "load_ms", engine_load_s(r->engine) * 1e3, "first_token_ms", r->first_token_s * 1e3);
    json_t *j = json_pack("{s:o, s:o, s:o, s:s, s:o, s:o, s:{s:I, s:I, s:I, s:I}}", "prompt_ids", ids_json(&r->prompt), "ids", ids_json(&r->out),
                          "text", json_stringn(text ? text : "", n), "stop", stop_names[r->stop], "timings", timings, "plan",
                          cli_plan_json(&r->plan), "memory", "host_planned_bytes", (json_int_t)r->plan.host_bytes, "host_peak_bytes",
                          (json_int_t)cli_rss_peak(), "vram_planned_bytes", (json_int_t)plan_arena_bytes(&r->plan), "vram_peak_bytes", (json_int_t)plan_arena_bytes(&r->plan));
    if (clock_simulated()) json_object_set_new(json_object_get(j, "timings"), "simulated", json_true());
    json_dumpf(j, stdout, JSON_COMPACT | JSON_ENSURE_ASCII);
    printf("\n");
    json_decref(j);
    free(text);
}

/* Weights and a session. VRAM that cannot be had after all: plans again with less, three times at most. */
static int load(struct run *r, struct cli_progress *p) {
    for (int again = 0;; again++) {
        int rc = engine_load(r->engine, &r->plan, cli_progress_show, p, &cli_stop);
        cli_progress_end(p);
        if (!rc) break;
        if (rc != ERR_BUDGET || !r->plan.gpu || again == 3) return rc;
        r->vram_limit = plan_arena_bytes(&r->plan) / 10 * 9;
        cli_note("%s; planning with %s of VRAM", err_text(), cli_bytes((double)r->vram_limit));
        rc = make_plan(r);
        if (rc) return rc;
    }
    size_t slow = engine_pageable_bytes(r->engine);
    if (slow && r->o.m.strict) return err_set(ERR_STRICT, "%s of the weights that are copied cannot be page-locked (--strict)", cli_bytes((double)slow));
    if (slow) cli_note("%s of the weights that are copied cannot be page-locked: they go through a small buffer, slower", cli_bytes((double)slow));
    int rc = session_open(&r->session, r->engine, &r->plan);
    if (rc) return rc;
    struct run_stats now;
    session_stats(r->session, &now);
    if (!now.kv_pageable_bytes) return 0;
    if (r->o.m.strict) return err_set(ERR_STRICT, "%s of KV in host memory cannot be page-locked (--strict)", cli_bytes((double)now.kv_pageable_bytes));
    cli_note("%s of KV in host memory cannot be page-locked: copied slower, and the GPU waits for it", cli_bytes((double)now.kv_pageable_bytes));
    return 0;
}

static int work(struct run *r) {
    struct history h = {0};
    struct text text = {0};
    bool given;
    int rc = engine_open(&r->engine, r->o.m.model, &r->o.m.rope);
    if (!rc) rc = engine_tokenizer(r->engine, &r->tok);
    if (!rc) rc = prompt_text(&r->o, &text, &given);
    if (!rc && is_chat(&r->o)) {
        rc = open_chat(r);
        if (!rc && r->o.system) rc = history_add(&h, CHAT_SYSTEM, r->o.system, strlen(r->o.system));
        if (!rc && given) rc = history_add(&h, CHAT_USER, text.p, text.n);
        if (!rc && given) rc = chat_ids(r, h.msg, h.n, &r->prompt);
        if (!rc && !given) rc = ids_push(&r->prompt, (int32_t[]){0}, 1); /* stands for the first message when planning */
    } else if (!rc) {
        rc = completion_ids(r, &text, given);
    }
    free(text.p);
    if (!rc) rc = make_plan(r);
    if (!rc && r->o.m.dry_run) {
        if (r->o.m.json) {
            json_t *j = json_pack("{s:o}", "plan", cli_plan_json(&r->plan));
            json_dumpf(j, stdout, JSON_COMPACT);
            printf("\n");
            json_decref(j);
        } else if (r->plan.gpu) {
            rc = cli_print_machine_plan(stdout, &r->plan, r->engine, &r->request);
        } else {
            cli_print_plan(stdout, &r->plan, engine_model(r->engine));
        }
        history_free(&h);
        return rc;
    }
    if (!rc && r->o.logits_out && !(r->logits = fopen(r->o.logits_out, "wb")))
        rc = err_set(ERR_ARG, "cannot write %s: %s", r->o.logits_out, strerror(errno));
    if (!rc) rc = sampler_open(&r->sampler, &r->o.sampling, engine_model(r->engine)->n_vocab, (int)(r->plan.n_ctx < INT32_MAX ? r->plan.n_ctx : INT32_MAX));
    if (!rc) rc = tok_stream_open(&r->stream, r->tok, text_flags(r));
    struct cli_progress p;
    cli_progress_begin(&p, "loading", "MiB", 1.0 / 1048576);
    if (!rc) rc = load(r, &p);
    if (!rc && is_chat(&r->o)) {
        rc = conversation(r, &h, given);
    } else if (!rc) {
        if (r->o.show_prompt && !r->o.m.json) {
            char *pt;
            size_t n;
            if (!tokenizer_decode(r->tok, r->prompt.p, r->prompt.n, TOK_SHOW_SPECIAL, &pt, &n)) {
                fwrite(pt, 1, n, stdout);
                free(pt);
            }
        }
        rc = prefill(r, &r->prompt, 0);
        if (!rc && r->o.n_predict == 0) r->stop = STOP_LENGTH;
        if (!rc && r->o.n_predict != 0) rc = generate(r);
        if (!rc && !r->o.m.json) printf("\n");
    }
    history_free(&h);
    return rc;
}

int cmd_run(int argc, char **argv) {
    struct run r = {.start_s = clock_s()};
    int rc = parse(&r.o, argc, argv);
    if (rc == OPTS_HELP) return 0;
    cli_catch_signals();
    if (!rc) rc = work(&r);
    if (rc == ERR_INTERRUPTED && r.session) {
        r.stop = STOP_INTERRUPTED;
        rc = 0;
    }
    if (r.logits && fclose(r.logits) && !rc) rc = err_set(ERR_IO, "%s: cannot write: %s", r.o.logits_out, strerror(errno));
    int status = rc ? cli_fail("run", rc) : 0;
    if (!rc && r.session && r.o.m.json) print_json(&r);
    if (!rc && fflush(stdout)) status = cli_fail("run", err_set(ERR_IO, "cannot write: %s", strerror(errno)));
    if (r.session && !r.o.no_timings && !r.o.m.json && (!rc || r.n_prefill)) print_stats(&r);
    if (!status && r.session && r.stop == STOP_INTERRUPTED) {
        cli_note("interrupted after %lld prompt tokens and %zu written", (long long)r.n_prefill, r.out.n);
        status = 130;
    }
    tok_stream_close(r.stream);
    sampler_close(r.sampler);
    session_close(r.session);
    chat_close(r.chat);
    engine_close(r.engine);
    free(r.prompt.p);
    free(r.out.p);
    free(r.answer.p);
    free(r.o.stops.item);
    return status;
}
