/* utf8.h: strict UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF). Pure functions. */
#ifndef LH_CORE_UTF8_H
#define LH_CORE_UTF8_H

#include <stddef.h>
#include <stdint.h>

static inline int utf8_is_tail(const char *p) { return ((unsigned char)*p & 0xC0) == 0x80; }

/* Length (1 to 4) of the valid character that p begins with and its code point in *cp; 0 when p[0 .. n) does not begin
 * with one (n == 0, an invalid byte, or a character that is cut off). */
static inline int utf8_decode(const char *p, size_t n, uint32_t *cp) {
    if (!n) return 0;
    uint32_t c = (unsigned char)p[0];
    if (c < 0x80) {
        *cp = c;
        return 1;
    }
    int len = c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    if (!len || n < (size_t)len) return 0;
    c &= 0xFFu >> (len + 1);
    for (int i = 1; i < len; i++) {
        if (!utf8_is_tail(p + i)) return 0;
        c = c << 6 | ((unsigned char)p[i] & 0x3F);
    }
    if (len == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) return 0;
    if (len == 4 && (c < 0x10000 || c > 0x10FFFF)) return 0;
    *cp = c;
    return len;
}

/* Writes cp (a valid code point) to out[4], not terminated; returns its length. */
static inline int utf8_encode(uint32_t cp, char *out) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    int len = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = len - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)((0xF00 >> len & 0xFF) | cp);
    return len;
}

/* Could p[0 .. n), n < 4, become a valid character when more bytes follow? */
static inline int utf8_is_cut(const char *p, size_t n) {
    static const char tail[2][4] = {"\x80\x80\x80", "\xBF\xBF\xBF"};
    uint32_t cp;
    if (!n || utf8_decode(p, n, &cp)) return 0;
    for (int t = 0; t < 2; t++) { /* the range of what may follow is an interval, so one of its ends fits */
        char c[8];
        for (size_t i = 0; i < 4; i++) c[i] = i < n ? p[i] : tail[t][i - n];
        if ((size_t)utf8_decode(c, 4, &cp) > n) return 1;
    }
    return 0;
}

/* Bytes at the end of p[0 .. n) that begin a character which is not complete: 0 to 3. */
static inline size_t utf8_cut_bytes(const char *p, size_t n) {
    for (size_t k = 1; k <= 3 && k <= n; k++)
        if (utf8_is_cut(p + n - k, k)) return k;
    return 0;
}

#endif
