/* strip.h: the home layout of weight matrices, one for CPU kernels, streaming and GPU decoding.
 *
 * A strip is 16 consecutive rows. Each row's GGUF bytes are a sequence of blocks; a block is a sequence of 32-bit words,
 * plus two (one) bytes when its size is not a multiple of four: those are always the block's scale. A strip stores
 *   words   [n_block][n_word][16]  u32: word w of block b of the 16 rows, side by side (64 bytes)
 *   scales  [n_block][16]          u16 (f16 d; types with 4k+2 bytes) or u8 (MXFP4's exponent), in a plane of its own
 * each plane padded to 64 bytes. Nothing inside a word is changed: the layout is a transposition, its own inverse, and
 * costs the same bytes per weight. Sixteen rows side by side let one vector lane (or one GPU lane) own a row: no
 * horizontal sums, scales are vector loads, every load is 64 bytes and aligned.
 * Types of 1 element a block (F32, F16, BF16) use 1, 2, 2 elements a word; an odd column count is padded with zero.
 * Rows are padded with zero rows to a multiple of 16; strips follow each other. Matrices of a stack (experts) follow each
 * other, each padded by itself.
 * For types whose scale does not come last or first in the GGUF block, the words keep the order of the remaining bytes. */
#ifndef LH_CORE_STRIP_H
#define LH_CORE_STRIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STRIP_ROWS = 16, STRIP_ALIGN = 64 };

struct strip_layout {
    int64_t n_block;     /* per row */
    int n_word;          /* u32 words per block and row */
    int scale_bytes;     /* 0, 1 or 2 per block and row */
    size_t words_bytes;  /* of the words plane, padded */
    size_t scales_off;   /* of the scales plane in a strip */
    size_t strip_bytes;  /* whole strip, a multiple of STRIP_ALIGN */
    int64_t n_strip;
    size_t bytes;        /* n_strip * strip_bytes */
};

/* false: type not decodable, cols not a multiple of its block, or overflow. */
bool strip_layout(struct strip_layout *out, int type, int64_t rows, int64_t cols);

/* Packs n_row (1..16) rows of GGUF bytes into one strip (zero rows after them), and back. `src`: rows side by side as
 * in the file. Thread-safe; no allocation. */
void strip_pack(const struct strip_layout *l, int type, void *strip, const void *src, int64_t cols, int n_row);
void strip_unpack(const struct strip_layout *l, int type, void *dst, const void *strip, int64_t cols, int n_row);

/* Decodes row `row` of a matrix in strips to f32 [cols]. */
void strip_decode_row(int type, const void *data, int64_t rows, int64_t cols, int64_t row, float *dst);

#endif
