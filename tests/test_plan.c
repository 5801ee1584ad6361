/* test_plan.c: properties of plans over random machines and models: budgets and headroom kept, sums exact, every unit in one
 * home, more memory or bandwidth never slower, pins honoured, the largest context; and brute force over small models. */
#include "tests/support.h"

#include "core/err.h"
#include "core/kv.h"
#include "core/quant.h"
#include "core/strip.h"
#include "core/synth.h"
#include "core/unit.h"
#include "gpu/gpu.h"
#include "offload/kv_store.h"
#include "offload/home.h"
#include "offload/plan_work.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- models and machines ------------------------------------------------------------------------------------------------------ */

enum { N_MODEL = 40, N_CASE = 1000 };

static struct {
    struct gguf *gguf;
    struct model m;
    char name[80];
} models[N_MODEL];

static int64_t between(uint64_t *rng, int64_t lo, int64_t hi) { return lo + (int64_t)(test_rand(rng) % (uint64_t)(hi - lo + 1)); }
static double log_between(uint64_t *rng, double lo, double hi) { return lo * pow(hi / lo, (double)test_uniform(rng, 0, 1)); }
static int64_t one_of(uint64_t *rng, const int64_t *v, int n) { return v[test_rand(rng) % (uint64_t)n]; }
#define ONE_OF(rng, ...) one_of(rng, (const int64_t[]){__VA_ARGS__}, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

/* Any sizes that a file may have: odd numbers of layers, inner rows that are no multiple of PLAN_ROWS, few or many heads. */
static struct shape random_shape(uint64_t *rng) {
    struct shape s = {.name = "random", .aliases = "", .n_vocab = (int)(32 * between(rng, 4, 5000)), .n_ctx = 32768, .rope_base = 1e6,
                      .eps = 1e-6, .rope_factor = 1, .full_interval = 1, .tied = test_rand(rng) % 2};
    s.head_dim = (int)ONE_OF(rng, 64, 128, 256);
    s.n_rot = s.head_dim;
    s.n_kv = (int)ONE_OF(rng, 1, 2, 4, 8);
    s.n_head = s.n_kv * (int)ONE_OF(rng, 1, 2, 6, 8);
    s.dim = 256 * (int)between(rng, 1, 20);
    s.n_ff = 256 * (int)between(rng, 1, 60);
    s.n_layer = (int)between(rng, 1, 70);
    switch (test_rand(rng) % 4) {
    case 0: s.arch = "llama"; break;
    case 1:
        s.arch = "qwen3moe";
        s.n_expert = (int)ONE_OF(rng, 4, 16, 60);
        s.n_expert_used = (int)between(rng, 1, 4);
        s.n_ff_expert = 256 * (int)between(rng, 1, 4);
        s.n_ff = 0;
        break;
    case 2:
        s.arch = "qwen35";
        s.full_interval = 4;
        s.n_layer = 4 * (int)between(rng, 1, 16);
        s.n_key_head = (int)ONE_OF(rng, 2, 4);
        s.n_value_head = s.n_key_head * (int)ONE_OF(rng, 1, 2);
        s.state_dim = (int)ONE_OF(rng, 64, 128);
        s.n_conv = 4;
        s.n_rot = 64;
        break;
    default:
        s.arch = "gemma3";
        s.window = 1024;
        s.window_pattern = 6;
        s.rope_base_local = 1e4;
        s.tied = true;
    }
    return s;
}

static int open_models(void **state) {
    static const char *const built_in[] = {"qwen3.8-27b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3.5-0.8b", "qwen3.6-35b-a3b",
                                           "gemma3-27b", "generic-27b", "llama-3.1-8b", "qwen2.5-32b", "qwen3.8-27b-mtp"};
    enum { N_BUILT_IN = sizeof built_in / sizeof *built_in };
    uint64_t rng = 11;
    (void)state;
    for (int i = 0; i < N_MODEL; i++) {
        struct shape random = random_shape(&rng);
        const struct shape *s = i < N_BUILT_IN ? shape_find(built_in[i]) : &random;
        enum mix mix = i ? (enum mix)ONE_OF(&rng, MIX_Q4_K_M, MIX_Q8_0, MIX_Q4_0, MIX_IQ4_XS) : MIX_Q4_K_M;
        if (synth_gguf(&models[i].gguf, s, mix, 1) || model_open(&models[i].m, models[i].gguf)) {
            printf("model %d: %s\n", i, err_text());
            return -1;
        }
        if (i < N_BUILT_IN && strstr(s->name, "mtp") && model_use_mtp(&models[i].m)) return -1;
        snprintf(models[i].name, sizeof models[i].name, "%s %s of %d layers, dim %d", s->name, s->arch, s->n_layer, s->dim);
    }
    return 0;
}

