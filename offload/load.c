/* load.c: fills homes from the file. Each task reads a run of rows and packs it into strips: straight into host memory, or
 * into a page-locked window that is copied to VRAM while the next one is filled. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"
#include "cpu/pool.h"
#include "gpu/gpu.h"
#include "offload/clock.h"
#include "offload/home_impl.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { READ_BYTES = 1 << 20 }; /* of a task: long enough for the disk, short enough to share out evenly */

/* What a part holds of one tensor, and where it goes. */
struct piece {
    const struct part_tensor *t;
    char *at;                   /* host, or NULL */
    char *d_at;                 /* VRAM, or NULL */
    struct strip_layout strips; /* of one matrix of the stack */
    int strips_per_task;
    int tasks_per_matrix;
    int first_task;
    size_t file_bytes;          /* read for it */
};

struct load_job {
    const struct gguf *g;
    struct piece *pieces;
    int n_piece, n_task;
    size_t most_read;    /* largest buffer that a task needs */
    double total;
    /* Of the run under way. */
    int task0;           /* tasks before it */
    char *window;        /* where tasks of VRAM put what they pack */
    const size_t *at;    /* [tasks of the window] offset of each in it */
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

/* --- reading ------------------------------------------------------------------------------------------------------------- */

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

static size_t row_bytes(const struct tensor *t) { return t->bytes / (size_t)t->stack / (size_t)t->rows; }

/* Rows row0 .. row0 + rows of a matrix that begins at `offset`. */
static int read_rows(const struct gguf *g, const struct tensor *t, uint64_t offset, int64_t row0, int64_t rows, char *buf) {
    size_t bytes = row_bytes(t);
    int64_t group = t->group ? t->group : t->rows;
    int rc = 0;
    for (int64_t r = row0, n; r < row0 + rows && !rc; r += n, buf += (size_t)n * bytes) {
        int64_t within = r % group;
        n = group - within < row0 + rows - r ? group - within : row0 + rows - r;
        rc = gguf_read(g, t->shard, offset + (uint64_t)(r / group) * t->group_stride + (uint64_t)within * bytes, buf, (size_t)n * bytes);
    }
    return rc;
}

/* Leaves the wanted columns of each row, side by side. Returns the bytes of a row then. */
static size_t keep_columns(const struct part_tensor *p, char *buf, int64_t rows) {
    const struct quant_info *q = quant_info(p->t->type);
    size_t all = row_bytes(p->t), from = (size_t)(p->col0 / q->block_elems) * (size_t)q->block_bytes,
           n = (size_t)(p->cols / q->block_elems) * (size_t)q->block_bytes;
    if (n != all)
        for (int64_t r = 0; r < rows; r++) memmove(buf + (size_t)r * n, buf + (size_t)r * all + from, n);
    return n;
}

/* --- tasks --------------------------------------------------------------------------------------------------------------- */

static const struct piece *piece_of(const struct load_job *j, int task) {
    int lo = 0, hi = j->n_piece - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (j->pieces[mid].first_task <= task)
            lo = mid;
        else
            hi = mid - 1;
    }
    return &j->pieces[lo];
}

/* Where the task's bytes lie in its piece, and how many they are. */
struct range {
    size_t at, bytes;
    int matrix;
    int64_t row0, rows;
};

static struct range range_of(const struct piece *p, int task) {
    if (p->t->vector) return (struct range){.bytes = p->t->bytes};
    int matrix = (task - p->first_task) / p->tasks_per_matrix, run = (task - p->first_task) % p->tasks_per_matrix;
    int64_t strip0 = (int64_t)run * p->strips_per_task, strips = p->strips.n_strip - strip0;
    if (strips > p->strips_per_task) strips = p->strips_per_task;
    struct range r = {.at = (size_t)matrix * p->strips.bytes + (size_t)strip0 * p->strips.strip_bytes,
                      .bytes = (size_t)strips * p->strips.strip_bytes, .matrix = matrix, .row0 = strip0 * STRIP_ROWS, .rows = strips * STRIP_ROWS};
    if (r.rows > p->t->rows - r.row0) r.rows = p->t->rows - r.row0;
    return r;
}

