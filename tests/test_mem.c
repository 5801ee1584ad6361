/* test_mem.c: checked sizes, aligned blocks, error text. */
#include "core/err.h"
#include "core/mem.h"
#include "tests/support.h"

#include <string.h>

static void sizes_are_checked(void **s) {
    (void)s;
    size_t r = 7;
    assert_false(size_mul(&r, SIZE_MAX / 2, 3));
    assert_int_equal(r, 7);
    assert_false(size_add(&r, SIZE_MAX, 1));
    assert_false(size_align_up(&r, SIZE_MAX - 1, 64));
    assert_true(size_align_up(&r, 65, 64));
    assert_int_equal(r, 128);
    assert_true(size_mul3(1u << 30, 1u << 30, 16) == SIZE_MAX);
}

static void blocks_are_aligned_and_zero(void **s) {
    (void)s;
    for (size_t bytes = 0; bytes < (5u << 20); bytes = bytes * 3 + 1) {
        char *p = mem_alloc(bytes, 256, "test");
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 256, 0);
        for (size_t i = 0; i < bytes; i += 4093) assert_int_equal(p[i], 0);
        memset(p, 1, bytes);
        mem_free(p);
    }
    assert_null(mem_alloc(SIZE_MAX - 100, 64, "huge block"));
    assert_non_null(strstr(err_text(), "huge block"));
}

static void error_text_may_quote_itself(void **s) {
    (void)s;
    assert_int_equal(err_set(ERR_IO, "inner"), ERR_IO);
    assert_int_equal(err_set(ERR_FORMAT, "outer: %s", err_text()), ERR_FORMAT);
    assert_string_equal(err_text(), "outer: inner");
    assert_int_equal(err_exit_status(ERR_BUDGET), 4);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(blocks_are_aligned_and_zero),
        cmocka_unit_test(error_text_may_quote_itself),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
