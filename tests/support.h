/* support.h: what tests share: the path of the test data, file slurping. Use with cmocka. */
#ifndef LH_TESTS_SUPPORT_H
#define LH_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

/* Reads a whole file below tests/data ("dir/name"), or an absolute path. A name ending in .xz is decompressed with the
 * xz program. The result has a NUL after it; release with free(). Fails the test when it cannot be read. */
char *test_read(const char *name, size_t *bytes);

/* Path of a file below tests/data, in a static buffer (four in rotation). A name ending in .xz gives the path of a
 * decompressed copy made below the test's temporary folder. */
const char *test_path(const char *name);

/* Small deterministic generator: same numbers on every platform. */
uint64_t test_rand(uint64_t *state);
float test_uniform(uint64_t *state, float lo, float hi);
float test_normal(uint64_t *state);

#endif
