/* support_gguf.c: see support_gguf.h. */
#include "tests/support_gguf.h"

#include "core/quant.h"
#include "tests/support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALIGN = 32 };

static void put(char **buf, size_t *n, const void *p, size_t bytes) {
    *buf = realloc(*buf, *n + bytes + 1);
    assert_non_null(*buf);
    memcpy(*buf + *n, p, bytes);
    *n += bytes;
}

static void put_str(char **buf, size_t *n, const char *s) {
    uint64_t len = strlen(s);
    put(buf, n, &len, 8);
    put(buf, n, s, len);
}

/* Every record is written as: its size (not part of the file), key, type, value; so that a key can be taken out. */
void made_drop(struct made_gguf *f, const char *key) {
    for (size_t at = 0; at < f->kv_bytes;) {
        uint64_t size, len;
        memcpy(&size, f->kv + at, 8);
        memcpy(&len, f->kv + at + 8, 8);
        if (len == strlen(key) && !memcmp(f->kv + at + 16, key, len)) {
            memmove(f->kv + at, f->kv + at + 8 + size, f->kv_bytes - at - 8 - size);
            f->kv_bytes -= 8 + size;
            f->n_kv--;
            return;
        }
        at += 8 + size;
    }
}

static void put_kv(struct made_gguf *f, const char *key, uint32_t type, const void *v, size_t bytes) {
    uint64_t size = 8 + strlen(key) + 4 + bytes;
    made_drop(f, key);
    put(&f->kv, &f->kv_bytes, &size, 8);
    put_str(&f->kv, &f->kv_bytes, key);
    put(&f->kv, &f->kv_bytes, &type, 4);
    put(&f->kv, &f->kv_bytes, v, bytes);
    f->n_kv++;
}

void made_u32(struct made_gguf *f, const char *key, uint32_t v) { put_kv(f, key, 4, &v, 4); }
void made_f32(struct made_gguf *f, const char *key, float v) { put_kv(f, key, 6, &v, 4); }

void made_str(struct made_gguf *f, const char *key, const char *v) {
    char *buf = NULL;
    size_t n = 0;
    put_str(&buf, &n, v);
    put_kv(f, key, 8, buf, n);
    free(buf);
}

static void put_array(struct made_gguf *f, const char *key, uint32_t elem, const void *v, int count, size_t bytes) {
    char *buf = NULL;
    size_t n = 0;
    uint64_t len = (uint64_t)count;
    put(&buf, &n, &elem, 4);
    put(&buf, &n, &len, 8);
    put(&buf, &n, v, bytes);
    put_kv(f, key, 9, buf, n);
    free(buf);
}

void made_i32s(struct made_gguf *f, const char *key, const int32_t *v, int n) { put_array(f, key, 5, v, n, (size_t)n * 4); }
void made_bools(struct made_gguf *f, const char *key, const uint8_t *v, int n) { put_array(f, key, 7, v, n, (size_t)n); }

void made_tensor(struct made_gguf *f, const char *name, int type, const int64_t *dims) {
    uint32_t n = 0, t = (uint32_t)type;
    size_t bytes = 0;
    int64_t rows = 1;
    while (dims[n]) n++;
    for (uint32_t i = 1; i < n; i++) rows *= dims[i];
    if (quant_info(type)) assert_true(quant_row_bytes(&bytes, type, dims[0]));
    put_str(&f->tensors, &f->tensors_bytes, name);
    put(&f->tensors, &f->tensors_bytes, &n, 4);
    put(&f->tensors, &f->tensors_bytes, dims, n * 8);
    put(&f->tensors, &f->tensors_bytes, &t, 4);
    put(&f->tensors, &f->tensors_bytes, &f->data_bytes, 8);
    f->n_tensors++;
    f->data_bytes += (bytes * (size_t)rows + ALIGN) / ALIGN * ALIGN; /* at least one step, also for unknown types */
}

const char *made_write(const struct made_gguf *f, const char *path) {
    const uint32_t version = 3;
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fwrite("GGUF", 1, 4, out);
    fwrite(&version, 4, 1, out);
    fwrite(&f->n_tensors, 8, 1, out);
    fwrite(&f->n_kv, 8, 1, out);
    for (size_t at = 0; at < f->kv_bytes;) {
        uint64_t size;
        memcpy(&size, f->kv + at, 8);
        fwrite(f->kv + at + 8, 1, size, out);
        at += 8 + size;
    }
    if (f->tensors_bytes) fwrite(f->tensors, 1, f->tensors_bytes, out);
    long end = ftell(out);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(truncate(path, (end + ALIGN - 1) / ALIGN * ALIGN + (long)f->data_bytes), 0);
    return path;
}

void made_free(struct made_gguf *f) {
    free(f->kv);
    free(f->tensors);
    memset(f, 0, sizeof *f);
}
