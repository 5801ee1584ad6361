/* cmd_plan.c: the memory table of a model and a context, on this machine or a described one. Reads the directory of the
 * file, no weights. */
#include "offload/cli/cli.h"

#include "core/err.h"
#include "offload/timeline.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_RULE = 32 };

/* Options about a GPU. */
struct placing {
    const char *machine, *timeline;
    int64_t vram_mib, fit_target, n_cpu_moe, kv_tokens, pass, depth;
    bool vram_seen, moe_seen, all_moe, kv_host, kv_seen, share_seen;
    double kv_share;
    struct opt_list rules;
    struct plan_rule parsed[MAX_RULE];
    char text[MAX_RULE][128];
};

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

/* "PATTERN=CPU" or "=GPU"; several may be given. */
static int read_rules(struct plan_request *q, struct placing *g) {
    if (g->rules.n > MAX_RULE) return err_set(ERR_ARG, "-ot: %d rules, at most %d", g->rules.n, MAX_RULE);
    for (int i = 0; i < g->rules.n; i++) {
        const char *v = g->rules.item[i], *eq = strrchr(v, '=');
        size_t n = eq ? (size_t)(eq - v) : 0;
        if (!n || n >= sizeof g->text[0]) return err_set(ERR_ARG, "-ot %.120s: must be PATTERN=CPU or PATTERN=GPU, up to 127 characters", v);
        if (strcasecmp(eq + 1, "CPU") && strcasecmp(eq + 1, "GPU") && strcasecmp(eq + 1, "CUDA0"))
            return err_set(ERR_ARG, "-ot %.120s: the place must be CPU or GPU", v);
        memcpy(g->text[i], v, n);
        g->text[i][n] = 0;
        g->parsed[i] = (struct plan_rule){g->text[i], strcasecmp(eq + 1, "CPU") ? PLAN_VRAM : PLAN_CPU};
    }
    q->rules = g->parsed;
    q->n_rule = g->rules.n;
    return 0;
}

static bool any_pin(const struct placing *g) {
    return g->vram_mib || g->fit_target || g->moe_seen || g->all_moe || g->kv_host || g->kv_seen || g->share_seen || g->rules.n || g->pass;
}

static int place(struct plan_request *q, struct machine *mc, const struct cli_opts *o, struct placing *g, const struct model *m) {
    int rc = machine_open(mc, g->machine);
    if (rc) return rc;
    double host = 0;
    for (int i = 0; i < mc->host.n_node; i++) host += mc->host.nodes[i].bytes;
    if (o->dev == CLI_DEV_NONE) mc->has_gpu = false;
    q->machine = mc;
    if (!o->host_mib) q->host_limit = (size_t)host;
    if (!o->threads) q->n_thread = mc->cpu.threads;
    q->vram_limit = (size_t)g->vram_mib << 20;
    q->headroom = (size_t)g->fit_target << 20;
    q->pass_tokens = (int)g->pass;
    q->depth = g->depth;
    if (!mc->has_gpu && (any_pin(g) || o->ngl > 0))
        return err_set(ERR_ARG, "%s has no GPU%s: placement in VRAM cannot be asked for", mc->name, o->dev == CLI_DEV_NONE ? " with -dev none" : "");
    if (o->ngl_seen && o->ngl >= 0) q->pins |= PLAN_PIN_LAYERS, q->n_gpu_layers = o->ngl;
    if (g->moe_seen || g->all_moe) q->pins |= PLAN_PIN_MOE, q->n_cpu_moe = g->all_moe ? m->n_block : g->n_cpu_moe;
    if (g->kv_host) q->pins |= PLAN_PIN_KV_HOST;
    if (g->kv_seen) q->pins |= PLAN_PIN_KV_TOKENS, q->kv_vram_tokens = g->kv_tokens;
    if (g->share_seen) q->pins |= PLAN_PIN_KV_SHARE, q->kv_cpu_share = g->kv_share;
    return read_rules(q, g);
}

static int draw(const struct plan *p, const struct plan_request *q, const struct model *m, const char *path, bool quiet) {
    struct timeline *t;
    int rc = timeline_open(&t, p, m, q, PLAN_DECODE);
    if (rc) return rc;
    rc = timeline_svg(t, path);
    if (!rc && !quiet) timeline_text(t, stdout);
    timeline_close(t);
    return rc;
}

