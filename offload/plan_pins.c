/* plan_pins.c: what the user decides by hand (-ngl, -ot, -ncmoe, -nkvo), unit by unit. What cannot be kept is refused. */
#include "core/err.h"
#include "core/unit.h"
#include "offload/plan_work.h"

#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void pin_layers(struct plan_pins *p, const struct plan_work *w) {
    int64_t out = w->n_layer - w->r.n_gpu_layers; /* so many at the front are not in VRAM */
    for (int il = 0; il < w->n_layer; il++) {
        struct plan_pin_layer *l = &p->layers[il];
        uint8_t place = il < out ? PLAN_CPU : PLAN_VRAM;
        l->mixer = l->rest = l->ff = place;
        if (place == PLAN_CPU) l->kv = PLAN_CPU;
        if (w->layers[il].n_expert) l->experts_cpu = place == PLAN_CPU ? (int16_t)w->layers[il].n_expert : 0;
    }
    p->head = w->r.n_gpu_layers > w->n_layer ? PLAN_VRAM : PLAN_CPU;
}

/* What -ot has said of the parts of one unit. */
enum said { SAID_NOTHING = PLAN_PLACES, SAID_BOTH };
static int say(int before, int place) { return before == SAID_NOTHING || before == place ? place : SAID_BOTH; }

struct names {
    regex_t *re; /* [n_rule] */
    const struct plan_work *w;
};

/* PLAN_FREE: no rule matches. */
static int place_of(const struct names *n, const char *name) {
    for (int i = 0; i < n->w->r.n_rule; i++)
        if (!regexec(&n->re[i], name, 0, NULL, 0)) return n->w->r.rules[i].place;
    return PLAN_FREE;
}

static int pin_unit(uint8_t *pin, int said, const char *what, int il) {
    if (said == SAID_BOTH)
        return err_set(ERR_ARG, "-ot: %s of layer %d would be in two places, or partly free; it is placed as a whole: match all of its "
                                "tensors, or none", what, il);
    if (said < PLAN_PLACES) *pin = (uint8_t)said;
    return 0;
}

/* A part: said of each of its matrices; free ones and pinned ones do not mix. */
static int part(const struct names *n, int il, const struct layer *l, int from, int to, bool (*wanted)(int)) {
    int said = SAID_NOTHING;
    bool any = false, free_ones = false;
    char name[96];
    for (int t = from; t < to; t++) {
        if (!l->t[t].bytes || layer_tensor_is_vector((enum layer_tensor)t) || (wanted && !wanted(t))) continue;
        snprintf(name, sizeof name, "blk.%d.%s", il, layer_tensor_name((enum layer_tensor)t));
        int place = place_of(n, name);
        if (place == PLAN_FREE)
            free_ones = true;
        else
            said = say(said, place), any = true;
    }
    return any && free_ones ? SAID_BOTH : said;
}

static bool is_dense(int t) { return t == LT_FFN_GATE || t == LT_FFN_UP || t == LT_FFN_DOWN; }
static bool is_expert(int t) { return t == LT_MOE_GATE || t == LT_MOE_UP || t == LT_MOE_DOWN; }
static bool is_rest(int t) { return !is_dense(t) && !is_expert(t); }

static int pin_named(struct plan_pins *p, const struct names *n) {
    const struct model *m = n->w->m;
    int rc = 0;
    for (int il = 0; il < n->w->n_layer && !rc; il++) {
        struct plan_pin_layer *l = &p->layers[il];
        const struct layer *ml = &m->layers[il];
        rc = pin_unit(&l->mixer, part(n, il, ml, 0, LT_POST_ATTN_NORM + 1, NULL), "the attention part", il);
        if (!rc) rc = pin_unit(&l->ff, part(n, il, ml, LT_POST_ATTN_NORM + 1, LT_COUNT, is_dense), "the FFN", il);
        if (!rc) rc = pin_unit(&l->rest, part(n, il, ml, LT_POST_ATTN_NORM + 1, LT_COUNT, is_rest), "the router and shared expert", il);
        int said = part(n, il, ml, LT_POST_ATTN_NORM + 1, LT_COUNT, is_expert);
        uint8_t experts = PLAN_FREE;
        if (!rc) rc = pin_unit(&experts, said, "the experts", il);
        if (!rc && experts != PLAN_FREE) l->experts_cpu = experts == PLAN_CPU ? (int16_t)n->w->layers[il].n_expert : 0;
        if (l->mixer == PLAN_CPU) l->kv = PLAN_CPU; /* attended where its layer's attention is */
        if (l->ff != PLAN_FREE) l->rest = l->ff;
    }
    int head = place_of(n, m->out.bytes ? "output.weight" : "token_embd.weight");
    if (head != PLAN_FREE) p->head = (uint8_t)head;
    return rc;
}

