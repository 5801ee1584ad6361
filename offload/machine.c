/* machine.c: the built-in machines and how they are found by name. Files are in machine_file.c. */
#include "offload/machine.h"

#include "core/err.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SOURCE .source = {MACHINE_DATASHEET, "2026-12-01"}
#define GIB 1073741824.0

/* Shares of the peak that usual Q4 matrix-vector kernels and fused attention reach. */
#define SHARES .matvec_share = 0.65, .attn_share = 0.70, .copy_engines = 2

#define LINK(g, rate, page)                                                                                            \
    {SOURCE, .h2d_gbps = rate, .d2h_gbps = rate, .pageable_gbps = page, .copy_latency_us = 10, .gen = g, .width = 16}
#define PCIE3 LINK(3, 12, 4)
#define PCIE4 LINK(4, 25, 6)
#define PCIE5 LINK(5, 52, 8)

#define HOST(ram, list, rate)                                                                                          \
    {SOURCE, .nodes = {{0, ram, list}}, .n_node = 1, .dram_gbps = rate, .dram_with_dma_gbps = rate, .cpu_share = 0.9,  \
     .memlock_bytes = -1}
#define CPU(n, attn, matvec) {SOURCE, .threads = n, .attn_gflops = attn, .matvec_gops = matvec, .handover_us = 30}

#define V100                                                                                                           \
    {SOURCE, SHARES, .name = "Tesla V100-PCIE-16GB", .sm = 70, .vram_bytes = 16.94e9, .datasheet_vram_bytes = 16 * GIB, \
     .runtime_bytes = 0.5e9, .vram_gbps = 900, .peak_tflops = 112, .gemm_tflops = 60, .attn_tflops = 40,               \
     .launch_us = 4.6, .graph_launch_us = 1.5}
#define RTX_5090                                                                                                       \
    {SOURCE, SHARES, .name = "NVIDIA GeForce RTX 5090", .sm = 120, .vram_bytes = 34.19e9,                              \
     .datasheet_vram_bytes = 32 * GIB, .runtime_bytes = 0.7e9, .vram_gbps = 1792, .peak_tflops = 209,                  \
     .gemm_tflops = 170, .attn_tflops = 150, .launch_us = 3, .graph_launch_us = 1}

