/* opts.c: see opts.h. */
#include "offload/cli/opts.h"

#include "core/err.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- names ------------------------------------------------------------------------------------------------------------------ */

/* Walks "-c,--ctx-size". Returns the next name and its length, NULL at the end. */
static const char *next_name(const char **at, size_t *len) {
    if (!*at || !**at) return NULL;
    const char *name = *at;
    *len = strcspn(name, ",");
    *at = name + *len + (name[*len] == ',');
    return name;
}

static bool has_name(const struct opt *o, const char *name, size_t len) {
    size_t n;
    for (const char *at = o->names, *p; (p = next_name(&at, &n));)
        if (n == len && !memcmp(p, name, len)) return true;
    return false;
}

static bool is_option(const struct opt *o) { return o->type != OPT_GROUP; }

static const struct opt *find_option(const struct opt *tab, const char *name, size_t len) {
    for (; tab->type != OPT_END; tab++)
        if (is_option(tab) && has_name(tab, name, len)) return tab;
    return NULL;
}

/* "--no-X" for a flag listed as "--X". */
static const struct opt *find_negated(const struct opt *tab, const char *name, size_t len) {
    if (len < 6 || memcmp(name, "--no-", 5)) return NULL;
    char positive[64];
    int n = snprintf(positive, sizeof positive, "--%.*s", (int)(len - 5), name + 5);
    if (n < 0 || (size_t)n >= sizeof positive) return NULL;
    const struct opt *o = find_option(tab, positive, (size_t)n);
    return o && o->type == OPT_FLAG ? o : NULL;
}

/* "--ctx-size" as LONGHAUL_CTX_SIZE; false for a short name. */
static bool env_name(char *out, size_t cap, const char *name, size_t len) {
    if (len < 3 || name[0] != '-' || name[1] != '-' || len + 10 > cap) return false;
    size_t k = (size_t)snprintf(out, cap, "LONGHAUL_");
    for (size_t i = 2; i < len; i++) out[k++] = (char)(name[i] == '-' ? '_' : toupper((unsigned char)name[i]));
    out[k] = 0;
    return true;
}

/* Edit distance with swapped neighbours counted once; names longer than 40 are never near. */
static int distance(const char *a, size_t n, const char *b, size_t m) {
    int d[41][41];
    if (n > 40 || m > 40) return 99;
    for (size_t i = 0; i <= n; i++) d[i][0] = (int)i;
    for (size_t k = 0; k <= m; k++) d[0][k] = (int)k;
    for (size_t i = 1; i <= n; i++)
        for (size_t k = 1; k <= m; k++) {
            int best = d[i - 1][k - 1] + (a[i - 1] != b[k - 1]);
            if (d[i - 1][k] + 1 < best) best = d[i - 1][k] + 1;
            if (d[i][k - 1] + 1 < best) best = d[i][k - 1] + 1;
            if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1] && d[i - 2][k - 2] + 1 < best)
                best = d[i - 2][k - 2] + 1;
            d[i][k] = best;
        }
    return d[n][m];
}

struct nearest {
    const char *name;
    size_t len;
    int distance;
};

static void consider(struct nearest *best, const char *typed, size_t len, const char *name, size_t n) {
    /* "--ctx" for "--ctx-size" is nearer than its number of missing letters says. */
    int d = len > 3 && n > len && !memcmp(typed, name, len) ? 1 : distance(typed, len, name, n);
    if (d < best->distance) *best = (struct nearest){name, n, d};
}

static int unknown_option(const struct opts_cmd *cmd, const struct opt *tab, const char *typed, size_t len) {
    struct nearest best = {.distance = 4};
    for (const struct opt *o = tab; o->type != OPT_END; o++) {
        size_t n;
        if (!is_option(o) || o->type == OPT_REFUSED) continue;
        for (const char *at = o->names, *p; (p = next_name(&at, &n));) consider(&best, typed, len, p, n);
    }
    consider(&best, typed, len, "--help", 6);
    int shown = len > 60 ? 60 : (int)len;
    /* A short name has few letters: a near one would be any of them. */
    if (!best.name || best.distance * 2 >= (int)len)
        return err_set(ERR_ARG, "%.*s: no such option; longhaul %s --help lists them", shown, typed, cmd->name);
    return err_set(ERR_ARG, "%.*s: no such option, did you mean %.*s? (longhaul %s --help lists all)", shown, typed,
                   (int)best.len, best.name, cmd->name);
}

