/* gguf.c: opening whole and split files, lookup, reading tensor bytes. The parser is gguf_scan.c, values gguf_value.c. */
#include "core/gguf.h"

#include "core/err.h"
#include "core/gguf_scan.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct shard {
    char *path;
    int fd;
    uint64_t bytes;
};

struct gguf {
    struct shard *shards;
    int n_shard;
    struct gguf_dir dir; /* of shard 0 */
    struct gguf_tensors tensors;
    uint32_t *order;      /* [tensors.n] indices sorted by name */
    struct gguf_source source; /* read NULL: the files */
    uint64_t n_promised;  /* tensors of all parts that key split.tensors.count says; UINT64_MAX: it does not */
};

enum { SUFFIX = 20 }; /* "-00001-of-00002.gguf" */

static int shard_open(struct shard *s, const char *path) {
    struct stat st;
    s->path = strdup(path);
    if (!s->path) return err_set(ERR_NOMEM, "%s: out of memory", path);
    s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a pipe by that name must not hang us */
    if (s->fd < 0) return err_set(ERR_FORMAT, "cannot open %s: %s", path, strerror(errno));
    if (fstat(s->fd, &st)) return err_set(ERR_IO, "%s: cannot get the file's size: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return err_set(ERR_FORMAT, "cannot open %s: not a regular file", path);
    s->bytes = (uint64_t)st.st_size;
    return 0;
}

static void shard_close(struct shard *s) {
    if (s->fd >= 0) close(s->fd);
    free(s->path);
}

/* Adds a shard, opens it and reads its directory. */
static int add_shard(struct gguf *g, struct gguf_dir *dir, const char *path) {
    struct shard *v = realloc(g->shards, (size_t)(g->n_shard + 1) * sizeof *v);
    if (!v) return err_set(ERR_NOMEM, "%s: out of memory", path);
    g->shards = v;
    struct shard *s = &v[g->n_shard++];
    *s = (struct shard){.fd = -1};
    int rc = shard_open(s, path);
    if (rc) return rc;
    return gguf_scan(dir, &g->tensors, s->fd, s->bytes, path, g->n_shard - 1);
}

/* An integer split key of a shard: `v` untouched when absent. */
static int split_key(const struct gguf_dir *dir, const char *path, const char *key, uint64_t *v) {
    const struct gguf_kv *kv = gguf_dir_find(dir, key);
    if (!kv || (kv->type != GGUF_ARR && gguf_elem_u64(kv, 0, v))) return 0;
    return err_set(ERR_FORMAT, "%s: key %s is a %s, must be an unsigned number", path, key, gguf_type_name(kv->type));
}

/* Path of shard `no` of `count`, from that of shard 0. NULL: shard 0 is not named as it must be, or no memory. */
static char *shard_path(const char *first, int no, int count) {
    char suffix[SUFFIX + 32];
    size_t n = strlen(first);
    snprintf(suffix, sizeof suffix, "-%05d-of-%05d.gguf", 1, count);
    if (n < SUFFIX || strcmp(first + n - SUFFIX, suffix)) return NULL;
    char *path = malloc(n + sizeof suffix);
    if (!path) return NULL;
    memcpy(path, first, n - SUFFIX);
    snprintf(path + n - SUFFIX, sizeof suffix, "-%05d-of-%05d.gguf", no + 1, count);
    return path;
}

static int open_shard(struct gguf *g, int no, int count) {
    struct gguf_dir dir;
    char *path = shard_path(g->shards[0].path, no, count);
    if (!path)
        return err_set(ERR_FORMAT, "%s: key split.count is %d, so the name must end in -00001-of-%05d.gguf", g->shards[0].path,
                       count, count);
    int rc = add_shard(g, &dir, path);
    if (!rc) {
        uint64_t has_no = (uint64_t)no, has_count = (uint64_t)count;
        rc = split_key(&dir, path, "split.no", &has_no);
        if (!rc) rc = split_key(&dir, path, "split.count", &has_count);
        if (!rc && (has_no != (uint64_t)no || has_count != (uint64_t)count))
            rc = err_set(ERR_FORMAT, "%s: keys split.no and split.count are %" PRIu64 " and %" PRIu64 ", must be %d and %d", path,
                         has_no, has_count, no, count);
        gguf_dir_free(&dir);
    }
    free(path);
    return rc;
}

static int open_shards(struct gguf *g) {
    const char *path = g->shards[0].path;
    uint64_t no = 0, count = 1;
    int rc = split_key(&g->dir, path, "split.count", &count);
    if (!rc) rc = split_key(&g->dir, path, "split.no", &no);
    if (!rc) rc = split_key(&g->dir, path, "split.tensors.count", &g->n_promised);
    if (rc || count <= 1) return rc;
    if (count > GGUF_MAX_SHARD)
        return err_set(ERR_FORMAT, "%s: key split.count is %" PRIu64 ", the limit is %d", path, count, GGUF_MAX_SHARD);
    if (no)
        return err_set(ERR_FORMAT, "%s: this is part %" PRIu64 " of %" PRIu64 " (key split.no); open the first part", path, no + 1,
                       count);
    for (int i = 1; i < (int)count; i++) {
        rc = open_shard(g, i, (int)count);
        if (rc) return rc;
    }
    return 0;
}

/* After the names, so that a tensor that is there twice is named. */
static int check_promise(const struct gguf *g) {
    if (g->n_shard == 1 || g->n_promised == UINT64_MAX || g->n_promised == (uint64_t)g->tensors.n) return 0;
    return err_set(ERR_FORMAT, "%s: the parts hold %d tensors, key split.tensors.count says %" PRIu64, g->shards[0].path,
                   g->tensors.n, g->n_promised);
}

static int order_by_name(const void *a, const void *b, void *tensors) {
    const struct gguf_tensor *v = tensors;
    return strcmp(v[*(const uint32_t *)a].name, v[*(const uint32_t *)b].name);
}

/* Sorts tensor names for lookup; equal neighbours are duplicates. */
static int sort_tensors(struct gguf *g) {
    char shown[GGUF_MAX_NAME * 4 + 1];
    struct gguf_tensors *ts = &g->tensors;
    g->order = malloc((size_t)ts->n * sizeof *g->order + 1);
    if (!g->order) return err_set(ERR_NOMEM, "%s: no memory for %d tensors", g->shards[0].path, ts->n);
    for (int i = 0; i < ts->n; i++) g->order[i] = (uint32_t)i;
    if (ts->n) qsort_r(g->order, (size_t)ts->n, sizeof *g->order, order_by_name, ts->v);
    for (int i = 1; i < ts->n; i++) {
        const struct gguf_tensor *a = &ts->v[g->order[i - 1]], *b = &ts->v[g->order[i]];
        if (strcmp(a->name, b->name)) continue;
        gguf_printable(shown, sizeof shown, a->name, strlen(a->name));
        if (a->shard == b->shard)
            return err_set(ERR_FORMAT, "%s: tensor %s occurs twice, with data at bytes %" PRIu64 " and %" PRIu64,
                           g->shards[a->shard].path, shown, a->offset, b->offset);
        return err_set(ERR_FORMAT, "tensor %s occurs twice: in %s at byte %" PRIu64 " and in %s at byte %" PRIu64, shown,
                       g->shards[a->shard].path, a->offset, g->shards[b->shard].path, b->offset);
    }
    return 0;
}

int gguf_open(struct gguf **out, const char *path) {
    struct gguf *g = calloc(1, sizeof *g);
    if (!g) return err_set(ERR_NOMEM, "%s: out of memory", path);
    g->n_promised = UINT64_MAX;
    int rc = add_shard(g, &g->dir, path);
    if (!rc) rc = open_shards(g);
    if (!rc) rc = sort_tensors(g);
    if (!rc) rc = check_promise(g);
    if (rc) {
        gguf_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void gguf_close(struct gguf *g) {
    if (!g) return;
    if (g->source.close) g->source.close(g->source.ctx);
    for (int i = 0; i < g->n_shard; i++) shard_close(&g->shards[i]);
    free(g->shards);
    free(g->tensors.v);
    free(g->order);
    gguf_dir_free(&g->dir);
    free(g);
}

int gguf_read(const struct gguf *g, int shard, uint64_t offset, void *dst, size_t bytes) {
    if (shard < 0 || shard >= g->n_shard)
        return err_set(ERR_ARG, "%s has %d parts, part %d was asked for", g->shards[0].path, g->n_shard, shard);
    const struct shard *s = &g->shards[shard];
    if (offset > s->bytes || bytes > s->bytes - offset)
        return err_set(ERR_IO, "%s: cannot read %zu bytes at %" PRIu64 ": the file has %" PRIu64, s->path, bytes, offset, s->bytes);
    if (g->source.read) return g->source.read(g->source.ctx, offset, dst, bytes);
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(s->fd, (char *)dst + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return err_set(ERR_IO, "%s: cannot read at byte %" PRIu64 ": %s", s->path, offset + done, strerror(errno));
        if (got == 0)
            return err_set(ERR_IO, "%s: the file ends at byte %" PRIu64 "; it had %" PRIu64 " bytes when it was opened", s->path,
                           offset + done, s->bytes);
        done += (size_t)got;
    }
    return 0;
}

void gguf_set_source(struct gguf *g, const struct gguf_source *s) { g->source = *s; }
int gguf_begin(const struct gguf *g) { return g->source.begin ? g->source.begin(g->source.ctx) : 0; }

int gguf_version(const struct gguf *g) { return g->dir.version; }
int gguf_n_shard(const struct gguf *g) { return g->n_shard; }
const char *gguf_path(const struct gguf *g, int shard) { return g->shards[shard].path; }
uint64_t gguf_file_bytes(const struct gguf *g, int shard) { return g->shards[shard].bytes; }
int gguf_fd(const struct gguf *g, int shard) { return g->shards[shard].fd; }

int gguf_n_kv(const struct gguf *g) { return g->dir.n_kv; }
const struct gguf_kv *gguf_kv(const struct gguf *g, int i) { return &g->dir.kvs[i]; }
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key) { return gguf_dir_find(&g->dir, key); }

int gguf_n_tensors(const struct gguf *g) { return g->tensors.n; }
const struct gguf_tensor *gguf_tensor(const struct gguf *g, int i) { return &g->tensors.v[i]; }

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name) {
    int lo = 0, hi = g->tensors.n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        const struct gguf_tensor *t = &g->tensors.v[g->order[mid]];
        int c = strcmp(name, t->name);
        if (!c) return t;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}
