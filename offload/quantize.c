/* quantize.c: see quantize.h. Tensors are read in pieces of some megabytes, converted row by row on all threads and written
 * in file order; memory does not grow with the model. */
#include "offload/quantize.h"

#include "core/err.h"
#include "core/gguf_write.h"
#include "core/mem.h"
#include "core/model.h"
#include "core/quant.h"
#include "core/tokenizer.h"
#include "cpu/pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PIECE_BYTES = 32 << 20, TASK_ELEMS = 1 << 16 };

/* One file being converted. */
struct work {
    const struct quantize_params *p;
    struct gguf *g;
    struct gguf_writer *w;
    struct pool *pool;
    int *types; /* [n tensors] enum quant_type to write */
    bool *fallback;
    uint8_t *src, *dst;
    size_t src_bytes, dst_bytes;
    float *scratch; /* [threads, max_cols] */
    int64_t max_cols;
};

/* --- which type each tensor gets ------------------------------------------------------------------------------------------ */

/* Scalar, or the largest element of a per-layer array; 0 when absent. */
static int64_t arch_number(const struct gguf *g, const char *name) {
    const char *arch = "";
    size_t n = 0;
    char key[160];
    gguf_str(g, "general.architecture", &arch, &n);
    snprintf(key, sizeof key, "%.*s.%s", n < 64 ? (int)n : 64, arch, name);
    const struct gguf_kv *kv = gguf_find(g, key);
    int64_t max = 0, v;
    int64_t count = !kv ? 0 : kv->type == GGUF_ARR ? kv->n : 1;
    for (int64_t i = 0; i < count; i++)
        if (gguf_elem_i64(kv, i, &v) && v > max) max = v;
    return max;
}

static int small_number(const struct gguf *g, const char *name) {
    int64_t v = arch_number(g, name);
    return v > 1 << 20 ? 1 << 20 : (int)v;
}

static bool has(const char *name, const char *part) {
    return strstr(name, part) != NULL;
}

static struct mix_model describe(const struct gguf *g) {
    struct mix_model m = {.n_block = small_number(g, "block_count"),
                          .n_head = small_number(g, "attention.head_count"),
                          .n_kv = small_number(g, "attention.head_count_kv"),
                          .n_expert = small_number(g, "expert_count"),
                          .tied = !gguf_tensor_find(g, "output.weight")};
    if (!m.n_kv) m.n_kv = m.n_head;
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const char *name = gguf_tensor(g, i)->name;
        m.n_attn_v += has(name, ".attn_v.weight") || has(name, ".attn_qkv.weight");
    }
    return m;
}

struct place {
    int index, block;
};

static int by_block(const void *a, const void *b) {
    const struct place *x = a, *y = b;
    return x->block != y->block ? (x->block > y->block) - (x->block < y->block) : x->index - y->index;
}

static bool is_output(const struct work *k, const char *name) {
    return !strcmp(name, gguf_tensor_find(k->g, "output.weight") ? "output.weight" : "token_embd.weight");
}

static bool is_float(int type) {
    return type == QT_F32 || type == QT_F16 || type == QT_BF16;
}

/* A type asked for by name must fit as it is: no silent fallback. */
static int forced_type(const struct work *k, const struct gguf_tensor *t, int *type) {
    int forced = -1;
    if (is_output(k, t->name)) forced = k->p->leave_output ? t->type : k->p->output_type;
    if (!strcmp(t->name, "token_embd.weight") && k->p->embedding_type >= 0) forced = k->p->embedding_type;
    if (forced < 0) return 0;
    size_t bytes;
    if (!quant_row_bytes(&bytes, forced, t->dims[0]))
        return err_set(ERR_ARG, "%s: rows of %lld values do not fill the blocks of %s", t->name, (long long)t->dims[0],
                       quant_name(forced));
    *type = forced;
    return 0;
}

