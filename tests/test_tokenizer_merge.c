/* test_tokenizer_merge.c: the fast ways (queues, automaton, cutting at spaces, remembered words) give what the textbook
 * definition gives, on small random vocabularies over few letters, where everything overlaps with everything. */
#include "tests/support.h"
#include "tests/support_vocab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/err.h"
#include "core/tokenizer_impl.h"

#define MAX_TOKENS 200

struct vocab {
    char text[MAX_TOKENS][64], merge[MAX_TOKENS][64];
    struct tok_str token[MAX_TOKENS], merges[MAX_TOKENS];
    float scores[MAX_TOKENS];
    int32_t types[MAX_TOKENS];
    int32_t n, n_merges;
};

static int32_t find(const struct vocab *v, const char *p, size_t n) {
    for (int32_t i = 0; i < v->n; i++)
        if (v->token[i].n == n && !memcmp(v->token[i].p, p, n)) return i;
    return -1;
}

static void add(struct vocab *v, const char *text, int32_t type, float score) {
    assert_true(v->n < MAX_TOKENS);
    snprintf(v->text[v->n], sizeof v->text[0], "%s", text);
    v->token[v->n] = (struct tok_str){v->text[v->n], strlen(text)};
    v->types[v->n] = type;
    v->scores[v->n] = score;
    v->n++;
}

static struct tokenizer *open_vocab(const struct vocab *v, const char *model, const char *pre) {
    struct tokenizer_spec s = TOKENIZER_SPEC_NONE;
    s.model = model;
    s.pre = pre;
    s.n_vocab = v->n;
    s.tokens = v->token;
    s.types = v->types;
    s.scores = v->scores;
    s.merges = v->merges;
    s.n_merges = v->n_merges;
    s.add_bos = 0;
    s.unk = -1;
    struct tokenizer *t = NULL;
    if (tokenizer_open(&t, &s)) fail_msg("%s", err_text());
    return t;
}

static void random_text(char *p, size_t n, const char *letters, uint64_t *seed) {
    for (size_t i = 0; i < n; i++) p[i] = letters[test_rand(seed) % strlen(letters)];
    p[n] = 0;
}

/* --- byte-level BPE --- */

/* Merges of random parts in random order: also such that a late merge makes an early one possible, which trained
 * vocabularies never have. Every fifth result is no token, and has to go out in letters. */
static void random_bpe(struct vocab *v, uint64_t *seed) {
    *v = (struct vocab){0};
    const char *letters[] = {"a", "b", "c", "d"};
    for (int i = 0; i < 4; i++) add(v, letters[i], TOK_NORMAL, 0);
    char parts[64][64];
    int n_parts = 4;
    for (int i = 0; i < 4; i++) strcpy(parts[i], letters[i]);
    for (int i = 0; i < 40; i++) {
        const char *a = parts[test_rand(seed) % (unsigned)n_parts], *b = parts[test_rand(seed) % (unsigned)n_parts];
        char joined[140];
        if (snprintf(joined, sizeof joined, "%s%s", a, b) > 12) continue;
        int at = (int)(test_rand(seed) % (unsigned)(v->n_merges + 1));
        for (int k = v->n_merges; k > at; k--) strcpy(v->merge[k], v->merge[k - 1]);
        snprintf(v->merge[at], sizeof v->merge[0], "%s %s", a, b);
        v->n_merges++;
        strcpy(parts[n_parts++], joined);
        if (find(v, joined, strlen(joined)) < 0 && test_rand(seed) % 5) add(v, joined, TOK_NORMAL, 0);
    }
    for (int i = 0; i < v->n_merges; i++) v->merges[i] = (struct tok_str){v->merge[i], strlen(v->merge[i])};
}

