/* home.c: lays out the host arena and loads it: each task reads a run of rows and packs it into strips. */
#include "offload/home.h"

#include "core/err.h"
#include "core/gguf.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"
#include "core/unit.h"
#include "cpu/pool.h"
#include "offload/clock.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { READ_BYTES = 1 << 20 }; /* of a task: long enough for the disk, short enough to share out evenly */

/* One tensor and its place. */
struct piece {
    const struct tensor *t;
    bool vector;
    char *at;
    struct strip_layout strips; /* of one matrix of the stack */
    int strips_per_task;
    int tasks_per_matrix;
    int first_task;
};

struct home {
    const struct model *model;
    char *arena;
    size_t bytes;
    struct piece *pieces;
    int n_piece, n_task;
    struct weights weights;
};

/* Every tensor of the model in home order, with the pointer that shall point to it. */
typedef void (*visit_fn)(void *arg, const struct tensor *t, bool vector, const void **address);

static void visit_all(const struct model *m, struct weights *w, visit_fn visit, void *arg) {
    const void *none;
    visit(arg, &m->embd, false, w ? &w->embd : &none);
    visit(arg, &m->out_norm, true, w ? (const void **)&w->out_norm : &none);
    visit(arg, &m->out, false, w ? &w->out : &none);
    visit(arg, &m->out_bias, true, w ? (const void **)&w->out_bias : &none);
    for (int il = 0; il < m->n_block; il++)
        for (int t = 0; t < LT_COUNT; t++)
            visit(arg, &m->layers[il].t[t], layer_tensor_is_vector(t), w ? &w->layers[il].at[t] : &none);
}

static void add_bytes(void *arg, const struct tensor *t, bool vector, const void **address) {
    (void)address;
    size_t *sum = arg;
    if (*sum == SIZE_MAX) return;
    size_t bytes = tensor_home_bytes(t, vector);
    if (bytes == SIZE_MAX || !size_add(sum, *sum, bytes)) *sum = SIZE_MAX;
}

size_t home_bytes(const struct model *m) {
    size_t sum = 0;
    visit_all(m, NULL, add_bytes, &sum);
    return sum;
}

static void plan_tasks(struct home *h, struct piece *p) {
    p->first_task = h->n_task;
    if (p->vector) {
        p->tasks_per_matrix = 1;
        h->n_task++;
        return;
    }
    size_t strip_src = p->t->bytes / (size_t)p->t->stack / (size_t)p->t->rows * STRIP_ROWS;
    int64_t per = strip_src ? READ_BYTES / (int64_t)strip_src : 1;
    p->strips_per_task = per < 1 ? 1 : per > p->strips.n_strip ? (int)p->strips.n_strip : (int)per;
    p->tasks_per_matrix = (int)((p->strips.n_strip + p->strips_per_task - 1) / p->strips_per_task);
    h->n_task += p->tasks_per_matrix * (int)p->t->stack;
}

static void place(void *arg, const struct tensor *t, bool vector, const void **address) {
    struct home *h = arg;
    *address = NULL;
    if (!t->bytes) return;
    struct piece *p = &h->pieces[h->n_piece++];
    *p = (struct piece){.t = t, .vector = vector, .at = h->arena + h->bytes};
    if (!vector) strip_layout(&p->strips, t->type, t->rows, t->cols);
    plan_tasks(h, p);
    h->bytes += tensor_home_bytes(t, vector);
    *address = p->at;
}

int home_open(struct home **out, const struct model *m) {
    size_t bytes = home_bytes(m);
    if (bytes == SIZE_MAX) return err_set(ERR_FORMAT, "the sizes of this model's tensors overflow 64 bits");
    struct home *h = calloc(1, sizeof *h);
    if (!h) return err_set(ERR_NOMEM, "home: out of memory");
    h->model = m;
    h->pieces = calloc((size_t)m->n_block * LT_COUNT + 4, sizeof *h->pieces);
    h->weights.layers = calloc((size_t)m->n_block, sizeof *h->weights.layers);
    if (!h->pieces || !h->weights.layers) {
        home_close(h);
        return err_set(ERR_NOMEM, "home: out of memory");
    }
    h->arena = mem_alloc(bytes, 64, "weights");
    if (!h->arena) {
        home_close(h);
        return ERR_NOMEM;
    }
    visit_all(m, &h->weights, place, h);
    if (!m->out.bytes) h->weights.out = h->weights.embd;
    *out = h;
    return 0;
}

void home_close(struct home *h) {
    if (!h) return;
    mem_free(h->arena);
    free(h->weights.layers);
    free(h->pieces);
    free(h);
}

const struct weights *home_weights(const struct home *h) { return &h->weights; }

static int read_vector(const struct gguf *g, const struct tensor *t, float *dst, char *buf) {
    int rc = gguf_read(g, t->shard, t->offset, buf, t->bytes);
    if (!rc) quant_decode_row(t->type, buf, dst, t->rows * t->cols);
    return rc;
}

int home_read_vector(const struct gguf *g, const struct tensor *t, float *dst) {
    char *buf = malloc(t->bytes);
    if (!buf) return err_set(ERR_NOMEM, "home: out of memory");
    int rc = read_vector(g, t, dst, buf);
    free(buf);
    return rc;
}

