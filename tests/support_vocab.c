/* support_vocab.c: see support_vocab.h. */
#include "tests/support_vocab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/err.h"
#include "core/gguf.h"
#include "tests/support.h"

struct tokenizer *test_vocab_open(const char *name, const char *pre) {
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    if (gguf_open(&g, test_path(name))) fail_msg("%s: %s", name, err_text());
    if (tokenizer_from_gguf_as(&t, g, pre)) fail_msg("%s: %s", name, err_text());
    gguf_close(g);
    return t;
}

static void print_ids(const char *label, const int32_t *ids, size_t n, size_t from) {
    fprintf(stderr, "  %s (%zu ids)", label, n);
    for (size_t i = from > 3 ? from - 3 : 0; i < n && i < from + 8; i++) fprintf(stderr, " %d", ids[i]);
    fprintf(stderr, "\n");
}

void test_ids(const struct tokenizer *t, const char *what, const char *text, size_t n, unsigned flags,
              const int32_t *want, size_t n_want) {
    int32_t *ids;
    size_t n_ids, i = 0;
    if (tokenizer_encode(t, text, n, flags, &ids, &n_ids)) fail_msg("%s: %s", what, err_text());
    while (i < n_ids && i < n_want && ids[i] == want[i]) i++;
    if (i < n_ids || i < n_want) {
        print_ids("got ", ids, n_ids, i);
        print_ids("want", want, n_want, i);
        fail_msg("%s: ids differ at %zu, text \"%.*s\"", what, i, (int)(n < 200 ? n : 200), text);
    }
    free(ids);
}

void test_round_trip(const struct tokenizer *t, const char *what, const char *text, size_t n, unsigned flags) {
    int32_t *ids;
    size_t n_ids, n_back, i = 0;
    char *back;
    if (tokenizer_encode(t, text, n, flags, &ids, &n_ids)) fail_msg("%s: %s", what, err_text());
    if (tokenizer_decode(t, ids, n_ids, TOK_SHOW_SPECIAL, &back, &n_back)) fail_msg("%s: %s", what, err_text());
    while (i < n && i < n_back && text[i] == back[i]) i++;
    if (i < n || i < n_back) fail_msg("%s: text of %zu bytes came back as %zu, different at %zu", what, n, n_back, i);
    free(ids);
    free(back);
}