static int close_models(void **state) {
    (void)state;
    for (int i = 0; i < N_MODEL; i++) {
        model_close(&models[i].m);
        gguf_close(models[i].gguf);
    }
    return 0;
}

static struct machine random_machine(uint64_t *rng) {
    struct machine m = *machine_at(0);
    snprintf(m.name, sizeof m.name, "random");
    m.gpu.vram_bytes = log_between(rng, 2e9, 150e9);
    m.gpu.runtime_bytes = log_between(rng, 0.1e9, 0.7e9);
    m.gpu.vram_gbps = log_between(rng, 100, 5000);
    m.gpu.gemm_tflops = log_between(rng, 5, 700);
    m.gpu.attn_tflops = m.gpu.gemm_tflops * 0.7;
    m.link.h2d_gbps = m.link.d2h_gbps = log_between(rng, 2, 60);
    m.link.pageable_gbps = m.link.h2d_gbps / 3;
    m.host.dram_gbps = log_between(rng, 10, 400);
    m.host.dram_with_dma_gbps = m.host.dram_gbps * log_between(rng, 0.8, 1.1);
    m.host.cpu_share = log_between(rng, 0.4, 0.95);
    m.host.nodes[0].bytes = log_between(rng, 4e9, 500e9);
    m.host.memlock_bytes = test_rand(rng) % 4 ? -1 : log_between(rng, 1e6, 100e9);
    m.cpu.attn_gflops = log_between(rng, 50, 4000);
    m.cpu.matvec_gops = log_between(rng, 100, 6000);
    m.cpu.handover_us = log_between(rng, 5, 100);
    return m;
}

struct test_case {
    int model;
    struct machine machine;
    struct plan_request r;
};

static void random_case(struct test_case *c, uint64_t seed) {
    uint64_t rng = seed * 2654435761u + 17;
    test_rand(&rng);
    c->model = (int)(test_rand(&rng) % N_MODEL);
    c->machine = random_machine(&rng);
    static const int types[] = {QT_F16, QT_Q8_0, QT_F16, QT_Q4_0, QT_F32};
    c->r = (struct plan_request){.n_ctx = (int64_t)log_between(&rng, 200, 600000), .type_k = types[test_rand(&rng) % 5],
                                 .type_v = types[test_rand(&rng) % 4], .logits_rows = 1, .n_thread = (int)between(&rng, 1, 32),
                                 .host_limit = (size_t)c->machine.host.nodes[0].bytes, .machine = &c->machine};
    if (test_rand(&rng) % 3 == 0) c->r.depth = between(&rng, 1, c->r.n_ctx);
    if (test_rand(&rng) % 3 == 0) c->r.prompt = between(&rng, 1, c->r.n_ctx);
    if (test_rand(&rng) % 4 == 0) c->r.headroom = (size_t)log_between(&rng, 1e6, 1e9);
    if (test_rand(&rng) % 4 == 0) c->r.vram_limit = (size_t)((c->machine.gpu.vram_bytes - c->machine.gpu.runtime_bytes) * (double)test_uniform(&rng, 0.3f, 1));
    if (test_rand(&rng) % 8 == 0) c->r.decode_tokens = (int)between(&rng, 1, 16);
}

/* --- what every plan keeps ---------------------------------------------------------------------------------------------------- */

/* Bytes of inner rows [from, from + n) of a dense FFN, from the layout itself. */
static size_t rows_bytes(const struct layer *l, int64_t n) {
    static const enum layer_tensor t[] = {LT_FFN_GATE, LT_FFN_UP, LT_FFN_DOWN};
    size_t sum = 0;
    for (int i = 0; i < 3; i++) {
        struct strip_layout s;
        const struct tensor *w = &l->t[t[i]];
        if (!n || !w->bytes) continue;
        assert_true(strip_layout(&s, w->type, t[i] == LT_FFN_DOWN ? w->rows : n, t[i] == LT_FFN_DOWN ? n : w->cols));
        sum += s.bytes;
    }
    return sum;
}

static size_t padded(size_t bytes) { return (bytes + GPU_ALIGN - 1) / GPU_ALIGN * GPU_ALIGN; }

/* Weights by memory, counted from the units: in VRAM in each phase, outside in either. */
struct counted {
    size_t vram[PLAN_PHASES], host, all;
};

static void count(struct counted *c, size_t bytes, int prefill, int decode) {
    c->all += bytes;
    if (prefill == PLAN_VRAM) c->vram[PLAN_PREFILL] += padded(bytes);
    if (decode == PLAN_VRAM) c->vram[PLAN_DECODE] += padded(bytes);
    if (prefill != PLAN_VRAM || decode != PLAN_VRAM) c->host += padded(bytes);
}

