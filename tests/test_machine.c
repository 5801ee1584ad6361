/* test_machine.c: the built-in machines and their names; machine files, sound and hostile. */
#include "core/err.h"
#include "offload/machine.h"
#include "tests/support.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As in the manual: every field. */
static const char full[] =
    "{ \"name\": \"mine\", \"origin\": \"measured\", \"date\": \"2026-11-30\",\n"
    " \"gpu\":  { \"name\": \"Tesla V100-PCIE-16GB\", \"sm\": 70, \"vram_bytes\": 16.9e9, \"runtime_bytes\": 0.4e9, \"vram_gbps\": 790.5,\n"
    "  \"matvec_share\": 0.65, \"attn_share\": 0.70, \"peak_tflops\": 112, \"gemm_tflops\": 61, \"attn_tflops\": 41, \"copy_engines\": 2,\n"
    "  \"near_node\": 0, \"launch_us\": 4.6, \"graph_launch_us\": 1.5, \"datasheet_vram_bytes\": 17179869184 },\n"
    " \"link\": { \"h2d_gbps\": 12.5, \"d2h_gbps\": 12.9, \"pageable_gbps\": 4, \"copy_latency_us\": 10, \"gen\": 3, \"width\": 16 },\n"
    " \"host\": { \"origin\": \"edited\", \"date\": \"2026-12-01\", \"nodes\": [ { \"id\": 0, \"bytes\": 64e9, \"cores\": \"0-7\" }, { \"id\": 1, \"bytes\": 32e9 } ],\n"
    "  \"dram_gbps\": 40, \"dram_with_dma_gbps\": 41.25, \"cpu_share\": 0.9, \"memlock_bytes\": -1 },\n"
    " \"cpu\":  { \"threads\": 8, \"attn_gflops\": 350, \"matvec_gops\": 600, \"handover_us\": 30,\n"
    "  \"attn_gbps\": { \"q8_0/g6/d256\": 30, \"f16/g4/d128\": 33.5 }, \"matvec_gbps\": { \"q4_k\": 35 } } }\n";

static struct machine parsed(const char *text) {
    struct machine m;
    if (machine_parse(&m, text, strlen(text), "test")) fail_msg("%s", err_text());
    return m;
}

static void refused(const char *text, const char *name) {
    struct machine m;
    int rc = machine_parse(&m, text, strlen(text), "the file");
    if (rc != ERR_ARG || !strstr(err_text(), name) || !strstr(err_text(), "the file"))
        fail_msg("%s\ngave %d '%s', want %d with '%s'", text, rc, rc ? err_text() : "", ERR_ARG, name);
}

/* `full` with one piece of text replaced. */
static char *changed(const char *from, const char *to) {
    const char *at = strstr(full, from);
    if (!at) fail_msg("'%s' is not in the file", from);
    char *out = malloc(sizeof full + strlen(to));
    assert_non_null(out);
    sprintf(out, "%.*s%s%s", (int)(at - full), full, to, at + strlen(from));
    return out;
}

static void built_in_rates_are_those_of_the_predictions(void **s) {
    (void)s;
    static const struct {
        const char *name;
        double vram, gbps, link, dram, attn, matvec, gemm, gpu_attn;
    } rows[] = {
        {"v100-16g-pcie3", 16.94e9, 900, 12, 40, 350, 600, 60, 40},      {"v100-16g-pcie3-6ch", 16.94e9, 900, 12, 100, 1000, 1800, 60, 40},
        {"3090-24g", 25.77e9, 936, 25, 65, 900, 1500, 55, 50},           {"4090-24g", 25.76e9, 1008, 25, 65, 900, 1500, 130, 120},
        {"5090-32g", 34.19e9, 1792, 52, 75, 1200, 2000, 170, 150},       {"5090-32g-8ch", 34.19e9, 1792, 52, 220, 2400, 4000, 170, 150},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct machine *m;
        if (machine_find(&m, rows[i].name)) fail_msg("%s", err_text());
        bool same = m->gpu.vram_bytes == rows[i].vram && m->gpu.vram_gbps == rows[i].gbps && m->link.h2d_gbps == rows[i].link &&
                    m->host.dram_gbps == rows[i].dram && m->cpu.attn_gflops == rows[i].attn && m->cpu.matvec_gops == rows[i].matvec &&
                    m->gpu.gemm_tflops == rows[i].gemm && m->gpu.attn_tflops == rows[i].gpu_attn;
        if (!same) fail_msg("%s has other rates", rows[i].name);
    }
}

