/* synth_gguf.c: synth_gguf of synth.h: a file of holes behind a true directory, and a source that fills them. */
#include "core/synth.h"

#include "core/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct source {
    const struct gguf *g;
    const struct shape *shape;
    uint64_t seed;
    struct synth *synth; /* NULL until the first weights are wanted: a plan wants none */
};

static struct shape_tensor record(const struct gguf_tensor *t) {
    struct shape_tensor s = {.n_dims = t->n_dims, .type = t->type, .bytes = t->bytes};
    snprintf(s.name, sizeof s.name, "%s", t->name);
    memcpy(s.dims, t->dims, sizeof s.dims);
    return s;
}

/* The last tensor that begins at or before offset: they are in the order of their data. */
static const struct gguf_tensor *tensor_at(const struct gguf *g, uint64_t offset) {
    int lo = 0, hi = gguf_n_tensors(g) - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (gguf_tensor(g, mid)->offset <= offset)
            lo = mid;
        else
            hi = mid - 1;
    }
    return gguf_tensor(g, lo);
}

static int source_read(void *ctx, uint64_t offset, void *dst, size_t bytes) {
    const struct source *s = ctx;
    const struct gguf_tensor *t = tensor_at(s->g, offset);
    size_t row = t->bytes / (size_t)(t->dims[1] * t->dims[2]);
    if (!s->synth) return err_set(ERR_ARG, "%s: read before gguf_begin", gguf_path(s->g, 0));
    if (offset < t->offset || offset - t->offset > t->bytes || bytes > t->bytes - (offset - t->offset) ||
        (offset - t->offset) % row || bytes % row)
        return err_set(ERR_ARG, "%s: %zu bytes at %llu are not rows of a tensor", gguf_path(s->g, 0), bytes, (unsigned long long)offset);
    struct shape_tensor r = record(t);
    return synth_rows(s->synth, dst, s->shape, &r, (int64_t)((offset - t->offset) / row), (int64_t)(bytes / row));
}

static void source_close(void *ctx) {
    struct source *s = ctx;
    if (!s) return;
    synth_close(s->synth);
    free(s);
}

/* One row of each type, so that threads find their pools made. */
static int source_begin(void *ctx) {
    struct source *s = ctx;
    if (s->synth) return 0;
    int rc = synth_open(&s->synth, s->seed);
    for (int i = 0; i < gguf_n_tensors(s->g) && !rc; i++) {
        const struct gguf_tensor *t = gguf_tensor(s->g, i);
        size_t row = t->bytes / (size_t)(t->dims[1] * t->dims[2]);
        void *p = malloc(row);
        rc = p ? source_read(s, t->offset, p, row) : err_set(ERR_NOMEM, "%s: out of memory", s->shape->name);
        free(p);
    }
    return rc;
}

static int add_record(void *ctx, const struct shape_tensor *t) { return gguf_writer_tensor(ctx, t->name, t->type, t->n_dims, t->dims); }

static int write_directory(const char *path, const struct shape *shape, enum mix mix) {
    struct gguf_writer *w = NULL;
    int rc = gguf_writer_open(&w, path);
    if (!rc) rc = synth_metadata(w, shape, mix, 0);
    if (!rc) rc = shape_tensors(shape, mix, false, 0, add_record, w);
    if (!rc) rc = gguf_writer_leave_data(w);
    if (!rc) rc = gguf_writer_finish(w);
    gguf_writer_close(w);
    return rc;
}

int synth_gguf(struct gguf **out, const struct shape *shape, enum mix mix, uint64_t seed) {
    const char *dir = getenv("TMPDIR");
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/longhaul-shape-XXXXXX", dir && *dir ? dir : "/tmp");
    int fd = n < (int)sizeof path ? mkstemp(path) : -1;
    if (fd < 0) return err_set(ERR_IO, "cannot make a file in %s", dir && *dir ? dir : "/tmp");
    close(fd);
    struct gguf *g = NULL;
    struct source *s = calloc(1, sizeof *s);
    int rc = s ? write_directory(path, shape, mix) : err_set(ERR_NOMEM, "%s: out of memory", shape->name);
    if (!rc) rc = gguf_open(&g, path);
    unlink(path);
    if (rc) {
        source_close(s);
        return rc;
    }
    *s = (struct source){.g = g, .shape = shape, .seed = seed};
    gguf_set_source(g, &(struct gguf_source){source_begin, source_read, source_close, s});
    *out = g;
    return 0;
}
