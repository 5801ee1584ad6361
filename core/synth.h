/* synth.h: stand-ins for models nobody has at hand: metadata, a small tokenizer and random weights for a built-in shape.
 * Such a model computes finite, well-spread nonsense at exactly the cost of the real one. Whatever is measured with it
 * must say so. */
#ifndef LH_CORE_SYNTH_H
#define LH_CORE_SYNTH_H

#include "core/gguf_write.h"
#include "core/mix.h"
#include "core/shape.h"

#include <stdint.h>

struct synth;

/* Random weights, the same for the same seed on every machine. Not thread-safe, but once a row of each type has been made,
 * rows of these types may be made by any thread. */
int synth_open(struct synth **out, uint64_t seed);
void synth_close(struct synth *s); /* NULL is fine */

/* dst = rows first .. first + n - 1 of tensor t, packed in its type (rows are dims[1] * dims[2] of dims[0] values each).
 * Matrices: normal with standard deviation SYNTH_SIGMA, quantised; norms 1; Gated DeltaNet parameters in the range that
 * trained ones have; llama 3.x RoPE divisors as published (from `shape`). A row does not depend on how rows are grouped
 * into calls. ERR_NOMEM, ERR_ARG. */
#define SYNTH_SIGMA 0.03f
int synth_rows(struct synth *s, void *dst, const struct shape *shape, const struct shape_tensor *t, int64_t first,
               int64_t n);

/* general.* and architecture keys that a loader asks for. n_layer as in shape_tensors. Errors stick to the writer. */
int synth_metadata(struct gguf_writer *w, const struct shape *shape, enum mix mix, int n_layer);

/* A byte-level BPE vocabulary of n_vocab tokens: 256 bytes, a few merges, three control tokens in ChatML, the rest unused
 * ("[PAD<id>]"). Any text has ids; n_vocab >= 300. */
int synth_tokenizer(struct gguf_writer *w, int n_vocab);

/* All tokenizer.* keys of another file; a vocabulary smaller than n_vocab is padded with unused tokens, a larger one is
 * ERR_ARG. */
int synth_copy_tokenizer(struct gguf_writer *w, const struct gguf *from, int n_vocab);

/* A shape as an opened file: its directory without a tokenizer, and weights that are made up as they are read. What reads
 * it must read whole rows. ERR_IO: no place for the directory, a few hundred KB in $TMPDIR or /tmp. */
int synth_gguf(struct gguf **out, const struct shape *shape, enum mix mix, uint64_t seed);

#endif
