/* gguf_write.c: see gguf_write.h. Metadata and tensor records are collected in memory (megabytes), tensor data is
 * streamed. The host is little-endian, as everywhere in this program. */
#include "core/gguf_write.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/quant.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALIGN = 32, BUFFER_BYTES = 1 << 20 };

/* Growing byte string. */
struct bytes {
    uint8_t *p;
    size_t n, cap;
};

enum stage { STAGE_RECORDS, STAGE_DATA, STAGE_FINISHED };

struct gguf_writer {
    char *path, *tmp;
    int fd;
    int rc; /* first error, 0 while all is well */
    enum stage stage;
    struct bytes kv, records;
    uint64_t n_kv, n_tensors;
    int64_t strings_due; /* elements that the open array of strings still waits for */
    uint64_t *sizes;     /* [n_tensors] bytes of each tensor */
    size_t sizes_cap;
    uint64_t data_bytes; /* of all tensors with their padding */
    uint64_t file_bytes; /* known from begin_data on */
    uint64_t written;    /* bytes handed to the file or waiting in buffer */
    uint64_t at_tensor;  /* tensor whose bytes come next */
    uint64_t left;       /* its missing bytes */
    size_t n_buffer;
    uint8_t *buffer; /* [BUFFER_BYTES] */
};

static int fail(struct gguf_writer *w, int rc) {
    if (!w->rc) w->rc = rc;
    return w->rc;
}

static int fail_io(struct gguf_writer *w, const char *doing) {
    return fail(w, err_set(ERR_IO, "%s: cannot %s: %s", w->tmp, doing, strerror(errno)));
}

/* --- open and close ----------------------------------------------------------------------------------------------------- */

/* The name to rename to: links are followed, so that a link to a model stays a link. */
static char *final_path(const char *path) {
    char *real = realpath(path, NULL);
    return real ? real : strdup(path);
}

int gguf_writer_open(struct gguf_writer **out, const char *path) {
    struct stat st;
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        return err_set(ERR_ARG, "%s: exists and is not a regular file, so it cannot be replaced by a model", path);
    struct gguf_writer *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_NOMEM, "%s: out of memory", path);
    w->fd = -1;
    w->path = final_path(path);
    w->buffer = malloc(BUFFER_BYTES);
    if (!w->path || !w->buffer || asprintf(&w->tmp, "%s.tmp", w->path) < 0) {
        w->tmp = NULL;
        gguf_writer_close(w);
        return err_set(ERR_NOMEM, "%s: out of memory", path);
    }
    int fd = open(w->tmp, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        int rc = err_set(ERR_IO, "%s: cannot create: %s", w->tmp, strerror(errno));
        gguf_writer_close(w);
        return rc;
    }
    /* Lock before truncating: the file may be a leftover, or another process may be writing it now. */
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        int rc = err_set(ERR_ARG, "%s: another process is writing it", w->tmp);
        close(fd);
        gguf_writer_close(w);
        return rc;
    }
    w->fd = fd;
    if (ftruncate(fd, 0)) {
        int rc = fail_io(w, "truncate");
        gguf_writer_close(w);
        return rc;
    }
    *out = w;
    return 0;
}

void gguf_writer_close(struct gguf_writer *w) {
    if (!w) return;
    if (w->fd >= 0) {
        if (w->stage != STAGE_FINISHED) unlink(w->tmp);
        close(w->fd);
    }
    free(w->path);
    free(w->tmp);
    free(w->kv.p);
    free(w->records.p);
    free(w->sizes);
    free(w->buffer);
    free(w);
}

/* --- records ------------------------------------------------------------------------------------------------------------ */