static size_t naive_bpe(const struct vocab *v, const char *text, size_t n, int32_t *ids) {
    size_t *end = malloc((n + 1) * sizeof *end), m = n, n_ids = 0;
    for (size_t i = 0; i < n; i++) end[i] = i + 1;
    for (;;) {
        int best = v->n_merges;
        size_t where = 0;
        for (size_t i = 0; i + 1 < m; i++) {
            size_t b = i ? end[i - 1] : 0;
            for (int k = 0; k < best; k++) {
                const char *sp = strchr(v->merge[k], ' ');
                size_t l = (size_t)(sp - v->merge[k]), r = strlen(sp + 1);
                if (end[i] - b == l && end[i + 1] - end[i] == r && !memcmp(text + b, v->merge[k], l) && !memcmp(text + end[i], sp + 1, r)) {
                    best = k;
                    where = i;
                    break;
                }
            }
        }
        if (best == v->n_merges) break;
        memmove(end + where, end + where + 1, (m - where - 1) * sizeof *end);
        m--;
    }
    for (size_t i = 0, b = 0; i < m; b = end[i++]) {
        int32_t id = find(v, text + b, end[i] - b);
        if (id >= 0) ids[n_ids++] = id;
        for (size_t k = b; id < 0 && k < end[i]; k++) ids[n_ids++] = find(v, text + k, 1);
    }
    free(end);
    return n_ids;
}

static void bpe_equals_definition(void **state) {
    (void)state;
    uint64_t seed = 1;
    static struct vocab v;
    for (int round = 0; round < 150; round++) {
        uint64_t s0 = seed;
        random_bpe(&v, &seed);
        struct tokenizer *t = open_vocab(&v, "gpt2", "qwen2");
        for (int k = 0; k < 6; k++) {
            char text[1000], what[64];
            int32_t want[1000];
            size_t n = k == 5 ? 900 : 1 + test_rand(&seed) % (k ? 300 : 20); /* both sides of the queue's threshold */
            random_text(text, n, k % 2 ? "abcd" : "aab", &seed);
            snprintf(what, sizeof what, "seed %llu text %d", (unsigned long long)s0, k);
            test_ids(t, what, text, n, 0, want, naive_bpe(&v, text, n, want));
        }
        tokenizer_close(t);
    }
}

/* A run in which every join makes two new candidates: the queues are as full as they get. */
static void queues_hold_the_candidates_of_a_run(void **state) {
    (void)state;
    static struct vocab v;
    static const char *const merges[] = {"a a", "aa aa", "aaaa aaaa", "aa a", "aaaa a", "aaaa aa", "aaaaaaaa a"};
    v = (struct vocab){0};
    for (const char *p = "aaaaaaaa"; *p; p++)
        if (strlen(p) == 1 || strlen(p) == 2 || strlen(p) == 4 || strlen(p) == 8) add(&v, p, TOK_NORMAL, 0); /* ids 3 2 1 0 */
    for (int i = 0; i < 7; i++) v.merges[v.n_merges++] = (struct tok_str){merges[i], strlen(merges[i])};
    struct tokenizer *t = open_vocab(&v, "gpt2", "qwen2");
    enum { N = 1 << 14 };
    static char text[N];
    static int32_t want[N / 8];
    memset(text, 'a', N);
    test_ids(t, "run", text, N, 0, want, N / 8);
    tokenizer_close(t);
}

static void whole_word_wins_where_merges_are_ignored(void **state) {
    (void)state;
    static struct vocab v;
    v = (struct vocab){0};
    for (const char *p = "abc"; *p; p++) add(&v, (char[]){*p, 0}, TOK_NORMAL, 0);
    add(&v, "ab", TOK_NORMAL, 0);
    add(&v, "abc", TOK_NORMAL, 0); /* no merge leads here */
    v.merges[0] = (struct tok_str){"a b", 3};
    v.n_merges = 1;
    struct tokenizer *t = open_vocab(&v, "gpt2", "qwen2"), *u = open_vocab(&v, "gpt2", "llama-bpe");
    test_ids(t, "qwen2", "abc", 3, 0, (int32_t[]){3, 2}, 2);
    test_ids(u, "llama-bpe", "abc", 3, 0, (int32_t[]){4}, 1);
    test_ids(u, "llama-bpe, other word", "abcab", 5, 0, (int32_t[]){3, 2, 3}, 3);
    tokenizer_close(t);
    tokenizer_close(u);
}

