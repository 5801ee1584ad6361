/* cmd_info.c: prints what a GGUF file holds, for people and as JSON. Reads the directory of the file, no weights. */
#include "offload/cli/cli.h"

#include "core/quant.h"
#include "core/state.h"
#include "core/unit.h"
#include "offload/cli/info.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_ELEMS = 8, SHOWN_TEXT = 60 };

/* --- for people --------------------------------------------------------------------------------------------------- */

static const char *type_name(int32_t type, char buf[32]) {
    if (quant_info(type)) return quant_name(type);
    snprintf(buf, 32, "type %d (unknown)", (int)type);
    return buf;
}

/* The first layer with attention; without any, the first one. */
static const struct layer *attention_layer(const struct model *m) {
    int il = 0;
    while (il < m->n_layer - 1 && m->layers[il].mixer != MIXER_ATTN) il++;
    return &m->layers[il];
}

static int n_delta_layers(const struct model *m) {
    int n = 0;
    for (int il = 0; il < m->n_layer; il++) n += m->layers[il].mixer == MIXER_DELTA;
    return n;
}

static void print_delta(const struct model *m) {
    const struct delta_shape *d = &m->delta;
    if (!d->n_value) return;
    printf("Gated Delta   %d of %d layers, %d key and %d value heads of %d, state %s for any context\n", n_delta_layers(m), m->n_layer,
           d->n_key, d->n_value, d->dim, cli_bytes((double)state_bytes(m)));
    if (m->n_mtp) printf("prediction    %d block%s for multi-token prediction, not loaded\n", m->n_mtp, m->n_mtp == 1 ? "" : "s");
}

static void print_shape(const struct info *i) {
    char heads[64] = "";
    if (i->n_head > 0 && i->n_kv > 0) snprintf(heads, sizeof heads, ", %" PRId64 " heads on %" PRId64 " of KV", i->n_head, i->n_kv);
    if (i->runs) {
        const struct layer *l = attention_layer(&i->m);
        snprintf(heads, sizeof heads, ", %d heads on %d of KV, %d wide", l->n_head, l->n_kv, l->head_dim_k);
    }
    if (i->n_layer >= 0) printf("layers        %" PRId64 ", width %" PRId64 "%s", i->runs ? i->m.n_layer : i->n_layer, i->dim, heads);
    if (i->n_layer >= 0 && i->n_expert > 0)
        printf(", FFN of %" PRId64 " experts, %" PRId64 " used", i->n_expert, i->n_expert_used);
    else if (i->n_layer >= 0 && i->n_ff > 0)
        printf(", FFN %" PRId64, i->n_ff);
    if (i->n_layer >= 0) printf("\n");
    if (i->n_ctx >= 0) printf("context       %" PRId64 " trained\n", i->n_ctx);
}

static void print_rope(const struct info *i) {
    const struct rope *r = &i->m.ropes[0];
    int windows = 0, il = 0;
    printf("RoPE          base %g, %d dims, scaling %s", r->base, r->n_rot, rope_scaling_name(r->scaling));
    if (r->scaling != ROPE_SCALING_NONE)
        printf(", factor %g, original context %" PRId64 ", magnitude %g", r->factor, r->n_ctx_orig, r->attn_factor);
    if (r->scaling == ROPE_SCALING_YARN) printf(", betas %g %g, blend %g", r->beta_fast, r->beta_slow, r->ext_factor);
    if (i->m.rope_freqs.bytes) printf(", divisors per pair");
    printf("\n");
    for (int k = 0; k < i->m.n_layer; k++)
        if (i->m.layers[k].window) windows++, il = k;
    if (windows)
        printf("windows       %d of %d layers see %" PRId64 " positions, RoPE base %g there\n", windows, i->m.n_layer,
               i->m.layers[il].window, i->m.ropes[1].base);
}

