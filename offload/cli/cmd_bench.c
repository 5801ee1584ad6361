/* cmd_bench.c: llama-bench's options, test labels and fields, with the columns that say what was measured. Every option
 * that takes a list gives the cross product. Depth is reached by a real prefill unless --fill synthetic, which is marked
 * in every row. Before anything is timed, the kernels in use are compared with the generic ones. */
#include "offload/cli/cli.h"

#include "core/gguf.h"
#include "core/quant.h"
#include "lh_build.h"
#include "offload/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LIST = 256 };
enum format { FMT_MD, FMT_CSV, FMT_JSON, FMT_JSONL, FMT_SQL, FMT_NONE };
enum fill { FILL_PREFILL, FILL_SYNTHETIC };

struct ints {
    int64_t v[MAX_LIST];
    int n;
    bool given;
};

struct bench_opts {
    struct cli_opts m; /* model, threads and types are taken from the lists below */
    struct opt_list models, shapes;
    struct ints p, n, d, t, ub, pg; /* pg: pairs, prompt << 32 | gen */
    struct ints ctk, ctv;
    int64_t reps, delay_s, seed;
    bool no_warmup, no_check, progress;
    int format, err_format, fill;
};

/* One row to measure. */
struct test {
    int n_prompt, n_gen;
    int64_t depth;
    int n_thread, n_ubatch, type_k, type_v;
};

static int push(struct ints *l, int64_t v, const char *option) {
    if (l->n == MAX_LIST) return err_set(ERR_ARG, "%s: more than %d values", option, MAX_LIST);
    l->v[l->n++] = v;
    return 0;
}

/* "512", "512,1024", "0-4096+1024", "1-64*2"; the first use replaces the default. */
static int call_ints(const char *option, const char *value, void *dst) {
    struct ints *l = dst;
    if (!l->given) l->n = 0;
    l->given = true;
    char buf[512];
    if (snprintf(buf, sizeof buf, "%s", value) >= (int)sizeof buf) return err_set(ERR_ARG, "%s: list too long", option);
    size_t len = strlen(value);
    if (!len || value[0] == ',' || value[len - 1] == ',' || strstr(value, ",,")) return err_set(ERR_ARG, "%s '%s': an empty item in the list", option, value);
    char *save, *item = strtok_r(buf, ",", &save);
    if (!item) return err_set(ERR_ARG, "%s: empty list", option);
    for (; item; item = strtok_r(NULL, ",", &save)) {
        char *dash = item[0] ? strchr(item + 1, '-') : NULL;
        if (dash && !dash[1]) return err_set(ERR_ARG, "%s %s: the range has no end", option, value);
        int64_t a, b, step = 1;
        char kind = '+';
        if (dash) {
            *dash = 0;
            char *op = strpbrk(dash + 1, "+*");
            if (op) {
                kind = *op;
                *op = 0;
                int rc = opts_int(&step, option, op + 1);
                if (rc) return rc;
            }
        }
        int rc = opts_int(&a, option, item);
        if (!rc) rc = dash ? opts_int(&b, option, dash + 1) : (b = a, 0);
        if (rc) return rc;
        if (a < 0 || b < a || b > INT32_MAX || step < 1 || (kind == '*' && (step < 2 || a < 1)))
            return err_set(ERR_ARG, "%s %s: must be numbers >= 0, or first-last, first-last+step, first-last*factor", option, value);
        for (int64_t v = a; v <= b; v = kind == '*' ? v * step : v + step)
            if ((rc = push(l, v, option))) return rc;
    }
    return 0;
}

static int call_pair(const char *option, const char *value, void *dst) {
    struct ints *l = dst;
    l->given = true;
    int p, g;
    char rest;
    if (sscanf(value, "%d,%d%c", &p, &g, &rest) != 2 || p < 1 || g < 1)
        return err_set(ERR_ARG, "%s %s: must be PROMPT,GEN, both at least 1", option, value);
    return push(l, ((int64_t)p << 32) | g, option);
}

