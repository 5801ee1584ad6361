/* test_gguf_write.c: files written here against the byte layout, against our reader, and against a file of another
 * writer; failures leave nothing behind. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/gguf_write.h"
#include "core/quant.h"
#include "tests/support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[] = "/tmp/longhaul-write-XXXXXX";

static const char *in_dir(const char *name) {
    static char path[2][256];
    static int at;
    at = !at;
    snprintf(path[at], sizeof path[at], "%s/%s", dir, name);
    return path[at];
}

static bool exists(const char *path) {
    struct stat st;
    return !lstat(path, &st);
}

static struct gguf_writer *must_open(const char *path) {
    struct gguf_writer *w = NULL;
    if (gguf_writer_open(&w, path)) fail_msg("%s", err_text());
    return w;
}

static void bytes_are_as_specified(void **s) {
    (void)s;
    static const uint8_t want[] =
        "GGUF\3\0\0\0"
        "\2\0\0\0\0\0\0\0" /* tensors */
        "\2\0\0\0\0\0\0\0" /* keys */
        "\1\0\0\0\0\0\0\0a\4\0\0\0\7\0\0\0"
        "\2\0\0\0\0\0\0\0bc\11\0\0\0\10\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0x\0\0\0\0\0\0\0\0"
        "\1\0\0\0\0\0\0\0t\1\0\0\0\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
        "\1\0\0\0\0\0\0\0u\2\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\40\0\0\0\0\0\0\0"
        "\0\0" /* to 160 */
        "0123456789ab\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
        "cdef\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"; /* and the NUL of the literal */
    const char *path = in_dir("tiny.gguf");
    struct gguf_writer *w = must_open(path);
    assert_int_equal(gguf_writer_u32(w, "a", 7), 0);
    assert_int_equal(gguf_writer_tensor(w, "t", QT_F32, 1, (int64_t[]){3}), 0);
    assert_int_equal(gguf_writer_str_arr(w, "bc", 2), 0);
    assert_int_equal(gguf_writer_str_elem(w, "x", 1), 0);
    assert_int_equal(gguf_writer_str_elem(w, "", 0), 0);
    assert_int_equal(gguf_writer_tensor(w, "u", QT_F16, 2, (int64_t[]){2, 1}), 0);
    assert_int_equal(gguf_writer_begin_data(w), 0);
    for (const char *p = "0123456789abcdef"; *p; p += 2) assert_int_equal(gguf_writer_data(w, p, 2), 0);
    assert_false(exists(path));
    assert_int_equal(gguf_writer_finish(w), 0);
    assert_int_equal(gguf_writer_file_bytes(w), sizeof want);
    gguf_writer_close(w);
    size_t n;
    char *got = test_read(path, &n);
    assert_int_equal(n, sizeof want);
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)got[i] != want[i]) fail_msg("byte %zu is %02x, expected %02x", i, (uint8_t)got[i], want[i]);
    free(got);
    assert_false(exists(in_dir("tiny.gguf.tmp")));
}

/* Everything that another writer put into a file, read and written again, must give the same file. */
static void a_copy_is_identical(void **s) {
    (void)s;
    const char *from = "gguf-fixtures/all-types.gguf";
    struct gguf *g = NULL;
    if (gguf_open(&g, test_path(from))) fail_msg("%s", err_text());
    const char *path = in_dir("copy.gguf");
    struct gguf_writer *w = must_open(path);
    for (int i = 0; i < gguf_n_kv(g); i++) gguf_writer_copy_kv(w, gguf_kv(g, i));
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        gguf_writer_tensor(w, t->name, t->type, t->n_dims, t->dims);
    }
    assert_int_equal(gguf_writer_begin_data(w), 0);
    for (int i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        char *p = malloc(t->bytes);
        assert_int_equal(gguf_read(g, t->shard, t->offset, p, t->bytes), 0);
        assert_int_equal(gguf_writer_data(w, p, t->bytes), 0);
        free(p);
    }
    if (gguf_writer_finish(w)) fail_msg("%s", err_text());
    gguf_writer_close(w);
    gguf_close(g);
    size_t n, m;
    char *a = test_read(from, &n), *b = test_read(path, &m);
    assert_int_equal(m, n);
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i]) fail_msg("byte %zu of %zu is %02x, expected %02x", i, n, (uint8_t)b[i], (uint8_t)a[i]);
    free(a);
    free(b);
}

