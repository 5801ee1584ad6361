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
    const uint8_t *packed_rand; /* [n_rand, bytes] */
    const float *rand_values;   /* [n_rand, elems] */
    const float *source;        /* [n_row, row_elems] */
    const uint8_t *packed_rows; /* [n_row, row_elems / elems * bytes] */
    const float *row_values;    /* [n_row, row_elems] */
    const float *activation;    /* [row_elems] */
    const uint8_t *dot;         /* f64 [n_row], not aligned */
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
            fail_msg("%s %s: element %zu is %.9g (%08x), expected %.9g (%08x)", quant_name(type), what, i,
                     (double)got[i], f32_bits(got[i]), (double)f32_from_bits(w), w);
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

/* Known answers for decoding: block byte i is (37*i + 11) mod 256, then d = 0.125 and m or dmin = 0.0625 are written over it
 * (MXFP4: e = 126; NVFP4: scales 38 30 3c 07). sum = sum of y, wsum = sum of (i+1)*y[i]; unused elements are {0, y0} twice. */
struct known_decode {
    int type;
    double sum, wsum;
    struct {
        int at;
        float value;
    } y[9];
};

static const struct known_decode known_decodes[] = {
    {QT_Q4_0, -2.625, -64.75, {{0, -0.375}, {1, 0.25}, {15, -1}, {16, -0.375}, {31, 0}}},
    {QT_Q4_1, 32.625, 530.875, {{0, 1.9375}, {1, 0.5625}, {15, 1.3125}, {16, 1.1875}, {31, 1.5625}}},
    {QT_Q5_0, 1.875, 14, {{0, 1.125}, {1, -0.25}, {15, -1.5}, {16, 1.75}, {31, 0.125}}},
    {QT_Q5_1, 65.125, 1020.625, {{0, 2.4375}, {1, 3.0625}, {15, 3.8125}, {16, 2.4375}, {31, 0.6875}}},
    {QT_Q8_0, -22, -1010, {{0, 10.625}, {1, 15.25}, {15, -16}, {31, -6}}},
    {QT_Q2_K,
     257.375,
     30391.25,
     {{0, 4.125},
      {16, -0.1875},
      {32, 0.9375},
      {64, 1.3125},
      {100, 2.5},
      {127, 5.25},
      {128, 0.9375},
      {200, 1},
      {255, 0.5625}}},
    {QT_Q3_K,
     119.75,
     22143.125,
     {{0, 10.125}, {1, -13.5}, {32, -2.75}, {64, 4.25}, {127, 9}, {128, 0.25}, {200, 3.125}, {255, 5.25}}},
    {QT_Q4_K,
     6805,
     946605,
     {{0, 39.4375}, {1, -3.1875}, {32, 1}, {64, 52.5625}, {127, 10.125}, {128, 52.875}, {200, 17.3125}, {255, 6.0625}}},
    {QT_Q5_K,
     14527,
     2003431,
     {{0, 101.4375},
      {1, -3.1875},
      {32, 14},
      {64, 52.5625},
      {127, -0.375},
      {128, 130.875},
      {200, 17.3125},
      {255, 13.5625}}},
    {QT_Q6_K,
     576.5,
     98052.5,
     {{0, -178.875}, {1, 212}, {32, 28.875}, {64, -380}, {127, 187.5}, {128, -43.875}, {200, 136.125}, {255, -7.5}}},
    {QT_IQ4_NL, -32.125, -864.875, {{0, -4.375}, {1, 3.125}, {15, -15.875}, {31, 0.125}}},
    {QT_IQ4_XS, -1375.625, -261391.75, {{0, 8.125}, {32, 56.875}, {64, 97.5}, {127, 24.5}, {128, -73.125}, {255, -2}}},
    {QT_MXFP4, 6.25, 159.5, {{0, 0}, {1, 1.5}, {7, 0.75}, {15, -0.75}, {16, 0.75}, {31, 1.5}}},
    {QT_NVFP4, -28.924804688, -955.0537109, {{0, -6}, {1, 2}, {16, 3}, {32, -9}, {63, 0.0068359375}}},
    {QT_TQ2_0, 16.125, 2155.625, {{0, 0.25}, {1, -0.125}, {128, 0.25}, {255, -0.125}}},
};