static int call_types(const char *option, const char *value, void *dst) {
    struct ints *l = dst;
    if (!l->given) l->n = 0;
    l->given = true;
    char buf[256], *save;
    snprintf(buf, sizeof buf, "%s", value);
    for (char *item = strtok_r(buf, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        int t, rc = cli_kv_type(option, item, &t);
        if (!rc) rc = push(l, t, option);
        if (rc) return rc;
    }
    return l->n ? 0 : err_set(ERR_ARG, "%s: empty list", option);
}

/* llama-bench writes -fa 0 and -fa 1. */
static int call_fa(const char *option, const char *value, void *dst) {
    (void)dst;
    if (!strcmp(value, "1") || !strcmp(value, "on") || !strcmp(value, "auto")) return 0;
    return err_set(ERR_ARG, "%s %s: attention is always fused here; use 1 or leave it out", option, value);
}

static int parse(struct bench_opts *o, int argc, char **argv) {
    *o = (struct bench_opts){.p = {{512}, 1, false}, .n = {{128}, 1, false}, .d = {{0}, 1, false}, .t = {{0}, 1, false}, .ub = {{0}, 1, false},
                             .ctk = {{QT_F16}, 1, false}, .ctv = {{QT_F16}, 1, false}, .reps = 5, .seed = 1, .err_format = FMT_NONE};
    cli_defaults(&o->m);
    static const char formats[] = "md,csv,json,jsonl,sql,none";
    struct opt tab[] = {
        {.names = "What to measure (lists: 1,2 or first-last+step or first-last*factor)", .type = OPT_GROUP},
        {.names = "-m,--model", .type = OPT_LIST, .dst = &o->models, .metavar = "FILE", .help = "GGUF file; may be repeated"},
        {.names = "--shape", .type = OPT_LIST, .dst = &o->shapes, .metavar = "NAME:MIX", .help = "random weights of a built-in shape, marked in every row: qwen3.8-27b:q4_k_m"},
        {.names = "-p,--n-prompt", .type = OPT_CALL, .dst = &o->p, .metavar = "N", .call = call_ints, .help = "prompt tokens (512); 0: no prefill test"},
        {.names = "-n,--n-gen", .type = OPT_CALL, .dst = &o->n, .metavar = "N", .call = call_ints, .help = "tokens to decode (128); 0: no decode test"},
        {.names = "-pg", .type = OPT_CALL, .dst = &o->pg, .metavar = "PP,TG", .call = call_pair, .help = "prefill then decode, timed together"},
        {.names = "-d,--n-depth", .type = OPT_CALL, .dst = &o->d, .metavar = "N", .call = call_ints, .help = "positions in the KV before the test (0)"},
        {.names = "-r,--repetitions", .type = OPT_INT, .dst = &o->reps, .metavar = "N", .min = 1, .max = 1000, .help = "repetitions (5)"},
        {.names = "--fill", .type = OPT_ENUM, .dst = &o->fill, .choices = "prefill,synthetic", .metavar = "HOW", .help = "reach the depth by a real prefill, or by random KV (marked)"},
        {.names = "-t,--threads", .type = OPT_CALL, .dst = &o->t, .metavar = "N", .call = call_ints, .help = "CPU threads (performance cores)"},
        {.names = "-ub,--ubatch-size,--chunk-tokens", .type = OPT_CALL, .dst = &o->ub, .metavar = "N", .call = call_ints, .help = "prompt tokens per pass"},
        {.names = "-b,--batch-size", .type = OPT_REFUSED, .metavar = "N", .help = "--batch-size has no meaning here; use --ubatch-size"},
        {.names = "-ctk,--cache-type-k", .type = OPT_CALL, .dst = &o->ctk, .metavar = "T", .call = call_types, .help = "types of K"},
        {.names = "-ctv,--cache-type-v", .type = OPT_CALL, .dst = &o->ctv, .metavar = "T", .call = call_types, .help = "types of V"},
        {.names = "-fa,--flash-attn", .type = OPT_CALL, .dst = o, .metavar = "1", .call = call_fa, .help = "always on here; 0 is refused", .rare = true},
        {.names = "-ngl,--n-gpu-layers", .type = OPT_CALL, .dst = &o->m, .metavar = "0", .call = cli_ngl, .help = "only 0 in this version", .rare = true},
        {.names = "-dev,--device", .type = OPT_CALL, .dst = &o->m, .metavar = "none", .call = cli_device, .help = "only none in this version", .rare = true},
        {.names = "--host-mib", .type = OPT_INT, .dst = &o->m.host_mib, .metavar = "N", .help = "host memory to plan with", .min = 1, .max = 1LL << 40},
        {.names = "--kernels", .type = OPT_STRING, .dst = &o->m.kernels, .metavar = "SET", .help = "auto, generic, avx2, avx512"},
        {.names = "--seed", .type = OPT_INT, .dst = &o->seed, .metavar = "N", .help = "of the random prompt tokens (1)", .rare = true},
        {.names = "--delay", .type = OPT_INT, .dst = &o->delay_s, .metavar = "S", .min = 0, .max = 3600, .help = "seconds to wait before each test", .rare = true},
        {.names = "--no-warmup", .type = OPT_FLAG, .dst = &o->no_warmup, .help = "no warm-up run", .rare = true},
        {.names = "--no-check", .type = OPT_FLAG, .dst = &o->no_check, .help = "do not compare with the generic kernels first", .rare = true},
        {.names = "--strict", .type = OPT_FLAG, .dst = &o->m.strict, .help = "refuse instead of warn", .rare = true},
        {.names = "Output", .type = OPT_GROUP},
        {.names = "-o,--output", .type = OPT_ENUM, .dst = &o->format, .choices = formats, .metavar = "FMT", .help = "md, csv, json, jsonl, sql (md)"},
        {.names = "-oe,--output-err", .type = OPT_ENUM, .dst = &o->err_format, .choices = formats, .metavar = "FMT", .help = "the same to standard error (none)", .rare = true},
        {.names = "--progress", .type = OPT_FLAG, .dst = &o->progress, .help = "say on standard error what runs", .rare = true},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "bench", .summary = "speed of prefill and decode", .usage = "-m FILE | --shape NAME:MIX [-p 512] [-n 128] [-d 0,4K,16K] [-o md|csv|json|jsonl|sql]"};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc) return rc;
    for (int i = 0; i < o->t.n && o->t.given; i++)
        if (o->t.v[i] < 1 || o->t.v[i] > 1024) return err_set(ERR_ARG, "-t %lld: must be between 1 and 1024", (long long)o->t.v[i]);
    if (!o->models.n && !o->shapes.n) return err_set(ERR_ARG, "no model: give -m FILE.gguf or --shape NAME:MIX");
    if (o->m.ngl > 0)
        return err_set(ERR_ARG, "-ngl %lld: the engine of this version does not use a GPU; a bench of it would measure something else", (long long)o->m.ngl);
    if (o->m.dev >= 0)
        return err_set(ERR_ARG, "-dev %d: the engine of this version does not use a GPU; a bench of it would measure something else", o->m.dev);
    return cli_gpu_warn(&o->m);
}

