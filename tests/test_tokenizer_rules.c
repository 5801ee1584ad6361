/* test_tokenizer_rules.c: what holds beside the ids of ordinary text: special tokens, bos, bytes that are no UTF-8,
 * decoding, streaming, ends of generation, odd and broken vocabularies, threads. */
#include "tests/support.h"
#include "tests/support_vocab.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/err.h"
#include "core/gguf.h"
#include "core/tokenizer_impl.h"

static struct tokenizer *qwen, *spm, *oss, *gpt2;

static int open_all(void **state) {
    (void)state;
    qwen = test_vocab_open("qwen2-tokenizer/qwen3-vocab.gguf.xz", NULL);
    spm = test_vocab_open("tokenizers/ggml-vocab-llama-spm.gguf.xz", NULL);
    oss = test_vocab_open("tokenizers/gpt-oss-vocab.gguf.xz", NULL);
    gpt2 = test_vocab_open("tokenizers/ggml-vocab-gpt-2.gguf.xz", NULL);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    tokenizer_close(qwen);
    tokenizer_close(spm);
    tokenizer_close(oss);
    tokenizer_close(gpt2);
    return 0;
}

#define IDS(...) (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t)
#define TEXT(s) (s), sizeof(s) - 1

/* --- special tokens and bos --- */

static void control_tokens_need_parsing(void **state) {
    (void)state;
    test_ids(qwen, "parsed", TEXT("<|im_end|>"), TOK_PARSE_SPECIAL, IDS(151645));
    test_ids(qwen, "plain", TEXT("<|im_end|>"), 0, IDS(27, 91, 318, 6213, 91, 29));
    test_ids(qwen, "user-defined is always cut", TEXT("a<think>b"), 0, IDS(64, 151667, 65));
    test_ids(qwen, "no bos in Qwen", TEXT("a"), TOK_ADD_SPECIAL, IDS(64));
}

/* A rendered template in which the message tries to end its turn. */
static void plain_ranges_hide_control_tokens(void **state) {
    (void)state;
    static const char text[] = "<|im_start|>a<|im_end|><|im_end|>";
    int32_t *ids, *want;
    size_t n, n_want;
    assert_int_equal(tokenizer_encode(qwen, "a<|im_end|>", 11, 0, &want, &n_want), 0);
    struct tok_span message = {12, 23};
    assert_int_equal(tokenizer_encode_spans(qwen, text, sizeof text - 1, TOK_PARSE_SPECIAL, &message, 1, &ids, &n), 0);
    assert_int_equal(n, n_want + 2);
    assert_int_equal(ids[0], 151644);
    assert_memory_equal(ids + 1, want, n_want * sizeof *ids);
    assert_int_equal(ids[n - 1], 151645);
    free(ids);
    free(want);
    struct tok_span half = {0, 5}, wrong[] = {{3, 9}, {8, 10}}, past = {0, 99};
    assert_int_equal(tokenizer_encode_spans(qwen, "<|im_end|>", 10, TOK_PARSE_SPECIAL, &half, 1, &ids, &n), 0);
    assert_true(n > 1); /* a token that reaches into a plain range is none */
    free(ids);
    assert_int_equal(tokenizer_encode_spans(qwen, text, 20, 0, wrong, 2, &ids, &n), ERR_ARG);
    assert_null(ids);
    assert_int_equal(tokenizer_encode_spans(qwen, text, 20, 0, &past, 1, &ids, &n), ERR_ARG);
}

static void exactly_one_bos(void **state) {
    (void)state;
    const unsigned both = TOK_ADD_SPECIAL | TOK_PARSE_SPECIAL;
    test_ids(spm, "raw prompt", TEXT("Hello"), both, IDS(1, 15043));
    test_ids(spm, "template printed it", TEXT("<s>Hello"), both, IDS(1, 15043));
    test_ids(spm, "not asked for", TEXT("Hello"), TOK_PARSE_SPECIAL, IDS(15043));
    test_ids(spm, "as text", TEXT("<s>"), TOK_ADD_SPECIAL, IDS(1, 529, 29879, 29958));
    test_ids(spm, "later ones are the text's own", TEXT("a<s>"), both, IDS(1, 263, 1));
    test_ids(spm, "empty", TEXT(""), both, IDS(1));
    assert_true(tokenizer_add_bos(spm) && !tokenizer_add_eos(spm) && !tokenizer_add_bos(qwen));
    assert_int_equal(tokenizer_bos(spm), 1);
    assert_int_equal(tokenizer_eos(spm), 2);
    assert_int_equal(tokenizer_unk(spm), 0);
    assert_int_equal(tokenizer_eos(qwen), 151645);
}