/* Byte offsets of d and of m or dmin in a block, -1 when there is none. */
static void scale_offsets(int *d, int *m, int type) {
    *m = -1;
    *d = 0;
    switch (type) {
    case QT_Q4_1:
    case QT_Q5_1:
    case QT_Q4_K:
    case QT_Q5_K:
        *m = 2;
        break;
    case QT_Q2_K:
        *d = 80, *m = 82;
        break;
    case QT_Q3_K:
        *d = 108;
        break;
    case QT_Q6_K:
        *d = 208;
        break;
    case QT_TQ2_0:
        *d = 64;
        break;
    case QT_MXFP4:
    case QT_NVFP4:
        *d = -1;
        break;
    default:
        break;
    }
}

static void make_block(uint8_t *block, int type) {
    for (int i = 0; i < quant_info(type)->block_bytes; i++) block[i] = (uint8_t)(37 * i + 11);
    int d, m;
    scale_offsets(&d, &m, type);
    if (d >= 0) memcpy(block + d, (uint8_t[]){0x00, 0x30}, 2);
    if (m >= 0) memcpy(block + m, (uint8_t[]){0x00, 0x2c}, 2);
    if (type == QT_MXFP4) block[0] = 126;
    if (type == QT_NVFP4) memcpy(block, (uint8_t[]){0x38, 0x30, 0x3c, 0x07}, 4);
}

static void decode_known_blocks(void **s) {
    (void)s;
    for (size_t t = 0; t < sizeof known_decodes / sizeof *known_decodes; t++) {
        const struct known_decode *k = &known_decodes[t];
        const struct quant_info *q = quant_info(k->type);
        _Alignas(4) uint8_t block[QUANT_MAX_BLOCK_BYTES];
        float y[QUANT_MAX_BLOCK_ELEMS];
        make_block(block, k->type);
        quant_decode_row(k->type, block, y, q->block_elems);
        double sum = 0, wsum = 0;
        for (int i = 0; i < q->block_elems; i++) {
            sum += (double)y[i];
            wsum += (i + 1) * (double)y[i];
        }
        /* All products are exact; the table prints the two NVFP4 sums with ten digits. */
        if (fabs(sum - k->sum) > 1e-9 * fabs(k->sum) || fabs(wsum - k->wsum) > 1e-9 * fabs(k->wsum))
            fail_msg("%s: sums %.10g %.10g, expected %.10g %.10g", q->name, sum, wsum, k->sum, k->wsum);
        for (size_t i = 0; i < sizeof k->y / sizeof *k->y; i++) {
            if (i && k->y[i].at == 0) break;
            if (y[k->y[i].at] != k->y[i].value)
                fail_msg("%s: element %d is %.9g, expected %.9g", q->name, k->y[i].at, (double)y[k->y[i].at],
                         (double)k->y[i].value);
        }
    }
}

static void check_bytes(const char *what, const struct quant_info *q, const uint8_t *got, const uint8_t *want,
                        size_t n) {
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s %s: byte %zu of block %zu is %02x, expected %02x", q->name, what, i % (size_t)q->block_bytes,
                     i / (size_t)q->block_bytes, got[i], want[i]);
}

