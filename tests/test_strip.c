/* test_strip.c: the strip layout loses nothing, has the documented place for every byte, and decodes like the file. */
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"
#include "tests/support.h"

#include <stdlib.h>
#include <string.h>

static const int types[] = {
#define X(name, id, elems, bytes, enc) id,
    QUANT_LIST(X)
#undef X
};
enum { N_TYPE = sizeof types / sizeof *types, GUARD = 0xa5 };

/* Random bytes; random scales may be NaN, so decoded values are compared as bits. */
static uint8_t *random_rows(int type, int64_t rows, int64_t cols, size_t *row_bytes, uint64_t seed) {
    assert_true(quant_row_bytes(row_bytes, type, cols));
    uint8_t *p = malloc((size_t)rows * *row_bytes);
    for (size_t i = 0; i < (size_t)rows * *row_bytes; i++) p[i] = (uint8_t)(test_rand(&seed) >> 24);
    return p;
}

/* Packs a whole matrix into freshly filled memory with a guard line after it. */
static uint8_t *pack(const struct strip_layout *l, int type, const uint8_t *src, int64_t rows, int64_t cols, size_t row) {
    uint8_t *data = aligned_alloc(STRIP_ALIGN, l->bytes + STRIP_ALIGN);
    memset(data, GUARD, l->bytes + STRIP_ALIGN);
    for (int64_t s = 0; s < l->n_strip; s++) {
        int64_t left = rows - s * STRIP_ROWS;
        strip_pack(l, type, data + (size_t)s * l->strip_bytes, src + (size_t)(s * STRIP_ROWS) * row, cols,
                   (int)(left < STRIP_ROWS ? left : STRIP_ROWS));
    }
    for (int i = 0; i < STRIP_ALIGN; i++) assert_int_equal(data[l->bytes + (size_t)i], GUARD);
    return data;
}

static void check_matrix(int type, int64_t rows, int64_t cols) {
    size_t row;
    struct strip_layout l;
    uint8_t *src = random_rows(type, rows, cols, &row, (uint64_t)(type * 1000 + rows));
    assert_true(strip_layout(&l, type, rows, cols));
    assert_int_equal(l.n_strip, (rows + 15) / 16);
    assert_int_equal(l.strip_bytes % STRIP_ALIGN, 0);
    assert_int_equal(l.bytes, (size_t)l.n_strip * l.strip_bytes);
    assert_true(l.strip_bytes <= align_up(16 * (row + 2), STRIP_ALIGN)); /* the same bytes per weight */
    uint8_t *data = pack(&l, type, src, rows, cols, row);
    uint8_t *back = malloc((size_t)rows * row);
    for (int64_t s = 0; s < l.n_strip; s++) {
        int64_t left = rows - s * STRIP_ROWS;
        strip_unpack(&l, type, back + (size_t)(s * STRIP_ROWS) * row, data + (size_t)s * l.strip_bytes, cols,
                     (int)(left < STRIP_ROWS ? left : STRIP_ROWS));
    }
    for (size_t i = 0; i < (size_t)rows * row; i++)
        if (back[i] != src[i])
            fail_msg("%s [%lld, %lld]: byte %zu came back as %d, expected %d", quant_name(type), (long long)rows,
                     (long long)cols, i, back[i], src[i]);
    float *got = malloc((size_t)cols * sizeof *got), *want = malloc((size_t)cols * sizeof *want);
    for (int64_t r = 0; r < rows; r++) {
        strip_decode_row(type, data, rows, cols, r, got);
        quant_decode_row(type, src + (size_t)r * row, want, cols);
        if (memcmp(got, want, (size_t)cols * sizeof *got))
            fail_msg("%s [%lld, %lld]: row %lld decodes differently from strips", quant_name(type), (long long)rows,
                     (long long)cols, (long long)r);
    }
    /* Rows that do not exist are zero. */
    const uint8_t *last = data + (size_t)(l.n_strip - 1) * l.strip_bytes;
    for (int64_t r = rows % STRIP_ROWS; r && r < STRIP_ROWS; r++)
        for (size_t w = 0; w < l.words_bytes / 64; w++)
            for (int i = 0; i < 4; i++) assert_int_equal(last[64 * w + 4 * (size_t)r + (size_t)i], 0);
    free(src), free(data), free(back), free(got), free(want);
}

