/* cmd_tokenize.c: token ids of a text, and back. Options and output of llama.cpp's tokenizer tool, plus --detokenize.
 * Reads the vocabulary only: any GGUF file with a tokenizer will do. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/tokenizer.h"
#include "offload/cli/cli.h"
#include "offload/cli/escape.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct tokenize_opts {
    const char *model, *prompt, *file, *ids_text;
    bool from_stdin, ids_only, bos, escape, parse_special, show_count;
};

static int parse(struct tokenize_opts *o, int argc, char **argv) {
    *o = (struct tokenize_opts){.bos = true, .escape = true, .parse_special = true};
    struct opt tab[] = {
        {.names = "-m,--model", .type = OPT_STRING, .dst = &o->model, .metavar = "FILE", .help = "GGUF file whose tokenizer to use"},
        {.names = "-p,--prompt", .type = OPT_STRING, .dst = &o->prompt, .no_env = true, .metavar = "TEXT", .help = "text to tokenize"},
        {.names = "-f,--file", .type = OPT_STRING, .dst = &o->file, .no_env = true, .metavar = "FILE", .help = "text from a file; - is standard input"},
        {.names = "--stdin", .type = OPT_FLAG, .dst = &o->from_stdin, .no_env = true, .help = "text from standard input"},
        {.names = "--detokenize", .type = OPT_STRING, .dst = &o->ids_text, .no_env = true, .metavar = "IDS", .help = "print the text of token ids, \"1,2,3\""},
        {.names = "--ids", .type = OPT_FLAG, .dst = &o->ids_only, .help = "one line: [1, 2, 3]"},
        {.names = "--bos", .type = OPT_FLAG, .dst = &o->bos, .help = "bos (and eos) where the model wants them (default; --no-bos)"},
        {.names = "-e,--escape", .type = OPT_FLAG, .dst = &o->escape, .help = "\\n, \\t, \\xHH ... in -p (default; --no-escape)"},
        {.names = "--parse-special", .type = OPT_FLAG, .dst = &o->parse_special, .help = "recognise special tokens in the text (default; --no-parse-special)"},
        {.names = "--show-count", .type = OPT_FLAG, .dst = &o->show_count, .help = "print the number of tokens at the end"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "tokenize", .summary = "prints the token ids of a text, or the text of token ids",
                           .usage = "-m FILE (-p TEXT | -f FILE | --stdin | --detokenize IDS) [--ids]"};
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc) return rc;
    if (!o->model) return err_set(ERR_ARG, "no model: give -m FILE.gguf");
    int sources = !!o->prompt + !!o->file + o->from_stdin + !!o->ids_text;
    if (sources != 1)
        return err_set(ERR_ARG, "%s of -p, -f, --stdin and --detokenize: give exactly one", sources ? "more than one" : "none");
    return 0;
}

static int read_text(const struct tokenize_opts *o, char **text, size_t *n) {
    if (!o->prompt) return cli_read_file(text, n, o->file ? o->file : "-");
    *text = strdup(o->prompt);
    if (!*text) return err_set(ERR_NOMEM, "out of memory for the text");
    *n = o->escape ? cli_unescape(*text) : strlen(*text);
    return 0;
}

/* Text that is not UTF-8 is fine where the vocabulary has a token for each byte. After cli_utf8 has found the place. */
static int all_bytes_kept(const struct tokenizer *t, const char *text, size_t n) {
    char said[200], *back = NULL;
    snprintf(said, sizeof said, "%s", err_text());
    int32_t *ids = NULL;
    size_t n_ids = 0, n_back = 0;
    int rc = tokenizer_encode(t, text, n, 0, &ids, &n_ids);
    if (!rc) rc = tokenizer_decode(t, ids, n_ids, 0, &back, &n_back);
    if (!rc && (n_back != n || memcmp(back, text, n)))
        rc = err_set(ERR_ARG, "%s, and this vocabulary has no tokens for single bytes", said);
    free(ids);
    free(back);
    return rc;
}

static int tokenize(const struct tokenizer *t, const struct tokenize_opts *o) {
    char *text = NULL;
    size_t n = 0, n_ids = 0;
    int32_t *ids = NULL;
    int rc = read_text(o, &text, &n);
    unsigned flags = (o->bos ? TOK_ADD_SPECIAL : 0) | (o->parse_special ? TOK_PARSE_SPECIAL : 0);
    if (!rc) rc = tokenizer_encode(t, text, n, flags, &ids, &n_ids);
    if (!rc && cli_utf8("the text", text, n)) rc = all_bytes_kept(t, text, n);
    free(text);
    if (rc) return rc;
    if (o->ids_only) putchar('[');
    for (size_t i = 0; i < n_ids; i++) {
        if (o->ids_only) {
            printf("%s%d", i ? ", " : "", ids[i]);
            continue;
        }
        size_t n_piece;
        const char *piece = tokenizer_piece(t, ids[i], TOK_SHOW_SPECIAL, &n_piece);
        printf("%6d -> '", ids[i]);
        fwrite(piece, 1, n_piece, stdout);
        puts("'");
    }
    if (o->ids_only) puts("]");
    if (o->show_count) printf("Total number of tokens: %zu\n", n_ids);
    free(ids);
    return 0;
}

/* Ids separated by commas or blanks, with or without brackets. */
static int parse_ids(const struct tokenizer *t, const char *s, int32_t **out, size_t *n) {
    static const char between[] = " ,[]\t\r\n";
    *n = 0;
    *out = malloc((strlen(s) / 2 + 1) * sizeof **out);
    if (!*out) return err_set(ERR_NOMEM, "out of memory for %zu bytes of ids", strlen(s));
    for (s += strspn(s, between); *s; s += strspn(s, between)) {
        char *end;
        errno = 0;
        long long v = strtoll(s, &end, 10);
        if (end == s || (*end && !strchr(between, *end)) || errno || v < 0 || v >= tokenizer_n_vocab(t))
            return err_set(ERR_ARG, "--detokenize: \"%.*s\" is not a token id, 0 to %d", (int)strcspn(s, between), s,
                           tokenizer_n_vocab(t) - 1);
        (*out)[(*n)++] = (int32_t)v;
        s = end;
    }
    return 0;
}

static int detokenize(const struct tokenizer *t, const struct tokenize_opts *o) {
    int32_t *ids = NULL;
    size_t n_ids, n = 0;
    char *text = NULL;
    int rc = parse_ids(t, o->ids_text, &ids, &n_ids);
    if (!rc) rc = tokenizer_decode(t, ids, n_ids, TOK_SHOW_SPECIAL, &text, &n);
    if (!rc) {
        fwrite(text, 1, n, stdout);
        putchar('\n');
        if (o->show_count) printf("Total number of tokens: %zu\n", n_ids);
    }
    free(ids);
    free(text);
    return rc;
}

int cmd_tokenize(int argc, char **argv) {
    struct tokenize_opts o;
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    int rc = parse(&o, argc, argv);
    if (rc == OPTS_HELP) return 0;
    if (!rc) rc = gguf_open(&g, o.model);
    if (!rc) rc = tokenizer_from_gguf(&t, g);
    if (!rc) rc = o.ids_text ? detokenize(t, &o) : tokenize(t, &o);
    if (!rc && fflush(stdout)) rc = err_set(ERR_IO, "cannot write to standard output: %s", strerror(errno));
    tokenizer_close(t);
    gguf_close(g);
    return rc ? cli_fail("tokenize", rc) : 0;
}
