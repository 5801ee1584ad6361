/* test_tokenizer.c: ids and words of the reference tokenizers, for every vocabulary below tests/data. */
#include "tests/support.h"
#include "tests/support_vocab.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/err.h"
#include "core/tokenizer_impl.h"
#include "core/utf8.h"

#define QWEN3 "qwen2-tokenizer/qwen3-vocab.gguf.xz"

static struct {
    struct tokenizer *qwen2, *qwen2_with_35, *qwen35, *gpt2, *spm, *oss;
} tok;

static int open_all(void **state) {
    (void)state;
    tok.qwen2 = test_vocab_open(QWEN3, NULL);
    tok.qwen2_with_35 = test_vocab_open(QWEN3, "qwen35");
    tok.qwen35 = test_vocab_open("qwen35-tokenizer/qwen35-vocab.gguf.xz", NULL);
    tok.gpt2 = test_vocab_open("tokenizers/ggml-vocab-gpt-2.gguf.xz", NULL);
    tok.spm = test_vocab_open("tokenizers/ggml-vocab-llama-spm.gguf.xz", NULL);
    tok.oss = test_vocab_open("tokenizers/gpt-oss-vocab.gguf.xz", NULL);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    tokenizer_close(tok.qwen2);
    tokenizer_close(tok.qwen2_with_35);
    tokenizer_close(tok.qwen35);
    tokenizer_close(tok.gpt2);
    tokenizer_close(tok.spm);
    tokenizer_close(tok.oss);
    return 0;
}

/* --- cases.json --- */

static json_t *load(const char *name) {
    size_t n;
    char *p = test_read(name, &n);
    json_error_t e;
    json_t *j = json_loadb(p, n, JSON_ALLOW_NUL, &e);
    if (!j) fail_msg("%s:%d: %s", name, e.line, e.text);
    free(p);
    return j;
}

static int32_t *ints(const json_t *a, size_t *n) {
    *n = json_array_size(a);
    int32_t *v = malloc((*n + 1) * sizeof *v);
    for (size_t i = 0; i < *n; i++) v[i] = (int32_t)json_integer_value(json_array_get(a, i));
    return v;
}

/* The first of the fields that the case has. */
static const json_t *field(const json_t *c, const char *a, const char *b, const char *d) {
    const json_t *v = a ? json_object_get(c, a) : NULL;
    if (!v && b) v = json_object_get(c, b);
    return v ? v : json_object_get(c, d);
}

static size_t check_cases(const struct tokenizer *t, const char *file, unsigned flags, const char *first, const char *second) {
    json_t *j = load(file);
    const json_t *c;
    size_t i, n_cases = json_array_size(json_object_get(j, "cases"));
    json_array_foreach(json_object_get(j, "cases"), i, c) {
        const json_t *text = json_object_get(c, "text");
        size_t n;
        int32_t *want = ints(field(c, first, second, "ids"), &n);
        const char *name = json_string_value(json_object_get(c, "name"));
        test_ids(t, name, json_string_value(text), json_string_length(text), flags, want, n);
        free(want);
    }
    json_decref(j);
    return n_cases;
}

/* Without NFC normalisation, as llama.cpp. */
static void qwen2_cases(void **state) {
    (void)state;
    assert_int_equal(check_cases(tok.qwen2, "qwen2-tokenizer/cases.json", TOK_PARSE_SPECIAL, "ids_no_nfc", NULL), 80);
}

static void qwen35_splitter_on_qwen2_cases(void **state) {
    (void)state;
    assert_int_equal(check_cases(tok.qwen2_with_35, "qwen2-tokenizer/cases.json", TOK_PARSE_SPECIAL,
                                 "ids_qwen35_regex_no_nfc", "ids_no_nfc"),
                     80);
}

static void qwen35_cases(void **state) {
    (void)state;
    assert_int_equal(check_cases(tok.qwen35, "qwen35-tokenizer/cases.json", TOK_PARSE_SPECIAL, NULL, NULL), 54);
}

