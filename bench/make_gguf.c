/* make_gguf.c: writes a GGUF of a built-in shape with random weights, in any mix, without encoding them one by one.
 *   make_gguf qwen3-0.6b:q4_k_m OUT.gguf [--seed N] [--vocab FILE.gguf] [--layers N] [--pure] */
#include "core/err.h"
#include "core/gguf.h"
#include "core/gguf_write.h"
#include "core/quant.h"
#include "core/shape.h"
#include "core/synth.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PIECE_BYTES = 8 << 20 };

struct job {
    const struct shape *shape;
    enum mix mix;
    bool pure;
    int n_layer;
    uint64_t seed;
    const char *vocab, *out;
    struct gguf_writer *w;
    struct synth *synth;
    uint8_t *buffer; /* at least one row */
    size_t buffer_bytes;
};

static int add_record(void *ctx, const struct shape_tensor *t) {
    struct job *j = ctx;
    size_t row = t->bytes / (size_t)(t->dims[1] * t->dims[2]);
    if (row > j->buffer_bytes) j->buffer_bytes = row;
    return gguf_writer_tensor(j->w, t->name, t->type, t->n_dims, t->dims);
}

static int write_tensor(void *ctx, const struct shape_tensor *t) {
    struct job *j = ctx;
    int64_t rows = t->dims[1] * t->dims[2];
    size_t row = t->bytes / (size_t)rows;
    int64_t step = (int64_t)(j->buffer_bytes / row);
    for (int64_t r = 0; r < rows; r += step) {
        int64_t n = rows - r < step ? rows - r : step;
        int rc = synth_rows(j->synth, j->buffer, j->shape, t, r, n);
        if (!rc) rc = gguf_writer_data(j->w, j->buffer, (size_t)n * row);
        if (rc) return rc;
    }
    return 0;
}

static int add_tokenizer(struct job *j) {
    if (!j->vocab) return synth_tokenizer(j->w, j->shape->n_vocab);
    struct gguf *g = NULL;
    int rc = gguf_open(&g, j->vocab);
    if (rc) return rc;
    rc = synth_copy_tokenizer(j->w, g, j->shape->n_vocab);
    gguf_close(g);
    return rc;
}

static int write_file(struct job *j) {
    int rc = synth_metadata(j->w, j->shape, j->mix, j->n_layer);
    if (!rc) rc = add_tokenizer(j);
    if (!rc) rc = shape_tensors(j->shape, j->mix, j->pure, j->n_layer, add_record, j);
    if (!rc) rc = gguf_writer_begin_data(j->w);
    if (rc) return rc;
    j->buffer = malloc(j->buffer_bytes);
    if (!j->buffer) return err_set(ERR_NOMEM, "%s: out of memory", j->out);
    rc = shape_tensors(j->shape, j->mix, j->pure, j->n_layer, write_tensor, j);
    return rc ? rc : gguf_writer_finish(j->w);
}

static int run(struct job *j) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    int rc = gguf_writer_open(&j->w, j->out);
    if (!rc) rc = synth_open(&j->synth, j->seed);
    if (!rc) rc = write_file(j);
    clock_gettime(CLOCK_MONOTONIC, &b);
    if (!rc) {
        double s = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
        double bytes = (double)gguf_writer_file_bytes(j->w);
        printf("%s: %s %s, random weights, seed %llu: %.3f GB in %.1f s\n", j->out, j->shape->name, mix_name(j->mix),
               (unsigned long long)j->seed, bytes / 1e9, s);
    }
    gguf_writer_close(j->w);
    synth_close(j->synth);
    free(j->buffer);
    return rc;
}

static int usage(FILE *to, int status) {
    fprintf(to, "usage: make_gguf SHAPE[:MIX] OUT.gguf [--seed N] [--vocab FILE.gguf] [--layers N] [--pure]\nshapes:");
    for (int i = 0; i < shape_count(); i++) fprintf(to, " %s", shape_at(i)->name);
    fprintf(to, "\nmixes:");
    for (int i = 0; i < MIX_COUNT; i++) fprintf(to, " %s", mix_name((enum mix)i));
    fprintf(to, "\n");
    return status;
}

/* Whole decimal number within [0, max]. */
static bool parse_number(uint64_t *out, const char *text, uint64_t max) {
    char *end;
    unsigned long long v = strtoull(text, &end, 10);
    *out = v;
    return *text >= '0' && *text <= '9' && !*end && v <= max;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},   {"vocab", required_argument, NULL, 'v'},
        {"layers", required_argument, NULL, 'l'}, {"pure", no_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},         {0}};
    struct job j = {.buffer_bytes = PIECE_BYTES, .seed = 1};
    uint64_t layers = 0;
    for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        bool ok = true;
        switch (c) {
        case 's':
            ok = parse_number(&j.seed, optarg, UINT64_MAX);
            break;
        case 'l':
            ok = parse_number(&layers, optarg, 1024) && layers > 0;
            break;
        case 'v':
            j.vocab = optarg;
            break;
        case 'p':
            j.pure = true;
            break;
        case 'h':
            return usage(stdout, 0);
        default:
            return usage(stderr, 2);
        }
        if (!ok) {
            fprintf(stderr, "make_gguf: '%s' is not a number in range\n", optarg);
            return 2;
        }
    }
    if (argc - optind != 2) return usage(stderr, 2);
    j.n_layer = (int)layers;
    j.out = argv[optind + 1];
    int rc = shape_parse(&j.shape, &j.mix, argv[optind]);
    if (!rc) rc = run(&j);
    if (rc) fprintf(stderr, "make_gguf: %s\n", err_text());
    return err_exit_status(rc);
}
