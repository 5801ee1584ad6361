/* main.c: picks the subcommand. */
#include "offload/cli/cli.h"

#include "cpu/isa.h"
#include "lh_build.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
#define X(name, summary) {#name, summary, cmd_##name},
    COMMAND_LIST(X)
#undef X
};

static void usage(FILE *to) {
    fprintf(to, "longhaul: LLM inference for a workstation whose model and context do not fit its GPU\n\n"
                "usage: longhaul COMMAND [options]     (longhaul COMMAND --help)\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  %-11s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "\nexample: longhaul run -m model.gguf -f book.txt -n 200\n");
}

static void version(void) {
    char gpu[1024];
    cli_gpu_line(gpu, sizeof gpu, CLI_GPU_OPENED);
    printf("longhaul %s (%s)\nGPU back end: %s\nCPU kernels: built | usable here\n", LONGHAUL_VERSION, LONGHAUL_COMMIT, gpu);
    enum isa best;
    isa_choose(&best, NULL);
    for (int i = 0; i < ISA_COUNT; i++)
        printf("  %-8s yes | %s%s\n", isa_name(i), isa_usable(i) ? "yes" : "no", (int)best == i ? "  <- chosen" : "");
    printf("BLAS: none (own kernels)\ncompiler: %s\n", __VERSION__);
}

/* A file opened later must not get the number of a standard descriptor that the caller has closed: it would be read as the
 * prompt, or get the text. In its place stands one that every read (of 0) or write (of 1 and 2) fails on. */
static void hold_standard_descriptors(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", fd ? O_RDONLY : O_WRONLY);
}

/* A result that cannot be written is a failure, whichever command it is. */
static int finish(int status) {
    int failed = ferror(stdout), rc = fflush(stdout);
    if (status || (!failed && !rc)) return status;
    fprintf(stderr, "longhaul: cannot write to standard output: %s\n", rc ? strerror(errno) : "an earlier write failed");
    return 1;
}

static int run_command(int argc, char **argv) {
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version")) {
        version();
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "longhaul: unknown command '%s'\n\n", argv[1]);
    usage(stderr);
    return 2;
}

int main(int argc, char **argv) {
    hold_standard_descriptors();
    return finish(run_command(argc, argv));
}
