/* synth.c: random weights. Packing normal numbers afresh would take minutes for a large model, so each type gets one pool
 * of packed weights and rows are put together from random places of it: about as fast as copying. Metadata and
 * tokenizer are in synth_meta.c. */
#include "core/synth.h"

#include "core/err.h"
#include "core/f16.h"
#include "core/mem.h"
#include "core/quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    POOL_ELEMS = 1 << 20, /* fits a second-level cache in the 4-bit types */
    PIECE_ELEMS = 256,    /* copied from one place */
};

struct synth {
    uint64_t seed;
    float *normals; /* [POOL_ELEMS] */
    uint8_t *pool[QT_END];
};

static uint64_t next_rand(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float uniform(uint64_t *state, float lo, float hi) {
    return lo + (hi - lo) * (float)(next_rand(state) >> 40) * 0x1p-24f;
}

/* Sum of twelve uniforms: normal enough for weights, and the same bits everywhere, which logf and cosf are not. */
static float normal(uint64_t *state) {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform(state, 0, 1);
    return sum;
}

int synth_open(struct synth **out, uint64_t seed) {
    struct synth *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_NOMEM, "random weights: out of memory");
    s->seed = seed;
    s->normals = mem_alloc(POOL_ELEMS * sizeof *s->normals, 64, "random weights");
    if (!s->normals) {
        synth_close(s);
        return ERR_NOMEM;
    }
    uint64_t state = seed;
    for (int i = 0; i < POOL_ELEMS; i++) s->normals[i] = SYNTH_SIGMA * normal(&state);
    *out = s;
    return 0;
}

void synth_close(struct synth *s) {
    if (!s) return;
    for (int i = 0; i < QT_END; i++) mem_free(s->pool[i]);
    mem_free(s->normals);
    free(s);
}

/* The two types without an encoder: any codes are as likely as others, only the scales must be right. */
static int fill_uncoded(uint8_t *p, int type, uint64_t seed) {
    for (int64_t i = 0; i < POOL_ELEMS; i += quant_info(type)->block_elems, p += quant_info(type)->block_bytes) {
        if (type == QT_NVFP4) {
            struct nvfp4 b;
            for (int j = 0; j < 32; j++) b.qs[j] = (uint8_t)next_rand(&seed);
            /* u = M * 2^-10 with M in 4..6 times codes of standard deviation 6.1: about SYNTH_SIGMA. */
            for (int j = 0; j < 4; j++) b.scales[j] = (uint8_t)(4 + next_rand(&seed) % 3);
            memcpy(p, &b, sizeof b);
        } else {
            struct tq2_0 b = {.d = f32_to_f16(1.22f * SYNTH_SIGMA)}; /* codes -1, 0, 1 have deviation 0.82 */
            for (int j = 0; j < 256; j++) b.qs[j >> 2] |= (uint8_t)((next_rand(&seed) % 3) << (2 * (j & 3)));
            memcpy(p, &b, sizeof b);
        }
    }
    return 0;
}

static int make_pool(struct synth *s, int type) {
    if (s->pool[type]) return 0;
    size_t bytes;
    if (!quant_info(type) || !quant_info(type)->decodable || !quant_row_bytes(&bytes, type, POOL_ELEMS))
        return err_set(ERR_ARG, "random weights: type %s cannot be made", quant_name(type));
    uint8_t *p = mem_alloc(bytes, 64, "random weights");
    if (!p) return ERR_NOMEM;
    int rc = quant_info(type)->encodable ? quant_encode_row(type, s->normals, p, POOL_ELEMS)
                                         : fill_uncoded(p, type, s->seed);
    if (rc) {
        mem_free(p);
        return rc;
    }
    s->pool[type] = p;
    return 0;
}

/* One row of n values. The pool's last piece can start PIECE_ELEMS before its end. */
static void fill_row(uint8_t *dst, const uint8_t *pool, const struct quant_info *q, int64_t n, uint64_t *state) {
    int64_t blocks = n / q->block_elems, piece = PIECE_ELEMS / q->block_elems;
    uint64_t starts = (uint64_t)(POOL_ELEMS / q->block_elems - piece + 1);
    size_t block_bytes = (size_t)q->block_bytes;
    while (blocks > 0) {
        int64_t take = blocks < piece ? blocks : piece;
        const uint8_t *from = pool + (next_rand(state) >> 32) % starts * block_bytes;
        memcpy(dst, from, (size_t)take * block_bytes);
        dst += (size_t)take * block_bytes;
        blocks -= take;
    }
}

static bool ends_with(const char *s, const char *end) {
    size_t a = strlen(s), b = strlen(end);
    return a >= b && !strcmp(s + a - b, end);
}

/* Divisors of the rotary frequencies of llama 3.x for an original context of 8192: 1 for short wavelengths, `factor` for
 * long ones, a blend between. */
static void fill_rope_freqs(float *y, const struct shape *shape, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        double wave = 6.283185307179586 * pow(shape->rope_base, 2.0 * (double)i / shape->n_rot);
        double factor = shape->rope_divisor_factor, t = (8192 / wave - 1) / (4 - 1);
        if (t > 1) t = 1;
        if (t < 0) t = 0;
        y[i] = (float)(1 / ((1 - t) / factor + t));
    }
}

/* Vectors and the other tensors that stay F32. */
static void fill_f32(float *y, const struct shape *shape, const char *name, int64_t n, uint64_t *state) {
    if (!strcmp(name, "rope_freqs.weight")) {
        fill_rope_freqs(y, shape, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        if (ends_with(name, "norm.weight"))
            y[i] = 1;
        else if (ends_with(name, "ssm_a"))
            y[i] = -uniform(state, 0.05f, 2); /* decay rate per step, times softplus of dt */
        else if (ends_with(name, "ssm_dt.bias"))
            y[i] = uniform(state, -5, 0);
        else if (ends_with(name, "ssm_conv1d.weight"))
            y[i] = 0.4f * normal(state); /* four taps keep about the size of their input */
        else
            y[i] = SYNTH_SIGMA * normal(state);
    }
}

/* State of a row: depends on seed, tensor and row only. */
static uint64_t row_state(const struct synth *s, const char *name, int64_t row) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *name; name++) h = (h ^ (uint8_t)*name) * 0x100000001b3u;
    uint64_t state = s->seed ^ h;
    return next_rand(&state) + (uint64_t)row * 0xd1342543de82ef95u;
}

int synth_rows(struct synth *s, void *dst, const struct shape *shape, const struct shape_tensor *t, int64_t first,
               int64_t n) {
    int rc = make_pool(s, t->type);
    if (rc) return rc;
    size_t row_bytes;
    if (!quant_row_bytes(&row_bytes, t->type, t->dims[0]))
        return err_set(ERR_ARG, "random weights: %s: rows of %lld do not fit %s", t->name, (long long)t->dims[0],
                       quant_name(t->type));
    uint8_t *p = dst;
    for (int64_t r = first; r < first + n; r++, p += row_bytes) {
        uint64_t state = row_state(s, t->name, r);
        if (t->type == QT_F32 && (t->n_dims == 1 || ends_with(t->name, "conv1d.weight")))
            fill_f32((float *)(void *)p, shape, t->name, t->dims[0], &state);
        else
            fill_row(p, s->pool[t->type], quant_info(t->type), t->dims[0], &state);
    }
    return 0;
}
