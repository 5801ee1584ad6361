/* test_matmul.c: weight kernels of every usable instruction set against the arithmetic contract, and what must not change a
 * result: other tokens of the call, the number of threads, how a call is cut. */
#include "core/err.h"
#include "core/f16.h"
#include "core/quant.h"
#include "core/strip.h"
#include "cpu/impl.h"
#include "cpu/kern_matmul.h"
#include "tests/ref.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int types[] = {
#define X(name, id, elems, bytes, enc) id,
    QUANT_LIST(X)
#undef X
};
enum { N_TYPE = sizeof types / sizeof *types, MAX_TOK = 33, GUARD = 64 };

/* y = silu(gate) * up: experts call it through the table, and this test opens only the matmul family. */
static int plain_glu(struct ops *o, float *y, const float *gate, const float *up, int64_t n, enum act act) {
    (void)o, (void)act;
    for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    return 0;
}

static struct cpu *open_cpu(enum isa isa, int n_thread, int n_tok, int64_t rows, int64_t cols) {
    struct cpu *c = calloc(1, sizeof *c);
    c->opts =
        (struct cpu_opts){.n_thread = n_thread,
                          .isa = isa,
                          .limits = {.n_tok = n_tok, .rows = rows, .cols = cols, .n_expert = 8, .n_expert_used = 4}};
    c->ops.glu = plain_glu;
    assert_int_equal(pool_open(&c->pool, n_thread, NULL, 0), 0);
    assert_int_equal(matmul_open(c), 0);
    return c;
}

static void close_cpu(struct cpu *c) {
    matmul_close(c);
    pool_close(c->pool);
    free(c);
}

/* Tokens of every kind: ordinary, zero, very large, one spike per 32, tiny. */
static float *random_tokens(int n_tok, int64_t cols, uint64_t seed) {
    float *x = malloc((size_t)(n_tok * cols) * sizeof *x);
    for (int t = 0; t < n_tok; t++)
        for (int64_t i = 0; i < cols; i++) {
            float v = test_normal(&seed);
            switch (t % 8) {
            case 3:
                v = 0;
                break;
            case 4:
                v *= 1e4f;
                break;
            case 5:
                v = i % 32 == 7 ? 1e4f : v * 1e-3f;
                break;
            case 6:
                v = i / 32 % 2 ? v : 0;
                break;
            case 7:
                v *= i / 32 % 2 ? 1e-30f : 3e-43f; /* the scale of the latter is subnormal */
                break;
            default:
                break;
            }
            x[t * cols + i] = v;
        }
    return x;
}

struct shape {
    int64_t rows, cols;
};

struct problem {
    int type;
    struct shape shape;
    void *file, *strips;
    float *x, *bias;
    double *want, *size;
};

static void problem_open(struct problem *p, int type, struct shape s) {
    uint64_t seed = (uint64_t)(type * 7919 + s.rows * 31 + s.cols);
    *p = (struct problem){.type = type, .shape = s};
    p->file = ref_random_rows(type, s.rows, s.cols, seed);
    p->strips = ref_strips(type, p->file, s.rows, s.cols);
    p->x = random_tokens(MAX_TOK, s.cols, seed + 1);
    p->bias = malloc((size_t)s.rows * sizeof(float));
    for (int64_t r = 0; r < s.rows; r++) p->bias[r] = test_normal(&seed);
    p->want = malloc((size_t)(MAX_TOK * s.rows) * sizeof(double));
    p->size = malloc((size_t)(MAX_TOK * s.rows) * sizeof(double));
    ref_matmul_contract(p->want, p->size, type, p->file, s.rows, s.cols, p->x, MAX_TOK, p->bias);
}

static void problem_close(struct problem *p) {
    free(p->file), free(p->strips), free(p->x), free(p->bias), free(p->want), free(p->size);
}

