/* part.c: see part.h. */
#include "offload/part.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"
#include "core/unit.h"

#include <stdlib.h>
#include <string.h>

/* The list while it is made. */
struct maker {
    struct parts *out;
    const struct model *m;
    const struct plan *plan; /* NULL: all on the CPU */
    struct part_tensor *next;
    int rc;
};

static struct part *begin(struct maker *k, enum part_kind kind, int il, const uint8_t place[PLAN_PHASES]) {
    struct part *p = &k->out->v[k->out->n++];
    *p = (struct part){.kind = kind, .il = il, .place = {place[0], place[1]}, .tensors = k->next};
    p->on_host = !part_fixed(p);
    return p;
}

/* Adds what `want` names of its tensor. */
static void add(struct maker *k, struct part *p, struct part_tensor want) {
    if (!want.t->bytes || k->rc) return;
    size_t bytes = 0, sum;
    struct strip_layout s;
    bool ok = true;
    if (want.vector)
        bytes = align_up((size_t)want.t->cols * sizeof(float), UNIT_ALIGN);
    else
        ok = strip_layout(&s, want.t->type, want.rows, want.cols) && size_mul(&bytes, s.bytes, (size_t)want.n_matrix);
    if (!ok || !size_add(&sum, p->bytes, bytes)) {
        k->rc = err_set(ERR_UNSUPPORTED, "layer %d: a matrix of %lld x %lld of type %s cannot be laid out", p->il, (long long)want.rows,
                        (long long)want.cols, quant_name(want.t->type));
        return;
    }
    want.offset = p->bytes;
    want.bytes = bytes;
    *k->next++ = want;
    p->n_tensor++;
    p->bytes = sum;
}

static struct part_tensor whole(const struct tensor *t, int id, bool vector) {
    return (struct part_tensor){.t = t, .id = id, .vector = vector, .rows = t->rows, .cols = t->cols, .n_matrix = (int)t->stack};
}

static void add_layer_tensor(struct maker *k, struct part *p, int id) {
    add(k, p, whole(&k->m->layers[p->il].t[id], id, layer_tensor_is_vector((enum layer_tensor)id)));
}

static bool is_mixer(int t) { return t <= LT_POST_ATTN_NORM; }
static bool is_dense(int t) { return t == LT_FFN_GATE || t == LT_FFN_UP || t == LT_FFN_DOWN; }
static bool is_stack(int t) { return t == LT_MOE_GATE || t == LT_MOE_UP || t == LT_MOE_DOWN; }

/* --- places ------------------------------------------------------------------------------------------------------------------- */

static const uint8_t all_cpu[PLAN_PHASES] = {PLAN_CPU, PLAN_CPU};

static int impossible(const struct maker *k, int il, const char *what, int64_t a, int64_t b) {
    (void)k;
    return err_set(ERR_ARG, "plan: layer %d: %s (%lld, %lld)", il, what, (long long)a, (long long)b);
}

/* Where the parts of a split are in prefill: as in decode, or some in VRAM still and the others streamed. */
static int prefill_places(struct maker *k, int il, uint8_t place[PLAN_PLACES], const int64_t dec[PLAN_PLACES], const int64_t pre[PLAN_PLACES],
                          int64_t all) {
    if (dec[0] < 0 || dec[1] < 0 || dec[2] < 0 || dec[0] + dec[1] + dec[2] != all) return impossible(k, il, "parts of an FFN do not add up", dec[0] + dec[1] + dec[2], all);
    bool same = true, vram = pre[PLAN_VRAM] == dec[PLAN_VRAM];
    for (int p = 0; p < PLAN_PLACES; p++) same = same && dec[p] == pre[p];
    if (!same && ((!vram && pre[PLAN_VRAM]) || pre[PLAN_CPU] || pre[PLAN_VRAM] + pre[PLAN_STREAM] != all))
        return impossible(k, il, "in prefill an FFN's parts are where they are in decode, or streamed", pre[PLAN_VRAM], pre[PLAN_CPU]);
    for (int p = 0; p < PLAN_PLACES; p++) place[p] = (uint8_t)(same || (p == PLAN_VRAM && vram) ? p : PLAN_STREAM);
    return 0;
}