static void gpt_oss_cases(void **state) {
    (void)state;
    assert_int_equal(check_cases(tok.oss, "tokenizers/gpt-oss-cases.json", TOK_PARSE_SPECIAL, NULL, NULL), 80);
}

static void llama_spm_cases(void **state) {
    (void)state;
    assert_int_equal(check_cases(tok.spm, "tokenizers/llama-spm-cases.json", TOK_ADD_SPECIAL, NULL, NULL), 80);
}

/* --- .inp and .out of llama.cpp --- */

static size_t parse_line(const char *line, int32_t *ids, size_t max) {
    size_t n = 0;
    char *end;
    while (n < max && *line && *line != '\n') {
        long v = strtol(line, &end, 10);
        if (end == line) break;
        ids[n++] = (int32_t)v;
        line = end;
    }
    return n;
}

static void check_inp_out(const struct tokenizer *t, const char *stem, int n_cases) {
    static const char sep[] = "\n__ggml_vocab_test__\n";
    char name[200];
    snprintf(name, sizeof name, "%s.inp", stem);
    char *inp = test_read(name, NULL), *text = inp;
    snprintf(name, sizeof name, "%s.out", stem);
    char *out = test_read(name, NULL), *line = out;
    for (int i = 0; i < n_cases; i++) {
        char *end = strstr(text, sep);
        if (!end) fail_msg("%s: case %d has no end", stem, i);
        int32_t want[1000];
        size_t n_want = parse_line(line, want, 1000), n = (size_t)(end - text);
        snprintf(name, sizeof name, "%s case %d", stem, i);
        test_ids(t, name, text, n, 0, want, n_want);
        line = strchr(line, '\n');
        assert_non_null(line);
        line++;
        text = end + sizeof sep - 1;
    }
    assert_int_equal(*line, 0);
    assert_int_equal(*text, 0);
    free(inp);
    free(out);
}

static void llama_cpp_vectors(void **state) {
    (void)state;
    check_inp_out(tok.qwen2, "qwen2-tokenizer/ggml-vocab-qwen2.gguf", 46);
    check_inp_out(tok.qwen2_with_35, "qwen2-tokenizer/ggml-vocab-qwen35.gguf", 50);
    check_inp_out(tok.gpt2, "tokenizers/ggml-vocab-gpt-2.gguf", 46);
    check_inp_out(tok.spm, "tokenizers/ggml-vocab-llama-spm.gguf", 46);
}

/* --- tables of published ids --- */

struct row {
    const char *text;
    int32_t ids[48]; /* -1 ends them */
};

static void check_rows(const struct tokenizer *t, const struct row *rows, size_t n_rows) {
    for (size_t i = 0; i < n_rows; i++) {
        size_t n = 0;
        while (rows[i].ids[n] >= 0) n++;
        test_ids(t, rows[i].text, rows[i].text, strlen(rows[i].text), TOK_PARSE_SPECIAL, rows[i].ids, n);
    }
}