/* y of tokens t0..t0+n-1 with guards around it, checked. */
static float *multiply(struct cpu *c, const struct problem *p, int t0, int n) {
    struct mat w = {p->strips, p->type, p->shape.rows, p->shape.cols};
    size_t count = (size_t)(n * p->shape.rows);
    float *y = malloc((count + GUARD) * sizeof *y);
    for (size_t i = 0; i < count + GUARD; i++) y[i] = 12345;
    struct matmul m = {
        .x = p->x + t0 * p->shape.cols, .cols = p->shape.cols, .n_tok = n, .n = 1, .out = {{&w, y, p->bias}}};
    assert_int_equal(c->ops.matmul(&c->ops, &m), 0);
    for (size_t i = count; i < count + GUARD; i++)
        if (y[i] != 12345) fail_msg("%s: wrote past the end of y at %zu", quant_name(p->type), i - count);
    return y;
}

static const char *describe(const struct cpu *c, const struct problem *p, int n) {
    static char s[160];
    snprintf(s, sizeof s, "%s %s [%lld, %lld] n %d, %d threads", isa_name(c->opts.isa), quant_name(p->type),
             (long long)p->shape.rows, (long long)p->shape.cols, n, c->opts.n_thread);
    return s;
}

static void check_contract(const struct cpu *c, const struct problem *p, const float *y, int n) {
    double tol = ref_matmul_tolerance(p->type, p->shape.cols);
    for (int64_t i = 0; i < n * p->shape.rows; i++) {
        double bound = tol * p->size[i] + 3e-45 * (double)p->shape.cols; /* below that f32 has no digits */
        if (!(fabs((double)y[i] - p->want[i]) <= bound))
            fail_msg("%s: token %lld row %lld is %.9g, expected %.9g, tolerance %.3g", describe(c, p, n),
                     (long long)(i / p->shape.rows), (long long)(i % p->shape.rows), (double)y[i], p->want[i], bound);
    }
}

static void check_same(const struct cpu *c, const struct problem *p, const float *y, const float *all, int t0, int n) {
    const float *want = all + t0 * p->shape.rows;
    for (int64_t i = 0; i < n * p->shape.rows; i++)
        if (f32_bits(y[i]) != f32_bits(want[i]))
            fail_msg("%s: token %lld row %lld is %.9g, but %.9g among %d tokens", describe(c, p, n),
                     (long long)(i / p->shape.rows), (long long)(i % p->shape.rows), (double)y[i], (double)want[i],
                     MAX_TOK);
}

static void check_problem(struct cpu *const *cpus, const struct problem *p) {
    static const int counts[] = {1, 2, 7, 8, 9};
    float *all = multiply(cpus[0], p, 0, MAX_TOK);
    check_contract(cpus[0], p, all, MAX_TOK);
    for (int threads = 1; threads < 3; threads++) {
        float *y = multiply(cpus[threads], p, 0, MAX_TOK);
        check_same(cpus[threads], p, y, all, 0, MAX_TOK);
        free(y);
    }
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
        for (int t0 = 0; t0 < 12; t0 += 3) {
            const struct cpu *c = cpus[t0 / 3 % 3];
            float *y = multiply((struct cpu *)c, p, t0, counts[k]);
            check_same(c, p, y, all, t0, counts[k]);
            free(y);
        }
    free(all);
}

static void every_type_and_shape(enum isa isa) {
    if (!isa_usable(isa)) {
        print_message("test_matmul: %s kernels skipped: not usable on this CPU\n", isa_name(isa));
        skip();
    }
    static const int64_t rows[] = {1, 15, 16, 17, 172};
    struct cpu *cpus[3];
    for (int i = 0; i < 3; i++) cpus[i] = open_cpu(isa, i + 1, MAX_TOK, 200, 4096);
    for (int t = 0; t < N_TYPE; t++) {
        int block = quant_info(types[t])->block_elems, plain = block == 1;
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (int64_t k = 1; k <= 5; k += 2) {
                struct problem p;
                int64_t cols = plain ? 32 * k + k - 1 : block * k; /* 32, 98, 164, and with r odd one more */
                problem_open(&p, types[t], (struct shape){rows[r], plain ? cols + (int64_t)(r & 1) : cols});
                check_problem(cpus, &p);
                problem_close(&p);
            }
        /* Long rows are cut into pieces that fit the cache. */
        struct problem p;
        problem_open(&p, types[t], (struct shape){40, 2560});
        check_problem(cpus, &p);
        problem_close(&p);
    }
    for (int i = 0; i < 3; i++) close_cpu(cpus[i]);
}