static void random_ids(int32_t *ids, int n, int n_vocab, uint64_t *state) {
    for (int i = 0; i < n; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((*state >> 33) % (uint64_t)n_vocab);
    }
}

/* What one (model, session) measurement needs. */
struct bench {
    const struct bench_opts *o;
    bool random_weights;
    struct engine *engine;
    struct session *session;
    struct plan plan;
    int32_t *ids;
    int n_ids;
    uint64_t rng;
};

static int eval_prompt(struct bench *b, int n) {
    struct session_hooks h = {.stop = &cli_stop};
    random_ids(b->ids, n, engine_model(b->engine)->n_vocab, &b->rng);
    return session_eval(b->session, b->ids, n, LOGITS_LAST, &h);
}

static int eval_gen(struct bench *b, int n) {
    struct session_hooks h = {.stop = &cli_stop};
    for (int i = 0; i < n; i++) {
        random_ids(b->ids, 1, engine_model(b->engine)->n_vocab, &b->rng);
        int rc = session_eval(b->session, b->ids, 1, LOGITS_LAST, &h);
        if (rc) return rc;
    }
    return 0;
}

static int go_to_depth(struct bench *b, int64_t depth) {
    int rc = 0;
    if (session_pos(b->session) >= depth && depth > 0) rc = session_truncate(b->session, depth);
    if (depth == 0 || rc) rc = session_truncate(b->session, 0);
    if (rc || session_pos(b->session) == depth) return rc;
    if (b->o->fill == FILL_SYNTHETIC) rc = session_fill_synthetic(b->session, depth, (uint64_t)b->o->seed);
    while (!rc && session_pos(b->session) < depth) {
        int64_t left = depth - session_pos(b->session);
        rc = eval_prompt(b, left < b->n_ids ? (int)left : b->n_ids);
    }
    return rc ? rc : session_mark(b->session);
}