static void count_ffn(struct counted *c, const struct unit *u, const struct layer *l, const struct plan_layer *pre, const struct plan_layer *dec) {
    size_t whole = rows_bytes(l, l->n_ff), parts = 0;
    int64_t rows = 0;
    for (int p = 0; p < PLAN_PLACES; p++) {
        size_t bytes = rows_bytes(l, dec->ff_rows[p]);
        int prefill = p == PLAN_VRAM && pre->ff_rows[PLAN_VRAM] ? PLAN_VRAM : PLAN_STREAM;
        if (bytes) count(c, bytes, prefill, p);
        parts += bytes;
        rows += dec->ff_rows[p];
        if (rows > dec->ff_rows[p]) assert_int_equal(dec->ff_rows[p] % PLAN_ROWS, 0); /* whole pieces after the first part */
    }
    assert_int_equal(rows, l->n_ff);
    assert_int_equal(parts, whole);
    assert_true(!pre->ff_rows[PLAN_VRAM] || pre->ff_rows[PLAN_VRAM] == dec->ff_rows[PLAN_VRAM]);
    assert_int_equal(pre->ff_rows[PLAN_VRAM] + pre->ff_rows[PLAN_STREAM], l->n_ff);
    count(c, u->home_bytes - whole, pre->ffn, dec->ffn);
}

static void check_weights(const struct plan *p, const struct model *m) {
    const struct plan_phase *pre = &p->phase[PLAN_PREFILL], *dec = &p->phase[PLAN_DECODE];
    struct counted c = {0};
    struct unit *units;
    int n;
    size_t embed = 0;
    assert_int_equal(model_units(&units, &n, m), 0);
    for (int i = 0; i < n; i++) {
        const struct unit *u = &units[i];
        const struct plan_layer *a = u->il >= 0 ? &pre->layers[u->il] : NULL, *b = u->il >= 0 ? &dec->layers[u->il] : NULL;
        switch (u->kind) {
        case UNIT_EMBED: embed = u->home_bytes; break;
        case UNIT_HEAD: count(&c, u->home_bytes + (u->tied ? embed : 0), pre->head, dec->head); break;
        case UNIT_ATTN: count(&c, u->home_bytes, a->mixer, b->mixer); break;
        case UNIT_FFN:
            if (m->layers[u->il].ffn == FFN_DENSE)
                count_ffn(&c, u, &m->layers[u->il], a, b);
            else
                count(&c, u->home_bytes, a->ffn, b->ffn);
            break;
        case UNIT_EXPERT: break;
        }
    }
    for (int il = 0; il < m->n_block; il++) { /* experts lie side by side: padding once per place */
        const struct plan_layer *a = &pre->layers[il], *b = &dec->layers[il];
        size_t one = 0;
        for (int i = 0; i < n && !one; i++)
            if (units[i].kind == UNIT_EXPERT && units[i].il == il) one = units[i].home_bytes;
        if (!one) continue;
        assert_int_equal(b->experts[0] + b->experts[1] + b->experts[2], m->n_expert);
        assert_int_equal(a->experts[0] + a->experts[2], m->n_expert);
        assert_true(!a->experts[PLAN_VRAM] || a->experts[PLAN_VRAM] == b->experts[PLAN_VRAM]);
        for (int q = 0; q < PLAN_PLACES; q++)
            if (b->experts[q]) count(&c, one * (size_t)b->experts[q], q == PLAN_VRAM && a->experts[PLAN_VRAM] ? PLAN_VRAM : PLAN_STREAM, q);
    }
    bool tied = !m->out.bytes;
    if (!tied) {
        c.all += embed;
        c.host += padded(embed);
    }
    size_t divisors = tensor_home_bytes(&m->rope_freqs, true) + tensor_home_bytes(&m->rope_long, true) + tensor_home_bytes(&m->rope_short, true);
    assert_int_equal(c.all, home_bytes(m) + divisors);
    assert_int_equal(pre->vram.weights, c.vram[PLAN_PREFILL]);
    assert_int_equal(dec->vram.weights, c.vram[PLAN_DECODE]);
    assert_int_equal(dec->host.weights, c.host);
    free(units);
}