static void published_qwen_ids(void **state) {
    (void)state;
    static const struct row qwen2[] = {
        {"ied 4 \u00bd months", {1122, 220, 19, 220, 26062, 3951, -1}},
        {"\u00c4pfel", {86975, 15897, 301, -1}},
        {" ", {220, -1}},
        {"  ", {256, -1}},
        {"   ", {262, -1}},
        {"\t", {197, -1}},
        {"\n", {198, -1}},
        {"\n\n", {271, -1}},
        {"\n\n\n", {1406, -1}},
        {"\t\n", {1572, -1}},
        {"Hello world", {9707, 1879, -1}},
        {" Hello world", {21927, 1879, -1}},
        {"Hello, world!", {9707, 11, 1879, 0, -1}},
        {" this is \U0001f999.cpp", {419, 374, 11162, 99, 247, 13, 10821, -1}},
        {"w048 7tuijk dsdfhu", {86, 15, 19, 23, 220, 22, 83, 1963, 41808, 11472, 2940, 16739, -1}},
        {"   Hello", {256, 21927, -1}},
        {"    Hello", {262, 21927, -1}},
        {"    Hello\n    Hello", {262, 21927, 198, 262, 21927, -1}},
        {" (", {320, -1}},
        {"\n =", {198, 284, -1}},
        {"' era", {6, 11385, -1}},
        {"Hello, y'all! How are you \U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e",
         {9707, 11,  379,    64848, 0,     2585,  525,   498, 26525, 223, 937, 104100, 18493, 22377,
          99257, 16, 18, 16, 19, 16, 20, 16, 35727, 21216, -1}},
        {"!!!!!!", {17085, 2928, -1}},
        {"333333333", {18, 18, 18, 18, 18, 18, 18, 18, 18, -1}},
        {"C\u1eeda Vi\u1ec7t", {34, 90063, 128324, -1}},
        {" discards", {2560, 2347, -1}},
        {" I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL",
         {358, 3003, 1012, 364, 83, 813, 566, 594, 1052, 11, 364, 787, 498, 2704, 30, 364, 44, 537, 2704, 358, 3278, 1281,
          432, 11, 364, 35, 498, 1075, 1045, 15243, 30, 1205, 6, 42612, 264, 63866, 43, -1}},
        {"You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
         {2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264, 10950, 17847, 13, -1}},
        {"def f(x):\n    return x**2\n\n\nprint(f(3))",
         {750, 282, 2075, 982, 262, 470, 856, 334, 17, 1406, 1350, 955, 7, 18, 593, -1}},
        {"user\nHello<", {872, 198, 9707, 27, -1}},
        {"<|endoftext|><|im_start|><|im_end|>", {151643, 151644, 151645, -1}},
        {"<tool_call></tool_call>", {151657, 151658, -1}},
        {"<tool_response></tool_response><think></think>", {151665, 151666, 151667, 151668, -1}},
    };
    check_rows(tok.qwen2, qwen2, sizeof qwen2 / sizeof *qwen2);
    static const struct row qwen35[] = {
        {"<|im_start|>user\n", {248045, 846, 198, -1}},
        {"<|im_end|>\n", {248046, 198, -1}},
        {"assistant", {74455, -1}},
        {"The", {760, -1}},
        {" user", {1156, -1}},
        {"<0.3 seconds>", {27, 15, 13, 18, 6283, 29, -1}},
        {"<|endoftext|>", {248044, -1}},
        {"<tool_call></tool_call>", {248058, 248059, -1}},
        {"<tool_response></tool_response><think></think>", {248066, 248067, 248068, 248069, -1}},
    };
    check_rows(tok.qwen35, qwen35, sizeof qwen35 / sizeof *qwen35);
}

static void published_other_ids(void **state) {
    (void)state;
    static const struct row gpt2[] = {{"Hello world", {15496, 995, -1}}};
    check_rows(tok.gpt2, gpt2, 1);
    static const struct row spm[] = {
        {"", {-1}},
        {"Hello world", {15043, 3186, -1}},
        {" Hello world", {29871, 15043, 3186, -1}},
        {"\n", {29871, 13, -1}},
    };
    check_rows(tok.spm, spm, sizeof spm / sizeof *spm);
}

/* --- words --- */

struct words {
    size_t end[4096];
    size_t n;
};

static int add_word(void *ctx, size_t begin, size_t end) {
    struct words *w = ctx;
    assert_true(begin == (w->n ? w->end[w->n - 1] : 0) && end > begin && w->n < 4096);
    w->end[w->n++] = end;
    return 0;
}

static void split(struct words *w, const struct tok_pre *p, const char *text, size_t n) {
    w->n = 0;
    assert_int_equal(pre_split(p, text, n, add_word, w), 0);
    assert_int_equal(n, w->n ? w->end[w->n - 1] : 0);
}

static struct tok_pre *pre(const char *name, enum pre_path path) {
    struct tok_pre *p = NULL;
    if (pre_open(&p, name, path)) fail_msg("%s: %s", name, err_text());
    return p;
}

