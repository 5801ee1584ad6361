/* err.h: error codes with a sentence.
 * A function that can fail returns 0 or a negative enum err. Whoever knows most about a failure calls err_set once;
 * callers pass the code up unchanged. The sentence is thread-local and valid until the next err_set of the thread. */
#ifndef LH_CORE_ERR_H
#define LH_CORE_ERR_H

#ifdef __cplusplus
extern "C" {
#endif

enum err {
    ERR_ARG = -1,         /* wrong usage: option, range, unknown name, shape mismatch at a public boundary */
    ERR_NOMEM = -2,       /* the host allocator said no */
    ERR_IO = -3,          /* read, write, mmap failed */
    ERR_FORMAT = -4,      /* a model file that is missing, malformed or inconsistent */
    ERR_UNSUPPORTED = -5, /* a sound model file that needs something this program does not have */
    ERR_BUDGET = -6,      /* does not fit: a normal result for the planner, nothing was left behind */
    ERR_DEVICE = -7,      /* the accelerator or its driver failed */
    ERR_STRICT = -8,      /* refused because of --strict */
    ERR_INTERRUPTED = -9, /* Ctrl-C */
    ERR_NUMERIC = -10,    /* NaN or infinity where there must be none */
};

/* Stores the sentence (printf format, cut at 1 KiB) and returns `code`. */
int err_set(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The sentence of this thread's latest err_set; "" if there was none. Never NULL. */
const char *err_text(void);

/* Exit status of the program for a code (0 for 0): see README, "Exit status". */
int err_exit_status(int code);

#ifdef __cplusplus
}
#endif
#endif