static void generic_kernels(void **s) {
    (void)s, every_type_and_shape(ISA_GENERIC);
}
static void avx2_kernels(void **s) {
    (void)s, every_type_and_shape(ISA_AVX2);
}
static void avx512_kernels(void **s) {
    (void)s, every_type_and_shape(ISA_AVX512);
}

/* Three outputs of different types and heights, with and without bias, give what three calls give. */
static void three_outputs(void **state) {
    (void)state;
    static const int kinds[][3] = {
        {QT_Q4_K, QT_Q4_K, QT_Q6_K}, {QT_Q8_0, QT_F16, QT_F32}, {QT_IQ4_XS, QT_BF16, QT_Q2_K}};
    enum { COLS = 768, TOK = 19 };
    static const int64_t rows[3] = {64, 17, 130};
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) continue;
        struct cpu *c = open_cpu(isa, 2, TOK, 130, COLS);
        for (int k = 0; k < 3; k++) {
            struct problem p[3];
            struct mat w[3];
            float *y[3];
            for (int i = 0; i < 3; i++) {
                problem_open(&p[i], kinds[k][i], (struct shape){rows[i], COLS});
                w[i] = (struct mat){p[i].strips, p[i].type, rows[i], COLS};
                y[i] = malloc((size_t)(TOK * rows[i]) * sizeof(float));
            }
            for (int n = 1; n <= TOK; n += 9) {
                struct matmul m = {.x = p[0].x,
                                   .cols = COLS,
                                   .n_tok = n,
                                   .n = 3,
                                   .out = {{&w[0], y[0], p[0].bias}, {&w[1], y[1], NULL}, {&w[2], y[2], p[2].bias}}};
                assert_int_equal(c->ops.matmul(&c->ops, &m), 0);
                for (int i = 0; i < 3; i++) {
                    float *one = malloc((size_t)(n * rows[i]) * sizeof(float));
                    struct matmul single = {
                        .x = p[0].x, .cols = COLS, .n_tok = n, .n = 1, .out = {{&w[i], one, m.out[i].bias}}};
                    assert_int_equal(c->ops.matmul(&c->ops, &single), 0);
                    assert_memory_equal(y[i], one, (size_t)(n * rows[i]) * sizeof(float));
                    free(one);
                }
            }
            for (int i = 0; i < 3; i++) problem_close(&p[i]), free(y[i]);
        }
        close_cpu(c);
    }
}

/* More tokens than are prepared at a time. */
static void long_calls_are_chunked(void **state) {
    (void)state;
    enum { TOK = 1100, ROWS = 33, COLS = 256 };
    struct cpu *c = open_cpu(ISA_GENERIC, 2, TOK, ROWS, COLS);
    void *file = ref_random_rows(QT_Q4_K, ROWS, COLS, 5), *strips = ref_strips(QT_Q4_K, file, ROWS, COLS);
    float *x = random_tokens(TOK, COLS, 6), *y = malloc(TOK * ROWS * sizeof *y), one[ROWS];
    struct mat w = {strips, QT_Q4_K, ROWS, COLS};
    struct matmul m = {.x = x, .cols = COLS, .n_tok = TOK, .n = 1, .out = {{&w, y, NULL}}};
    assert_int_equal(c->ops.matmul(&c->ops, &m), 0);
    for (int t = 0; t < TOK; t += 73) {
        struct matmul single = {.x = x + t * COLS, .cols = COLS, .n_tok = 1, .n = 1, .out = {{&w, one, NULL}}};
        assert_int_equal(c->ops.matmul(&c->ops, &single), 0);
        assert_memory_equal(one, y + t * ROWS, sizeof one);
    }
    free(file), free(strips), free(x), free(y);
    close_cpu(c);
}