/* Machines with the same GPU follow each other, the plainest first. */
static const struct machine machines[] = {
    {.name = "v100-16g-pcie3", .has_gpu = true, .gpu = V100, .link = PCIE3, .host = HOST(64e9, "0-7", 40),
     .cpu = CPU(8, 350, 600)},
    {.name = "v100-16g-pcie3-6ch", .has_gpu = true, .gpu = V100, .link = PCIE3, .host = HOST(192e9, "0-15", 100),
     .cpu = CPU(16, 1000, 1800)},
    {.name = "2080ti-11g", .has_gpu = true, .link = PCIE3, .host = HOST(64e9, "0-7", 40), .cpu = CPU(8, 350, 600),
     .gpu = {SOURCE, SHARES, .name = "NVIDIA GeForce RTX 2080 Ti", .sm = 75, .vram_bytes = 11.55e9,
             .datasheet_vram_bytes = 11 * GIB, .runtime_bytes = 0.5e9, .vram_gbps = 616, .peak_tflops = 53.8,
             .gemm_tflops = 40, .attn_tflops = 28, .launch_us = 4.6, .graph_launch_us = 1.5}},
    {.name = "3090-24g", .has_gpu = true, .link = PCIE4, .host = HOST(64e9, "0-7", 65), .cpu = CPU(8, 900, 1500),
     .gpu = {SOURCE, SHARES, .name = "NVIDIA GeForce RTX 3090", .sm = 86, .vram_bytes = 25.77e9,
             .datasheet_vram_bytes = 25.77e9, .runtime_bytes = 0.5e9, .vram_gbps = 936, .peak_tflops = 71,
             .gemm_tflops = 55, .attn_tflops = 50, .launch_us = 3.5, .graph_launch_us = 1.2}},
    {.name = "4090-24g", .has_gpu = true, .link = PCIE4, .host = HOST(64e9, "0-7", 65), .cpu = CPU(8, 900, 1500),
     .gpu = {SOURCE, SHARES, .name = "NVIDIA GeForce RTX 4090", .sm = 89, .vram_bytes = 25.76e9,
             .datasheet_vram_bytes = 24 * GIB, .runtime_bytes = 0.5e9, .vram_gbps = 1008, .peak_tflops = 165,
             .gemm_tflops = 130, .attn_tflops = 120, .launch_us = 3, .graph_launch_us = 1}},
    {.name = "5070ti-16g", .has_gpu = true, .link = PCIE5, .host = HOST(64e9, "0-7", 75), .cpu = CPU(8, 1200, 2000),
     .gpu = {SOURCE, SHARES, .name = "NVIDIA GeForce RTX 5070 Ti", .sm = 120, .vram_bytes = 17.09e9,
             .datasheet_vram_bytes = 16 * GIB, .runtime_bytes = 0.6e9, .vram_gbps = 896, .peak_tflops = 87.9,
             .gemm_tflops = 70, .attn_tflops = 62, .launch_us = 3, .graph_launch_us = 1}},
    {.name = "5090-32g", .has_gpu = true, .gpu = RTX_5090, .link = PCIE5, .host = HOST(96e9, "0-7", 75),
     .cpu = CPU(8, 1200, 2000)},
    {.name = "5090-32g-8ch", .has_gpu = true, .gpu = RTX_5090, .link = PCIE5, .host = HOST(256e9, "0-23", 220),
     .cpu = CPU(24, 2400, 4000)},
    {.name = "h200-141g", .has_gpu = true, .link = PCIE5, .host = HOST(512e9, "0-31", 220), .cpu = CPU(32, 2400, 4000),
     .gpu = {SOURCE, SHARES, .name = "NVIDIA H200", .sm = 90, .vram_bytes = 150.1e9, .datasheet_vram_bytes = 150.75e9,
             .runtime_bytes = 0.7e9, .vram_gbps = 4800, .peak_tflops = 989, .gemm_tflops = 650, .attn_tflops = 500,
             .launch_us = 3, .graph_launch_us = 1}},
};

enum { N_MACHINE = sizeof machines / sizeof *machines };

int machine_count(void) { return N_MACHINE; }

const struct machine *machine_at(int i) { return &machines[i]; }

const char *machine_origin_name(enum machine_origin o) {
    static const char *const names[] = {"measured", "datasheet", "edited"};
    return names[o];
}

/* --- names ------------------------------------------------------------------------------------------------------------- */

enum { MAX_WORD = 12 };

/* A name as its words run together in lower case, without those that say only who made it: "RTX 3090" and "rtx3090" are
 * "3090", "16 GB" is "16g". end[i] is where word i ends. */
struct plain {
    char text[MACHINE_NAME];
    size_t end[MAX_WORD];
    int n_word;
};

static bool is_maker(const char *word, size_t n) {
    static const char *const makers[] = {"nvidia", "geforce", "rtx", "gtx", "tesla", "pcie", "gpu"};
    for (size_t i = 0; i < sizeof makers / sizeof *makers; i++)
        if (strlen(makers[i]) == n && !memcmp(word, makers[i], n)) return true;
    return false;
}

static size_t take_word(char *word, size_t cap, const char **at) {
    size_t n = 0;
    *at += strspn(*at, " -_");
    for (; **at && !strchr(" -_", **at); ++*at) {
        if (n + 1 >= cap) return SIZE_MAX;
        word[n++] = (char)tolower((unsigned char)**at);
    }
    word[n] = 0;
    return n;
}

