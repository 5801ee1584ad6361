/* kern_delta.c: see kern_delta.h. Compiled once per instruction set. */
#include "cpu/kern_delta.h"

#include "cpu/simd.h"

#include <math.h>

enum { C = DELTA_CHUNK };

/* --- before the rule --------------------------------------------------------------------------------------------- */

static void conv(float *u, float *last, const float *taps, int64_t n_ch, int64_t c0, int n_tok) {
    float w[DELTA_CONV][VLEN];
    for (int l = 0; l < VLEN; l++)
        for (int i = 0; i < DELTA_CONV; i++) w[i][l] = taps[(c0 + l) * DELTA_CONV + i];
    vf w0 = vf_load(w[0]), w1 = vf_load(w[1]), w2 = vf_load(w[2]), w3 = vf_load(w[3]);
    vf x0 = vf_load(last + c0), x1 = vf_load(last + n_ch + c0), x2 = vf_load(last + 2 * n_ch + c0);
    for (int t = 0; t < n_tok; t++) {
        float *p = u + t * n_ch + c0;
        vf x3 = vf_load(p);
        vf c = vf_fma(w3, x3, vf_fma(w2, x2, vf_fma(w1, x1, vf_mul(w0, x0))));
        vf_store(p, vf_div(c, vf_add(vf_set1(1), vf_exp(vf_sub(vf_zero(), c)))));
        x0 = x1, x1 = x2, x2 = x3;
    }
    vf_store(last + c0, x0);
    vf_store(last + n_ch + c0, x1);
    vf_store(last + 2 * n_ch + c0, x2);
}

static float dot(const float *a, const float *b, int n) {
    vf s = vf_zero();
    for (int i = 0; i < n; i += VLEN) s = vf_fma(vf_load(a + i), vf_load(b + i), s);
    return vf_sum(s);
}

static void unit(float *y, const float *x, int n, float scale, float eps) {
    float len = sqrtf(dot(x, x, n));
    vf s = vf_set1(scale / (len > eps ? len : eps));
    for (int i = 0; i < n; i += VLEN) vf_store(y + i, vf_mul(vf_load(x + i), s));
}

/* --- token by token ---------------------------------------------------------------------------------------------- */

/* Rows of S taken together, so that k and q are loaded once for them: as many as leave their sums in registers. */
#if defined(LH_ISA_avx512)
enum { STEP_ROWS = 4 };
#else
enum { STEP_ROWS = 2 };
#endif

/* Rows of S that stay in the first-level cache while all tokens pass. */
enum { TILE_ROWS = 16 };

static inline __attribute__((always_inline)) void step(const struct delta_rows *r, int t, int row, float decay, float kq) {
    const float *k = r->k + t * r->u_step, *q = r->q + t * r->u_step;
    float *s = r->s + (int64_t)row * r->dim;
    vf sk[STEP_ROWS], sq[STEP_ROWS];
    for (int i = 0; i < STEP_ROWS; i++) sk[i] = sq[i] = vf_zero();
    for (int d = 0; d < r->dim; d += VLEN) {
        vf kd = vf_load(k + d), qd = vf_load(q + d);
        for (int i = 0; i < STEP_ROWS; i++) {
            vf x = vf_load(s + i * r->dim + d);
            sk[i] = vf_fma(x, kd, sk[i]);
            sq[i] = vf_fma(x, qd, sq[i]);
        }
    }
    vf e[STEP_ROWS], dec = vf_set1(decay);
    for (int i = 0; i < STEP_ROWS; i++) {
        float err = r->beta[t] * (r->v[t * r->u_step + row + i] - decay * vf_sum(sk[i]));
        r->o[t * r->o_step + row + i] = decay * vf_sum(sq[i]) + err * kq;
        e[i] = vf_set1(err);
    }
    for (int d = 0; d < r->dim; d += VLEN) {
        vf kd = vf_load(k + d);
        for (int i = 0; i < STEP_ROWS; i++) {
            float *p = s + i * r->dim + d;
            vf_store(p, vf_fma(e[i], kd, vf_mul(dec, vf_load(p))));
        }
    }
}

static void steps(const struct delta_rows *r) {
    for (int tile = 0; tile < r->n_row; tile += TILE_ROWS)
        for (int t = 0; t < r->n_tok; t++) {
            float decay = expf(r->g[t]), kq = dot(r->k + t * r->u_step, r->q + t * r->u_step, r->dim);
            for (int row = tile; row < tile + TILE_ROWS; row += STEP_ROWS) step(r, t, row, decay, kq);
        }
}

/* --- in chunks --------------------------------------------------------------------------------------------------- */

enum mode { SET, ADD, SUB };

struct operand {
    const float *p;
    int ld;
};

/* Rows of c, and vectors of its columns, whose sums stay in registers. */
enum { MM_ROWS = 4 };
#if defined(LH_ISA_avx512)
enum { MM_COLS = 2 };
#else
enum { MM_COLS = 1 };
#endif

