/* plan_work.c: bytes and operations of a model for the planner. See plan_work.h. */
#include "offload/plan_work.h"

#include "core/cost.h"
#include "core/decoder.h"
#include "core/err.h"
#include "core/kv.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/state.h"
#include "core/strip.h"
#include "core/unit.h"
#include "cpu/cpu.h"
#include "gpu/gpu.h"
#include "offload/kv_store.h"
#include "offload/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --- measured rates ----------------------------------------------------------------------------------------------------------- */

static double rate_of(const struct machine_rate *v, int n, const char *key) {
    for (int i = 0; i < n; i++)
        if (!strcasecmp(v[i].key, key)) return v[i].gbps;
    return 0;
}

/* Seconds per GB are summed: what has no measured rate counts at what the CPU reads in general. */
static double cpu_rate(const struct machine *mc, const struct unit *u) {
    double bytes = 0, s = 0;
    bool measured = false;
    if (!mc || !mc->cpu.n_matvec) return 0;
    for (int i = 0; i < u->n_tensor; i++) {
        const struct unit_tensor *t = &u->tensors[i];
        if (t->vector) continue;
        double r = rate_of(mc->cpu.matvec, mc->cpu.n_matvec, quant_name(t->t.type));
        measured = measured || r > 0;
        bytes += (double)t->bytes;
        s += (double)t->bytes / (r > 0 ? r : mc->host.dram_gbps * mc->host.cpu_share);
    }
    return measured ? bytes / s : 0;
}

static double attn_rate(const struct machine *mc, const struct layer *l, int type_k) {
    char key[40];
    if (!mc || !l->n_kv) return 0;
    snprintf(key, sizeof key, "%s/g%d/d%d", quant_name(type_k), l->n_head / l->n_kv, l->head_dim_k);
    return rate_of(mc->cpu.attn, mc->cpu.n_attn, key);
}

/* --- sizes -------------------------------------------------------------------------------------------------------------------- */

static double flops_of(const struct unit *u) {
    double f = 0;
    for (int i = 0; i < u->n_tensor; i++)
        if (!u->tensors[i].vector) f += 2.0 * (double)u->tensors[i].t.rows * (double)u->tensors[i].t.cols;
    return f;
}

static size_t bytes_of(const struct tensor *t, int64_t rows, int64_t cols) {
    struct strip_layout s;
    return t->bytes && strip_layout(&s, t->type, rows, cols) ? s.bytes : 0;
}

/* The inner rows of a dense FFN. */
static void add_dense(struct plan_work_layer *w, const struct layer *l) {
    const struct tensor *gate = &l->t[LT_FFN_GATE], *up = &l->t[LT_FFN_UP], *down = &l->t[LT_FFN_DOWN];
    w->n_ff = l->n_ff;
    w->n_quanta = l->n_ff >= 2 * PLAN_ROWS ? l->n_ff / PLAN_ROWS : 1;
    w->ff.bytes = tensor_home_bytes(gate, false) + tensor_home_bytes(up, false) + tensor_home_bytes(down, false);
    w->quantum_bytes = bytes_of(gate, PLAN_ROWS, gate->cols) + bytes_of(up, PLAN_ROWS, up->cols) + bytes_of(down, down->rows, PLAN_ROWS);
    if (w->n_quanta == 1) w->quantum_bytes = w->ff.bytes;
}

static void add_unit(struct plan_work *w, const struct unit *u) {
    const struct model *m = w->m;
    const struct machine *mc = w->r.machine;
    struct plan_work_layer *l = u->il >= 0 ? &w->layers[u->il] : NULL;
    switch (u->kind) {
    case UNIT_EMBED:
        w->embed.bytes = u->home_bytes;
        w->embed.cpu_gbps = cpu_rate(mc, u);
        break;
    case UNIT_HEAD:
        w->head.bytes = u->home_bytes;
        w->head.cpu_gbps = cpu_rate(mc, u);
        w->tied = u->tied;
        break;
    case UNIT_ATTN:
        l->mixer.bytes = u->home_bytes;
        l->mixer.cpu_gbps = cpu_rate(mc, u);
        break;
    case UNIT_FFN:
        l->rest.bytes = u->home_bytes;
        l->rest.cpu_gbps = l->ff.cpu_gbps = cpu_rate(mc, u);
        if (m->layers[u->il].ffn != FFN_DENSE) break;
        add_dense(l, &m->layers[u->il]);
        l->rest.bytes -= l->ff.bytes;
        break;
    case UNIT_EXPERT:
        l->experts.bytes += u->home_bytes;
        l->experts.cpu_gbps = cpu_rate(mc, u);
        l->experts.flops += flops_of(u) * m->n_expert_used / m->n_expert;
        l->n_expert = m->n_expert;
        l->n_used = m->n_expert_used;
        break;
    }
}