/* A NaN activation must not vanish in the quantisation. */
static void nan_reaches_the_result(void **state) {
    (void)state;
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) continue;
        struct cpu *c = open_cpu(isa, 1, 1, 16, 256);
        void *file = ref_random_rows(QT_Q4_K, 16, 256, 5), *strips = ref_strips(QT_Q4_K, file, 16, 256);
        for (int at = 0; at < 256; at += 17) {
            float x[256], y[16];
            for (int i = 0; i < 256; i++) x[i] = i == at ? NAN : 1;
            struct mat w = {strips, QT_Q4_K, 16, 256};
            struct matmul m = {.x = x, .cols = 256, .n_tok = 1, .n = 1, .out = {{&w, y, NULL}}};
            assert_int_equal(c->ops.matmul(&c->ops, &m), 0);
            for (int r = 0; r < 16; r++) assert_true(isnan(y[r]));
        }
        free(file), free(strips);
        close_cpu(c);
    }
}

/* Rows, an activation and f64 dot products made with the reference library: only the quantisation of the activation, half a
 * step of d for each element, and the f32 sums may lie between. */
static void vectors_within_quantisation(const char *name, int type, struct cpu *c) {
    char file[64];
    snprintf(file, sizeof file, "quants/%s.qtv", name);
    size_t total;
    char *data = test_read(file, &total);
    uint32_t h[8];
    memcpy(h, data, sizeof h);
    size_t elems = h[2], bytes = h[3], n_rand = h[4], rows = h[5], cols = h[6];
    const char *packed = data + sizeof h + n_rand * (bytes + 4 * elems) + rows * cols * 4;
    const char *values = packed + rows * cols / elems * bytes;
    const char *act = values + rows * cols * 4, *dots = act + cols * 4;
    float *x = malloc(cols * 4), *y = malloc(rows * 4), *v = malloc(cols * 4);
    memcpy(x, act, cols * 4);
    void *strips = ref_strips(type, packed, (int64_t)rows, (int64_t)cols);
    struct mat w = {strips, type, (int64_t)rows, (int64_t)cols};
    struct matmul m = {.x = x, .cols = (int64_t)cols, .n_tok = 1, .n = 1, .out = {{&w, y, NULL}}};
    assert_int_equal(c->ops.matmul(&c->ops, &m), 0);
    double *ref = malloc(rows * sizeof *ref), *size = malloc(rows * sizeof *size);
    ref_matmul_contract(ref, size, type, packed, (int64_t)rows, (int64_t)cols, x, 1, NULL);
    for (size_t r = 0; r < rows; r++) {
        memcpy(v, values + r * cols * 4, cols * 4);
        double want, bound = ref_matmul_tolerance(type, (int64_t)cols) * size[r];
        memcpy(&want, dots + 8 * r, 8);
        for (size_t i = 0; i < cols && elems > 1; i += 32) {
            double max = 0, sum = 0;
            for (size_t k = 0; k < 32; k++) max = fmax(max, fabs((double)x[i + k])), sum += fabs((double)v[i + k]);
            bound += sum * max / 127 * 0.5001;
        }
        if (!(fabs((double)y[r] - want) <= bound))
            fail_msg("%s %s: dot of row %zu is %.9g, expected %.9g, tolerance %.3g", isa_name(c->opts.isa), name, r,
                     (double)y[r], want, bound);
    }
    free(data), free(x), free(y), free(v), free(strips), free(ref), free(size);
}

static void reference_vectors(void **state) {
    (void)state;
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        if (!isa_usable(isa)) continue;
        struct cpu *c = open_cpu(isa, 1, 1, 4096, 8192);
#define X(name, id, elems, bytes, enc)                                                                                 \
    if (id != QT_F32) vectors_within_quantisation(#name, id, c);
        QUANT_LIST(X)
#undef X
        close_cpu(c);
    }
}

