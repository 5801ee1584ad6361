/* gguf.h: the directory of a GGUF file (version 2 or 3, little-endian), whole or split: metadata and where tensors lie.
 *
 * Nothing in a file is believed: every length is compared with the bytes left before it is used, every product is
 * checked, and memory grows only as records are read (docs: the GGUF description of ggml; the checks are ours).
 * The directory is read with pread into the heap, not mapped, and weights are read with pread too: a file that is
 * truncated or replaced while we use it gives ERR_IO, never SIGBUS. (A directory is some 10 MB at most; mapping it would
 * save nothing.) The file stays open until gguf_close.
 *
 * After gguf_open a struct gguf is read-only: any thread may use it. Pointers that functions return live until
 * gguf_close. Strings are bytes with a length: they may hold NUL and need not be UTF-8. Keys and tensor names hold no NUL
 * and are NUL-terminated.
 * Failures: ERR_FORMAT names file and key or tensor, the value and the limit. ERR_NOMEM, ERR_IO. */
#ifndef LH_CORE_GGUF_H
#define LH_CORE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    GGUF_MAX_KEY = 65535,            /* bytes of a key */
    GGUF_MAX_NAME = 63,              /* bytes of a tensor name */
    GGUF_MAX_DIMS = 4,
    GGUF_MAX_SHARD = 1024,
    GGUF_MAX_DIRECTORY = 256 << 20,  /* bytes of header, metadata and tensor records of one file */
    GGUF_MIN_ALIGN = 8, GGUF_MAX_ALIGN = 1 << 20,
};

/* Value types: enum, id in the file, bytes (0: variable). */
#define GGUF_TYPE_LIST(X)                                                                                              \
    X(U8, 0, 1) X(I8, 1, 1) X(U16, 2, 2) X(I16, 3, 2) X(U32, 4, 4) X(I32, 5, 4) X(F32, 6, 4) X(BOOL, 7, 1)             \
    X(STR, 8, 0) X(ARR, 9, 0) X(U64, 10, 8) X(I64, 11, 8) X(F64, 12, 8)
enum gguf_type {
#define X(name, id, bytes) GGUF_##name = id,
    GGUF_TYPE_LIST(X)
#undef X
    GGUF_TYPE_COUNT
};

struct gguf;

/* Opens `path` and reads its directory; for shard 0 of a split model ("NAME-00001-of-0000N.gguf") the other shards' too.
 * A file that cannot be opened, a shard that is missing or does not belong, and every malformed record are ERR_FORMAT. */
int gguf_open(struct gguf **out, const char *path);
void gguf_close(struct gguf *g); /* NULL is fine */

/* Reads `bytes` bytes at `offset` of shard `shard` into dst. ERR_IO names file and offset: also when the file became
 * shorter than it was. Any number of threads may read at once. */
int gguf_read(const struct gguf *g, int shard, uint64_t offset, void *dst, size_t bytes);

/* Where gguf_read takes bytes from, in place of the file: for models whose weights are made up (core/synth.h). */
struct gguf_source {
    int (*begin)(void *ctx);                                          /* by gguf_begin */
    int (*read)(void *ctx, uint64_t offset, void *dst, size_t bytes); /* within the file; as gguf_read, from any thread */
    void (*close)(void *ctx);                                         /* by gguf_close */
    void *ctx;
};
void gguf_set_source(struct gguf *g, const struct gguf_source *s); /* of a whole file; g owns ctx from here on */
/* Before the first gguf_read; opening reads no weights. Does nothing for files. May be called again. */
int gguf_begin(const struct gguf *g);

int gguf_version(const struct gguf *g);
int gguf_n_shard(const struct gguf *g); /* 1 for a whole file */
const char *gguf_path(const struct gguf *g, int shard);
uint64_t gguf_file_bytes(const struct gguf *g, int shard);
int gguf_fd(const struct gguf *g, int shard); /* for readers with their own way of reading; do not close or seek */

/* --- metadata (of shard 0) ---------------------------------------------------------------------------------------- */

/* A value as it lies in the file. Use the getters below; this is for listing. */
struct gguf_kv {
    const char *key;
    int type;              /* enum gguf_type */
    int elem_type;         /* of an array; else equal to type */
    int64_t n;             /* elements of an array, bytes of a string, else 1 */
    const uint8_t *data;   /* first element, first byte of a string; unaligned */
    uint32_t *index;       /* array of strings: [n] offsets from data of each string's 8-byte length */
};

int gguf_n_kv(const struct gguf *g);
const struct gguf_kv *gguf_kv(const struct gguf *g, int i);         /* 0 <= i < gguf_n_kv, file order */
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key); /* NULL: absent */
const char *gguf_type_name(int type);                               /* "u32"; "unknown" */

/* Getters: 0 and the value; GGUF_ABSENT with the outputs untouched when there is no such key (so that a default may be
 * put there before the call); ERR_FORMAT when the key has another type or the value does not fit.
 * Integers are accepted from any integer type and BOOL, floats from F32 and F64 (not NaN-checked) and integers. */
enum { GGUF_ABSENT = 1 };
int gguf_u64(const struct gguf *g, const char *key, uint64_t *v);
int gguf_i64(const struct gguf *g, const char *key, int64_t *v);
int gguf_f64(const struct gguf *g, const char *key, double *v);
int gguf_bool(const struct gguf *g, const char *key, bool *v); /* BOOL, or an integer 0 or 1 */
int gguf_str(const struct gguf *g, const char *key, const char **p, size_t *bytes);
int gguf_arr(const struct gguf *g, const char *key, const struct gguf_kv **arr); /* any element type */

/* Element i (0 <= i < arr->n) of an array, or the value of a scalar with i = 0. false: not an integer (or does not fit);
 * not a number. */
bool gguf_elem_u64(const struct gguf_kv *kv, int64_t i, uint64_t *v);
bool gguf_elem_i64(const struct gguf_kv *kv, int64_t i, int64_t *v);
bool gguf_elem_f64(const struct gguf_kv *kv, int64_t i, double *v);
/* The string (of an array of strings, or a string value with i = 0) and its length; NULL when it is not one. */
const char *gguf_elem_str(const struct gguf_kv *kv, int64_t i, size_t *bytes);

/* --- tensors (of all shards, in file order) ----------------------------------------------------------------------- */

struct gguf_tensor {
    char name[GGUF_MAX_NAME + 1];
    int32_t type;                /* ggml id: see core/quant.h; may be unknown */
    int n_dims;                  /* 1..4 */
    int64_t dims[GGUF_MAX_DIMS]; /* dims[0] varies fastest; each >= 1, 1 where missing */
    int shard;
    uint64_t offset;             /* of the first byte in the shard's file */
    size_t bytes;                /* 0: the type is unknown, so the size is too */
};

int gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor(const struct gguf *g, int i);             /* 0 <= i < gguf_n_tensors */
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name); /* NULL: absent. O(log n) */

/* Copies hostile bytes for a sentence or a terminal: printable UTF-8 stays, invalid bytes, control characters and marks
 * that turn the direction of text become \xNN; cut with "..." to fit dst[cap] (cap >= 8). Returns dst. */
const char *gguf_printable(char *dst, size_t cap, const char *src, size_t bytes);

#endif