static void check_kv(const struct plan *p, const struct model *m, const struct plan_request *r) {
    struct kv_shape *shapes = calloc((size_t)m->n_block, sizeof *shapes);
    struct kv_layer *layers = calloc((size_t)m->n_block, sizeof *layers);
    size_t bytes, host = 0;
    for (int il = 0; il < m->n_block; il++) {
        const struct layer *l = &m->layers[il];
        shapes[il] = (struct kv_shape){l->n_kv, l->head_dim_k, l->head_dim_v, l->window};
    }
    struct kv_spec spec = {.n_layer = m->n_block, .shapes = shapes, .n_ctx = r->n_ctx, .n_tok = p->chunk_tokens, .type_k = r->type_k, .type_v = r->type_v};
    assert_int_equal(kv_plan(layers, &bytes, &spec), 0);
    assert_int_equal(bytes, p->kv_bytes);
    for (int il = 0; il < m->n_block; il++) {
        int64_t outside[PLAN_PHASES];
        for (int ph = 0; ph < PLAN_PHASES; ph++) {
            const struct plan_layer *l = &p->phase[ph].layers[il];
            int64_t slots = layers[il].n_kv ? layers[il].n_slot : 0, at[PLAN_PLACES];
            assert_true(l->kv_pages[0] >= 0 && l->kv_pages[1] >= 0 && l->kv_pages[2] >= 0);
            assert_int_equal(l->kv_pages[0] + l->kv_pages[1] + l->kv_pages[2], slots);
            outside[ph] = slots - l->kv_pages[PLAN_VRAM];
            if (l->kv_pages[PLAN_STREAM] && p->phase[ph].stage_whole)
                assert_true(p->phase[ph].stage_slot_bytes >= (size_t)l->kv_pages[PLAN_STREAM] * layers[il].page_bytes);
            if (l->kv_pages[PLAN_STREAM]) assert_true(p->phase[ph].stage_slots >= 1);
            plan_kv_pages(at, l, r->n_ctx);
            for (int q = 0; q < PLAN_PLACES; q++) assert_int_equal(at[q], l->kv_pages[q]);
            plan_kv_pages(at, l, r->n_ctx / 2);
            assert_true(at[0] >= 0 && at[1] >= 0 && at[2] >= 0 && at[0] <= l->kv_pages[0]);
        }
        assert_int_equal(p->phase[PLAN_PREFILL].layers[il].kv_pages[PLAN_CPU], 0);
        host += padded((size_t)(outside[0] > outside[1] ? outside[0] : outside[1]) * layers[il].page_bytes);
    }
    for (int ph = 0; ph < PLAN_PHASES; ph++) /* what is carved */
        assert_int_equal(p->phase[ph].vram.kv + p->phase[ph].vram.stage, kv_store_vram_bytes(layers, m->n_block, &p->phase[ph]));
    assert_int_equal(p->phase[PLAN_DECODE].host.kv, host);
    free(shapes);
    free(layers);
}

static void check_table(const struct plan_table *t, const char *what) {
    size_t sum = t->weights + t->kv + t->state + t->saved + t->scratch + t->hidden + t->ring + t->stage + t->runtime + t->headroom;
    if (t->sum != sum) fail_msg("%s: the sum is %zu, its terms are %zu", what, t->sum, sum);
    if (t->sum > t->limit) fail_msg("%s: %zu of %zu bytes", what, t->sum, t->limit);
}

static void check_ring(const struct plan_phase *ph, const struct plan_work *w) {
    for (int il = 0; il < w->n_layer; il++) {
        const struct plan_layer *l = &ph->layers[il];
        size_t ff[PLAN_PLACES];
        plan_ff_bytes(ff, &w->layers[il], l->ff_rows);
        size_t need = ff[PLAN_STREAM];
        if (l->mixer == PLAN_STREAM && w->layers[il].mixer.bytes > need) need = w->layers[il].mixer.bytes;
        if (need > ph->ring_slot_bytes) fail_msg("layer %d: %zu bytes in slots of %zu", il, need, ph->ring_slot_bytes);
        if (need || l->experts[PLAN_STREAM]) assert_true(ph->ring_slots >= 1);
    }
}

static void check_times(const struct plan *p, const struct machine *m) {
    const struct plan_step *d = &p->decode;
    assert_true(isfinite(d->s) && d->s > 0 && isfinite(p->prefill_s) && p->prefill_s > 0 && p->load_s > 0 && p->rehome_s >= 0);
    double dram = fmax(m->host.dram_with_dma_gbps, m->host.dram_gbps * m->host.cpu_share) * 1e9;
    assert_true(d->s >= d->link_bytes / (m->link.h2d_gbps * 1e9) * 0.999999);
    assert_true(d->s >= (d->cpu_bytes + d->link_bytes) / dram * 0.999999); /* both read DRAM */
    assert_true(d->s >= d->vram_bytes / (m->gpu.vram_gbps * 1e9));
    assert_true(d->s >= d->cpu_s * 0.999999 && d->s >= d->gpu_s * 0.999999);
}

