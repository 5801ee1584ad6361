/* machine_file.c: machine descriptions as JSON files. See machine.h for the form. One table of fields serves reading,
 * filling what is absent, and writing. */
#include "offload/machine.h"

#include "core/err.h"
#include "core/quant.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FILE = 1 << 20 };

enum group { GPU, LINK, HOST, CPU, N_GROUP };
static const char *const group_names[N_GROUP] = {"gpu", "link", "host", "cpu"};

enum kind { REAL, WHOLE };

static const struct field {
    enum group group;
    const char *key;
    enum kind kind;
    size_t at; /* offset in struct machine */
    double min, max;
} fields[] = {
#define REAL_FIELD(g, part, key, min, max) {g, #key, REAL, offsetof(struct machine, part.key), min, max},
#define WHOLE_FIELD(g, part, key, min, max) {g, #key, WHOLE, offsetof(struct machine, part.key), min, max},
    WHOLE_FIELD(GPU, gpu, sm, 30, 999)
    REAL_FIELD(GPU, gpu, vram_bytes, 1e8, 1e13)
    REAL_FIELD(GPU, gpu, datasheet_vram_bytes, 0, 1e13)
    REAL_FIELD(GPU, gpu, runtime_bytes, 0, 1e12)
    REAL_FIELD(GPU, gpu, vram_gbps, 0.1, 1e6)
    REAL_FIELD(GPU, gpu, matvec_share, 0.001, 1)
    REAL_FIELD(GPU, gpu, attn_share, 0.001, 1)
    REAL_FIELD(GPU, gpu, peak_tflops, 0.001, 1e6)
    REAL_FIELD(GPU, gpu, gemm_tflops, 0.001, 1e6)
    REAL_FIELD(GPU, gpu, attn_tflops, 0.001, 1e6)
    WHOLE_FIELD(GPU, gpu, copy_engines, 0, 64)
    WHOLE_FIELD(GPU, gpu, near_node, -1, 4095)
    REAL_FIELD(GPU, gpu, launch_us, 0, 1e6)
    REAL_FIELD(GPU, gpu, graph_launch_us, 0, 1e6)
    REAL_FIELD(LINK, link, h2d_gbps, 0.001, 1e5)
    REAL_FIELD(LINK, link, d2h_gbps, 0.001, 1e5)
    REAL_FIELD(LINK, link, pageable_gbps, 0.001, 1e5)
    REAL_FIELD(LINK, link, copy_latency_us, 0, 1e6)
    WHOLE_FIELD(LINK, link, gen, 1, 10)
    WHOLE_FIELD(LINK, link, width, 1, 64)
    REAL_FIELD(HOST, host, dram_gbps, 0.01, 1e5)
    REAL_FIELD(HOST, host, dram_with_dma_gbps, 0.01, 1e5)
    REAL_FIELD(HOST, host, cpu_share, 0.001, 1)
    REAL_FIELD(HOST, host, memlock_bytes, -1, 1e15)
    WHOLE_FIELD(CPU, cpu, threads, 1, 4096)
    REAL_FIELD(CPU, cpu, attn_gflops, 0.001, 1e8)
    REAL_FIELD(CPU, cpu, matvec_gops, 0.001, 1e8)
    REAL_FIELD(CPU, cpu, handover_us, 0, 1e6)
};

enum { N_FIELD = sizeof fields / sizeof *fields };

static double get(const struct machine *m, const struct field *f) {
    const char *at = (const char *)m + f->at;
    if (f->kind == REAL) return *(const double *)(const void *)at;
    return *(const int *)(const void *)at;
}

static void set(struct machine *m, const struct field *f, double v) {
    char *at = (char *)m + f->at;
    if (f->kind == REAL)
        *(double *)(void *)at = v;
    else
        *(int *)(void *)at = (int)v;
}

static struct machine_source *source_of(struct machine *m, enum group g) {
    struct machine_source *of[] = {&m->gpu.source, &m->link.source, &m->host.source, &m->cpu.source};
    return of[g];
}

/* --- reading -------------------------------------------------------------------------------------------------------------- */

struct reader {
    struct machine *m;
    const char *what;
    bool given[N_FIELD];
    bool has[N_GROUP];
    bool nodes;
};