static int cmp_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Logits of three tokens with the given kernels. */
static int probe_logits(float **out, const struct bench *b, const struct plan_request *q) {
    struct plan p;
    struct session *s = NULL;
    int32_t ids[3];
    uint64_t rng = 7;
    const struct model *m = engine_model(b->engine);
    random_ids(ids, 3, m->n_vocab, &rng);
    int rc = plan_make(&p, m, q);
    if (!rc) rc = session_open(&s, b->engine, &p);
    if (!rc) rc = session_eval(s, ids, 3, LOGITS_LAST, NULL);
    if (!rc && !(*out = malloc((size_t)m->n_vocab * sizeof **out))) rc = err_set(ERR_NOMEM, "bench: out of memory");
    if (!rc) memcpy(*out, session_logits(s), (size_t)m->n_vocab * sizeof **out);
    session_close(s);
    return rc;
}

/* A speed of wrong results is worth nothing: the kernels in use against the generic ones, on real weights. */
static int check_kernels(struct bench *b, const struct plan_request *like) {
    struct plan_request q = *like;
    float *a = NULL, *g = NULL;
    q.n_ctx = 16;
    q.host_limit = SIZE_MAX;
    int rc = engine_check_kernels(b->engine, like->isa);
    if (!rc) rc = probe_logits(&a, b, &q);
    q.isa = ISA_GENERIC;
    if (!rc) rc = probe_logits(&g, b, &q);
    double diff = 0, size = 0;
    for (int i = 0; !rc && i < engine_model(b->engine)->n_vocab; i++) {
        diff += ((double)a[i] - g[i]) * ((double)a[i] - g[i]);
        size += (double)g[i] * g[i];
    }
    free(a);
    free(g);
    /* Products were compared one by one (engine_check_kernels). Through a whole model a rounding to 8 bits that flips grows:
     * 0.14 of the length of the logits was seen with random tokens. Wrong attention gives errors of the order of 1. */
    if (!rc && !(diff <= 0.16 * size))
        rc = err_set(ERR_NUMERIC, "the %s kernels differ from the generic ones by %.2g of the logits' length: nothing was timed",
                     isa_name(like->isa), sqrt(diff / (size > 0 ? size : 1)));
    return rc;
}

static void model_fields(json_t *j, const struct bench *b, const char *path) {
    const struct model *m = engine_model(b->engine);
    char type[256];
    const char *size_label = "";
    size_t n = 0;
    uint64_t ftype = 0;
    gguf_str(engine_gguf(b->engine), "general.size_label", &size_label, &n);
    gguf_u64(engine_gguf(b->engine), "general.file_type", &ftype);
    snprintf(type, sizeof type, "%s %.*s %s", m->arch, (int)(n < 32 ? n : 32), size_label, m->name);
    json_object_set_new(j, "model_filename", json_string_nocheck(path));
    json_object_set_new(j, "model_type", json_string_nocheck(type));
    json_object_set_new(j, "model_size", json_integer((json_int_t)m->file_bytes));
    json_object_set_new(j, "model_n_params", json_integer((json_int_t)m->n_params));
}