static void check_plan(const struct plan *p, const struct test_case *c) {
    const struct model *m = &models[c->model].m;
    struct plan_work w;
    struct plan_request q = c->r;
    q.chunk_tokens = p->chunk_tokens;
    assert_int_equal(plan_work_open(&w, m, &q), 0);
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        check_table(&p->phase[ph].vram, ph ? "decode, VRAM" : "prefill, VRAM");
        check_table(&p->phase[ph].host, ph ? "decode, host" : "prefill, host");
        check_ring(&p->phase[ph], &w);
        if (c->r.vram_limit) assert_true(p->phase[ph].vram.sum - p->phase[ph].vram.runtime - p->phase[ph].vram.headroom <= c->r.vram_limit);
        if (c->r.headroom && !c->r.vram_limit) assert_int_equal(p->phase[ph].vram.headroom, c->r.headroom);
    }
    assert_true(p->host_bytes <= c->r.host_limit && p->host_bytes >= p->phase[0].host.sum);
    plan_work_close(&w);
    check_weights(p, m);
    check_kv(p, m, &c->r);
    check_times(p, &c->machine);
}

static void plans_keep_budgets_and_sums(void **state) {
    static struct plan p, again;
    int made = 0, refused = 0;
    (void)state;
    for (int i = 0; i < N_CASE; i++) {
        struct test_case c;
        random_case(&c, (uint64_t)i);
        int rc = plan_make(&p, &models[c.model].m, &c.r);
        if (rc && rc != ERR_BUDGET && rc != ERR_UNSUPPORTED) fail_msg("case %d, %s: %s", i, models[c.model].name, err_text());
        if (rc) {
            refused++;
            continue;
        }
        made++;
        check_plan(&p, &c);
        if (i % 10) continue;
        assert_int_equal(plan_make(&again, &models[c.model].m, &c.r), 0);
        assert_memory_equal(&p, &again, sizeof p);
    }
    if (made < N_CASE / 2 || refused < N_CASE / 50) fail_msg("%d made, %d refused: the cases say little", made, refused);
}

/* What plans make small: plan.h. */
static double score(const struct plan *p, const struct test_case *c) {
    struct plan_step low;
    if (plan_predict(&low, p, &models[c->model].m, &c->r, p->depth / PLAN_LOW)) fail_msg("%s", err_text());
    return p->decode.s + plan_low_share(&c->r) * low.s;
}

/* --- more is never slower ------------------------------------------------------------------------------------------------------ */

/* The search climbs over whole pages and rows and can end a little below the optimum: by 0.6 % in the worst of these cases. */
static const double rounding = 1e-2;
/* Copies take DRAM from the CPU as fast as the link can, and are not paced: with a faster link the CPU may wait longer. */
static const double unpaced = 8e-2;

static void more_is_never_slower(void **state) {
    static struct plan p, q;
    static const char *const what[] = {"VRAM", "VRAM bandwidth", "link", "DRAM", "host memory", "CPU"};
    double worst = 0;
    int n = 0;
    (void)state;
    for (int i = 0; i < N_CASE; i++) {
        struct test_case c;
        random_case(&c, (uint64_t)i + 5000);
        c.r.vram_limit = 0;
        if (plan_make(&p, &models[c.model].m, &c.r)) continue;
        struct machine *m = &c.machine;
        double before = score(&p, &c);
        int k = i % 6;
        double f = i % 4 ? 1.1 : 2;
        if (k == 0) m->gpu.vram_bytes *= f;
        if (k == 1) m->gpu.vram_gbps *= f;
        if (k == 2) m->link.h2d_gbps *= f, m->link.d2h_gbps *= f, m->link.pageable_gbps *= f;
        if (k == 3) m->host.dram_gbps *= f, m->host.dram_with_dma_gbps *= f;
        if (k == 4) c.r.host_limit = (size_t)((double)c.r.host_limit * f);
        if (k == 5) m->cpu.attn_gflops *= f, m->cpu.matvec_gops *= f;
        if (plan_make(&q, &models[c.model].m, &c.r)) fail_msg("case %d: %g times the %s, and it does not fit: %s", i, f, what[k], err_text());
        double slower = score(&q, &c) / before - 1;
        if (slower > worst) worst = slower;
        if (slower > (k == 2 ? unpaced : rounding))
            fail_msg("case %d, %s: %g times the %s makes decode %.2f %% slower (%.4f, %.4f ms)", i, models[c.model].name, f, what[k], slower * 100,
                     p.decode.s * 1e3, q.decode.s * 1e3);
        n++;
    }
    assert_true(n > N_CASE / 2);
}

