/* cmd_perplexity.c: perplexity over a text in windows of n_ctx tokens, counted over the second half of each window: the
 * method and the last line of llama.cpp's tool, so that figures can be set side by side. */
#include "offload/cli/cli.h"

#include "core/quant.h"
#include "offload/clock.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The base of a divergence: token ids and the log-probabilities of the scored positions, 16 bits each under a scale and a
 * minimum of the row. The layout is llama.cpp's, so that a base may come from either program. */
struct kl_file {
    FILE *f;
    const char *path;
    bool writing;
    uint16_t *row; /* [2 * ((n_vocab + 1) / 2) + 4]: f32 scale, f32 minimum, then the codes */
    size_t row_n;
};

struct ppl {
    const int32_t *ids; /* of the window */
    int n_vocab, n_ctx, first, n_done; /* n_done: windows scored */
    double nll, nll2;
    int64_t count;
    struct kl_file kl;
    double kl_sum, kl_sum2, kl_max, base_nll;
    int64_t same_top;
};

/* ln of the sum of e^(logits - top); in double. */
static double log_sum(const float *logits, int n, float *top) {
    *top = logits[0];
    for (int i = 1; i < n; i++)
        if (logits[i] > *top) *top = logits[i];
    double sum = 0;
    for (int i = 0; i < n; i++) sum += expf(logits[i] - *top);
    return log(sum);
}

static int kl_write(struct kl_file *k, const float *logits, int n, float top, double sum) {
    float low = logits[0];
    for (int i = 1; i < n; i++)
        if (logits[i] < low) low = logits[i];
    if (low < top - 16) low = top - 16;
    float head[2] = {(top - low) / 65535.0f, (float)(low - top - sum)};
    memcpy(k->row, head, sizeof head);
    for (int i = 0; i < n; i++) {
        float x = logits[i] > low ? logits[i] - low : 0;
        k->row[4 + i] = (uint16_t)(head[0] > 0 ? x / head[0] + 0.5f : 0);
    }
    if (fwrite(k->row, sizeof *k->row, k->row_n, k->f) == k->row_n) return 0;
    return err_set(ERR_IO, "%s: cannot write: %s", k->path, strerror(errno));
}

static int kl_compare(struct ppl *p, const float *logits, int32_t next, float top, double sum) {
    struct kl_file *k = &p->kl;
    if (fread(k->row, sizeof *k->row, k->row_n, k->f) != k->row_n)
        return err_set(ERR_IO, "%s: ends before the text does: it was made with fewer --chunks", k->path);
    float head[2];
    memcpy(head, k->row, sizeof head);
    double kl = 0;
    int best = 0, base_best = 0;
    for (int i = 0; i < p->n_vocab; i++) {
        double base = (double)head[0] * k->row[4 + i] + head[1];
        if (logits[i] > logits[best]) best = i;
        if (k->row[4 + i] > k->row[4 + base_best]) base_best = i;
        if (base > -16) kl += exp(base) * (base - ((double)(logits[i] - top) - sum));
    }
    p->base_nll -= (double)head[0] * k->row[4 + next] + head[1];
    p->kl_sum += kl;
    p->kl_sum2 += kl * kl;
    p->kl_max = kl > p->kl_max ? kl : p->kl_max;
    p->same_top += best == base_best;
    return 0;
}

static int on_logits(void *arg, int64_t pos, const float *logits) {
    struct ppl *p = arg;
    if (pos < p->first || pos + 1 >= p->n_ctx) return 0;
    float top;
    double sum = log_sum(logits, p->n_vocab, &top), s = sum - (double)(logits[p->ids[pos + 1]] - top);
    p->nll += s;
    p->nll2 += s * s;
    p->count++;
    if (!p->kl.f) return 0;
    return p->kl.writing ? kl_write(&p->kl, logits, p->n_vocab, top, sum) : kl_compare(p, logits, p->ids[pos + 1], top, sum);
}