static int put(struct gguf_writer *w, struct bytes *b, const void *p, size_t n) {
    if (w->rc) return w->rc;
    if (n > b->cap - b->n) {
        size_t need, cap = b->cap ? b->cap : 4096;
        if (!size_add(&need, b->n, n)) return fail(w, err_set(ERR_NOMEM, "%s: metadata too large", w->path));
        while (cap < need) cap = cap > SIZE_MAX / 2 ? need : 2 * cap;
        uint8_t *grown = realloc(b->p, cap);
        if (!grown) return fail(w, err_set(ERR_NOMEM, "%s: out of memory after %zu bytes of metadata", w->path, b->n));
        b->p = grown;
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    return 0;
}

static int put_u32(struct gguf_writer *w, struct bytes *b, uint32_t v) {
    return put(w, b, &v, sizeof v);
}

static int put_u64(struct gguf_writer *w, struct bytes *b, uint64_t v) {
    return put(w, b, &v, sizeof v);
}

static int put_str(struct gguf_writer *w, struct bytes *b, const char *s, size_t n) {
    put_u64(w, b, n);
    return put(w, b, s, n);
}

/* Bytes of a value of fixed size, 0 for strings, arrays and unknown types. */
static size_t scalar_bytes(int type) {
    switch (type) {
#define X(name, id, bytes)                                                                                             \
    case id:                                                                                                           \
        return bytes;
        GGUF_TYPE_LIST(X)
#undef X
    default:
        return 0;
    }
}

static int check_stage(struct gguf_writer *w, enum stage stage, const char *what) {
    if (w->rc) return w->rc;
    if (w->stage != stage) return fail(w, err_set(ERR_ARG, "%s: %s out of order", w->path, what));
    if (w->strings_due)
        return fail(w, err_set(ERR_ARG, "%s: %s while an array of strings lacks %lld of its elements", w->path, what,
                               (long long)w->strings_due));
    return 0;
}

static int put_key(struct gguf_writer *w, const char *key, int type) {
    int rc = check_stage(w, STAGE_RECORDS, key);
    if (rc) return rc;
    size_t n = strlen(key);
    if (n == 0 || n > GGUF_MAX_KEY)
        return fail(w, err_set(ERR_ARG, "%s: a key of %zu bytes, allowed are 1 to %d", w->path, n, GGUF_MAX_KEY));
    if (!strcmp(key, "general.alignment"))
        return fail(w, err_set(ERR_ARG, "%s: general.alignment is always the default here", w->path));
    w->n_kv++;
    put_str(w, &w->kv, key, n);
    return put_u32(w, &w->kv, (uint32_t)type);
}

int gguf_writer_scalar(struct gguf_writer *w, const char *key, int type, const void *value) {
    size_t n = scalar_bytes(type);
    if (!n) return fail(w, err_set(ERR_ARG, "%s: %s: type %d is no scalar", w->path, key, type));
    put_key(w, key, type);
    return put(w, &w->kv, value, n);
}

int gguf_writer_u32(struct gguf_writer *w, const char *key, uint32_t v) {
    return gguf_writer_scalar(w, key, GGUF_U32, &v);
}

int gguf_writer_f32(struct gguf_writer *w, const char *key, float v) {
    return gguf_writer_scalar(w, key, GGUF_F32, &v);
}

int gguf_writer_bool(struct gguf_writer *w, const char *key, bool v) {
    uint8_t byte = v;
    return gguf_writer_scalar(w, key, GGUF_BOOL, &byte);
}

int gguf_writer_str(struct gguf_writer *w, const char *key, const char *s, size_t bytes) {
    put_key(w, key, GGUF_STR);
    return put_str(w, &w->kv, s, bytes);
}

static int put_arr(struct gguf_writer *w, const char *key, int elem_type, int64_t n) {
    if (n < 0) return fail(w, err_set(ERR_ARG, "%s: %s: an array of %lld elements", w->path, key, (long long)n));
    put_key(w, key, GGUF_ARR);
    put_u32(w, &w->kv, (uint32_t)elem_type);
    return put_u64(w, &w->kv, (uint64_t)n);
}

int gguf_writer_arr(struct gguf_writer *w, const char *key, int elem_type, int64_t n, const void *data) {
    size_t bytes;
    if (!scalar_bytes(elem_type) || n < 0 || !size_mul(&bytes, (size_t)n, scalar_bytes(elem_type)))
        return fail(w, err_set(ERR_ARG, "%s: %s: %lld elements of type %d", w->path, key, (long long)n, elem_type));
    put_arr(w, key, elem_type, n);
    return put(w, &w->kv, data, bytes);
}

int gguf_writer_str_arr(struct gguf_writer *w, const char *key, int64_t n) {
    int rc = put_arr(w, key, GGUF_STR, n);
    if (!rc) w->strings_due = n;
    return rc;
}

int gguf_writer_str_elem(struct gguf_writer *w, const char *s, size_t bytes) {
    if (w->rc) return w->rc;
    if (w->strings_due <= 0) return fail(w, err_set(ERR_ARG, "%s: a string outside of an array", w->path));
    w->strings_due--;
    return put_str(w, &w->kv, s, bytes);
}

int gguf_writer_copy_kv(struct gguf_writer *w, const struct gguf_kv *kv) {
    if (kv->type == GGUF_STR) return gguf_writer_str(w, kv->key, (const char *)kv->data, (size_t)kv->n);
    if (kv->type != GGUF_ARR) return gguf_writer_scalar(w, kv->key, kv->type, kv->data);
    if (kv->elem_type != GGUF_STR) return gguf_writer_arr(w, kv->key, kv->elem_type, kv->n, kv->data);
    int rc = gguf_writer_str_arr(w, kv->key, kv->n);
    for (int64_t i = 0; i < kv->n && !rc; i++) {
        size_t bytes;
        const char *s = gguf_elem_str(kv, i, &bytes);
        rc = gguf_writer_str_elem(w, s, bytes);
    }
    return rc;
}

/* Bytes of all elements; false when the shape is not storable in this type. */
static bool tensor_bytes(uint64_t *out, int type, int n_dims, const int64_t *dims) {
    size_t n;
    if (n_dims < 1 || n_dims > GGUF_MAX_DIMS || dims[0] < 1 || !quant_row_bytes(&n, type, dims[0])) return false;
    for (int i = 1; i < n_dims; i++)
        if (dims[i] < 1 || !size_mul(&n, n, (size_t)dims[i])) return false;
    *out = n;
    return n <= INT64_MAX / 2;
}

static int push_size(struct gguf_writer *w, uint64_t bytes) {
    if (w->n_tensors == w->sizes_cap) {
        size_t cap = w->sizes_cap ? 2 * w->sizes_cap : 256;
        uint64_t *grown = realloc(w->sizes, cap * sizeof *grown);
        if (!grown) return fail(w, err_set(ERR_NOMEM, "%s: out of memory", w->path));
        w->sizes = grown;
        w->sizes_cap = cap;
    }
    w->sizes[w->n_tensors++] = bytes;
    return 0;
}

int gguf_writer_tensor(struct gguf_writer *w, const char *name, int type, int n_dims, const int64_t *dims) {
    int rc = check_stage(w, STAGE_RECORDS, name);
    if (rc) return rc;
    size_t n = strlen(name);
    if (n == 0 || n > GGUF_MAX_NAME)
        return fail(w,
                    err_set(ERR_ARG, "%s: a tensor name of %zu bytes, allowed are 1 to %d", w->path, n, GGUF_MAX_NAME));
    uint64_t bytes;
    if (!tensor_bytes(&bytes, type, n_dims, dims))
        return fail(w, err_set(ERR_ARG, "%s: tensor %s: %d dims, rows of %lld cannot be stored as %s", w->path, name,
                               n_dims, (long long)dims[0], quant_name(type)));
    uint64_t padded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (w->data_bytes + padded > INT64_MAX / 2)
        return fail(w, err_set(ERR_ARG, "%s: tensor %s makes the file too large", w->path, name));
    put_str(w, &w->records, name, n);
    put_u32(w, &w->records, (uint32_t)n_dims);
    put(w, &w->records, dims, (size_t)n_dims * sizeof *dims);
    put_u32(w, &w->records, (uint32_t)type);
    put_u64(w, &w->records, w->data_bytes);
    w->data_bytes += padded;
    return push_size(w, bytes);
}

/* --- the file ------------------------------------------------------------------------------------------------------------ */

static int write_all(struct gguf_writer *w, const uint8_t *p, size_t n) {
    while (n) {
        ssize_t got = write(w->fd, p, n);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(w, err_set(ERR_IO, "%s: cannot write byte %llu of %llu: %s", w->tmp,
                                   (unsigned long long)w->written, (unsigned long long)w->file_bytes, strerror(errno)));
        p += got;
        n -= (size_t)got;
    }
    return 0;
}

static int flush(struct gguf_writer *w) {
    size_t n = w->n_buffer;
    w->n_buffer = 0;
    return w->rc ? w->rc : write_all(w, w->buffer, n);
}

static int emit(struct gguf_writer *w, const void *p, size_t n) {
    if (w->rc || n == 0) return w->rc;
    if (n > BUFFER_BYTES - w->n_buffer && flush(w)) return w->rc;
    w->written += n;
    if (n > BUFFER_BYTES) return write_all(w, p, n);
    memcpy(w->buffer + w->n_buffer, p, n);
    w->n_buffer += n;
    return 0;
}

static int emit_padding(struct gguf_writer *w) {
    static const uint8_t zeros[ALIGN];
    return emit(w, zeros, (ALIGN - w->written % ALIGN) % ALIGN);
}

/* Reserves the whole file. A file system that cannot reserve (EOPNOTSUPP) is not an error: writing will tell. */
static int reserve(struct gguf_writer *w) {
    if (fallocate(w->fd, 0, 0, (off_t)w->file_bytes) == 0) return 0;
    if (errno != ENOSPC && errno != EFBIG && errno != EDQUOT) return 0;
    return fail(w, err_set(ERR_IO, "%s: cannot hold %llu bytes: %s", w->tmp, (unsigned long long)w->file_bytes,
                           strerror(errno)));
}

static uint64_t head_bytes(const struct gguf_writer *w) {
    uint64_t n = 4 + 4 + 8 + 8 + w->kv.n + w->records.n;
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static int emit_head(struct gguf_writer *w) {
    w->stage = STAGE_DATA;
    const uint32_t version = 3;
    emit(w, "GGUF", 4);
    emit(w, &version, sizeof version);
    emit(w, &w->n_tensors, sizeof w->n_tensors);
    emit(w, &w->n_kv, sizeof w->n_kv);
    emit(w, w->kv.p, w->kv.n);
    emit(w, w->records.p, w->records.n);
    return emit_padding(w);
}

int gguf_writer_begin_data(struct gguf_writer *w) {
    int rc = check_stage(w, STAGE_RECORDS, "begin_data");
    if (rc) return rc;
    w->file_bytes = head_bytes(w) + w->data_bytes;
    w->left = w->n_tensors ? w->sizes[0] : 0;
    return reserve(w) ? w->rc : emit_head(w);
}

int gguf_writer_leave_data(struct gguf_writer *w) {
    int rc = check_stage(w, STAGE_RECORDS, "leave_data");
    if (rc) return rc;
    w->file_bytes = head_bytes(w) + w->data_bytes;
    w->at_tensor = w->n_tensors;
    if (emit_head(w) || flush(w)) return w->rc;
    return ftruncate(w->fd, (off_t)w->file_bytes) ? fail_io(w, "make") : 0;
}

int gguf_writer_data(struct gguf_writer *w, const void *p, size_t bytes) {
    int rc = check_stage(w, STAGE_DATA, "data");
    const uint8_t *at = p;
    while (bytes && !rc) {
        if (w->at_tensor == w->n_tensors)
            return fail(w, err_set(ERR_ARG, "%s: %zu bytes more than its tensors take", w->path, bytes));
        size_t n = bytes < w->left ? bytes : (size_t)w->left;
        rc = emit(w, at, n);
        at += n;
        bytes -= n;
        w->left -= n;
        if (w->left == 0) {
            if (!rc) rc = emit_padding(w);
            if (++w->at_tensor < w->n_tensors) w->left = w->sizes[w->at_tensor];
        }
    }
    return rc;
}

/* A rename is only durable once the folder is on the disk too; that part is best effort. */
static void sync_folder(const char *path) {
    char *dir = strdup(path), *slash = dir ? strrchr(dir, '/') : NULL;
    if (slash) slash[slash == dir] = 0;
    int fd = dir ? open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(dir);
}

int gguf_writer_finish(struct gguf_writer *w) {
    int rc = check_stage(w, STAGE_DATA, "finish");
    if (rc) return rc;
    if (w->at_tensor != w->n_tensors)
        return fail(w, err_set(ERR_ARG, "%s: data of %llu tensors is missing", w->path,
                               (unsigned long long)(w->n_tensors - w->at_tensor)));
    if (flush(w)) return w->rc;
    if (fsync(w->fd)) return fail_io(w, "flush");
    if (rename(w->tmp, w->path)) return fail_io(w, "rename to its final name");
    w->stage = STAGE_FINISHED;
    sync_folder(w->path);
    return 0;
}

uint64_t gguf_writer_file_bytes(const struct gguf_writer *w) {
    return w->file_bytes;
}
