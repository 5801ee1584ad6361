/* cmd_check.c: takes a claim about speed and context apart, figure by figure. Measures nothing, reads no weights. */
#include "offload/cli/cli.h"

#include "core/gguf.h"
#include "core/quant.h"
#include "core/tokenizer.h"
#include "offload/claim.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 110, MAX_TS = 1000000000 };

struct check_opts {
    const char *gpu, *machine, *shape, *model;
    struct claim claim;
    bool ctx_seen, depth_seen, prompt_seen, attended_seen, json;
    double link_gbps, dram_gbps, vram_gbps, vram_bytes, tflops; /* 0: of the machine */
};

/* OPT_CALL: bytes as 17.2e9, or with a suffix, 16G. */
static int bytes_value(const char *option, const char *value, void *dst) {
    char *end;
    double v = strtod(value, &end);
    int64_t whole;
    if (end == value || *end) {
        int rc = opts_int(&whole, option, value);
        if (rc) return rc;
        v = (double)whole;
    }
    if (!(v >= 1e8 && v <= 1e13)) return err_set(ERR_ARG, "%s %.60s: must be between 1e8 and 1e13 bytes", option, value);
    *(double *)dst = v;
    return 0;
}

/* The latest error with the option that it came from in front. */
static int blame(const char *option, int rc) {
    char text[1024];
    snprintf(text, sizeof text, "%s", err_text());
    return err_set(rc, "%s: %s", option, text);
}

/* --- what the claim is held against ------------------------------------------------------------------------------------------- */

static void override(double *rate, double by_hand, enum machine_origin *origin) {
    if (!(by_hand > 0)) return;
    *rate = by_hand;
    *origin = MACHINE_EDITED;
}

static int open_rates(struct claim_rates *r, const struct check_opts *o) {
    *r = (struct claim_rates){.name = "rates by hand", .runtime_bytes = 0.5e9, .gpu = MACHINE_EDITED, .link = MACHINE_EDITED, .host = MACHINE_EDITED};
    if (o->gpu && o->machine) return err_set(ERR_ARG, "--gpu %.60s excludes --machine %.60s", o->gpu, o->machine);
    struct machine m;
    if (o->gpu) {
        const struct machine *found;
        int rc = machine_find_gpu(&found, o->gpu);
        if (rc) return blame("--gpu", rc);
        claim_rates_of(r, found);
    } else if (o->machine) {
        int rc = machine_open(&m, o->machine);
        if (rc) return blame("--machine", rc);
        if (m.filled[0]) cli_note("--machine %s does not say %s", m.name, m.filled);
        if (!m.has_gpu) cli_note("--machine %s has no GPU", m.name);
        claim_rates_of(r, &m);
    }
    override(&r->vram_bytes, o->vram_bytes, &r->gpu);
    if (o->vram_bytes > 0) r->vram_most_bytes = o->vram_bytes;
    override(&r->vram_gbps, o->vram_gbps, &r->gpu);
    override(&r->peak_tflops, o->tflops, &r->gpu);
    override(&r->link_gbps, o->link_gbps, &r->link);
    override(&r->dram_gbps, o->dram_gbps, &r->host);
    return 0;
}

static int open_file(struct claim_model *out, const char *path) {
    struct gguf *g;
    struct model m;
    int rc = gguf_open(&g, path);
    if (rc) return rc;
    rc = model_open(&m, g);
    if (!rc) {
        struct tokenizer *t = NULL; /* not needed, but a file whose tokenizer is broken is broken */
        rc = tokenizer_from_gguf(&t, g);
        tokenizer_close(t);
        if (!rc) claim_model_of_file(out, &m);
        model_close(&m);
    }
    gguf_close(g);
    return rc;
}

