/* test_quant.c: packed types against vectors made with the reference library (tests/data/quants, layout in
 * tests/data/README.md) and against known answers computed by hand or by that library. */
#include "core/err.h"
#include "core/f16.h"
#include "core/quant.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct vectors {
    char *file;
    int type, elems, bytes, n_rand, n_row, row_elems;
    const uint8_t *packed_rand;     /* [n_rand, bytes] */
    const float *rand_values;       /* [n_rand, elems] */
    const float *source;            /* [n_row, row_elems] */
    const uint8_t *packed_rows;     /* [n_row, row_elems / elems * bytes] */
    const float *row_values;        /* [n_row, row_elems] */
    const float *activation;        /* [row_elems] */
    const uint8_t *dot;             /* f64 [n_row], not aligned */
};

static void vectors_open(struct vectors *v, const char *type_name) {
    char name[64];
    snprintf(name, sizeof name, "quants/%s.qtv", type_name);
    size_t total;
    v->file = test_read(name, &total);
    uint32_t h[8];
    memcpy(h, v->file, sizeof h);
    assert_memory_equal(v->file, "QTV1", 4);
    v->type = (int)h[1], v->elems = (int)h[2], v->bytes = (int)h[3];
    v->n_rand = (int)h[4], v->n_row = (int)h[5], v->row_elems = (int)h[6];
    const char *p = v->file + sizeof h;
    size_t rows = (size_t)v->n_row * (size_t)v->row_elems;
    v->packed_rand = (const uint8_t *)p, p += (size_t)v->n_rand * (size_t)v->bytes;
    v->rand_values = (const float *)p, p += (size_t)v->n_rand * (size_t)v->elems * 4;
    v->source = (const float *)p, p += rows * 4;
    v->packed_rows = (const uint8_t *)p, p += rows / (size_t)v->elems * (size_t)v->bytes;
    v->row_values = (const float *)p, p += rows * 4;
    v->activation = (const float *)p, p += (size_t)v->row_elems * 4;
    v->dot = (const uint8_t *)p, p += (size_t)v->n_row * 8;
    assert_int_equal(p - v->file, total);
}

static void same_bits(const char *what, int type, const float *got, const void *want, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t w;
        memcpy(&w, (const char *)want + 4 * i, 4);
        if (f32_bits(got[i]) != w)
            fail_msg("%s %s: element %zu is %.9g (%08x), expected %.9g (%08x)", quant_name(type), what, i, (double)got[i],
                     f32_bits(got[i]), (double)f32_from_bits(w), w);
    }
}

static void check_decode(const char *name, int type, int elems, int bytes) {
    struct vectors v;
    vectors_open(&v, name);
    assert_int_equal(v.type, type);
    assert_int_equal(v.elems, elems);
    assert_int_equal(v.bytes, bytes);
    size_t n = (size_t)v.n_rand * (size_t)elems, rows = (size_t)v.n_row * (size_t)v.row_elems;
    float *y = malloc((n > rows ? n : rows) * sizeof *y);
    quant_decode_row(type, v.packed_rand, y, (int64_t)n);
    same_bits("random blocks", type, y, v.rand_values, n);
    quant_decode_row(type, v.packed_rows, y, (int64_t)rows);
    same_bits("rows", type, y, v.row_values, rows);
    for (int r = 0; r < v.n_row; r++) {
        double sum = 0, size = 0, want;
        for (int i = 0; i < v.row_elems; i++) {
            float a;
            memcpy(&a, v.activation + i, 4);
            double p = (double)y[(size_t)r * (size_t)v.row_elems + (size_t)i] * (double)a;
            sum += p, size += fabs(p);
        }
        memcpy(&want, v.dot + 8 * r, 8);
        /* Both sums are f64 over exact f64 products: only their order can differ, n * 2^-53 of the absolute sum. */
        double tol = size * v.row_elems * 0x1p-53;
        if (fabs(sum - want) > tol)
            fail_msg("%s: dot of row %d is %.17g, expected %.17g, tolerance %.3g", name, r, sum, want, tol);
    }
    free(y);
    free(v.file);
}

static void decode_equals_reference(void **s) {
    (void)s;
#define X(name, id, elems, bytes, enc)                                                                                 \
    if (id != QT_F32) check_decode(#name, id, elems, bytes);
    QUANT_LIST(X)
#undef X
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(decode_equals_reference),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
