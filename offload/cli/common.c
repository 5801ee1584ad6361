/* common.c: see cli.h. */
#include "offload/cli/cli.h"

#include "core/quant.h"
#include "core/utf8.h"
#include "offload/clock.h"

#include <ctype.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

void cli_defaults(struct cli_opts *o) {
    *o = (struct cli_opts){.type_k = QT_F16, .type_v = QT_F16, .kernels = "auto", .dev = CLI_DEV_AUTO, .rope = rope_user_none()};
}

const char *cli_type_name(int type) {
    static char ring[4][16];
    static int at;
    char *s = ring[at++ & 3];
    int i = 0;
    for (const char *name = quant_name(type); name[i] && i < 15; i++) s[i] = (char)tolower((unsigned char)name[i]);
    s[i] = 0;
    return s;
}

int cli_kv_type(const char *option, const char *value, void *dst) {
    int t = quant_from_name(value);
    if (t != QT_F32 && t != QT_F16 && t != QT_BF16 && t != QT_Q8_0 && t != QT_Q4_0)
        return err_set(ERR_ARG, "%s %s: the types of a KV cache are f32, f16, bf16, q8_0 and q4_0", option, value);
    *(int *)dst = t;
    return 0;
}

int cli_ngl(const char *option, const char *value, void *dst) {
    struct cli_opts *o = dst;
    o->ngl_seen = true;
    if (!strcmp(value, "auto")) {
        o->ngl = -1;
        return 0;
    }
    if (!strcmp(value, "all")) {
        o->ngl = 1 << 20;
        return 0;
    }
    int64_t n;
    int rc = opts_int(&n, option, value);
    if (rc) return rc;
    if (n < -1) return err_set(ERR_ARG, "%s %s: must be a number of layers, auto or all", option, value);
    o->ngl = n;
    return 0;
}

int cli_rope_scaling(const char *option, const char *value, void *dst) {
    struct rope_user *r = dst;
    static const char *const names[] = {"none", "linear", "yarn"};
    static const enum rope_scaling kinds[] = {ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_YARN};
    for (int i = 0; i < 3; i++) {
        if (strcmp(value, names[i])) continue;
        r->scaling = (int)kinds[i];
        return 0;
    }
    return err_set(ERR_ARG, "%s %s: must be none, linear or yarn", option, value);
}

int cli_fail(const char *command, int code) {
    fprintf(stderr, "longhaul %s: %s\n", command, err_text());
    return err_exit_status(code);
}