static int open_model(struct claim_model *out, const struct check_opts *o) {
    if (o->shape && o->model) return err_set(ERR_ARG, "--shape %.60s excludes -m %.60s", o->shape, o->model);
    if (o->model) return open_file(out, o->model);
    if (!o->shape) return err_set(ERR_ARG, "no model: give --shape NAME:QUANT, --shape custom:... or -m FILE.gguf");
    int rc = claim_model_parse(out, o->shape);
    return rc ? blame("--shape", rc) : 0;
}

/* --- what is claimed ---------------------------------------------------------------------------------------------------------- */

static int check_kv_type(const char *option, int type, int head_dim) {
    const struct quant_info *q = quant_info(type);
    if (head_dim % q->block_elems == 0) return 0;
    return err_set(ERR_ARG, "%s %s: heads of %d values do not fill blocks of %d", option, q->name, head_dim, q->block_elems);
}

static int check_claim(struct check_opts *o, const struct claim_model *m) {
    struct claim *c = &o->claim;
    if (!o->depth_seen) c->depth = -1;
    if (o->depth_seen && !(c->decode_ts > 0)) return err_set(ERR_ARG, "--claim-depth %lld: needs --claim-decode", (long long)c->depth);
    if (o->prompt_seen && !(c->prefill_ts > 0)) return err_set(ERR_ARG, "--claim-prompt %lld: needs --claim-prefill", (long long)c->prompt);
    if (c->ctx && c->depth > c->ctx)
        return err_set(ERR_ARG, "--claim-depth %lld: beyond --claim-ctx %lld", (long long)c->depth, (long long)c->ctx);
    if (c->ctx && c->prompt > c->ctx)
        return err_set(ERR_ARG, "--claim-prompt %lld: beyond --claim-ctx %lld", (long long)c->prompt, (long long)c->ctx);
    int64_t depth = c->depth >= 0 ? c->depth : c->ctx;
    if (o->attended_seen && !depth)
        return err_set(ERR_ARG, "--claim-attended %lld: needs the context, --claim-depth or --claim-ctx", (long long)c->attended);
    if (c->attended > depth) return err_set(ERR_ARG, "--claim-attended %lld: beyond the context of %lld", (long long)c->attended, (long long)depth);
    int rc = check_kv_type("--cache-type-k", c->type_k, m->head_dim_k);
    return rc ? rc : check_kv_type("--cache-type-v", c->type_v, m->head_dim_v);
}

/* --- for people ----------------------------------------------------------------------------------------------------------------- */

/* Text in lines of WIDTH, broken at spaces, each behind `indent` spaces. */
static void print_wrapped(int indent, const char *text) {
    while (*text) {
        size_t room = (size_t)(WIDTH - indent), n = strlen(text);
        if (n > room) {
            for (n = room; n && (text[n] != ' ' || text[n + 1] == '%');) n--;
            if (!n) n = strcspn(text, " ");
        }
        size_t next = n + strspn(text + n, " ");
        while (n && text[n - 1] == ' ') n--;
        printf("%*s%.*s\n", indent, "", (int)n, text);
        text += next;
    }
}

static const char *value(double v, const char *unit) {
    static char ring[4][40];
    static int at;
    char *s = ring[at++ & 3];
    if (!strcmp(unit, "bytes"))
        snprintf(s, sizeof ring[0], "%s", cli_bytes(v));
    else
        snprintf(s, sizeof ring[0], !strcmp(unit, "tokens/s") && v < 1000 ? "%.4g %s" : "%.0f %s", v, !strcmp(unit, "tokens/s") ? "t/s" : unit);
    return s;
}

static void print_figure(const struct claim_figure *f) {
    static const char *const loud[] = {"possible", "ONLY IF", "IMPOSSIBLE"};
    char name[48];
    snprintf(name, sizeof name, "%s", f->figure);
    if (!strcmp(f->figure, "decode") || !strcmp(f->figure, "prefill")) snprintf(name, sizeof name, "%s @ %lld", f->figure, (long long)f->tokens);
    printf("%-18s %17s %17s  %s\n", name, value(f->claimed, f->unit), value(f->ceiling, f->unit), loud[f->verdict]);
    print_wrapped(4, f->why);
}

