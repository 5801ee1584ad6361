/* kernel_check.c: see kernel_check.h. */
#include "offload/kernel_check.h"

#include "core/err.h"
#include "core/mem.h"
#include "core/quant.h"
#include "cpu/cpu.h"

#include <math.h>
#include <stdio.h>

/* Of the length of the result. The order of f32 sums gave at most 2.7e-7 (real and random models of 0.1 to 0.6 billion weights in
 * Q4_1, Q4_K, Q6_K, Q8_0 and IQ4_XS, AVX2 and AVX-512); rows that are some times longer may give a little more. */
static const double MOST = 1e-5;

struct checker {
    struct cpu *cpu[2]; /* the kernels in question, the generic ones */
    float *x, *y[2];
};

static int open_checker(struct checker *k, const struct model *m, enum isa isa) {
    struct ops_limits l;
    decoder_limits(&l, m, 1, 16);
    for (int i = 0; i < 2; i++) {
        struct cpu_opts o = {.n_thread = 1, .isa = i ? ISA_GENERIC : isa, .limits = l};
        int rc = cpu_open(&k->cpu[i], &o);
        if (rc) return rc;
        if (!(k->y[i] = mem_alloc(size_mul3((size_t)l.rows, 1, sizeof(float)), 64, "products"))) return ERR_NOMEM;
    }
    k->x = mem_alloc(size_mul3((size_t)l.cols, 1, sizeof(float)), 64, "activations");
    if (!k->x) return ERR_NOMEM;
    uint32_t rng = 1;
    for (int64_t i = 0; i < l.cols; i++) {
        rng = rng * 1664525u + 1013904223u;
        k->x[i] = (float)(int32_t)rng * 0x1p-31f;
    }
    return 0;
}

static void close_checker(struct checker *k) {
    for (int i = 0; i < 2; i++) {
        mem_free(k->y[i]);
        cpu_close(k->cpu[i]);
    }
    mem_free(k->x);
}

static int check_matrix(struct checker *k, const struct tensor *t, const void *data, const char *name, enum isa isa) {
    if (!t->bytes || !data) return 0;
    struct mat w = {.data = data, .type = t->type, .rows = t->rows, .cols = t->cols};
    for (int i = 0; i < 2; i++) {
        struct matmul p = {.x = k->x, .cols = t->cols, .n_tok = 1, .n = 1, .out = {{.w = &w, .y = k->y[i]}}};
        struct ops *o = cpu_ops(k->cpu[i]);
        int rc = o->matmul(o, &p);
        if (rc) return rc;
    }
    double diff = 0, size = 0;
    for (int64_t r = 0; r < t->rows; r++) {
        double d = (double)k->y[0][r] - k->y[1][r];
        diff += d * d;
        size += (double)k->y[1][r] * k->y[1][r];
    }
    if (diff <= MOST * MOST * size) return 0;
    return err_set(ERR_NUMERIC, "%s (%s): the %s kernels differ from the generic ones by %.2g of the result's length, at most %.0e is rounding",
                   name, quant_name(t->type), isa_name(isa), sqrt(diff / size), MOST);
}

static int check_layer(struct checker *k, const struct model *m, const struct weights *w, int il, enum isa isa) {
    for (int t = 0; t < LT_COUNT; t++) {
        if (layer_tensor_is_vector(t)) continue;
        char name[96];
        snprintf(name, sizeof name, "blk.%d.%s", il, layer_tensor_name(t));
        int rc = check_matrix(k, &m->layers[il].t[t], w->layers[il].at[t], name, isa);
        if (rc) return rc;
    }
    return 0;
}

int kernel_check(const struct model *m, const struct weights *w, enum isa isa) {
    struct checker k = {0};
    int rc = open_checker(&k, m, isa);
    const int layers[] = {0, m->n_layer / 2, m->n_layer - 1};
    for (int i = 0; i < 3 && !rc; i++)
        if (i == 0 || layers[i] != layers[i - 1]) rc = check_layer(&k, m, w, layers[i], isa);
    if (!rc) rc = m->out.bytes ? check_matrix(&k, &m->out, w->out, "output.weight", isa) : check_matrix(&k, &m->embd, w->embd, "token_embd.weight", isa);
    close_checker(&k);
    return rc;
}
