/* plan.c: see plan.h. The CPU alone, and what both kinds of plan share; with a GPU plan_search.c chooses. Sizes come from the
 * functions that the allocators use; bytes per token from the cost table. */
#include "offload/plan.h"

#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/state.h"
#include "cpu/cpu.h"
#include "offload/home.h"
#include "offload/plan_work.h"
#include "offload/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_DEFAULT = 512, GPU_CHUNK_DEFAULT = 2048, RUNTIME_BYTES = 64 << 20, GPU_RUNTIME_BYTES = 256 << 20, MIB = 1 << 20,
       HEADROOM_BYTES = 512 << 20, UPLOAD_BYTES = 64 << 20 };

static bool on_gpu(const struct plan_request *r) { return r->machine && r->machine->has_gpu; }

static int kv_bytes(size_t *out, const struct model *m, const struct plan *p) {
    struct kv_layer *layers = calloc((size_t)m->n_block, sizeof *layers);
    struct kv_spec spec;
    struct kv_shape *shapes;
    int rc = session_kv_spec(&spec, &shapes, m, p);
    if (!rc && !layers) rc = err_set(ERR_NOMEM, "plan: out of memory");
    if (!rc) rc = kv_plan(layers, out, &spec);
    free(shapes);
    free(layers);
    return rc;
}

/* What does not depend on where things go. */
static int begin(struct plan *p, const struct model *m, const struct plan_request *r) {
    if (r->n_ctx < 1) return err_set(ERR_ARG, "a context of %lld tokens: must be at least 1", (long long)r->n_ctx);
    if (r->n_thread < 1) return err_set(ERR_ARG, "%d threads: must be at least 1", r->n_thread);
    if (r->depth < 0 || r->depth > r->n_ctx || r->prompt < 0 || r->prompt > r->n_ctx)
        return err_set(ERR_ARG, "a depth of %lld or a prompt of %lld tokens in a context of %lld", (long long)r->depth, (long long)r->prompt,
                       (long long)r->n_ctx);
    if (r->decode_tokens < 0 || r->decode_tokens > PLAN_DECODE_TOKENS)
        return err_set(ERR_ARG, "%d tokens per decode pass: at most %d", r->decode_tokens, PLAN_DECODE_TOKENS);
    memset(p, 0, sizeof *p);
    p->n_ctx = r->n_ctx;
    p->type_k = r->type_k;
    p->type_v = r->type_v;
    p->logits_rows = r->logits_rows < 1 ? 1 : r->logits_rows;
    p->n_thread = r->n_thread;
    p->isa = r->isa;
    p->host_limit = r->host_limit;
    p->gpu = on_gpu(r);
    p->runtime_bytes = p->gpu ? GPU_RUNTIME_BYTES : RUNTIME_BYTES;
    p->chunk_tokens = r->chunk_tokens > 0 ? r->chunk_tokens : p->gpu ? GPU_CHUNK_DEFAULT : CHUNK_DEFAULT;
    if (p->chunk_tokens > p->n_ctx) p->chunk_tokens = (int)p->n_ctx;
    if (p->logits_rows > p->chunk_tokens) p->logits_rows = p->chunk_tokens;
    p->weights_bytes = home_bytes(m);
    p->depth = r->depth ? r->depth : r->n_ctx;
    p->prompt = r->prompt ? r->prompt : r->n_ctx;
    p->decode_tokens = r->decode_tokens ? r->decode_tokens : 1;
    p->state_bytes = p->saved_bytes = state_bytes(m);
    return kv_bytes(&p->kv_bytes, m, p);
}

static int too_large(const struct plan *p) {
    return err_set(ERR_BUDGET, "a context of %lld tokens needs more memory than 64 bits can count", (long long)p->n_ctx);
}

/* --- the CPU alone ------------------------------------------------------------------------------------------------------------- */