static void embed_decodes_rows(void **state) {
    (void)state;
    enum { ROWS = 50, COLS = 512 };
    static const int32_t ids[] = {0, 49, 17, 17, 31};
    struct cpu *c = open_cpu(ISA_GENERIC, 2, 8, ROWS, COLS);
    for (int t = 0; t < N_TYPE; t++) {
        uint8_t *file = ref_random_rows(types[t], ROWS, COLS, 9);
        void *strips = ref_strips(types[t], file, ROWS, COLS);
        struct mat w = {strips, types[t], ROWS, COLS};
        size_t row;
        assert_true(quant_row_bytes(&row, types[t], COLS));
        float *x = malloc(5 * COLS * sizeof *x), *want = malloc(COLS * sizeof *want);
        for (int k = 0; k < 2; k++) {
            float scale = k ? 22.5f : 1;
            assert_int_equal(c->ops.embed(&c->ops, x, &w, ids, 5, scale), 0);
            for (int i = 0; i < 5; i++) {
                quant_decode_row(types[t], file + (size_t)ids[i] * row, want, COLS);
                for (int j = 0; j < COLS; j++) assert_int_equal(f32_bits(x[i * COLS + j]), f32_bits(want[j] * scale));
            }
        }
        free(file), free(strips), free(x), free(want);
    }
    void *file = ref_random_rows(QT_F16, ROWS, COLS, 1), *strips = ref_strips(QT_F16, file, ROWS, COLS);
    struct mat w = {strips, QT_F16, ROWS, COLS};
    float x[COLS];
    const int32_t too_large = ROWS, negative = -1;
    assert_int_equal(c->ops.embed(&c->ops, x, &w, &too_large, 1, 1), ERR_ARG);
    assert_int_equal(c->ops.embed(&c->ops, x, &w, &negative, 1, 1), ERR_ARG);
    free(file), free(strips);
    close_cpu(c);
}

static void refuses_what_it_was_not_opened_for(void **state) {
    (void)state;
    struct cpu *c = open_cpu(ISA_GENERIC, 1, 4, 64, 256);
    float x[512] = {0}, y[256];
    struct mat good = {x, QT_F32, 16, 8}, tall = {x, QT_F32, 65, 8}, wide = {x, QT_F32, 16, 512},
               bad = {x, QT_IQ2_S, 16, 256};
    struct matmul m = {.x = x, .cols = 8, .n_tok = 5, .n = 1, .out = {{&good, y, NULL}}};
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG); /* tokens */
    m.n_tok = 1, m.n = MATMUL_MAX + 1;
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG); /* outputs */
    m.n = 1, m.cols = 16;
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG); /* another input width */
    m.cols = 8, m.out[0].w = &tall;
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG);
    m.cols = 512, m.out[0].w = &wide;
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG);
    m.cols = 256, m.out[0].w = &bad;
    assert_int_equal(c->ops.matmul(&c->ops, &m), ERR_ARG);
    close_cpu(c);
}

/* ---- experts ---- */

enum { DIM = 256, FF = 512, EXPERTS = 8, USED = 3, EXPERT_TOK = 21 };

struct expert_model {
    int type;
    uint8_t *file[3], *strips[3]; /* gate, up, down stacks */
    size_t file_bytes[3];         /* of one expert */
    struct experts_args a;
    float *x, *y, *weight;
    int32_t *ids;
};

static void expert_model_open(struct expert_model *m, int type) {
    *m = (struct expert_model){.type = type};
    struct mat w[3];
    for (int i = 0; i < 3; i++) {
        int64_t rows = i == 2 ? DIM : FF, cols = i == 2 ? FF : DIM;
        struct strip_layout l;
        size_t row;
        assert_true(strip_layout(&l, type, rows, cols) && quant_row_bytes(&row, type, cols));
        m->file_bytes[i] = row * (size_t)rows;
        m->file[i] = ref_random_rows(type, EXPERTS * rows, cols, (uint64_t)i);
        m->strips[i] = aligned_alloc(64, EXPERTS * l.bytes);
        for (int e = 0; e < EXPERTS; e++) {
            void *s = ref_strips(type, m->file[i] + (size_t)e * m->file_bytes[i], rows, cols);
            memcpy(m->strips[i] + (size_t)e * l.bytes, s, l.bytes);
            free(s);
        }
        w[i] = (struct mat){m->strips[i], type, rows, cols};
    }
    uint64_t seed = 77;
    m->x = malloc(EXPERT_TOK * DIM * sizeof(float)), m->y = malloc(EXPERT_TOK * DIM * sizeof(float));
    m->weight = malloc(EXPERT_TOK * USED * sizeof(float)), m->ids = malloc(EXPERT_TOK * USED * sizeof(int32_t));
    for (int i = 0; i < EXPERT_TOK * DIM; i++) m->x[i] = test_normal(&seed) / 8;
    for (int t = 0; t < EXPERT_TOK; t++)
        for (int k = 0, first = (int)(test_rand(&seed) % EXPERTS); k < USED; k++) {
            m->ids[t * USED + k] = t == 4 ? k : (first + 5 * k) % EXPERTS;
            m->weight[t * USED + k] = test_uniform(&seed, 0, 1);
        }
    m->a = (struct experts_args){.y = m->y,
                                 .x = m->x,
                                 .ids = m->ids,
                                 .weight = m->weight,
                                 .n_tok = EXPERT_TOK,
                                 .n_used = USED,
                                 .n_expert = EXPERTS,
                                 .gate = w[0],
                                 .up = w[1],
                                 .down = w[2],
                                 .act = ACT_SILU};
}