/* What a file may say, every built-in machine says: it can be written and read back with nothing filled. */
static void machines_survive_their_file(void **s) {
    (void)s;
    char a[64], b[64];
    snprintf(a, sizeof a, "/tmp/lh-machine-%ld-a.json", (long)getpid());
    snprintf(b, sizeof b, "/tmp/lh-machine-%ld-b.json", (long)getpid());
    struct machine mine = parsed(full), back;
    for (int i = -1; i < machine_count(); i++) {
        const struct machine *m = i < 0 ? &mine : machine_at(i);
        if (machine_save(m, a) || machine_load(&back, a) || machine_save(&back, b)) fail_msg("%s: %s", m->name, err_text());
        size_t na, nb;
        char *ta = test_read(a, &na), *tb = test_read(b, &nb);
        if (na != nb || memcmp(ta, tb, na)) fail_msg("%s: written again it differs:\n%s\n%s", m->name, ta, tb);
        if (back.filled[0]) fail_msg("%s: filled %s", m->name, back.filled);
        assert_string_equal(back.name, m->name);
        assert_true(back.gpu.vram_gbps == m->gpu.vram_gbps && back.gpu.peak_tflops == m->gpu.peak_tflops);
        assert_true(back.host.nodes[0].bytes == m->host.nodes[0].bytes && back.cpu.n_attn == m->cpu.n_attn);
        assert_int_equal(back.cpu.source.origin, m->cpu.source.origin);
        assert_string_equal(back.cpu.source.date, m->cpu.source.date);
        free(ta);
        free(tb);
    }
    unlink(a);
    unlink(b);
    assert_int_equal(machine_save(&mine, "/no/such/folder/m.json"), ERR_IO);
}