static void check_pieces(const char *name, const char *first, enum pre_path path) {
    struct tok_pre *p = pre(name, path);
    json_t *j = load("qwen2-tokenizer/cases.json");
    const json_t *c;
    size_t i, checked = 0;
    json_array_foreach(json_object_get(j, "cases"), i, c) {
        const json_t *text = json_object_get(c, "text"), *pieces = field(c, first, NULL, "pieces");
        if (!pieces) continue;
        struct words w;
        split(&w, p, json_string_value(text), json_string_length(text));
        if (w.n != json_array_size(pieces))
            fail_msg("%s %s: %zu words, expected %zu", name, json_string_value(json_object_get(c, "name")), w.n,
                     json_array_size(pieces));
        for (size_t k = 0, at = 0; k < w.n; at = w.end[k++]) {
            const json_t *piece = json_array_get(pieces, k);
            if (json_string_length(piece) != w.end[k] - at || memcmp(json_string_value(piece), json_string_value(text) + at, w.end[k] - at))
                fail_msg("%s %s: word %zu is \"%.*s\", expected \"%s\"", name, json_string_value(json_object_get(c, "name")), k,
                         (int)(w.end[k] - at), json_string_value(text) + at, json_string_value(piece));
        }
        checked++;
    }
    assert_int_equal(checked, 79);
    json_decref(j);
    pre_close(p);
}

static void words_of_the_reference(void **state) {
    (void)state;
    for (int path = PRE_FASTEST; path <= PRE_REGEX_ONLY; path++) {
        check_pieces("qwen2", NULL, (enum pre_path)path);
        check_pieces("qwen35", "pieces_qwen35_regex", (enum pre_path)path);
    }
}

static void check_split(const char *name, const char *barred) {
    char text[200];
    size_t want[64], n = 0, n_want = 0;
    for (const char *p = barred; *p; p++) {
        if (*p == '\x01')
            want[n_want++] = n;
        else
            text[n++] = *p;
    }
    want[n_want++] = n;
    for (int path = PRE_FASTEST; path <= PRE_REGEX_ONLY; path++) {
        struct tok_pre *p = pre(name, (enum pre_path)path);
        struct words w;
        split(&w, p, text, n);
        for (size_t i = 0; i < n_want && i < w.n; i++)
            if (w.end[i] != want[i]) fail_msg("%s: word %zu of \"%.*s\" ends at %zu, expected %zu", name, i, (int)n, text, w.end[i], want[i]);
        assert_int_equal(w.n, n_want);
        pre_close(p);
    }
}

/* \1 stands between words. */
static void words_by_hand(void **state) {
    (void)state;
    static const char *const qwen[] = {"qwen2", "qwen35"};
    for (int i = 0; i < 2; i++) {
        check_split(qwen[i], "Hello\1 \1 world\1!!\n\n\1 \1 x");
        check_split(qwen[i], "I\1'LL\1 \0011\0012\1ab");
        check_split(qwen[i], "a\1\n \n\1 b");
    }
    check_split("qwen2", "e\1\u0301a"); /* a mark sticks to the word after it, like a blank */
    check_split("qwen35", "e\u0301a");
    check_split("llama-bpe", "a\1 \001123\001456\0017\1b");
    check_split("gpt-2", "a\1 123\1b\1 '\1LL\1'll\1 \1 x\1  ");
    check_split("smollm", "a\1 \0011\0012\0013\1b");
    check_split("default", "a\1!?\1 \1$\001123\00145\1b");
    check_split("tekken", "Hello\1World\1 HTTPServer\1 x\1//\n/\0011\0012");
    check_split("gpt-4o", "Hello\1World's\1 \001123\0014\1 don't");
}