static void print_report(const struct claim_report *r, const struct claim_model *m, const struct claim_rates *g, const struct claim *c) {
    printf("against  %s (%s): VRAM %.1f GiB", g->name, machine_origin_name(g->gpu), g->vram_bytes / 1073741824.0);
    if (g->vram_gbps > 0) printf(", %g GB/s", g->vram_gbps);
    if (g->peak_tflops > 0) printf(", %g TFLOP/s", g->peak_tflops);
    if (g->link_gbps > 0) printf("; link %g GB/s (%s)", g->link_gbps, machine_origin_name(g->link));
    if (g->dram_gbps > 0) printf("; DRAM %g GB/s (%s)", g->dram_gbps, machine_origin_name(g->host));
    printf("\nmodel    %s: %.3g B parameters, %.2f GB; %d of %d layers attend, %d heads on %d of KV, %d wide\n", m->name, m->params / 1e9,
           m->weight_bytes / 1e9, m->n_attn, m->n_layer, m->n_head, m->n_kv, m->head_dim_k);
    printf("KV       K %s, V %s: %.0f B per token%s\n\n%-18s %17s %17s  %s\n", quant_name(c->type_k), quant_name(c->type_v), r->kv_bytes_per_tok,
           m->window ? " beyond the windows" : "", "figure", "claimed", "at most", "verdict");
    for (int i = 0; i < r->n_figure; i++) print_figure(&r->figures[i]);
    char open[1024] = "";
    for (int i = 0; i < r->n_question; i++) {
        size_t n = strlen(open);
        snprintf(open + n, sizeof open - n, "%s%s", i ? "  " : "", r->questions[i]);
    }
    printf("\nThe claim leaves open:\n");
    print_wrapped(4, open);
}

/* --- for programs ----------------------------------------------------------------------------------------------------------------- */

static json_t *figure_json(const struct claim_figure *f) {
    json_t *j = json_pack("{s:s, s:f, s:f, s:s, s:s, s:s, s:s}", "figure", f->figure, "claimed", f->claimed, "ceiling", f->ceiling, "unit", f->unit,
                          "verdict", claim_verdict_name(f->verdict), "why", f->why, "origin", machine_origin_name(f->origin));
    if (f->tokens >= 0) json_object_set_new(j, "at_tokens", json_integer(f->tokens));
    return j;
}

/* Whole bytes; below zero, of what does not fit, is none. */
static json_t *whole(double v) { return json_integer((json_int_t)llround(v > 0 ? v : 0)); }

/* 0 (a rate that is not known, a bound that does not apply) is null. */
static json_t *rate(double v) { return v > 0 ? json_real(v) : json_null(); }

static json_t *decode_json(const struct claim_decode *d) {
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:s}", "depth", (json_int_t)d->depth, "kv_read_bytes", whole(d->kv_bytes),
                     "read_bytes_per_tok", whole(d->read_bytes), "outside_vram_bytes", whole(d->outside_bytes), "ceil_vram_ts", rate(d->vram_ts), "ceil_dram_ts",
                     rate(d->dram_ts), "ceil_link_ts", rate(d->link_ts), "ceil_dram_with_reserve_ts", rate(d->kept_dram_ts),
                     "ceil_link_with_reserve_ts", rate(d->kept_link_ts), "ceiling_ts", rate(d->ceiling_ts), "origin", "predicted");
}