/* Rows begin and end with strips of gate and up and with blocks of down. */
static int check_split(const struct maker *k, int il, int64_t row0) {
    const struct layer *l = &k->m->layers[il];
    const struct quant_info *q = quant_info(l->t[LT_FFN_DOWN].type);
    if (row0 % STRIP_ROWS || (q && row0 % q->block_elems)) return impossible(k, il, "an FFN cannot be split at this row", row0, q ? q->block_elems : STRIP_ROWS);
    if (l->t[LT_FFN_GATE_BIAS].bytes || l->t[LT_FFN_UP_BIAS].bytes) return impossible(k, il, "an FFN with biases cannot be split", row0, l->n_ff);
    return 0;
}

static void add_rows(struct maker *k, int il, const uint8_t place[PLAN_PHASES], int64_t row0, int64_t rows) {
    const struct layer *l = &k->m->layers[il];
    struct part *p = begin(k, PART_ROWS, il, place);
    p->row0 = row0;
    p->rows = rows;
    for (int t = LT_FFN_GATE; t <= LT_FFN_DOWN; t++) {
        struct part_tensor x = whole(&l->t[t], t, false);
        if (t == LT_FFN_DOWN)
            x.col0 = row0, x.cols = rows;
        else
            x.row0 = row0, x.rows = rows;
        add(k, p, x);
    }
    k->out->layers[il].n_ffn++;
}

static void add_experts(struct maker *k, int il, const uint8_t place[PLAN_PHASES], int first, int n) {
    const struct layer *l = &k->m->layers[il];
    struct part *p = begin(k, PART_EXPERTS, il, place);
    p->expert0 = first;
    p->n_expert = n;
    for (int t = LT_MOE_GATE; t <= LT_MOE_DOWN; t++) {
        struct part_tensor x = whole(&l->t[t], t, false);
        x.matrix0 = first;
        x.n_matrix = n;
        add(k, p, x);
    }
    k->out->layers[il].n_ffn++;
}

/* Streamed experts in groups that a slot holds. */
static void add_groups(struct maker *k, int il, const uint8_t place[PLAN_PHASES], int first, int n) {
    const struct layer *l = &k->m->layers[il];
    size_t one = 0;
    int group = n;
    for (int t = LT_MOE_GATE; t <= LT_MOE_DOWN; t++) one += tensor_home_bytes(&l->t[t], false) / (size_t)k->m->n_expert;
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        size_t fit = k->plan && place[ph] == PLAN_STREAM && one ? k->plan->phase[ph].ring_slot_bytes / one : (size_t)n;
        if (fit < 1) fit = 1; /* too small a slot is refused where the ring is made */
        if (fit < (size_t)group) group = (int)fit;
    }
    for (int e = first; e < first + n; e += group) add_experts(k, il, place, e, first + n - e < group ? first + n - e : group);
}

/* The split parts of a layer's FFN. */
static void add_split(struct maker *k, int il) {
    const struct layer *l = &k->m->layers[il];
    bool dense = l->ffn == FFN_DENSE;
    int64_t all = dense ? l->n_ff : k->m->n_expert, dec[PLAN_PLACES] = {0, all, 0}, pre[PLAN_PLACES] = {0, all, 0}, at = 0;
    uint8_t in_prefill[PLAN_PLACES];
    for (int p = 0; p < PLAN_PLACES && k->plan; p++) {
        const struct plan_layer *d = &k->plan->phase[PLAN_DECODE].layers[il], *f = &k->plan->phase[PLAN_PREFILL].layers[il];
        dec[p] = dense ? d->ff_rows[p] : d->experts[p];
        pre[p] = dense ? f->ff_rows[p] : f->experts[p];
    }
    k->rc = prefill_places(k, il, in_prefill, dec, pre, all);
    k->out->layers[il].ffn = k->out->n;
    for (int p = 0; p < PLAN_PLACES && !k->rc; at += dec[p++]) {
        if (!dec[p]) continue;
        if (dense && at) k->rc = check_split(k, il, at);
        uint8_t place[PLAN_PHASES];
        place[PLAN_PREFILL] = in_prefill[p];
        place[PLAN_DECODE] = (uint8_t)p;
        if (k->rc) return;
        if (dense)
            add_rows(k, il, place, at, dec[p]);
        else
            add_groups(k, il, place, (int)at, (int)dec[p]);
    }
}

