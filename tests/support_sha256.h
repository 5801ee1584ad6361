/* support_sha256.h: SHA-256 (FIPS 180-4) for expected values in the test data. */
#ifndef LH_TESTS_SUPPORT_SHA256_H
#define LH_TESTS_SUPPORT_SHA256_H

#include <stddef.h>

/* hex: 64 lower-case digits and a NUL. */
void test_sha256(const void *data, size_t bytes, char hex[65]);

#endif
