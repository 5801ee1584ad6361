/* gguf_scan.h: reads one GGUF file's header, metadata and tensor records. Used by core/gguf.c only. */
#ifndef LH_CORE_GGUF_SCAN_H
#define LH_CORE_GGUF_SCAN_H

#include "core/gguf.h"

/* One file's metadata. `bytes` is our copy of the directory; keys and values point into it. */
struct gguf_dir {
    uint8_t *bytes;
    int version;
    uint64_t alignment;
    struct gguf_kv *kvs;
    int n_kv;
    uint32_t *order; /* [n_kv] indices sorted by key: a lookup no file can make slow, unlike a hash table */
};

/* Growing list of tensors; records of further shards are appended. */
struct gguf_tensors {
    struct gguf_tensor *v;
    int n, cap;
};

/* Reads the directory of the open file `fd` of `file_bytes` bytes and appends its tensors with `shard` filled in.
 * Offsets are absolute and checked: inside the file, aligned, no two tensors share a byte. Duplicate keys are refused;
 * duplicate tensor names are the caller's check. On failure *dir is as after gguf_dir_free. */
int gguf_scan(struct gguf_dir *dir, struct gguf_tensors *tensors, int fd, uint64_t file_bytes, const char *path, int shard);
void gguf_dir_free(struct gguf_dir *dir);
const struct gguf_kv *gguf_dir_find(const struct gguf_dir *dir, const char *key);

#endif