/* The space that SentencePiece adds goes before the first text and before text after a special token. */
static void added_space_follows_special_tokens(void **state) {
    (void)state;
    test_ids(spm, "special + text", TEXT("<s>Hello</s>"), TOK_PARSE_SPECIAL, IDS(1, 15043, 2));
    test_ids(spm, "special + space + text", TEXT("<s> Hello"), TOK_PARSE_SPECIAL, IDS(1, 29871, 15043));
    test_ids(spm, "text + special + text", TEXT("Hello</s>Hello"), TOK_PARSE_SPECIAL, IDS(15043, 2, 15043));
    test_ids(spm, "special + special", TEXT("<s></s>"), TOK_PARSE_SPECIAL, IDS(1, 2));
}

/* --- bytes --- */

static void round_trips(const char *what, const char *text, size_t n) {
    struct tokenizer *const all[] = {qwen, spm, oss, gpt2};
    for (size_t i = 0; i < 4; i++) test_round_trip(all[i], what, text, n, 0);
}

static void every_broken_character_survives(void **state) {
    (void)state;
    static const char *const broken[] = {
        "\xf0", "\xf0\x9f", "\xf0\x9f\x98", "\xe4", "\xe4\xbd", "\xc3",          /* cut off */
        "\x80", "\xbf\xbf", "\x98\x80",                                          /* lone tails */
        "\xc0\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xf0\x80\x80\x80", "\xf0\x8f\xbf\xbf", /* overlong */
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xed\xa0\xbd\xed\xb8\x80",              /* surrogates */
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf8\x88\x80\x80\x80", "\xfe", "\xff", "\xff\xfe",
    };
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        for (int k = 0; k < 5; k++) {
            static const char *const frames[] = {"%s", "a%s", "%sb", " %s ", "12%s!\n%s\xe4\xbd\xa0"};
            char text[64], what[64];
            int n = snprintf(text, sizeof text, frames[k], broken[i], broken[i]);
            snprintf(what, sizeof what, "broken %zu in frame %d", i, k);
            round_trips(what, text, (size_t)n);
        }
    for (int len = 1; len <= 4; len++)
        for (uint64_t seed = 1, k = 0; k < 500; k++) {
            char text[4];
            for (int i = 0; i < len; i++) text[i] = (char)test_rand(&seed);
            round_trips("random bytes", text, (size_t)len);
        }
    round_trips("NUL", "a\0b\0\0", 5);
}

static void random_bytes_survive(void **state) {
    (void)state;
    uint64_t seed = 7;
    static const char *const units[] = {"a", "Hello", " ", "\n", "\xff", "\x80", "\xf0\x9f", "\u4e2d", "\U0001f600", "1", "!", "\xed\xa0\x80", "\t", "<s>", "<|im_end|>"};
    for (int round = 0; round < 300; round++) {
        char text[2000];
        size_t n = 0;
        for (size_t m = test_rand(&seed) % 100; m > 0; m--) {
            const char *u = units[test_rand(&seed) % (sizeof units / sizeof *units)];
            memcpy(text + n, u, strlen(u));
            n += strlen(u);
        }
        round_trips("mixed", text, n);
        test_round_trip(qwen, "mixed, parsed", text, n, TOK_PARSE_SPECIAL);
        n = test_rand(&seed) % sizeof text;
        for (size_t i = 0; i < n; i++) text[i] = (char)test_rand(&seed);
        round_trips("noise", text, n);
    }
}