static int pin_rules(struct plan_pins *p, const struct plan_work *w) {
    struct names n = {.w = w, .re = calloc((size_t)w->r.n_rule, sizeof *n.re)};
    if (!n.re) return err_set(ERR_NOMEM, "plan: out of memory");
    int rc = 0, done = 0;
    for (; done < w->r.n_rule && !rc; done++) {
        int e = regcomp(&n.re[done], w->r.rules[done].pattern, REG_EXTENDED | REG_NOSUB);
        char why[128];
        if (!e) continue;
        regerror(e, &n.re[done], why, sizeof why);
        rc = err_set(ERR_ARG, "-ot %s: not a regular expression: %s", w->r.rules[done].pattern, why);
        break;
    }
    if (!rc) rc = pin_named(p, &n);
    for (int i = 0; i < done; i++) regfree(&n.re[i]);
    free(n.re);
    return rc;
}

static int check(const struct plan_work *w) {
    const struct plan_request *r = &w->r;
    if ((r->pins & PLAN_PIN_LAYERS) && r->n_gpu_layers < 0) return err_set(ERR_ARG, "-ngl %lld: must be at least 0", (long long)r->n_gpu_layers);
    if ((r->pins & PLAN_PIN_MOE) && r->n_cpu_moe > 0 && !w->m->n_expert)
        return err_set(ERR_ARG, "-ncmoe %lld: this model has no experts", (long long)r->n_cpu_moe);
    if ((r->pins & PLAN_PIN_KV_SHARE) && !(r->kv_cpu_share >= 0 && r->kv_cpu_share <= 1))
        return err_set(ERR_ARG, "--kv-cpu-share %g: must be between 0 and 1", r->kv_cpu_share);
    if ((r->pins & PLAN_PIN_KV_HOST) && (r->pins & PLAN_PIN_KV_TOKENS) && r->kv_vram_tokens > 0)
        return err_set(ERR_ARG, "-nkvo puts all KV in host memory, --kv-vram-tokens %lld asks for some in VRAM", (long long)r->kv_vram_tokens);
    if ((r->pins & PLAN_PIN_KV_TOKENS) && (r->kv_vram_tokens < 0 || r->kv_vram_tokens > r->n_ctx))
        return err_set(ERR_ARG, "--kv-vram-tokens %lld: must be between 0 and the context of %lld", (long long)r->kv_vram_tokens,
                       (long long)r->n_ctx);
    return 0;
}

int plan_pins_read(struct plan_pins *p, const struct plan_work *w) {
    const struct plan_request *r = &w->r;
    int rc = check(w);
    if (rc) return rc;
    memset(p, 0, sizeof *p);
    p->head = PLAN_FREE;
    for (int il = 0; il < w->n_layer; il++)
        p->layers[il] = (struct plan_pin_layer){.mixer = PLAN_FREE, .rest = PLAN_FREE, .ff = PLAN_FREE, .kv = PLAN_FREE, .experts_cpu = -1};
    if (r->pins & PLAN_PIN_LAYERS) pin_layers(p, w);
    for (int il = 0; il < w->n_layer && (r->pins & PLAN_PIN_MOE) && il < r->n_cpu_moe; il++)
        p->layers[il].experts_cpu = (int16_t)w->layers[il].n_expert;
    if (r->n_rule) rc = pin_rules(p, w);
    return rc;
}