static int fill_host(struct plan *p, const struct model *m) {
    p->scratch_bytes = session_scratch_bytes(m, p);
    p->load_bytes = (size_t)p->n_thread * MIB;
    size_t run = 0, load = 0;
    bool ok = p->weights_bytes != SIZE_MAX && p->scratch_bytes != SIZE_MAX && size_add(&run, p->kv_bytes, p->scratch_bytes) &&
              size_add(&run, run, p->state_bytes) && size_add(&run, run, p->saved_bytes) &&
              size_add(&run, run, p->weights_bytes) && size_add(&run, run, p->runtime_bytes) && size_add(&load, p->weights_bytes, p->load_bytes) && size_add(&load, load, p->runtime_bytes);
    if (!ok) return too_large(p);
    p->host_bytes = run > load ? run : load;
    return 0;
}

static double mib(size_t bytes) { return (double)bytes / MIB; }

static int refuse_host(const struct plan *p, const struct model *m, const struct plan_request *r) {
    int64_t fits = plan_max_ctx(m, r, r->n_ctx);
    char what[160];
    struct plan_request q = *r;
    q.type_k = q.type_v = QT_Q8_0;
    q.n_ctx = r->n_ctx;
    bool q8 = r->type_k != QT_Q8_0 && plan_max_ctx(m, &q, r->n_ctx) == r->n_ctx;
    snprintf(what, sizeof what, "%s%lld tokens of context would fit%s", fits ? "" : "not even ", fits ? (long long)fits : 256LL,
             q8 ? ", or all of it with -ctk q8_0 -ctv q8_0" : "");
    return err_set(ERR_BUDGET,
                   "does not fit: %lld tokens of context need %.1f MiB (weights %.1f + KV %.1f + state %.1f + "
                   "scratch %.1f + program %.1f), %.1f MiB are available, %.1f MiB too few; %s",
                   (long long)p->n_ctx, mib(p->host_bytes), mib(p->weights_bytes), mib(p->kv_bytes),
                   mib(p->state_bytes + p->saved_bytes), mib(p->scratch_bytes),
                   mib(p->runtime_bytes), mib(r->host_limit), mib(p->host_bytes - r->host_limit), what);
}

/* --- with a GPU ------------------------------------------------------------------------------------------------------------------ */

/* The request with nothing left open, and the limits of both phases. */
static int complete(struct plan *p, struct plan_request *r) {
    const struct machine *mc = r->machine;
    double arena = mc->gpu.vram_bytes - mc->gpu.runtime_bytes;
    if (r->vram_limit && (double)r->vram_limit > arena)
        return err_set(ERR_BUDGET, "%.1f MiB of VRAM: %s has %.1f MiB, of which %.1f MiB are left beside the runtime", mib(r->vram_limit),
                       mc->gpu.name, mc->gpu.vram_bytes / MIB, arena / MIB);
    if (r->pass_tokens && (r->pass_tokens < p->chunk_tokens || r->pass_tokens > r->n_ctx))
        return err_set(ERR_ARG, "passes of %d tokens: must be at least a chunk (%d) and at most the context (%lld)", r->pass_tokens,
                       p->chunk_tokens, (long long)r->n_ctx);
    size_t headroom = r->headroom ? r->headroom : HEADROOM_BYTES;
    if (r->vram_limit) headroom = (size_t)arena - r->vram_limit;
    for (int i = 0; i < PLAN_PHASES; i++)
        p->phase[i].vram = (struct plan_table){.runtime = (size_t)mc->gpu.runtime_bytes, .headroom = headroom, .limit = (size_t)mc->gpu.vram_bytes};
    struct plan_phase *dec = &p->phase[PLAN_DECODE];
    dec->chunk_tokens = dec->pass_tokens = r->n_ctx < PLAN_DECODE_TOKENS ? (int)r->n_ctx : PLAN_DECODE_TOKENS;
    dec->n_thread = r->n_thread > 1 ? r->n_thread - 1 : 1; /* the driver thread has a core of its own */
    p->load_bytes = (size_t)dec->n_thread * MIB + UPLOAD_BYTES;
    r->chunk_tokens = p->chunk_tokens;
    r->logits_rows = p->logits_rows;
    r->n_thread = dec->n_thread;
    r->depth = p->depth;
    r->prompt = p->prompt;
    r->decode_tokens = p->decode_tokens;
    return 0;
}

