/* claim.c: see claim.h. */
#include "offload/claim.h"

#include "core/err.h"
#include "core/quant.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define GB 1e9
#define GIB 1073741824.0

/* Allowances, each stated where it counts: activations and logits of a pass of 512 tokens of a model of this class, and
 * what one leaves free so that a desktop or a longer prompt does not end the run. */
#define SCRATCH_BYTES 0.5e9
#define HEADROOM_BYTES 1.0e9

/* Shares of the datasheet's bandwidth that engines reach in decode: what is within the upper one needs no excuse. */
#define DECODE_SHARE_LOW 0.60
#define DECODE_SHARE 0.70
/* Share of the tensor peak up to which a prefill speed needs no long passes. */
#define PREFILL_SHARE 0.40

const char *claim_verdict_name(enum claim_verdict v) {
    static const char *const names[] = {"possible", "only-if", "impossible"};
    return names[v];
}

void claim_rates_of(struct claim_rates *r, const struct machine *m) {
    *r = (struct claim_rates){.vram_bytes = m->gpu.vram_bytes, .vram_most_bytes = fmax(m->gpu.vram_bytes, m->gpu.datasheet_vram_bytes),
                              .runtime_bytes = m->gpu.runtime_bytes, .vram_gbps = m->gpu.vram_gbps, .peak_tflops = m->gpu.peak_tflops,
                              .link_gbps = m->link.h2d_gbps, .dram_gbps = m->host.dram_gbps, .gpu = m->gpu.source.origin,
                              .link = m->link.source.origin, .host = m->host.source.origin};
    snprintf(r->name, sizeof r->name, "%s", m->name);
    for (int i = 0; i < m->host.n_node; i++) r->host_bytes += m->host.nodes[i].bytes;
}

/* --- terms ------------------------------------------------------------------------------------------------------------------- */

static double value_bytes(int type) {
    const struct quant_info *q = quant_info(type);
    return q ? q->bpw / 8 : 0;
}

static double kv_bytes_of(const struct claim_model *m, int type_k, int type_v, double n_tok) {
    double k = value_bytes(type_k), v = value_bytes(type_v);
    return (m->k_values * k + m->v_values * v) * n_tok +
           (m->window_k_values * k + m->window_v_values * v) * fmin(n_tok, (double)m->window);
}

double claim_kv_bytes(const struct claim_model *m, const struct claim *c, int64_t n_tok) {
    return kv_bytes_of(m, c->type_k, c->type_v, (double)n_tok);
}

/* With `attended` > 0 only so many positions of the context are read. */
static struct claim_decode decode_at(const struct claim *c, const struct claim_model *m, const struct claim_rates *r, int64_t depth,
                                     int64_t attended) {
    struct claim_decode d = {.depth = depth};
    double kept = r->runtime_bytes + SCRATCH_BYTES + HEADROOM_BYTES;
    d.kv_bytes = claim_kv_bytes(m, c, attended > 0 && attended < depth ? attended : depth);
    d.read_bytes = m->read_bytes + d.kv_bytes + 2 * m->state_bytes;
    double held = m->read_bytes + d.kv_bytes + m->state_bytes;
    d.outside_bytes = fmax(0, held - r->vram_most_bytes);
    d.kept_bytes = fmax(0, held - r->vram_most_bytes + kept);
    d.vram_ts = r->vram_gbps * GB / (d.read_bytes - d.outside_bytes);
    d.ceiling_ts = d.vram_ts;
    if (!(d.outside_bytes > 0)) return d;
    d.dram_ts = r->dram_gbps * GB / d.outside_bytes;
    d.link_ts = r->link_gbps * GB / d.outside_bytes;
    d.kept_dram_ts = r->dram_gbps * GB / d.kept_bytes;
    d.kept_link_ts = r->link_gbps * GB / d.kept_bytes;
    if (r->dram_gbps > 0) d.ceiling_ts = fmin(d.vram_ts, d.dram_ts);
    return d;
}

struct claim_decode claim_decode_at(const struct claim *c, const struct claim_model *m, const struct claim_rates *r, int64_t depth) {
    return decode_at(c, m, r, depth, 0);
}