static inline __attribute__((always_inline)) void mm_tile(float *c, int ldc, struct operand a, struct operand b, int n_k, int rows,
                                                          int cols, enum mode mode) {
    vf s[MM_ROWS][MM_COLS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) s[i][j] = mode == SET ? vf_zero() : vf_load(c + i * ldc + j * VLEN);
    for (int k = 0; k < n_k; k++) {
        vf x[MM_COLS];
        for (int j = 0; j < cols; j++) x[j] = vf_load(b.p + k * b.ld + j * VLEN);
        for (int i = 0; i < rows; i++) {
            vf y = vf_set1(a.p[i * a.ld + k]);
            for (int j = 0; j < cols; j++) s[i][j] = mode == SUB ? vf_fnma(y, x[j], s[i][j]) : vf_fma(y, x[j], s[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) vf_store(c + i * ldc + j * VLEN, s[i][j]);
}

/* c [m, n] = a [m, n_k] b [n_k, n], or added to or taken from c. m: a multiple of 4, n: of 16. Each element is one chain of
 * n_k products, in order. */
static inline __attribute__((always_inline)) void mm(float *c, int ldc, struct operand a, struct operand b, int m, int n, int n_k,
                                                     enum mode mode) {
    for (int i = 0; i < m; i += MM_ROWS) {
        struct operand ai = {a.p + i * a.ld, a.ld};
        int j = 0;
        for (; j + MM_COLS * VLEN <= n; j += MM_COLS * VLEN)
            mm_tile(c + i * ldc + j, ldc, ai, (struct operand){b.p + j, b.ld}, n_k, MM_ROWS, MM_COLS, mode);
        for (; j < n; j += VLEN) mm_tile(c + i * ldc + j, ldc, ai, (struct operand){b.p + j, b.ld}, n_k, MM_ROWS, 1, mode);
    }
}

static void mm_set(float *c, int ldc, struct operand a, struct operand b, int m, int n, int n_k) { mm(c, ldc, a, b, m, n, n_k, SET); }
static void mm_add(float *c, int ldc, struct operand a, struct operand b, int m, int n, int n_k) { mm(c, ldc, a, b, m, n, n_k, ADD); }
static void mm_sub(float *c, int ldc, struct operand a, struct operand b, int m, int n, int n_k) { mm(c, ldc, a, b, m, n, n_k, SUB); }

/* dst[cols, rows] = src[rows, cols] transposed. */
static void transpose(float *dst, int ld_dst, const float *src, int ld_src, int rows, int cols) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) dst[c * ld_dst + r] = src[r * ld_src + c];
}

static void scale(float *x, int n, float by) {
    vf s = vf_set1(by);
    for (int i = 0; i < n; i += VLEN) vf_store(x + i, vf_mul(vf_load(x + i), s));
}

/* One chunk: n tokens, n4 and n16 when rounded up; sums of ln decay in double, since differences of large sums count. */
struct span {
    const float *v, *beta;
    float *o;
    double g[C];
    float decay[C]; /* e^g: from the start */
    int n, n4, n16;
};

/* Columns of row i that are used: up to the diagonal, rounded up. */
static int columns(int i) { return (i / VLEN + 1) * VLEN; }

/* Row i of A and P from its scores: times e^(g_i - g_j), A also times beta and without the diagonal; 0 where j comes later.
 * The exponent is formed from a difference that is <= 0, and what is masked is masked before the exponential. */
static void decayed(struct delta_chunk *w, const struct span *c, int i) {
    float diff[C], *a = w->a + i * C, *p = w->p + i * C;
    bool real = i < c->n;
    int until = real ? i + 1 : 0;
    for (int j = 0; j < columns(i); j++) diff[j] = j < until ? (float)(c->g[i] - c->g[j]) : -INFINITY;
    vf beta = vf_set1(real ? c->beta[i] : 0);
    for (int j = 0; j < columns(i); j += VLEN) {
        vf e = vf_exp(vf_load(diff + j));
        vf_store(a + j, vf_mul(vf_mul(vf_load(a + j), beta), e));
        vf_store(p + j, vf_mul(vf_load(p + j), e));
    }
    a[i] = 0;
}

/* D = (I + A)^-1 R in place: blocks of rows, within a block row by row. */
static void solve(struct delta_chunk *w, const struct span *c, int n_row) {
    enum { B = 16 };
    for (int b = 0; b < c->n4; b += B) {
        int rows = c->n4 - b < B ? c->n4 - b : B;
        if (b) mm_sub(w->d + b * n_row, n_row, (struct operand){w->a + b * C, C}, (struct operand){w->d, n_row}, rows, n_row, b);
        for (int i = b + 1; i < b + rows; i++)
            for (int x = 0; x < n_row; x += VLEN) {
                vf s = vf_load(w->d + i * n_row + x);
                for (int j = b; j < i; j++) s = vf_fnma(vf_set1(w->a[i * C + j]), vf_load(w->d + j * n_row + x), s);
                vf_store(w->d + i * n_row + x, s);
            }
    }
}

/* R = beta (v - e^g S^T k), where d holds S^T k. */
static void residual(struct delta_chunk *w, const struct span *c, const struct delta_rows *r) {
    for (int i = 0; i < c->n4; i++) {
        float *d = w->d + i * r->n_row;
        vf by = vf_set1(i < c->n ? c->beta[i] : 0), decay = vf_set1(i < c->n ? c->decay[i] : 0);
        for (int x = 0; x < r->n_row; x += VLEN) {
            vf v = i < c->n ? vf_load(c->v + i * r->u_step + x) : vf_zero();
            vf_store(d + x, vf_mul(by, vf_fnma(decay, vf_load(d + x), v)));
        }
    }
}

static void chunk(const struct delta_rows *r, const struct span *c, struct delta_chunk *w) {
    int dim = r->dim, n_row = r->n_row;
    struct operand q = {w->q, dim}, k = {w->k, dim}, kt = {w->kt, C}, st = {w->st, n_row}, d = {w->d, n_row};
    memset(w->kt, 0, (size_t)dim * C * sizeof *w->kt);
    transpose(w->kt, C, w->k, dim, c->n, dim);
    for (int i = 0; i < c->n4; i += MM_ROWS) {
        mm_set(w->a + i * C, C, (struct operand){w->k + i * dim, dim}, kt, MM_ROWS, columns(i), dim);
        mm_set(w->p + i * C, C, (struct operand){w->q + i * dim, dim}, kt, MM_ROWS, columns(i), dim);
    }
    for (int i = 0; i < c->n4; i++) decayed(w, c, i);
    mm_set(w->d, n_row, k, st, c->n4, n_row, dim);
    residual(w, c, r);
    solve(w, c, n_row);

    mm_set(w->o, n_row, q, st, c->n4, n_row, dim);
    for (int i = 0; i < c->n; i++) scale(w->o + i * n_row, n_row, c->decay[i]);
    for (int i = 0; i < c->n4; i += MM_ROWS) /* P is 0 above the diagonal */
        mm_add(w->o + i * n_row, n_row, (struct operand){w->p + i * C, C}, d, MM_ROWS, n_row, i + MM_ROWS);
    for (int i = 0; i < c->n; i++) memcpy(c->o + i * r->o_step, w->o + i * n_row, (size_t)n_row * sizeof(float));

    float rest[C];
    for (int j = 0; j < c->n; j++) rest[j] = (float)(c->g[c->n - 1] - c->g[j]);
    for (int j = c->n; j < C; j++) rest[j] = -INFINITY;
    for (int j = 0; j < C; j += VLEN) vf_store(rest + j, vf_exp(vf_load(rest + j)));
    for (int x = 0; x < dim; x++)
        for (int j = 0; j < c->n16; j += VLEN) {
            float *p = w->kt + x * C + j;
            vf_store(p, vf_mul(vf_load(p), vf_load(rest + j)));
        }
    scale(w->st, dim * n_row, c->decay[c->n - 1]);
    mm_add(w->st, n_row, kt, d, dim, n_row, c->n);
}

/* The chunk's q or k side by side, and zeros up to a multiple of 4 tokens. */
static void gather(float *dst, const float *src, const struct delta_rows *r, const struct span *c) {
    size_t bytes = (size_t)r->dim * sizeof *dst;
    for (int i = 0; i < c->n; i++) memcpy(dst + i * r->dim, src + i * r->u_step, bytes);
    memset(dst + c->n * r->dim, 0, (size_t)(c->n4 - c->n) * bytes);
}

static void chunks(const struct delta_rows *r, struct delta_chunk *w) {
    transpose(w->st, r->n_row, r->s, r->dim, r->n_row, r->dim);
    for (int t = 0; t < r->n_tok; t += C) {
        int n = r->n_tok - t < C ? r->n_tok - t : C;
        struct span c = {.v = r->v + t * r->u_step, .beta = r->beta + t, .o = r->o + t * r->o_step, .n = n,
                         .n4 = (n + 3) / 4 * 4, .n16 = (n + 15) / 16 * 16};
        gather(w->q, r->q + t * r->u_step, r, &c);
        gather(w->k, r->k + t * r->u_step, r, &c);
        double sum = 0;
        for (int i = 0; i < n; i++) {
            c.g[i] = sum += r->g[t + i];
            c.decay[i] = (float)exp(sum);
        }
        chunk(r, &c, w);
    }
    transpose(r->s, r->dim, w->st, r->n_row, r->dim, r->n_row);
}

const struct kern_delta KERN_SYM(kern_delta) = {conv, unit, steps, chunks};
