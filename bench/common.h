/* common.h: what the benches share: time, medians, weights of plausible values. */
#ifndef LH_BENCH_COMMON_H
#define LH_BENCH_COMMON_H

#include "core/f16.h"
#include "core/mem.h"
#include "core/quant.h"
#include "core/strip.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

/* Random codes with scales of ordinary size: bytes of 16 rows as in a file. */
static inline void random_rows(int type, uint8_t *p, size_t bytes, uint32_t *seed) {
    const struct quant_info *q = quant_info(type);
    for (size_t i = 0; i < bytes; i++) *seed = *seed * 1664525u + 1013904223u, p[i] = (uint8_t)(*seed >> 24);
    for (size_t b = 0; b < bytes; b += (size_t)q->block_bytes) {
        uint16_t small = 0x1000 + (p[b] & 255);
        switch (type) {
        case QT_F32: {
            float f = (float)((int)p[b] - 128) / 4096;
            memcpy(p + b, &f, 4);
            break;
        }
        case QT_F16: {
            uint16_t h = f32_to_f16((float)((int)p[b] - 128) / 4096);
            memcpy(p + b, &h, 2);
            break;
        }
        case QT_BF16: {
            uint16_t h = f32_to_bf16((float)((int)p[b] - 128) / 4096);
            memcpy(p + b, &h, 2);
            break;
        }
        case QT_Q2_K:
            memcpy(p + b + 80, &small, 2), memcpy(p + b + 82, &small, 2);
            break;
        case QT_Q3_K:
            memcpy(p + b + 108, &small, 2);
            break;
        case QT_Q6_K:
            memcpy(p + b + 208, &small, 2);
            break;
        case QT_TQ2_0:
            memcpy(p + b + 64, &small, 2);
            break;
        case QT_MXFP4:
            p[b] = (uint8_t)(118 + (p[b] & 3));
            break;
        case QT_NVFP4:
            memset(p + b, 0x28, 4);
            break;
        default:
            memcpy(p + b, &small, 2), memcpy(p + b + 2, &small, q->block_bytes % 4 ? 0 : 2);
        }
    }
}

/* `copies` matrices that follow each other; each strip is one of 4 random ones. NULL: no memory. mem_free. */
static inline uint8_t *random_matrices(const struct strip_layout *l, int type, int64_t cols, int64_t copies) {
    uint32_t seed = 1;
    size_t row;
    if (!quant_row_bytes(&row, type, cols)) return NULL;
    uint8_t *src = malloc(16 * row), *data = mem_alloc(l->bytes * (size_t)copies, 4096, "weights");
    if (!src || !data) {
        free(src), mem_free(data);
        return NULL;
    }
    int64_t n = l->n_strip * copies;
    for (int64_t s = 0; s < n; s++) {
        uint8_t *strip = data + (size_t)s * l->strip_bytes;
        if (s >= 4) {
            memcpy(strip, data + (size_t)(s % 4) * l->strip_bytes, l->strip_bytes);
            continue;
        }
        random_rows(type, src, 16 * row, &seed);
        strip_pack(l, type, strip, src, cols, 16);
    }
    free(src);
    return data;
}

#endif
