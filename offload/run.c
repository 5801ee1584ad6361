/* run.c: the pass. See run.h; memory and phases are in run_open.c.
 *
 * Order on the device is that of one compute stream; the host waits only where the CPU takes over (event `handed`, recorded
 * behind the copy), and at the end of a pass. That also keeps the host's buffers safe: the CPU writes to one that a copy
 * reads only after it has waited for a later point of the same stream. */
#include "core/clock.h"
#include "core/err.h"
#include "cpu/pool.h"
#include "offload/run_impl.h"

#include <stdio.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

static struct side *side(struct run *r, bool gpu) { return gpu ? &r->gpu : &r->cpu; }
static bool on_gpu(const struct run *r, const struct part *p) { return run_place(r, p) != PLAN_CPU; }
static int at_most(int a, int b) { return a < b ? a : b; }

/* A sum with a NaN or an infinity in it is not finite; a finite f32 sum of x*0 is 0. */
static bool finite_row(const float *x, int64_t n) {
    float s = 0;
    for (int64_t i = 0; i < n; i++) s += x[i] * 0.0f;
    return s == 0;
}

/* --- hand-over ----------------------------------------------------------------------------------------------------------- */

/* What was copied to the host so far is there. */
static int wait_host(struct run *r) {
    TRY(gpu_event_record(r->handed, r->stream));
    return gpu_event_sync(r->handed);
}

/* Rows t0 .. t0 + n of the hidden states go to a side. */
static int carry_rows(struct run *r, bool to_gpu, int t0, int n) {
    size_t at = (size_t)t0 * (size_t)r->m->dim, bytes = (size_t)n * (size_t)r->m->dim * sizeof(float);
    if (to_gpu) return gpu_copy_in(r->stream, r->gpu.x + at, r->cpu.x + at, bytes);
    TRY(gpu_copy_out(r->stream, r->cpu.x + at, r->gpu.x + at, bytes));
    return wait_host(r);
}

static int place(struct run *r, bool gpu, int n) {
    if (r->x_on_gpu == gpu) return 0;
    TRY(carry_rows(r, gpu, 0, n));
    r->x_on_gpu = gpu;
    return 0;
}

/* --- weights ------------------------------------------------------------------------------------------------------------- */

/* Where part i lies for the side that works with it: its home, or its slot, for which the stream then waits. */
static int reach(struct run *r, int i, const void **base) {
    int load = r->load_of ? r->load_of[i] : -1;
    if (load < 0) {
        *base = on_gpu(r, &r->parts->v[i]) ? home_device(r->o.home, i) : home_host(r->o.home, i);
        return 0;
    }
    for (; r->got <= load; r->got++) TRY(pipe_get(r->pipe, r->got, &r->load_at[r->got]));
    *base = (const char *)r->load_at[load] + r->in_load[i];
    return 0;
}

/* The same for a part whose tensors the decoder finds in its table. */
static int bind(struct run *r, int i) {
    const void *base;
    if (!r->load_of || r->load_of[i] < 0) return 0; /* its addresses do not change */
    TRY(reach(r, i, &base));
    part_bind(&r->w, &r->parts->v[i], base);
    return 0;
}

static int release(struct run *r, const struct unit_loads *u) {
    for (int l = u->first; l < u->first + u->n; l++) TRY(pipe_done(r->pipe, l));
    return 0;
}

/* --- units --------------------------------------------------------------------------------------------------------------- */

/* What the CPU has read and computed for a part, for simulated clocks: of experts those that n tokens are likely to choose. */
static void worked(const struct run *r, const struct part *p, int n) {
    if (!r->has_gpu || !clock_simulated()) return;
    double bytes = (double)p->bytes, weights = 0, touched = 1;
    for (int i = 0; i < p->n_tensor; i++)
        if (!p->tensors[i].vector) weights += (double)p->tensors[i].rows * (double)p->tensors[i].cols * p->tensors[i].n_matrix;
    if (p->kind == PART_EXPERTS) touched = (double)r->m->n_expert_used / r->m->n_expert;
    if (p->kind == PART_MIXER && r->m->layers[p->il].n_kv) bytes += kv_bytes_per_token(r->cpu.kv, p->il) * (double)(r->cpu.kv->n + n);
    clock_work(bytes * (touched * n < 1 ? touched * n : 1), 2 * weights * touched * n);
}