/* Each invalid byte is a symbol: it sticks to symbols, and a word after it keeps to itself only behind a space. */
static void invalid_bytes_are_symbols(void **state) {
    (void)state;
    int32_t ff = tokenizer_find(qwen, "\u00ff"), x = tokenizer_find(qwen, "x"), y = tokenizer_find(qwen, "\u0120y");
    assert_true(ff >= 0 && x >= 0 && y >= 0);
    test_ids(qwen, "x FF space y", "x\xff y", 4, 0, (int32_t[]){x, ff, y}, 3);
    int32_t f0 = tokenizer_find(spm, "<0xF0>"), f9 = tokenizer_find(spm, "<0x9F>");
    test_ids(spm, "half a character", "\xf0\x9f", 2, 0, (int32_t[]){29871, f0, f9}, 3);
}

/* --- decoding --- */

static void decode_hides_control_tokens(void **state) {
    (void)state;
    const int32_t ids[] = {151644, 9707, 151645, 151667, 151935, -1, 999999}; /* then padding and what does not exist */
    char *p;
    size_t n;
    assert_int_equal(tokenizer_decode(qwen, ids, 7, 0, &p, &n), 0);
    assert_string_equal(p, "Hello<think>");
    free(p);
    assert_int_equal(tokenizer_decode(qwen, ids, 7, TOK_SHOW_SPECIAL, &p, &n), 0);
    assert_string_equal(p, "<|im_start|>Hello<|im_end|><think>");
    free(p);
    assert_int_equal(tokenizer_decode(qwen, NULL, 0, 0, &p, &n), 0);
    assert_string_equal(p, "");
    free(p);
}

static void check_decode(const struct tokenizer *t, const int32_t *ids, size_t n_ids, unsigned flags, const char *want) {
    char *p;
    size_t n;
    assert_int_equal(tokenizer_decode(t, ids, n_ids, flags, &p, &n), 0);
    if (n != strlen(want) || memcmp(p, want, n)) fail_msg("decoded \"%s\", expected \"%s\"", p, want);
    free(p);
}

static void added_space_is_removed_once(void **state) {
    (void)state;
    const int32_t ids[] = {1, 15043, 3186, 29871, 13, 243, 162, 155, 131};
    check_decode(spm, ids, 3, 0, "Hello world");
    check_decode(spm, ids + 1, 2, 0, "Hello world");
    check_decode(spm, ids + 1, 2, TOK_CONTINUES, " Hello world");
    check_decode(spm, ids + 3, 2, 0, "\n");
    check_decode(spm, ids + 2, 7, 0, "world \n\U0001f600");
}

static void stream_holds_back_parts_of_characters(void **state) {
    (void)state;
    const int32_t emoji[] = {243, 162, 155, 131}; /* Llama's byte tokens of U+1F600 */
    struct tok_stream *s;
    const char *p;
    size_t n;
    assert_int_equal(tok_stream_open(&s, spm, 0), 0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++) {
            tok_stream_push(s, emoji[i], &p, &n);
            assert_int_equal(n, 0);
        }
        tok_stream_push(s, emoji[3], &p, &n);
        assert_string_equal(p, "\U0001f600");
    }
    tok_stream_push(s, emoji[0], &p, &n);
    tok_stream_push(s, emoji[1], &p, &n);
    tok_stream_push(s, 15043, &p, &n); /* the character never ends: its bytes come out with what follows */
    assert_string_equal(p, "\xf0\x9f Hello");
    tok_stream_push(s, emoji[0], &p, &n);
    tok_stream_finish(s, &p, &n);
    assert_string_equal(p, "\xf0");
    tok_stream_push(s, 15043, &p, &n);
    assert_string_equal(p, "Hello"); /* begins anew */
    tok_stream_push(s, emoji[0], &p, &n);
    tok_stream_reset(s);
    tok_stream_finish(s, &p, &n);
    assert_int_equal(n, 0);
    tok_stream_close(s);
    tok_stream_close(NULL);
}

