/* chat_json.c: prints JSON the way Python's json.dumps does, which is what models saw in training, whatever spacing and
 * escapes the caller's JSON has. A checker and printer in one pass; builds no tree. */
#include "core/chat_impl.h"

#include "core/err.h"

#include <stdint.h>
#include <stdio.h>

enum { MAX_DEPTH = 100 };

struct reader {
    const char *p, *end;
};

static void skip_space(struct reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\t' || *r->p == '\r')) r->p++;
}

static bool take(struct reader *r, char ch) {
    skip_space(r);
    if (r->p == r->end || *r->p != ch) return false;
    r->p++;
    return true;
}

/* Steps over a string whose opening quote was taken; *inside gets what is between the quotes. */
static bool read_string(struct reader *r, struct chat_str *inside) {
    const char *start = r->p;
    for (; r->p < r->end && *r->p != '"'; r->p++) {
        if ((unsigned char)*r->p < 0x20) return false;
        if (*r->p != '\\') continue;
        if (++r->p == r->end) return false;
        if (*r->p == 'u') {
            if (r->end - r->p < 5) return false;
            for (int i = 1; i <= 4; i++)
                if (!strchr("0123456789abcdefABCDEF", r->p[i]) || !r->p[i]) return false;
            r->p += 4;
        } else if (!*r->p || !strchr("\"\\/bfnrt", *r->p)) {
            return false;
        }
    }
    if (r->p == r->end) return false;
    *inside = (struct chat_str){start, (size_t)(r->p - start)};
    r->p++;
    return true;
}

static unsigned hex4(const char *p) {
    unsigned v = 0;
    for (int i = 0; i < 4; i++) v = v * 16 + (unsigned)(p[i] <= '9' ? p[i] - '0' : (p[i] | 32) - 'a' + 10);
    return v;
}

static size_t utf8_put(char *out, unsigned cp) {
    if (cp < 0x80) return out[0] = (char)cp, 1;
    if (cp < 0x800) return out[0] = (char)(0xc0 | cp >> 6), out[1] = (char)(0x80 | (cp & 63)), 2;
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12), out[1] = (char)(0x80 | (cp >> 6 & 63)), out[2] = (char)(0x80 | (cp & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18), out[1] = (char)(0x80 | (cp >> 12 & 63));
    out[2] = (char)(0x80 | (cp >> 6 & 63)), out[3] = (char)(0x80 | (cp & 63));
    return 4;
}

/* Decodes the escape at *p (on the backslash) and moves *p behind it. Half surrogate pairs become U+FFFD. */
static unsigned escape_decode(const char **p, const char *end) {
    const char *q = *p + 1;
    *p = q + 1;
    switch (*q) {
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case 'u': break;
    default: return (unsigned char)*q;
    }
    unsigned hi = hex4(q + 1);
    *p = q + 5;
    if (hi < 0xd800 || hi > 0xdfff) return hi;
    if (hi >= 0xdc00 || end - *p < 6 || (*p)[0] != '\\' || (*p)[1] != 'u') return 0xfffd;
    unsigned lo = hex4(*p + 2);
    if (lo < 0xdc00 || lo > 0xdfff) return 0xfffd;
    *p += 6;
    return 0x10000 + ((hi - 0xd800) << 10) + (lo - 0xdc00);
}

void chat_put_unescaped(struct chat_sink *s, struct chat_str inside) {
    const char *p = inside.text, *end = p + inside.bytes;
    while (p < end) {
        const char *stop = memchr(p, '\\', (size_t)(end - p));
        if (!stop) stop = end;
        chat_put_bytes(s, p, (size_t)(stop - p), false);
        if ((p = stop) == end) break;
        char buf[4];
        chat_put_bytes(s, buf, utf8_put(buf, escape_decode(&p, end)), false);
    }
}

static void put_escaped_char(struct chat_sink *s, unsigned cp) {
    static const char short_form[] = "\bb\ff\nn\rr\tt\"\"\\\\";
    char buf[8] = "\\";
    for (const char *q = short_form; *q; q += 2) {
        if ((unsigned)*q != cp) continue;
        buf[1] = q[1];
        chat_put_bytes(s, buf, 2, false);
        return;
    }
    if (cp < 0x20) {
        snprintf(buf, sizeof buf, "\\u%04x", cp);
        chat_put_bytes(s, buf, 6, false);
    } else {
        chat_put_bytes(s, buf, utf8_put(buf, cp), false);
    }
}

/* A string with the escapes that json.dumps would choose. */
static void put_string(struct chat_sink *s, struct chat_str inside) {
    const char *p = inside.text, *end = p + inside.bytes;
    chat_text(s, "\"");
    while (p < end) {
        const char *stop = memchr(p, '\\', (size_t)(end - p));
        if (!stop) stop = end;
        chat_put_bytes(s, p, (size_t)(stop - p), false);
        if ((p = stop) < end) put_escaped_char(s, escape_decode(&p, end));
    }
    chat_text(s, "\"");
}