static void label(char *out, size_t n, const struct test *t) {
    char depth[32] = "";
    if (t->depth) snprintf(depth, sizeof depth, " @ d%lld", (long long)t->depth);
    if (t->n_prompt && t->n_gen)
        snprintf(out, n, "pp%d+tg%d%s", t->n_prompt, t->n_gen, depth);
    else
        snprintf(out, n, "%s%d%s", t->n_gen ? "tg" : "pp", t->n_gen ? t->n_gen : t->n_prompt, depth);
}

/* One result in llama-bench's fields and ours. */
static json_t *result(const struct bench *b, const char *path, const struct test *t, const double *secs, int reps) {
    json_t *j = json_object();
    const struct topo *topo = engine_topo(b->engine);
    const struct plan *p = &b->plan;
    char when[64], name[64];
    time_t now = time(NULL);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    label(name, sizeof name, t);
#define STR(key, v) json_object_set_new(j, key, json_string_nocheck(v))
#define INT(key, v) json_object_set_new(j, key, json_integer((json_int_t)(v)))
#define REAL(key, v) json_object_set_new(j, key, json_real(v))
#define BOOL(key, v) json_object_set_new(j, key, json_boolean(v))
    STR("build_commit", LONGHAUL_COMMIT), INT("build_number", LONGHAUL_BUILD_NUMBER), STR("cpu_info", topo->cpu_model), STR("gpu_info", ""),
        STR("backends", "CPU");
    model_fields(j, b, path);
    INT("n_batch", p->chunk_tokens), INT("n_ubatch", p->chunk_tokens), INT("n_threads", t->n_thread), STR("cpu_mask", "0x0"),
        BOOL("cpu_strict", false), INT("poll", 100), STR("type_k", cli_type_name(t->type_k)), STR("type_v", cli_type_name(t->type_v)),
        INT("n_gpu_layers", 0), INT("n_cpu_moe", 0), STR("split_mode", "none"), INT("main_gpu", 0), BOOL("no_kv_offload", false),
        BOOL("flash_attn", true), STR("devices", "none"), STR("tensor_split", "0.00"), STR("tensor_buft_overrides", "none"),
        BOOL("use_mmap", false), BOOL("use_direct_io", false), BOOL("embeddings", false), BOOL("no_op_offload", false), BOOL("no_host", false),
        INT("fit_target", 0), INT("fit_min_ctx", 0);
    INT("n_prompt", t->n_prompt), INT("n_gen", t->n_gen), INT("n_depth", t->depth), STR("test_time", when);
    int tokens = t->n_prompt + t->n_gen;
    double avg = 0, var = 0, avg_ts = 0, var_ts = 0, ts[1000], sorted[1000];
    json_t *ns_list = json_array(), *ts_list = json_array();
    for (int r = 0; r < reps; r++) {
        ts[r] = sorted[r] = tokens / secs[r];
        avg += secs[r] * 1e9 / reps;
        avg_ts += ts[r] / reps;
        json_array_append_new(ns_list, json_integer((json_int_t)(secs[r] * 1e9)));
        json_array_append_new(ts_list, json_real(ts[r]));
    }
    for (int r = 0; r < reps; r++) {
        var += (secs[r] * 1e9 - avg) * (secs[r] * 1e9 - avg);
        var_ts += (ts[r] - avg_ts) * (ts[r] - avg_ts);
    }
    qsort(sorted, (size_t)reps, sizeof *sorted, cmp_double);
    INT("avg_ns", avg), INT("stddev_ns", reps > 1 ? sqrt(var / (reps - 1)) : 0), REAL("avg_ts", avg_ts),
        REAL("stddev_ts", reps > 1 ? sqrt(var_ts / (reps - 1)) : 0);
    json_object_set_new(j, "samples_ns", ns_list);
    json_object_set_new(j, "samples_ts", ts_list);
    /* ours */
    double median = reps % 2 ? sorted[reps / 2] : 0.5 * (sorted[reps / 2 - 1] + sorted[reps / 2]);
    int64_t attended = t->depth + (t->n_gen ? t->n_prompt + (t->n_gen + 1) / 2 : (t->n_prompt + 1) / 2);
    double per_tok = p->weight_bytes_per_tok + p->state_bytes_per_tok + p->kv_bytes_per_position * (double)attended;
    STR("test", name), REAL("median_ts", median), REAL("min_ts", sorted[0]), REAL("max_ts", sorted[reps - 1]),
        STR("weights", b->random_weights ? "random" : "file"), STR("fill", t->depth ? (b->o->fill == FILL_SYNTHETIC ? "synthetic" : "prefill") : "none"), STR("kernels", isa_name(p->isa)),
        INT("seed", b->o->seed), INT("w_bytes_host", p->weights_bytes), INT("kv_bytes_host", p->kv_bytes), INT("kv_bytes_gpu", 0),
        REAL("h2d_bytes_per_tok", 0), INT("attended_tokens", attended), BOOL("pinned", false),
        REAL("read_bytes_per_tok", t->n_prompt ? 0 : per_tok), REAL("read_gbps", t->n_prompt ? 0 : per_tok * median * 1e-9),
        INT("rss_peak_mib", cli_rss_peak() >> 20), STR("build", LONGHAUL_BUILD), STR("version", LONGHAUL_VERSION);
#undef STR
#undef INT
#undef REAL
#undef BOOL
    return j;
}