struct load_job {
    const struct home *h;
    const struct gguf *g;
    char *bufs; /* one of buf_bytes per worker */
    size_t buf_bytes;
    progress_fn progress;
    void *progress_arg;
    double shown_at;
    const volatile sig_atomic_t *stop;
    atomic_size_t done;
    atomic_int rc;       /* first failure */
    char text[1024];     /* its sentence: err_text is per thread. Written by whoever set rc */
};

static void fail(struct load_job *j, int rc) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&j->rc, &none, rc)) return;
    strncpy(j->text, err_text(), sizeof j->text - 1);
}

static const struct piece *piece_of(const struct home *h, int task) {
    int lo = 0, hi = h->n_piece - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (h->pieces[mid].first_task <= task)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &h->pieces[lo];
}

/* Rows row0 .. row0 + rows of a matrix that begins at `offset`. */
static int read_rows(const struct gguf *g, const struct tensor *t, uint64_t offset, int64_t row0, int64_t rows, size_t row_bytes,
                     char *buf) {
    int64_t group = t->group ? t->group : t->rows;
    int rc = 0;
    for (int64_t r = row0, n; r < row0 + rows && !rc; r += n, buf += (size_t)n * row_bytes) {
        int64_t within = r % group;
        n = group - within < row0 + rows - r ? group - within : row0 + rows - r;
        rc = gguf_read(g, t->shard, offset + (uint64_t)(r / group) * t->group_stride + (uint64_t)within * row_bytes, buf,
                       (size_t)n * row_bytes);
    }
    return rc;
}

static int load_strips(struct load_job *j, const struct piece *p, int task, char *buf, size_t *bytes) {
    int matrix = (task - p->first_task) / p->tasks_per_matrix, run = (task - p->first_task) % p->tasks_per_matrix;
    const struct tensor *t = p->t;
    size_t row_bytes = t->bytes / (size_t)t->stack / (size_t)t->rows;
    int64_t strip0 = (int64_t)run * p->strips_per_task, row0 = strip0 * STRIP_ROWS;
    int64_t rows = (int64_t)p->strips_per_task * STRIP_ROWS;
    if (rows > t->rows - row0) rows = t->rows - row0;
    *bytes = (size_t)rows * row_bytes;
    int rc = read_rows(j->g, t, t->offset + (uint64_t)matrix * t->stride, row0, rows, row_bytes, buf);
    if (rc) return rc;
    char *dst = p->at + (size_t)matrix * p->strips.bytes + (size_t)strip0 * p->strips.strip_bytes;
    for (int64_t r = 0; r < rows; r += STRIP_ROWS) {
        strip_pack(&p->strips, t->type, dst, buf + (size_t)r * row_bytes, t->cols, rows - r < STRIP_ROWS ? (int)(rows - r) : STRIP_ROWS);
        dst += p->strips.strip_bytes;
    }
    return 0;
}

static void load_task(void *arg, int task, int worker) {
    struct load_job *j = arg;
    if (atomic_load(&j->rc)) return;
    if (j->stop && *j->stop) {
        fail(j, err_set(ERR_INTERRUPTED, "interrupted while loading weights"));
        return;
    }
    const struct piece *p = piece_of(j->h, task);
    char *buf = j->bufs + (size_t)worker * j->buf_bytes;
    size_t bytes = p->t->bytes;
    int rc = p->vector ? read_vector(j->g, p->t, (float *)p->at, buf) : load_strips(j, p, task, buf, &bytes);
    if (rc) {
        fail(j, rc);
        return;
    }
    size_t done = atomic_fetch_add(&j->done, bytes) + bytes;
    if (worker == 0 && j->progress && clock_s() - j->shown_at > 0.1) {
        j->shown_at = clock_s();
        j->progress(j->progress_arg, (double)done, (double)j->h->model->file_bytes);
    }
}

int home_load(struct home *h, const struct gguf *g, struct pool *pool, progress_fn progress, void *arg,
              const volatile sig_atomic_t *stop) {
    struct load_job j = {.h = h, .g = g, .progress = progress, .progress_arg = arg, .stop = stop, .shown_at = clock_s()};
    j.buf_bytes = READ_BYTES;
    for (int i = 0; i < h->n_piece; i++) {
        const struct tensor *t = h->pieces[i].t;
        size_t need = h->pieces[i].vector ? t->bytes : t->bytes / (size_t)t->stack / (size_t)t->rows * STRIP_ROWS;
        if (need > j.buf_bytes) j.buf_bytes = need;
    }
    j.buf_bytes = align_up(j.buf_bytes, 4096);
    j.bufs = mem_alloc(size_mul3(j.buf_bytes, (size_t)pool_threads(pool), 1), 4096, "read buffers");
    if (!j.bufs) return ERR_NOMEM;
    int rc = gguf_begin(g);
    if (!rc) pool_run(pool, load_task, &j, h->n_task);
    mem_free(j.bufs);
    if (rc) return rc;
    if (j.rc) return err_set(j.rc, "%s", j.text);
    if (progress) progress(arg, (double)h->model->file_bytes, (double)h->model->file_bytes);
    return 0;
}
