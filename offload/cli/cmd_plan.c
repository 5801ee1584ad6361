/* cmd_plan.c: the memory table of a model and a context. Reads the directory of the file, no weights. */
#include "offload/cli/cli.h"

#include "core/err.h"

#include <stdlib.h>

static int print_json(const struct plan *p, int64_t max_ctx, const struct topo *t, int rc) {
    json_t *host = cli_plan_json(p);
    json_object_set_new(host, "load_bytes", json_integer((json_int_t)p->load_bytes));
    json_object_set_new(host, "runtime_bytes", json_integer((json_int_t)p->runtime_bytes));
    json_object_set_new(host, "host_bytes", json_integer((json_int_t)p->host_bytes));
    json_t *j = json_pack("{s:{s:{s:o}, s:{s:O}}, s:I, s:b, s:I, s:I, s:s, s:I, s:f, s:f, s:s}", "phases", "prefill", "host", host, "decode", "host",
                          host, "kv_total_bytes", (json_int_t)p->kv_bytes, "fits", rc == 0, "host_limit_bytes", (json_int_t)p->host_limit,
                          "host_available_bytes", (json_int_t)t->host_available_bytes, "host_available_why", t->available_why,
                          "max_ctx", (json_int_t)max_ctx, "weight_bytes_per_tok", p->weight_bytes_per_tok, "kv_bytes_per_position",
                          p->kv_bytes_per_position, "origin", "predicted");
    if (!j) return err_set(ERR_NOMEM, "out of memory");
    json_dumpf(j, stdout, JSON_INDENT(1));
    printf("\n");
    json_decref(j);
    return 0;
}

int cmd_plan(int argc, char **argv) {
    struct cli_opts o;
    cli_defaults(&o);
    bool max_ctx = false;
    const char *shape = NULL;
    struct opt tab[] = {
        CLI_MODEL_OPTS(o),
        {.names = "--shape", .type = OPT_STRING, .dst = &shape, .metavar = "NAME:MIX", .help = "a built-in shape instead of a file: qwen3.8-27b:q4_k_m"},
        {.names = "Output", .type = OPT_GROUP},
        {.names = "--max-ctx", .type = OPT_FLAG, .dst = &max_ctx, .help = "largest context that fits, instead of -c"},
        {.names = "--json", .type = OPT_FLAG, .dst = &o.json, .help = "machine-readable"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "plan", .summary = "memory table and placement, without reading weights", .usage = "-m FILE | --shape NAME:MIX [-c N] [-ctk T -ctv T]"};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc == OPTS_HELP) return 0;
    struct engine *e = NULL;
    struct plan_request q;
    struct plan p = {0};
    if (!rc && !o.model == !shape) rc = err_set(ERR_ARG, "%s: give -m FILE.gguf or --shape NAME:MIX", shape ? "two models" : "no model");
    if (!rc && max_ctx && o.ctx > 0) rc = err_set(ERR_ARG, "--max-ctx excludes -c %lld", (long long)o.ctx);
    if (!rc) rc = shape ? engine_open_shape(&e, shape, &o.rope) : engine_open(&e, o.model, &o.rope);
    const struct tokenizer *tok; /* not needed, but a file whose tokenizer is broken is broken */
    if (!rc && !shape) rc = engine_tokenizer(e, &tok);
    if (rc) goto out;
    const struct model *m = engine_model(e);
    int64_t n_ctx = o.ctx > 0 ? o.ctx : m->n_ctx_train;
    rc = cli_request(&q, &o, e, n_ctx, 1);
    if (rc) goto out;
    int64_t most = plan_max_ctx(m, &q, max_ctx ? INT64_C(1) << 32 : n_ctx);
    if (max_ctx && most) q.n_ctx = most;
    rc = plan_make(&p, m, &q);
    if (!rc) rc = cli_warn(&o, e, &p);
    if (rc && rc != ERR_BUDGET) goto out;
    if (!rc && o.json) rc = print_json(&p, most, engine_topo(e), rc);
    if (!rc && !o.json) cli_print_plan(stdout, &p, m);
    if (!rc && !o.json && max_ctx) printf("largest context that fits: %lld tokens\n", (long long)most);
    if (rc == ERR_BUDGET && !o.json) cli_print_plan(stderr, &p, m);
out:
    engine_close(e);
    return rc ? cli_fail("plan", rc) : 0;
}
