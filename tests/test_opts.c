/* test_opts.c: the option parser: values, limits, sentences, environment, help. Includes the source: it belongs to the program. */
#include "offload/cli/opts.c"

#include "tests/support.h"

static struct {
    int64_t ctx, batch, seed;
    double top_p, temp;
    const char *model, *prompt;
    bool strict, mmap, ctx_seen;
    int flash;
    struct opt_list ot;
    int calls;
    char called[64];
} v;

static int call(const char *option, const char *value, void *dst) {
    ++*(int *)dst;
    snprintf(v.called, sizeof v.called, "%s=%s", option, value);
    return strcmp(value, "bad") ? 0 : err_set(ERR_ARG, "%s bad: no", option);
}

static const struct opt tab[] = {
    {.names = "Model", .type = OPT_GROUP},
    {.names = "-m,--model", .type = OPT_STRING, .dst = &v.model, .metavar = "FILE", .help = "model file"},
    {.names = "-p,--prompt", .type = OPT_STRING, .dst = &v.prompt, .metavar = "TEXT", .help = "prompt"},
    {.names = "-c,--ctx-size", .type = OPT_INT, .dst = &v.ctx, .metavar = "N", .help = "context", .max = 1e12, .seen = &v.ctx_seen},
    {.names = "-b,--batch-size", .type = OPT_INT, .dst = &v.batch, .metavar = "N", .help = "batch", .min = 1, .max = 65536},
    {.names = "Sampling", .type = OPT_GROUP},
    {.names = "-s,--seed", .type = OPT_INT, .dst = &v.seed, .metavar = "N", .help = "seed"},
    {.names = "--top-p", .type = OPT_DOUBLE, .dst = &v.top_p, .metavar = "F", .help = "nucleus", .min = 0, .max = 1},
    {.names = "--temp,--temperature", .type = OPT_DOUBLE, .dst = &v.temp, .metavar = "F", .help = "temperature"},
    {.names = "Seldom", .type = OPT_GROUP},
    {.names = "-fa,--flash-attn", .type = OPT_ENUM, .dst = &v.flash, .choices = "auto,on,off", .help = "attention", .rare = true},
    {.names = "-ot,--override-tensor", .type = OPT_LIST, .dst = &v.ot, .metavar = "RE=HOME", .help = "placement", .rare = true},
    {.names = "--call", .type = OPT_CALL, .dst = &v.calls, .call = call, .metavar = "X", .help = "own", .rare = true},
    {.names = "--strict", .type = OPT_FLAG, .dst = &v.strict, .help = "refuse", .rare = true},
    {.names = "--mmap", .type = OPT_FLAG, .dst = &v.mmap, .help = "map", .rare = true},
    {.names = "-mg,--main-gpu", .type = OPT_CALL, .call = opts_one_gpu, .metavar = "N", .help = "0", .rare = true},
    {.names = "-ts,--tensor-split", .type = OPT_REFUSED, .help = "one GPU at most"},
    {.type = OPT_END},
};

static const char *names[2];
static struct opts_cmd cmd = {.name = "run", .summary = "writes", .usage = "-m FILE", .max_positional = 2, .positional = names};

/* Splits the line at single spaces and parses it; "~" stands for a space inside an argument. */
static int parsed(const char *line) {
    static char copy[1024];
    char *argv[32] = {"longhaul"};
    int argc = 1;
    free(v.ot.item);
    memset(&v, 0, sizeof v);
    snprintf(copy, sizeof copy, "%s", line);
    for (char *p = copy; *p;) {
        argv[argc++] = p;
        p += strcspn(p, " ");
        if (*p) *p++ = 0;
    }
    for (int i = 1; i < argc; i++)
        for (char *p = argv[i]; (p = strchr(p, '~'));) *p = ' ';
    err_set(0, "%s", "");
    FILE *nowhere = fopen("/dev/null", "w");
    int rc = opts_parse(&cmd, tab, argc, argv, nowhere);
    fclose(nowhere);
    return rc;
}

static void accept_line(const char *line) {
    int rc = parsed(line);
    if (rc) fail_msg("%s: %d %s", line, rc, err_text());
}

static void refuse_line(const char *line, const char *want) {
    int rc = parsed(line);
    if (rc != ERR_ARG) fail_msg("%s: got %d, want %d", line, rc, ERR_ARG);
    if (strcmp(err_text(), want)) fail_msg("%s:\n got %s\nwant %s", line, err_text(), want);
}