static int open_work(struct plan_work *w, struct plan *p, const struct model *m, const struct plan_request *r) {
    struct plan_request q = *r;
    int rc = p->gpu ? complete(p, &q) : 0;
    if (!p->gpu) q.depth = p->depth, q.prompt = p->prompt, q.decode_tokens = p->decode_tokens, q.chunk_tokens = p->chunk_tokens;
    if (!rc) rc = plan_work_open(w, m, &q);
    if (rc) return rc;
    w->chunk_fixed = r->chunk_tokens > 0;
    p->weight_bytes_per_tok = w->weight_bytes_per_tok;
    p->kv_bytes_per_position = w->kv_bytes_per_position;
    p->state_bytes_per_tok = w->state_bytes_per_tok;
    return 0;
}

/* What the search has found, in the fields of both kinds of plan. */
static void finish(struct plan *p, const struct plan_work *w) {
    struct plan_phase *pre = &p->phase[PLAN_PREFILL], *dec = &p->phase[PLAN_DECODE];
    const struct machine *mc = w->r.machine;
    struct plan_rates r;
    size_t locked = mc->host.memlock_bytes >= 0 ? (size_t)mc->host.memlock_bytes : SIZE_MAX;
    p->pageable_bytes = p->pinned_bytes > locked ? p->pinned_bytes - locked : 0;
    plan_rates_of(&r, w);
    pre->embed = dec->embed = w->tied && dec->head == PLAN_VRAM && pre->head == PLAN_VRAM ? PLAN_VRAM : PLAN_CPU;
    p->n_thread = dec->n_thread;
    p->scratch_bytes = pre->host.scratch;
    plan_decode_step(&p->decode, w, &r, dec, p->depth);
    p->prefill_s = plan_prefill_s(&p->prefill_bound, w, &r, pre, p->prompt, (double)p->pinned_bytes, INT32_MAX);
    p->rehome_s = plan_copy_s(&r, (double)p->rehome_bytes, (double)p->pinned_bytes);
    p->load_s = (double)pre->vram.weights / r.link + w->file_bytes / r.dram;
    p->predicted = true;
    plan_explain(p, w);
}

static int fit_gpu(struct plan *p, const struct model *m, const struct plan_request *r, enum plan_effort effort) {
    struct plan_work w;
    int rc = open_work(&w, p, m, r);
    if (rc) return rc;
    rc = plan_search(p, &w, effort);
    if (!rc) finish(p, &w);
    plan_work_close(&w);
    return rc;
}

/* --- both -------------------------------------------------------------------------------------------------------------------------- */

/* Whether so much context fits; *p is filled as far as that takes. */
static bool fits(struct plan *p, const struct model *m, struct plan_request r) {
    if (r.kv_vram_tokens > r.n_ctx) r.kv_vram_tokens = r.n_ctx;
    if (r.pass_tokens > r.n_ctx) r.pass_tokens = (int)r.n_ctx;
    if (begin(p, m, &r)) return false;
    if (p->gpu) return !fit_gpu(p, m, &r, PLAN_FITS);
    return !fill_host(p, m) && p->host_bytes <= r.host_limit;
}

int64_t plan_max_ctx(const struct model *m, const struct plan_request *r, int64_t n_ctx_most) {
    struct plan_request q = *r;
    struct plan *p = malloc(sizeof *p);
    int64_t lo = 0, hi = n_ctx_most; /* lo fits, everything above hi is not asked for */
    q.n_ctx = hi;
    q.depth = q.prompt = 0;
    if (p && fits(p, m, q)) lo = hi;
    if (!p || lo == hi) {
        free(p);
        return lo;
    }
    hi = (hi - 1) / KV_PAGE;
    while (lo < hi) { /* in pages */
        int64_t mid = lo + (hi - lo + 1) / 2;
        q.n_ctx = mid * KV_PAGE;
        if (fits(p, m, q))
            lo = mid;
        else
            hi = mid - 1;
    }
    free(p);
    return lo * KV_PAGE;
}

