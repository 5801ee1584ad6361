/* quantize.h: writes a GGUF again with its matrices packed in another mix. */
#ifndef LH_OFFLOAD_QUANTIZE_H
#define LH_OFFLOAD_QUANTIZE_H

#include "core/gguf.h"
#include "core/mix.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One tensor, told before it is converted. */
struct quantize_step {
    int index, count; /* index from 0 */
    const struct gguf_tensor *from;
    int type; /* enum quant_type to write */
    size_t bytes;
    bool fallback; /* its rows do not fit the blocks of the type that the mix asks for */
};

struct quantize_params {
    enum mix mix;
    bool pure;             /* one type for all matrices */
    bool allow_requantize; /* from packed types too: loses twice */
    bool leave_output;     /* the output matrix keeps its type */
    int output_type;       /* enum quant_type of the output matrix, -1: as the mix says */
    int embedding_type;    /* the same for the token embedding */
    int threads;
    bool dry_run;                                                 /* tell the steps, write nothing */
    void (*on_step)(void *ctx, const struct quantize_step *step); /* ? called on the caller's thread */
    void *ctx;
    const volatile sig_atomic_t *stop; /* ? non-zero: give up soon with ERR_INTERRUPTED */
};

struct quantize_result {
    uint64_t params;               /* elements of all tensors */
    uint64_t bytes_from, bytes_to; /* of tensor data */
    int n_fallback;
};

/* Converts `from` (whole or split) to the single file `to`, which never exists half written: see core/gguf_write.h.
 * Metadata is copied, apart from file type, alignment and split keys. Tensors that must stay precise become F32, integer
 * tensors stay as they are. ERR_ARG: same file, or a packed source without allow_requantize. ERR_UNSUPPORTED: a source type
 * that cannot be decoded. ERR_NUMERIC: a weight that is not finite, with tensor and row. ERR_FORMAT, ERR_IO, ERR_NOMEM,
 * ERR_INTERRUPTED. */
int quantize_file(struct quantize_result *out, const char *from, const char *to, const struct quantize_params *p);

#endif