static void bytes_without_token_are_dropped(void **state) {
    (void)state;
    static struct vocab v;
    v = (struct vocab){0};
    add(&v, "a", TOK_NORMAL, 0);
    struct tokenizer *t = open_vocab(&v, "gpt2", "qwen2");
    test_ids(t, "missing bytes", "xa\xff a", 5, 0, (int32_t[]){0, 0}, 2);
    tokenizer_close(t);
}

/* --- SPM --- */

static void random_spm(struct vocab *v, uint64_t *seed) {
    *v = (struct vocab){0};
    add(v, "<unk>", TOK_UNKNOWN, 0);
    add(v, "<s>", TOK_CONTROL, 0);
    add(v, "</s>", TOK_CONTROL, 0);
    for (int b = 0; b < 256; b++)
        if (v->n < 60 && (b == 'c' || b > 250 || (b >= 0xE0 && b < 0xE4))) {
            char text[16];
            snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
            add(v, text, TOK_BYTE, 0);
        }
    add(v, "\xE2\x96\x81", TOK_NORMAL, -50);
    add(v, "a", TOK_NORMAL, -50);
    add(v, "b", TOK_NORMAL, -50);
    bool inner = test_rand(seed) % 2; /* tokens with a space inside */
    for (int i = 0; i < 30; i++) {
        char raw[8], text[64] = "";
        random_text(raw, 2 + test_rand(seed) % 3, "ab ", seed);
        for (const char *p = raw; *p; p++) {
            if (*p == ' ' && p > raw && p[-1] != ' ' && !inner) continue;
            strcat(text, *p == ' ' ? "\xE2\x96\x81" : (char[]){*p, 0});
        }
        if (find(v, text, strlen(text)) < 0) add(v, text, TOK_NORMAL, -(float)(test_rand(seed) % 12)); /* many equal scores */
    }
}

static size_t naive_spm(const struct vocab *v, const char *raw, size_t n_raw, int32_t *ids) {
    char text[4000] = "";
    size_t end[4000], m = 0, n = 0, n_ids = 0;
    for (size_t i = 0; i <= n_raw && n_raw; i++) { /* the added space first */
        const char *c = i == 0 || raw[i - 1] == ' ' ? "\xE2\x96\x81" : (char[]){raw[i - 1], 0};
        memcpy(text + n, c, strlen(c));
        n += strlen(c);
        end[m++] = n;
    }
    for (;;) {
        int32_t best = -1;
        size_t where = 0;
        for (size_t i = 0; i + 1 < m; i++) {
            size_t b = i ? end[i - 1] : 0;
            int32_t id = find(v, text + b, end[i + 1] - b);
            if (id >= 0 && (best < 0 || v->scores[id] > v->scores[best])) {
                best = id;
                where = i;
            }
        }
        if (best < 0) break;
        memmove(end + where, end + where + 1, (m - where - 1) * sizeof *end);
        m--;
    }
    for (size_t i = 0, b = 0; i < m; b = end[i++]) {
        int32_t id = find(v, text + b, end[i] - b);
        if (id >= 0) ids[n_ids++] = id;
        for (size_t k = b; id < 0 && k < end[i]; k++) {
            char byte[8];
            snprintf(byte, sizeof byte, "<0x%02X>", (unsigned char)text[k]);
            int32_t to = find(v, byte, 6);
            ids[n_ids++] = to < 0 ? 0 : to;
        }
    }
    return n_ids;
}

static void spm_equals_definition(void **state) {
    (void)state;
    uint64_t seed = 2;
    static struct vocab v;
    for (int round = 0; round < 150; round++) {
        uint64_t s0 = seed;
        random_spm(&v, &seed);
        struct tokenizer *t = open_vocab(&v, "llama", NULL);
        for (int k = 0; k < 8; k++) {
            char text[800], what[64];
            int32_t want[4000];
            size_t n = test_rand(&seed) % (k == 7 ? 700 : 40);
            random_text(text, n, k % 3 == 0 ? "ab  c" : k % 3 == 1 ? "aab " : "ab\xff", &seed);
            snprintf(what, sizeof what, "seed %llu text %d", (unsigned long long)s0, k);
            test_ids(t, what, text, n, 0, want, naive_spm(&v, text, n, want));
        }
        tokenizer_close(t);
    }
}