/* May t be converted to `type`? */
static int check_source(const struct work *k, const struct gguf_tensor *t, int type) {
    const struct quant_info *q = quant_info(t->type);
    if (!q || !t->bytes) return err_set(ERR_UNSUPPORTED, "tensor %s has the unknown type %d", t->name, t->type);
    if (t->type == type) return 0;
    if (!q->decodable)
        return err_set(ERR_UNSUPPORTED, "tensor %s: type %s cannot be converted", t->name, quant_name(t->type));
    if (!is_float(t->type) && !k->p->allow_requantize)
        return err_set(ERR_ARG,
                       "tensor %s is already packed as %s: converting it again loses more (--allow-requantize does it)",
                       t->name, quant_name(t->type));
    if (!quant_info(type)->encodable)
        return err_set(ERR_ARG, "tensor %s: type %s cannot be written", t->name, quant_name(type));
    return 0;
}

static int choose_one(struct work *k, struct mix_state *state, int index) {
    const struct gguf_tensor *t = gguf_tensor(k->g, index);
    int type = mix_type(state, t->name, t->n_dims, t->dims);
    const struct quant_info *q = quant_info(t->type), *base = quant_info(mix_base_type(k->p->mix));
    /* Integer tensors are tables, not weights. */
    if (q && q->block_elems == 1 && !is_float(t->type)) type = t->type;
    k->fallback[index] = type != QT_F32 && t->dims[0] % base->block_elems != 0;
    int rc = forced_type(k, t, &type);
    if (!rc) rc = check_source(k, t, type);
    k->types[index] = type;
    return rc;
}

static int choose_types(struct work *k) {
    int n = gguf_n_tensors(k->g), rc = 0;
    struct place *order = calloc((size_t)n + 1, sizeof *order);
    if (!order) return err_set(ERR_NOMEM, "quantize: out of memory");
    for (int i = 0; i < n; i++) {
        order[i] = (struct place){.index = i, .block = -1};
        sscanf(gguf_tensor(k->g, i)->name, "blk.%d.", &order[i].block);
    }
    qsort(order, (size_t)n, sizeof *order, by_block);
    struct mix_model model = describe(k->g);
    struct mix_state state;
    mix_begin(&state, k->p->mix, k->p->pure, &model);
    for (int i = 0; i < n && !rc; i++) rc = choose_one(k, &state, order[i].index);
    free(order);
    return rc;
}

/* --- converting ------------------------------------------------------------------------------------------------------------ */

/* Rows [0, rows) of a piece that lies in src and goes to dst. */
struct piece {
    struct work *k;
    const struct gguf_tensor *t;
    int type;
    size_t src_row, dst_row;
    int64_t rows, rows_per_task;
    pthread_mutex_t lock; /* guards the failure */
    int rc;
    int64_t bad_row;
    char why[256];
};

/* err_text belongs to the thread that failed, so the sentence is carried over. The first row wins whatever the order. */
static void note_failure(struct piece *pc, int rc, int64_t row) {
    pthread_mutex_lock(&pc->lock);
    if (!pc->rc || row < pc->bad_row) {
        pc->rc = rc;
        pc->bad_row = row;
        snprintf(pc->why, sizeof pc->why, "%s", err_text());
    }
    pthread_mutex_unlock(&pc->lock);
}

static void convert_task(void *arg, int task, int worker) {
    struct piece *pc = arg;
    int64_t first = task * pc->rows_per_task, last = first + pc->rows_per_task, cols = pc->t->dims[0];
    if (last > pc->rows) last = pc->rows;
    float *scratch = pc->k->scratch + (size_t)worker * (size_t)pc->k->max_cols;
    for (int64_t r = first; r < last; r++) {
        const uint8_t *from = pc->k->src + (size_t)r * pc->src_row;
        quant_decode_row(pc->t->type, from, scratch, cols);
        int rc = quant_encode_row(pc->type, scratch, pc->k->dst + (size_t)r * pc->dst_row, cols);
        if (rc) note_failure(pc, rc, r);
    }
}