/* --- values ----------------------------------------------------------------------------------------------------------------- */

static int bad_number(const char *what, const char *text, const char *wanted) {
    return err_set(ERR_ARG, "%s %.60s: must be %s", what, text, wanted);
}

/* Power of two of a suffix, -1 when it is none: K, k, Ki, KB, KiB all mean 1024. */
static int suffix_shift(const char *s) {
    static const char letters[] = "kmgt";
    if (!*s) return 0;
    const char *at = strchr(letters, tolower((unsigned char)*s));
    if (!at || !*at) return -1;
    s++;
    if (*s == 'i') s++;
    if (*s == 'B' || *s == 'b') s++;
    return *s ? -1 : (int)(at - letters + 1) * 10;
}

int opts_int(int64_t *out, const char *what, const char *text) {
    char *end;
    bool digits = isdigit((unsigned char)text[0]) || ((text[0] == '-' || text[0] == '+') && isdigit((unsigned char)text[1]));
    errno = 0;
    long long v = digits ? strtoll(text, &end, 10) : 0;
    int shift = digits ? suffix_shift(end) : -1;
    if (shift < 0) return bad_number(what, text, "a whole number, with K, M, G or T for powers of 1024 if you like");
    int64_t scaled;
    if (errno || __builtin_mul_overflow((int64_t)v, (int64_t)1 << shift, &scaled))
        return err_set(ERR_ARG, "%s %.60s: does not fit 64 bits", what, text);
    *out = scaled;
    return 0;
}

static bool limited(const struct opt *o) { return o->min != 0 || o->max != 0; }

static int set_int(const struct opt *o, const char *name, const char *value) {
    int64_t v;
    int rc = opts_int(&v, name, value);
    if (rc) return rc;
    if (limited(o) && ((double)v < o->min || (double)v > o->max))
        return err_set(ERR_ARG, "%s %.60s: must be between %.0f and %.0f", name, value, o->min, o->max);
    *(int64_t *)o->dst = v;
    return 0;
}

static int set_double(const struct opt *o, const char *name, const char *value) {
    char *end;
    double v = strtod(value, &end);
    if (end == value || *end || isspace((unsigned char)*value) || !isfinite(v)) return bad_number(name, value, "a number");
    if (limited(o) && (v < o->min || v > o->max))
        return err_set(ERR_ARG, "%s %.60s: must be between %g and %g", name, value, o->min, o->max);
    *(double *)o->dst = v;
    return 0;
}

static int set_enum(const struct opt *o, const char *name, const char *value) {
    size_t n;
    int i = 0;
    for (const char *at = o->choices, *p; (p = next_name(&at, &n)); i++) {
        if (n != strlen(value) || memcmp(p, value, n)) continue;
        *(int *)o->dst = i;
        return 0;
    }
    return err_set(ERR_ARG, "%s %.60s: must be one of %s", name, value, o->choices);
}

static int append(const struct opt *o, const char *value) {
    struct opt_list *list = o->dst;
    const char **grown = realloc(list->item, (size_t)(list->n + 1) * sizeof *grown);
    if (!grown) return err_set(ERR_NOMEM, "options: out of memory");
    list->item = grown;
    list->item[list->n++] = value;
    return 0;
}