static int mixer_unit(struct run *r, int il, int n) {
    int part = r->parts->layers[il].mixer, chunk = run_chunk(r);
    bool gpu = on_gpu(r, &r->parts->v[part]);
    struct side *s = side(r, gpu);
    TRY(place(r, gpu, n));
    TRY(bind(r, part));
    for (int t = 0; t < n; t += chunk) TRY(decoder_mixer(s->d, il, s->x + (int64_t)t * r->m->dim, t, at_most(chunk, n - t)));
    if (!gpu) worked(r, &r->parts->v[part], n);
    return r->mixer ? release(r, &r->mixer[il]) : 0;
}

/* The parts of a layer's FFN that a side has, for n tokens whose normed states are in its d->h: their sum in d->d.
 * *any: whether there are some. */
static int own_parts(struct run *r, int il, bool gpu, int n, bool *any) {
    const struct part_layer *l = &r->parts->layers[il];
    struct side *s = side(r, gpu);
    *any = false;
    for (int i = l->ffn; i < l->ffn + l->n_ffn; i++) {
        struct ffn_part f;
        const void *base;
        if (on_gpu(r, &r->parts->v[i]) != gpu) continue;
        TRY(reach(r, i, &base));
        part_ffn(&f, &r->parts->v[i], base);
        TRY(decoder_ffn_part(s->d, il, *any ? s->d->part : s->d->d, &f, n));
        if (!gpu) worked(r, &r->parts->v[i], n);
        if (*any) TRY(s->ops->add(s->ops, s->d->d, s->d->part, (int64_t)n * r->m->dim));
        *any = true;
    }
    return 0;
}

static bool has_parts(const struct run *r, int il, bool gpu) {
    const struct part_layer *l = &r->parts->layers[il];
    for (int i = l->ffn; i < l->ffn + l->n_ffn; i++)
        if (on_gpu(r, &r->parts->v[i]) == gpu) return true;
    return false;
}

/* Normed states, and which experts were chosen, go to the other side. */
static int carry_input(struct run *r, bool to_gpu, int il, int n) {
    const struct model *m = r->m;
    struct decoder *c = r->cpu.d, *g = r->gpu.d;
    size_t h = (size_t)n * (size_t)m->dim * sizeof(float), used = (size_t)n * (size_t)m->n_expert_used * sizeof(float);
    if (m->layers[il].ffn != FFN_EXPERTS) used = 0;
    if (to_gpu) {
        TRY(gpu_copy_in(r->stream, g->h, c->h, h));
        TRY(gpu_copy_in(r->stream, g->expert_ids, c->expert_ids, used));
        return gpu_copy_in(r->stream, g->expert_w, c->expert_w, used);
    }
    TRY(gpu_copy_out(r->stream, c->h, g->h, h));
    TRY(gpu_copy_out(r->stream, c->expert_ids, g->expert_ids, used));
    return gpu_copy_out(r->stream, c->expert_w, g->expert_w, used);
}

/* The FFN's sum on the GPU: its own parts run while the CPU computes its. The order of the summands is fixed: VRAM, streamed,
 * CPU. */
static int sum_on_gpu(struct run *r, int il, int n) {
    struct decoder *c = r->cpu.d, *g = r->gpu.d;
    bool mine, others, both = has_parts(r, il, false);
    size_t bytes = (size_t)n * (size_t)r->m->dim * sizeof(float);
    if (both) {
        TRY(carry_input(r, false, il, n));
        TRY(gpu_event_record(r->handed, r->stream));
    }
    TRY(own_parts(r, il, true, n, &mine));
    if (!both) return 0;
    TRY(gpu_event_sync(r->handed));
    TRY(own_parts(r, il, false, n, &others));
    TRY(gpu_copy_in(r->stream, mine ? g->part : g->d, c->d, bytes));
    return mine ? r->gpu.ops->add(r->gpu.ops, g->d, g->part, (int64_t)n * r->m->dim) : 0;
}