/* Opens the base and writes or checks its header: magic, n_ctx, n_vocab, windows, then the ids of all windows. */
static int kl_open(struct ppl *p, const char *path, bool compare, const int32_t *ids, int n_chunk) {
    struct kl_file *k = &p->kl;
    *k = (struct kl_file){.path = path, .writing = !compare, .row_n = 2 * (((size_t)p->n_vocab + 1) / 2) + 4};
    k->row = calloc(k->row_n, sizeof *k->row);
    if (!k->row) return err_set(ERR_NOMEM, "perplexity: out of memory");
    k->f = fopen(path, compare ? "rb" : "wb");
    if (!k->f) return err_set(ERR_ARG, "--kl-divergence-base %s: %s", path, strerror(errno));
    int32_t head[3] = {p->n_ctx, p->n_vocab, n_chunk}, got[3];
    size_t n = (size_t)n_chunk * (size_t)p->n_ctx;
    char magic[8];
    if (k->writing) {
        bool ok = fwrite("_logits_", 1, 8, k->f) == 8 && fwrite(head, 4, 3, k->f) == 3 && fwrite(ids, 4, n, k->f) == n;
        return ok ? 0 : err_set(ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    }
    if (fread(magic, 1, 8, k->f) != 8 || memcmp(magic, "_logits_", 8) || fread(got, 4, 3, k->f) != 3)
        return err_set(ERR_ARG, "--kl-divergence-base %s: not a file of log-probabilities", path);
    if (got[0] != head[0] || got[1] != head[1] || got[2] < n_chunk)
        return err_set(ERR_ARG, "--kl-divergence-base %s: made with -c %d, %d tokens of vocabulary and %d windows; this run has %d, %d and %d", path,
                       got[0], got[1], got[2], head[0], head[1], n_chunk);
    for (size_t i = 0; i < (size_t)got[2] * (size_t)got[0]; i++) {
        int32_t id;
        if (fread(&id, 4, 1, k->f) != 1) return err_set(ERR_ARG, "--kl-divergence-base %s: truncated", path);
        if (i < n && id != ids[i] && i % (size_t)p->n_ctx) return err_set(ERR_ARG, "--kl-divergence-base %s: made from another text (token %zu)", path, i);
    }
    return 0;
}

static int kl_close(struct ppl *p, int rc) {
    struct kl_file *k = &p->kl;
    if (k->f && fclose(k->f) && !rc) rc = err_set(ERR_IO, "%s: cannot write: %s", k->path, strerror(errno));
    free(k->row);
    return rc;
}

static void kl_report(const struct ppl *p) {
    double n = (double)p->count, mean = p->kl_sum / n, var = p->kl_sum2 / n - mean * mean;
    printf("Mean PPL(Q)    : %10.4f\nMean PPL(base) : %10.4f\n", exp(p->nll / n), exp(p->base_nll / n));
    printf("Mean KLD       : %10.6f +/- %.6f\nMaximum KLD    : %10.6f\nSame top p     : %9.3f %%\n", mean,
           n > 1 && var > 0 ? sqrt(var / (n - 1)) : 0, p->kl_max, 100 * (double)p->same_top / n);
}

static void report(const struct ppl *p, int n_chunk) {
    double mean = p->nll / (double)p->count, var = p->nll2 / (double)p->count - mean * mean;
    double ppl = exp(mean), err = p->count > 1 && var > 0 ? sqrt(var / (double)(p->count - 1)) * ppl : 0;
    if (p->n_done == n_chunk)
        printf("Final estimate: PPL = %.4f +/- %.5f\n", ppl, err);
    else
        printf("Ended early, after %d of %d windows: PPL = %.4f +/- %.5f\n", p->n_done, n_chunk, ppl, err);
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
        p->n_done = c + 1;
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
    if (!rc) rc = cli_utf8("the text", text, bytes);
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
    bool kl = false;
    struct opt tab[] = {
        CLI_MODEL_OPTS(o),
        {.names = "Text", .type = OPT_GROUP},
        {.names = "-f,--file", .type = OPT_STRING, .dst = &file, .no_env = true, .metavar = "FILE", .help = "text to score; - is standard input"},
        {.names = "-p,--prompt", .type = OPT_STRING, .dst = &prompt, .no_env = true, .metavar = "TEXT", .help = "text to score"},
        {.names = "--chunks", .type = OPT_INT, .dst = &chunks, .metavar = "N", .min = -1, .max = 1 << 30, .help = "windows to score (-1: all)"},
        {.names = "--kl-divergence-base", .type = OPT_STRING, .dst = &kl_base, .metavar = "FILE", .help = "write log-probabilities there; with --kl-divergence read them"},
        {.names = "--kl-divergence", .type = OPT_FLAG, .dst = &kl, .help = "divergence from the base, e.g. of a KV type from f16"},
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
    if (!rc && kl && !kl_base) rc = err_set(ERR_ARG, "--kl-divergence needs --kl-divergence-base FILE");
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
    if (!rc) rc = engine_load(e, &p, NULL, NULL, &cli_stop);
    if (!rc) rc = session_open(&s, e, &p);
    if (rc) goto out;
    ppl = (struct ppl){.n_vocab = engine_model(e)->n_vocab, .n_ctx = (int)o.ctx, .first = (int)o.ctx / 2};
    fprintf(stderr, "perplexity: %d windows of %lld tokens, %d threads, K %s, V %s\n", n_chunk, (long long)o.ctx, p.n_thread,
            cli_type_name(p.type_k), cli_type_name(p.type_v));
    if (kl_base) rc = kl_open(&ppl, kl_base, kl, ids, n_chunk);
    if (!rc) rc = windows(s, &ppl, ids, n_chunk, tokenizer_add_bos(tok) ? tokenizer_bos(tok) : -1, o.json);
    if (ppl.count && o.json)
        printf("{\"ppl\": %.6f, \"nll\": %.6f, \"tokens\": %lld, \"chunks\": %d, \"n_ctx\": %lld, \"kld\": %.8f, \"same_top\": %.6f}\n", exp(ppl.nll / (double)ppl.count),
               ppl.nll / (double)ppl.count, (long long)ppl.count, ppl.n_done, (long long)o.ctx, ppl.kl_sum / (double)ppl.count,
               (double)ppl.same_top / (double)ppl.count);
    else if (ppl.count)
        report(&ppl, n_chunk);
    if (ppl.count && kl && !o.json) kl_report(&ppl);
    rc = kl_close(&ppl, rc);
out:
    session_close(s);
    free(ids);
    engine_close(e);
    return rc ? cli_fail("perplexity", rc) : 0;
}