static int convert_piece(struct piece *pc, int64_t first_row) {
    int64_t per_task = TASK_ELEMS / pc->t->dims[0];
    pc->rows_per_task = per_task > 0 ? per_task : 1;
    pc->rc = 0;
    pool_run(pc->k->pool, convert_task, pc, (int)((pc->rows + pc->rows_per_task - 1) / pc->rows_per_task));
    if (!pc->rc) return 0;
    return err_set(pc->rc, "%s: tensor %s, row %lld: %s", gguf_path(pc->k->g, pc->t->shard), pc->t->name,
                   (long long)(first_row + pc->bad_row), pc->why);
}

static bool stopped(const struct work *k) {
    return k->p->stop && *k->p->stop;
}

static int64_t row_count(const struct gguf_tensor *t) {
    return t->dims[1] * t->dims[2] * t->dims[3];
}

static int convert_tensor(struct work *k, int index) {
    const struct gguf_tensor *t = gguf_tensor(k->g, index);
    struct piece pc = {.k = k, .t = t, .type = k->types[index], .lock = PTHREAD_MUTEX_INITIALIZER};
    if (!quant_row_bytes(&pc.src_row, t->type, t->dims[0]) || !quant_row_bytes(&pc.dst_row, pc.type, t->dims[0]))
        return err_set(ERR_FORMAT, "tensor %s: rows of %lld values", t->name, (long long)t->dims[0]);
    int64_t rows = row_count(t), fit_src = (int64_t)(k->src_bytes / pc.src_row),
            fit_dst = (int64_t)(k->dst_bytes / pc.dst_row);
    int64_t step = fit_src < fit_dst ? fit_src : fit_dst;
    int rc = 0;
    for (int64_t r = 0; r < rows && !rc; r += step) {
        if (stopped(k)) return err_set(ERR_INTERRUPTED, "interrupted");
        pc.rows = rows - r < step ? rows - r : step;
        rc = gguf_read(k->g, t->shard, t->offset + (uint64_t)r * pc.src_row, k->src, (size_t)pc.rows * pc.src_row);
        if (rc) break;
        if (t->type == pc.type) {
            rc = gguf_writer_data(k->w, k->src, (size_t)pc.rows * pc.src_row);
        } else {
            rc = convert_piece(&pc, r);
            if (!rc) rc = gguf_writer_data(k->w, k->dst, (size_t)pc.rows * pc.dst_row);
        }
    }
    return rc;
}

/* --- the file ---------------------------------------------------------------------------------------------------------------- */

static int copy_metadata(struct work *k) {
    int rc = 0;
    for (int i = 0; i < gguf_n_kv(k->g) && !rc; i++) {
        const struct gguf_kv *kv = gguf_kv(k->g, i);
        bool drop = !strcmp(kv->key, "general.alignment") || !strcmp(kv->key, "general.file_type") ||
                    !strcmp(kv->key, "general.quantization_version") || !strncmp(kv->key, "split.", 6);
        if (!drop) rc = gguf_writer_copy_kv(k->w, kv);
    }
    if (!rc) rc = gguf_writer_u32(k->w, "general.file_type", (uint32_t)mix_file_type(k->p->mix));
    if (!rc) rc = gguf_writer_u32(k->w, "general.quantization_version", 2);
    return rc;
}

/* Buffers large enough for a piece, and for at least one row of every tensor. */
static int open_buffers(struct work *k) {
    k->src_bytes = k->dst_bytes = PIECE_BYTES;
    for (int i = 0; i < gguf_n_tensors(k->g); i++) {
        const struct gguf_tensor *t = gguf_tensor(k->g, i);
        size_t src = 0, dst = 0;
        quant_row_bytes(&src, t->type, t->dims[0]);
        quant_row_bytes(&dst, k->types[i], t->dims[0]);
        if (src > k->src_bytes) k->src_bytes = src;
        if (dst > k->dst_bytes) k->dst_bytes = dst;
        if (t->type != k->types[i] && t->dims[0] > k->max_cols) k->max_cols = t->dims[0];
    }
    k->src = mem_alloc(k->src_bytes, 64, "quantize: source piece");
    k->dst = mem_alloc(k->dst_bytes, 64, "quantize: packed piece");
    k->scratch = mem_alloc(size_mul3((size_t)k->p->threads, (size_t)k->max_cols, sizeof(float)), 64, "quantize: rows");
    return k->src && k->dst && k->scratch ? 0 : ERR_NOMEM;
}

