/* plan.c: see plan.h. Sizes come from the functions that the allocators use; bytes per token from the cost table. */
#include "offload/plan.h"

#include "core/cost.h"
#include "core/decoder.h"
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/state.h"
#include "cpu/cpu.h"
#include "offload/home.h"
#include "offload/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_DEFAULT = 512, RUNTIME_BYTES = 64 << 20, MIB = 1 << 20 };

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

/* Weight and KV bytes of one token at depth 0 and at n_ctx, from a dry run of the decoder. */
static int dry_run(struct plan *p, const struct model *m) {
    struct cost c;
    cost_open(&c);
    struct kv_spec spec;
    struct kv_shape *shapes = NULL;
    struct kv kv = {.n_layer = m->n_block, .n_ctx = p->n_ctx, .layers = calloc((size_t)m->n_block, sizeof *kv.layers)};
    struct weights w = {.layers = calloc((size_t)m->n_block, sizeof *w.layers)};
    struct decoder *d = NULL;
    int rc = kv.layers && w.layers ? session_kv_spec(&spec, &shapes, m, p) : err_set(ERR_NOMEM, "plan: out of memory");
    if (!rc) rc = kv_plan(kv.layers, &kv.bytes, &spec);
    if (!rc) rc = decoder_open(&d, m, &c.ops, &w, &kv, NULL, 1, 1, p->n_ctx, NULL, NULL);
    if (!rc) {
        int64_t depth = p->n_ctx - 1;
        int32_t id = 0;
        rc = decoder_begin(d, depth, 1);
        if (!rc) rc = decoder_embed(d, NULL, &id, 1);
        for (int il = 0; il < m->n_layer && !rc; il++) {
            rc = decoder_mixer(d, il, NULL, 0, 1);
            if (!rc) rc = decoder_ffn(d, il, NULL, 0, 1);
        }
        if (!rc) rc = decoder_head(d, NULL, NULL, 1);
        p->weight_bytes_per_tok = c.weight_bytes;
        p->kv_bytes_per_position = c.kv_read_bytes / (double)p->n_ctx;
        p->state_bytes_per_tok = c.state_bytes / 2;
    }
    decoder_close(d);
    free(shapes);
    free(w.layers);
    free(kv.layers);
    return rc;
}

static int fill(struct plan *p, const struct model *m, const struct plan_request *r) {
    if (r->n_ctx < 1) return err_set(ERR_ARG, "a context of %lld tokens: must be at least 1", (long long)r->n_ctx);
    if (r->n_thread < 1) return err_set(ERR_ARG, "%d threads: must be at least 1", r->n_thread);
    *p = (struct plan){.n_ctx = r->n_ctx, .type_k = r->type_k, .type_v = r->type_v, .logits_rows = r->logits_rows < 1 ? 1 : r->logits_rows,
                       .n_thread = r->n_thread, .isa = r->isa, .host_limit = r->host_limit, .runtime_bytes = RUNTIME_BYTES};
    p->chunk_tokens = r->chunk_tokens > 0 ? r->chunk_tokens : CHUNK_DEFAULT;
    if (p->chunk_tokens > p->n_ctx) p->chunk_tokens = (int)p->n_ctx;
    if (p->logits_rows > p->chunk_tokens) p->logits_rows = p->chunk_tokens;
    p->weights_bytes = home_bytes(m);
    int rc = kv_bytes(&p->kv_bytes, m, p);
    if (rc) return rc;
    p->state_bytes = p->saved_bytes = state_bytes(m);
    p->scratch_bytes = session_scratch_bytes(m, p);
    p->load_bytes = (size_t)p->n_thread * MIB;
    size_t run = 0, load = 0;
    bool ok = p->weights_bytes != SIZE_MAX && p->scratch_bytes != SIZE_MAX && size_add(&run, p->kv_bytes, p->scratch_bytes) &&
              size_add(&run, run, p->state_bytes) && size_add(&run, run, p->saved_bytes) &&
              size_add(&run, run, p->weights_bytes) && size_add(&run, run, p->runtime_bytes) && size_add(&load, p->weights_bytes, p->load_bytes) && size_add(&load, load, p->runtime_bytes);
    if (!ok)
        return err_set(ERR_BUDGET, "a context of %lld tokens needs more memory than 64 bits can count", (long long)p->n_ctx);
    p->host_bytes = run > load ? run : load;
    return 0;
}

int64_t plan_max_ctx(const struct model *m, const struct plan_request *r, int64_t n_ctx_most) {
    struct plan_request q = *r;
    struct plan p;
    int64_t lo = 0, hi = n_ctx_most; /* lo fits, everything above hi is not asked for */
    q.n_ctx = hi;
    if (!fill(&p, m, &q) && p.host_bytes <= r->host_limit) return hi;
    hi = (hi - 1) / KV_PAGE;
    while (lo < hi) { /* in pages */
        int64_t mid = lo + (hi - lo + 1) / 2;
        q.n_ctx = mid * KV_PAGE;
        if (!fill(&p, m, &q) && p.host_bytes <= r->host_limit)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo * KV_PAGE;
}

static double mib(size_t bytes) { return (double)bytes / MIB; }

int plan_make(struct plan *out, const struct model *m, const struct plan_request *r) {
    int rc = fill(out, m, r);
    if (rc) return rc;
    if (out->host_bytes > r->host_limit) {
        int64_t fits = plan_max_ctx(m, r, r->n_ctx);
        char what[160];
        struct plan_request q = *r;
        q.type_k = q.type_v = QT_Q8_0;
        struct plan small;
        bool q8 = r->type_k != QT_Q8_0 && !fill(&small, m, &q) && small.host_bytes <= r->host_limit;
        snprintf(what, sizeof what, "%s%lld tokens of context would fit%s", fits ? "" : "not even ", fits ? (long long)fits : 256LL,
                 q8 ? ", or all of it with -ctk q8_0 -ctv q8_0" : "");
        return err_set(ERR_BUDGET,
                       "does not fit: %lld tokens of context need %.1f MiB (weights %.1f + KV %.1f + state %.1f + "
                       "scratch %.1f + program %.1f), %.1f MiB are available, %.1f MiB too few; %s",
                       (long long)out->n_ctx, mib(out->host_bytes), mib(out->weights_bytes), mib(out->kv_bytes),
                       mib(out->state_bytes + out->saved_bytes), mib(out->scratch_bytes),
                       mib(out->runtime_bytes), mib(r->host_limit), mib(out->host_bytes - r->host_limit), what);
    }
    return dry_run(out, m);
}
