/* err.c: thread-local error sentence. */
#include "core/err.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char text[1024];

int err_set(int code, const char *fmt, ...) {
    /* The arguments may point into `text` (a caller that adds context), so format aside first. */
    char fresh[sizeof text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(fresh, sizeof fresh, fmt, ap);
    va_end(ap);
    snprintf(text, sizeof text, "%s", fresh);
    return code;
}

const char *err_text(void) { return text; }

int err_exit_status(int code) {
    switch (code) {
    case 0: return 0;
    case ERR_ARG: return 2;
    case ERR_FORMAT:
    case ERR_UNSUPPORTED: return 3;
    case ERR_BUDGET: return 4;
    case ERR_STRICT: return 5;
    case ERR_INTERRUPTED: return 130;
    default: return 1;
    }
}