/* false: longer than any name. */
static bool make_plain(struct plain *p, const char *name) {
    char buf[MACHINE_NAME];
    size_t n, len = 0;
    *p = (struct plain){.n_word = 0};
    while ((n = take_word(buf, sizeof buf, &name))) {
        if (n == SIZE_MAX || p->n_word == MAX_WORD) return false;
        const char *word = buf;
        if (is_maker(word, n)) continue;
        if (n > 3 && (is_maker(word, 3)) && isdigit((unsigned char)word[3])) word += 3, n -= 3;
        if (n >= 2 && !strcmp(word + n - 2, "gb")) n--;
        if (len + n >= sizeof p->text) return false;
        memcpy(p->text + len, word, n);
        p->end[p->n_word++] = len += n;
    }
    p->text[len] = 0;
    return true;
}

/* Does `asked` name m: all of its words, or the first ones? */
static bool names(const struct machine *m, const struct plain *asked) {
    struct plain own;
    size_t n = strlen(asked->text);
    if (!make_plain(&own, m->name) || strncmp(own.text, asked->text, n)) return false;
    for (int i = 0; i < own.n_word; i++)
        if (own.end[i] == n) return true;
    return n == 0;
}

static bool is_whole(const struct machine *m, const struct plain *asked) {
    struct plain own;
    return make_plain(&own, m->name) && !strcmp(own.text, asked->text);
}

static void add_name(char *list, size_t cap, const char *name) {
    size_t n = strlen(list);
    snprintf(list + n, cap - n, "%s%.40s", n ? ", " : "", name);
}

static int find(const struct machine **out, const char *name, bool gpu_only) {
    char known[512] = "", several[512] = "";
    struct plain asked;
    const struct machine *first = NULL;
    bool several_found = false, sound = *name && make_plain(&asked, name);
    for (int i = 0; i < N_MACHINE; i++) {
        const struct machine *m = &machines[i];
        add_name(known, sizeof known, m->name);
        if (!sound || !names(m, &asked)) continue;
        if (is_whole(m, &asked)) {
            *out = m;
            return 0;
        }
        add_name(several, sizeof several, m->name);
        if (first && !(gpu_only && !strcmp(first->gpu.name, m->gpu.name))) several_found = true;
        if (!first) first = m;
    }
    if (several_found) return err_set(ERR_ARG, "%.60s: may be any of %s", name, several);
    if (!first) return err_set(ERR_ARG, "%.60s: unknown; known are %s", name, known);
    *out = first;
    return 0;
}

int machine_find(const struct machine **out, const char *name) { return find(out, name, false); }

int machine_find_gpu(const struct machine **out, const char *name) { return find(out, name, true); }

int machine_open(struct machine *out, const char *name) {
    size_t n = strlen(name);
    bool is_path = strchr(name, '/') || (n > 5 && !strcmp(name + n - 5, ".json"));
    const struct machine *m;
    int rc = is_path ? ERR_ARG : machine_find(&m, name);
    if (is_path || (rc && !access(name, F_OK))) return machine_load(out, name);
    if (!rc) *out = *m;
    return rc;
}

const struct machine *machine_class(const struct machine *m) {
    const struct machine *best = NULL;
    double nearest = INFINITY;
    for (int i = 0; i < N_MACHINE; i++)
        if (!strcmp(machines[i].name, m->name)) return &machines[i];
    if (m->has_gpu && m->gpu.name[0] && !machine_find_gpu(&best, m->gpu.name)) return best;
    for (int i = 0; i < N_MACHINE; i++) {
        /* Another generation is further away than any size. */
        double far = machines[i].gpu.sm == m->gpu.sm ? 0 : 1e3;
        double d = far + (m->gpu.vram_bytes > 0 ? fabs(log(machines[i].gpu.vram_bytes / m->gpu.vram_bytes)) : 0);
        if (d < nearest) nearest = d, best = &machines[i];
    }
    return best;
}