static json_t *machine_json(const struct claim_rates *g) {
    return json_pack("{s:s, s:{s:o, s:o, s:o, s:o, s:o, s:s}, s:{s:o, s:s}, s:{s:o, s:o, s:s}}", "name", g->name, "gpu", "vram_bytes", whole(g->vram_bytes),
                     "vram_most_bytes", whole(g->vram_most_bytes), "runtime_bytes", whole(g->runtime_bytes), "vram_gbps", rate(g->vram_gbps), "peak_tflops",
                     rate(g->peak_tflops), "origin", machine_origin_name(g->gpu), "link", "h2d_gbps", rate(g->link_gbps), "origin",
                     machine_origin_name(g->link), "host", "dram_gbps", rate(g->dram_gbps), "bytes", g->host_bytes > 0 ? whole(g->host_bytes) : json_null(), "origin",
                     machine_origin_name(g->host));
}

static json_t *model_json(const struct claim_model *m, const struct claim *c) {
    return json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s}", "name", m->name, "params", whole(m->params),
                     "active_params", whole(m->active_params), "weight_bytes", whole(m->weight_bytes), "weight_bytes_per_tok",
                     whole(m->read_bytes), "embed_bytes", whole(m->embed_bytes), "state_bytes", whole(m->state_bytes), "layers", m->n_layer, "attn_layers", m->n_attn, "heads", m->n_head, "kv_heads",
                     m->n_kv, "head_dim_k", m->head_dim_k, "head_dim_v", m->head_dim_v, "type_k", quant_name(c->type_k), "type_v",
                     quant_name(c->type_v));
}

static json_t *memory_json(const struct claim_report *r) {
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:s}", "tokens", (json_int_t)r->n_tok, "kv_bytes_per_tok",
                     whole(r->kv_bytes_per_tok), "weight_bytes", whole(r->weight_bytes), "kv_bytes", whole(r->kv_bytes), "state_bytes",
                     whole(r->state_bytes), "scratch_bytes", whole(r->scratch_bytes), "runtime_bytes", whole(r->runtime_bytes), "headroom_bytes",
                     whole(r->headroom_bytes), "max_tokens_in_vram", whole((double)r->ctx_in_vram), "origin", "predicted");
}

static int print_json(const struct claim_report *r, const struct claim_model *m, const struct claim_rates *g, const struct claim *c) {
    json_t *figures = json_array(), *questions = json_array(), *ceilings = json_array();
    for (int i = 0; i < r->n_figure; i++) json_array_append_new(figures, figure_json(&r->figures[i]));
    for (int i = 0; i < r->n_question; i++) json_array_append_new(questions, json_string(r->questions[i]));
    if (g->vram_gbps > 0) json_array_append_new(ceilings, decode_json(&r->at_0));
    if (g->vram_gbps > 0 && r->at_depth.depth > 0) json_array_append_new(ceilings, decode_json(&r->at_depth));
    json_t *j = json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "machine", machine_json(g), "model", model_json(m, c), "memory", memory_json(r), "decode",
                          ceilings, "figures", figures, "open_questions", questions);
    if (!j) return err_set(ERR_NOMEM, "out of memory");
    json_dumpf(j, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(12));
    printf("\n");
    json_decref(j);
    return 0;
}

