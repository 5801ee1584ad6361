/* gguf_scan.c: the parser. Bytes come from one place, scan_need, which compares every claim with what is left of the
 * file (and with the limit of a directory) before memory is asked for. Splitting and lookup are in gguf.c. */
#include "core/gguf_scan.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/quant.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    FIRST_READ = 64 << 10,
    MIN_KV_BYTES = 8 + 1 + 4 + 1,                /* key length, key, type, one-byte value */
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,    /* name length, name, dimension count, one dimension, type, offset */
    MAX_ARRAY = 1 << 30,
    SHOWN = 80                                   /* characters of a key or name in a sentence */
};

/* A metadata record while the buffer may still move. */
struct record {
    size_t key, data; /* offsets */
    struct gguf_kv kv;
};

struct scan {
    int fd;
    const char *path;
    uint64_t file_bytes;
    uint8_t *buf;
    size_t len, cap, pos; /* bytes read, bytes allocated, parse position */
    char who[SHOWN + 32]; /* what is being parsed, for the sentence: "key general.name" */
};

static uint32_t get_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get_u64(const uint8_t *p) { return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32; }

/* --- bytes -------------------------------------------------------------------------------------------------------- */

/* Is there room for `n` more bytes (of `what`) after the parse position? Reads nothing. */
static int scan_claim(const struct scan *c, uint64_t n, const char *what) {
    uint64_t left = c->file_bytes - c->pos;
    if (n > left)
        return err_set(ERR_FORMAT, "%s: %s: %s needs %" PRIu64 " bytes at byte %zu, but the file has only %" PRIu64 " left",
                       c->path, c->who, what, n, c->pos, left);
    if (n > GGUF_MAX_DIRECTORY - c->pos)
        return err_set(ERR_FORMAT, "%s: %s: %s needs %" PRIu64 " bytes, beyond the limit of %d bytes for all metadata", c->path,
                       c->who, what, n, GGUF_MAX_DIRECTORY);
    return 0;
}

static int scan_grow(struct scan *c, size_t need) {
    size_t cap = c->cap ? c->cap : FIRST_READ;
    while (cap < need) cap *= 2;
    if (cap > c->file_bytes) cap = (size_t)c->file_bytes;
    if (cap <= c->cap) return 0;
    uint8_t *p = realloc(c->buf, cap);
    if (!p) return err_set(ERR_NOMEM, "%s: no memory for %zu bytes of metadata", c->path, cap);
    c->buf = p;
    c->cap = cap;
    return 0;
}

/* Makes bytes pos .. pos+n readable in buf. */
static int scan_need(struct scan *c, uint64_t n, const char *what) {
    int rc = scan_claim(c, n, what);
    if (rc) return rc;
    size_t end = c->pos + (size_t)n;
    if (end <= c->len) return 0;
    rc = scan_grow(c, end);
    if (rc) return rc;
    while (c->len < c->cap) {
        ssize_t got = pread(c->fd, c->buf + c->len, c->cap - c->len, (off_t)c->len);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return err_set(ERR_IO, "%s: cannot read at byte %zu: %s", c->path, c->len, strerror(errno));
        if (got == 0)
            return err_set(ERR_IO, "%s: the file shrank to %zu bytes while it was read", c->path, c->len);
        c->len += (size_t)got;
    }
    return 0;
}

static int scan_u32(struct scan *c, uint32_t *v, const char *what) {
    int rc = scan_need(c, 4, what);
    if (rc) return rc;
    *v = get_u32(c->buf + c->pos);
    c->pos += 4;
    return 0;
}

static int scan_u64(struct scan *c, uint64_t *v, const char *what) {
    int rc = scan_need(c, 8, what);
    if (rc) return rc;
    *v = get_u64(c->buf + c->pos);
    c->pos += 8;
    return 0;
}