static int read_units(struct plan_work *w) {
    struct unit *units;
    int n, rc = model_units(&units, &n, w->m);
    if (rc) return rc;
    for (int i = 0; i < n; i++) add_unit(w, &units[i]);
    free(units);
    /* One home where the output matrix is the embedding's. */
    if (w->tied) {
        w->head.bytes += w->embed.bytes;
        w->head.cpu_gbps = w->embed.cpu_gbps;
        w->embed.bytes = 0;
    }
    return 0;
}

/* --- dry run ------------------------------------------------------------------------------------------------------------------ */

static void mixer_cost(struct plan_work_layer *l, const struct cost *c, const struct layer *ml, double visible) {
    l->mixer.read = c->weight_bytes;
    l->mixer.flops = c->matmul_flops;
    l->delta = ml->mixer == MIXER_DELTA;
    l->delta_flops = c->delta_flops;
    l->attn_flops = c->attn_flops / visible;
    l->calls += (int)c->calls;
}

static void ffn_cost(struct plan_work_layer *l, const struct cost *c) {
    l->calls += (int)c->calls;
    if (l->n_ff) {
        l->ff.read = c->weight_bytes;
        l->ff.flops = c->matmul_flops;
        return;
    }
    l->experts.read = l->n_expert ? (double)l->experts.bytes * l->n_used / l->n_expert : 0;
    l->rest.read = c->weight_bytes - l->experts.read;
    l->rest.flops = c->matmul_flops - l->experts.flops;
}

/* Operations since the last call. */
static void take(struct cost *part, struct cost *seen, const struct cost *now) {
    *part = *now;
    part->weight_bytes -= seen->weight_bytes;
    part->state_bytes -= seen->state_bytes;
    part->matmul_flops -= seen->matmul_flops;
    part->attn_flops -= seen->attn_flops;
    part->delta_flops -= seen->delta_flops;
    part->calls -= seen->calls;
    *seen = *now;
}

/* One token at the end of the context, on all layers and the head; then the blocks after them. */
static int run(struct plan_work *w, struct cost *c, struct decoder *d) {
    const struct model *m = w->m;
    int64_t depth = w->r.n_ctx - 1;
    int32_t id = 0;
    struct cost part, seen = *c;
    int rc = decoder_begin(d, depth, 1);
    if (!rc) rc = decoder_embed(d, NULL, &id, 1);
    take(&part, &seen, c);
    w->calls = (int)part.calls;
    for (int il = 0; il < m->n_layer && !rc; il++) {
        const struct layer *l = &m->layers[il];
        double visible = l->window && l->window < depth + 1 ? (double)l->window : (double)depth + 1;
        rc = decoder_mixer(d, il, NULL, 0, 1);
        take(&part, &seen, c);
        mixer_cost(&w->layers[il], &part, l, visible);
        if (!rc) rc = decoder_ffn(d, il, NULL, 0, 1);
        take(&part, &seen, c);
        ffn_cost(&w->layers[il], &part);
    }
    if (!rc) rc = decoder_head(d, NULL, NULL, 1);
    take(&part, &seen, c);
    w->head.read = part.weight_bytes;
    w->head.flops = part.matmul_flops;
    w->calls += (int)part.calls;
    w->weight_bytes_per_tok = c->weight_bytes;
    w->kv_bytes_per_position = c->kv_read_bytes / (double)w->r.n_ctx;
    w->state_bytes_per_tok = c->state_bytes / 2;
    for (int il = m->n_layer; il < w->n_layer && !rc; il++) { /* multi-token prediction */
        rc = decoder_mixer(d, il, NULL, 0, 1);
        take(&part, &seen, c);
        mixer_cost(&w->layers[il], &part, &m->layers[il], (double)depth + 1);
        if (!rc) rc = decoder_ffn(d, il, NULL, 0, 1);
        take(&part, &seen, c);
        ffn_cost(&w->layers[il], &part);
    }
    return rc;
}