/* The same where the norms are on the CPU: CPU, then streamed. */
static int sum_on_cpu(struct run *r, int il, int n) {
    struct decoder *c = r->cpu.d, *g = r->gpu.d;
    bool mine, others, both = has_parts(r, il, true);
    size_t bytes = (size_t)n * (size_t)r->m->dim * sizeof(float);
    bool first = has_parts(r, il, false);
    if (both) {
        TRY(carry_input(r, true, il, n));
        TRY(own_parts(r, il, true, n, &others));
        TRY(gpu_copy_out(r->stream, first ? r->gpu_sum : c->d, g->d, bytes));
        TRY(gpu_event_record(r->handed, r->stream));
    }
    TRY(own_parts(r, il, false, n, &mine));
    if (!both) return 0;
    TRY(gpu_event_sync(r->handed));
    return mine ? r->cpu.ops->add(r->cpu.ops, c->d, r->gpu_sum, (int64_t)n * r->m->dim) : 0;
}

static int ffn_unit(struct run *r, int il, int n) {
    int rest = r->parts->layers[il].rest, chunk = run_chunk(r);
    bool gpu = on_gpu(r, &r->parts->v[rest]);
    struct side *s = side(r, gpu);
    TRY(place(r, gpu, n));
    TRY(bind(r, rest));
    for (int t = 0; t < n; t += chunk) {
        int now = at_most(chunk, n - t);
        float *x = s->x + (int64_t)t * r->m->dim;
        TRY(decoder_ffn_in(s->d, il, x, now));
        TRY(gpu ? sum_on_gpu(r, il, now) : sum_on_cpu(r, il, now));
        TRY(decoder_ffn_out(s->d, il, x, now));
    }
    return r->ffn ? release(r, &r->ffn[il]) : 0;
}

/* --- passes -------------------------------------------------------------------------------------------------------------- */

static int begin(struct run *r, const int32_t *ids, int n, const struct run_want *want) {
    bool gpu = r->has_gpu && r->parts->embed_place[r->phase] == PLAN_VRAM;
    int64_t pos0 = r->cpu.kv->n;
    if (n <= r->cpu_pass) TRY(decoder_begin(r->cpu.d, pos0, n)); /* longer: no part of this phase is the CPU's */
    if (r->has_gpu) TRY(decoder_begin(r->gpu.d, pos0, n));
    if (r->store) TRY(kv_store_begin(r->store, pos0, n));
    r->got = 0;
    if (r->pipe) TRY(pipe_begin(r->pipe, want->head ? PIPE_ALL : PIPE_NO_TAIL));
    r->x_on_gpu = gpu;
    return decoder_embed(side(r, gpu)->d, side(r, gpu)->x, ids, n);
}

static int check_state(const struct run *r, int il, const float *x, int64_t pos) {
    if (finite_row(x, r->m->dim)) return 0;
    return err_set(ERR_NUMERIC, "layer %d: the hidden state of position %lld is not finite", il, (long long)pos);
}

static int layers(struct run *r, int n, const struct run_want *want) {
    const struct model *m = r->m;
    int64_t last = (int64_t)(n - 1) * m->dim;
    for (int il = 0; il < m->n_layer; il++) {
        if (want->stop && *want->stop && (il == 0 || !want->whole)) return err_set(ERR_INTERRUPTED, "interrupted");
        TRY(mixer_unit(r, il, n));
        TRY(ffn_unit(r, il, n));
        if (!r->x_on_gpu) TRY(check_state(r, il, r->cpu.x + last, r->cpu.kv->n + n - 1));
    }
    if (!r->has_gpu) return 0;
    if (r->x_on_gpu) TRY(carry_rows(r, false, n - 1, 1));
    TRY(gpu_ops_check(r->ops)); /* waits for the stream: the pass is over on the device as well */
    return check_state(r, m->n_layer - 1, r->cpu.x + last, r->cpu.kv->n + n - 1);
}