/* Text from a file, fit for a sentence: cut, and without control characters. */
static const char *shown(char buf[48], const char *text) {
    size_t i = 0;
    for (; text[i] && i < 44; i++) buf[i] = isprint((unsigned char)text[i]) ? text[i] : '?';
    buf[i] = 0;
    return buf;
}

static int read_text(const struct reader *r, char *out, size_t cap, const char *where, const json_t *v) {
    const char *text = json_string_value(v);
    if (!text) return err_set(ERR_ARG, "%s: %s must be a text", r->what, where);
    if (!*text || strlen(text) >= cap)
        return err_set(ERR_ARG, "%s: %s must have 1 to %zu characters, has %zu", r->what, where, cap - 1, strlen(text));
    for (const char *p = text; *p; p++)
        if (!isprint((unsigned char)*p)) return err_set(ERR_ARG, "%s: %s has a character that cannot be printed", r->what, where);
    strcpy(out, text);
    return 0;
}

static int read_number(const struct reader *r, double *out, const char *where, const json_t *v, double min, double max) {
    if (!json_is_number(v)) return err_set(ERR_ARG, "%s: %s must be a number", r->what, where);
    double x = json_number_value(v);
    if (!(x >= min && x <= max))
        return err_set(ERR_ARG, "%s: %s is %g, must be between %g and %g", r->what, where, x, min, max);
    *out = x;
    return 0;
}

static int read_origin(const struct reader *r, enum machine_origin *out, const char *where, const json_t *v) {
    for (int o = MACHINE_MEASURED; o <= MACHINE_EDITED; o++) {
        if (!json_is_string(v) || strcmp(json_string_value(v), machine_origin_name(o))) continue;
        *out = o;
        return 0;
    }
    return err_set(ERR_ARG, "%s: %s must be measured, datasheet or edited", r->what, where);
}

static int read_date(const struct reader *r, char out[12], const char *where, const json_t *v) {
    const char *text = json_is_string(v) ? json_string_value(v) : "";
    bool sound = strlen(text) == 10;
    for (int i = 0; sound && i < 10; i++) sound = i == 4 || i == 7 ? text[i] == '-' : isdigit((unsigned char)text[i]) != 0;
    if (!sound) return err_set(ERR_ARG, "%s: %s must be a date like 2026-12-01", r->what, where);
    strcpy(out, text);
    return 0;
}

/* "origin" and "date" of the file or of a group. *taken: it was one of them. */
static int read_source(const struct reader *r, struct machine_source *out, const char *where, const char *key, const json_t *v,
                       bool *taken) {
    *taken = true;
    if (!strcmp(key, "origin")) return read_origin(r, &out->origin, where, v);
    if (!strcmp(key, "date")) return read_date(r, out->date, where, v);
    *taken = false;
    return 0;
}

static int unknown_key(const struct reader *r, const char *group, const char *key) {
    char buf[48];
    return err_set(ERR_ARG, "%s: %s%s%s is unknown", r->what, group, *group ? "." : "", shown(buf, key));
}

static int read_node(const struct reader *r, struct machine_node *n, json_t *v) {
    const char *key;
    json_t *item;
    *n = (struct machine_node){.id = -1};
    if (!json_is_object(v)) return err_set(ERR_ARG, "%s: host.nodes must hold objects", r->what);
    json_object_foreach(v, key, item) {
        double x = 0;
        int rc = 0;
        if (!strcmp(key, "id")) {
            rc = read_number(r, &x, "host.nodes.id", item, 0, 4095);
            if (!rc) n->id = (int)x;
        } else if (!strcmp(key, "bytes")) {
            rc = read_number(r, &n->bytes, "host.nodes.bytes", item, 0, 1e15);
        } else if (!strcmp(key, "cores")) {
            rc = read_text(r, n->cores, sizeof n->cores, "host.nodes.cores", item);
            if (!rc && strspn(n->cores, "0123456789,-") != strlen(n->cores))
                rc = err_set(ERR_ARG, "%s: host.nodes.cores is '%s', must be like 0-7,16-23", r->what, n->cores);
        } else {
            rc = unknown_key(r, "host.nodes", key);
        }
        if (rc) return rc;
    }
    return n->id < 0 ? err_set(ERR_ARG, "%s: host.nodes: a node has no id", r->what) : 0;
}