static void print_kv_bytes(const struct info *i) {
    printf("KV bytes/tok ");
    for (int k = 0; k < INFO_KV; k++) {
        if (!i->kv[k].all) continue;
        printf(" %s %.0f", quant_name(i->kv[k].type), i->kv[k].all);
        if (i->kv[k].global != i->kv[k].all) printf(" (%.0f beyond the windows)", i->kv[k].global);
    }
    printf("\n");
}

static void print_token(const struct info *i, const char *what, int32_t id) {
    char shown[32];
    size_t n;
    const char *text = tokenizer_token_text(i->tok, id, &n);
    if (text) printf(", %s %d %s", what, id, gguf_printable(shown, sizeof shown, text, n));
}

static void print_tokenizer(const struct info *i) {
    if (!i->tok && !i->tok_why[0]) {
        printf("tokenizer     none in this file\n");
        return;
    }
    printf("tokenizer     %s%s%s", i->tok_model, i->tok_pre[0] ? ", pre " : "", i->tok_pre);
    if (i->tok) {
        printf(", %d tokens", tokenizer_n_vocab(i->tok));
        if (i->n_merges) printf(", %" PRId64 " merges", i->n_merges);
        print_token(i, "bos", tokenizer_bos(i->tok));
        print_token(i, "eos", tokenizer_eos(i->tok));
    }
    printf("\nchat template ");
    if (i->template_bytes < 0)
        printf("none\n");
    else
        printf("%" PRId64 " bytes, %s%s\n", i->template_bytes, i->family[0] ? "family " : "not recognised", i->family);
}

static void print_text(const struct info *i, const char *path) {
    char buf[32];
    int parts = gguf_n_shard(i->g);
    printf("file          %s, GGUF v%d, %" PRIu64 " bytes (%s)", path, gguf_version(i->g), i->file_bytes, cli_bytes((double)i->file_bytes));
    if (parts > 1) printf(" in %d parts", parts);
    printf("\narchitecture  %s\nname          %s\n", i->arch[0] ? i->arch : "none", i->name);
    printf("runs here     %s%s\n", i->runs && !i->tok_why[0] ? "yes" : "no: ", i->runs ? i->tok_why : i->why);
    printf("parameters    %" PRIu64 " (%.3g B) in %d tensors", i->n_weight, (double)i->n_weight * 1e-9, gguf_n_tensors(i->g));
    if (i->n_unread) printf(", %d of them not used (--tensors)", i->n_unread);
    printf("\n");
    for (int k = 0; k < i->n_type; k++) {
        const struct info_type *t = &i->types[k];
        printf("  %-11s %5d tensors %15" PRIu64 " weights %15" PRIu64 " bytes (%s)\n", type_name(t->type, buf), t->n_tensor, t->n_weight,
               t->bytes, cli_bytes((double)t->bytes));
    }
    print_shape(i);
    if (i->runs) {
        print_delta(&i->m);
        print_rope(i);
        print_kv_bytes(i);
    }
    print_tokenizer(i);
}

static void print_tensors(const struct info *i) {
    char buf[32], name[GGUF_MAX_NAME * 4 + 1];
    printf("\n%-40s %-8s %-24s %14s %5s %14s\n", "tensor", "type", "shape", "bytes", "part", "offset");
    for (int k = 0; k < gguf_n_tensors(i->g); k++) {
        const struct gguf_tensor *t = gguf_tensor(i->g, k);
        char dims[96];
        int n = 0;
        for (int d = 0; d < t->n_dims; d++)
            n += snprintf(dims + n, sizeof dims - (size_t)n, "%s%" PRId64, d ? " x " : "", t->dims[d]);
        printf("%-40s %-8s %-24s %14zu %5d %14" PRIu64 "%s\n", gguf_printable(name, sizeof name, t->name, strlen(t->name)),
               type_name(t->type, buf), dims, t->bytes, t->shard + 1, t->offset, i->runs && !model_uses(&i->m, t) ? "  not used" : "");
    }
}