static int load_strips(struct load_job *j, const struct piece *p, const struct range *r, char *dst, char *buf, size_t *bytes) {
    const struct part_tensor *t = p->t;
    *bytes = (size_t)r->rows * row_bytes(t->t);
    int rc = read_rows(j->g, t->t, t->t->offset + (uint64_t)(t->matrix0 + r->matrix) * t->t->stride, t->row0 + r->row0, r->rows, buf);
    if (rc) return rc;
    size_t row = keep_columns(t, buf, r->rows);
    for (int64_t i = 0; i < r->rows; i += STRIP_ROWS) {
        int64_t n = r->rows - i < STRIP_ROWS ? r->rows - i : STRIP_ROWS;
        strip_pack(&p->strips, t->t->type, dst, buf + (size_t)i * row, t->cols, (int)n);
        dst += p->strips.strip_bytes;
    }
    return 0;
}

static void fail(struct load_job *j, int rc) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&j->rc, &none, rc)) return;
    strncpy(j->text, err_text(), sizeof j->text - 1);
}

static void load_task(void *arg, int index, int worker) {
    struct load_job *j = arg;
    if (atomic_load(&j->rc)) return;
    if (j->stop && *j->stop) {
        fail(j, err_set(ERR_INTERRUPTED, "interrupted while loading weights"));
        return;
    }
    int task = j->task0 + index;
    const struct piece *p = piece_of(j, task);
    struct range r = range_of(p, task);
    char *buf = j->bufs + (size_t)worker * j->buf_bytes, *dst = p->at ? p->at + r.at : j->window + j->at[index];
    size_t bytes = p->t->t->bytes;
    int rc = p->t->vector ? read_vector(j->g, p->t->t, (float *)(void *)dst, buf) : load_strips(j, p, &r, dst, buf, &bytes);
    if (rc) {
        fail(j, rc);
        return;
    }
    size_t done = atomic_fetch_add(&j->done, bytes) + bytes;
    if (worker == 0 && j->progress && clock_s() - j->shown_at > 0.1) {
        j->shown_at = clock_s();
        j->progress(j->progress_arg, (double)done, j->total);
    }
}

/* --- pieces -------------------------------------------------------------------------------------------------------------- */

static void add_piece(struct load_job *j, const struct part_tensor *t, char *at, char *d_at) {
    struct piece *p = &j->pieces[j->n_piece++];
    *p = (struct piece){.t = t, .at = at, .d_at = d_at, .first_task = j->n_task, .tasks_per_matrix = 1, .file_bytes = t->t->bytes};
    size_t read = t->t->bytes;
    if (!t->vector) {
        size_t strip_src = row_bytes(t->t) * STRIP_ROWS;
        strip_layout(&p->strips, t->t->type, t->rows, t->cols);
        int64_t per = strip_src ? READ_BYTES / (int64_t)strip_src : 1;
        p->strips_per_task = per < 1 ? 1 : per > p->strips.n_strip ? (int)p->strips.n_strip : (int)per;
        p->tasks_per_matrix = (int)((p->strips.n_strip + p->strips_per_task - 1) / p->strips_per_task);
        p->file_bytes = row_bytes(t->t) * (size_t)t->rows * (size_t)t->n_matrix;
        read = strip_src;
    }
    if (read > j->most_read) j->most_read = read;
    j->n_task += p->tasks_per_matrix * (t->vector ? 1 : t->n_matrix);
    j->total += (double)p->file_bytes;
}

/* First all that goes to host memory, then what goes to VRAM alone. Returns the tasks of the former. */
static int add_pieces(struct load_job *j, const struct home *h) {
    for (int i = 0; i < h->parts.n; i++)
        for (int t = 0; t < h->parts.v[i].n_tensor && h->at[i].host; t++)
            add_piece(j, &h->parts.v[i].tensors[t], h->at[i].host + h->parts.v[i].tensors[t].offset, NULL);
    int n = j->n_task;
    for (int i = 0; i < h->parts.n; i++)
        for (int t = 0; t < h->parts.v[i].n_tensor && h->at[i].d && !h->at[i].host; t++)
            add_piece(j, &h->parts.v[i].tensors[t], NULL, (char *)h->at[i].d + h->parts.v[i].tensors[t].offset);
    return n;
}

/* --- to VRAM ------------------------------------------------------------------------------------------------------------- */

enum { WINDOWS = 2 };

struct windows {
    size_t bytes; /* of each */
    void *p[WINDOWS];
    struct gpu_event *copied[WINDOWS];
    struct gpu_stream *stream;
    size_t *at;   /* [tasks of a window] */
    int most;     /* tasks of a window */
};

