/* plan_machine.c: a plan for a described machine, as text and as JSON. See cli.h. */
#include "offload/cli/cli.h"

#include "core/kv.h"
#include "offload/session.h"

#include <stdlib.h>
#include <string.h>

static void row(FILE *to, const char *what, size_t prefill, size_t decode) {
    if (prefill || decode) fprintf(to, "  %-22s %12s %12s\n", what, cli_bytes((double)prefill), cli_bytes((double)decode));
}

static void print_tables(FILE *to, const struct plan *p) {
    const struct plan_table *a = &p->phase[PLAN_PREFILL].vram, *b = &p->phase[PLAN_DECODE].vram, *h = &p->phase[PLAN_DECODE].host;
    fprintf(to, "VRAM                          prefill       decode\n");
    row(to, "weights", a->weights, b->weights);
    row(to, "KV pages", a->kv, b->kv);
    row(to, "recurrent state", a->state, b->state);
    row(to, "saved state", a->saved, b->saved);
    row(to, "scratch", a->scratch, b->scratch);
    row(to, "hidden states", a->hidden, b->hidden);
    row(to, "ring for weights", a->ring, b->ring);
    row(to, "staging for KV", a->stage, b->stage);
    row(to, "runtime", a->runtime, b->runtime);
    row(to, "headroom", a->headroom, b->headroom);
    row(to, "sum", a->sum, b->sum);
    row(to, "of", a->limit, b->limit);
    fprintf(to, "host memory                  both phases\n");
    const struct {
        const char *what;
        size_t bytes;
    } rows[] = {{"weights", h->weights}, {"KV pages", h->kv}, {"recurrent state", h->state + h->saved}, {"scratch", h->scratch},
                {"program (allowance)", h->runtime}, {"sum", h->sum}, {"of", h->limit}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].bytes && rows[i].bytes != SIZE_MAX) fprintf(to, "  %-22s %12s\n", rows[i].what, cli_bytes((double)rows[i].bytes));
    if (p->pageable_bytes)
        fprintf(to, "  %s of it may not be page-locked (limit of the machine): copied at the pageable rate\n", cli_bytes((double)p->pageable_bytes));
}

static void print_placement(FILE *to, const struct plan *p, int n_block) {
    const struct plan_phase *ph = &p->phase[PLAN_DECODE];
    int64_t pages[PLAN_PLACES] = {0}, rows[PLAN_PLACES] = {0}, experts[PLAN_PLACES] = {0}, mixers[PLAN_PLACES] = {0};
    for (int il = 0; il < n_block; il++) {
        mixers[ph->layers[il].mixer]++;
        for (int q = 0; q < PLAN_PLACES; q++) {
            pages[q] += ph->layers[il].kv_pages[q];
            rows[q] += ph->layers[il].ff_rows[q];
            experts[q] += ph->layers[il].experts[q];
        }
    }
    fprintf(to, "decode                     in VRAM   on the CPU     streamed\n");
    const struct {
        const char *what;
        const int64_t *n;
    } lines[] = {{"attention parts", mixers}, {"FFN rows", rows}, {"experts", experts}, {"KV pages", pages}};
    for (int i = 0; i < 4; i++)
        if (lines[i].n[0] + lines[i].n[1] + lines[i].n[2])
            fprintf(to, "  %-22s %9lld %12lld %12lld\n", lines[i].what, (long long)lines[i].n[0], (long long)lines[i].n[1], (long long)lines[i].n[2]);
    fprintf(to, "  output matrix %s; %d CPU thread%s; ring of %d x %s, staging %d x %s\n", ph->head == PLAN_VRAM ? "in VRAM" : "on the CPU", ph->n_thread,
            ph->n_thread == 1 ? "" : "s", ph->ring_slots, cli_bytes((double)ph->ring_slot_bytes), ph->stage_slots, cli_bytes((double)ph->stage_slot_bytes));
    const struct plan_phase *pre = &p->phase[PLAN_PREFILL];
    fprintf(to, "  prefill in passes of %d tokens, %d at a time; ring of %d x %s, staging %d x %s\n", pre->pass_tokens, pre->chunk_tokens, pre->ring_slots,
            cli_bytes((double)pre->ring_slot_bytes), pre->stage_slots, cli_bytes((double)pre->stage_slot_bytes));
    for (int i = 0; i < PLAN_WHY && p->why[i][0]; i++) fprintf(to, "  - %s\n", p->why[i]);
}