static void cell(FILE *to, const json_t *v, const char *quote) {
    if (json_is_string(v)) {
        fputs(quote, to);
        for (const char *c = json_string_value(v); *c; c++) {
            if (*c == *quote) fputc(*c, to); /* doubled, both in CSV and SQL */
            fputc(*c, to);
        }
        fputs(quote, to);
    } else if (json_is_boolean(v)) {
        fprintf(to, "%d", json_is_true(v));
    } else if (json_is_array(v)) {
        fputs(quote, to);
        size_t i;
        json_t *e;
        json_array_foreach(v, i, e) fprintf(to, "%s%.6g", i ? "," : "", json_number_value(e));
        fputs(quote, to);
    } else if (json_is_integer(v)) {
        fprintf(to, "%lld", (long long)json_integer_value(v));
    } else {
        fprintf(to, "%.6f", json_number_value(v));
    }
}

static void md_row(FILE *to, const json_t *j, bool first) {
    if (first)
        fprintf(to, "| model | size | params | threads | K | V | fill | test | t/s median (min .. max) | read GB/s |\n"
                    "| --- | ---: | ---: | ---: | --- | --- | --- | ---: | ---: | ---: |\n");
#define S(k) json_string_value(json_object_get(j, k))
#define N(k) json_number_value(json_object_get(j, k))
    fprintf(to, "| %s | %s | %.2f B | %.0f | %s | %s | %s | %s | %.2f (%.2f .. %.2f) | ", S("model_type"), cli_bytes(N("model_size")),
            N("model_n_params") * 1e-9, N("n_threads"), S("type_k"), S("type_v"), S("fill"), S("test"), N("median_ts"), N("min_ts"), N("max_ts"));
    if (N("n_prompt"))
        fprintf(to, "- |\n");
    else
        fprintf(to, "%.1f |\n", N("read_gbps"));
#undef S
#undef N
}