static int add_records(struct work *k) {
    int rc = 0;
    for (int i = 0; i < gguf_n_tensors(k->g) && !rc; i++) {
        const struct gguf_tensor *t = gguf_tensor(k->g, i);
        rc = gguf_writer_tensor(k->w, t->name, k->types[i], t->n_dims, t->dims);
    }
    return rc;
}

static int step_through(struct work *k, struct quantize_result *sum) {
    int n = gguf_n_tensors(k->g), rc = 0;
    for (int i = 0; i < n && !rc; i++) {
        const struct gguf_tensor *t = gguf_tensor(k->g, i);
        struct quantize_step step = {
            .index = i, .count = n, .from = t, .type = k->types[i], .fallback = k->fallback[i]};
        size_t row = 0;
        quant_row_bytes(&row, step.type, t->dims[0]);
        step.bytes = row * (size_t)row_count(t);
        sum->params += (uint64_t)(t->dims[0] * row_count(t));
        sum->bytes_from += t->bytes;
        sum->bytes_to += step.bytes;
        sum->n_fallback += step.fallback;
        if (k->p->on_step) k->p->on_step(k->p->ctx, &step);
        if (!k->p->dry_run) rc = convert_tensor(k, i);
    }
    return rc;
}

static int write_file(struct work *k, const char *to, struct quantize_result *sum) {
    int rc = gguf_writer_open(&k->w, to);
    if (!rc) rc = open_buffers(k);
    if (!rc) rc = pool_open(&k->pool, k->p->threads, NULL, 0);
    if (!rc) rc = copy_metadata(k);
    if (!rc) rc = add_records(k);
    if (!rc) rc = gguf_writer_begin_data(k->w);
    if (!rc) rc = step_through(k, sum);
    return rc ? rc : gguf_writer_finish(k->w);
}

static bool is_same_file(const struct gguf *g, const char *path) {
    struct stat a, b;
    if (stat(path, &b)) return false;
    for (int i = 0; i < gguf_n_shard(g); i++)
        if (!stat(gguf_path(g, i), &a) && a.st_dev == b.st_dev && a.st_ino == b.st_ino) return true;
    return false;
}

/* A broken model is not made into another one. Architectures that this engine does not know are converted as they are. */
static int check_model(const struct gguf *g) {
    struct model m;
    struct tokenizer *t = NULL;
    int rc = model_open(&m, g);
    if (rc == ERR_UNSUPPORTED) return 0;
    if (rc) return rc;
    model_close(&m);
    rc = tokenizer_from_gguf(&t, g);
    tokenizer_close(t);
    return rc;
}

static int run(struct work *k, const char *to, struct quantize_result *sum) {
    int n = gguf_n_tensors(k->g);
    if (n == 0) return err_set(ERR_FORMAT, "%s: holds no tensors, not even token_embd.weight", gguf_path(k->g, 0));
    int rc = check_model(k->g);
    if (rc) return rc;
    if (is_same_file(k->g, to)) return err_set(ERR_ARG, "%s: input and output are the same file", to);
    k->types = calloc((size_t)n, sizeof *k->types);
    k->fallback = calloc((size_t)n, sizeof *k->fallback);
    if (!k->types || !k->fallback) return err_set(ERR_NOMEM, "quantize: out of memory");
    rc = choose_types(k);
    if (rc) return rc;
    return k->p->dry_run ? step_through(k, sum) : write_file(k, to, sum);
}

int quantize_file(struct quantize_result *out, const char *from, const char *to, const struct quantize_params *p) {
    struct work k = {.p = p};
    *out = (struct quantize_result){0};
    int rc = gguf_open(&k.g, from);
    if (rc) return rc;
    rc = run(&k, to, out);
    gguf_writer_close(k.w);
    pool_close(k.pool);
    gguf_close(k.g);
    mem_free(k.src);
    mem_free(k.dst);
    mem_free(k.scratch);
    free(k.types);
    free(k.fallback);
    return rc;
}