/* --- the largest context --------------------------------------------------------------------------------------------------------- */

static void largest_context_fits_and_no_page_more(void **state) {
    static struct plan p;
    int tight = 0;
    (void)state;
    for (int i = 0; i < 60; i++) {
        struct test_case c;
        random_case(&c, (uint64_t)i + 9000);
        c.r.depth = c.r.prompt = 0;
        const struct model *m = &models[c.model].m;
        int64_t most = plan_max_ctx(m, &c.r, 1 << 20);
        if (!most) {
            c.r.n_ctx = KV_PAGE;
            assert_true(plan_make(&p, m, &c.r) < 0);
            continue;
        }
        c.r.n_ctx = most;
        if (plan_make(&p, m, &c.r)) fail_msg("case %d, %s: %lld tokens do not fit: %s", i, models[c.model].name, (long long)most, err_text());
        check_plan(&p, &c);
        if (most == 1 << 20) continue;
        c.r.n_ctx = most + KV_PAGE;
        if (plan_make(&p, m, &c.r) != ERR_BUDGET) fail_msg("case %d, %s: a page more than %lld tokens fits", i, models[c.model].name, (long long)most);
        assert_non_null(strstr(err_text(), "would fit"));
        tight++;
    }
    assert_true(tight > 10);
}

/* --- pins -------------------------------------------------------------------------------------------------------------------------- */

static struct test_case usual(void) {
    struct test_case c = {.model = 0, .machine = *machine_at(0)};
    c.r = (struct plan_request){.n_ctx = 65536, .type_k = QT_F16, .type_v = QT_F16, .logits_rows = 1, .n_thread = 8, .host_limit = (size_t)64e9};
    return c;
}

static void make(struct plan *p, struct test_case *c) {
    c->r.machine = &c->machine;
    if (plan_make(p, &models[c->model].m, &c->r)) fail_msg("%s", err_text());
    check_plan(p, c);
}

static void pins_are_honoured(void **state) {
    static struct plan p, best;
    struct test_case c = usual();
    (void)state;
    make(&best, &c);
    c.r.pins = PLAN_PIN_LAYERS;
    for (int n = 0; n <= 65; n += 13) {
        c.r.n_gpu_layers = n;
        make(&p, &c);
        for (int il = 0; il < 64; il++) {
            const struct plan_layer *l = &p.phase[PLAN_DECODE].layers[il];
            int want = il < 64 - n ? PLAN_CPU : PLAN_VRAM;
            assert_int_equal(l->mixer, want);
            assert_int_equal(l->ff_rows[want], 17408);
            if (want == PLAN_CPU) assert_int_equal(l->kv_pages[PLAN_VRAM], 0);
        }
        assert_int_equal(p.phase[PLAN_DECODE].head, n > 64 ? PLAN_VRAM : PLAN_CPU);
        assert_true(p.decode.s >= best.decode.s * 0.999);
        if (n == 52) break; /* the next does not fit beside the KV of its layers' share */
    }
    c = usual();
    c.r.pins = PLAN_PIN_KV_HOST;
    make(&p, &c);
    for (int il = 0; il < 64; il++) assert_int_equal(p.phase[PLAN_DECODE].layers[il].kv_pages[PLAN_VRAM], 0);
    c.r.pins = PLAN_PIN_KV_TOKENS | PLAN_PIN_KV_SHARE;
    c.r.kv_vram_tokens = 8192;
    c.r.kv_cpu_share = 0.75;
    make(&p, &c);
    int64_t cpu = 0, all = 0;
    for (int il = 3; il < 64; il += 4) {
        const struct plan_layer *l = &p.phase[PLAN_DECODE].layers[il];
        assert_int_equal(l->kv_pages[PLAN_VRAM], 32);
        cpu += l->kv_pages[PLAN_CPU];
        all += l->kv_pages[PLAN_CPU] + l->kv_pages[PLAN_STREAM];
    }
    assert_true(llabs(4 * cpu - 3 * all) <= 4);
    c = usual();
    c.r.chunk_tokens = 384;
    c.r.pass_tokens = 4096;
    make(&p, &c);
    assert_int_equal(p.phase[PLAN_PREFILL].chunk_tokens, 384);
    assert_int_equal(p.phase[PLAN_PREFILL].pass_tokens, 4096);
}