static void print_result(FILE *to, enum format f, const json_t *j, bool first) {
    const char *key;
    json_t *v;
    bool sep = false;
    switch (f) {
    case FMT_MD: md_row(to, j, first); break;
    case FMT_JSON:
        fprintf(to, first ? "[\n" : ",\n");
        json_dumpf(j, to, JSON_INDENT(2));
        break;
    case FMT_JSONL:
        json_dumpf(j, to, JSON_COMPACT);
        fputc('\n', to);
        break;
    case FMT_CSV:
        if (first) {
            json_object_foreach((json_t *)j, key, v) fprintf(to, "%s%s", sep ? "," : "", key), sep = true;
            fputc('\n', to);
        }
        sep = false;
        json_object_foreach((json_t *)j, key, v) {
            if (sep) fputc(',', to);
            sep = true;
            cell(to, v, "\"");
        }
        fputc('\n', to);
        break;
    case FMT_SQL:
        if (first) {
            fprintf(to, "CREATE TABLE IF NOT EXISTS llama_bench (\n");
            json_object_foreach((json_t *)j, key, v) {
                fprintf(to, "%s  %s %s", sep ? ",\n" : "", key, json_is_real(v) ? "REAL" : json_is_string(v) || json_is_array(v) ? "TEXT" : "INTEGER");
                sep = true;
            }
            fprintf(to, "\n);\n\n");
        }
        fprintf(to, "INSERT INTO llama_bench (");
        sep = false;
        json_object_foreach((json_t *)j, key, v) fprintf(to, "%s%s", sep ? ", " : "", key), sep = true;
        fprintf(to, ") VALUES (");
        sep = false;
        json_object_foreach((json_t *)j, key, v) {
            if (sep) fputs(", ", to);
            sep = true;
            cell(to, v, "'");
        }
        fprintf(to, ");\n");
        break;
    case FMT_NONE: break;
    }
    fflush(to);
}

static int open_session(struct bench *b, const struct test *t, struct plan_request *q) {
    struct cli_opts o = b->o->m;
    o.threads = t->n_thread;
    o.chunk = t->n_ubatch;
    o.type_k = t->type_k;
    o.type_v = t->type_v;
    int64_t n_ctx = t->depth + t->n_prompt + t->n_gen + 1;
    int rc = cli_request(q, &o, b->engine, n_ctx, 1);
    if (!rc) rc = plan_make(&b->plan, engine_model(b->engine), q);
    if (!rc) rc = session_open(&b->session, b->engine, &b->plan);
    return rc;
}

static int measure(struct bench *b, const char *path, struct test *t, bool *checked, int row) {
    struct plan_request q;
    double secs[1000];
    char name[64];
    label(name, sizeof name, t);
    if (!t->n_thread) t->n_thread = topo_default_threads(engine_topo(b->engine));
    int rc = open_session(b, t, &q);
    if (!rc && !b->o->no_check && !*checked) {
        rc = check_kernels(b, &q);
        *checked = true;
    }
    if (b->o->progress) cli_note("%s: %d threads, %s", name, t->n_thread, b->o->no_warmup ? "no warm-up" : "warm-up");
    if (b->o->delay_s) sleep((unsigned)b->o->delay_s);
    if (!rc) rc = go_to_depth(b, t->depth);
    if (!rc && !b->o->no_warmup) {
        if (t->n_prompt) rc = eval_prompt(b, t->n_prompt);
        if (!rc && t->n_gen) rc = eval_gen(b, 1);
    }
    for (int r = 0; !rc && r < b->o->reps; r++) {
        rc = go_to_depth(b, t->depth);
        double t0 = clock_s();
        if (!rc && t->n_prompt) rc = eval_prompt(b, t->n_prompt);
        if (!rc && t->n_gen) rc = eval_gen(b, t->n_gen);
        secs[r] = clock_s() - t0;
    }
    if (!rc) {
        json_t *j = result(b, path, t, secs, (int)b->o->reps);
        print_result(stdout, (enum format)b->o->format, j, row == 0);
        print_result(stderr, (enum format)b->o->err_format, j, row == 0);
        json_decref(j);
    }
    session_close(b->session);
    b->session = NULL;
    return rc;
}

