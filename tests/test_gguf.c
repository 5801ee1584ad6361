/* test_gguf.c: the reader against files of known content, malformed files, cuts at every place and random damage.
 * Files that must load as a model, or be refused by model_open, are in test_model.c. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/quant.h"
#include "tests/support.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct gguf *must_open(const char *name) {
    struct gguf *g = NULL;
    if (gguf_open(&g, test_path(name))) fail_msg("%s: %s", name, err_text());
    return g;
}

/* --- the file that holds every type ------------------------------------------------------------------------------- */

static void check_scalar(const char *key, const struct gguf_kv *kv, int64_t i, const json_t *want) {
    double f;
    int64_t n;
    uint64_t u;
    size_t bytes;
    if (json_is_string(want)) {
        const char *s = gguf_elem_str(kv, i, &bytes);
        if (!s || bytes != json_string_length(want) || memcmp(s, json_string_value(want), bytes))
            fail_msg("%s[%lld]: string differs", key, (long long)i);
    } else if (json_is_boolean(want)) {
        if (!gguf_elem_u64(kv, i, &u) || u != (uint64_t)json_is_true(want)) fail_msg("%s[%lld]: bool differs", key, (long long)i);
    } else if (json_is_integer(want)) {
        if (!gguf_elem_i64(kv, i, &n) || n != json_integer_value(want)) fail_msg("%s[%lld]: integer differs", key, (long long)i);
    } else {
        if (!gguf_elem_f64(kv, i, &f) || f != json_real_value(want)) fail_msg("%s[%lld]: got %g", key, (long long)i, f);
    }
}

static json_t *load_expected(void) {
    /* 2^64 - 1 does not fit the JSON library's integers; that key is checked apart. */
    char *text = test_read("gguf-fixtures/expected.json", NULL), *big = strstr(text, "18446744073709551615");
    json_error_t e;
    assert_non_null(big);
    memcpy(big, "9223372036854775807 ", 20);
    json_t *doc = json_loads(text, 0, &e);
    if (!doc) fail_msg("expected.json: %s", e.text);
    free(text);
    return doc;
}

static void every_value_type_is_read(void **s) {
    (void)s;
    struct gguf *g = must_open("gguf-fixtures/all-types.gguf");
    json_t *doc = load_expected(), *file = json_array_get(json_object_get(doc, "files"), 0), *want;
    const char *key;
    int n = 0;
    json_object_foreach(json_object_get(file, "kv"), key, want) {
        const struct gguf_kv *kv = gguf_find(g, key);
        if (!kv) fail_msg("key %s is missing", key);
        n++;
        if (!strcmp(key, "t.u64")) continue;
        if (json_is_array(want)) {
            assert_int_equal(kv->type, GGUF_ARR);
            assert_int_equal(kv->n, json_array_size(want));
            for (int64_t i = 0; i < kv->n; i++) check_scalar(key, kv, i, json_array_get(want, (size_t)i));
        } else {
            check_scalar(key, kv, 0, want);
        }
    }
    assert_int_equal(n, 21);
    uint64_t u;
    int64_t i;
    assert_int_equal(gguf_u64(g, "t.u64", &u), 0);
    assert_true(u == UINT64_MAX);
    assert_int_equal(gguf_i64(g, "t.u64", &i), ERR_FORMAT);
    assert_non_null(strstr(err_text(), "t.u64"));
    json_decref(doc);
    gguf_close(g);
}