/* --- special tokens --- */

static bool recognised(const struct vocab *v, int32_t id, bool parse, const struct tok_span *plain, size_t n_plain, size_t b) {
    if (v->types[id] == TOK_USER) return true;
    if (!parse || v->types[id] == TOK_NORMAL) return false;
    for (size_t i = 0; i < n_plain; i++)
        if (plain[i].begin < b + v->token[id].n && b < plain[i].end && plain[i].begin < plain[i].end) return false;
    return true;
}

/* One search per token, longest first, each from the left in what is uncut. owner[i]: token of byte i, -1: none. */
static void naive_cuts(const struct vocab *v, const char *text, size_t n, bool parse, const struct tok_span *plain,
                       size_t n_plain, int32_t *first_at) {
    bool cut[400] = {0};
    for (size_t i = 0; i < n; i++) first_at[i] = -1;
    for (size_t len = 64; len > 0; len--)
        for (int32_t id = 0; id < v->n; id++) {
            if (v->token[id].n != len || find(v, v->token[id].p, len) != id) continue;
            for (size_t b = 0; b + len <= n; b++) {
                if (memcmp(text + b, v->token[id].p, len) || memchr(cut + b, 1, len)) continue;
                if (!recognised(v, id, parse, plain, n_plain, b)) continue;
                memset(cut + b, 1, len);
                first_at[b] = id;
            }
        }
}

static void special_tokens_equal_definition(void **state) {
    (void)state;
    uint64_t seed = 3;
    static struct vocab v;
    for (int round = 0; round < 3000; round++) {
        uint64_t s0 = seed;
        v = (struct vocab){0};
        for (int i = (int)(test_rand(&seed) % 20); i >= 0; i--) {
            char text[16];
            random_text(text, 1 + test_rand(&seed) % 7, "ab<", &seed);
            if (find(&v, text, strlen(text)) < 0) add(&v, text, 1 + (int32_t)(test_rand(&seed) % 4), 0);
        }
        struct tokenizer *t = open_vocab(&v, "llama", NULL);
        char text[400];
        size_t n = test_rand(&seed) % 120, n_cuts, k = 0;
        random_text(text, n, "ab<", &seed);
        struct tok_span plain[3];
        size_t n_plain = test_rand(&seed) % 4, at = 0;
        for (size_t i = 0; i < n_plain; i++) {
            plain[i].begin = at + test_rand(&seed) % (n - at + 1);
            at = plain[i].end = plain[i].begin + test_rand(&seed) % (n - plain[i].begin + 1);
        }
        bool parse = test_rand(&seed) % 2;
        int32_t want[400];
        naive_cuts(&v, text, n, parse, plain, n_plain, want);
        struct tok_cut *cuts;
        assert_int_equal(special_find(t->special, text, n, parse, plain, n_plain, &cuts, &n_cuts), 0);
        for (size_t i = 0; i < n; i++) {
            int32_t got = k < n_cuts && cuts[k].begin == i ? cuts[k++].id : -1;
            if (got != want[i]) fail_msg("seed %llu: at %zu token %d, expected %d, text %s", (unsigned long long)s0, i, got, want[i], text);
        }
        assert_int_equal(k, n_cuts);
        free(cuts);
        tokenizer_close(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bpe_equals_definition),
        cmocka_unit_test(queues_hold_the_candidates_of_a_run),
        cmocka_unit_test(whole_word_wins_where_merges_are_ignored),
        cmocka_unit_test(bytes_without_token_are_dropped),
        cmocka_unit_test(spm_equals_definition),
        cmocka_unit_test(special_tokens_equal_definition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
