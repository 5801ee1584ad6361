/* cmd_quantize.c: longhaul quantize IN.gguf OUT.gguf TYPE [THREADS]. The work is done in offload/quantize.c. */
#include "offload/cli/cli.h"

#include "core/mix.h"
#include "core/quant.h"
#include "offload/clock.h"
#include "offload/quantize.h"
#include "offload/topo.h"

#include <string.h>


static void print_step(void *ctx, const struct quantize_step *s) {
    (void)ctx;
    const struct gguf_tensor *t = s->from;
    fprintf(stderr, "[%4d/%4d] %-36s [", s->index + 1, s->count, t->name);
    for (int i = 0; i < t->n_dims; i++) fprintf(stderr, "%s%lld", i ? ", " : "", (long long)t->dims[i]);
    fprintf(stderr, "] %s", quant_name(t->type));
    if (s->type != t->type)
        fprintf(stderr, " -> %s, %s -> %s%s", quant_name(s->type), cli_bytes((double)t->bytes),
                cli_bytes((double)s->bytes), s->fallback ? " (rows do not fit the mix's type)" : "");
    else
        fprintf(stderr, ", %s", cli_bytes((double)t->bytes));
    fputc('\n', stderr);
}

/* "q6_k" into int *dst. */
static int parse_type(const char *option, const char *value, void *dst) {
    int type = quant_from_name(value);
    if (type < 0 || !quant_info(type)->encodable)
        return err_set(ERR_ARG, "%s %s: not a type that can be written", option, value);
    *(int *)dst = type;
    return 0;
}

static int parse_mix(enum mix *mix, const char *text) {
    char known[400] = "";
    int m = mix_from_name(text);
    if (m >= 0 && quant_info(mix_base_type((enum mix)m))->encodable) {
        *mix = (enum mix)m;
        return 0;
    }
    for (int i = 0, at = 0; i < MIX_COUNT && at < (int)sizeof known; i++)
        if (quant_info(mix_base_type((enum mix)i))->encodable)
            at += snprintf(known + at, sizeof known - (size_t)at, "%s%s", at ? ", " : "", mix_name((enum mix)i));
    return err_set(ERR_ARG, "type %s is not one of %s", text, known);
}

static int parse_threads(int *threads, const char *text) {
    int64_t n = 0;
    if (text) {
        int rc = opts_int(&n, "number of threads", text);
        if (rc) return rc;
        if (n < 1 || n > 1024) return err_set(ERR_ARG, "number of threads %s: must be 1 to 1024", text);
    } else {
        struct topo *topo = NULL;
        int rc = topo_open(&topo);
        if (rc) return rc;
        n = topo_default_threads(topo);
        topo_close(topo);
    }
    *threads = (int)n;
    return 0;
}

static int parse_positional(struct quantize_params *p, const char *const *given, int n) {
    if (n < 3) return err_set(ERR_ARG, "%d of 3 arguments given: IN.gguf OUT.gguf TYPE", n);
    int rc = parse_mix(&p->mix, given[2]);
    return rc ? rc : parse_threads(&p->threads, n > 3 ? given[3] : NULL);
}

static void print_result(const struct quantize_result *r, const struct quantize_params *p, const char *to,
                         double seconds) {
    double params = (double)(r->params ? r->params : 1);
    cli_note("%s: %s -> %s (%s), %.2f -> %.2f bits per weight, %.1f s%s", p->dry_run ? "would write" : to,
             cli_bytes((double)r->bytes_from), cli_bytes((double)r->bytes_to), mix_name(p->mix),
             8 * (double)r->bytes_from / params, 8 * (double)r->bytes_to / params, seconds,
             p->dry_run ? " (dry run)" : "");
    if (r->n_fallback)
        cli_note("%d tensors have rows that do not fill the blocks of %s and got a type with smaller ones",
                 r->n_fallback, quant_name(mix_base_type(p->mix)));
}

int cmd_quantize(int argc, char **argv) {
    struct quantize_params p = {.output_type = -1, .embedding_type = -1, .stop = &cli_stop, .on_step = print_step};
    const char *given[4] = {0};
    bool quiet = false;
    struct opt tab[] = {
        {.names = "--pure",
         .type = OPT_FLAG,
         .dst = &p.pure,
         .help = "TYPE for every matrix, output and embedding too"},
        {.names = "--allow-requantize",
         .type = OPT_FLAG,
         .dst = &p.allow_requantize,
         .help = "convert packed tensors as well (loses more than from F16)"},
        {.names = "--leave-output-tensor",
         .type = OPT_FLAG,
         .dst = &p.leave_output,
         .help = "keep the output matrix as it is"},
        {.names = "--output-tensor-type",
         .type = OPT_CALL,
         .dst = &p.output_type,
         .metavar = "TYPE",
         .call = parse_type,
         .help = "type of the output matrix"},
        {.names = "--token-embedding-type",
         .type = OPT_CALL,
         .dst = &p.embedding_type,
         .metavar = "TYPE",
         .call = parse_type,
         .help = "type of the token embedding"},
        {.names = "--dry-run", .type = OPT_FLAG, .dst = &p.dry_run, .help = "show types and sizes, write nothing"},
        {.names = "-q,--quiet", .type = OPT_FLAG, .dst = &quiet, .help = "only the last lines"},
        {.names = "--imatrix", .type = OPT_REFUSED, .metavar = "FILE", .help = "importance matrices are not supported"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "quantize",
                           .summary = "write a GGUF with its matrices packed in a smaller type",
                           .usage = "[options] IN.gguf OUT.gguf TYPE [THREADS]",
                           .max_positional = 4,
                           .positional = given};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc == OPTS_HELP) return 0;
    if (!rc) rc = parse_positional(&p, given, cmd.n_positional);
    if (rc) return cli_fail("quantize", rc);
    if (quiet) p.on_step = NULL;
    cli_catch_signals();
    struct quantize_result r;
    double start = clock_s();
    rc = quantize_file(&r, given[0], given[1], &p);
    if (rc) return cli_fail("quantize", rc);
    print_result(&r, &p, given[1], clock_s() - start);
    return 0;
}
