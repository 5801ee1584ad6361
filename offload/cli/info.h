/* info.h: the facts of a GGUF file that `longhaul info` shows. info.c gathers them, cmd_info.c prints them. */
#ifndef LH_OFFLOAD_CLI_INFO_H
#define LH_OFFLOAD_CLI_INFO_H

#include "core/gguf.h"
#include "core/model.h"
#include "core/tokenizer.h"

enum { INFO_TYPES = 64, INFO_KV = 5 };

/* Tensors of one type. */
struct info_type {
    int32_t type;
    int n_tensor;
    uint64_t n_weight, bytes; /* bytes 0: unknown type */
};

struct info {
    struct gguf *g;
    uint64_t file_bytes; /* of all parts */
    char arch[64], name[128], family[64]; /* printable; "" where absent. family: of the chat template */
    bool runs;           /* model_open accepts the file */
    char why[1024];      /* why it does not run; "" if it does */
    struct model m;      /* if it runs */
    struct info_type types[INFO_TYPES];
    int n_type;
    uint64_t n_weight, tensor_bytes;
    int n_unread;        /* tensors that the model does not use; 0 if it does not run */
    /* As the file says, for architectures that do not run; -1: no such key. */
    int64_t n_layer, dim, n_ff, n_head, n_kv, n_ctx, n_expert, n_expert_used;
    struct tokenizer *tok; /* NULL: the file has none, or one that is not supported */
    char tok_why[1024];    /* why it is not supported */
    char tok_model[64], tok_pre[64];
    int64_t n_merges;
    int64_t template_bytes; /* -1: no chat template */
    /* Bytes of KV of one position in all layers and, where it differs, in the layers without a window only (what a position
     * beyond the window adds). 0: the type cannot hold these heads. */
    struct {
        int type;
        double all, global;
    } kv[INFO_KV];
};

/* ERR_FORMAT: the file, or what a known architecture or tokenizer needs in it, is not sound. */
int info_open(struct info *i, const char *path);
void info_close(struct info *i);

#endif