/* A string: *at is the offset of its first byte. `limit` is checked before anything is read. */
static int scan_str(struct scan *c, size_t *at, size_t *bytes, uint64_t limit, const char *what) {
    uint64_t n;
    int rc = scan_u64(c, &n, what);
    if (rc) return rc;
    rc = scan_claim(c, n, what);
    if (rc) return rc;
    if (n > limit) {
        char shown[SHOWN];
        size_t some = n < SHOWN ? (size_t)n : SHOWN;
        rc = scan_need(c, some, what);
        if (rc) return rc;
        return err_set(ERR_FORMAT, "%s: %s: %s %s is %" PRIu64 " bytes long, the limit is %" PRIu64, c->path, c->who, what,
                       gguf_printable(shown, sizeof shown, (char *)c->buf + c->pos, some), n, limit);
    }
    rc = scan_need(c, n, what);
    if (rc) return rc;
    *at = c->pos;
    *bytes = (size_t)n;
    c->pos += (size_t)n;
    return 0;
}

/* A key or a tensor name: not empty, no NUL. Sets c->who to "KIND NAME". */
static int scan_name(struct scan *c, size_t *at, size_t *bytes, uint64_t limit, const char *kind) {
    int rc = scan_str(c, at, bytes, limit, "its name");
    if (rc) return rc;
    if (!*bytes) return err_set(ERR_FORMAT, "%s: %s has an empty name (byte %zu)", c->path, c->who, *at);
    char shown[SHOWN];
    gguf_printable(shown, sizeof shown, (char *)c->buf + *at, *bytes);
    if (memchr(c->buf + *at, 0, *bytes))
        return err_set(ERR_FORMAT, "%s: %s %s has a zero byte in its name", c->path, kind, shown);
    snprintf(c->who, sizeof c->who, "%s %s", kind, shown);
    return 0;
}

/* --- metadata ----------------------------------------------------------------------------------------------------- */

static size_t type_bytes(int type) {
    static const uint8_t bytes[GGUF_TYPE_COUNT] = {
#define X(name, id, n) [GGUF_##name] = n,
        GGUF_TYPE_LIST(X)
#undef X
    };
    return bytes[type];
}

static int check_bools(const struct scan *c, size_t at, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (c->buf[at + i] > 1)
            return err_set(ERR_FORMAT, "%s: %s: truth value %d, must be 0 or 1", c->path, c->who, c->buf[at + i]);
    return 0;
}

/* Walks the strings of an array and notes where each begins. */
static int scan_str_array(struct scan *c, struct record *r) {
    uint32_t *index = malloc(r->kv.n ? (size_t)r->kv.n * sizeof *index : 1);
    if (!index) return err_set(ERR_NOMEM, "%s: %s: no memory for %lld strings", c->path, c->who, (long long)r->kv.n);
    r->kv.index = index;
    for (int64_t i = 0; i < r->kv.n; i++) {
        size_t at, bytes;
        index[i] = (uint32_t)(c->pos - r->data); /* fits: a directory is below 2^28 */
        int rc = scan_str(c, &at, &bytes, UINT64_MAX, "a string of the array");
        if (rc) return rc;
    }
    return 0;
}

static int scan_array(struct scan *c, struct record *r) {
    uint32_t elem;
    uint64_t n, bytes;
    int rc = scan_u32(c, &elem, "the array's type");
    if (!rc) rc = scan_u64(c, &n, "the array's length");
    if (rc) return rc;
    if (elem == GGUF_ARR) return err_set(ERR_FORMAT, "%s: %s: arrays of arrays are not supported", c->path, c->who);
    if (elem >= GGUF_TYPE_COUNT)
        return err_set(ERR_FORMAT, "%s: %s: unknown array element type %" PRIu32, c->path, c->who, elem);
    if (n > MAX_ARRAY)
        return err_set(ERR_FORMAT, "%s: %s: array of %" PRIu64 " elements, the limit is %d", c->path, c->who, n, MAX_ARRAY);
    bytes = n * (elem == GGUF_STR ? 8 : type_bytes((int)elem)); /* at least; no overflow: n <= 2^30 */
    rc = elem == GGUF_STR ? scan_claim(c, bytes, "the array") : scan_need(c, bytes, "the array");
    if (rc) return rc;
    r->data = c->pos;
    r->kv.elem_type = (int)elem;
    r->kv.n = (int64_t)n;
    if (elem == GGUF_STR) return scan_str_array(c, r);
    if (elem == GGUF_BOOL && (rc = check_bools(c, c->pos, n))) return rc;
    c->pos += (size_t)bytes;
    return 0;
}

