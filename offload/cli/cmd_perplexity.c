/* cmd_perplexity.c: perplexity over a text in windows of n_ctx tokens, counted over the second half of each window: the
 * method and the last line of llama.cpp's tool, so that figures can be set side by side. */
#include "offload/cli/cli.h"

#include "core/quant.h"
#include "offload/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct ppl {
    const int32_t *ids; /* of the window */
    int n_vocab, n_ctx, first;
    double nll, nll2;
    int64_t count;
};

/* -ln p(next) under softmax(logits); log-sum-exp in double. */
static double surprise(const float *logits, int n, int32_t next) {
    float top = logits[0];
    for (int i = 1; i < n; i++)
        if (logits[i] > top) top = logits[i];
    double sum = 0;
    for (int i = 0; i < n; i++) sum += expf(logits[i] - top);
    return log(sum) - (double)(logits[next] - top);
}

static int on_logits(void *arg, int64_t pos, const float *logits) {
    struct ppl *p = arg;
    if (pos < p->first || pos + 1 >= p->n_ctx) return 0;
    double s = surprise(logits, p->n_vocab, p->ids[pos + 1]);
    p->nll += s;
    p->nll2 += s * s;
    p->count++;
    return 0;
}

static void report(const struct ppl *p) {
    double mean = p->nll / (double)p->count, var = p->nll2 / (double)p->count - mean * mean;
    double ppl = exp(mean), err = p->count > 1 && var > 0 ? sqrt(var / (double)(p->count - 1)) * ppl : 0;
    printf("Final estimate: PPL = %.4f +/- %.5f\n", ppl, err);
}

static int windows(struct session *s, struct ppl *p, int32_t *ids, int n_chunk, int32_t bos, bool json) {
    double t0 = clock_s();
    for (int c = 0; c < n_chunk; c++) {
        int32_t *w = ids + (int64_t)c * p->n_ctx, keep = w[0];
        if (bos >= 0) w[0] = bos; /* each window starts like a document */
        p->ids = w;
        struct session_hooks h = {.logits = on_logits, .arg = p, .stop = &cli_stop};
        int rc = session_truncate(s, 0);
        if (!rc) rc = session_eval(s, w, p->n_ctx, LOGITS_ALL, &h);
        w[0] = keep;
        if (rc) return rc;
        if (c == 0 && !json) {
            double per = clock_s() - t0;
            fprintf(stderr, "perplexity: %.2f seconds per pass - ETA %.2f minutes\n", per, per * n_chunk / 60);
        }
        if (json) continue;
        printf("[%d]%.4f,", c + 1, exp(p->nll / (double)p->count));
        fflush(stdout);
    }
    if (!json) printf("\n");
    return 0;
}

static int text_ids(const struct tokenizer *tok, const char *prompt, const char *file, int32_t **ids, size_t *n) {
    char *text = NULL;
    size_t bytes = 0;
    int rc = 0;
    if (file)
        rc = cli_read_file(&text, &bytes, file);
    else if (prompt)
        text = strdup(prompt), bytes = strlen(prompt);
    else
        rc = err_set(ERR_ARG, "no text: give -f FILE or -p TEXT");
    if (!rc) rc = tokenizer_encode(tok, text, bytes, TOK_ADD_SPECIAL, ids, n);
    free(text);
    return rc;
}

int cmd_perplexity(int argc, char **argv) {
    struct cli_opts o;
    cli_defaults(&o);
    o.ctx = 512;
    const char *file = NULL, *prompt = NULL, *kl_base = NULL;
    int64_t chunks = -1;
    struct opt tab[] = {
        CLI_MODEL_OPTS(o),
        {.names = "Text", .type = OPT_GROUP},
        {.names = "-f,--file", .type = OPT_STRING, .dst = &file, .metavar = "FILE", .help = "text to score; - is standard input"},
        {.names = "-p,--prompt", .type = OPT_STRING, .dst = &prompt, .metavar = "TEXT", .help = "text to score"},
        {.names = "--chunks", .type = OPT_INT, .dst = &chunks, .metavar = "N", .min = -1, .max = 1 << 30, .help = "windows to score (-1: all)"},
        {.names = "--kl-divergence-base", .type = OPT_REFUSED, .dst = &kl_base, .metavar = "FILE", .help = "--kl-divergence is not in this version; compare two estimates instead"},
        {.names = "--json", .type = OPT_FLAG, .dst = &o.json, .help = "machine-readable"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "perplexity", .summary = "quality of a model or KV type over a text", .usage = "-m FILE -f TEXT [-c 512] [-ctk T -ctv T]"};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc == OPTS_HELP) return 0;
    cli_catch_signals();
    struct engine *e = NULL;
    struct session *s = NULL;
    const struct tokenizer *tok;
    struct plan_request q;
    struct plan p;
    int32_t *ids = NULL;
    size_t n = 0;
    struct ppl ppl = {0};
    if (!rc && !o.model) rc = err_set(ERR_ARG, "no model: give -m FILE.gguf");
    if (!rc) rc = engine_open(&e, o.model, &o.rope);
    if (!rc) rc = engine_tokenizer(e, &tok);
    if (!rc) rc = text_ids(tok, prompt, file, &ids, &n);
    if (rc) goto out;
    if (!o.ctx) o.ctx = engine_model(e)->n_ctx_train;
    int64_t have = (int64_t)n / o.ctx;
    if (o.ctx < 4) rc = err_set(ERR_ARG, "-c %lld: perplexity needs windows of at least 4 tokens", (long long)o.ctx);
    else if (!have || (int64_t)n < 2 * o.ctx)
        rc = err_set(ERR_ARG, "the text has %zu tokens: at least two windows of -c %lld are needed", n, (long long)o.ctx);
    if (rc) goto out;
    int n_chunk = (int)(chunks < 0 || chunks > have ? have : chunks);
    rc = cli_request(&q, &o, e, o.ctx, 16);
    if (!rc) rc = plan_make(&p, engine_model(e), &q);
    if (!rc) rc = cli_warn(&o, e, &p);
    if (!rc) rc = engine_load(e, p.n_thread, NULL, NULL, &cli_stop);
    if (!rc) rc = session_open(&s, e, &p);
    if (rc) goto out;
    ppl = (struct ppl){.n_vocab = engine_model(e)->n_vocab, .n_ctx = (int)o.ctx, .first = (int)o.ctx / 2};
    fprintf(stderr, "perplexity: %d windows of %lld tokens, %d threads, K %s, V %s\n", n_chunk, (long long)o.ctx, p.n_thread,
            quant_name(p.type_k), quant_name(p.type_v));
    rc = windows(s, &ppl, ids, n_chunk, tokenizer_add_bos(tok) ? tokenizer_bos(tok) : -1, o.json);
    if (ppl.count && o.json)
        printf("{\"ppl\": %.6f, \"nll\": %.6f, \"tokens\": %lld, \"chunks\": %d, \"n_ctx\": %lld}\n", exp(ppl.nll / (double)ppl.count),
               ppl.nll / (double)ppl.count, (long long)ppl.count, n_chunk, (long long)o.ctx);
    else if (ppl.count)
        report(&ppl);
out:
    session_close(s);
    free(ids);
    engine_close(e);
    return rc ? cli_fail("perplexity", rc) : 0;
}