static int dry_run(struct plan_work *w) {
    const struct model *m = w->m;
    struct plan p = {.n_ctx = w->r.n_ctx, .type_k = w->r.type_k, .type_v = w->r.type_v, .chunk_tokens = w->r.chunk_tokens};
    struct cost c;
    cost_open(&c);
    struct kv_spec spec;
    struct kv_shape *shapes = NULL;
    struct kv kv = {.n_layer = m->n_block, .n_ctx = w->r.n_ctx, .layers = calloc((size_t)m->n_block, sizeof *kv.layers)};
    struct weights weights = {.layers = calloc((size_t)m->n_block, sizeof *weights.layers)};
    struct decoder *d = NULL;
    int rc = kv.layers && weights.layers ? session_kv_spec(&spec, &shapes, m, &p) : err_set(ERR_NOMEM, "plan: out of memory");
    if (!rc) rc = kv_plan(kv.layers, &kv.bytes, &spec);
    for (int il = 0; il < m->n_block && !rc; il++) {
        if (kv.layers[il].n_slot > INT32_MAX) rc = err_set(ERR_BUDGET, "a context of %lld tokens has more pages than can be counted", (long long)w->r.n_ctx);
        w->layers[il].kv_pages = kv.layers[il].n_kv ? (int)kv.layers[il].n_slot : 0;
        w->layers[il].page_bytes = kv.layers[il].page_bytes;
        w->layers[il].window = m->layers[il].window;
        w->layers[il].attn_cpu_gbps = attn_rate(w->r.machine, &m->layers[il], w->r.type_k);
    }
    if (!rc) rc = decoder_open(&d, m, &c.ops, &weights, &kv, NULL, 1, 1, w->r.n_ctx, NULL, NULL);
    if (!rc) rc = run(w, &c, d);
    decoder_close(d);
    free(shapes);
    free(weights.layers);
    free(kv.layers);
    return rc;
}

int plan_work_open(struct plan_work *out, const struct model *m, const struct plan_request *r) {
    *out = (struct plan_work){.m = m, .r = *r, .n_layer = m->n_block, .state_bytes = state_bytes(m), .file_bytes = (double)m->file_bytes,
                              .layers = calloc((size_t)m->n_block, sizeof *out->layers)};
    int rc = out->layers ? read_units(out) : err_set(ERR_NOMEM, "plan: out of memory");
    if (!rc) rc = dry_run(out);
    int n_delta = 0;
    for (int il = 0; il < out->n_layer && !rc; il++) n_delta += out->layers[il].delta;
    for (int il = 0; il < out->n_layer && !rc; il++) {
        struct plan_work_layer *l = &out->layers[il];
        l->state_bytes = l->delta ? out->state_bytes / (size_t)n_delta : 0;
        out->linear_flops += l->mixer.flops + l->rest.flops + l->ff.flops + l->experts.flops + l->delta_flops;
    }
    if (rc) plan_work_close(out);
    return rc;
}

void plan_work_close(struct plan_work *w) {
    free(w->layers);
    w->layers = NULL;
}

/* --- tables ------------------------------------------------------------------------------------------------------------------- */

void plan_ff_bytes(size_t bytes[PLAN_PLACES], const struct plan_work_layer *l, const int32_t rows[PLAN_PLACES]) {
    size_t left = l->ff.bytes;
    for (int p = PLAN_PLACES - 1; p >= 0; p--) { /* the first part has what no whole PLAN_ROWS are left for */
        bool last = true;
        for (int q = 0; q < p; q++) last = last && !rows[q];
        bytes[p] = !rows[p] ? 0 : last ? left : (size_t)(rows[p] / PLAN_ROWS) * l->quantum_bytes;
        left -= bytes[p];
    }
}

void plan_expert_bytes(size_t bytes[PLAN_PLACES], const struct plan_work_layer *l, const int16_t n[PLAN_PLACES]) {
    for (int p = 0; p < PLAN_PLACES; p++) bytes[p] = l->n_expert ? l->experts.bytes / (size_t)l->n_expert * (size_t)n[p] : 0;
}

static void add_to(size_t *sum, size_t bytes) {
    if (!size_align_up(&bytes, bytes, GPU_ALIGN) || !size_add(sum, *sum, bytes)) *sum = SIZE_MAX;
}

size_t plan_gpu_scratch(const struct plan_work *w, int chunk, int pass) {
    struct ops_limits l;
    decoder_limits(&l, w->m, chunk, w->r.n_ctx);
    size_t sum = 0, heads = size_mul3((size_t)PLAN_DECODE_TOKENS * PLAN_PLACES, (size_t)l.n_head, ((size_t)l.head_dim + 2) * sizeof(float));
    add_to(&sum, decoder_scratch_bytes(w->m, chunk, pass));
    add_to(&sum, gpu_ops_scratch_bytes(&l));
    add_to(&sum, size_mul3((size_t)w->r.logits_rows, (size_t)w->m->n_vocab, sizeof(float)));
    add_to(&sum, heads);
    return sum;
}

