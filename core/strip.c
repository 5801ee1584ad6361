/* strip.c: packing, unpacking and row access of the strip layout. See strip.h. */
#include "core/strip.h"

#include "core/mem.h"
#include "core/quant.h"

#include <assert.h>
#include <string.h>

enum { MAX_WORDS = QUANT_MAX_BLOCK_BYTES / 4 };

/* Where a block keeps what goes to the scales plane. The other bytes, in order, are its words. */
static bool scale_is_last(int type) { return type == QT_Q3_K || type == QT_Q6_K || type == QT_TQ2_0; }

/* One element a block means that the strip's block is one word of the row, holding 1 or 2 elements. */
static bool is_plain(const struct quant_info *q) { return q->block_elems == 1; }

bool strip_layout(struct strip_layout *out, int type, int64_t rows, int64_t cols) {
    const struct quant_info *q = quant_info(type);
    if (!q || !q->decodable || rows < 1 || cols < 1 || cols % q->block_elems) return false;
    struct strip_layout l = {0};
    if (is_plain(q)) {
        int per_word = 4 / q->block_bytes;
        l.n_block = cols / per_word + (cols % per_word != 0);
        l.n_word = 1;
    } else {
        l.n_block = cols / q->block_elems;
        l.n_word = q->block_bytes / 4;
        l.scale_bytes = q->block_bytes % 4;
    }
    assert(l.scale_bytes != 3);
    l.n_strip = rows / STRIP_ROWS + (rows % STRIP_ROWS != 0);
    size_t scales;
    if (!size_mul(&l.words_bytes, (size_t)l.n_block, (size_t)l.n_word * 4 * STRIP_ROWS)) return false;
    if (!size_mul(&scales, (size_t)l.n_block, (size_t)l.scale_bytes * STRIP_ROWS)) return false;
    if (!size_align_up(&scales, scales, STRIP_ALIGN)) return false;
    l.scales_off = l.words_bytes; /* words are 64 bytes each already */
    if (!size_add(&l.strip_bytes, l.words_bytes, scales)) return false;
    if (!size_mul(&l.bytes, (size_t)l.n_strip, l.strip_bytes)) return false;
    *out = l;
    return true;
}

/* Bytes of one row in the file. */
static size_t row_bytes(int type, int64_t cols) {
    size_t bytes = 0;
    bool ok = quant_row_bytes(&bytes, type, cols);
    assert(ok);
    (void)ok;
    return bytes;
}

struct block_shape {
    int bytes, words_at, scale_at; /* of a block in the file */
};

static struct block_shape block_shape(const struct strip_layout *l, int type) {
    struct block_shape s = {.bytes = 4 * l->n_word + l->scale_bytes};
    if (scale_is_last(type)) s.scale_at = 4 * l->n_word;
    else s.words_at = l->scale_bytes;
    return s;
}

void strip_pack(const struct strip_layout *l, int type, void *strip, const void *src, int64_t cols, int n_row) {
    assert(n_row >= 1 && n_row <= STRIP_ROWS);
    size_t row = row_bytes(type, cols);
    struct block_shape s = block_shape(l, type);
    /* An odd 16-bit column leaves half a word: all blocks but that one can be copied whole. */
    int64_t whole = (int64_t)(row / (size_t)s.bytes);
    uint8_t *words = strip, *scales = words + l->scales_off;
    if (n_row < STRIP_ROWS || whole < l->n_block) memset(strip, 0, l->words_bytes);
    memset(scales, 0, l->strip_bytes - l->scales_off);
    for (int64_t b = 0; b < whole; b++) {
        const uint8_t *block = (const uint8_t *)src + (size_t)b * (size_t)s.bytes;
        for (int w = 0; w < l->n_word; w++, words += 4 * STRIP_ROWS)
            for (int r = 0; r < n_row; r++) memcpy(words + 4 * r, block + (size_t)r * row + s.words_at + 4 * w, 4);
        for (int r = 0; r < n_row && l->scale_bytes; r++)
            memcpy(scales + r * l->scale_bytes, block + (size_t)r * row + s.scale_at, (size_t)l->scale_bytes);
        scales += STRIP_ROWS * l->scale_bytes;
    }
    size_t tail = row - (size_t)whole * (size_t)s.bytes;
    for (int r = 0; r < n_row && tail; r++)
        memcpy(words + 4 * r, (const uint8_t *)src + (size_t)(r + 1) * row - tail, tail);
}

void strip_unpack(const struct strip_layout *l, int type, void *dst, const void *strip, int64_t cols, int n_row) {
    assert(n_row >= 1 && n_row <= STRIP_ROWS);
    size_t row = row_bytes(type, cols);
    struct block_shape s = block_shape(l, type);
    int64_t whole = (int64_t)(row / (size_t)s.bytes);
    const uint8_t *words = strip, *scales = words + l->scales_off;
    for (int64_t b = 0; b < whole; b++) {
        uint8_t *block = (uint8_t *)dst + (size_t)b * (size_t)s.bytes;
        for (int w = 0; w < l->n_word; w++, words += 4 * STRIP_ROWS)
            for (int r = 0; r < n_row; r++) memcpy(block + (size_t)r * row + s.words_at + 4 * w, words + 4 * r, 4);
        for (int r = 0; r < n_row && l->scale_bytes; r++)
            memcpy(block + (size_t)r * row + s.scale_at, scales + r * l->scale_bytes, (size_t)l->scale_bytes);
        scales += STRIP_ROWS * l->scale_bytes;
    }
    size_t tail = row - (size_t)whole * (size_t)s.bytes;
    for (int r = 0; r < n_row && tail; r++) memcpy((uint8_t *)dst + (size_t)(r + 1) * row - tail, words + 4 * r, tail);
}

/* Rows of plain types: words gathered into a small buffer, which then is a piece of a row as in the file. */
static void decode_plain_row(int type, const uint8_t *words, int64_t cols, float *dst) {
    const struct quant_info *q = quant_info(type);
    int per_word = 4 / q->block_bytes;
    uint32_t piece[64];
    while (cols > 0) {
        int64_t n = cols < 64 * per_word ? cols : 64 * per_word;
        for (int64_t i = 0; i * per_word < n; i++, words += 4 * STRIP_ROWS) memcpy(&piece[i], words, 4);
        quant_decode_row(type, piece, dst, n);
        dst += n, cols -= n;
    }
}

void strip_decode_row(int type, const void *data, int64_t rows, int64_t cols, int64_t row, float *dst) {
    struct strip_layout l;
    bool ok = strip_layout(&l, type, rows, cols);
    assert(ok && row >= 0 && row < rows);
    (void)ok;
    const uint8_t *strip = (const uint8_t *)data + (size_t)(row / STRIP_ROWS) * l.strip_bytes;
    int r = (int)(row % STRIP_ROWS);
    const uint8_t *words = strip + 4 * r;
    const struct quant_info *q = quant_info(type);
    if (is_plain(q)) {
        decode_plain_row(type, words, cols, dst);
        return;
    }
    struct block_shape s = block_shape(&l, type);
    uint8_t block[4 * MAX_WORDS];
    for (int64_t b = 0; b < l.n_block; b++, dst += q->block_elems) {
        for (int w = 0; w < l.n_word; w++, words += 4 * STRIP_ROWS) memcpy(block + s.words_at + 4 * w, words, 4);
        memcpy(block + s.scale_at, strip + l.scales_off + (size_t)(b * STRIP_ROWS + r) * (size_t)l.scale_bytes,
               (size_t)l.scale_bytes);
        quant_decode_row(type, block, dst, q->block_elems);
    }
}