void cli_note(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fputs("longhaul: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}

int cli_request(struct plan_request *r, const struct cli_opts *o, const struct engine *e, int64_t n_ctx, int logits_rows) {
    const struct topo *t = engine_topo(e);
    *r = (struct plan_request){.n_ctx = n_ctx, .type_k = o->type_k, .type_v = o->type_v, .chunk_tokens = (int)o->chunk,
                               .logits_rows = logits_rows};
    r->n_thread = o->threads ? (int)o->threads : topo_default_threads(t);
    r->host_limit = o->host_mib ? (size_t)o->host_mib << 20 : t->host_available_bytes;
    return isa_choose(&r->isa, o->kernels);
}

const char *cli_bytes(double bytes) {
    static char ring[16][32];
    static int at;
    char *s = ring[at++ & 15];
    if (bytes >= 1073741824.0)
        snprintf(s, sizeof ring[0], "%.2f GiB", bytes / 1073741824.0);
    else if (bytes >= 1048576.0)
        snprintf(s, sizeof ring[0], "%.1f MiB", bytes / 1048576.0);
    else
        snprintf(s, sizeof ring[0], "%.1f KiB", bytes / 1024.0);
    return s;
}

static void row(FILE *to, const char *what, size_t bytes, const char *why) {
    fprintf(to, "  %-22s %15zu  %11s  %s\n", what, bytes, cli_bytes((double)bytes), why);
}

void cli_print_plan(FILE *to, const struct plan *p, const struct model *m) {
    char kv[96];
    snprintf(kv, sizeof kv, "%lld positions, K %s, V %s", (long long)p->n_ctx, cli_type_name(p->type_k), cli_type_name(p->type_v));
    fprintf(to, "model    %s %s, %.2f B parameters, %d layers\n", m->arch, m->name, (double)m->n_params * 1e-9, m->n_layer);
    char gpu[512];
    cli_gpu_line(gpu, sizeof gpu, CLI_GPU_SEEN);
    fprintf(to, "runs on  CPU: %d thread%s, %s kernels\nGPU back end: %s\n", p->n_thread, p->n_thread == 1 ? "" : "s", isa_name(p->isa), gpu);
    fprintf(to, "host memory                      bytes\n");
    row(to, "weights", p->weights_bytes, "all layers, in strips");
    row(to, "KV cache", p->kv_bytes, kv);
    row(to, "recurrent state", p->state_bytes, p->state_bytes ? "of the Gated DeltaNet layers, any context" : "none in this architecture");
    if (p->saved_bytes) row(to, "saved state", p->saved_bytes, "its copy, to go back to");
    row(to, "scratch", p->scratch_bytes, "activations, logits, kernels");
    row(to, "read buffers", p->load_bytes, "while loading only");
    row(to, "program (allowance)", p->runtime_bytes, "code, tokenizer, stacks");
    row(to, "most at once", p->host_bytes, "");
    if (p->host_limit != SIZE_MAX) row(to, "limit", p->host_limit, "available now, or --host-mib");
    fprintf(to, "prompt in passes of %d tokens; one decoded token reads %s of weights and %s of KV per 1024 positions\n",
            p->chunk_tokens, cli_bytes(p->weight_bytes_per_tok), cli_bytes(p->kv_bytes_per_position * 1024));
}

/* Of decode; KV outside VRAM by the pages of either place. */
static json_t *gpu_plan_json(const struct plan *p) {
    const struct plan_phase *d = &p->phase[PLAN_DECODE];
    double pages[PLAN_PLACES] = {0};
    for (int il = 0; il < MODEL_MAX_LAYER; il++)
        for (int q = 0; q < PLAN_PLACES; q++) pages[q] += d->layers[il].kv_pages[q];
    double out = pages[PLAN_CPU] + pages[PLAN_STREAM], streamed = out > 0 ? (double)d->host.kv * pages[PLAN_STREAM] / out : 0;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:I, s:s, s:s, s:s}",
                     "weights_vram_bytes", (json_int_t)d->vram.weights, "weights_host_bytes", (json_int_t)d->host.weights,
                     "kv_vram_bytes", (json_int_t)d->vram.kv, "kv_cpu_bytes", (json_int_t)((double)d->host.kv - streamed),
                     "kv_streamed_bytes", (json_int_t)streamed, "kv_total_bytes", (json_int_t)p->kv_bytes,
                     "state_bytes", (json_int_t)p->state_bytes, "saved_state_bytes", (json_int_t)p->saved_bytes, "scratch_bytes",
                     (json_int_t)(d->vram.scratch + d->host.scratch), "ring_bytes", (json_int_t)(d->vram.ring + d->vram.stage), "threads", p->n_thread,
                     "chunk_tokens", p->phase[PLAN_PREFILL].chunk_tokens, "n_ctx", (json_int_t)p->n_ctx, "type_k", cli_type_name(p->type_k),
                     "type_v", cli_type_name(p->type_v), "kernels", isa_name(p->isa));
}

json_t *cli_plan_json(const struct plan *p) {
    if (p->gpu) return gpu_plan_json(p);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:I, s:s, s:s, s:s}",
                     "weights_vram_bytes", (json_int_t)0, "weights_host_bytes", (json_int_t)p->weights_bytes,
                     "kv_vram_bytes", (json_int_t)0, "kv_cpu_bytes", (json_int_t)p->kv_bytes,
                     "kv_streamed_bytes", (json_int_t)0, "kv_total_bytes", (json_int_t)p->kv_bytes,
                     "state_bytes", (json_int_t)p->state_bytes, "saved_state_bytes", (json_int_t)p->saved_bytes, "scratch_bytes", (json_int_t)p->scratch_bytes,
                     "ring_bytes", (json_int_t)0, "threads", p->n_thread, "chunk_tokens", p->chunk_tokens,
                     "n_ctx", (json_int_t)p->n_ctx, "type_k", cli_type_name(p->type_k), "type_v", cli_type_name(p->type_v),
                     "kernels", isa_name(p->isa));
}

/* A note, or the refusal that --strict makes of it. */
static int degrade(const struct cli_opts *o, int rc, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (rc) return rc;
    if (o->strict) return err_set(ERR_STRICT, "%s (--strict)", text);
    cli_note("%s", text);
    return 0;
}