/* Depths that are of interest: powers of two up to the context, and the context. */
static int depths(int64_t out[16], int64_t n_ctx) {
    int n = 0;
    for (int64_t d = 4096; d < n_ctx && n < 15; d *= 2) out[n++] = d;
    out[n++] = n_ctx;
    return n;
}

int cli_print_machine_plan(FILE *to, const struct plan *p, const struct engine *e, const struct plan_request *r) {
    const struct model *m = engine_model(e);
    const struct machine *mc = r->machine;
    int64_t at[16];
    fprintf(to, "model    %s %s, %.2f B parameters, %d layers; context %lld, K %s, V %s\n", m->arch, m->name, (double)m->n_params * 1e-9, m->n_layer,
            (long long)p->n_ctx, cli_type_name(p->type_k), cli_type_name(p->type_v));
    fprintf(to, "machine  %s (%s)", mc->name, machine_origin_name(mc->host.source.origin));
    if (mc->has_gpu) fprintf(to, ": %s, %s, link %g GB/s", mc->gpu.name, cli_bytes(mc->gpu.vram_bytes), mc->link.h2d_gbps);
    fprintf(to, ", DRAM %g GB/s, %d threads\n", mc->host.dram_gbps, mc->cpu.threads);
    if (mc->filled[0]) fprintf(to, "         not in its file: %s\n", mc->filled);
    if (p->gpu) {
        print_tables(to, p);
        print_placement(to, p, m->n_block);
    }
    fprintf(to, "predicted from %s rates\n", machine_origin_name(mc->has_gpu ? mc->gpu.source.origin : mc->host.source.origin));
    fprintf(to, "  load       %8.1f s   from the page cache\n", p->load_s);
    fprintf(to, "  prefill    %8.1f s   %lld tokens, %.0f t/s, bound by %s\n", p->prefill_s, (long long)p->prompt, (double)p->prompt / p->prefill_s,
            plan_bound_name(p->prefill_bound));
    if (p->gpu) fprintf(to, "  re-homing  %8.2f s   %s\n", p->rehome_s, cli_bytes((double)p->rehome_bytes));
    for (int i = 0, n = depths(at, p->n_ctx); i < n; i++) {
        struct plan_step s;
        int rc = plan_predict(&s, p, m, r, at[i]);
        if (rc) return rc;
        fprintf(to, "  decode     %8.2f t/s at %lld, bound by %s; %.2f GB by the CPU, %.2f GB over the link per token\n", p->decode_tokens / s.s,
                (long long)at[i], plan_bound_name(s.bound), s.cpu_bytes * 1e-9, s.link_bytes * 1e-9);
    }
    return 0;
}

/* --- JSON ------------------------------------------------------------------------------------------------------------------------ */

static json_t *table(const struct plan_table *t) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "weights_bytes", (json_int_t)t->weights, "kv_bytes",
                     (json_int_t)t->kv, "state_bytes", (json_int_t)t->state, "saved_state_bytes", (json_int_t)t->saved, "scratch_bytes",
                     (json_int_t)t->scratch, "hidden_bytes", (json_int_t)t->hidden, "ring_bytes", (json_int_t)t->ring, "stage_bytes",
                     (json_int_t)t->stage, "runtime_bytes", (json_int_t)t->runtime, "headroom_bytes", (json_int_t)t->headroom, "sum_bytes",
                     (json_int_t)t->sum, "limit_bytes", t->limit > INT64_MAX ? (json_int_t)INT64_MAX : (json_int_t)t->limit);
}