/* The hand scanner and the expressions are two ways to say the same: random mixes of what matters to them. */
static void scanner_equals_expressions(void **state) {
    (void)state;
    static const char *const units[] = {
        "a",      "Z",      "s",      "re",     "ll",     "'",      "'s",     "'LL",    " ",      "  ",     "\n",   "\r",
        "\r\n",   "\t",     "\v",     "0",      "12345",  "\u00bd", "\u00b2", "\u0663", "!",      "...",    "$",    "_",
        "\u00e9", "\u0301", "\u0300", "\u4e2d", "\u6587", "\u3042", "\u0e01", "\u0e31", "\u0915", "\u093f", "\u02b0", "\u01c5",
        "\u00a0", "\xc2\x85", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff", "\u180e", "\u202f", "\U0001f600", "\U0001f469\u200d\U0001f469",
        "\U00020000", "\U000e0100", "\U0010ffff", "\ufffd", "\x1a", "\x7f", "\u017f", "\u212a", "\u2160", "\u20dd", "\u0903",
    };
    static const char *const names[] = {"qwen2", "qwen35", "llama-bpe", "glm4"};
    uint64_t seed = 20261201;
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        struct tok_pre *fast = pre(names[k], PRE_FASTEST), *slow = pre(names[k], PRE_REGEX_ONLY);
        for (int round = 0; round < 4000; round++) {
            uint64_t s0 = seed;
            char text[4096];
            size_t n = 0;
            for (int m = (int)(test_rand(&seed) % 40); m > 0; m--) {
                const char *u = units[test_rand(&seed) % (sizeof units / sizeof *units)];
                memcpy(text + n, u, strlen(u));
                n += strlen(u);
            }
            struct words a, b;
            split(&a, fast, text, n);
            split(&b, slow, text, n);
            size_t i = 0;
            while (i < a.n && i < b.n && a.end[i] == b.end[i]) i++;
            if (i < a.n || i < b.n)
                fail_msg("%s seed %llu: word %zu ends at %zu by hand, at %zu by expression, text \"%.*s\"", names[k],
                         (unsigned long long)s0, i, i < a.n ? a.end[i] : 0, i < b.n ? b.end[i] : 0, (int)n, text);
        }
        pre_close(fast);
        pre_close(slow);
    }
}

/* Every character, alone and between letters and spaces: nothing may depend on a table we forgot. */
static void scanner_equals_expressions_for_every_character(void **state) {
    (void)state;
    static const char *const names[] = {"qwen2", "qwen35"};
    for (size_t k = 0; k < 2; k++) {
        struct tok_pre *fast = pre(names[k], PRE_FASTEST), *slow = pre(names[k], PRE_REGEX_ONLY);
        for (uint32_t cp = 0; cp < 0x110000; cp += cp < 0x3000 || (cp >= 0xE0000 && cp < 0xE1000) ? 1 : 7) {
            if (cp >= 0xD800 && cp < 0xE000) continue;
            char c[4], text[64];
            int len = utf8_encode(cp, c);
            size_t n = 0;
            for (const char *f = "a_b _ __1_\n"; *f; f++) {
                size_t m = *f == '_' ? (size_t)len : 1;
                memcpy(text + n, *f == '_' ? c : f, m);
                n += m;
            }
            struct words a, b;
            split(&a, fast, text, n);
            split(&b, slow, text, n);
            if (a.n != b.n || memcmp(a.end, b.end, a.n * sizeof *a.end)) fail_msg("%s: U+%04X splits differently", names[k], cp);
        }
        pre_close(fast);
        pre_close(slow);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qwen2_cases),
        cmocka_unit_test(qwen35_splitter_on_qwen2_cases),
        cmocka_unit_test(qwen35_cases),
        cmocka_unit_test(gpt_oss_cases),
        cmocka_unit_test(llama_spm_cases),
        cmocka_unit_test(llama_cpp_vectors),
        cmocka_unit_test(published_qwen_ids),
        cmocka_unit_test(published_other_ids),
        cmocka_unit_test(words_of_the_reference),
        cmocka_unit_test(words_by_hand),
        cmocka_unit_test(scanner_equals_expressions),
        cmocka_unit_test(scanner_equals_expressions_for_every_character),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
