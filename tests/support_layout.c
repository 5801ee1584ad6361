/* support_layout.c: see support_layout.h. */
#include "tests/support_layout.h"

#include "core/err.h"
#include "core/gguf.h"
#include "core/gguf_write.h"
#include "core/quant.h"
#include "tests/support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HK = 2, HV = 4, R = HV / HK, DIM = 32, QK = 2 * HK * DIM };

/* Value head of qwen3next that is head j of the tiled order. */
static int grouped(int j) { return j % HK * R + j / HK; }

/* Rows from `first` on in the tiled order of value heads of `per` rows each. */
static void tile_rows(float *dst, const float *src, int64_t first, int64_t per, int64_t cols) {
    for (int j = 0; j < HV; j++)
        memcpy(dst + (first + j * per) * cols, src + (first + grouped(j) * per) * cols, (size_t)(per * cols) * sizeof *dst);
}

static bool named(const char *name, const char *suffix) {
    const char *dot = strstr(name, ".");
    dot = dot ? strstr(dot + 1, ".") : NULL; /* after blk.N. */
    return dot && !strcmp(dot + 1, suffix);
}

/* The tensor's data in the other layout. */
static void rearrange(float *dst, const float *src, const struct gguf_tensor *t) {
    int64_t cols = t->dims[0], rows = t->dims[1];
    memcpy(dst, src, t->bytes);
    if (named(t->name, "attn_qkv.weight") || named(t->name, "ssm_conv1d.weight")) {
        /* attention layers have no such tensor in this file */
        tile_rows(dst, src, QK, DIM, cols);
    } else if (named(t->name, "attn_gate.weight")) {
        tile_rows(dst, src, 0, DIM, cols);
    } else if (named(t->name, "ssm_a") || named(t->name, "ssm_dt.bias")) {
        tile_rows(dst, src, 0, 1, 1);
    } else if (named(t->name, "ssm_out.weight")) {
        for (int64_t r = 0; r < rows; r++) tile_rows(dst + r * cols, src + r * cols, 0, DIM, 1);
    }
}

/* beta (which = 0) or alpha of ssm_ba, whose rows are per key head R of beta, then R of alpha. */
static void split_ba(float *dst, const float *src, int64_t cols, int which) {
    for (int j = 0; j < HV; j++) {
        int head = grouped(j);
        memcpy(dst + j * cols, src + (head / R * 2 * R + which * R + head % R) * cols, (size_t)cols * sizeof *dst);
    }
}

static void write_keys(struct gguf_writer *w, const struct gguf *g) {
    static const char from[] = "qwen3next.", arch[] = "qwen35moe";
    for (int i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv(g, i);
        char key[128];
        if (!strcmp(kv->key, "general.architecture")) {
            gguf_writer_str(w, kv->key, arch, strlen(arch));
        } else if (!strncmp(kv->key, from, strlen(from))) {
            snprintf(key, sizeof key, "%s.%s", arch, kv->key + strlen(from));
            gguf_writer_scalar(w, key, kv->type, kv->data);
        } else {
            gguf_writer_copy_kv(w, kv);
        }
    }
    gguf_writer_arr(w, "qwen35moe.rope.dimension_sections", GGUF_I32, 4, (const int32_t[]){2, 1, 1, 0});
}

static const char *ba_name(char *buf, size_t cap, const char *name, int which) {
    snprintf(buf, cap, "%.*s%s", (int)(strlen(name) - strlen("ssm_ba.weight")), name, which ? "ssm_alpha.weight" : "ssm_beta.weight");
    return buf;
}

void write_as_qwen35moe(const char *path) {
    struct gguf *g;
    struct gguf_writer *w;
    char name[128];
    int n_ba = 0;
    if (gguf_open(&g, test_path("tiny-models/tiny-random-qwen3next-f32.gguf")) || gguf_writer_open(&w, path)) fail_msg("%s", err_text());
    write_keys(w, g);
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        assert_int_equal(t->type, QT_F32);
        if (named(t->name, "ssm_ba.weight"))
            for (int k = 0; k < 2; k++) gguf_writer_tensor(w, ba_name(name, sizeof name, t->name, k), QT_F32, 2, (int64_t[]){t->dims[0], HV});
        else
            gguf_writer_tensor(w, t->name, t->type, t->n_dims, t->dims);
    }
    gguf_writer_begin_data(w);
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        float *src = malloc(t->bytes), *dst = malloc(t->bytes);
        assert_int_equal(gguf_read(g, t->shard, t->offset, src, t->bytes), 0);
        bool ba = named(t->name, "ssm_ba.weight");
        n_ba += ba;
        if (ba)
            for (int k = 0; k < 2; k++) split_ba(dst + k * HV * t->dims[0], src, t->dims[0], k);
        else
            rearrange(dst, src, t);
        gguf_writer_data(w, dst, t->bytes);
        free(src);
        free(dst);
    }
    if (gguf_writer_finish(w)) fail_msg("%s", err_text());
    assert_int_equal(n_ba, 6);
    gguf_writer_close(w);
    gguf_close(g);
}