size_t plan_gpu_hidden(const struct plan_work *w, int pass) {
    size_t sum = 0;
    add_to(&sum, size_mul3((size_t)pass, (size_t)w->m->dim, sizeof(float)));
    return sum;
}

size_t plan_host_scratch(const struct plan_work *w, int pass) {
    struct cpu_opts o = {.n_thread = w->r.n_thread, .isa = w->r.isa};
    int n = w->r.n_ctx < PLAN_DECODE_TOKENS ? (int)w->r.n_ctx : PLAN_DECODE_TOKENS;
    decoder_limits(&o.limits, w->m, n, w->r.n_ctx);
    size_t sum = 0;
    add_to(&sum, cpu_scratch_bytes(&o));
    add_to(&sum, decoder_scratch_bytes(w->m, n, n));
    add_to(&sum, size_mul3((size_t)n * PLAN_PLACES, (size_t)o.limits.n_head, ((size_t)o.limits.head_dim + 2) * sizeof(float)));
    add_to(&sum, size_mul3((size_t)pass, (size_t)w->m->dim, sizeof(float)));
    add_to(&sum, size_mul3((size_t)w->r.logits_rows, (size_t)w->m->n_vocab, sizeof(float)));
    return sum;
}

static void add_layer(struct plan_table *t, const struct plan_work_layer *l, const struct plan_layer *p) {
    size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
    plan_ff_bytes(ff, l, p->ff_rows);
    plan_expert_bytes(ex, l, p->experts);
    if (p->mixer == PLAN_VRAM) add_to(&t->weights, l->mixer.bytes);
    if (p->ffn == PLAN_VRAM) add_to(&t->weights, l->rest.bytes);
    add_to(&t->weights, ff[PLAN_VRAM]);
    add_to(&t->weights, ex[PLAN_VRAM]);
    if (l->delta && p->state == PLAN_VRAM) {
        add_to(&t->state, l->state_bytes);
        add_to(&t->saved, l->state_bytes);
    }
}

/* Rings, and the landing place that layers share whose VRAM pages one call can outrun: as kv_store.c carves them. */
static void add_kv(struct plan_table *t, const struct plan_work *w, const struct plan_phase *ph) {
    int64_t ring = kv_store_ring_pages(ph);
    size_t landing = 0;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        const struct plan_layer *p = &ph->layers[il];
        if (!l->kv_pages || p->mixer == PLAN_CPU) continue;
        if (p->kv_pages[PLAN_VRAM] >= (ring < l->kv_pages ? ring : l->kv_pages)) add_to(&t->kv, (size_t)p->kv_pages[PLAN_VRAM] * l->page_bytes);
        else if (l->page_bytes > landing) landing = l->page_bytes;
    }
    add_to(&t->kv, (size_t)ring * landing);
}

void plan_vram_table(struct plan_table *t, const struct plan_work *w, const struct plan_phase *ph) {
    t->weights = t->kv = t->state = t->saved = 0;
    for (int il = 0; il < w->n_layer; il++) add_layer(t, &w->layers[il], &ph->layers[il]);
    add_kv(t, w, ph);
    if (ph->head == PLAN_VRAM) add_to(&t->weights, w->head.bytes);
    t->ring = (size_t)ph->ring_slots * ph->ring_slot_bytes;
    t->stage = (size_t)ph->stage_slots * ph->stage_slot_bytes;
    plan_table_sum(t);
}

void plan_table_sum(struct plan_table *t) {
    const size_t parts[] = {t->weights, t->kv, t->state, t->saved, t->scratch, t->hidden, t->ring, t->stage, t->runtime, t->headroom};
    t->sum = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!size_add(&t->sum, t->sum, parts[i])) t->sum = SIZE_MAX;
}

/* Whether host memory has a part: it is outside VRAM in one of the phases. */
static bool outside(int prefill, int decode) { return prefill != PLAN_VRAM || decode != PLAN_VRAM; }

static int64_t pages_outside(const struct plan_layer *p) { return (int64_t)p->kv_pages[PLAN_CPU] + p->kv_pages[PLAN_STREAM]; }

