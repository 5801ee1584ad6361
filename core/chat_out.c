/* chat_out.c: the output of chat templates (pieces of text, dates) and the string functions their families need. */
#include "core/chat_impl.h"

#include <stdint.h>
#include <stdio.h>
#include <time.h>

void chat_put_bytes(struct chat_sink *s, const char *p, size_t n, bool special) {
    if (!n) return;
    if (n > SIZE_MAX / 2 - s->bytes) {
        s->overflow = true;
        return;
    }
    if (!s->n_pieces || s->special != special) {
        if (s->text) s->pieces[s->n_pieces] = (struct chat_piece){.at = s->bytes, .special = special};
        s->n_pieces++;
        s->special = special;
    }
    if (s->text) {
        memcpy(s->text + s->bytes, p, n);
        s->pieces[s->n_pieces - 1].bytes += n;
    }
    s->bytes += n;
}

static struct tm date_of(const struct chat_options *o) {
    struct tm tm = {.tm_year = o->date.year - 1900, .tm_mon = o->date.month - 1, .tm_mday = o->date.day};
    if (!o->date.year) {
        time_t now = time(NULL);
        localtime_r(&now, &tm);
    }
    return tm;
}

void chat_put_date_dmy(struct chat_sink *s, const struct chat_options *o) {
    static const char month[12][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    struct tm tm = date_of(o);
    char buf[32];
    snprintf(buf, sizeof buf, "%02d %s %04d", tm.tm_mday, month[tm.tm_mon], tm.tm_year + 1900);
    chat_text(s, buf);
}

void chat_put_dated(struct chat_sink *s, const char *text, const struct chat_options *o) {
    for (const char *at; (at = strchr(text, CHAT_TODAY_MARK)); text = at + 1) {
        struct tm tm = date_of(o);
        char buf[48];
        snprintf(buf, sizeof buf, "%04d-%02d-%02d", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday);
        chat_put_bytes(s, text, (size_t)(at - text), false);
        chat_text(s, buf);
    }
    chat_text(s, text);
}

/* Code points for which Python's str.isspace() is true, as UTF-8. */
static const char *const wide_space[] = {
    "\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80",
    "\xe2\x80\x80", "\xe2\x80\x81", "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
    "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf",
    "\xe2\x81\x9f", "\xe3\x80\x80",
};

static bool ascii_space(char ch) { return (ch >= 9 && ch <= 13) || (ch >= 28 && ch <= 32); }

/* Bytes of the white space character at the start or the end of s; 0 when there is none. */
static size_t space_at(struct chat_str s, bool end) {
    if (!s.bytes) return 0;
    if (ascii_space(end ? s.text[s.bytes - 1] : s.text[0])) return 1;
    for (size_t i = 0; i < sizeof wide_space / sizeof *wide_space; i++) {
        size_t n = strlen(wide_space[i]);
        if (n <= s.bytes && !memcmp(end ? s.text + s.bytes - n : s.text, wide_space[i], n)) return n;
    }
    return 0;
}

struct chat_str chat_trim(struct chat_str s) {
    for (size_t n; (n = space_at(s, false)); s.text += n) s.bytes -= n;
    for (size_t n; (n = space_at(s, true));) s.bytes -= n;
    return s;
}

struct chat_str chat_trim_newlines(struct chat_str s, bool left, bool right) {
    for (; left && s.bytes && s.text[0] == '\n'; s.text++) s.bytes--;
    while (right && s.bytes && s.text[s.bytes - 1] == '\n') s.bytes--;
    return s;
}

bool chat_starts(struct chat_str s, const char *prefix) {
    size_t n = strlen(prefix);
    return s.bytes >= n && !memcmp(s.text, prefix, n);
}

bool chat_ends(struct chat_str s, const char *suffix) {
    size_t n = strlen(suffix);
    return s.bytes >= n && !memcmp(s.text + s.bytes - n, suffix, n);
}

static const char *find(struct chat_str s, const char *what) {
    return s.bytes ? memmem(s.text, s.bytes, what, strlen(what)) : NULL;
}

bool chat_has(struct chat_str s, const char *what) { return find(s, what) != NULL; }

struct chat_str chat_before_first(struct chat_str s, const char *what) {
    const char *at = find(s, what);
    if (at) s.bytes = (size_t)(at - s.text);
    return s;
}

struct chat_str chat_after_last(struct chat_str s, const char *what) {
    for (const char *at; (at = find(s, what));) {
        size_t skip = (size_t)(at - s.text) + strlen(what);
        s.text += skip;
        s.bytes -= skip;
    }
    return s;
}