int cmd_plan(int argc, char **argv) {
    struct cli_opts o;
    cli_defaults(&o);
    bool max_ctx = false;
    const char *shape = NULL;
    struct placing g = {0};
    struct machine mc;
    struct opt tab[] = {
        CLI_MODEL_OPTS(o),
        {.names = "--shape", .type = OPT_STRING, .dst = &shape, .metavar = "NAME:MIX", .help = "a built-in shape instead of a file: qwen3.8-27b:q4_k_m"},
        {.names = "A described machine, and placement on its GPU", .type = OPT_GROUP},
        {.names = "--machine", .type = OPT_STRING, .dst = &g.machine, .metavar = "NAME|FILE", .help = "plan for it: v100-16g-pcie3, 3090, my.json ..."},
        {.names = "--vram-mib", .type = OPT_INT, .dst = &g.vram_mib, .metavar = "N", .help = "VRAM for weights, KV, state, scratch, ring", .min = 1, .max = 1LL << 30},
        {.names = "-fitt,--fit-target", .type = OPT_INT, .dst = &g.fit_target, .metavar = "MiB", .help = "VRAM to leave free (512)", .min = 1, .max = 1LL << 30},
        {.names = "-nkvo,--no-kv-offload", .type = OPT_FLAG, .dst = &g.kv_host, .help = "all KV in host memory"},
        {.names = "--kv-vram-tokens", .type = OPT_INT, .dst = &g.kv_tokens, .metavar = "N", .help = "newest tokens whose KV is in VRAM", .max = 1LL << 40, .seen = &g.kv_seen},
        {.names = "--kv-cpu-share", .type = OPT_DOUBLE, .dst = &g.kv_share, .metavar = "F", .help = "of the KV outside VRAM that the CPU attends", .max = 1, .seen = &g.share_seen},
        {.names = "-ot,--override-tensor", .type = OPT_LIST, .dst = &g.rules, .metavar = "PATTERN=CPU", .help = "or =GPU: place tensors by name", .rare = true},
        {.names = "-ncmoe,--n-cpu-moe", .type = OPT_INT, .dst = &g.n_cpu_moe, .metavar = "N", .help = "experts of the first N layers on the CPU", .max = 1 << 20, .seen = &g.moe_seen, .rare = true},
        {.names = "-cmoe,--cpu-moe", .type = OPT_FLAG, .dst = &g.all_moe, .help = "all experts on the CPU", .rare = true},
        {.names = "--pass-tokens", .type = OPT_INT, .dst = &g.pass, .metavar = "N", .help = "prompt tokens per crossing of streamed weights", .min = 1, .max = 1 << 20, .rare = true},
        {.names = "--depth", .type = OPT_INT, .dst = &g.depth, .metavar = "N", .help = "tokens in the context that decode is planned for (-c)", .min = 1, .max = 1LL << 40, .rare = true},
        {.names = "Output", .type = OPT_GROUP},
        {.names = "--timeline", .type = OPT_STRING, .dst = &g.timeline, .metavar = "FILE.svg", .help = "draw one decoded token: who works when"},
        {.names = "--max-ctx", .type = OPT_FLAG, .dst = &max_ctx, .help = "largest context that fits, instead of -c"},
        {.names = "--json", .type = OPT_FLAG, .dst = &o.json, .help = "machine-readable"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "plan", .summary = "memory table and placement, without reading weights", .usage = "-m FILE | --shape NAME:MIX [-c N] [-ctk T -ctv T] [--machine NAME|FILE]"};
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
    if (!rc && !g.machine && (any_pin(&g) || g.timeline || g.depth))
        rc = err_set(ERR_ARG, "placement, --depth and --timeline are about a GPU: say which machine with --machine NAME or FILE");
    if (!rc && g.machine) rc = place(&q, &mc, &o, &g, m);
    if (rc) goto out;
    int64_t most = !g.machine || max_ctx ? plan_max_ctx(m, &q, max_ctx ? INT64_C(1) << 32 : n_ctx) : n_ctx;
    if (max_ctx && most) q.n_ctx = most;
    if (q.depth > q.n_ctx) q.depth = q.n_ctx;
    rc = plan_make(&p, m, &q);
    if (!rc) rc = cli_warn(&o, e, &p);
    if (rc && rc != ERR_BUDGET) goto out;
    if (!rc && o.json) rc = g.machine ? cli_json_machine_plan(stdout, &p, e, &q, most) : print_json(&p, most, engine_topo(e), rc);
    if (!rc && !o.json && g.machine) rc = cli_print_machine_plan(stdout, &p, e, &q);
    if (!rc && !o.json && !g.machine) cli_print_plan(stdout, &p, m);
    if (!rc && g.timeline) rc = draw(&p, &q, m, g.timeline, o.json);
    if (!rc && !o.json && max_ctx) printf("largest context that fits: %lld tokens\n", (long long)most);
    if (rc == ERR_BUDGET && !o.json && !g.machine) cli_print_plan(stderr, &p, m);
out:
    free(g.rules.item);
    engine_close(e);
    return rc ? cli_fail("plan", rc) : 0;
}