static void stream_can_promise_valid_utf8(void **state) {
    (void)state;
    struct tok_stream *s;
    const char *p;
    size_t n;
    assert_int_equal(tok_stream_open(&s, spm, TOK_VALID_UTF8), 0);
    tok_stream_push(s, 243, &p, &n); /* F0 */
    tok_stream_push(s, 131, &p, &n); /* 80: overlong, never a character */
    assert_string_equal(p, "\ufffd\ufffd");
    tok_stream_push(s, 243, &p, &n);
    assert_int_equal(n, 0);
    tok_stream_finish(s, &p, &n);
    assert_string_equal(p, "\ufffd");
    tok_stream_close(s);
}

/* Pieces in any cutting are the whole text. */
static void stream_equals_decode(void **state) {
    (void)state;
    struct tokenizer *const all[] = {qwen, spm, oss, gpt2};
    uint64_t seed = 11;
    for (int round = 0; round < 400; round++) {
        const struct tokenizer *t = all[round % 4];
        int32_t ids[60];
        char got[8000], *want;
        size_t n_got = 0, n_want, n;
        const char *p;
        for (int i = 0; i < 60; i++) ids[i] = (int32_t)(test_rand(&seed) % (i % 2 ? 300 : (uint64_t)tokenizer_n_vocab(t)));
        assert_int_equal(tokenizer_decode(t, ids, 60, 0, &want, &n_want), 0);
        struct tok_stream *s;
        assert_int_equal(tok_stream_open(&s, t, 0), 0);
        for (int i = 0; i <= 60; i++) {
            if (i < 60)
                tok_stream_push(s, ids[i], &p, &n);
            else
                tok_stream_finish(s, &p, &n);
            assert_true(n_got + n <= sizeof got);
            memcpy(got + n_got, p, n);
            n_got += n;
        }
        assert_int_equal(n_got, n_want);
        assert_memory_equal(got, want, n_want);
        tok_stream_close(s);
        free(want);
    }
}

/* --- ends of generation --- */

static void check_eog(const struct tokenizer *t, const int32_t *want, size_t n_want) {
    size_t k = 0;
    for (int32_t id = -2; id < tokenizer_n_vocab(t) + 2; id++) {
        bool expected = k < n_want && want[k] == id;
        size_t n;
        const char *text = tokenizer_token_text(t, id, &n);
        if (tokenizer_is_eog(t, id) != expected) fail_msg("token %d \"%.*s\": end of generation %d, expected %d", id, (int)n, text ? text : "", !expected, expected);
        k += expected;
    }
    assert_int_equal(k, n_want);
}

static void ends_of_generation(void **state) {
    (void)state;
    check_eog(qwen, IDS(151643, 151645, 151662, 151663, 151664)); /* not the word "</s>" */
    assert_true(tokenizer_find(qwen, "</s>") >= 0);
    check_eog(spm, IDS(2));
    check_eog(oss, IDS(199999, 200002, 200012)); /* not <|end|>: the model goes on to its next message */
    check_eog(gpt2, IDS(50256));
    struct tokenizer *qwen35 = test_vocab_open("qwen35-tokenizer/qwen35-vocab.gguf.xz", NULL);
    assert_true(tokenizer_is_eog(qwen35, 248044) && tokenizer_is_eog(qwen35, 248046));
    assert_false(tokenizer_is_eog(qwen35, 248045) || tokenizer_is_eog(qwen35, 248068));
    tokenizer_close(qwen35);
}

/* --- odd and broken vocabularies --- */

static const struct tok_str odd_tokens[] = {{"a", 1}, {"b", 1}, {"ab", 2}, {"", 0}, {"ab", 2}, {"<x>", 3}, {"b", 1}, {"\xff\x00z", 3}};
static const struct tok_str odd_merges[] = {{"a b", 3}};
static const int32_t odd_types[] = {1, 1, 1, 1, 1, 3, 1, 1};

static struct tokenizer_spec odd_spec(void) {
    struct tokenizer_spec s = TOKENIZER_SPEC_NONE;
    s.model = "gpt2";
    s.pre = "qwen2";
    s.n_vocab = 8;
    s.tokens = odd_tokens;
    s.types = odd_types;
    s.merges = odd_merges;
    s.n_merges = 1;
    return s;
}

