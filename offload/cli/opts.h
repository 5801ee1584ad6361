/* opts.h: the command-line options of all subcommands, from tables. A command lists its options; the parser fills the
 * destinations from the command line, and from the environment what the command line does not give. It prints help and
 * nothing else; errors are returned as one sentence that names option, value and limit. */
#ifndef LH_OFFLOAD_CLI_OPTS_H
#define LH_OFFLOAD_CLI_OPTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum opt_type {
    OPT_FLAG,     /* bool *dst = true; "--no-NAME" of a listed "--NAME" sets false */
    OPT_INT,      /* int64_t *dst: decimal, suffixes K M G T (1024, 1024^2, ...): 256K = 262144 */
    OPT_DOUBLE,   /* double *dst, finite */
    OPT_STRING,   /* const char **dst, points into argv or the environment */
    OPT_ENUM,     /* int *dst: index into `choices` */
    OPT_LIST,     /* struct opt_list *dst: appended each time, e.g. -ot A=B -ot C=D */
    OPT_CALL,     /* int (*call)(const char *option, const char *value, void *dst): own parsing, 0 or err_set */
    OPT_REFUSED,  /* known from other programs and not supported: `help` is the sentence */
    OPT_GROUP,    /* heading of the help; names is its title */
    OPT_END,
};

struct opt_list {
    const char **item; /* [n], free(item) */
    int n;
};

struct opt {
    const char *names; /* "-c,--ctx-size": each long one is also an environment variable, LONGHAUL_CTX_SIZE */
    enum opt_type type;
    void *dst;
    const char *metavar; /* shown in help: "N"; NULL for flags */
    const char *help;    /* one line; "" hides the option from --help (shown by --help-all) */
    double min, max;     /* OPT_INT, OPT_DOUBLE: inclusive; both 0 means unlimited */
    const char *choices; /* OPT_ENUM: "auto,on,off" */
    bool rare;           /* shown by --help-all only */
    bool no_env;         /* an input, not a setting: not taken from the environment */
    bool *seen;          /* ? set when the option was given (environment or command line) */
    int (*call)(const char *option, const char *value, void *dst);
};

#define OPTS_HELP 1 /* opts_parse: help was printed, stop with status 0 */

/* What stands around the options. */
struct opts_cmd {
    const char *name;     /* "run": shown as "longhaul run" */
    const char *summary;  /* one line */
    const char *usage;    /* "-m FILE -p TEXT [options]" */
    int max_positional;   /* more are refused by name */
    const char **positional; /* [max_positional]? out */
    int n_positional;        /* out */
};

/* Parses argv[1..argc). `tab` ends with OPT_END; "-h,--help" and "--help-all" exist for every command and print to `help`.
 * "--opt=value", "--opt value", "-o value" and negative numbers as values are accepted; "--" ends options.
 * Returns 0, OPTS_HELP, or ERR_ARG (unknown option with the nearest name, missing or empty value, not a number, out of range). */
int opts_parse(struct opts_cmd *cmd, const struct opt *tab, int argc, char **argv, FILE *help);

/* Number with optional suffix K M G T (also KiB, k ...), sign allowed: "256K" -> 262144. ERR_ARG names `what`. */
int opts_int(int64_t *out, const char *what, const char *text);

/* OPT_CALL for options that choose among several GPUs (-mg, -sm): accepts 0 and "none", which ask for nothing, and refuses
 * all else by name. dst is not used. */
int opts_one_gpu(const char *option, const char *value, void *dst);

/* Help screen: all = false leaves rare options out and ends by naming --help-all. */
void opts_help(const struct opts_cmd *cmd, const struct opt *tab, bool all, FILE *to);

#endif