/* Known answers for encoding x[i] = (((i*7919) mod 1000) - 500) / 256: the first block. */
static const struct {
    int type;
    const char *hex;
} known_encodes[] = {
    {QT_Q8_0, "e023816a56412d1804efdac6b19d88725d48341f0bf6e2cdb8a48f7964503b2612fd"},
    {QT_Q4_0, "d033b0af9d7c6b5a382716f4e3d2c0af9e8d"},
    {QT_Q4_1, "1034d0bfb0ae8d7c6a59382715f4e3d2b0af9d8c"},
    {QT_Q5_0, "d02f7ee007fe704d1bf8c6a3704e2bf9d6a3715e2c09"},
    {QT_Q5_1, "dd2fd0bf7ee007fe604d1bf8c5a3704e2bf9c6a3715e2c09"},
    {QT_MXFP4, "7d5f471796c5d3e0fafc7e7e6f6f472706"},
    {QT_Q4_K, "131cdc27fffffcfffffefefdefcedf9c605e4d2c1a09e8d7c5a49382705f4d3c2b0af8d7c6b5a382716f5e3d2b1af9e83d2c"
              "1af9e8c7b5a49371605f4e2c1b0ae8d7c6a49382705f4e3d2b0af9d7c6b50af8d7c6b5a382716f4e3d2b1af9e8d6b5a49371"
              "605e4d2c1b09e8d7c5a49382d7c5b49382705f4d3c1b0af8e7c6b5a382716f4e3d2b0af9e8d6b5a49271605e"},
    {QT_Q5_K, "0918e927fffffcffffffffffeeefdfac94b5a5adad296b4a5a5a52d694b5b5a5ad296b4a4a5a52d69495b5a5ad292b6ad0ad"
              "8a583503d0ae8b583603e1be9b693614e1be9c694714f2cf9c7a4724f2cf7b4826f3c0ae7b582503d0af8c593604d1be8c69"
              "3604e1bf9d6a4715e2bf9d6a14e1bf9c6a4714f2cf9d7a4725f2c0ad7a5825f3d0ad8b583603d1be8b593604be8b683603e1"
              "be8b693604f1ce9c694714e2cf9c6a4714f2dfad7a5825f3d0ad"},
    {QT_Q6_K, "41faa550fba6510cb7621db8631cb76212c87d13c86e13e99e30e59b30e68b31ea9540fba651faa5500ba6510cb7620dda7f"
              "22c77d22c87d12c86d13f89d40e6379de2479cf2176cc1167bc0267bd02566b01b66b10b56b10c57a2fd4792fd488ed2378d"
              "e2379ce247acf2076cb0156bc01b65c01b65b01b65b00d57a20d57a2342727e3d2d29e9d8d89487874372723edddd1928286"
              "47777b38282cedddd1922d21627276b7878bc8d8dc1d2d2162727db98888c4d7d71322226e6d7db9b888807580778289858a"
              "7b837988767d747d0890"},
};

static void encode_known_block(void **s) {
    (void)s;
    float x[256];
    for (int i = 0; i < 256; i++) x[i] = (float)(i * 7919 % 1000 - 500) / 256;
    for (size_t t = 0; t < sizeof known_encodes / sizeof *known_encodes; t++) {
        const struct quant_info *q = quant_info(known_encodes[t].type);
        const char *hex = known_encodes[t].hex;
        uint8_t want[QUANT_MAX_BLOCK_BYTES];
        _Alignas(4) uint8_t got[QUANT_MAX_BLOCK_BYTES];
        assert_int_equal(strlen(hex), 2 * q->block_bytes);
        for (int i = 0; i < q->block_bytes; i++) {
            unsigned byte;
            assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
            want[i] = (uint8_t)byte;
        }
        assert_int_equal(quant_encode_row(q->type, x, got, q->block_elems), 0);
        check_bytes("known block", q, got, want, (size_t)q->block_bytes);
    }
}

/* Types whose quantiser is fixed to the byte by the format's reference; the other encodable ones search their own way. */
static bool is_exact(int type) {
    return type != QT_Q3_K && type != QT_IQ4_NL && type != QT_IQ4_XS;
}

/* Root of the summed squared error of rows decoded from `packed`. */
static double rms_error(int type, const void *packed, const float *source, int64_t n) {
    float *y = malloc((size_t)n * sizeof *y);
    quant_decode_row(type, packed, y, n);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += ((double)y[i] - (double)source[i]) * ((double)y[i] - (double)source[i]);
    free(y);
    return sqrt(sum);
}

static void check_encode(const struct quant_info *q) {
    struct vectors v;
    vectors_open(&v, q->name);
    int64_t n = (int64_t)v.n_row * v.row_elems;
    size_t bytes;
    assert_true(quant_row_bytes(&bytes, q->type, n));
    uint8_t *got = malloc(bytes);
    assert_int_equal(quant_encode_row(q->type, v.source, got, n), 0);
    if (is_exact(q->type)) {
        check_bytes("rows", q, got, v.packed_rows, bytes);
    } else {
        /* A search of our own must be at least as good as the reference's. Per row, so that a bad one cannot hide behind
         * the large-valued row. */
        for (int r = 0; r < v.n_row; r++) {
            size_t at = bytes / (size_t)v.n_row * (size_t)r;
            const float *x = v.source + (size_t)r * (size_t)v.row_elems;
            double ours = rms_error(q->type, got + at, x, v.row_elems);
            double ref = rms_error(q->type, v.packed_rows + at, x, v.row_elems);
            if (!(ours <= ref)) fail_msg("%s: row %d has error %g, the reference quantiser %g", q->name, r, ours, ref);
        }
    }
    free(got);
    free(v.file);
}