static int open_windows(struct windows *w, const struct load_job *j, struct gpu *g, int n_host) {
    size_t all = 0;
    for (int t = n_host; t < j->n_task; t++) {
        size_t one = range_of(piece_of(j, t), t).bytes;
        all += one;
        if (one > w->bytes) w->bytes = one;
    }
    if (w->bytes < HOME_BOUNCE_BYTES) w->bytes = all < HOME_BOUNCE_BYTES ? all : HOME_BOUNCE_BYTES;
    w->most = j->n_task - n_host;
    w->at = calloc((size_t)w->most, sizeof *w->at);
    int rc = w->at ? gpu_stream_open(&w->stream, g) : err_set(ERR_NOMEM, "home: out of memory");
    for (int i = 0; i < WINDOWS && !rc; i++) {
        rc = gpu_host_alloc(&w->p[i], g, w->bytes);
        if (!rc) rc = gpu_event_open(&w->copied[i], g, GPU_EVENT_ORDER);
    }
    return rc;
}

static void close_windows(struct windows *w, struct gpu *g) {
    if (w->stream) gpu_stream_sync(w->stream); /* copies may be under way after a failure */
    for (int i = 0; i < WINDOWS; i++) {
        gpu_event_close(w->copied[i]);
        gpu_host_free(g, w->p[i]);
    }
    gpu_stream_close(w->stream);
    free(w->at);
}

/* Copies what tasks task0 .. task0 + n have packed; those of a piece lie side by side in both places. */
static int copy_window(const struct load_job *j, const struct windows *w, const char *window, int task0, int n) {
    int rc = 0;
    for (int i = 0, k; i < n && !rc; i = k) {
        const struct piece *p = piece_of(j, task0 + i);
        size_t bytes = 0;
        for (k = i; k < n && piece_of(j, task0 + k) == p; k++) bytes += range_of(p, task0 + k).bytes;
        rc = gpu_copy_in(w->stream, p->d_at + range_of(p, task0 + i).at, window + w->at[i], bytes);
    }
    return rc;
}

static int load_vram(struct load_job *j, struct pool *pool, struct windows *w, int n_host) {
    int rc = 0, slot = 0;
    for (int task = n_host, n; task < j->n_task && !rc; task += n, slot = (slot + 1) % WINDOWS) {
        size_t used = 0;
        for (n = 0; task + n < j->n_task; n++) {
            size_t one = range_of(piece_of(j, task + n), task + n).bytes;
            if (used + one > w->bytes) break;
            w->at[n] = used;
            used += one;
        }
        rc = gpu_event_sync(w->copied[slot]);
        if (rc) break;
        j->task0 = task;
        j->window = w->p[slot];
        j->at = w->at;
        pool_run(pool, load_task, j, n);
        if (j->rc) break;
        rc = copy_window(j, w, w->p[slot], task, n);
        if (!rc) rc = gpu_event_record(w->copied[slot], w->stream);
    }
    return rc ? rc : gpu_stream_sync(w->stream);
}

int home_load(struct home *h, const struct gguf *g, struct pool *pool, progress_fn progress, void *arg,
              const volatile sig_atomic_t *stop) {
    struct load_job j = {.g = g, .progress = progress, .progress_arg = arg, .stop = stop, .shown_at = clock_s(), .most_read = READ_BYTES};
    size_t n = 0;
    for (int i = 0; i < h->parts.n; i++) n += (size_t)h->parts.v[i].n_tensor;
    j.pieces = calloc(n + 1, sizeof *j.pieces);
    if (!j.pieces) return err_set(ERR_NOMEM, "home: out of memory");
    int n_host = add_pieces(&j, h);
    j.buf_bytes = align_up(j.most_read, 4096);
    j.bufs = mem_alloc(size_mul3(j.buf_bytes, (size_t)pool_threads(pool), 1), 4096, "read buffers");
    int rc = j.bufs ? gguf_begin(g) : ERR_NOMEM;
    if (!rc) {
        pool_run(pool, load_task, &j, n_host);
        if (!j.rc && j.n_task > n_host) {
            struct windows w = {0};
            rc = open_windows(&w, &j, h->gpu, n_host);
            if (!rc) rc = load_vram(&j, pool, &w, n_host);
            close_windows(&w, h->gpu);
        }
    }
    mem_free(j.bufs);
    free(j.pieces);
    if (rc) return rc;
    if (j.rc) return err_set(j.rc, "%s", j.text);
    if (progress) progress(arg, j.total, j.total);
    return 0;
}