void chat_put_quoted(struct chat_sink *s, struct chat_str text) {
    const char *p = text.text, *end = p + text.bytes;
    chat_text(s, "\"");
    while (p < end) {
        const char *stop = p;
        while (stop < end && *stop != '"' && *stop != '\\' && (unsigned char)*stop >= 0x20) stop++;
        chat_put_bytes(s, p, (size_t)(stop - p), false);
        if ((p = stop) < end) put_escaped_char(s, (unsigned char)*p++);
    }
    chat_text(s, "\"");
}

static bool take_digits(struct reader *r) {
    const char *start = r->p;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9') r->p++;
    return r->p > start;
}

static bool put_number(struct chat_sink *s, struct reader *r) {
    const char *start = r->p;
    if (*r->p == '-') r->p++;
    bool zero = r->p < r->end && *r->p == '0';
    const char *digits = r->p;
    if (!take_digits(r) || (zero && r->p - digits > 1)) return false;
    if (r->p < r->end && *r->p == '.') {
        r->p++;
        if (!take_digits(r)) return false;
    }
    if (r->p < r->end && (*r->p | 32) == 'e') {
        r->p++;
        if (r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        if (!take_digits(r)) return false;
    }
    chat_put_bytes(s, start, (size_t)(r->p - start), false);
    return true;
}

static bool put_word(struct chat_sink *s, struct reader *r, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, word, n)) return false;
    r->p += n;
    chat_text(s, word);
    return true;
}

static void put_line_start(struct chat_sink *s, int indent, int depth) {
    chat_text(s, "\n");
    for (int i = 0; i < indent * depth; i++) chat_text(s, " ");
}

static bool put_value(struct chat_sink *s, struct reader *r, int indent, int depth);

/* The members of an object or array whose opening bracket was taken. */
static bool put_members(struct chat_sink *s, struct reader *r, int indent, int depth, bool object) {
    char close = object ? '}' : ']';
    chat_text(s, object ? "{" : "[");
    if (!take(r, close)) {
        for (bool first = true;; first = false) {
            if (!first) chat_text(s, indent ? "," : ", ");
            if (indent) put_line_start(s, indent, depth + 1);
            struct chat_str key;
            if (object) {
                if (!take(r, '"') || !read_string(r, &key) || !take(r, ':')) return false;
                put_string(s, key);
                chat_text(s, ": ");
            }
            if (!put_value(s, r, indent, depth + 1)) return false;
            if (take(r, close)) break;
            if (!take(r, ',')) return false;
        }
        if (indent) put_line_start(s, indent, depth);
    }
    chat_text(s, object ? "}" : "]");
    return true;
}

static bool put_value(struct chat_sink *s, struct reader *r, int indent, int depth) {
    skip_space(r);
    if (r->p == r->end || depth > MAX_DEPTH) return false;
    struct chat_str inside;
    switch (*r->p) {
    case '{': r->p++; return put_members(s, r, indent, depth, true);
    case '[': r->p++; return put_members(s, r, indent, depth, false);
    case '"':
        r->p++;
        if (!read_string(r, &inside)) return false;
        put_string(s, inside);
        return true;
    case 't': return put_word(s, r, "true");
    case 'f': return put_word(s, r, "false");
    case 'n': return put_word(s, r, "null");
    default: return put_number(s, r);
    }
}

static int not_json(const char *what, struct chat_str json, const char *at) {
    return err_set(ERR_ARG, "%s: not valid JSON at byte %zu of %zu (or nested deeper than %d)", what,
                   (size_t)(at - json.text), json.bytes, MAX_DEPTH);
}

int chat_put_json(struct chat_sink *s, struct chat_str json, int indent, const char *what) {
    if (!json.text) return err_set(ERR_ARG, "%s: no JSON text", what);
    struct reader r = {json.text, json.text + json.bytes};
    if (!put_value(s, &r, indent, 0)) return not_json(what, json, r.p);
    skip_space(&r);
    return r.p == r.end ? 0 : not_json(what, json, r.p);
}

int chat_json_next(struct chat_json_walk *w, struct chat_str *key, struct chat_str *value, const char *what) {
    struct reader r = {w->rest.text, w->rest.text + w->rest.bytes};
    struct chat_sink nowhere = {0};
    bool ok = true, end = false;
    if (!w->rest.text) return err_set(ERR_ARG, "%s: no JSON text", what);
    if (!w->inside) {
        ok = take(&r, '{');
        end = ok && take(&r, '}');
    } else {
        end = take(&r, '}');
        if (!end) ok = take(&r, ',');
    }
    if (ok && end) {
        skip_space(&r);
        return r.p == r.end ? 0 : not_json(what, w->rest, r.p);
    }
    ok = ok && take(&r, '"') && read_string(&r, key) && take(&r, ':');
    skip_space(&r);
    const char *start = r.p;
    if (!ok || !put_value(&nowhere, &r, 0, 1)) return not_json(what, w->rest, r.p);
    *value = (struct chat_str){start, (size_t)(r.p - start)};
    w->rest = (struct chat_str){r.p, (size_t)(r.end - r.p)};
    w->inside = true;
    return 1;
}

void chat_put_value(struct chat_sink *s, struct chat_str value) {
    if (value.bytes >= 2 && value.text[0] == '"') {
        chat_put_unescaped(s, (struct chat_str){value.text + 1, value.bytes - 2});
        return;
    }
    struct reader r = {value.text, value.text + value.bytes};
    put_value(s, &r, 0, 1);
}