static void add_host_layer(struct plan_table *t, const struct plan_work_layer *l, const struct plan_layer *pre, const struct plan_layer *dec) {
    size_t ff[PLAN_PLACES], ex[PLAN_PLACES];
    plan_ff_bytes(ff, l, dec->ff_rows);
    plan_expert_bytes(ex, l, dec->experts);
    if (outside(pre->mixer, dec->mixer)) add_to(&t->weights, l->mixer.bytes);
    if (outside(pre->ffn, dec->ffn)) add_to(&t->weights, l->rest.bytes);
    for (int p = PLAN_CPU; p < PLAN_PLACES; p++) {
        add_to(&t->weights, ff[p]);
        add_to(&t->weights, ex[p]);
    }
    if (dec->ff_rows[PLAN_VRAM] && !pre->ff_rows[PLAN_VRAM]) add_to(&t->weights, ff[PLAN_VRAM]);
    if (dec->experts[PLAN_VRAM] && !pre->experts[PLAN_VRAM]) add_to(&t->weights, ex[PLAN_VRAM]);
    int64_t pages = pages_outside(pre) > pages_outside(dec) ? pages_outside(pre) : pages_outside(dec);
    add_to(&t->kv, (size_t)pages * l->page_bytes);
    if (l->delta && dec->state == PLAN_CPU) {
        add_to(&t->state, l->state_bytes);
        add_to(&t->saved, l->state_bytes);
    }
}

void plan_host_table(struct plan_table *t, size_t *pinned, const struct plan_work *w, const struct plan_phase *pre, const struct plan_phase *dec) {
    t->weights = t->kv = t->state = t->saved = 0;
    for (int il = 0; il < w->n_layer; il++) add_host_layer(t, &w->layers[il], &pre->layers[il], &dec->layers[il]);
    if (outside(pre->head, dec->head)) add_to(&t->weights, w->head.bytes);
    *pinned = t->weights + t->kv;
    add_to(&t->weights, w->embed.bytes); /* rows are looked up where they lie */
    plan_table_sum(t);
}

size_t plan_rehome_bytes(const struct plan_work *w, const struct plan_phase *prefill, const struct plan_phase *decode) {
    size_t sum = 0, ff[PLAN_PLACES], ex[PLAN_PLACES];
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        const struct plan_layer *pre = &prefill->layers[il], *dec = &decode->layers[il];
        plan_ff_bytes(ff, l, dec->ff_rows);
        plan_expert_bytes(ex, l, dec->experts);
        if (dec->mixer == PLAN_VRAM && pre->mixer != PLAN_VRAM) sum += l->mixer.bytes;
        if (dec->ffn == PLAN_VRAM && pre->ffn != PLAN_VRAM) sum += l->rest.bytes;
        if (!pre->ff_rows[PLAN_VRAM]) sum += ff[PLAN_VRAM];
        if (!pre->experts[PLAN_VRAM]) sum += ex[PLAN_VRAM];
        int64_t more = dec->kv_pages[PLAN_VRAM] - pre->kv_pages[PLAN_VRAM];
        if (more > 0) sum += (size_t)more * l->page_bytes;
    }
    if (decode->head == PLAN_VRAM && prefill->head != PLAN_VRAM) sum += w->head.bytes;
    return sum;
}

/* --- ring --------------------------------------------------------------------------------------------------------------------- */

/* Experts of a layer are streamed in groups: a slot need not hold more. */
enum { GROUP_BYTES = 256 << 20, PIECE_BYTES = 16 << 20 };

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static size_t slot_for(const struct plan_work_layer *l, const struct plan_layer *p) {
    size_t ff[PLAN_PLACES], ex[PLAN_PLACES], need = 0;
    plan_ff_bytes(ff, l, p->ff_rows);
    plan_expert_bytes(ex, l, p->experts);
    if (p->mixer == PLAN_STREAM) need = l->mixer.bytes;
    if (p->ffn == PLAN_STREAM) need = larger(need, l->rest.bytes + ff[PLAN_STREAM]);
    need = larger(need, ff[PLAN_STREAM]);
    size_t one = l->n_expert ? l->experts.bytes / (size_t)l->n_expert : 0, group = one > GROUP_BYTES ? one : GROUP_BYTES / (one ? one : 1) * one;
    return larger(need, ex[PLAN_STREAM] < group ? ex[PLAN_STREAM] : group);
}

void plan_ring(struct plan_phase *ph, const struct plan_work *w) {
    size_t slot = 0, stage = 0;
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_work_layer *l = &w->layers[il];
        slot = larger(slot, slot_for(l, &ph->layers[il]));
        stage = larger(stage, (size_t)ph->layers[il].kv_pages[PLAN_STREAM] * l->page_bytes);
    }
    if (!ph->stage_whole && stage > PIECE_BYTES) stage = PIECE_BYTES; /* pages of a layer in pieces */
    ph->ring_slots = slot ? ph->ring_wanted : 0;
    ph->ring_slot_bytes = align_up(slot, GPU_ALIGN);
    ph->stage_slots = stage ? ph->stage_wanted : 0;
    ph->stage_slot_bytes = align_up(stage, GPU_ALIGN);
}