static void values(void **state) {
    (void)state;
    accept_line("-m a.gguf -c 256K --batch-size=2k -s -1 --top-p .5 --temp=-0.5 --strict -fa off file -");
    assert_string_equal(v.model, "a.gguf");
    assert_true(v.ctx == 262144 && v.ctx_seen && v.batch == 2048 && v.seed == -1);
    assert_true(v.top_p == 0.5 && v.temp == -0.5 && v.strict && v.flash == 2);
    assert_int_equal(cmd.n_positional, 2);
    assert_string_equal(names[0], "file");
    assert_string_equal(names[1], "-");
    accept_line("");
    assert_false(v.ctx_seen);
    accept_line("--temperature -1e-3 -c 0 -c 5 --mmap --no-mmap -- -m");
    assert_true(v.temp == -1e-3 && v.ctx == 5 && !v.mmap);
    assert_string_equal(names[0], "-m");
    accept_line("--no-mmap --mmap=on --strict=off");
    assert_true(v.mmap && !v.strict);
    accept_line("-p -dashed~text --prompt=--model");
    assert_string_equal(v.prompt, "--model");
    accept_line("-p -dashed~text");
    assert_string_equal(v.prompt, "-dashed text");
    accept_line("-p -");
    assert_string_equal(v.prompt, "-");
    accept_line("-ot a=b=c -ot=d --call x --call=");
    assert_int_equal(v.ot.n, 2);
    assert_string_equal(v.ot.item[0], "a=b=c");
    assert_string_equal(v.ot.item[1], "d");
    assert_int_equal(v.calls, 2);
    assert_string_equal(v.called, "--call=");
    accept_line("-mg 0");
}

static void sizes(void **state) {
    (void)state;
    static const struct { const char *text; int64_t want; } good[] = {
        {"0", 0}, {"7", 7}, {"-7", -7}, {"+7", 7}, {"256K", 262144}, {"1k", 1024}, {"16G", 17179869184}, {"3M", 3145728},
        {"2T", 2199023255552}, {"4KiB", 4096}, {"4KB", 4096}, {"4Ki", 4096}, {"-1K", -1024},
        {"9223372036854775807", INT64_MAX}, {"-9223372036854775808", INT64_MIN}, {"8388607T", 8388607LL << 40}};
    static const char *const bad[] = {"", "K", "1.5K", "12x", "1KK", "0x10", " 1", "1 ", "--1", "1Kx", "9223372036854775808",
                                      "8388608T", "99999999999999999999999", "-", "+", "1e3", "nan"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        int64_t got = 1;
        if (opts_int(&got, "-c", good[i].text) || got != good[i].want)
            fail_msg("%s: got %lld, want %lld", good[i].text, (long long)got, (long long)good[i].want);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t got = 1;
        if (opts_int(&got, "-c", bad[i]) != ERR_ARG || got != 1) fail_msg("\"%s\" accepted as %lld", bad[i], (long long)got);
        assert_non_null(strstr(err_text(), "-c"));
    }
}

static void sentences(void **state) {
    (void)state;
    refuse_line("--ctx 5", "--ctx: no such option, did you mean --ctx-size? (longhaul run --help lists all)");
    refuse_line("--modle x", "--modle: no such option, did you mean --model? (longhaul run --help lists all)");
    refuse_line("--temprature=1", "--temprature: no such option, did you mean --temperature? (longhaul run --help lists all)");
    refuse_line("--quux-frobnicate", "--quux-frobnicate: no such option; longhaul run --help lists them");
    refuse_line("-z", "-z: no such option; longhaul run --help lists them");
    refuse_line("-m", "-m: needs a value (FILE)");
    refuse_line("-c -b 3", "-c: needs a value (N)");
    refuse_line("-m --ctx-size 5", "-m: needs a value (FILE)");
    refuse_line("-c=", "-c: empty value");
    refuse_line("-c 12x", "-c 12x: must be a whole number, with K, M, G or T for powers of 1024 if you like");
    refuse_line("-c -1", "-c -1: must be between 0 and 1000000000000");
    refuse_line("-b 0", "-b 0: must be between 1 and 65536");
    refuse_line("--batch-size 64G", "--batch-size 64G: must be between 1 and 65536");
    refuse_line("-c 99999999999999999999", "-c 99999999999999999999: does not fit 64 bits");
    refuse_line("--top-p 1.5", "--top-p 1.5: must be between 0 and 1");
    refuse_line("--top-p nan", "--top-p nan: must be a number");
    refuse_line("--temp inf", "--temp inf: must be a number");
    refuse_line("--temp 1e999", "--temp 1e999: must be a number");
    refuse_line("--temp 1,5", "--temp 1,5: must be a number");
    refuse_line("-fa maybe", "-fa maybe: must be one of auto,on,off");
    refuse_line("-fa o", "-fa o: must be one of auto,on,off");
    refuse_line("--strict=perhaps", "--strict perhaps: must be on or off");
    refuse_line("--no-model", "--no-model: no such option, did you mean --model? (longhaul run --help lists all)");
    refuse_line("-ts 3,1", "-ts: one GPU at most");
    refuse_line("--tensor-split=3,1", "--tensor-split: one GPU at most");
    refuse_line("-mg 1", "-mg 1: this program uses one GPU; leave the option out");
    refuse_line("--call bad", "--call bad: no");
    refuse_line("a b c", "c: longhaul run takes no more names; options begin with a dash");
    refuse_line("---", "---: no such option; longhaul run --help lists them");
    refuse_line("--=3", "--: no such option; longhaul run --help lists them");
}