static void getters_check_type_and_range(void **s) {
    (void)s;
    struct gguf *g = must_open("gguf-fixtures/all-types.gguf");
    uint64_t u = 77;
    int64_t i = 77;
    double f = 77;
    bool b = true;
    const char *p = NULL;
    size_t n = 77;
    const struct gguf_kv *a = NULL;
    assert_int_equal(gguf_u64(g, "no.such.key", &u), GGUF_ABSENT);
    assert_int_equal(u, 77);
    assert_int_equal(gguf_u64(g, "t.i8", &u), ERR_FORMAT);
    assert_int_equal(gguf_i64(g, "t.i8", &i), 0);
    assert_int_equal(i, -128);
    assert_int_equal(gguf_u64(g, "t.f32", &u), ERR_FORMAT);
    assert_int_equal(gguf_f64(g, "t.f64", &f), 0);
    assert_true(f == -2.5e-300);
    assert_int_equal(gguf_f64(g, "t.i16", &f), 0);
    assert_true(f == -32768);
    assert_int_equal(gguf_f64(g, "t.str", &f), ERR_FORMAT);
    assert_non_null(strstr(err_text(), "t.str"));
    assert_int_equal(gguf_bool(g, "t.bool_false", &b), 0);
    assert_false(b);
    assert_int_equal(gguf_bool(g, "t.u8", &b), ERR_FORMAT);
    assert_int_equal(gguf_str(g, "t.str_empty", &p, &n), 0);
    assert_int_equal(n, 0);
    assert_int_equal(gguf_str(g, "t.arr_str", &p, &n), ERR_FORMAT);
    assert_int_equal(gguf_arr(g, "t.str", &a), ERR_FORMAT);
    assert_int_equal(gguf_arr(g, "t.arr_f32", &a), 0);
    assert_null(gguf_elem_str(a, 0, &n));
    assert_false(gguf_elem_u64(a, 0, &u));
    gguf_close(g);
}

static void every_tensor_type_is_listed(void **s) {
    (void)s;
    struct gguf *g = must_open("gguf-fixtures/all-types.gguf");
    json_t *doc = load_expected(), *file = json_array_get(json_object_get(doc, "files"), 0);
    json_t *tensors = json_object_get(file, "tensors"), *want;
    size_t at;
    assert_int_equal(gguf_n_tensors(g), json_array_size(tensors));
    json_array_foreach(tensors, at, want) {
        const char *name = json_string_value(json_object_get(want, "name"));
        const struct gguf_tensor *t = gguf_tensor_find(g, name);
        if (!t) fail_msg("tensor %s is missing", name);
        assert_ptr_equal(t, gguf_tensor(g, (int)at));
        json_t *ne = json_object_get(want, "ne"), *type = json_object_get(want, "ggml_type");
        assert_int_equal(t->n_dims, json_array_size(ne));
        int64_t n = 1;
        for (int i = 0; i < t->n_dims; i++) {
            assert_int_equal(t->dims[i], json_integer_value(json_array_get(ne, (size_t)i)));
            n *= t->dims[i];
        }
        if (type) assert_int_equal(t->type, json_integer_value(type));
        const struct quant_info *q = quant_info(t->type);
        assert_non_null(q);
        assert_int_equal(t->bytes, n / q->block_elems * q->block_bytes);
    }
    float f[120];
    const struct gguf_tensor *t = gguf_tensor_find(g, "n.f32_4d");
    assert_int_equal(gguf_read(g, t->shard, t->offset, f, sizeof f), 0);
    for (int i = 0; i < 120; i++) assert_true(f[i] == (float)i);
    assert_null(gguf_tensor_find(g, "n.f32_4"));
    assert_null(gguf_tensor_find(g, ""));
    json_decref(doc);
    gguf_close(g);
}

/* --- split files -------------------------------------------------------------------------------------------------- */

static void split_files_are_one_model(void **s) {
    (void)s;
    struct gguf *g = must_open("bad-gguf/valid_split-00001-of-00002.gguf");
    assert_int_equal(gguf_n_shard(g), 2);
    int n[2] = {0, 0};
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        char byte;
        n[t->shard]++;
        assert_int_equal(gguf_read(g, t->shard, t->offset + t->bytes - 1, &byte, 1), 0);
    }
    assert_true(n[0] > 0 && n[1] > 0);
    gguf_close(g);
}

/* A folder for damaged copies; removed at the end. */
static char tmp_dir[64];