static int read_nodes(struct reader *r, const json_t *v) {
    struct machine_host *h = &r->m->host;
    size_t n = json_array_size(v);
    if (!json_is_array(v) || n < 1 || n > MACHINE_MAX_NODE)
        return err_set(ERR_ARG, "%s: host.nodes must be a list of 1 to %d nodes", r->what, MACHINE_MAX_NODE);
    for (size_t i = 0; i < n; i++) {
        int rc = read_node(r, &h->nodes[i], json_array_get(v, i));
        if (rc) return rc;
        for (size_t k = 0; k < i; k++)
            if (h->nodes[k].id == h->nodes[i].id)
                return err_set(ERR_ARG, "%s: host.nodes: node %d is there twice", r->what, h->nodes[i].id);
    }
    h->n_node = (int)n;
    r->nodes = true;
    return 0;
}

/* "q8_0" or, with dims, "q8_0/g6/d256". */
static bool sound_rate_key(const char *key, bool dims) {
    char type[24];
    size_t n = strcspn(key, "/");
    int group, dim, end = 0;
    if (strlen(key) >= sizeof type) return false;
    memcpy(type, key, n);
    type[n] = 0;
    if (quant_from_name(type) < 0) return false;
    if (!dims) return !key[n];
    return sscanf(key + n, "/g%4d/d%4d%n", &group, &dim, &end) == 2 && !key[n + (size_t)end] && group > 0 && dim > 0;
}

static int read_rates(const struct reader *r, struct machine_rate *out, int *n, const char *where, bool dims, json_t *v) {
    const char *key;
    json_t *item;
    char buf[48], name[96];
    if (!json_is_object(v)) return err_set(ERR_ARG, "%s: %s must be an object", r->what, where);
    if (json_object_size(v) > MACHINE_MAX_RATE)
        return err_set(ERR_ARG, "%s: %s has %zu rates, at most %d are read", r->what, where, json_object_size(v), MACHINE_MAX_RATE);
    json_object_foreach(v, key, item) {
        snprintf(name, sizeof name, "%s.%s", where, shown(buf, key));
        if (!sound_rate_key(key, dims))
            return err_set(ERR_ARG, "%s: %s: must be a type%s", r->what, name, dims ? ", heads and head dim, like q8_0/g6/d256" : ", like q4_k");
        int rc = read_number(r, &out[*n].gbps, name, item, 1e-3, 1e5);
        if (rc) return rc;
        strcpy(out[(*n)++].key, key);
    }
    return 0;
}

static int read_field(struct reader *r, enum group g, const char *key, const json_t *v, bool *taken) {
    char where[64];
    for (int i = 0; i < N_FIELD; i++) {
        const struct field *f = &fields[i];
        if (f->group != g || strcmp(f->key, key)) continue;
        double x = 0;
        *taken = true;
        snprintf(where, sizeof where, "%s.%s", group_names[g], key);
        int rc = read_number(r, &x, where, v, f->min, f->max);
        if (rc) return rc;
        if (f->kind == WHOLE && x != floor(x)) return err_set(ERR_ARG, "%s: %s is %g, must be a whole number", r->what, where, x);
        set(r->m, f, x);
        r->given[i] = true;
        return 0;
    }
    return 0;
}

static int read_key(struct reader *r, enum group g, const char *key, json_t *v) {
    struct machine *m = r->m;
    char where[64];
    bool taken = false;
    snprintf(where, sizeof where, "%s.%.20s", group_names[g], key);
    int rc = read_source(r, source_of(m, g), where, key, v, &taken);
    if (!rc && !taken) rc = read_field(r, g, key, v, &taken);
    if (rc || taken) return rc;
    if (g == GPU && !strcmp(key, "name")) return read_text(r, m->gpu.name, sizeof m->gpu.name, "gpu.name", v);
    if (g == HOST && !strcmp(key, "nodes")) return read_nodes(r, v);
    if (g == CPU && !strcmp(key, "attn_gbps")) return read_rates(r, m->cpu.attn, &m->cpu.n_attn, "cpu.attn_gbps", true, v);
    if (g == CPU && !strcmp(key, "matvec_gbps")) return read_rates(r, m->cpu.matvec, &m->cpu.n_matvec, "cpu.matvec_gbps", false, v);
    return unknown_key(r, group_names[g], key);
}

