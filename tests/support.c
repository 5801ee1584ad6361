/* support.c: see support.h. */
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void resolve(char *out, size_t n, const char *name) {
    if (name[0] == '/')
        snprintf(out, n, "%s", name);
    else
        snprintf(out, n, "%s/%s", TEST_DATA, name);
}

static int ends_with(const char *s, const char *end) {
    size_t a = strlen(s), b = strlen(end);
    return a >= b && !strcmp(s + a - b, end);
}

static char *slurp(FILE *f, size_t *bytes) {
    size_t cap = 1 << 16, n = 0;
    char *p = malloc(cap + 1);
    for (;;) {
        n += fread(p + n, 1, cap - n, f);
        if (n < cap) break;
        p = realloc(p, (cap *= 2) + 1);
    }
    p[n] = 0;
    *bytes = n;
    return p;
}

char *test_read(const char *name, size_t *bytes) {
    char path[4096], cmd[4200];
    size_t n;
    resolve(path, sizeof path, name);
    if (access(path, R_OK)) fail_msg("cannot read %s", path);
    FILE *f;
    if (ends_with(path, ".xz")) {
        snprintf(cmd, sizeof cmd, "xz -dc '%s'", path);
        f = popen(cmd, "r");
    } else {
        f = fopen(path, "rb");
    }
    assert_non_null(f);
    char *p = slurp(f, bytes ? bytes : &n);
    if (ends_with(path, ".xz"))
        assert_int_equal(pclose(f), 0);
    else
        fclose(f);
    return p;
}

const char *test_path(const char *name) {
    static char ring[4][4096];
    static int at;
    char *out = ring[at++ & 3];
    resolve(out, sizeof ring[0], name);
    if (!ends_with(out, ".xz")) return out;
    static char dir[64];
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "/tmp/longhaul-test-XXXXXX");
        assert_non_null(mkdtemp(dir));
    }
    char src[4096], cmd[9000];
    snprintf(src, sizeof src, "%s", out);
    const char *base = strrchr(src, '/') + 1;
    snprintf(out, sizeof ring[0], "%s/%.*s", dir, (int)(strlen(base) - 3), base);
    if (access(out, R_OK)) {
        snprintf(cmd, sizeof cmd, "xz -dc '%s' > '%s'", src, out);
        assert_int_equal(system(cmd), 0);
    }
    return out;
}

uint64_t test_rand(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

float test_uniform(uint64_t *state, float lo, float hi) {
    return lo + (hi - lo) * (float)(test_rand(state) >> 40) * 0x1p-24f;
}

float test_normal(uint64_t *state) {
    double u = ((double)(test_rand(state) >> 11) + 1) * 0x1p-53, v = (double)(test_rand(state) >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}