int cli_warn(const struct cli_opts *o, const struct engine *e, const struct plan *p) {
    const struct model *m = engine_model(e);
    int rc = p->gpu ? 0 : cli_gpu_warn(o);
    if (o->flash == 2) return err_set(ERR_ARG, "--flash-attn off: attention is always fused here; leave the option out");
    if (o->ngl_seen && o->ngl > 0 && !p->gpu)
        rc = degrade(o, rc, "-ngl %lld was asked for, but only run --machine NAME or FILE uses a GPU: all %d layers run on the CPU",
                     (long long)o->ngl, m->n_layer);
    const struct rope *r = &m->ropes[0];
    double reach = (double)m->n_ctx_train;
    if (r->scaling == ROPE_SCALING_YARN && r->n_ctx_orig > 0 && (double)r->n_ctx_orig * r->factor > reach)
        reach = (double)r->n_ctx_orig * r->factor;
    if ((double)p->n_ctx > reach)
        rc = degrade(o, rc, "a context of %lld tokens is beyond the %.0f that this model is made for: text may degrade "
                            "(see --rope-scaling yarn)", (long long)p->n_ctx, reach);
    if (p->type_k == QT_Q4_0) rc = degrade(o, rc, "a q4_0 K cache is lossy: measure with longhaul perplexity, or use q8_0");
    return rc;
}

void cli_progress_begin(struct cli_progress *p, const char *what, const char *unit, double scale) {
    *p = (struct cli_progress){.what = what, .unit = unit, .scale = scale, .start_s = clock_s()};
}

void cli_progress_show(void *arg, double done, double total) {
    struct cli_progress *p = arg;
    double now = clock_s(), t = now - p->start_s;
    if (!isatty(2) || t < 0.3 || (p->shown && now - p->shown_s < 0.2)) return;
    p->shown = true;
    p->shown_s = now;
    double rate = done / (t > 0 ? t : 1);
    fprintf(stderr, "\r%s %3.0f %%  %.0f / %.0f %s  %.1f %s/s  %.0f s left \033[K", p->what, 100 * done / (total > 0 ? total : 1),
            done * p->scale, total * p->scale, p->unit, rate * p->scale, p->unit, rate > 0 ? (total - done) / rate : 0.0);
    fflush(stderr);
}

void cli_progress_end(struct cli_progress *p) {
    if (p->shown) fprintf(stderr, "\r\033[K");
    p->shown = false;
}

volatile sig_atomic_t cli_stop;

static void on_signal(int sig) {
    if (cli_stop) _exit(128 + sig);
    cli_stop = sig;
}

void cli_catch_signals(void) {
    struct sigaction a = {.sa_handler = on_signal}; /* no SA_RESTART: a blocking read must end */
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe shows as a write error */
}

int cli_read_file(char **out, size_t *bytes, const char *path) {
    bool in = !strcmp(path, "-");
    FILE *f = in ? stdin : fopen(path, "rb");
    if (!f) return err_set(ERR_ARG, "cannot open %s: %s", path, strerror(errno));
    size_t n = 0, cap = 1 << 16;
    char *p = malloc(cap);
    while (p) {
        n += fread(p + n, 1, cap - 1 - n, f);
        if (n < cap - 1) break;
        char *q = cap > SIZE_MAX / 2 ? NULL : realloc(p, cap *= 2);
        if (!q) free(p);
        p = q;
    }
    int failed = ferror(f), why = errno;
    if (!in) fclose(f);
    if (!p) return err_set(ERR_NOMEM, "%s: out of memory after %zu bytes", path, n);
    if (failed && !cli_stop) {
        free(p);
        return err_set(ERR_ARG, "cannot read %s: %s", path, strerror(why));
    }
    p[n] = 0;
    *out = p;
    *bytes = n;
    return 0;
}

int cli_utf8(const char *what, const char *text, size_t n) {
    uint32_t cp;
    size_t at = 0;
    for (int len; at < n && (len = utf8_decode(text + at, n - at, &cp)); at += (size_t)len) {}
    if (at == n) return 0;
    return err_set(ERR_ARG, "%s is not valid UTF-8 at byte %zu (0x%02x)", what, at, (unsigned char)text[at]);
}

size_t cli_rss_peak(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (size_t)u.ru_maxrss * 1024;
}