static int read_group(struct reader *r, enum group g, json_t *v) {
    const char *key;
    json_t *item;
    if (!json_is_object(v)) return err_set(ERR_ARG, "%s: %s must be an object", r->what, group_names[g]);
    r->has[g] = true;
    json_object_foreach(v, key, item) {
        int rc = read_key(r, g, key, item);
        if (rc) return rc;
    }
    return 0;
}

static int read_all(struct reader *r, json_t *root) {
    const char *key;
    json_t *item;
    struct machine_source whole = {.origin = MACHINE_EDITED};
    int rc;
    if (!json_is_object(root)) return err_set(ERR_ARG, "%s: must be an object", r->what);
    /* The groups inherit, wherever in the file the whole's own origin stands. */
    json_object_foreach(root, key, item) {
        bool taken;
        rc = read_source(r, &whole, key, key, item, &taken);
        if (!rc && !taken && !strcmp(key, "name")) rc = read_text(r, r->m->name, sizeof r->m->name, "name", item);
        if (rc) return rc;
    }
    for (int g = 0; g < N_GROUP; g++) *source_of(r->m, g) = whole;
    json_object_foreach(root, key, item) {
        int g = 0;
        while (g < N_GROUP && strcmp(key, group_names[g])) g++;
        if (g == N_GROUP && strcmp(key, "name") && strcmp(key, "origin") && strcmp(key, "date")) return unknown_key(r, "", key);
        rc = g < N_GROUP ? read_group(r, g, item) : 0;
        if (rc) return rc;
    }
    r->m->has_gpu = r->has[GPU];
    if (r->has[LINK] && !r->has[GPU]) return err_set(ERR_ARG, "%s: link without gpu", r->what);
    return r->m->name[0] ? 0 : err_set(ERR_ARG, "%s: name is missing", r->what);
}

/* --- filling ---------------------------------------------------------------------------------------------------------------- */

static void note_filled(struct machine *m, const char *group, const char *key) {
    size_t n = strlen(m->filled);
    snprintf(m->filled + n, sizeof m->filled - n, "%s%s.%s", n ? ", " : "", group, key);
}

static void fill(struct reader *r) {
    struct machine *m = r->m;
    const struct machine *from = machine_class(m);
    for (int i = 0; i < N_FIELD; i++) {
        const struct field *f = &fields[i];
        bool of_card = f->group == GPU || f->group == LINK;
        /* The box's size is only an upper bound: what the driver reports stands for it. */
        if (r->given[i] || (of_card && !m->has_gpu) || !strcmp(f->key, "datasheet_vram_bytes")) continue;
        set(m, f, get(from, f));
        note_filled(m, group_names[f->group], f->key);
    }
    if (m->has_gpu && !m->gpu.name[0]) {
        strcpy(m->gpu.name, from->gpu.name);
        note_filled(m, "gpu", "name");
    }
    if (!r->nodes) {
        memcpy(m->host.nodes, from->host.nodes, sizeof m->host.nodes);
        m->host.n_node = from->host.n_node;
        note_filled(m, "host", "nodes");
    }
    size_t n = strlen(m->filled);
    if (n) snprintf(m->filled + n, sizeof m->filled - n, " (from %s)", from->name);
}

int machine_parse(struct machine *out, const char *text, size_t bytes, const char *what) {
    struct reader r = {.m = out, .what = what};
    json_error_t e;
    char buf[48];
    *out = (struct machine){.has_gpu = false};
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &e);
    if (!root) return err_set(ERR_ARG, "%s: not a machine file: line %d: %s", what, e.line, shown(buf, e.text));
    int rc = read_all(&r, root);
    json_decref(root);
    if (rc) return rc;
    fill(&r);
    if (out->has_gpu && out->gpu.runtime_bytes >= out->gpu.vram_bytes)
        return err_set(ERR_ARG, "%s: gpu.runtime_bytes is %g, must be below gpu.vram_bytes, %g", what, out->gpu.runtime_bytes,
                       out->gpu.vram_bytes);
    return 0;
}