static int set_value(const struct opt *o, const char *name, const char *value) {
    if (!*value && o->type != OPT_STRING && o->type != OPT_CALL)
        return err_set(ERR_ARG, "%s: empty value", name);
    switch (o->type) {
    case OPT_INT: return set_int(o, name, value);
    case OPT_DOUBLE: return set_double(o, name, value);
    case OPT_STRING: *(const char **)o->dst = value; return 0;
    case OPT_ENUM: return set_enum(o, name, value);
    case OPT_LIST: return append(o, value);
    case OPT_CALL: return o->call(name, value, o->dst);
    default: return err_set(ERR_ARG, "%s: %s", name, o->help);
    }
}

/* "1", "on", "yes", "true" and their contraries, for flags in the environment and --flag=value. */
static int set_flag(const struct opt *o, const char *name, const char *value) {
    static const char *const on[] = {"1", "on", "yes", "true"}, *const off[] = {"0", "off", "no", "false"};
    for (int i = 0; i < 4; i++) {
        bool is_on = !strcmp(value, on[i]);
        if (!is_on && strcmp(value, off[i])) continue;
        *(bool *)o->dst = is_on;
        return 0;
    }
    return err_set(ERR_ARG, "%s %.60s: must be on or off", name, value);
}

/* --- sources ---------------------------------------------------------------------------------------------------------------- */

static int from_environment(const struct opt *o) {
    size_t len;
    for (const char *at = o->names, *p; (p = next_name(&at, &len));) {
        char name[80];
        const char *value = env_name(name, sizeof name, p, len) ? getenv(name) : NULL;
        if (!value) continue;
        int rc = o->type == OPT_FLAG ? set_flag(o, name, value) : set_value(o, name, value);
        if (rc) return rc;
        if (o->seen) *o->seen = true;
    }
    return 0;
}

static int positional(struct opts_cmd *cmd, const char *arg) {
    if (cmd->n_positional >= cmd->max_positional)
        return err_set(ERR_ARG, "%.60s: longhaul %s takes %s; options begin with a dash", arg, cmd->name,
                       cmd->max_positional ? "no more names" : "no names");
    cmd->positional[cmd->n_positional++] = arg;
    return 0;
}

/* Whether an argument can be a value: "-x" is another option, "-1", "-.5" and "-" are values. */
static bool is_value(const char *arg) {
    return arg[0] != '-' || !arg[1] || isdigit((unsigned char)arg[1]) || arg[1] == '.';
}

/* The value of o behind argv[*i], which moves on to it. NULL with an error when there is none. */
static const char *take_value(const struct opt *tab, const struct opt *o, const char *name, int argc, char **argv, int *i) {
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    /* A text may begin with a dash as long as it is not itself an option of this command. */
    bool text = o->type == OPT_STRING && next && !find_option(tab, next, strcspn(next, "="));
    if (next && (is_value(next) || text)) return argv[++*i];
    err_set(ERR_ARG, "%s: needs a value (%s)", name, o->metavar ? o->metavar : "VALUE");
    return NULL;
}

/* One option at argv[*i]; *i moves over its value. given [options of tab] marks it. */
static int option(const struct opts_cmd *cmd, const struct opt *tab, int argc, char **argv, int *i, bool *given) {
    const char *arg = argv[*i], *eq = strchr(arg, '=');
    size_t len = eq ? (size_t)(eq - arg) : strlen(arg);
    const struct opt *o = find_option(tab, arg, len), *negated = o || eq ? NULL : find_negated(tab, arg, len);
    if (!o && !negated) return unknown_option(cmd, tab, arg, len);
    const struct opt *found = o ? o : negated;
    given[found - tab] = true;
    if (found->seen) *found->seen = true;
    char name[64];
    snprintf(name, sizeof name, "%.*s", len > 60 ? 60 : (int)len, arg);
    if (found->type == OPT_REFUSED) return err_set(ERR_ARG, "%s: %s", name, o->help);
    if (found->type == OPT_FLAG) {
        if (eq) return set_flag(o, name, eq + 1);
        *(bool *)found->dst = o != NULL;
        return 0;
    }
    const char *value = eq ? eq + 1 : take_value(tab, o, name, argc, argv, i);
    return value ? set_value(o, name, value) : ERR_ARG;
}