static void print_elem(const struct gguf_kv *kv, int64_t at) {
    char shown[SHOWN_TEXT];
    size_t n;
    uint64_t u;
    int64_t s;
    double f;
    const char *p = gguf_elem_str(kv, at, &n);
    if (p)
        printf("\"%s\"", gguf_printable(shown, sizeof shown, p, n));
    else if (kv->elem_type == GGUF_BOOL && gguf_elem_u64(kv, at, &u))
        printf("%s", u ? "true" : "false");
    else if (gguf_elem_u64(kv, at, &u))
        printf("%" PRIu64, u);
    else if (gguf_elem_i64(kv, at, &s))
        printf("%" PRId64, s);
    else if (gguf_elem_f64(kv, at, &f))
        printf("%.9g", f);
}

static void print_kvs(const struct info *i) {
    printf("\nmetadata\n");
    for (int k = 0; k < gguf_n_kv(i->g); k++) {
        const struct gguf_kv *kv = gguf_kv(i->g, k);
        char key[128];
        bool array = kv->type == GGUF_ARR;
        printf("  %s ", gguf_printable(key, sizeof key, kv->key, strlen(kv->key)));
        if (!array) {
            printf("%s = ", gguf_type_name(kv->type));
            print_elem(kv, 0);
        } else {
            printf("%s[%" PRId64 "] = ", gguf_type_name(kv->elem_type), kv->n);
            for (int64_t e = 0; e < kv->n && e < SHOWN_ELEMS; e++) {
                print_elem(kv, e);
                printf("%s", e + 1 == kv->n ? "" : e + 1 == SHOWN_ELEMS ? " ..." : ", ");
            }
        }
        printf("\n");
    }
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

/* Text of a file: as it is where it is UTF-8, else with \xNN. */
static json_t *json_text(const char *p, size_t n) {
    json_t *j = json_stringn(p, n);
    if (j) return j;
    size_t cap = n > (SIZE_MAX >> 3) ? 8 : n * 4 + 8;
    char *shown = malloc(cap);
    if (shown) j = json_string(gguf_printable(shown, cap, p, n));
    free(shown);
    return j;
}

static json_t *json_elem(const struct gguf_kv *kv, int64_t at) {
    uint64_t u;
    int64_t s;
    double f;
    size_t n;
    char text[32];
    const char *p = gguf_elem_str(kv, at, &n);
    if (p) return json_text(p, n);
    if (kv->elem_type == GGUF_BOOL && gguf_elem_u64(kv, at, &u)) return json_boolean(u);
    if (gguf_elem_i64(kv, at, &s)) return json_integer(s);
    if (gguf_elem_u64(kv, at, &u)) { /* above 2^63: no JSON integer here */
        snprintf(text, sizeof text, "%" PRIu64, u);
        return json_string(text);
    }
    return gguf_elem_f64(kv, at, &f) ? json_real(f) /* NULL for NaN and infinity */ : NULL;
}

static void set(json_t *j, const char *key, json_t *v) { json_object_set_new_nocheck(j, key, v ? v : json_null()); }
static void set_int(json_t *j, const char *key, int64_t v) { set(j, key, v < 0 ? NULL : json_integer(v)); }

static json_t *json_kvs(const struct info *i) {
    json_t *all = json_object();
    for (int k = 0; k < gguf_n_kv(i->g); k++) {
        const struct gguf_kv *kv = gguf_kv(i->g, k);
        json_t *key = json_text(kv->key, strlen(kv->key)), *v;
        if (kv->type == GGUF_ARR) {
            v = json_object();
            json_t *first = json_array();
            for (int64_t e = 0; e < kv->n && e < SHOWN_ELEMS; e++) {
                json_t *one = json_elem(kv, e);
                json_array_append_new(first, one ? one : json_null());
            }
            set(v, "type", json_string(gguf_type_name(kv->elem_type)));
            set_int(v, "count", kv->n);
            set(v, "first", first);
        } else {
            v = json_elem(kv, 0);
        }
        set(all, key ? json_string_value(key) : "?", v);
        json_decref(key);
    }
    return all;
}

static json_t *json_tensors(const struct info *i) {
    json_t *all = json_array();
    for (int k = 0; k < gguf_n_tensors(i->g); k++) {
        const struct gguf_tensor *t = gguf_tensor(i->g, k);
        json_t *j = json_object(), *dims = json_array();
        for (int d = 0; d < t->n_dims; d++) json_array_append_new(dims, json_integer(t->dims[d]));
        set(j, "name", json_text(t->name, strlen(t->name)));
        set(j, "type", quant_info(t->type) ? json_string(quant_name(t->type)) : json_integer(t->type));
        set(j, "shape", dims);
        set(j, "bytes", t->bytes ? json_integer((json_int_t)t->bytes) : NULL);
        set_int(j, "part", t->shard + 1);
        set_int(j, "offset", (int64_t)t->offset);
        if (i->runs) set(j, "used", json_boolean(model_uses(&i->m, t)));
        json_array_append_new(all, j);
    }
    return all;
}

static json_t *json_types(const struct info *i) {
    json_t *all = json_array();
    for (int k = 0; k < i->n_type; k++) {
        const struct info_type *t = &i->types[k];
        json_t *j = json_object();
        set(j, "type", quant_info(t->type) ? json_string(quant_name(t->type)) : json_integer(t->type));
        set_int(j, "tensors", t->n_tensor);
        set_int(j, "weights", (int64_t)t->n_weight);
        set_int(j, "bytes", (int64_t)t->bytes);
        json_array_append_new(all, j);
    }
    return all;
}

static json_t *json_rope(const struct rope *r) {
    json_t *j = json_object();
    set(j, "base", json_real(r->base));
    set_int(j, "dims", r->n_rot);
    set(j, "pairing", json_string(r->pairing == ROPE_NORM ? "norm" : "neox"));
    set(j, "scaling", json_string(rope_scaling_name(r->scaling)));
    set(j, "factor", json_real(r->factor));
    set_int(j, "n_ctx_orig", r->n_ctx_orig);
    set(j, "attn_factor", json_real(r->attn_factor));
    return j;
}

static void json_model(json_t *j, const struct info *i) {
    const struct model *m = &i->m;
    json_t *kv = json_object(), *windows = json_array();
    set_int(j, "n_layer", m->n_layer);
    if (m->delta.n_value) {
        set_int(j, "n_delta_layers", n_delta_layers(m));
        set_int(j, "state_bytes", (int64_t)state_bytes(m));
        set_int(j, "n_mtp", m->n_mtp);
    }
    set_int(j, "head_dim_k", m->layers[0].head_dim_k);
    set_int(j, "head_dim_v", m->layers[0].head_dim_v);
    set(j, "tied", json_boolean(!m->out.bytes));
    set(j, "rope", json_rope(&m->ropes[0]));
    if (m->n_rope > 1) set(j, "rope_window", json_rope(&m->ropes[1]));
    for (int il = 0; il < m->n_layer; il++) json_array_append_new(windows, json_integer(m->layers[il].window));
    set(j, "windows", windows);
    for (int k = 0; k < INFO_KV; k++)
        if (i->kv[k].all) set(kv, quant_name(i->kv[k].type), json_real(i->kv[k].all));
    set(j, "kv_bytes_per_token", kv);
}

static json_t *json_tokenizer(const struct info *i) {
    if (!i->tok && !i->tok_why[0]) return NULL;
    json_t *j = json_object();
    set(j, "model", json_string(i->tok_model));
    set(j, "pre", i->tok_pre[0] ? json_string(i->tok_pre) : NULL);
    set(j, "supported", json_boolean(i->tok != NULL));
    set_int(j, "n_merges", i->n_merges);
    if (!i->tok) return j;
    set_int(j, "n_vocab", tokenizer_n_vocab(i->tok));
    set_int(j, "bos", tokenizer_bos(i->tok));
    set_int(j, "eos", tokenizer_eos(i->tok));
    return j;
}

static int print_json(const struct info *i, const char *path, bool tensors, bool kvs) {
    json_t *j = json_object();
    set(j, "file", json_text(path, strlen(path)));
    set_int(j, "version", gguf_version(i->g));
    set_int(j, "parts", gguf_n_shard(i->g));
    set_int(j, "file_bytes", (int64_t)i->file_bytes);
    set(j, "architecture", i->arch[0] ? json_string(i->arch) : NULL);
    set(j, "name", json_string(i->name));
    const char *why = i->runs ? i->tok_why : i->why;
    set(j, "runs", json_boolean(i->runs && !why[0]));
    if (why[0]) set(j, "why", json_text(why, strlen(why)));
    set_int(j, "n_params", (int64_t)i->n_weight);
    set_int(j, "n_tensors", gguf_n_tensors(i->g));
    set_int(j, "n_tensors_unused", i->n_unread);
    set_int(j, "tensor_bytes", (int64_t)i->tensor_bytes);
    set(j, "types", json_types(i));
    set_int(j, "n_layer", i->n_layer);
    set_int(j, "dim", i->dim);
    set_int(j, "n_ff", i->n_ff);
    set_int(j, "n_head", i->n_head);
    set_int(j, "n_kv", i->n_kv);
    set_int(j, "n_ctx_train", i->n_ctx);
    set_int(j, "n_expert", i->n_expert);
    set_int(j, "n_expert_used", i->n_expert_used);
    if (i->runs) json_model(j, i);
    set(j, "tokenizer", json_tokenizer(i));
    set_int(j, "chat_template_bytes", i->template_bytes);
    set(j, "chat_family", i->family[0] ? json_string(i->family) : NULL);
    if (tensors) set(j, "tensors", json_tensors(i));
    if (kvs) set(j, "kv", json_kvs(i));
    int rc = json_dumpf(j, stdout, JSON_INDENT(1)) ? err_set(ERR_IO, "cannot write JSON to standard output") : 0;
    printf("\n");
    json_decref(j);
    return rc;
}

int cmd_info(int argc, char **argv) {
    const char *path = NULL;
    bool json = false, tensors = false, kvs = false;
    const char *given[1];
    struct opt tab[] = {
        {.names = "-m,--model", .type = OPT_STRING, .dst = &path, .metavar = "FILE", .help = "GGUF file (first part of a split one)"},
        {.names = "--json", .type = OPT_FLAG, .dst = &json, .help = "machine-readable"},
        {.names = "--tensors", .type = OPT_FLAG, .dst = &tensors, .help = "list the tensors"},
        {.names = "--kv", .type = OPT_FLAG, .dst = &kvs, .help = "list the metadata"},
        {.type = OPT_END},
    };
    struct opts_cmd cmd = {.name = "info", .summary = "what a GGUF file holds", .usage = "-m FILE [--tensors] [--kv] [--json]",
                           .max_positional = 1, .positional = given};
    struct info i;
    int rc = opts_parse(&cmd, tab, argc, argv, stdout);
    if (rc == OPTS_HELP) return 0;
    if (!rc && !path && cmd.n_positional) path = given[0];
    if (!rc && !path) rc = err_set(ERR_ARG, "no model: give -m FILE.gguf");
    if (!rc) rc = info_open(&i, path);
    if (rc) return cli_fail("info", rc);
    if (json) {
        rc = print_json(&i, path, tensors, kvs);
    } else {
        print_text(&i, path);
        if (tensors) print_tensors(&i);
        if (kvs) print_kvs(&i);
    }
    /* Shown, but a file that nothing here can tokenise is not a sound model for this program. */
    if (!rc && i.tok_why[0]) rc = err_set(ERR_UNSUPPORTED, "%s", i.tok_why);
    info_close(&i);
    return rc ? cli_fail("info", rc) : 0;
}