/* Flops per token of a prompt, on average. */
static double prefill_flops(const struct claim_model *m, double params, double prompt) {
    double w = (double)m->window;
    /* Positions that a token of a window layer sees: p on the way up to w, then w. */
    double seen = prompt <= w || prompt <= 0 ? prompt / 2 : (w * w / 2 + (prompt - w) * w) / prompt;
    return 2 * params + m->attn_flops * prompt / 2 + m->window_attn_flops * seen;
}

double claim_prefill_ts(const struct claim_model *m, const struct claim_rates *r, int64_t prompt) {
    return r->peak_tflops * 1e12 / prefill_flops(m, m->active_params, (double)prompt);
}

/* Largest n in 0 .. most with ok(n), -1: none. ok must turn false once and stay so. */
typedef bool (*holds_fn)(const void *ctx, int64_t n);
static int64_t last_that_holds(holds_fn ok, const void *ctx, int64_t most) {
    int64_t lo = -1, hi = most + 1;
    while (hi - lo > 1) {
        int64_t mid = lo + (hi - lo) / 2;
        if (ok(ctx, mid))
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

struct terms {
    const struct claim *c;
    const struct claim_model *m;
    const struct claim_rates *r;
};

static bool kv_fits(const void *ctx, int64_t n) {
    const struct terms *t = ctx;
    double need = t->m->weight_bytes + claim_kv_bytes(t->m, t->c, n) + t->m->state_bytes + SCRATCH_BYTES + t->r->runtime_bytes;
    return need <= t->r->vram_bytes;
}

static bool decode_holds(const void *ctx, int64_t n) {
    const struct terms *t = ctx;
    return decode_at(t->c, t->m, t->r, n, t->c->attended).ceiling_ts >= t->c->decode_ts;
}

static bool prefill_holds(const void *ctx, int64_t n) {
    const struct terms *t = ctx;
    return claim_prefill_ts(t->m, t->r, n) >= t->c->prefill_ts;
}

/* --- sentences ----------------------------------------------------------------------------------------------------------------- */

static void say(struct claim_figure *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void say(struct claim_figure *f, const char *fmt, ...) {
    size_t n = strlen(f->why);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->why + n, sizeof f->why - n, fmt, ap);
    va_end(ap);
}

/* 262144 as "262,144" in a rotating buffer of the thread. */
static const char *count(int64_t n) {
    static _Thread_local char ring[8][32];
    static _Thread_local int at;
    char digits[24], *out = ring[at++ & 7], *p = out;
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n);
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0) *p++ = ',';
        *p++ = digits[i];
    }
    *p = 0;
    return out;
}

/* Three significant digits, without exponents. */
static const char *speed(double ts) {
    static _Thread_local char ring[8][32];
    static _Thread_local int at;
    char *out = ring[at++ & 7];
    snprintf(out, sizeof ring[0], ts < 1 ? "%.2f" : ts < 100 ? "%.1f" : "%.0f", ts);
    return out;
}

static struct claim_figure *add(struct claim_report *out, const char *name, double claimed, double ceiling, const char *unit,
                                int64_t tokens, enum machine_origin origin) {
    struct claim_figure *f = &out->figures[out->n_figure++];
    *f = (struct claim_figure){.figure = name, .claimed = claimed, .ceiling = ceiling, .unit = unit, .tokens = tokens, .origin = origin};
    return f;
}

/* --- memory ----------------------------------------------------------------------------------------------------------------------- */

static void measure_memory(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    int64_t n = c->ctx;
    if (n < c->depth) n = c->depth;
    if (n < c->prompt) n = c->prompt;
    out->n_tok = n;
    out->kv_bytes_per_tok = claim_kv_bytes(t->m, c, n + 1) - claim_kv_bytes(t->m, c, n);
    out->weight_bytes = t->m->weight_bytes;
    out->kv_bytes = claim_kv_bytes(t->m, c, n);
    out->state_bytes = t->m->state_bytes;
    out->scratch_bytes = SCRATCH_BYTES;
    out->runtime_bytes = t->r->runtime_bytes;
    out->headroom_bytes = HEADROOM_BYTES;
    out->ctx_in_vram = last_that_holds(kv_fits, t, INT64_C(1) << 40);
}