static void add_layer(struct maker *k, int il) {
    const struct plan *p = k->plan;
    uint8_t mixer[PLAN_PHASES] = {PLAN_CPU, PLAN_CPU}, rest[PLAN_PHASES] = {PLAN_CPU, PLAN_CPU};
    for (int ph = 0; ph < PLAN_PHASES && p; ph++) {
        mixer[ph] = p->phase[ph].layers[il].mixer;
        rest[ph] = p->phase[ph].layers[il].ffn;
        if (mixer[ph] >= PLAN_PLACES || rest[ph] >= PLAN_PLACES) k->rc = impossible(k, il, "no such place", mixer[ph], rest[ph]);
    }
    if (k->rc) return;
    k->out->layers[il].mixer = k->out->n;
    struct part *x = begin(k, PART_MIXER, il, mixer);
    for (int t = 0; t < LT_COUNT; t++)
        if (is_mixer(t)) add_layer_tensor(k, x, t);
    k->out->layers[il].rest = k->out->n;
    x = begin(k, PART_REST, il, rest);
    for (int t = 0; t < LT_COUNT; t++)
        if (!is_mixer(t) && !is_dense(t) && !is_stack(t)) add_layer_tensor(k, x, t);
    if (!k->rc) add_split(k, il);
}

static void add_globals(struct maker *k) {
    const struct model *m = k->m;
    uint8_t head[PLAN_PHASES] = {PLAN_CPU, PLAN_CPU}, *embed = k->out->embed_place;
    bool tied = !m->out.bytes, lookup = false;
    memcpy(embed, all_cpu, sizeof all_cpu);
    for (int ph = 0; ph < PLAN_PHASES; ph++) {
        if (k->plan) head[ph] = k->plan->phase[ph].head, embed[ph] = k->plan->phase[ph].embed;
        if (embed[ph] == PLAN_STREAM) embed[ph] = PLAN_CPU;
        lookup = lookup || embed[ph] != PLAN_VRAM;
        if (head[ph] >= PLAN_PLACES || (embed[ph] == PLAN_VRAM && tied && head[ph] != PLAN_VRAM))
            k->rc = impossible(k, -1, "embedding and output cannot be placed so", embed[ph], head[ph]);
    }
    if (!tied) {
        k->out->embed = k->out->n;
        add(k, begin(k, PART_EMBED, -1, embed), whole(&m->embd, PT_EMBD, false));
    }
    for (int il = 0; il < m->n_block && !k->rc; il++) add_layer(k, il);
    k->out->head = k->out->n;
    struct part *x = begin(k, PART_HEAD, -1, head);
    if (tied) {
        k->out->embed = k->out->head;
        x->on_host = x->on_host || lookup;
    }
    add(k, x, whole(&m->out_norm, PT_OUT_NORM, true));
    add(k, x, whole(tied ? &m->embd : &m->out, PT_OUT, false));
    add(k, x, whole(&m->out_bias, PT_OUT_BIAS, true));
}

int parts_open(struct parts *out, const struct model *m, const struct plan *p) {
    size_t n = (size_t)m->n_block, experts = (size_t)m->n_expert + PLAN_PLACES;
    size_t most = 2 + n * (2 + experts), tensors = 4 + n * (LT_COUNT + 3 * experts);
    *out = (struct parts){.memory = calloc(1, n * sizeof *out->layers + most * sizeof *out->v + tensors * sizeof(struct part_tensor))};
    if (!out->memory) return err_set(ERR_NOMEM, "no memory for the list of %zu parts", most);
    out->v = out->memory;
    struct part_tensor *t = (struct part_tensor *)(void *)(out->v + most);
    out->layers = (struct part_layer *)(void *)(t + tensors);
    struct maker k = {.out = out, .m = m, .plan = p && p->gpu ? p : NULL, .next = t};
    add_globals(&k);
    if (k.rc) parts_close(out);
    return k.rc;
}

static bool goes_on(const struct part *a, const struct part *b) {
    return a->kind == PART_EXPERTS && b->kind == PART_EXPERTS && a->il == b->il && !memcmp(a->place, b->place, sizeof a->place);
}

size_t part_run(const struct parts *ps, int i) {
    if (i > 0 && goes_on(&ps->v[i - 1], &ps->v[i])) return 0;
    size_t sum = ps->v[i].bytes;
    for (int k = i + 1; k < ps->n && goes_on(&ps->v[k - 1], &ps->v[k]); k++) sum += ps->v[k].bytes;
    return sum;
}

void parts_close(struct parts *ps) {
    free(ps->memory);
    *ps = (struct parts){0};
}