static void names_are_forgiving(void **s) {
    (void)s;
    static const struct {
        const char *asked, *gpu, *machine; /* NULL: several */
    } rows[] = {
        {"v100-16g-pcie3", "v100-16g-pcie3", "v100-16g-pcie3"},
        {"V100-16G-PCIE3-6CH", "v100-16g-pcie3-6ch", "v100-16g-pcie3-6ch"},
        {"v100-16g", "v100-16g-pcie3", NULL},
        {"V100 16 GB", "v100-16g-pcie3", NULL},
        {"Tesla V100-PCIE-16GB", "v100-16g-pcie3", NULL},
        {"v10016g", "v100-16g-pcie3", NULL},
        {"rtx3090", "3090-24g", "3090-24g"},
        {"3090", "3090-24g", "3090-24g"},
        {"NVIDIA GeForce RTX 3090", "3090-24g", "3090-24g"},
        {"rtx_4090", "4090-24g", "4090-24g"},
        {"RTX 4090 24GB", "4090-24g", "4090-24g"},
        {"2080 Ti", "2080ti-11g", "2080ti-11g"},
        {"RTX 5070 Ti", "5070ti-16g", "5070ti-16g"},
        {"rtx5070ti", "5070ti-16g", "5070ti-16g"},
        {"5090", "5090-32g", NULL},
        {"5090-32g", "5090-32g", "5090-32g"},
        {"5090-32g-8ch", "5090-32g-8ch", "5090-32g-8ch"},
        {"NVIDIA H200", "h200-141g", "h200-141g"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct machine *m;
        if (machine_find_gpu(&m, rows[i].asked) || strcmp(m->name, rows[i].gpu)) fail_msg("%s: GPU is not %s", rows[i].asked, rows[i].gpu);
        int rc = machine_find(&m, rows[i].asked);
        if (rows[i].machine ? rc || strcmp(m->name, rows[i].machine) : rc != ERR_ARG || !strstr(err_text(), rows[i].gpu))
            fail_msg("%s: machine %s", rows[i].asked, rc ? err_text() : m->name);
    }
    static const char *const unknown[] = {"", "a100", "3090ti", "3090 Ti", "309", "v100-32g", "v100-16", "4090-laptop", "3090-24g-x", "\x01\xff",
                                          "a name that is so long that no machine in the list could ever have been called like that"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        const struct machine *m;
        if (machine_find_gpu(&m, unknown[i]) != ERR_ARG || !strstr(err_text(), "h200-141g")) fail_msg("'%s' was found", unknown[i]);
    }
    const struct machine *m;
    assert_int_equal(machine_find_gpu(&m, "RTX"), ERR_ARG);
    assert_non_null(strstr(err_text(), "may be any of"));
}

static void what_is_absent_is_filled_and_named(void **s) {
    (void)s;
    struct machine m = parsed(full);
    assert_string_equal(m.filled, "");
    assert_int_equal(m.host.n_node, 2);
    assert_int_equal(m.host.source.origin, MACHINE_EDITED);
    assert_int_equal(m.gpu.source.origin, MACHINE_MEASURED);
    assert_string_equal(m.gpu.source.date, "2026-11-30");
    assert_string_equal(m.host.source.date, "2026-12-01");
    assert_true(m.cpu.n_attn == 2 && m.cpu.attn[0].gbps == 30 && m.cpu.n_matvec == 1);
    /* By the GPU's name, by its generation and size, without any GPU. */
    m = parsed("{\"name\": \"x\", \"origin\": \"measured\", \"gpu\": {\"name\": \"NVIDIA GeForce RTX 4090\", \"vram_gbps\": 950}, \"host\": {\"dram_gbps\": 80}}");
    assert_true(m.gpu.vram_gbps == 950 && m.gpu.gemm_tflops == 130 && m.host.dram_gbps == 80 && m.link.gen == 4);
    assert_non_null(strstr(m.filled, "gpu.gemm_tflops"));
    assert_non_null(strstr(m.filled, "host.nodes"));
    assert_non_null(strstr(m.filled, "(from 4090-24g)"));
    assert_null(strstr(m.filled, "gpu.vram_gbps"));
    m = parsed("{\"name\": \"x\", \"gpu\": {\"name\": \"Some card\", \"sm\": 120, \"vram_bytes\": 16e9}}");
    assert_non_null(strstr(m.filled, "(from 5070ti-16g)"));
    m = parsed("{\"name\": \"x\", \"cpu\": {\"threads\": 3}}");
    assert_false(m.has_gpu);
    assert_true(m.gpu.vram_bytes == 0 && m.link.h2d_gbps == 0 && m.host.dram_gbps > 0 && m.cpu.threads == 3);
    /* The list of filled names has room for all of them. */
    m = parsed("{\"name\": \"3090-24g\", \"gpu\": {}}");
    assert_non_null(strstr(m.filled, "(from 3090-24g)"));
}

static void wrong_files_are_refused_by_name(void **s) {
    (void)s;
    static const struct {
        const char *from, *to, *name;
    } rows[] = {
        {"\"sm\": 70", "\"sm\": 70, \"colour\": 1", "gpu.colour"},
        {"\"gen\": 3", "\"gen\": 3, \"gen3\": 1", "link.gen3"},
        {"\"dram_gbps\": 40", "\"dram_gpbs\": 40", "host.dram_gpbs"},
        {"\"threads\": 8", "\"thread\": 8", "cpu.thread"},
        {"\"id\": 1", "\"id\": 1, \"size\": 2", "host.nodes.size"},
        {"\"name\": \"mine\"", "\"name\": \"mine\", \"version\": 2", "version"},
        {"\"name\": \"mine\"", "\"name\": \"\"", "name"},
        {"\"name\": \"mine\"", "\"name\": 7", "name"},
        {"\"name\": \"mine\"", "\"name\": \"a\\u001b[2J\"", "name"},
        {"\"name\": \"mine\", ", "", "name is missing"},
        {"\"origin\": \"measured\"", "\"origin\": \"guessed\"", "origin"},
        {"\"origin\": \"edited\"", "\"origin\": 3", "host.origin"},
        {"\"2026-12-01\"", "\"yesterday\"", "host.date"},
        {"\"2026-11-30\"", "20261130", "date"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": \"790.5\"", "gpu.vram_gbps"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": -790.5", "gpu.vram_gbps"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": 0", "gpu.vram_gbps"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": 1e300", "gpu.vram_gbps"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": 1e999", "not a machine file"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": null", "gpu.vram_gbps"},
        {"\"vram_gbps\": 790.5", "\"vram_gbps\": 790.5, \"vram_gbps\": 800", "not a machine file"},
        {"\"sm\": 70", "\"sm\": 70.5", "gpu.sm"},
        {"\"runtime_bytes\": 0.4e9", "\"runtime_bytes\": 20e9", "gpu.runtime_bytes"},
        {"\"cpu_share\": 0.9", "\"cpu_share\": 9", "host.cpu_share"},
        {"\"memlock_bytes\": -1", "\"memlock_bytes\": -2", "host.memlock_bytes"},
        {"\"cores\": \"0-7\"", "\"cores\": \"all\"", "host.nodes.cores"},
        {"\"id\": 1", "\"id\": 0", "node 0 is there twice"},
        {"\"id\": 1, ", "", "no id"},
        {"\"threads\": 8", "\"threads\": 99999999999", "cpu.threads"},
        {"q8_0/g6/d256", "q8_0", "cpu.attn_gbps.q8_0"},
        {"q8_0/g6/d256", "q8_0/g0/d256", "q8_0/g0/d256"},
        {"q8_0/g6/d256", "q8_0/g6/d256/x", "q8_0/g6/d256/x"},
        {"q8_0/g6/d256", "q9/g6/d256", "q9/g6/d256"},
        {"\"q4_k\": 35", "\"q4_k/g1/d2\": 35", "q4_k/g1/d2"},
        {"\"q4_k\": 35", "\"q4_k\": -35", "cpu.matvec_gbps.q4_k"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *text = changed(rows[i].from, rows[i].to);
        refused(text, rows[i].name);
        free(text);
    }
    refused("", "not a machine file");
    refused("[]", "must be an object");
    refused("{\"name\": \"x\", \"gpu\": []}", "gpu");
    refused("{\"name\": \"x\", \"link\": {}}", "link without gpu");
    refused("{\"name\": \"x\", \"host\": {\"nodes\": []}}", "host.nodes");
    refused("{\"name\": \"x\", \"host\": {\"nodes\": [1]}}", "host.nodes");
    struct machine m;
    assert_int_equal(machine_load(&m, "/no/such/machine.json"), ERR_ARG);
    assert_non_null(strstr(err_text(), "/no/such/machine.json"));
    assert_int_equal(machine_load(&m, "/tmp"), ERR_ARG);
    assert_int_equal(machine_load(&m, "/dev/zero"), ERR_ARG);
}

/* Cut anywhere, or with any few bytes changed, a file is read or refused, never worse; under the sanitizers this counts. */
static void damaged_files_are_harmless(void **s) {
    (void)s;
    struct machine m;
    size_t n = sizeof full - 1;
    for (size_t cut = 0; cut < n - 1; cut++)
        if (!machine_parse(&m, full, cut, "cut")) fail_msg("cut at %zu of %zu it is accepted", cut, n);
    uint64_t seed = 7;
    int accepted = 0;
    for (int i = 0; i < 20000; i++) {
        char *text = malloc(n);
        assert_non_null(text);
        memcpy(text, full, n);
        int changes = 1 + (int)(test_rand(&seed) % 3);
        for (int k = 0; k < changes; k++) text[test_rand(&seed) % n] = "{}[]\",:0192eE.-+xnul\\\xff\x00 "[test_rand(&seed) % 25];
        accepted += !machine_parse(&m, text, n, "damaged");
        free(text);
    }
    /* Digits that became other digits. */
    if (accepted < 100 || accepted > 10000) fail_msg("%d of 20000 damaged files are accepted", accepted);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(built_in_rates_are_those_of_the_predictions),
        cmocka_unit_test(machines_survive_their_file),
        cmocka_unit_test(names_are_forgiving),
        cmocka_unit_test(what_is_absent_is_filled_and_named),
        cmocka_unit_test(wrong_files_are_refused_by_name),
        cmocka_unit_test(damaged_files_are_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