/* A pass that ended early: nothing of it may run on when the host goes on with its buffers. */
static int stopped(struct run *r, int rc) {
    if (rc && r->has_gpu && rc != ERR_DEVICE) {
        char text[1024];
        snprintf(text, sizeof text, "%s", err_text());
        gpu_stream_sync(r->stream);
        return err_set(rc, "%s", text);
    }
    return rc;
}

int run_pass(struct run *r, const int32_t *ids, int n, const struct run_want *want) {
    if (n < 1 || n > run_pass_tokens(r)) return err_set(ERR_ARG, "a pass of %d tokens: the plan has 1..%d", n, run_pass_tokens(r));
    int rc = begin(r, ids, n, want);
    if (!rc) rc = layers(r, n, want);
    if (!rc && run_follows(r)) rc = decoder_follow(r->cpu.d, r->cpu.x, ids, r->cpu.kv->n, n);
    return stopped(r, rc);
}

/* Rows t .. t + n of logits in the host's memory. */
static int head_rows(struct run *r, bool gpu, int t, int n) {
    struct side *s = side(r, gpu);
    TRY(decoder_head(s->d, s->logits, s->x + (int64_t)t * r->m->dim, n));
    if (!gpu) worked(r, &r->parts->v[r->parts->head], n);
    if (!gpu) return 0;
    TRY(gpu_copy_out(r->stream, r->cpu.logits, s->logits, (size_t)n * (size_t)r->m->n_vocab * sizeof(float)));
    return wait_host(r);
}

static int head(struct run *r, int first, int n, int64_t pos0, run_emit emit, void *arg) {
    const struct model *m = r->m;
    bool gpu = on_gpu(r, &r->parts->v[r->parts->head]);
    int rows = at_most(r->plan.logits_rows, gpu ? run_chunk(r) : r->cpu_chunk);
    if (r->x_on_gpu != gpu) TRY(carry_rows(r, gpu, first, n - first)); /* the others stay where they are */
    TRY(bind(r, r->parts->head));
    for (int t = first; t < n; t += rows) {
        int now = at_most(rows, n - t);
        TRY(head_rows(r, gpu, t, now));
        for (int i = 0; i < now; i++) {
            r->last = r->cpu.logits + (int64_t)i * m->n_vocab;
            if (!finite_row(r->last, m->n_vocab))
                return err_set(ERR_NUMERIC, "the logits of position %lld are not finite", (long long)(pos0 + t + i));
            if (emit) TRY(emit(arg, pos0 + t + i, r->last));
        }
    }
    return r->pipe ? release(r, &r->head) : 0;
}

int run_head(struct run *r, int first, int n, int64_t pos0, run_emit emit, void *arg) {
    return stopped(r, head(r, first, n, pos0, emit, arg));
}

int run_draft(struct run *r, const float **logits, int32_t id, int k) {
    if (!run_follows(r)) return err_set(ERR_UNSUPPORTED, "drafting with the model's prediction block runs without a GPU only; -dev none");
    TRY(decoder_draft(r->cpu.d, id, r->cpu.kv->n, k));
    *logits = r->cpu.d->draft;
    if (finite_row(*logits, r->m->n_vocab)) return 0;
    return err_set(ERR_NUMERIC, "the drafted logits of position %lld are not finite", (long long)r->cpu.kv->n + k + 1);
}

const float *run_logits(const struct run *r) { return r->last; }
struct kv *run_kv(struct run *r) { return r->cpu.kv; }
bool run_has_state(const struct run *r) { return r->cpu.state || r->gpu.state; }
void run_rest(struct run *r) { pool_rest(cpu_pool(r->cpu_end)); }
