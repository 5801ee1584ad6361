/* escape.c: see escape.h. */
#include "offload/cli/escape.h"

#include <string.h>

static int hex(char c) {
    static const char digits[] = "0123456789abcdef";
    const char *at = c ? strchr(digits, c | 0x20) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* The character after a backslash; *len: characters of the escape without the backslash, 0 if it is none. */
static char escaped(const char *s, size_t *len) {
    static const char from[] = "nrt'\"\\", to[] = "\n\r\t'\"\\";
    *len = 1;
    const char *at = *s ? strchr(from, *s) : NULL;
    if (at) return to[at - from];
    *len = *s == 'x' && hex(s[1]) >= 0 && hex(s[2]) >= 0 ? 3 : 0;
    return *len ? (char)(hex(s[1]) * 16 + hex(s[2])) : 0;
}

size_t cli_unescape(char *s) {
    char *w = s;
    for (const char *r = s; *r; r++) {
        size_t len = 0;
        char c = *r == '\\' ? escaped(r + 1, &len) : 0;
        *w++ = len ? c : *r;
        r += len;
    }
    *w = 0;
    return (size_t)(w - s);
}