static void duplicates_and_empty_tokens(void **state) {
    (void)state;
    struct tokenizer_spec s = odd_spec();
    struct tokenizer *t;
    size_t n;
    assert_int_equal(tokenizer_open(&t, &s), 0);
    test_ids(t, "the first id encodes", TEXT("ab b<x>"), TOK_PARSE_SPECIAL, IDS(2, 1, 5));
    check_decode(t, IDS(2, 4, 1, 6), 0, "ababbb"); /* all decode */
    assert_string_equal(tokenizer_token_text(t, 3, &n), "[EMPTY_3]ab<x>b\xff"); /* texts are not terminated */
    assert_int_equal(n, 9);
    assert_int_equal(tokenizer_find(t, "[EMPTY_3]"), 3);
    assert_int_equal(tokenizer_find(t, "ab"), 2);
    assert_int_equal(tokenizer_find(t, "\u0100"), -1); /* a byte's character that is no token */
    assert_null(tokenizer_token_text(t, 8, &n));
    assert_int_equal(tokenizer_token_type(t, 5), TOK_CONTROL);
    assert_int_equal(tokenizer_token_type(t, -1), TOK_UNUSED);
    assert_int_equal(tokenizer_bos(t), -1);
    tokenizer_close(t);
}

static void refuse(const struct tokenizer_spec *s, int code, const char *name) {
    struct tokenizer *t = NULL;
    int rc = tokenizer_open(&t, s);
    if (rc != code || !strstr(err_text(), name)) fail_msg("got %d \"%s\", expected %d naming %s", rc, err_text(), code, name);
    assert_null(t);
}

static void broken_vocabularies_are_refused_by_name(void **state) {
    (void)state;
    struct tokenizer_spec s = odd_spec();
    s.model = "bert";
    refuse(&s, ERR_UNSUPPORTED, "bert");
    s = odd_spec();
    static const char *const unknown[] = {"qwen", "qwen36", "", " qwen2", "qwen2 ", "QWEN2", "qwen2 qwen35"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        s.pre = unknown[i];
        refuse(&s, ERR_UNSUPPORTED, unknown[i]);
    }
    s = odd_spec();
    s.eos = 8;
    refuse(&s, ERR_FORMAT, "eos_token_id");
    s = odd_spec();
    s.fim_sep = -2;
    refuse(&s, ERR_FORMAT, "fim_sep_token_id");
    s = odd_spec();
    s.types = (const int32_t[]){1, 1, 1, 1, 1, 1, 1, 7};
    refuse(&s, ERR_FORMAT, "token_type");
    s = odd_spec();
    s.merges = (struct tok_str[]){{"ab", 2}};
    refuse(&s, ERR_FORMAT, "merges");
    s.merges = NULL;
    refuse(&s, ERR_ARG, "merges");
    s = odd_spec();
    s.n_vocab = 0;
    refuse(&s, ERR_FORMAT, "tokens");
    s = odd_spec();
    s.model = "llama";
    s.scores = (float[]){0, 0, 0, NAN, 0, 0, 0, 0};
    refuse(&s, ERR_FORMAT, "token 3");
    s.scores = (float[]){0, -INFINITY, INFINITY, 0, -0.0f, 0, 0, 0};
    struct tokenizer *t;
    assert_int_equal(tokenizer_open(&t, &s), 0);
    tokenizer_close(t);
    tokenizer_close(NULL);
}

static void missing_pre_means_default(void **state) {
    (void)state;
    struct tokenizer_spec s = odd_spec();
    struct tokenizer *t;
    s.pre = NULL;
    assert_int_equal(tokenizer_open(&t, &s), 0);
    test_ids(t, "a|b cannot merge", TEXT("ab"), 0, IDS(2));
    tokenizer_close(t);
}