static void expert_model_close(struct expert_model *m) {
    for (int i = 0; i < 3; i++) free(m->file[i]), free(m->strips[i]);
    free(m->x), free(m->y), free(m->weight), free(m->ids);
}

/* want[DIM] and the measure of its errors for token t. h in f32 differs from the exact one by its own rounding, relative to
 * the size of gate and up sums; in quantised types that may move a code of h by one step, which `size` counts as well. */
static void expert_reference(const struct expert_model *m, int t, double *want, double *bound) {
    double gate[FF], up[FF], gate_size[FF], up_size[FF], y[DIM], size[DIM], abs_down[DIM];
    float h[FF], slack[FF];
    bool plain = quant_info(m->type)->block_elems == 1;
    memset(want, 0, DIM * sizeof *want), memset(bound, 0, DIM * sizeof *bound);
    double tol = ref_matmul_tolerance(m->type, DIM), tol_down = ref_matmul_tolerance(m->type, FF);
    for (int k = 0; k < USED; k++) {
        int e = m->ids[t * USED + k];
        double weight = m->weight[t * USED + k];
        const float *x = m->x + t * DIM;
        ref_matmul_contract(gate, gate_size, m->type, m->file[0] + (size_t)e * m->file_bytes[0], FF, DIM, x, 1, NULL);
        ref_matmul_contract(up, up_size, m->type, m->file[1] + (size_t)e * m->file_bytes[1], FF, DIM, x, 1, NULL);
        for (int i = 0; i < FF; i++) {
            h[i] = (float)(gate[i] / (1 + exp(-gate[i])) * up[i]);
            /* |silu'| < 1.1; the activation itself costs a few ulp */
            slack[i] = (float)(1.1 * tol * gate_size[i] * fabs(up[i]) + fabs(gate[i]) * tol * up_size[i] +
                               1e-6 * fabs((double)h[i]));
        }
        const uint8_t *down = m->file[2] + (size_t)e * m->file_bytes[2];
        ref_matmul_contract(y, size, m->type, down, DIM, FF, h, 1, NULL);
        if (!plain) { /* a code may move by one step of d, and d with the largest element */
            for (int i = 0; i < FF; i += 32) {
                float max = 0;
                for (int j = 0; j < 32; j++) max = fmaxf(max, fabsf(h[i + j]));
                for (int j = 0; j < 32; j++) slack[i + j] += 1.01f * max / 127;
            }
        }
        size_t row;
        assert_true(quant_row_bytes(&row, m->type, FF));
        for (int r = 0; r < DIM; r++) {
            float v[FF];
            quant_decode_row(m->type, down + (size_t)r * row, v, FF);
            abs_down[r] = 0;
            for (int i = 0; i < FF; i++) abs_down[r] += fabs((double)v[i]) * (double)slack[i];
            want[r] += weight * y[r];
            bound[r] += fabs(weight) * (abs_down[r] + (tol_down + 8 * 0x1p-24) * size[r]);
        }
    }
}