static int scan_value(struct scan *c, struct record *r) {
    int rc;
    size_t bytes;
    if (r->kv.type == GGUF_ARR) return scan_array(c, r);
    r->kv.elem_type = r->kv.type;
    r->kv.n = 1;
    if (r->kv.type == GGUF_STR) {
        rc = scan_str(c, &r->data, &bytes, UINT64_MAX, "the string");
        if (!rc) r->kv.n = (int64_t)bytes;
        return rc;
    }
    bytes = type_bytes(r->kv.type);
    rc = scan_need(c, bytes, "the value");
    if (rc) return rc;
    if (r->kv.type == GGUF_BOOL && (rc = check_bools(c, c->pos, 1))) return rc;
    r->data = c->pos;
    c->pos += bytes;
    return 0;
}

static int scan_kv(struct scan *c, struct record *r) {
    uint32_t type;
    size_t key_bytes;
    int rc = scan_name(c, &r->key, &key_bytes, GGUF_MAX_KEY, "key");
    if (!rc) rc = scan_u32(c, &type, "the type");
    if (rc) return rc;
    if (type >= GGUF_TYPE_COUNT) return err_set(ERR_FORMAT, "%s: %s: unknown value type %" PRIu32, c->path, c->who, type);
    c->buf[r->key + key_bytes] = 0; /* the type behind the key has been read: our copy ends the key there */
    r->kv.type = (int)type;
    return scan_value(c, r);
}

