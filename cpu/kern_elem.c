/* kern_elem.c: see kern_elem.h. Compiled once per instruction set. */
#include "cpu/kern_elem.h"

#include "cpu/simd.h"

#include <math.h>

static void rmsnorm(float *y, const float *x, const float *w, int64_t n, float eps) {
    vf s0 = vf_zero(), s1 = vf_zero();
    int64_t i = 0;
    for (; i + 2 * VLEN <= n; i += 2 * VLEN) {
        vf a = vf_load(x + i), b = vf_load(x + i + VLEN);
        s0 = vf_fma(a, a, s0);
        s1 = vf_fma(b, b, s1);
    }
    for (; i < n; i += VLEN) {
        vf a = vf_load_n(x + i, n - i < VLEN ? (int)(n - i) : VLEN);
        s0 = vf_fma(a, a, s0);
    }
    float scale = 1.0f / sqrtf(vf_sum(vf_add(s0, s1)) / (float)n + eps);
    vf vs = vf_set1(scale);
    for (i = 0; i + VLEN <= n; i += VLEN) vf_store(y + i, vf_mul(vf_mul(vf_load(x + i), vs), vf_load(w + i)));
    int rest = (int)(n - i);
    if (rest) vf_store_n(y + i, vf_mul(vf_mul(vf_load_n(x + i, rest), vs), vf_load_n(w + i, rest)), rest);
}

static void add(float *x, const float *d, int64_t n) {
    int64_t i = 0;
    for (; i + VLEN <= n; i += VLEN) vf_store(x + i, vf_add(vf_load(x + i), vf_load(d + i)));
    int rest = (int)(n - i);
    if (rest) vf_store_n(x + i, vf_add(vf_load_n(x + i, rest), vf_load_n(d + i, rest)), rest);
}

static inline vf sigmoid(vf x) { return vf_div(vf_set1(1), vf_add(vf_set1(1), vf_exp(vf_sub(vf_zero(), x)))); }

static inline vf silu(vf x) { return vf_mul(x, sigmoid(x)); }

/* 0.5 x (1 + tanh(z)) = x sigmoid(2z), z = 0.7978845608 (x + 0.044715 x^3). */
static inline vf gelu(vf x) {
    vf z = vf_mul(vf_set1(2 * 0.7978845608f), vf_fma(vf_mul(vf_set1(0.044715f), vf_mul(x, x)), x, x));
    return vf_mul(x, sigmoid(z));
}

#define GLU(act)                                                                                                       \
    do {                                                                                                               \
        int64_t i = 0;                                                                                                 \
        for (; i + VLEN <= n; i += VLEN) vf_store(y + i, vf_mul(act(vf_load(gate + i)), vf_load(up + i)));             \
        int rest = (int)(n - i);                                                                                       \
        if (rest) vf_store_n(y + i, vf_mul(act(vf_load_n(gate + i, rest)), vf_load_n(up + i, rest)), rest);            \
    } while (0)

static void glu(float *y, const float *gate, const float *up, int64_t n, enum act act) {
    if (act == ACT_SILU)
        GLU(silu);
    else if (act == ACT_GELU)
        GLU(gelu);
    else
        GLU(sigmoid);
}

static void add_gated(float *x, const float *d, float gate, int64_t n) {
    vf s = sigmoid(vf_set1(gate));
    int64_t i = 0;
    for (; i + VLEN <= n; i += VLEN) vf_store(x + i, vf_fma(s, vf_load(d + i), vf_load(x + i)));
    int rest = (int)(n - i);
    if (rest) vf_store_n(x + i, vf_fma(s, vf_load_n(d + i, rest), vf_load_n(x + i, rest)), rest);
}

static void rotate(float *x, const float *cs, int n_pair, enum rope_pairing pairing) {
    int da = pairing == ROPE_NEOX ? 1 : 2, db = pairing == ROPE_NEOX ? n_pair : 1;
    for (int i = 0; i < n_pair; i++) {
        float *u = x + i * da, *v = u + db, c = cs[2 * i], s = cs[2 * i + 1], a = *u, b = *v;
        *u = a * c - b * s;
        *v = a * s + b * c;
    }
}

static void softcap(float *x, int64_t n, float cap) {
    for (int64_t i = 0; i < n; i++) x[i] = cap * tanhf(x[i] / cap);
}

const struct kern_elem KERN_SYM(kern_elem) = {rmsnorm, add, glu, add_gated, rotate, softcap};