int machine_load(struct machine *out, const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return err_set(ERR_ARG, "%.200s: %s", path, strerror(errno));
    char *text = malloc(MAX_FILE + 1);
    size_t n = text ? fread(text, 1, MAX_FILE + 1, f) : 0;
    int rc = 0;
    if (!text)
        rc = err_set(ERR_NOMEM, "%.200s: out of memory", path);
    else if (ferror(f))
        rc = err_set(ERR_ARG, "%.200s: %s", path, strerror(errno));
    else if (n > MAX_FILE)
        rc = err_set(ERR_ARG, "%.200s: longer than %d bytes, not a machine file", path, MAX_FILE);
    else
        rc = machine_parse(out, text, n, path);
    free(text);
    fclose(f);
    return rc;
}

/* --- writing ---------------------------------------------------------------------------------------------------------------- */

/* Whole numbers without a decimal point: 16940000000, not 16940000000.0. */
static json_t *number(double v) {
    return fabs(v) < 9e15 && v == floor(v) ? json_integer((json_int_t)v) : json_real(v);
}

static json_t *rates(const struct machine_rate *r, int n) {
    json_t *j = json_object();
    for (int i = 0; i < n; i++) json_object_set_new(j, r[i].key, number(r[i].gbps));
    return j;
}

static json_t *nodes(const struct machine_host *h) {
    json_t *j = json_array();
    for (int i = 0; i < h->n_node; i++) {
        json_t *node = json_pack("{s:i, s:o}", "id", h->nodes[i].id, "bytes", number(h->nodes[i].bytes));
        if (h->nodes[i].cores[0]) json_object_set_new(node, "cores", json_string(h->nodes[i].cores));
        json_array_append_new(j, node);
    }
    return j;
}

static json_t *write_group(const struct machine *m, enum group g) {
    static const size_t sources[] = {offsetof(struct machine, gpu.source), offsetof(struct machine, link.source),
                                     offsetof(struct machine, host.source), offsetof(struct machine, cpu.source)};
    const struct machine_source *s = (const void *)((const char *)m + sources[g]);
    json_t *j = json_object();
    json_object_set_new(j, "origin", json_string(machine_origin_name(s->origin)));
    if (s->date[0]) json_object_set_new(j, "date", json_string(s->date));
    if (g == GPU) json_object_set_new(j, "name", json_string(m->gpu.name));
    if (g == HOST) json_object_set_new(j, "nodes", nodes(&m->host));
    for (int i = 0; i < N_FIELD; i++)
        if (fields[i].group == g) json_object_set_new(j, fields[i].key, number(get(m, &fields[i])));
    if (g == CPU && m->cpu.n_attn) json_object_set_new(j, "attn_gbps", rates(m->cpu.attn, m->cpu.n_attn));
    if (g == CPU && m->cpu.n_matvec) json_object_set_new(j, "matvec_gbps", rates(m->cpu.matvec, m->cpu.n_matvec));
    return j;
}

int machine_save(const struct machine *m, const char *path) {
    char tmp[4096];
    if (snprintf(tmp, sizeof tmp, "%s.%ld.tmp", path, (long)getpid()) >= (int)sizeof tmp)
        return err_set(ERR_IO, "%.60s...: the name is too long", path);
    json_t *j = json_object();
    json_object_set_new(j, "name", json_string(m->name));
    json_object_set_new(j, "origin", json_string(machine_origin_name(m->host.source.origin)));
    if (m->host.source.date[0]) json_object_set_new(j, "date", json_string(m->host.source.date));
    for (int g = m->has_gpu ? GPU : HOST; g < N_GROUP; g++) json_object_set_new(j, group_names[g], write_group(m, g));
    char *text = json_dumps(j, JSON_INDENT(1) | JSON_REAL_PRECISION(12));
    json_decref(j);
    if (!text) return err_set(ERR_NOMEM, "%.200s: out of memory", path);
    FILE *f = fopen(tmp, "w");
    bool ok = f && fputs(text, f) >= 0 && fputc('\n', f) >= 0;
    int why = errno;
    if (f && fclose(f)) ok = false, why = errno;
    if (ok && rename(tmp, path)) ok = false, why = errno;
    if (!ok && f) unlink(tmp);
    free(text);
    return ok ? 0 : err_set(ERR_IO, "%.200s: %s", path, strerror(why));
}