/* What may be done about `over` bytes too many. */
static void say_move(struct claim_figure *f, const struct claim_model *m, double over) {
    double layer = (m->weight_bytes - m->embed_bytes) / m->n_layer;
    if (m->embed_bytes >= over) {
        say(f, "only if the token embedding (%.2f GB) or some layers stay on the host", m->embed_bytes / GB);
    } else if (m->embed_bytes > 0) {
        say(f, "only if the token embedding (%.2f GB) or some layers stay on the host: %.2f GB, with the embedding about %.0f of %d layers",
            m->embed_bytes / GB, over / GB, ceil((over - m->embed_bytes) / layer), m->n_layer);
    } else {
        say(f, "only if %.2f GB stay on the host (about %.0f of %d layers)", over / GB, ceil(over / layer), m->n_layer);
    }
}

static void judge_memory(struct claim_report *out, const struct terms *t) {
    const struct claim_model *m = t->m;
    const struct claim_rates *r = t->r;
    double held = out->weight_bytes + out->kv_bytes + out->state_bytes;
    double need = held + out->scratch_bytes + out->runtime_bytes;
    struct claim_figure *f = add(out, "memory", held, r->vram_bytes, "bytes", out->n_tok, r->gpu);
    say(f, "weights %.1f + KV %.1f (%s tokens) + state %.2f = %.1f GiB against %.1f (%.1f usable); ", out->weight_bytes / GIB,
        out->kv_bytes / GIB, count(out->n_tok), out->state_bytes / GIB, held / GIB, r->vram_most_bytes / GIB, r->vram_bytes / GIB);
    if (t->c->all_vram && held - m->embed_bytes > r->vram_most_bytes) {
        f->verdict = CLAIM_IMPOSSIBLE;
        say(f, "%.1f GiB too much before scratch and runtime", (held - r->vram_most_bytes) / GIB);
    } else if (held - m->embed_bytes > r->vram_most_bytes) {
        double outside = held - r->vram_most_bytes;
        f->verdict = r->host_bytes > 0 && outside > r->host_bytes ? CLAIM_IMPOSSIBLE : CLAIM_ONLY_IF;
        if (f->verdict == CLAIM_IMPOSSIBLE)
            say(f, "%.1f GB outside VRAM, the host has %.0f GB", outside / GB, r->host_bytes / GB);
        else
            say(f, "only if at least %.1f GB lie in host memory", outside / GB);
    } else if (need > r->vram_bytes) {
        f->verdict = CLAIM_ONLY_IF;
        say(f, "with scratch and runtime (%.1f GB) does not fit: ", (out->scratch_bytes + out->runtime_bytes) / GB);
        say_move(f, m, need - r->vram_bytes);
    } else if (need + out->headroom_bytes > r->vram_bytes) {
        f->verdict = CLAIM_ONLY_IF;
        say(f, "only if %.1f GB for scratch and runtime and %.1f GB to spare are enough", (out->scratch_bytes + out->runtime_bytes) / GB,
            (r->vram_bytes - need) / GB);
    } else {
        say(f, "%.1f GiB left for scratch, runtime and headroom", (r->vram_bytes - held) / GIB);
    }
}

static void judge_context(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    const struct claim_figure *memory = &out->figures[0];
    if (!c->ctx) return;
    double all = (double)(out->ctx_in_vram > 0 ? out->ctx_in_vram : 0);
    struct claim_figure *f = add(out, "context", (double)c->ctx, all, "tokens", c->ctx, t->r->gpu);
    f->verdict = memory->verdict;
    say(f, "KV %s B/token, %.1f GiB", count((int64_t)llround(out->kv_bytes_per_tok)), claim_kv_bytes(t->m, c, c->ctx) / GIB);
    say(f, " (f16 %.1f, q8_0 %.1f, q4_0 %.1f)", kv_bytes_of(t->m, QT_F16, QT_F16, (double)c->ctx) / GIB,
        kv_bytes_of(t->m, QT_Q8_0, QT_Q8_0, (double)c->ctx) / GIB, kv_bytes_of(t->m, QT_Q4_0, QT_Q4_0, (double)c->ctx) / GIB);
    if (out->ctx_in_vram < 0)
        say(f, "; beside weights, scratch and runtime there is no room for KV in VRAM");
    else
        say(f, "; beside weights, scratch and runtime VRAM holds %s tokens", count(out->ctx_in_vram));
    if (t->m->n_ctx_train && c->ctx > t->m->n_ctx_train) {
        if (f->verdict == CLAIM_POSSIBLE) f->verdict = CLAIM_ONLY_IF;
        say(f, "; only if it was extended: trained for %s", count(t->m->n_ctx_train));
    }
}

/* --- decode ----------------------------------------------------------------------------------------------------------------------- */