static void round_trip_and_decode(void **state) {
    (void)state;
    static const int64_t rows[] = {1, 15, 16, 17, 33};
    for (int t = 0; t < N_TYPE; t++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            for (int n = 1; n <= 5; n += 2) check_matrix(types[t], rows[i], (int64_t)n * quant_info(types[t])->block_elems);
    for (int64_t cols = 126; cols < 132; cols++) {
        check_matrix(QT_F16, 17, cols);
        check_matrix(QT_F32, 17, cols);
        check_matrix(QT_BF16, 17, cols);
    }
}

/* The contract that streaming and GPU decoding rely on, spelled out for one type of each scale position. */
static void bytes_lie_where_documented(void **state) {
    (void)state;
    static const struct {
        int type, words_at, scale_at, scale_bytes;
    } cases[] = {{QT_Q4_0, 2, 0, 2}, {QT_Q8_0, 2, 0, 2}, {QT_Q6_K, 0, 208, 2}, {QT_Q3_K, 0, 108, 2},
                 {QT_MXFP4, 1, 0, 1}, {QT_TQ2_0, 0, 64, 2}, {QT_Q4_K, 0, 0, 0}, {QT_NVFP4, 0, 0, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const struct quant_info *q = quant_info(cases[c].type);
        const int64_t rows = 32, cols = 3 * q->block_elems;
        size_t row;
        struct strip_layout l;
        uint8_t *src = random_rows(q->type, rows, cols, &row, c);
        assert_true(strip_layout(&l, q->type, rows, cols));
        assert_int_equal(l.scale_bytes, cases[c].scale_bytes);
        uint8_t *data = pack(&l, q->type, src, rows, cols, row);
        for (int64_t r = 0; r < rows; r++)
            for (int b = 0; b < 3; b++) {
                const uint8_t *block = src + (size_t)r * row + (size_t)(b * q->block_bytes);
                const uint8_t *strip = data + (size_t)(r / 16) * l.strip_bytes;
                for (int w = 0; w < l.n_word; w++)
                    assert_memory_equal(strip + ((b * l.n_word + w) * 16 + r % 16) * 4, block + cases[c].words_at + 4 * w, 4);
                if (l.scale_bytes)
                    assert_memory_equal(strip + l.scales_off + (size_t)((b * 16 + r % 16) * l.scale_bytes),
                                        block + cases[c].scale_at, (size_t)l.scale_bytes);
            }
        free(src), free(data);
    }
}

static void refuses_what_it_cannot_lay_out(void **state) {
    (void)state;
    struct strip_layout l;
    assert_false(strip_layout(&l, QT_Q4_K, 16, 128));
    assert_false(strip_layout(&l, QT_Q4_0, 16, 33));
    assert_false(strip_layout(&l, QT_IQ2_XXS, 16, 256));
    assert_false(strip_layout(&l, 12345, 16, 256));
    assert_false(strip_layout(&l, -1, 16, 256));
    assert_false(strip_layout(&l, QT_F32, 0, 16));
    assert_false(strip_layout(&l, QT_F32, 16, 0));
    assert_false(strip_layout(&l, QT_F32, -5, 16));
    assert_false(strip_layout(&l, QT_F32, INT64_MAX, 2));
    assert_false(strip_layout(&l, QT_F32, 16, INT64_MAX));
    assert_false(strip_layout(&l, QT_F16, 16, INT64_MAX));
    assert_false(strip_layout(&l, QT_Q8_0, INT64_MAX / 2, 1 << 20));
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(round_trip_and_decode),
        cmocka_unit_test(bytes_lie_where_documented),
        cmocka_unit_test(refuses_what_it_cannot_lay_out),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
