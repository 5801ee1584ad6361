/* tokenizer_scan.c: the words of qwen2, qwen35 and llama-bpe found by hand, in one pass over the characters. The
 * expressions in tokenizer_pre.c are the definition; a test holds the two against each other. */
#include "core/tokenizer_impl.h"

/* Class of the character at i and its length in *len; PRE_END at the end. The text is valid UTF-8. */
static inline uint8_t class_at(const uint8_t *cls, const char *s, size_t i, size_t n, size_t *len) {
    *len = 0;
    if (i >= n) return PRE_END;
    const unsigned char *p = (const unsigned char *)s + i;
    if (p[0] < 0x80) {
        *len = 1;
        return cls[p[0]];
    }
    if (p[0] < 0xE0) {
        *len = 2;
        return cls[(p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu)];
    }
    if (p[0] < 0xF0) {
        *len = 3;
        return cls[(p[0] & 0xFu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu)];
    }
    *len = 4;
    return cls[(p[0] & 7u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu)];
}

/* End of the characters from i on that have one of the classes `in` (not == false) or none of them (not == true). */
static size_t skip(const uint8_t *cls, const char *s, size_t i, size_t n, uint8_t in, bool not) {
    size_t len;
    for (;; i += len) {
        uint8_t c = class_at(cls, s, i, n, &len);
        if (c == PRE_END || !(c & in) != not) return i;
    }
}

/* Bytes of an English contraction that begins with the apostrophe at i, or 0. */
static size_t contraction(const char *s, size_t i, size_t n) {
    if (s[i] != '\'' || i + 1 >= n) return 0;
    char a = (char)(s[i + 1] | 0x20);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (i + 2 >= n) return 0;
    char b = (char)(s[i + 2] | 0x20);
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/* End of a word of white space: up to its last line break if there is one, else all but the last character, which
 * belongs to what follows. */
static size_t white(const uint8_t *cls, const char *s, size_t i, size_t n) {
    size_t len, last = i, breaks = 0, k = i;
    for (; class_at(cls, s, k, n, &len) & PRE_W; k += len) {
        last = k;
        if (s[k] == '\r' || s[k] == '\n') breaks = k + 1;
    }
    if (breaks) return breaks;
    return k < n && last > i ? last : k;
}

size_t scan_word(const struct scan_rule *rule, const uint8_t *cls, const char *s, size_t i, size_t n) {
    size_t len, len2;
    uint8_t c = class_at(cls, s, i, n, &len);
    size_t k = contraction(s, i, n);
    if (k) return i + k;
    if (!(c & (PRE_CRLF | PRE_N))) {
        if (c & rule->word || class_at(cls, s, i + len, n, &len2) & rule->word)
            return skip(cls, s, i + len, n, rule->word, false);
    }
    if (c & PRE_N) {
        k = i + len;
        for (int d = 1; d < rule->max_digits && class_at(cls, s, k, n, &len) & PRE_N; d++) k += len;
        return k;
    }
    uint8_t not_symbol = rule->word | PRE_N | PRE_W | PRE_END;
    k = s[i] == ' ' ? i + 1 : i;
    if (!(class_at(cls, s, k, n, &len) & not_symbol)) {
        k = skip(cls, s, k, n, not_symbol, true);
        while (k < n && (s[k] == '\r' || s[k] == '\n')) k++;
        return k;
    }
    return white(cls, s, i, n);
}
