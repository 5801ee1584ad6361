/* unit.c: see unit.h. */
#include "core/unit.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/strip.h"

#include <stdlib.h>
#include <string.h>

const char *unit_kind_name(enum unit_kind k) {
    static const char *const names[] = {
        [UNIT_EMBED] = "embed", [UNIT_ATTN] = "attn", [UNIT_FFN] = "ffn", [UNIT_EXPERT] = "expert", [UNIT_HEAD] = "head"};
    return names[k];
}

size_t tensor_home_bytes(const struct tensor *t, bool vector) {
    struct strip_layout s;
    size_t bytes;
    if (!t->bytes) return 0;
    if (vector) return align_up((size_t)t->cols * sizeof(float), UNIT_ALIGN);
    if (!strip_layout(&s, t->type, t->rows, t->cols) || !size_mul(&bytes, s.bytes, (size_t)t->stack)) return SIZE_MAX;
    return bytes;
}

/* The list while it is built. */
struct units {
    struct unit *v;
    struct unit_tensor *next; /* free place for tensors, behind the units */
    int n;
    int rc;
};

static struct unit *begin(struct units *us, enum unit_kind kind, int il, int expert) {
    struct unit *u = &us->v[us->n++];
    *u = (struct unit){.kind = kind, .il = il, .expert = expert, .tensors = us->next};
    return u;
}

static void add(struct units *us, struct unit *u, const struct tensor *t, bool vector) {
    if (!t->bytes || us->rc) return;
    size_t bytes = tensor_home_bytes(t, vector), sum;
    if (bytes == SIZE_MAX || !size_add(&sum, u->home_bytes, bytes)) {
        us->rc = err_set(ERR_UNSUPPORTED, "a matrix of %lld x %lld (type %d) in layer %d is too large or of a type without a layout",
                         (long long)t->rows, (long long)t->cols, t->type, u->il);
        return;
    }
    u->n_tensor++;
    *us->next++ = (struct unit_tensor){.t = *t, .vector = vector, .offset = u->home_bytes, .bytes = bytes};
    u->home_bytes = sum;
    u->file_bytes += t->bytes;
}

static struct tensor expert_of(const struct tensor *stack, int e) {
    struct tensor t = *stack;
    t.offset += (uint64_t)e * stack->stride;
    t.stride = t.bytes = stack->bytes / (size_t)stack->stack;
    t.stack = 1;
    return t;
}

/* A layer's tensors up to LT_POST_ATTN_NORM are its mixer's; the stacks are the experts'. */
static bool is_attn(int t) { return t <= LT_POST_ATTN_NORM; }
static bool is_stack(int t) { return t == LT_MOE_GATE || t == LT_MOE_UP || t == LT_MOE_DOWN; }

static void add_layer(struct units *us, const struct model *m, int il) {
    const struct layer *l = &m->layers[il];
    struct unit *u = begin(us, UNIT_ATTN, il, -1);
    for (int t = 0; t < LT_COUNT; t++)
        if (is_attn(t)) add(us, u, &l->t[t], layer_tensor_is_vector(t));
    u = begin(us, UNIT_FFN, il, -1);
    for (int t = 0; t < LT_COUNT; t++)
        if (!is_attn(t) && !is_stack(t)) add(us, u, &l->t[t], layer_tensor_is_vector(t));
    if (l->ffn != FFN_EXPERTS) return;
    for (int e = 0; e < m->n_expert; e++) {
        u = begin(us, UNIT_EXPERT, il, e);
        for (int t = 0; t < LT_COUNT; t++) {
            if (!is_stack(t)) continue;
            struct tensor one = expert_of(&l->t[t], e);
            add(us, u, &one, false);
        }
    }
}

int model_units(struct unit **units, int *n, const struct model *m) {
    size_t layers = (size_t)m->n_block, experts = (size_t)m->n_expert;
    size_t most = 2 + layers * (2 + experts), most_tensors = 7 + layers * (LT_COUNT + 3 * experts); /* 7 outside of layers */
    struct units us = {.v = calloc(1, most * sizeof *us.v + most_tensors * sizeof *us.next)};
    if (!us.v) return err_set(ERR_NOMEM, "no memory for %zu units", most);
    us.next = (struct unit_tensor *)(us.v + most);
    struct unit *u = begin(&us, UNIT_EMBED, -1, -1);
    add(&us, u, &m->embd, false);
    add(&us, u, &m->rope_freqs, true);
    add(&us, u, &m->rope_long, true);
    add(&us, u, &m->rope_short, true);
    for (int il = 0; il < m->n_block; il++) add_layer(&us, m, il);
    u = begin(&us, UNIT_HEAD, -1, -1);
    u->tied = !m->out.bytes;
    add(&us, u, &m->out_norm, true);
    add(&us, u, &m->out, false);
    add(&us, u, &m->out_bias, true);
    if (us.rc) {
        free(us.v);
        return us.rc;
    }
    *units = us.v;
    *n = us.n;
    return 0;
}

static bool within(const struct tensor *t, const struct gguf_tensor *file) {
    return t->bytes && t->shard == file->shard && t->offset >= file->offset && t->offset - file->offset < file->bytes;
}

bool model_uses(const struct model *m, const struct gguf_tensor *t) {
    const struct tensor *globals[] = {&m->embd, &m->out_norm, &m->out, &m->out_bias, &m->rope_freqs, &m->rope_long, &m->rope_short};
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (within(globals[i], t)) return true;
    for (int il = 0; il < m->n_block; il++)
        for (int k = 0; k < LT_COUNT; k++)
            if (within(&m->layers[il].t[k], t)) return true;
    return false;
}