static const char *tmp_file(const char *name, const void *bytes, size_t n) {
    static char path[4][128];
    static int at;
    char *p = path[at++ & 3];
    snprintf(p, sizeof path[0], "%s/%s", tmp_dir, name);
    FILE *f = fopen(p, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return p;
}

static void refuse(const char *path, const char *must_say) {
    struct gguf *g = NULL;
    int rc = gguf_open(&g, path);
    if (!rc) fail_msg("%s was accepted", path);
    assert_int_equal(rc, ERR_FORMAT);
    if (!strstr(err_text(), must_say)) fail_msg("%s: \"%s\" does not say %s", path, err_text(), must_say);
    assert_null(g);
}

static void broken_splits_are_refused(void **s) {
    (void)s;
    size_t n1, n2;
    char *one = test_read("bad-gguf/valid_split-00001-of-00002.gguf", &n1);
    char *two = test_read("bad-gguf/valid_split-00002-of-00002.gguf", &n2);
    refuse(test_path("bad-gguf/valid_split-00002-of-00002.gguf"), "open the first part");
    refuse(tmp_file("renamed.gguf", one, n1), "split.count");
    refuse(tmp_file("m-00001-of-00002.gguf", one, n1), "m-00002-of-00002.gguf");
    tmp_file("m-00002-of-00002.gguf", two, n2 - 1);
    refuse(tmp_file("m-00001-of-00002.gguf", one, n1), "m-00002-of-00002.gguf");
    tmp_file("m-00002-of-00002.gguf", one, n1);
    refuse(tmp_file("m-00001-of-00002.gguf", one, n1), "split.no");
    free(one);
    free(two);
}

static void missing_files_are_refused_by_name(void **s) {
    (void)s;
    refuse("/no/such/model.gguf", "cannot open /no/such/model.gguf");
    refuse(tmp_dir, "not a regular file");
    char path[128];
    snprintf(path, sizeof path, "%s/pipe", tmp_dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    refuse(path, "not a regular file");
}

/* --- damage ------------------------------------------------------------------------------------------------------- */

/* Touches everything that an accepted file offers: what a sanitizer would catch must be inside our memory. */
static uint64_t walk(const struct gguf *g) {
    uint64_t sum = 0, u;
    double f;
    size_t n;
    for (int i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv(g, i);
        int64_t last = kv->type == GGUF_ARR ? kv->n : 1;
        sum += strlen(kv->key);
        for (int64_t e = 0; e < last; e++) {
            const char *s = gguf_elem_str(kv, e, &n);
            if (s) {
                for (size_t k = 0; k < n; k++) sum += (uint8_t)s[k];
            } else if (gguf_elem_u64(kv, e, &u)) {
                sum += u;
            } else if (gguf_elem_f64(kv, e, &f)) {
                sum += f > 0;
            }
        }
    }
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        char byte = 0;
        if (gguf_tensor_find(g, t->name) != t) fail_msg("tensor %s is not found", t->name);
        if (t->bytes && gguf_read(g, t->shard, t->offset + t->bytes - 1, &byte, 1)) fail_msg("%s: %s", t->name, err_text());
        sum += (uint8_t)byte;
    }
    return sum;
}

/* 0 when accepted; a refusal must come with a sentence. */
static int open_and_walk(const char *path) {
    struct gguf *g = NULL;
    err_set(0, "%s", "");
    int rc = gguf_open(&g, path);
    if (!rc) walk(g);
    if (rc && (rc != ERR_FORMAT || !err_text()[0])) fail_msg("%s: code %d, \"%s\"", path, rc, err_text());
    gguf_close(g);
    return rc;
}

static void every_cut_is_refused(void **s) {
    (void)s;
    const char *names[] = {"bad-gguf/valid_f16_small.gguf", "gguf-fixtures/all-types.gguf", "bad-gguf/valid_q8_0_align64.gguf"};
    for (int k = 0; k < 3; k++) {
        size_t n;
        char *bytes = test_read(names[k], &n);
        const char *path = tmp_file("cut.gguf", bytes, n);
        assert_int_equal(open_and_walk(path), 0);
        /* From the end down; every byte of the first tensor records would be slow, every 64th is not. */
        for (size_t cut = n - 1;; cut = (cut - 1) / 64 * 64) {
            assert_int_equal(truncate(path, (off_t)cut), 0);
            if (!open_and_walk(path) && n - cut >= 64) fail_msg("%s cut to %zu of %zu bytes was accepted", names[k], cut, n);
            if (!cut) break;
        }
        free(bytes);
    }
}

static void random_damage_never_crashes(void **s) {
    (void)s;
    const char *names[] = {"bad-gguf/valid_f16_small.gguf", "gguf-fixtures/all-types.gguf", "bad-gguf/valid_unknown_keys.gguf"};
    const size_t directory[] = {8192, 4096, 10240}; /* most of the damage goes where the parser looks */
    uint64_t seed = 20261201;
    int accepted = 0;
    for (int k = 0; k < 3; k++) {
        size_t n;
        char *bytes = test_read(names[k], &n);
        char *copy = malloc(n);
        for (int round = 0; round < 1000; round++) {
            memcpy(copy, bytes, n);
            int flips = 1 + (int)(test_rand(&seed) % 4);
            for (int i = 0; i < flips; i++) {
                size_t at = test_rand(&seed) % (test_rand(&seed) % 8 ? directory[k] : n);
                copy[at] = test_rand(&seed) % 2 ? (char)(copy[at] ^ (1 << test_rand(&seed) % 8)) : (char)test_rand(&seed);
            }
            accepted += !open_and_walk(tmp_file("flip.gguf", copy, n));
        }
        free(copy);
        free(bytes);
    }
    assert_in_range(accepted, 300, 2700); /* neither everything nor nothing: the test sees both sides */
}

static void a_file_that_shrinks_is_an_io_error(void **s) {
    (void)s;
    size_t n;
    char *bytes = test_read("bad-gguf/valid_f16_small.gguf", &n), out[64];
    const char *path = tmp_file("shrinks.gguf", bytes, n);
    struct gguf *g = NULL;
    assert_int_equal(gguf_open(&g, path), 0);
    const struct gguf_tensor *t = gguf_tensor(g, gguf_n_tensors(g) - 1);
    assert_int_equal(gguf_read(g, 0, t->offset, out, sizeof out), 0);
    assert_int_equal(truncate(path, (off_t)(t->offset + 10)), 0);
    assert_int_equal(gguf_read(g, 0, t->offset, out, sizeof out), ERR_IO);
    assert_non_null(strstr(err_text(), "shrinks.gguf"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(gguf_read(g, 0, t->offset, out, 10), 0); /* unlinked is not gone */
    assert_int_equal(gguf_read(g, 0, UINT64_MAX - 3, out, 10), ERR_IO);
    assert_int_equal(gguf_read(g, 1, 0, out, 10), ERR_ARG);
    gguf_close(g);
    free(bytes);
}

static void hostile_bytes_are_made_printable(void **s) {
    (void)s;
    char d[16];
    assert_string_equal(gguf_printable(d, sizeof d, "plain", 5), "plain");
    assert_string_equal(gguf_printable(d, sizeof d, "a\033[2J", 5), "a\\x1b[2J");
    assert_string_equal(gguf_printable(d, sizeof d, "", 0), "");
    assert_string_equal(gguf_printable(d, sizeof d, "123456789012345", 15), "123456789012345");
    assert_string_equal(gguf_printable(d, sizeof d, "1234567890123456", 16), "123456789012...");
    assert_string_equal(gguf_printable(d, sizeof d, "\xe4\xbd\xa0\xff", 4), "\xe4\xbd\xa0\\xff");
    assert_string_equal(gguf_printable(d, sizeof d, "\xe2\x80\xae", 3), "\\xe2\\x80\\xae"); /* right-to-left override */
    assert_string_equal(gguf_printable(d, sizeof d, "\xc2\x9b", 2), "\\xc2\\x9b");           /* C1 control: begins a sequence */
    assert_string_equal(gguf_printable(d, sizeof d, "\xe4\xbd", 2), "\\xe4\\xbd");
    assert_string_equal(gguf_printable(d, sizeof d, "\n\n\n\n", 4), "\\x0a\\x0a\\x0a...");
}

static int make_dir(void **s) {
    (void)s;
    snprintf(tmp_dir, sizeof tmp_dir, "/tmp/longhaul-gguf-XXXXXX");
    return mkdtemp(tmp_dir) ? 0 : -1;
}

static int remove_dir(void **s) {
    (void)s;
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -r '%s'", tmp_dir);
    return system(cmd);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_value_type_is_read),
        cmocka_unit_test(getters_check_type_and_range),
        cmocka_unit_test(every_tensor_type_is_listed),
        cmocka_unit_test(split_files_are_one_model),
        cmocka_unit_test(broken_splits_are_refused),
        cmocka_unit_test(missing_files_are_refused_by_name),
        cmocka_unit_test(every_cut_is_refused),
        cmocka_unit_test(random_damage_never_crashes),
        cmocka_unit_test(a_file_that_shrinks_is_an_io_error),
        cmocka_unit_test(hostile_bytes_are_made_printable),
    };
    return cmocka_run_group_tests(t, make_dir, remove_dir);
}