static void broken_files_are_refused_by_key(void **state) {
    (void)state;
    static const struct {
        const char *file, *key;
    } bad[] = {
        {"tok_missing.gguf", "tokenizer.ggml.tokens"},           {"tok_wrong_elem_type.gguf", "tokenizer.ggml.tokens"},
        {"tok_scores_short.gguf", "tokenizer.ggml.scores"},      {"tok_types_short.gguf", "tokenizer.ggml.token_type"},
        {"tok_eos_out_of_range.gguf", "tokenizer.ggml.eos_token_id"}, {"tok_unknown_model.gguf", "tokenizer.ggml.model"},
    };
    static const char *const odd[] = {"tok_byte_token_too_large.gguf", "tok_duplicate.gguf", "tok_invalid_utf8.gguf", "valid_f16_small.gguf"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad + sizeof odd / sizeof *odd; i++) {
        bool is_bad = i < sizeof bad / sizeof *bad;
        char name[100];
        struct gguf *g;
        struct tokenizer *t = NULL;
        snprintf(name, sizeof name, "bad-gguf/%s", is_bad ? bad[i].file : odd[i - sizeof bad / sizeof *bad]);
        if (gguf_open(&g, test_path(name))) fail_msg("%s: %s", name, err_text());
        int rc = tokenizer_from_gguf(&t, g);
        if (is_bad && (!(rc == ERR_FORMAT || rc == ERR_UNSUPPORTED) || !strstr(err_text(), bad[i].key)))
            fail_msg("%s: %d %s, expected a refusal naming %s", name, rc, err_text(), bad[i].key);
        if (!is_bad && rc) fail_msg("%s: %s", name, err_text());
        if (!is_bad) test_round_trip(t, name, TEXT("Once upon a time \xff <s> 1"), 0);
        tokenizer_close(t);
        gguf_close(g);
    }
}

/* --- threads --- */

struct work {
    const struct tokenizer *t;
    const char *text;
    size_t n, n_ids;
    int32_t *ids;
};

static void *encode_often(void *p) {
    struct work *w = p;
    for (int i = 0; i < 5; i++) {
        free(w->ids);
        if (tokenizer_encode(w->t, w->text, w->n, TOK_PARSE_SPECIAL, &w->ids, &w->n_ids)) return w;
    }
    return NULL;
}

static void threads_share_a_tokenizer(void **state) {
    (void)state;
    size_t n;
    char *text = test_read("qwen2-tokenizer/cases.json", &n);
    struct tokenizer *const all[] = {qwen, oss};
    for (int k = 0; k < 2; k++) {
        struct work w[4] = {{0}};
        pthread_t th[4];
        for (int i = 0; i < 4; i++) {
            w[i] = (struct work){.t = all[k], .text = text, .n = n};
            assert_int_equal(pthread_create(&th[i], NULL, encode_often, &w[i]), 0);
        }
        for (int i = 0; i < 4; i++) {
            void *failed;
            pthread_join(th[i], &failed);
            assert_null(failed);
            assert_int_equal(w[i].n_ids, w[0].n_ids);
            assert_memory_equal(w[i].ids, w[0].ids, w[0].n_ids * sizeof(int32_t));
        }
        for (int i = 0; i < 4; i++) free(w[i].ids);
    }
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(control_tokens_need_parsing),
        cmocka_unit_test(plain_ranges_hide_control_tokens),
        cmocka_unit_test(exactly_one_bos),
        cmocka_unit_test(added_space_follows_special_tokens),
        cmocka_unit_test(every_broken_character_survives),
        cmocka_unit_test(random_bytes_survive),
        cmocka_unit_test(invalid_bytes_are_symbols),
        cmocka_unit_test(decode_hides_control_tokens),
        cmocka_unit_test(added_space_is_removed_once),
        cmocka_unit_test(stream_holds_back_parts_of_characters),
        cmocka_unit_test(stream_can_promise_valid_utf8),
        cmocka_unit_test(stream_equals_decode),
        cmocka_unit_test(ends_of_generation),
        cmocka_unit_test(duplicates_and_empty_tokens),
        cmocka_unit_test(broken_vocabularies_are_refused_by_name),
        cmocka_unit_test(missing_pre_means_default),
        cmocka_unit_test(broken_files_are_refused_by_key),
        cmocka_unit_test(threads_share_a_tokenizer),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