static void say_share(struct claim_figure *f, double claimed, double ceiling, const struct claim_rates *r) {
    double share = claimed / ceiling;
    if (share > 1) {
        f->verdict = CLAIM_IMPOSSIBLE;
    } else if (share > DECODE_SHARE) {
        f->verdict = CLAIM_ONLY_IF;
        say(f, "; only at %.0f %% of %s bandwidth, engines reach %.0f-%.0f %% (%s-%s t/s)", share * 100, machine_origin_name(r->gpu),
            DECODE_SHARE_LOW * 100, DECODE_SHARE * 100, speed(ceiling * DECODE_SHARE_LOW), speed(ceiling * DECODE_SHARE));
    } else {
        say(f, "; that is %.0f %%, engines reach %.0f-%.0f %%", share * 100, DECODE_SHARE_LOW * 100, DECODE_SHARE * 100);
    }
}

static void judge_outside(struct claim_figure *f, const struct claim_decode *d, const struct terms *t) {
    double claimed = t->c->decode_ts;
    const struct claim_rates *r = t->r;
    say(f, "; at least %.1f GB of it lie outside VRAM: ", d->outside_bytes / GB);
    if (r->dram_gbps > 0)
        say(f, "at most %s t/s by DRAM (%g GB/s)", speed(d->dram_ts), r->dram_gbps);
    else
        say(f, "the bound by DRAM needs --dram-gbps");
    if (r->link_gbps > 0) say(f, ", %s over the link alone (%g GB/s)", speed(d->link_ts), r->link_gbps);
    if (r->dram_gbps > 0 && r->link_gbps > 0)
        say(f, "; with %.1f GB kept for runtime, scratch and headroom %s and %s", (d->kept_bytes - d->outside_bytes) / GB,
            speed(d->kept_dram_ts), speed(d->kept_link_ts));
    if (claimed > d->ceiling_ts)
        f->verdict = CLAIM_IMPOSSIBLE;
    else
        f->verdict = CLAIM_ONLY_IF;
    if (f->verdict == CLAIM_ONLY_IF && r->dram_gbps > 0)
        say(f, "; only if %.0f %% of that is reached%s", claimed / d->ceiling_ts * 100,
            r->link_gbps > 0 && claimed > d->link_ts ? " and the CPU works on what lies in host memory" : "");
}

static void judge_decode(struct claim_report *out, const struct terms *t, const char *name, const struct claim_decode *d) {
    const struct claim_rates *r = t->r;
    double claimed = t->c->decode_ts;
    bool by_host = d->outside_bytes > 0 && d->ceiling_ts < d->vram_ts;
    struct claim_figure *f = add(out, name, claimed, d->ceiling_ts, "tokens/s", d->depth, by_host ? r->host : r->gpu);
    say(f, "exact attention reads %.2f GB per token (weights %.2f, KV %.2f%s)", d->read_bytes / GB, t->m->read_bytes / GB, d->kv_bytes / GB,
        t->m->state_bytes > 0 ? ", state" : "");
    if (d->outside_bytes > 0) {
        judge_outside(f, d, t);
    } else {
        say(f, " at %g GB/s: at most %s t/s", r->vram_gbps, speed(d->ceiling_ts));
        say_share(f, claimed, d->ceiling_ts, r);
    }
    if (f->verdict != CLAIM_IMPOSSIBLE || !t->c->attended || t->c->attended >= d->depth) return;
    if (decode_at(t->c, t->m, r, d->depth, t->c->attended).ceiling_ts < claimed) return;
    f->verdict = CLAIM_ONLY_IF;
    say(f, "; only if no more than %s tokens are attended: not comparable", count(t->c->attended));
}

/* A sparse method reads a part of the context: what it claims says nothing about exact attention. */
static void judge_attended(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    if (!c->attended) return;
    int64_t depth = out->at_depth.depth;
    struct claim_figure *f = add(out, "attended", (double)c->attended, (double)depth, "tokens", depth, t->r->gpu);
    f->verdict = CLAIM_ONLY_IF;
    if (!depth || c->attended >= depth) {
        f->verdict = CLAIM_POSSIBLE;
        say(f, "all of the context is read: exact attention");
        return;
    }
    say(f, "%s of %s tokens: not comparable with exact attention, which must read %.1f GB per token here, at most %s t/s",
        count(c->attended), count(depth), out->at_depth.read_bytes / GB, speed(out->at_depth.ceiling_ts));
    if (!(c->decode_ts > 0)) return;
    struct claim_decode d = decode_at(c, t->m, t->r, depth, c->attended);
    if (c->decode_ts > d.ceiling_ts) f->verdict = CLAIM_IMPOSSIBLE;
    say(f, "; what it does read is %.1f GB, at most %s t/s: %s t/s is %s", d.read_bytes / GB, speed(d.ceiling_ts), speed(c->decode_ts),
        c->decode_ts > d.ceiling_ts ? "impossible even so" : "possible only so");
}