int cmd_check(int argc, char **argv) {
    struct check_opts o = {.claim = {.type_k = QT_F16, .type_v = QT_F16}};
    struct claim *c = &o.claim;
    struct opt tab[] = {
        {.names = "Against what", .type = OPT_GROUP},
        {.names = "--gpu", .type = OPT_STRING, .dst = &o.gpu, .metavar = "NAME", .help = "datasheet of a GPU: v100-16g, rtx3090, 4090 ..."},
        {.names = "--machine", .type = OPT_STRING, .dst = &o.machine, .metavar = "NAME|FILE", .help = "built-in machine, or a machine file"},
        {.names = "--vram-bytes", .type = OPT_CALL, .dst = &o.vram_bytes, .metavar = "B", .call = bytes_value, .help = "instead of the machine's: 17.2e9, 16G"},
        {.names = "--vram-gbps", .type = OPT_DOUBLE, .dst = &o.vram_gbps, .metavar = "F", .min = 0.1, .max = 1e6, .help = "bandwidth of VRAM, 1e9 bytes/s"},
        {.names = "--tflops", .type = OPT_DOUBLE, .dst = &o.tflops, .metavar = "F", .min = 0.001, .max = 1e6, .help = "f16 tensor peak"},
        {.names = "--link-gbps", .type = OPT_DOUBLE, .dst = &o.link_gbps, .metavar = "F", .min = 0.001, .max = 1e5, .help = "host to GPU"},
        {.names = "--dram-gbps", .type = OPT_DOUBLE, .dst = &o.dram_gbps, .metavar = "F", .min = 0.01, .max = 1e5, .help = "host memory"},
        {.names = "Model", .type = OPT_GROUP},
        {.names = "--shape", .type = OPT_STRING, .dst = &o.shape, .metavar = "NAME:QUANT", .help = "qwen3.8-27b:q4_k_m, generic-27b:q4; or by hand, custom:layers=40,heads=40,..."},
        {.names = "-m,--model", .type = OPT_STRING, .dst = &o.model, .metavar = "FILE", .help = "GGUF file; no weights are read"},
        {.names = "-ctk,--cache-type-k", .type = OPT_CALL, .dst = &c->type_k, .metavar = "TYPE", .help = "type of K: f32 f16 bf16 q8_0 q4_0", .call = cli_kv_type},
        {.names = "-ctv,--cache-type-v", .type = OPT_CALL, .dst = &c->type_v, .metavar = "TYPE", .help = "type of V", .call = cli_kv_type},
        {.names = "The claim", .type = OPT_GROUP},
        {.names = "--claim-ctx", .type = OPT_INT, .dst = &c->ctx, .metavar = "N", .help = "context in tokens: 256K", .min = 1, .max = 1LL << 32, .seen = &o.ctx_seen},
        {.names = "--claim-decode", .type = OPT_DOUBLE, .dst = &c->decode_ts, .metavar = "T", .help = "tokens/s when writing", .min = 1e-6, .max = MAX_TS},
        {.names = "--claim-depth", .type = OPT_INT, .dst = &c->depth, .metavar = "N", .help = "tokens in the context at that speed", .min = 0, .max = 1LL << 32, .seen = &o.depth_seen},
        {.names = "--claim-prefill", .type = OPT_DOUBLE, .dst = &c->prefill_ts, .metavar = "T", .help = "tokens/s when reading a prompt", .min = 1e-6, .max = MAX_TS},
        {.names = "--claim-prompt", .type = OPT_INT, .dst = &c->prompt, .metavar = "N", .help = "tokens over which that was averaged", .min = 1, .max = 1LL << 32, .seen = &o.prompt_seen},
        {.names = "--claim-all-vram", .type = OPT_FLAG, .dst = &c->all_vram, .help = "weights and KV are all in VRAM"},
        {.names = "--claim-attended", .type = OPT_INT, .dst = &c->attended, .metavar = "N", .help = "tokens that a sparse method reads of the context", .min = 1, .max = 1LL << 32, .seen = &o.attended_seen},
        {.names = "--json", .type = OPT_FLAG, .dst = &o.json, .help = "machine-readable"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "check", .summary = "takes a claimed speed and context apart", .usage = "--gpu NAME --shape NAME:QUANT --claim-ctx 256K --claim-decode 60 ..."};
    struct claim_model m;
    struct claim_rates g;
    struct claim_report r;
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc == OPTS_HELP) return 0;
    if (!rc) rc = open_model(&m, &o);
    if (!rc) rc = open_rates(&g, &o);
    if (!rc) rc = check_claim(&o, &m);
    if (!rc) rc = claim_examine(&r, c, &m, &g);
    if (!rc && o.json) rc = print_json(&r, &m, &g, c);
    if (!rc && !o.json) print_report(&r, &m, &g, c);
    return rc ? cli_fail("check", rc) : 0;
}