/* The keys of `run --json`, with the KV of each place at the full context. */
static json_t *phase(const struct plan *p, const struct model *m, int id) {
    const struct plan_phase *ph = &p->phase[id];
    size_t bytes;
    struct kv_layer *layers = calloc((size_t)m->n_block, sizeof *layers);
    struct kv_spec spec;
    struct kv_shape *shapes = NULL;
    double kv[PLAN_PLACES] = {0};
    if (layers && !session_kv_spec(&spec, &shapes, m, p) && !kv_plan(layers, &bytes, &spec))
        for (int il = 0; il < m->n_block; il++)
            for (int q = 0; q < PLAN_PLACES; q++) kv[q] += (double)ph->layers[il].kv_pages[q] * (double)layers[il].page_bytes;
    free(shapes);
    free(layers);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:i, s:o, s:o}", "weights_vram_bytes", (json_int_t)ph->vram.weights,
                     "weights_host_bytes", (json_int_t)ph->host.weights, "kv_vram_bytes", (json_int_t)kv[PLAN_VRAM], "kv_cpu_bytes",
                     (json_int_t)kv[PLAN_CPU], "kv_streamed_bytes", (json_int_t)kv[PLAN_STREAM], "state_bytes",
                     (json_int_t)(ph->vram.state + ph->host.state), "scratch_bytes", (json_int_t)(ph->vram.scratch + ph->host.scratch), "ring_bytes",
                     (json_int_t)(ph->vram.ring + ph->vram.stage), "threads", ph->n_thread, "chunk_tokens", ph->chunk_tokens, "pass_tokens",
                     ph->pass_tokens, "vram", table(&ph->vram), "host", table(&ph->host));
}

int cli_json_machine_plan(FILE *to, const struct plan *p, const struct engine *e, const struct plan_request *r, int64_t max_ctx) {
    const struct model *m = engine_model(e);
    json_t *why = json_array(), *at = json_array();
    int64_t d[16];
    int rc = 0;
    for (int i = 0; i < PLAN_WHY && p->why[i][0]; i++) json_array_append_new(why, json_string(p->why[i]));
    for (int i = 0, n = depths(d, p->n_ctx); i < n && !rc; i++) {
        struct plan_step s;
        rc = plan_predict(&s, p, m, r, d[i]);
        if (!rc)
            json_array_append_new(at, json_pack("{s:I, s:f, s:s, s:f, s:f}", "depth", (json_int_t)d[i], "decode_ts", p->decode_tokens / s.s, "bound",
                                                plan_bound_name(s.bound), "cpu_bytes_per_tok", s.cpu_bytes, "h2d_bytes_per_tok", s.link_bytes));
    }
    json_t *predicted = json_pack("{s:f, s:f, s:f, s:f, s:o, s:s, s:s, s:s, s:s}", "load_s", p->load_s, "prefill_s", p->prefill_s, "rehome_s", p->rehome_s,
                                  "ttft_s", p->prefill_s + p->rehome_s + p->decode.s, "decode_ts", at, "bound", plan_bound_name(p->decode.bound),
                                  "prefill_bound", plan_bound_name(p->prefill_bound), "origin", "predicted", "rates_origin",
                                  machine_origin_name(r->machine->has_gpu ? r->machine->gpu.source.origin : r->machine->host.source.origin));
    json_t *phases = p->gpu ? json_pack("{s:o, s:o}", "prefill", phase(p, m, PLAN_PREFILL), "decode", phase(p, m, PLAN_DECODE))
                            : json_pack("{s:{s:o}, s:{s:o}}", "prefill", "host", cli_plan_json(p), "decode", "host", cli_plan_json(p));
    json_t *j = json_pack("{s:s, s:o, s:I, s:I, s:b, s:I, s:o, s:o}", "machine", r->machine->name, "phases", phases, "kv_total_bytes",
                          (json_int_t)p->kv_bytes, "n_ctx", (json_int_t)p->n_ctx, "fits", 1, "max_ctx", (json_int_t)max_ctx, "predicted", predicted,
                          "why", why);
    if (!rc && !j) rc = err_set(ERR_NOMEM, "out of memory");
    if (!rc) {
        json_dumpf(j, to, JSON_INDENT(1));
        fprintf(to, "\n");
    }
    json_decref(j);
    return rc;
}