static void judge_decodes(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    int64_t depth = c->depth >= 0 ? c->depth : c->ctx;
    out->at_0 = claim_decode_at(c, t->m, t->r, 0);
    out->at_depth = claim_decode_at(c, t->m, t->r, depth);
    if (c->decode_ts > 0 && depth > 0) judge_decode(out, t, "decode_depth_0", &out->at_0);
    if (c->decode_ts > 0) judge_decode(out, t, "decode", &out->at_depth);
    judge_attended(out, t);
}

/* --- prefill ---------------------------------------------------------------------------------------------------------------------- */

static void judge_prefill(struct claim_report *out, const struct terms *t, const char *name, int64_t prompt) {
    const struct claim_model *m = t->m;
    const struct claim_rates *r = t->r;
    double claimed = t->c->prefill_ts, ceiling = claim_prefill_ts(m, r, prompt), share = claimed / ceiling;
    double least = r->peak_tflops * 1e12 / prefill_flops(m, m->active_params - m->lazy_params, (double)prompt);
    struct claim_figure *f = add(out, name, claimed, ceiling, "tokens/s", prompt, r->gpu);
    if (prompt) say(f, "averaged over %s tokens: ", count(prompt));
    say(f, "needs %.0f of %g TFLOP/s (%.0f %% of the peak), at most %s t/s", claimed * prefill_flops(m, m->active_params, (double)prompt) / 1e12,
        r->peak_tflops, share * 100, speed(ceiling));
    /* Weights cross VRAM's (or the link's) wires once per pass, whatever its length. */
    double pass = r->vram_gbps > 0 ? ceil(claimed * m->read_bytes / (r->vram_gbps * GB)) : 0;
    double outside = claim_decode_at(t->c, m, r, prompt).outside_bytes;
    double streamed = r->link_gbps > 0 && outside > 0 ? ceil(claimed * outside / (r->link_gbps * GB)) : 0;
    if (claimed > least) {
        f->verdict = CLAIM_IMPOSSIBLE;
        return;
    }
    f->verdict = share > PREFILL_SHARE || streamed > 0 ? CLAIM_ONLY_IF : CLAIM_POSSIBLE;
    if (share > 1)
        say(f, "; only if neither embedding nor output matrix is computed for the prompt");
    else if (share > PREFILL_SHARE)
        say(f, "; only with long batches (512 tokens and more per pass)");
    else if (pass > 1)
        say(f, "; passes of at least %s tokens", count((int64_t)pass));
    if (streamed > 0)
        say(f, "; %.1f GB outside VRAM cross the link once per pass: only in passes of at least %s tokens", outside / GB, count((int64_t)streamed));
}

static void judge_prefills(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    int64_t prompt = c->prompt ? c->prompt : c->ctx;
    if (!(c->prefill_ts > 0)) return;
    if (prompt) judge_prefill(out, t, "prefill_short", 0);
    judge_prefill(out, t, "prefill", prompt);
}

/* --- together --------------------------------------------------------------------------------------------------------------------- */