static void rules_and_experts_are_honoured(void **state) {
    static struct plan p;
    struct test_case c = usual();
    const struct plan_rule ffn[] = {{"blk\\.(1|2)\\.ffn_(up|gate|down)", PLAN_CPU}, {"blk\\.3\\.attn", PLAN_CPU}};
    (void)state;
    c.r.rules = ffn;
    c.r.n_rule = 2;
    make(&p, &c);
    for (int il = 1; il < 3; il++) assert_int_equal(p.phase[PLAN_DECODE].layers[il].ff_rows[PLAN_CPU], 17408);
    assert_int_equal(p.phase[PLAN_DECODE].layers[3].mixer, PLAN_CPU);
    const struct plan_rule half = {"blk\\.1\\.ffn_up", PLAN_CPU}, broken = {"blk(", PLAN_CPU};
    c.r.rules = &half;
    c.r.n_rule = 1;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    assert_non_null(strstr(err_text(), "two places"));
    c.r.rules = &broken;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    assert_non_null(strstr(err_text(), "blk("));

    c = usual();
    c.model = 3; /* 128 experts in 48 layers */
    c.r.pins = PLAN_PIN_MOE;
    c.r.n_cpu_moe = 10;
    make(&p, &c);
    for (int il = 0; il < 10; il++) assert_int_equal(p.phase[PLAN_DECODE].layers[il].experts[PLAN_CPU], 128);
    const struct plan_rule experts = {"ffn_.*_exps", PLAN_CPU};
    c.r.pins = 0;
    c.r.rules = &experts;
    c.r.n_rule = 1;
    make(&p, &c);
    for (int il = 0; il < 48; il++) {
        assert_int_equal(p.phase[PLAN_DECODE].layers[il].experts[PLAN_CPU], 128);
        assert_int_equal(p.phase[PLAN_DECODE].layers[il].mixer, PLAN_VRAM);
    }
    c.model = 0;
    c.r.n_rule = 0;
    c.r.pins = PLAN_PIN_MOE;
    c.r.machine = &c.machine;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
}

static void impossible_requests_are_refused(void **state) {
    static struct plan p;
    struct test_case c = usual();
    c.r.machine = &c.machine;
    (void)state;
    c.r.pins = PLAN_PIN_LAYERS;
    c.r.n_gpu_layers = 99;
    c.r.vram_limit = (size_t)12e9; /* for 15.8 GB of weights */
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_BUDGET);
    c.r.pins = 0;
    c.r.vram_limit = (size_t)20e9;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_BUDGET);
    c.r.vram_limit = 0;
    c.r.kv_cpu_share = 1.5;
    c.r.pins = PLAN_PIN_KV_SHARE;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    c.r.pins = PLAN_PIN_KV_TOKENS;
    c.r.kv_vram_tokens = 65537;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    c.r.pins = PLAN_PIN_KV_TOKENS | PLAN_PIN_KV_HOST;
    c.r.kv_vram_tokens = 10;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    c.r.pins = 0;
    c.r.pass_tokens = 100;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_ARG);
    c.r.pass_tokens = 0;
    c.r.host_limit = (size_t)2e9;
    assert_int_equal(plan_make(&p, &models[0].m, &c.r), ERR_BUDGET);
}

static void target_model_is_planned_fast(void **state) {
    static struct plan p;
    struct test_case c = usual();
    (void)state;
    c.r.n_ctx = 262144;
    c.r.type_k = c.r.type_v = QT_Q8_0;
    make(&p, &c);
    assert_true(1 / p.decode.s > 3.5 && 1 / p.decode.s < 4.5);
    for (int il = 0; il < 64; il++) assert_int_equal(p.phase[PLAN_DECODE].layers[il].mixer, PLAN_VRAM);
}

/* --- brute force ------------------------------------------------------------------------------------------------------------------- */

/* All ways to place the two layers of a small model, in quarters of FFN and KV, each layer by itself. */
enum { QUARTERS = 4 };

static void set_quarters(struct plan_layer *p, const struct plan_work_layer *l, int kv_cpu, int kv_stream, int ff_cpu, int ff_stream) {
    p->kv_pages[PLAN_CPU] = l->kv_pages * kv_cpu / QUARTERS;
    p->kv_pages[PLAN_STREAM] = l->kv_pages * kv_stream / QUARTERS;
    p->kv_pages[PLAN_VRAM] = l->kv_pages - p->kv_pages[PLAN_CPU] - p->kv_pages[PLAN_STREAM];
    int quanta = l->n_quanta;
    p->ff_rows[PLAN_CPU] = quanta * ff_cpu / QUARTERS * PLAN_ROWS;
    p->ff_rows[PLAN_STREAM] = quanta * ff_stream / QUARTERS * PLAN_ROWS;
    p->ff_rows[PLAN_VRAM] = l->n_ff - p->ff_rows[PLAN_CPU] - p->ff_rows[PLAN_STREAM];
    p->ffn = p->ff_rows[PLAN_VRAM] ? PLAN_VRAM : p->ff_rows[PLAN_CPU] ? PLAN_CPU : PLAN_STREAM;
}

