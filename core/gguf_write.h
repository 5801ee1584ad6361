/* gguf_write.h: writes a GGUF file, version 3, alignment 32, tensors in order without holes.
 * Order of calls: open, metadata and tensor records in any mix, begin_data, data for every tensor in record order,
 * finish, close. The bytes go to PATH.tmp, which finish renames to PATH once they are all on the disk: PATH is never half
 * written, and a failed, unfinished or closed writer removes PATH.tmp. Disk space is reserved in begin_data where the
 * file system can, so that a full disk is found before the work and not after it.
 *
 * Functions return 0 or an error with a sentence; the first error sticks: later calls return it and do nothing, so a
 * caller may add many keys and look only at begin_data. ERR_IO, ERR_NOMEM, ERR_ARG (a key, name or shape that no reader
 * would accept, or calls out of order). One writer belongs to one thread at a time. */
#ifndef LH_CORE_GGUF_WRITE_H
#define LH_CORE_GGUF_WRITE_H

#include "core/gguf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf_writer;

/* Creates PATH.tmp. ERR_ARG: path exists and is not a regular file, or PATH.tmp is being written by someone else. */
int gguf_writer_open(struct gguf_writer **out, const char *path);

/* Releases everything; unless finish succeeded, PATH.tmp is removed and PATH is as it was. NULL is fine. */
void gguf_writer_close(struct gguf_writer *w);

/* Metadata. Keys are NUL-terminated and must not repeat; general.alignment must not be written. */

/* One value of a fixed-size type (enum gguf_type), read from *value. */
int gguf_writer_scalar(struct gguf_writer *w, const char *key, int type, const void *value);
int gguf_writer_u32(struct gguf_writer *w, const char *key, uint32_t v);
int gguf_writer_f32(struct gguf_writer *w, const char *key, float v);
int gguf_writer_bool(struct gguf_writer *w, const char *key, bool v);
int gguf_writer_str(struct gguf_writer *w, const char *key, const char *s, size_t bytes);

/* n elements of a fixed-size type, packed as in memory. */
int gguf_writer_arr(struct gguf_writer *w, const char *key, int elem_type, int64_t n, const void *data);

/* n strings: start the array, then add each one; all n must follow before any other call. */
int gguf_writer_str_arr(struct gguf_writer *w, const char *key, int64_t n);
int gguf_writer_str_elem(struct gguf_writer *w, const char *s, size_t bytes);

/* A value as it lies in another file. */
int gguf_writer_copy_kv(struct gguf_writer *w, const struct gguf_kv *kv);

/* A tensor record; type must be known to core/quant.h and dims[0] a multiple of its block. 1 <= n_dims <= 4. */
int gguf_writer_tensor(struct gguf_writer *w, const char *name, int type, int n_dims, const int64_t *dims);

/* Writes header, metadata and records. Nothing can be added afterwards. */
int gguf_writer_begin_data(struct gguf_writer *w);

/* The next bytes of the tensors, in pieces of any size; padding between tensors is put in here. ERR_ARG: more than the
 * records announced. */
int gguf_writer_data(struct gguf_writer *w, const void *p, size_t bytes);

/* Instead of begin_data and data: writes header, metadata and records, and leaves the tensors a hole that takes no disk
 * space and reads as zeros. finish comes next. */
int gguf_writer_leave_data(struct gguf_writer *w);

/* Flushes to the disk and renames. ERR_ARG: bytes are missing. After success only close may follow. */
int gguf_writer_finish(struct gguf_writer *w);

/* Size of the whole file; valid after begin_data. */
uint64_t gguf_writer_file_bytes(const struct gguf_writer *w);

#endif