static void environment(void **state) {
    (void)state;
    setenv("LONGHAUL_CTX_SIZE", "4K", 1);
    setenv("LONGHAUL_STRICT", "1", 1);
    setenv("LONGHAUL_TEMP", "0.25", 1);
    setenv("LONGHAUL_OVERRIDE_TENSOR", "x=y", 1);
    setenv("LONGHAUL_TENSOR_SPLIT", "1,1", 1);
    accept_line("");
    assert_true(v.ctx == 4096 && v.ctx_seen && v.strict && v.temp == 0.25 && v.ot.n == 1);
    accept_line("-c 8 --strict=off -ot a=b --temp 1");
    assert_true(v.ctx == 8 && !v.strict && v.temp == 1 && v.ot.n == 1);
    assert_string_equal(v.ot.item[0], "a=b");
    setenv("LONGHAUL_CTX_SIZE", "lots", 1);
    refuse_line("", "LONGHAUL_CTX_SIZE lots: must be a whole number, with K, M, G or T for powers of 1024 if you like");
    accept_line("-c 8");
    unsetenv("LONGHAUL_CTX_SIZE");
    setenv("LONGHAUL_STRICT", "maybe", 1);
    refuse_line("", "LONGHAUL_STRICT maybe: must be on or off");
    unsetenv("LONGHAUL_STRICT");
    unsetenv("LONGHAUL_TEMP");
    unsetenv("LONGHAUL_OVERRIDE_TENSOR");
    unsetenv("LONGHAUL_TENSOR_SPLIT");
}

static char *help_text(const char *arg) {
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    char *argv[] = {"longhaul", "-m", "x", (char *)arg, "--no-such-option"};
    assert_int_equal(opts_parse(&cmd, tab, 5, argv, f), OPTS_HELP);
    fclose(f);
    return text;
}

static void help(void **state) {
    (void)state;
    char *few = help_text("--help"), *all = help_text("--help-all"), *h = help_text("-h");
    assert_string_equal(few, h);
    assert_string_equal(few,
        "longhaul run: writes\nusage: longhaul run -m FILE\nModel:\n"
        "  -m, --model FILE            model file\n  -p, --prompt TEXT           prompt\n"
        "  -c, --ctx-size N            context\n  -b, --batch-size N          batch\nSampling:\n"
        "  -s, --seed N                seed\n  --top-p F                   nucleus\n"
        "  --temp, --temperature F     temperature\nMore: longhaul run --help-all\n");
    assert_non_null(strstr(all, "Seldom:\n"));
    assert_non_null(strstr(all, "--flash-attn auto,on,off"));
    assert_null(strstr(all, "tensor-split"));
    assert_non_null(strstr(all, "LONGHAUL_"));
    free(few);
    free(all);
    free(h);
}

/* Lines of random pieces: an answer or a sentence, never a crash, and never a sentence without a name in it. */
static void random_lines(void **state) {
    (void)state;
    static const char *const piece[] = {"-", "--", "=", "c", "m", "model", "ctx-size", "1", "K", " ", " -c ", " -b ", "\x01", "\xff",
        " --no-", "mmap", "help-all2", " -ot ", "temp", "999999999999", "%s%n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    uint64_t seed = 9;
    for (int i = 0; i < 20000; i++) {
        char line[900] = "";
        for (int n = (int)(test_rand(&seed) % 9); n > 0; n--) strcat(line, piece[test_rand(&seed) % (sizeof piece / sizeof *piece)]);
        int rc = parsed(line);
        if (rc && rc != ERR_ARG && rc != OPTS_HELP) fail_msg("round %d: %d for %s", i, rc, line);
        if (rc == ERR_ARG && strlen(err_text()) < 5) fail_msg("round %d: no sentence for %s", i, line);
    }
    parsed("");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values), cmocka_unit_test(sizes), cmocka_unit_test(sentences), cmocka_unit_test(environment),
        cmocka_unit_test(help), cmocka_unit_test(random_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