/* The tests of one setting in llama-bench's order: prompts, generations, pairs. */
static int list_tests(struct test *out, const struct bench_opts *o, struct test base) {
    int n = 0;
    for (int i = 0; i < o->p.n; i++)
        if (o->p.v[i]) out[n] = base, out[n++].n_prompt = (int)o->p.v[i];
    for (int i = 0; i < o->n.n; i++)
        if (o->n.v[i]) out[n] = base, out[n++].n_gen = (int)o->n.v[i];
    for (int i = 0; i < o->pg.n; i++) out[n] = base, out[n].n_prompt = (int)(o->pg.v[i] >> 32), out[n++].n_gen = (int)(o->pg.v[i] & INT32_MAX);
    return n;
}

/* path: a file, or the name of a shape. */
static int bench_model(const struct bench_opts *o, const char *path, bool shape, int *row) {
    struct bench b = {.o = o, .random_weights = shape, .rng = (uint64_t)o->seed};
    bool checked = false;
    int most = 2048;
    for (int i = 0; i < o->p.n; i++) most = o->p.v[i] > most ? (int)o->p.v[i] : most;
    for (int i = 0; i < o->pg.n; i++) most = (o->pg.v[i] >> 32) > most ? (int)(o->pg.v[i] >> 32) : most;
    b.n_ids = most;
    b.ids = malloc((size_t)most * sizeof *b.ids);
    int rc = b.ids ? 0 : err_set(ERR_NOMEM, "bench: out of memory");
    if (!rc) rc = shape ? engine_open_shape(&b.engine, path, &o->m.rope) : engine_open(&b.engine, path, &o->m.rope);
    const struct tokenizer *tok; /* not needed, but a file whose tokenizer is broken is broken */
    if (!rc && !shape) rc = engine_tokenizer(b.engine, &tok);
    struct plan host = {.n_thread = o->t.v[0] ? (int)o->t.v[0] : 1};
    if (!rc && !o->t.v[0]) host.n_thread = topo_default_threads(engine_topo(b.engine));
    if (!rc) rc = engine_load(b.engine, &host, NULL, NULL, &cli_stop);
    static struct test tests[3 * MAX_LIST];
    for (int k = 0; k < o->ctk.n; k++)
        for (int v = 0; v < o->ctv.n; v++)
            for (int u = 0; u < o->ub.n; u++)
                for (int t = 0; t < o->t.n; t++)
                    for (int d = 0; d < o->d.n; d++) {
                        struct test base = {.depth = o->d.v[d], .n_thread = (int)o->t.v[t], .n_ubatch = (int)o->ub.v[u],
                                            .type_k = (int)o->ctk.v[k], .type_v = (int)o->ctv.v[v]};
                        int n = list_tests(tests, o, base);
                        for (int i = 0; i < n && !rc; i++) rc = measure(&b, path, &tests[i], &checked, (*row)++);
                    }
    engine_close(b.engine);
    free(b.ids);
    return rc;
}

int cmd_bench(int argc, char **argv) {
    static struct bench_opts o;
    int rc = parse(&o, argc, argv), row = 0;
    if (rc == OPTS_HELP) return 0;
    cli_catch_signals();
    for (int i = 0; i < o.models.n && !rc; i++) rc = bench_model(&o, o.models.item[i], false, &row);
    for (int i = 0; i < o.shapes.n && !rc; i++) rc = bench_model(&o, o.shapes.item[i], true, &row);
    if (row && !rc && o.format == FMT_JSON) printf("\n]\n");
    if (row && !rc && o.err_format == FMT_JSON) fprintf(stderr, "\n]\n");
    if (!row && !rc) rc = err_set(ERR_ARG, "nothing to measure: -p and -n are all 0");
    free(o.models.item);
    free(o.shapes.item);
    return rc ? cli_fail("bench", rc) : 0;
}