static void experts_equal_reference(void **state) {
    (void)state;
    static const int kinds[] = {QT_F32, QT_F16, QT_Q4_K, QT_Q8_0};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct expert_model m;
        expert_model_open(&m, kinds[k]);
        for (int isa = 0; isa < ISA_COUNT; isa++) {
            if (!isa_usable(isa)) continue;
            struct cpu *c = open_cpu(isa, 3, EXPERT_TOK, FF, FF);
            assert_int_equal(c->ops.experts(&c->ops, &m.a), 0);
            for (int t = 0; t < EXPERT_TOK; t++) {
                double want[DIM], bound[DIM];
                expert_reference(&m, t, want, bound);
                for (int i = 0; i < DIM; i++)
                    if (!(fabs((double)m.y[t * DIM + i] - want[i]) <= bound[i]))
                        fail_msg("experts %s %s: token %d element %d is %.9g, expected %.9g, tolerance %.3g",
                                 isa_name(isa), quant_name(m.type), t, i, (double)m.y[t * DIM + i], want[i], bound[i]);
            }
            /* Alone, and with too little scratch for more than one batch: the same bits. */
            struct cpu *small = open_cpu(isa, 2, 1, FF, FF);
            for (int t = 0; t < EXPERT_TOK; t++) {
                struct experts_args one = m.a;
                float y[DIM];
                one.y = y, one.x = m.x + t * DIM, one.n_tok = 1, one.ids = m.ids + t * USED,
                one.weight = m.weight + t * USED;
                assert_int_equal(small->ops.experts(&small->ops, &one), 0);
                for (int i = 0; i < DIM; i++)
                    if (f32_bits(y[i]) != f32_bits(m.y[t * DIM + i]))
                        fail_msg("experts %s %s: token %d element %d is %.9g alone, %.9g among %d", isa_name(isa),
                                 quant_name(m.type), t, i, (double)y[i], (double)m.y[t * DIM + i], EXPERT_TOK);
            }
            close_cpu(small);
            close_cpu(c);
        }
        expert_model_close(&m);
    }
}

static void experts_refuse_bad_choices(void **state) {
    (void)state;
    struct expert_model m;
    expert_model_open(&m, QT_Q8_0);
    struct cpu *c = open_cpu(ISA_GENERIC, 1, EXPERT_TOK, FF, FF);
    m.ids[7] = EXPERTS;
    assert_int_equal(c->ops.experts(&c->ops, &m.a), ERR_ARG);
    m.ids[7] = -1;
    assert_int_equal(c->ops.experts(&c->ops, &m.a), ERR_ARG);
    m.ids[7] = 0;
    m.a.down.cols = FF / 2;
    assert_int_equal(c->ops.experts(&c->ops, &m.a), ERR_ARG);
    close_cpu(c);
    expert_model_close(&m);
}

static void scratch_is_as_announced(void **state) {
    (void)state;
    struct cpu_opts o = {.n_thread = 2, .limits = {.n_tok = 100, .cols = 1024, .rows = 5000}};
    size_t dense = matmul_scratch_bytes(&o);
    assert_true(dense >= 100 * (1024 / 32 * sizeof(struct xq) + 1024 * sizeof(float)));
    assert_true(dense < 100 * (1024 / 32 * sizeof(struct xq) + 1025 * sizeof(float)) + 2 * 256 * 1024 +
                            4096); /* panels of 2 threads */
    o.limits.n_expert = 16, o.limits.n_expert_used = 2;
    assert_true(matmul_scratch_bytes(&o) > dense);
    o.limits.cols = INT64_MAX / 2;
    assert_true(matmul_scratch_bytes(&o) == SIZE_MAX);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(generic_kernels),
        cmocka_unit_test(avx2_kernels),
        cmocka_unit_test(avx512_kernels),
        cmocka_unit_test(reference_vectors),
        cmocka_unit_test(three_outputs),
        cmocka_unit_test(long_calls_are_chunked),
        cmocka_unit_test(nan_reaches_the_result),
        cmocka_unit_test(embed_decodes_rows),
        cmocka_unit_test(refuses_what_it_was_not_opened_for),
        cmocka_unit_test(experts_equal_reference),
        cmocka_unit_test(experts_refuse_bad_choices),
        cmocka_unit_test(scratch_is_as_announced),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