static void encode_equals_reference(void **s) {
    (void)s;
    int n = 0;
    for (int type = 1; type < QT_END; type++)
        if (quant_info(type) && quant_info(type)->encodable) {
            check_encode(quant_info(type));
            n++;
        }
    assert_true(n >= 15);
}

/* Zeros of both signs, constants, subnormals, tiny and huge values, a lone value: encoded without trapping, decoded close. */
static void encode_awkward_blocks(void **s) {
    (void)s;
    static const float amax[7] = {0, 0, 1, 1e-42f, 1e-20f, 65504, 1};
    uint64_t seed = 7;
    float x[256], y[256];
    for (int type = 0; type < QT_END; type++) {
        const struct quant_info *q = quant_info(type);
        if (!q || !q->encodable) continue;
        size_t bytes;
        assert_true(quant_row_bytes(&bytes, type, 256));
        uint8_t *packed = malloc(bytes); /* exact size: a sanitizer sees any byte beyond */
        for (int kind = 0; kind < 7; kind++) {
            for (int i = 0; i < 256; i++) {
                float u = test_uniform(&seed, -1, 1);
                const float v[7] = {0, -0.0f, 1, u * 1e-42f, u * 1e-20f, u * 65504, i == 77 ? u : 0};
                x[i] = v[kind];
            }
            assert_int_equal(quant_encode_row(type, x, packed, 256), 0);
            quant_decode_row(type, packed, y, 256);
            /* Half a step of the coarsest type, 2 bits over -1..1 with a 4-bit scale: 0.37; the constant 2^-24 is the
             * smallest f16 scale. */
            for (int i = 0; i < 256; i++)
                if (!(fabsf(y[i] - x[i]) <= 0.37f * amax[kind] + 0x1p-24f))
                    fail_msg("%s kind %d: element %d is %g, source %g", q->name, kind, i, (double)y[i], (double)x[i]);
        }
        free(packed);
    }
}

static void encode_refuses(void **s) {
    (void)s;
    float x[256] = {0};
    uint8_t block[QUANT_MAX_BLOCK_BYTES];
    assert_int_equal(quant_encode_row(QT_Q4_K, x, block, 128), ERR_ARG);
    assert_int_equal(quant_encode_row(QT_IQ2_XS, x, block, 256), ERR_ARG);
    assert_int_equal(quant_encode_row(-1, x, block, 256), ERR_ARG);
    x[200] = NAN;
    assert_int_equal(quant_encode_row(QT_Q4_K, x, block, 256), ERR_NUMERIC);
    assert_non_null(strstr(err_text(), "value 200"));
    x[200] = -INFINITY;
    assert_int_equal(quant_encode_row(QT_Q8_0, x, block, 256), ERR_NUMERIC);
}

static void names_and_sizes(void **s) {
    (void)s;
    size_t bytes = 7;
    assert_int_equal(quant_from_name("q4_k"), QT_Q4_K);
    assert_int_equal(quant_from_name("iq2_XXS"), QT_IQ2_XXS);
    assert_int_equal(quant_from_name("q4_k_m"), -1);
    assert_int_equal(quant_from_name(""), -1);
    assert_null(quant_info(4));
    assert_null(quant_info(43));
    assert_null(quant_info(-1));
    assert_null(quant_info((1LL << 32) + QT_Q4_K));
    assert_false(quant_info(QT_IQ3_S)->decodable);
    assert_string_equal(quant_name(31), "unknown");
    assert_true(quant_row_bytes(&bytes, QT_Q6_K, 512));
    assert_int_equal(bytes, 420);
    assert_false(quant_row_bytes(&bytes, QT_Q6_K, 384));
    assert_false(quant_row_bytes(&bytes, QT_F32, -1));
    assert_false(quant_row_bytes(&bytes, QT_F64, INT64_MAX));
    assert_false(quant_row_bytes(&bytes, 5, 256));
    assert_int_equal(bytes, 420);
}