static int parse(struct opts_cmd *cmd, const struct opt *tab, int argc, char **argv, bool *given) {
    bool options_end = false;
    for (int i = 1; i < argc; i++) {
        int rc = 0;
        if (options_end || argv[i][0] != '-' || !argv[i][1])
            rc = positional(cmd, argv[i]);
        else if (!strcmp(argv[i], "--"))
            options_end = true;
        else
            rc = option(cmd, tab, argc, argv, &i, given);
        if (rc) return rc;
    }
    for (const struct opt *o = tab; o->type != OPT_END; o++) {
        if (given[o - tab] || !is_option(o) || o->type == OPT_REFUSED || o->no_env) continue;
        int rc = from_environment(o);
        if (rc) return rc;
    }
    return 0;
}

int opts_parse(struct opts_cmd *cmd, const struct opt *tab, int argc, char **argv, FILE *help) {
    cmd->n_positional = 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        bool all = !strcmp(argv[i], "--help-all");
        if (!all && strcmp(argv[i], "--help") && strcmp(argv[i], "-h")) continue;
        opts_help(cmd, tab, all, help);
        return OPTS_HELP;
    }
    size_t n = 1;
    while (tab[n - 1].type != OPT_END) n++;
    bool *given = calloc(n, sizeof *given);
    if (!given) return err_set(ERR_NOMEM, "options: out of memory");
    int rc = parse(cmd, tab, argc, argv, given);
    free(given);
    return rc;
}

int opts_one_gpu(const char *name, const char *value, void *dst) {
    (void)dst;
    if (!strcmp(value, "0") || !strcmp(value, "none")) return 0;
    return err_set(ERR_ARG, "%s %.60s: this program uses one GPU; leave the option out", name, value);
}

/* --- help ---------------------------------------------------------------------------------------------------------------------- */

static bool shown(const struct opt *o, bool all) {
    if (o->type == OPT_GROUP) return true;
    return o->type != OPT_REFUSED && (all || (!o->rare && o->help && *o->help));
}

/* A heading is printed only if an option below it is. */
static bool group_is_empty(const struct opt *o, bool all) {
    for (o++; o->type != OPT_END && o->type != OPT_GROUP; o++)
        if (shown(o, all)) return false;
    return true;
}

static void help_line(const struct opt *o, FILE *to) {
    char left[96];
    size_t n = 0, len;
    for (const char *at = o->names, *p; (p = next_name(&at, &len));)
        n += (size_t)snprintf(left + n, n < sizeof left ? sizeof left - n : 0, "%s%.*s", n ? ", " : "", (int)len, p);
    const char *meta = o->metavar ? o->metavar : o->type == OPT_ENUM ? o->choices : NULL;
    if (meta && n < sizeof left) snprintf(left + n, sizeof left - n, " %s", meta);
    const char *text = o->help ? o->help : "";
    if (strlen(left) > 26)
        fprintf(to, "  %s\n  %26s  %s\n", left, "", text);
    else
        fprintf(to, "  %-26s  %s\n", left, text);
}

void opts_help(const struct opts_cmd *cmd, const struct opt *tab, bool all, FILE *to) {
    fprintf(to, "longhaul %s: %s\nusage: longhaul %s %s\n", cmd->name, cmd->summary, cmd->name, cmd->usage);
    bool hidden = false;
    for (const struct opt *o = tab; o->type != OPT_END; o++) {
        if (o->type == OPT_GROUP) {
            if (!group_is_empty(o, all)) fprintf(to, "%s:\n", o->names);
        } else if (shown(o, all)) {
            help_line(o, to);
        } else {
            hidden |= o->type != OPT_REFUSED;
        }
    }
    if (hidden) fprintf(to, "More: longhaul %s --help-all\n", cmd->name);
    if (all) fprintf(to, "Every --long-option but prompts and texts can be set in the environment as LONGHAUL_LONG_OPTION; the command line\nwins.\n");
}