static int scan_kvs(struct scan *c, struct record **out, int *n_out, uint64_t n) {
    int rc = 0, cap = 0;
    for (uint64_t i = 0; i < n && !rc; i++) {
        if (*n_out == cap) {
            cap = cap ? cap * 2 : 64;
            struct record *v = realloc(*out, (size_t)cap * sizeof *v);
            if (!v) return err_set(ERR_NOMEM, "%s: no memory for %d metadata keys", c->path, cap);
            *out = v;
        }
        struct record *r = &(*out)[*n_out];
        memset(r, 0, sizeof *r);
        ++*n_out; /* counted before it is complete: the index of a half-read array must be freed */
        snprintf(c->who, sizeof c->who, "metadata key %" PRIu64 " of %" PRIu64, i + 1, n);
        rc = scan_kv(c, r);
    }
    return rc;
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static int scan_dims(struct scan *c, struct gguf_tensor *t) {
    uint32_t n;
    int64_t product = 1;
    int rc = scan_u32(c, &n, "the number of dimensions");
    if (rc) return rc;
    if (n < 1 || n > GGUF_MAX_DIMS)
        return err_set(ERR_FORMAT, "%s: %s has %" PRIu32 " dimensions, must be 1 to %d", c->path, c->who, n, GGUF_MAX_DIMS);
    t->n_dims = (int)n;
    for (int i = 0; i < GGUF_MAX_DIMS; i++) t->dims[i] = 1;
    for (int i = 0; i < t->n_dims; i++) {
        uint64_t d;
        rc = scan_u64(c, &d, "a dimension");
        if (rc) return rc;
        if (d < 1 || d > INT64_MAX)
            return err_set(ERR_FORMAT, "%s: %s: dimension %d is %" PRIu64 ", must be 1 to 2^63 - 1", c->path, c->who, i, d);
        t->dims[i] = (int64_t)d;
        if (__builtin_mul_overflow(product, t->dims[i], &product))
            return err_set(ERR_FORMAT, "%s: %s has 2^63 elements or more", c->path, c->who);
    }
    return 0;
}

static int tensor_size(const struct scan *c, struct gguf_tensor *t) {
    const struct quant_info *q = quant_info(t->type);
    if (!q) return 0; /* an error only if somebody needs this tensor */
    if (t->dims[0] % q->block_elems)
        return err_set(ERR_FORMAT, "%s: %s: rows of %lld elements are not whole %s blocks of %d", c->path, c->who,
                       (long long)t->dims[0], q->name, q->block_elems);
    size_t row;
    if (!quant_row_bytes(&row, t->type, t->dims[0]) ||
        !size_mul(&t->bytes, row, (size_t)(t->dims[1] * t->dims[2] * t->dims[3])) || t->bytes > INT64_MAX)
        return err_set(ERR_FORMAT, "%s: %s has 2^63 bytes or more", c->path, c->who);
    return 0;
}

static int scan_tensor(struct scan *c, struct gguf_tensor *t) {
    size_t at, bytes;
    uint32_t type;
    int rc = scan_name(c, &at, &bytes, GGUF_MAX_NAME, "tensor");
    if (rc) return rc;
    memcpy(t->name, c->buf + at, bytes); /* zeroed before: stays terminated */
    rc = scan_dims(c, t);
    if (!rc) rc = scan_u32(c, &type, "the type");
    if (!rc) rc = scan_u64(c, &t->offset, "the offset");
    if (rc) return rc;
    t->type = (int32_t)type;
    return tensor_size(c, t);
}

static int scan_tensors(struct scan *c, struct gguf_tensors *ts, uint64_t n, int shard) {
    for (uint64_t i = 0; i < n; i++) {
        if (ts->n == ts->cap) {
            int cap = ts->cap ? ts->cap * 2 : 256;
            struct gguf_tensor *v = realloc(ts->v, (size_t)cap * sizeof *v);
            if (!v) return err_set(ERR_NOMEM, "%s: no memory for %d tensor records", c->path, cap);
            ts->v = v;
            ts->cap = cap;
        }
        struct gguf_tensor *t = &ts->v[ts->n];
        memset(t, 0, sizeof *t);
        t->shard = shard;
        snprintf(c->who, sizeof c->who, "tensor record %" PRIu64 " of %" PRIu64, i + 1, n);
        int rc = scan_tensor(c, t);
        if (rc) return rc;
        ts->n++;
    }
    return 0;
}

static int by_offset(const void *a, const void *b) {
    const struct gguf_tensor *const *x = a, *const *y = b;
    return ((*x)->offset > (*y)->offset) - ((*x)->offset < (*y)->offset);
}

static int check_overlap(const struct scan *c, struct gguf_tensor *ts, int n) {
    struct gguf_tensor **v = malloc((size_t)n * sizeof(struct gguf_tensor *) + 1);
    if (!v) return err_set(ERR_NOMEM, "%s: no memory to sort %d tensors", c->path, n);
    for (int i = 0; i < n; i++) v[i] = &ts[i];
    qsort(v, (size_t)n, sizeof *v, by_offset);
    int rc = 0;
    for (int i = 1; i < n && !rc; i++) {
        const struct gguf_tensor *a = v[i - 1], *b = v[i];
        char x[SHOWN], y[SHOWN];
        if (b->offset - a->offset < (a->bytes ? a->bytes : 1)) /* of unknown size: at least one byte */
            rc = err_set(ERR_FORMAT, "%s: tensors %s and %s share bytes of the file (from %" PRIu64 " and %" PRIu64 ")", c->path,
                         gguf_printable(x, sizeof x, a->name, strlen(a->name)),
                         gguf_printable(y, sizeof y, b->name, strlen(b->name)), a->offset, b->offset);
    }
    free(v);
    return rc;
}

/* Turns offsets from the data section into offsets from the start of the file. */
static int place_tensors(const struct scan *c, struct gguf_tensor *ts, int n, uint64_t alignment) {
    char shown[SHOWN];
    uint64_t start = ((uint64_t)c->pos + alignment - 1) & ~(alignment - 1);
    for (int i = 0; i < n; i++) {
        struct gguf_tensor *t = &ts[i];
        gguf_printable(shown, sizeof shown, t->name, strlen(t->name));
        if (t->offset % alignment)
            return err_set(ERR_FORMAT, "%s: tensor %s: offset %" PRIu64 " is not a multiple of the alignment %" PRIu64, c->path,
                           shown, t->offset, alignment);
        uint64_t data = start < c->file_bytes ? c->file_bytes - start : 0;
        if (t->offset > data || t->bytes > data - t->offset)
            return err_set(ERR_FORMAT, "%s: tensor %s: %zu bytes at offset %" PRIu64 " lie beyond the end of the file, which has %"
                           PRIu64 " bytes of tensor data", c->path, shown, t->bytes, t->offset, data);
        t->offset += start;
    }
    return check_overlap(c, ts, n);
}

/* --- the whole directory ------------------------------------------------------------------------------------------ */

static int scan_header(struct scan *c, int *version, uint64_t *n_tensors, uint64_t *n_kv) {
    uint32_t v;
    snprintf(c->who, sizeof c->who, "header");
    int rc = scan_need(c, 4, "the magic number");
    if (rc) return rc;
    if (memcmp(c->buf, "GGUF", 4)) {
        char shown[32];
        return err_set(ERR_FORMAT, "%s: not a GGUF file: it begins with \"%s\"", c->path,
                       gguf_printable(shown, sizeof shown, (char *)c->buf, 4));
    }
    c->pos = 4;
    rc = scan_u32(c, &v, "the version");
    if (rc) return rc;
    if (v && (v & 0xffff) == 0)
        return err_set(ERR_FORMAT, "%s: big-endian GGUF is not supported (version reads as 0x%08" PRIx32 ")", c->path, v);
    if (v != 2 && v != 3) return err_set(ERR_FORMAT, "%s: GGUF version %" PRIu32 ", supported are 2 and 3", c->path, v);
    *version = (int)v;
    rc = scan_u64(c, n_tensors, "the number of tensors");
    if (!rc) rc = scan_u64(c, n_kv, "the number of metadata keys");
    if (rc) return rc;
    uint64_t left = c->file_bytes - c->pos;
    if (left > GGUF_MAX_DIRECTORY) left = GGUF_MAX_DIRECTORY;
    if (*n_kv > left / MIN_KV_BYTES)
        return err_set(ERR_FORMAT, "%s: %" PRIu64 " metadata keys cannot fit in %" PRIu64 " bytes", c->path, *n_kv, left);
    if (*n_tensors > left / MIN_TENSOR_BYTES)
        return err_set(ERR_FORMAT, "%s: %" PRIu64 " tensor records cannot fit in %" PRIu64 " bytes", c->path, *n_tensors, left);
    return 0;
}

static int order_by_key(const void *a, const void *b, void *kvs) {
    const struct gguf_kv *v = kvs;
    return strcmp(v[*(const uint32_t *)a].key, v[*(const uint32_t *)b].key);
}

/* Sorts the keys for lookup; equal neighbours are duplicates. */
static int sort_kvs(const struct scan *c, struct gguf_dir *d) {
    char shown[SHOWN];
    d->order = malloc((size_t)d->n_kv * sizeof *d->order + 1);
    if (!d->order) return err_set(ERR_NOMEM, "%s: no memory for %d metadata keys", c->path, d->n_kv);
    for (int i = 0; i < d->n_kv; i++) d->order[i] = (uint32_t)i;
    qsort_r(d->order, (size_t)d->n_kv, sizeof *d->order, order_by_key, d->kvs);
    for (int i = 1; i < d->n_kv; i++) {
        const char *a = d->kvs[d->order[i - 1]].key, *b = d->kvs[d->order[i]].key;
        if (!strcmp(a, b))
            return err_set(ERR_FORMAT, "%s: key %s occurs twice, at bytes %td and %td", c->path,
                           gguf_printable(shown, sizeof shown, a, strlen(a)), (uint8_t *)a - d->bytes, (uint8_t *)b - d->bytes);
    }
    return 0;
}

/* The buffer no longer moves: offsets become pointers, and the directory takes over what the records own. */
static int keep_kvs(struct scan *c, struct gguf_dir *d, struct record *records, int n) {
    d->kvs = calloc((size_t)n + 1, sizeof *d->kvs);
    if (!d->kvs) return err_set(ERR_NOMEM, "%s: no memory for %d metadata keys", c->path, n);
    uint8_t *trimmed = realloc(c->buf, c->pos);
    d->bytes = trimmed ? trimmed : c->buf;
    c->buf = NULL;
    d->n_kv = n;
    for (int i = 0; i < n; i++) {
        d->kvs[i] = records[i].kv;
        d->kvs[i].key = (char *)d->bytes + records[i].key;
        d->kvs[i].data = d->bytes + records[i].data;
        records[i].kv.index = NULL;
    }
    return sort_kvs(c, d);
}

static int read_alignment(const struct scan *c, struct gguf_dir *d) {
    const struct gguf_kv *kv = gguf_dir_find(d, "general.alignment");
    d->alignment = 32;
    if (!kv) return 0;
    if (!gguf_elem_u64(kv, 0, &d->alignment) || kv->type == GGUF_ARR || kv->type == GGUF_BOOL)
        return err_set(ERR_FORMAT, "%s: key general.alignment is a %s, must be an unsigned number", c->path,
                       gguf_type_name(kv->type));
    if (d->alignment < GGUF_MIN_ALIGN || d->alignment > GGUF_MAX_ALIGN || (d->alignment & (d->alignment - 1)))
        return err_set(ERR_FORMAT, "%s: key general.alignment is %" PRIu64 ", must be a power of two from %d to %d", c->path,
                       d->alignment, GGUF_MIN_ALIGN, GGUF_MAX_ALIGN);
    return 0;
}

static int scan_all(struct scan *c, struct gguf_dir *d, struct gguf_tensors *ts, struct record **records, int *n_record,
                    int shard) {
    uint64_t n_tensors, n_kv;
    int first = ts->n, rc = scan_header(c, &d->version, &n_tensors, &n_kv);
    if (!rc) rc = scan_kvs(c, records, n_record, n_kv);
    if (!rc) rc = scan_tensors(c, ts, n_tensors, shard);
    if (!rc) rc = keep_kvs(c, d, *records, *n_record);
    if (!rc) rc = read_alignment(c, d);
    if (!rc && n_tensors) rc = place_tensors(c, ts->v + first, ts->n - first, d->alignment);
    return rc;
}

int gguf_scan(struct gguf_dir *dir, struct gguf_tensors *tensors, int fd, uint64_t file_bytes, const char *path, int shard) {
    struct scan c = {.fd = fd, .path = path, .file_bytes = file_bytes};
    struct record *records = NULL;
    int n_record = 0;
    memset(dir, 0, sizeof *dir);
    int rc = scan_all(&c, dir, tensors, &records, &n_record, shard);
    for (int i = 0; i < n_record; i++) free(records[i].kv.index);
    free(records);
    free(c.buf);
    if (rc) gguf_dir_free(dir);
    return rc;
}

void gguf_dir_free(struct gguf_dir *dir) {
    for (int i = 0; i < dir->n_kv; i++) free(dir->kvs[i].index);
    free(dir->kvs);
    free(dir->order);
    free(dir->bytes);
    memset(dir, 0, sizeof *dir);
}

const struct gguf_kv *gguf_dir_find(const struct gguf_dir *dir, const char *key) {
    int lo = 0, hi = dir->n_kv;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        const struct gguf_kv *kv = &dir->kvs[dir->order[mid]];
        int c = strcmp(key, kv->key);
        if (!c) return kv;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}
