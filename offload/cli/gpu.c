/* gpu.c: what the program says about cards, and the option that chooses one. See cli.h. */
#include "offload/cli/cli.h"

#include "gpu/gpu.h"

#include <ctype.h>
#include <stdarg.h>
#include <string.h>
#include <strings.h>

int cli_device(const char *option, const char *value, void *dst) {
    struct cli_opts *o = dst;
    if (!strcasecmp(value, "none") || !strcasecmp(value, "cpu")) {
        o->dev = CLI_DEV_NONE;
        return 0;
    }
    if (!gpu_built())
        return err_set(ERR_ARG, "%s %.60s: this build has no GPU back end; only '%s none' (the CPU) is possible", option, value, option);
    const char *digits = strncasecmp(value, "cuda", 4) ? value : value + 4;
    int n = 0, index = 0;
    size_t len = strlen(digits);
    if (len < 1 || len > 3 || strspn(digits, "0123456789") != len)
        return err_set(ERR_ARG, "%s %.60s: must be none or the number of a card", option, value);
    for (size_t i = 0; i < len; i++) index = 10 * index + digits[i] - '0';
    int rc = gpu_count(&n);
    if (rc) return rc;
    if (index >= n)
        return err_set(ERR_ARG, "%s %.60s: there %s %d GPU%s; '%s none' runs on the CPU", option, value, n == 1 ? "is" : "are", n,
                       n == 1 ? "" : "s", option);
    o->dev = index;
    return 0;
}

static void append(char *out, size_t bytes, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void append(char *out, size_t bytes, const char *fmt, ...) {
    size_t at = strlen(out);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(out + at, bytes - at, fmt, ap);
    va_end(ap);
}

/* Whether card `index` opens. */
static int try_open(int index) {
    struct gpu *g = NULL;
    int rc = gpu_open(&g, index);
    if (!rc) gpu_close(g);
    return rc;
}

void cli_gpu_line(char *out, size_t bytes, enum cli_gpu_look look) {
    int n = 0;
    out[0] = 0;
    if (!gpu_built())
        append(out, bytes, "none in this build");
    else if (gpu_count(&n))
        append(out, bytes, "%s", err_text());
    else if (!n)
        append(out, bytes, "no GPU found");
    for (int i = 0; i < n; i++) {
        struct gpu_info g;
        if (i) append(out, bytes, "; ");
        if (gpu_look(&g, i) || (look == CLI_GPU_OPENED && try_open(i)))
            append(out, bytes, "%s", err_text());
        else
            append(out, bytes, "%d: %s, sm_%d, %.1f GiB, PCI %s", i, g.name, g.sm, (double)g.vram_bytes / 1073741824.0, g.pci);
    }
}

int cli_gpu_warn(const struct cli_opts *o) {
    int n = 0;
    if (o->dev == CLI_DEV_NONE || !gpu_built()) return 0;
    int rc = gpu_count(&n);
    if (rc || !n) return rc;
    char line[512];
    cli_gpu_line(line, sizeof line, CLI_GPU_SEEN);
    if (o->dev >= 0 && o->strict)
        return err_set(ERR_STRICT, "-dev %d was asked for, but a GPU is used only by run --machine NAME or FILE (--strict)", o->dev);
    cli_note("GPU %s: not used, everything runs on the CPU (run --machine NAME or FILE uses it)", line);
    return 0;
}