/* A large tensor passes the buffer; many pieces of odd sizes give the same bytes as one. */
static void large_data_passes_through(void **s) {
    (void)s;
    const char *path = in_dir("large.gguf");
    int64_t rows = 3000;
    struct gguf_writer *w = must_open(path);
    gguf_writer_tensor(w, "first", QT_Q8_0, 2, (int64_t[]){1024, rows});
    gguf_writer_tensor(w, "second", QT_F32, 2, (int64_t[]){255, rows});
    assert_int_equal(gguf_writer_begin_data(w), 0);
    size_t bytes = (size_t)rows * (1088 + 1020), at = 0, step = 1;
    uint8_t *p = malloc(bytes);
    uint64_t seed = 3;
    for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)test_rand(&seed);
    while (at < bytes) {
        size_t n = step < bytes - at ? step : bytes - at;
        assert_int_equal(gguf_writer_data(w, p + at, n), 0);
        at += n;
        step = step * 3 + 1;
    }
    assert_int_equal(gguf_writer_finish(w), 0);
    gguf_writer_close(w);
    struct gguf *g = NULL;
    if (gguf_open(&g, path)) fail_msg("%s", err_text());
    at = 0;
    for (int i = 0; i < 2; i++) {
        const struct gguf_tensor *t = gguf_tensor(g, i);
        uint8_t *got = malloc(t->bytes);
        assert_int_equal(gguf_read(g, 0, t->offset, got, t->bytes), 0);
        assert_memory_equal(got, p + at, t->bytes);
        at += t->bytes;
        free(got);
    }
    assert_int_equal(at, bytes);
    gguf_close(g);
    free(p);
}

static void put_old_file(const char *path) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("old", f);
    fclose(f);
}

/* The file that was there stays as it was, and nothing else is left. */
static void expect_old_file(const char *path) {
    size_t n;
    char *p = test_read(path, &n), tmp[300];
    assert_string_equal(p, "old");
    free(p);
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    assert_false(exists(tmp));
}

static void unfinished_files_vanish(void **s) {
    (void)s;
    const char *path = in_dir("old.gguf");
    put_old_file(path);
    struct gguf_writer *w = must_open(path);
    gguf_writer_tensor(w, "t", QT_F32, 1, (int64_t[]){64});
    assert_int_equal(gguf_writer_begin_data(w), 0);
    assert_int_equal(gguf_writer_data(w, (float[64]){0}, 252), 0);
    assert_int_equal(gguf_writer_finish(w), ERR_ARG);
    assert_non_null(strstr(err_text(), "1 tensors is missing"));
    gguf_writer_close(w);
    expect_old_file(path);
    w = must_open(path);
    gguf_writer_close(w);
    expect_old_file(path);
}

static void data_may_be_left_a_hole(void **s) {
    (void)s;
    const char *path = in_dir("hole.gguf");
    struct gguf_writer *w = must_open(path);
    gguf_writer_tensor(w, "a", QT_F32, 2, (int64_t[]){1 << 20, 300}); /* 1.2 GB */
    gguf_writer_tensor(w, "b", QT_F32, 1, (int64_t[]){5});
    assert_int_equal(gguf_writer_leave_data(w), 0);
    assert_int_equal(gguf_writer_data(w, "x", 1), ERR_ARG);
    gguf_writer_close(w);
    assert_false(exists(path));
    w = must_open(path);
    gguf_writer_tensor(w, "a", QT_F32, 2, (int64_t[]){1 << 20, 300});
    gguf_writer_tensor(w, "b", QT_F32, 1, (int64_t[]){5});
    assert_int_equal(gguf_writer_leave_data(w), 0);
    assert_int_equal(gguf_writer_finish(w), 0);
    assert_int_equal(gguf_writer_file_bytes(w), 128 + (INT64_C(300) << 22) + 32);
    gguf_writer_close(w);
    struct stat st;
    struct gguf *g;
    float b[5] = {1, 1, 1, 1, 1};
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 128 + (INT64_C(300) << 22) + 32);
    assert_true(st.st_blocks * 512 < 1 << 20);
    assert_int_equal(gguf_open(&g, path), 0);
    assert_int_equal(gguf_read(g, 0, gguf_tensor(g, 1)->offset, b, sizeof b), 0);
    for (int i = 0; i < 5; i++) assert_true(b[i] == 0);
    gguf_close(g);
}

static void two_writers_of_one_file_are_refused(void **s) {
    (void)s;
    const char *path = in_dir("old.gguf");
    put_old_file(path);
    struct gguf_writer *w = must_open(path), *other = NULL;
    assert_int_equal(gguf_writer_open(&other, path), ERR_ARG);
    assert_null(other);
    gguf_writer_close(w);
    expect_old_file(path);
}

static void odd_targets_are_refused(void **s) {
    (void)s;
    struct gguf_writer *w = NULL;
    assert_int_equal(gguf_writer_open(&w, "/dev/null"), ERR_ARG);
    assert_int_equal(gguf_writer_open(&w, dir), ERR_ARG);
    assert_int_equal(gguf_writer_open(&w, in_dir("no/such/folder.gguf")), ERR_IO);
    assert_null(w);
    /* A link stays a link and what it points to is replaced. */
    const char *path = in_dir("old.gguf"), *link = in_dir("link.gguf");
    put_old_file(path);
    assert_int_equal(symlink(path, link), 0);
    w = must_open(link);
    assert_int_equal(gguf_writer_begin_data(w), 0);
    assert_int_equal(gguf_writer_finish(w), 0);
    gguf_writer_close(w);
    struct stat st;
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    size_t n;
    char *p = test_read(path, &n);
    assert_int_equal(n, 32);
    free(p);
}