/* Does a figure hold at once with the whole context? Those taken at a stated smaller depth only claim that depth. */
static void judge_together(struct claim_report *out, const struct terms *t) {
    const struct claim *c = t->c;
    int n = (c->ctx > 0) + (c->decode_ts > 0) + (c->prefill_ts > 0);
    if (n < 2) return;
    enum claim_verdict worst = CLAIM_POSSIBLE;
    for (int i = 0; i < out->n_figure; i++)
        if (out->figures[i].verdict > worst) worst = out->figures[i].verdict;
    const int64_t most = INT64_C(1) << 40;
    int64_t decode = c->decode_ts > 0 ? last_that_holds(decode_holds, t, most) : most;
    int64_t prefill = c->prefill_ts > 0 ? last_that_holds(prefill_holds, t, most) : most;
    int64_t both = decode < prefill ? decode : prefill, want = c->ctx ? c->ctx : out->n_tok;
    struct claim_figure *f = add(out, "together", (double)want, (double)(both < 0 ? 0 : both < want ? both : want), "tokens", want, t->r->gpu);
    f->verdict = worst;
    if (both >= want) {
        say(f, worst == CLAIM_POSSIBLE ? "the figures do not exclude each other"
                                       : "the figures do not exclude each other beyond what is said of each");
        return;
    }
    /* "60 t/s at depth 4K, 256K of context" are two moments of a run; without a depth it is one headline. */
    bool moments = (decode >= want || c->depth >= 0) && (prefill >= want || c->prompt > 0) && worst < CLAIM_IMPOSSIBLE;
    f->verdict = moments ? CLAIM_ONLY_IF : CLAIM_IMPOSSIBLE;
    say(f, "%s", moments ? "only if not at the same moment" : "exclude each other");
    if (decode < 0)
        say(f, "; %s t/s decode is out of reach at any depth", speed(c->decode_ts));
    else if (decode < want)
        say(f, "; %s t/s decode needs all weights in VRAM and holds up to %s tokens of KV (%.2f GB) at most", speed(c->decode_ts), count(decode),
            claim_kv_bytes(t->m, c, decode) / GB);
    if (prefill < 0)
        say(f, "; %s t/s prefill is out of reach at any length", speed(c->prefill_ts));
    else if (prefill < want)
        say(f, "; %s t/s prefill as an average holds up to %s tokens", speed(c->prefill_ts), count(prefill));
    double outside = claim_decode_at(c, t->m, t->r, want).outside_bytes;
    if (outside > 0) say(f, "; %s tokens put at least %.1f GB outside VRAM", count(want), outside / GB);
}

/* --- the whole -------------------------------------------------------------------------------------------------------------------- */

static void ask(struct claim_report *out, bool open, const char *question) {
    if (open) out->questions[out->n_question++] = question;
}

static void list_questions(struct claim_report *out, const struct claim *c, const struct claim_model *m) {
    ask(out, true, "prefill or decode: is each speed of one phase alone?");
    ask(out, !c->prompt, "prompt length: prefill averaged over how many tokens?");
    ask(out, true, "batch: tokens per pass, one sequence or the sum of several?");
    ask(out, !c->all_vram, "weights: all in VRAM, or some on the host?");
    ask(out, true, "engine and kernels: which version?");
    ask(out, c->depth < 0, "depth: how many tokens were in the context during decode?");
    ask(out, !c->attended, "attention: exact or sparse, how many tokens were attended?");
    ask(out, true, "speculation: on or off, which acceptance rate?");
    ask(out, m->n_ctx_train && c->ctx > m->n_ctx_train, "context beyond the trained one: extended how?");
}

static int check_rates(const struct claim *c, const struct claim_rates *r) {
    if (!(c->ctx > 0 || c->decode_ts > 0 || c->prefill_ts > 0 || c->attended > 0 || c->all_vram))
        return err_set(ERR_ARG, "nothing is claimed: give --claim-ctx, --claim-decode, --claim-prefill or --claim-all-vram");
    if (!(r->vram_bytes > 0)) return err_set(ERR_ARG, "the size of VRAM is not known: give --gpu, --machine or --vram-bytes");
    if ((c->decode_ts > 0 || c->attended > 0) && !(r->vram_gbps > 0))
        return err_set(ERR_ARG, "--claim-decode and --claim-attended: the bandwidth of VRAM is not known: give --gpu, --machine or --vram-gbps");
    if (c->prefill_ts > 0 && !(r->peak_tflops > 0))
        return err_set(ERR_ARG, "--claim-prefill: the GPU's peak is not known: give --gpu, --machine or --tflops");
    return 0;
}

int claim_examine(struct claim_report *out, const struct claim *c, const struct claim_model *m, const struct claim_rates *r) {
    struct terms t = {c, m, r};
    int rc = check_rates(c, r);
    if (rc) return rc;
    *out = (struct claim_report){.n_figure = 0};
    measure_memory(out, &t);
    judge_memory(out, &t);
    judge_context(out, &t);
    judge_decodes(out, &t);
    judge_prefills(out, &t);
    judge_together(out, &t);
    list_questions(out, c, m);
    return 0;
}