static double brute_force(const struct plan *p, const struct plan_work *w, const struct plan_rates *r) {
    static struct plan_phase ph;
    double best = INFINITY;
    int split[15][2], n = 0;
    for (int a = 0; a <= QUARTERS; a++)
        for (int b = 0; a + b <= QUARTERS; b++) split[n][0] = a, split[n++][1] = b;
    ph = p->phase[PLAN_DECODE];
    ph.stage_whole = true;
    ph.ring_wanted = PLAN_RING_SLOTS;
    ph.stage_wanted = PLAN_STAGE_SLOTS;
    for (int head = 0; head < 2; head++)
        for (int i = 0; i < n * n * n * n; i++) {
            int k[4] = {i % n, i / n % n, i / (n * n) % n, i / (n * n * n)};
            ph.head = head ? PLAN_CPU : PLAN_VRAM;
            for (int il = 0; il < 2; il++) {
                ph.layers[il].mixer = PLAN_VRAM;
                set_quarters(&ph.layers[il], &w->layers[il], split[k[2 * il]][0], split[k[2 * il]][1], split[k[2 * il + 1]][0], split[k[2 * il + 1]][1]);
            }
            plan_ring(&ph, w);
            plan_vram_table(&ph.vram, w, &ph);
            if (ph.vram.sum > ph.vram.limit) continue;
            struct plan_step s;
            plan_decode_step(&s, w, r, &ph, w->r.depth);
            if (s.s < best) best = s.s;
        }
    return best;
}

static void small_plans_are_near_the_best(void **state) {
    static struct plan p;
    uint64_t rng = 3;
    double worst = 0;
    int tight = 0;
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct shape s = {.name = "two", .aliases = "", .arch = "llama", .n_vocab = 32000, .n_ctx = 1 << 20, .rope_base = 1e6, .eps = 1e-6, .rope_factor = 1,
                          .full_interval = 1, .n_layer = 2, .dim = 4096, .n_ff = PLAN_ROWS * (int)ONE_OF(&rng, 16, 32, 64), .n_head = 32,
                          .n_kv = (int)ONE_OF(&rng, 4, 8), .head_dim = 128, .n_rot = 128};
        struct gguf *g;
        struct model m;
        assert_int_equal(synth_gguf(&g, &s, MIX_Q4_0, 1), 0);
        assert_int_equal(model_open(&m, g), 0);
        struct machine mc = random_machine(&rng);
        mc.gpu.runtime_bytes = 1e8;
        mc.host.nodes[0].bytes = 100e9;
        mc.host.memlock_bytes = -1;
        mc.gpu.vram_bytes = 1e8 + 1e6 + log_between(&rng, 0.5e9, 2.5e9);
        struct plan_request r = {.n_ctx = 256 * 4 * between(&rng, 8, 200), .type_k = QT_F16, .type_v = QT_F16, .logits_rows = 1, .n_thread = 4,
                                 .host_limit = (size_t)100e9, .machine = &mc, .headroom = (size_t)1e6, .low_share = -1};
        int rc = plan_make(&p, &m, &r);
        if (rc == ERR_BUDGET) goto next;
        if (rc) fail_msg("%s", err_text());
        struct plan_work w;
        struct plan_rates rates;
        r.depth = r.prompt = r.n_ctx;
        r.decode_tokens = 1;
        r.chunk_tokens = p.chunk_tokens;
        r.n_thread = 3;
        assert_int_equal(plan_work_open(&w, &m, &r), 0);
        plan_rates_of(&rates, &w);
        double best = brute_force(&p, &w, &rates);
        tight += p.decode.cpu_bytes + p.decode.link_bytes > 0;
        if (p.decode.s / best - 1 > worst) worst = p.decode.s / best - 1;
        if (p.decode.s > best * 1.03) fail_msg("case %d: %.4f ms, brute force %.4f", i, p.decode.s * 1e3, best * 1e3);
        plan_work_close(&w);
    next:
        model_close(&m);
        gguf_close(g);
    }
    assert_true(tight >= 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_keep_budgets_and_sums),
        cmocka_unit_test(more_is_never_slower),
        cmocka_unit_test(largest_context_fits_and_no_page_more),
        cmocka_unit_test(pins_are_honoured),
        cmocka_unit_test(rules_and_experts_are_honoured),
        cmocka_unit_test(impossible_requests_are_refused),
        cmocka_unit_test(target_model_is_planned_fast),
        cmocka_unit_test(small_plans_are_near_the_best),
    };
    return cmocka_run_group_tests(tests, open_models, close_models);
}