static void wrong_use_is_refused(void **s) {
    (void)s;
    static const char *const long_name = "a_tensor_name_of_sixty_four_bytes_which_is_one_more_than_allowed";
    const int64_t odd[] = {100, 2}, fine[] = {256, 2};
    for (int i = 0; i < 10; i++) {
        struct gguf_writer *w = must_open(in_dir("wrong.gguf"));
        int rc = 0;
        switch (i) {
        case 0:
            rc = gguf_writer_tensor(w, "t", QT_Q4_K, 2, odd);
            break;
        case 1:
            rc = gguf_writer_tensor(w, "t", 5, 2, fine);
            break;
        case 2:
            rc = gguf_writer_tensor(w, "t", QT_F32, 5, fine);
            break;
        case 3:
            rc = gguf_writer_tensor(w, "t", QT_F32, 2, (int64_t[]){1LL << 40, 1LL << 40});
            break;
        case 4:
            rc = gguf_writer_tensor(w, long_name, QT_F32, 2, fine);
            break;
        case 5:
            rc = gguf_writer_u32(w, "", 1);
            break;
        case 6:
            rc = gguf_writer_u32(w, "general.alignment", 64);
            break;
        case 7:
            rc = gguf_writer_str_elem(w, "x", 1);
            break;
        case 8:
            assert_int_equal(gguf_writer_str_arr(w, "k", 2), 0);
            rc = gguf_writer_u32(w, "l", 1);
            break;
        default:
            assert_int_equal(gguf_writer_begin_data(w), 0);
            rc = gguf_writer_data(w, "x", 1);
        }
        if (rc != ERR_ARG) fail_msg("case %d gives %d, expected %d", i, rc, ERR_ARG);
        /* The first error sticks. */
        assert_int_equal(gguf_writer_begin_data(w), ERR_ARG);
        assert_int_equal(gguf_writer_finish(w), ERR_ARG);
        gguf_writer_close(w);
        assert_false(exists(in_dir("wrong.gguf")));
        assert_false(exists(in_dir("wrong.gguf.tmp")));
    }
}

/* In a child whose files may have 1 MiB: exit status 0 when the failure is the expected one. `prepared`: the limit is
 * there before space is reserved; otherwise it comes afterwards, and the write itself fails. */
static int write_beyond_limit(const char *path, bool prepared) {
    struct rlimit limit = {1 << 20, 1 << 20};
    signal(SIGXFSZ, SIG_IGN);
    struct gguf_writer *w = NULL;
    if (gguf_writer_open(&w, path)) return 1;
    gguf_writer_tensor(w, "t", QT_F32, 2, (int64_t[]){1024, 2048});
    if (prepared) setrlimit(RLIMIT_FSIZE, &limit);
    int rc = gguf_writer_begin_data(w);
    if (prepared && rc != ERR_IO) return 2;
    if (!prepared) {
        if (rc) return 3;
        setrlimit(RLIMIT_FSIZE, &limit);
        static const uint8_t zeros[1 << 16];
        for (int i = 0; i < 128 && !rc; i++) rc = gguf_writer_data(w, zeros, sizeof zeros);
        if (!rc) rc = gguf_writer_finish(w);
        if (rc != ERR_IO) return 4;
    }
    if (!strstr(err_text(), path)) return 5;
    gguf_writer_close(w);
    return 0;
}

static void a_full_disk_leaves_nothing(void **s) {
    (void)s;
    const char *path = in_dir("old.gguf");
    for (int prepared = 0; prepared < 2; prepared++) {
        put_old_file(path);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) _exit(write_beyond_limit(path, prepared));
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        expect_old_file(path);
    }
}

static int make_dir(void **s) {
    (void)s;
    return mkdtemp(dir) ? 0 : 1;
}

static int remove_dir(void **s) {
    (void)s;
    char cmd[64];
    snprintf(cmd, sizeof cmd, "rm -r '%s'", dir);
    return system(cmd);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(bytes_are_as_specified),    cmocka_unit_test(a_copy_is_identical),
        cmocka_unit_test(large_data_passes_through), cmocka_unit_test(unfinished_files_vanish),
        cmocka_unit_test(odd_targets_are_refused),   cmocka_unit_test(two_writers_of_one_file_are_refused),
        cmocka_unit_test(wrong_use_is_refused),      cmocka_unit_test(a_full_disk_leaves_nothing),
        cmocka_unit_test(data_may_be_left_a_hole),
    };
    return cmocka_run_group_tests(t, make_dir, remove_dir);
}