/* Every binary16 value, and every rounding boundary around it, against arithmetic in double. */
static void f16_rounds_to_nearest_even(void **s) {
    (void)s;
    for (int h = 0; h < 0x10000; h++) {
        int e = (h >> 10) & 31, m = h & 1023;
        float f = f16_to_f32((uint16_t)h);
        if (e == 31) {
            assert_true(m ? isnan(f) : isinf(f));
            assert_int_equal(f32_to_f16(f) & 0xfc00, h & 0xfc00);
            assert_int_equal(!(f32_to_f16(f) & 1023), !m);
            continue;
        }
        double want = (e ? ldexp(1024 + m, e - 25) : ldexp(m, -24)) * (h & 0x8000 ? -1 : 1);
        if ((double)f != want || !signbit(f) != !(h >> 15)) fail_msg("f16 %04x is %g, expected %g", h, (double)f, want);
        assert_int_equal(f32_to_f16(f), h);
        if ((h & 0x7fff) == 0x7bff) continue;
        /* Halfway to the next larger magnitude: ties to the even one, and one f32 step to either side decides. */
        float next = f16_to_f32((uint16_t)(h + 1)), mid = (float)(((double)f + (double)next) / 2);
        assert_int_equal(f32_to_f16(mid), h & 1 ? h + 1 : h);
        assert_int_equal(f32_to_f16(nextafterf(mid, 0)), h);
        assert_int_equal(f32_to_f16(nextafterf(mid, next)), h + 1);
    }
    assert_int_equal(f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(f32_to_f16(65520), 0x7c00);
    assert_int_equal(f32_to_f16(-INFINITY), 0xfc00);
}

static void bf16_rounds_to_nearest_even(void **s) {
    (void)s;
    uint64_t seed = 1;
    for (int i = 0; i < 100000; i++) {
        uint32_t u = (uint32_t)test_rand(&seed);
        float f = f32_from_bits(u), g = bf16_to_f32(f32_to_bf16(f));
        if (isnan(f)) {
            assert_true(isnan(g));
            continue;
        }
        float lo = f32_from_bits(u & 0xffff0000u), hi = f32_from_bits((u & 0xffff0000u) + 0x10000u);
        uint32_t rest = u & 0xffff, odd = (u >> 16) & 1;
        float want = rest > 0x8000 || (rest == 0x8000 && odd) ? hi : lo;
        if (f32_bits(g) != f32_bits(want))
            fail_msg("bf16 of %08x is %08x, expected %08x", u, f32_bits(g), f32_bits(want));
    }
}

#ifdef __x86_64__
#include <immintrin.h>

__attribute__((target("f16c"))) static void compare_with_f16c(void) {
    uint64_t seed = 2;
    for (int h = 0; h < 0x10000; h++)
        assert_int_equal(f32_bits(f16_to_f32_soft((uint16_t)h)), f32_bits(_cvtsh_ss((uint16_t)h)));
    for (int i = 0; i < 1000000; i++) {
        uint32_t u = (uint32_t)test_rand(&seed);
        if (i & 1) u = (u & 0x80ffffffu) | ((0x38u + (u >> 24 & 15)) << 24); /* the range that binary16 covers */
        uint16_t soft = f32_to_f16_soft(f32_from_bits(u));
        uint16_t hard = (uint16_t)_cvtss_sh(f32_from_bits(u), _MM_FROUND_TO_NEAREST_INT);
        if (soft != hard) fail_msg("f16 of %08x is %04x, the instruction says %04x", u, soft, hard);
    }
}

static void f16_equals_the_instruction(void **s) {
    (void)s;
    if (!__builtin_cpu_supports("f16c")) skip();
    compare_with_f16c();
}
#endif

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(decode_equals_reference),
        cmocka_unit_test(decode_known_blocks),
        cmocka_unit_test(encode_known_block),
        cmocka_unit_test(encode_equals_reference),
        cmocka_unit_test(encode_awkward_blocks),
        cmocka_unit_test(encode_refuses),
        cmocka_unit_test(names_and_sizes),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
#ifdef __x86_64__
        cmocka_unit_test(f16_equals_the_instruction),
#endif
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
