/* support_gguf.h: GGUF files made up by a test: any metadata, tensors of any shape, holes for the data. */
#ifndef LH_TESTS_SUPPORT_GGUF_H
#define LH_TESTS_SUPPORT_GGUF_H

#include <stddef.h>
#include <stdint.h>

struct made_gguf {
    char *kv, *tensors;
    size_t kv_bytes, tensors_bytes;
    uint64_t n_kv, n_tensors, data_bytes;
};

/* Each call appends; a key given twice is written once, with the later value. */
void made_u32(struct made_gguf *f, const char *key, uint32_t v);
void made_f32(struct made_gguf *f, const char *key, float v);
void made_str(struct made_gguf *f, const char *key, const char *v);
void made_i32s(struct made_gguf *f, const char *key, const int32_t *v, int n);
void made_bools(struct made_gguf *f, const char *key, const uint8_t *v, int n);
void made_drop(struct made_gguf *f, const char *key);
/* dims end with 0. The data is a hole of zeros. */
void made_tensor(struct made_gguf *f, const char *name, int type, const int64_t *dims);
/* Writes the file (sparse) and returns `path`. */
const char *made_write(const struct made_gguf *f, const char *path);
void made_free(struct made_gguf *f);

#endif