static int refuse_gpu(const struct plan *p, const struct model *m, const struct plan_request *r) {
    int64_t most = plan_max_ctx(m, r, r->n_ctx);
    struct plan_request q = *r;
    q.type_k = q.type_v = QT_Q8_0;
    char what[200], pins[64] = "";
    bool q8 = !most && r->type_k == QT_F16;
    if (r->pins || r->n_rule) snprintf(pins, sizeof pins, " with the placement that was asked for");
    if (most)
        snprintf(what, sizeof what, "%lld tokens of context would fit", (long long)most);
    else
        snprintf(what, sizeof what, "not even 256 tokens of context would fit%s", q8 ? "; a smaller model or more memory would" : "");
    const struct plan_table *v = &p->phase[PLAN_DECODE].vram;
    size_t vram = v->limit - v->runtime - v->headroom;
    return err_set(ERR_BUDGET, "does not fit%s: %lld tokens of context (weights %.1f + KV %.1f + state %.1f MiB, and scratch) in %.1f MiB of "
                               "VRAM and %.1f MiB of host memory; %s", pins, (long long)p->n_ctx, mib(p->weights_bytes), mib(p->kv_bytes),
                   mib(p->state_bytes + p->saved_bytes), mib(v->limit < v->runtime + v->headroom ? 0 : vram), mib(p->host_limit), what);
}

int plan_make(struct plan *out, const struct model *m, const struct plan_request *r) {
    int rc = begin(out, m, r);
    if (rc) return rc;
    if (out->gpu) {
        rc = fit_gpu(out, m, r, PLAN_FITS); /* what plan_max_ctx says is what can be made */
        if (!rc) rc = fit_gpu(out, m, r, PLAN_BEST);
        return rc == PLAN_TOO_BIG ? refuse_gpu(out, m, r) : rc;
    }
    rc = fill_host(out, m);
    if (rc) return rc;
    if (out->host_bytes > r->host_limit) return refuse_host(out, m, r);
    struct plan_work w;
    rc = open_work(&w, out, m, r);
    if (rc) return rc;
    if (r->machine) {
        struct plan_rates rates;
        plan_rates_of(&rates, &w);
        plan_cpu_step(&out->decode, &w, &rates, out->depth);
        out->prefill_s = plan_cpu_prefill_s(&w, &rates, out->prompt);
        out->prefill_bound = PLAN_BY_CPU;
        out->load_s = w.file_bytes / rates.dram;
        out->predicted = true;
    }
    plan_work_close(&w);
    return 0;
}

int plan_work_of(struct plan_work *out, const struct plan *p, const struct model *m, const struct plan_request *r) {
    struct plan *q = malloc(sizeof *q);
    if (!q) return err_set(ERR_NOMEM, "plan: out of memory");
    *q = *p; /* open_work completes the limits of phases */
    int rc = r->machine ? open_work(out, q, m, r) : err_set(ERR_ARG, "plan: nothing can be predicted without a machine");
    free(q);
    return rc;
}

int plan_predict(struct plan_step *out, const struct plan *p, const struct model *m, const struct plan_request *r, int64_t depth) {
    struct plan_work w;
    struct plan_rates rates;
    if (depth < 0 || depth > p->n_ctx)
        return err_set(ERR_ARG, "depth %lld: must be within the context of %lld", (long long)depth, (long long)p->n_ctx);
    int rc = plan_work_of(&w, p, m, r);
    if (rc) return rc;
    plan_rates_of(&rates, &w);
    if (p->gpu)
        plan_decode_step(out, &w, &rates, &p->phase[PLAN_DECODE], depth);
    else
        plan_cpu_step(out, &w, &rates, depth);
    plan_work_close(&w);
    return 0;
}
