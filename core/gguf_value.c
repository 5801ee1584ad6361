/* gguf_value.c: typed access to metadata values, and names for humans. */
#include "core/err.h"
#include "core/gguf.h"
#include "core/utf8.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *gguf_type_name(int type) {
    static const char *const names[GGUF_TYPE_COUNT] = {
        [GGUF_U8] = "u8",   [GGUF_I8] = "i8",   [GGUF_U16] = "u16",   [GGUF_I16] = "i16", [GGUF_U32] = "u32",
        [GGUF_I32] = "i32", [GGUF_F32] = "f32", [GGUF_BOOL] = "bool", [GGUF_STR] = "str", [GGUF_ARR] = "array",
        [GGUF_U64] = "u64", [GGUF_I64] = "i64", [GGUF_F64] = "f64"};
    return type >= 0 && type < GGUF_TYPE_COUNT ? names[type] : "unknown";
}

/* Bytes of the character at p that may be shown as it is; 0: its first byte must be escaped. Control characters and those
 * that turn the direction of text are escaped: a terminal would act on them. */
static size_t shown_bytes(const char *p, size_t n) {
    uint32_t c;
    int len = utf8_decode(p, n, &c);
    if (!len) return 0;
    bool control = c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
    return control ? 0 : (size_t)len;
}

const char *gguf_printable(char *dst, size_t cap, const char *src, size_t bytes) {
    size_t whole = 0, n = 0, len;
    for (size_t i = 0; i < bytes && whole < cap; i += len ? len : 1) {
        len = shown_bytes(src + i, bytes - i);
        whole += len ? len : 4;
    }
    size_t end = whole < cap ? cap - 1 : cap - 4; /* cut: room for "..." */
    for (size_t i = 0; i < bytes; i += len ? len : 1) {
        len = shown_bytes(src + i, bytes - i);
        if (n + (len ? len : 4) > end) break;
        if (len)
            memcpy(dst + n, src + i, len);
        else
            snprintf(dst + n, cap - n, "\\x%02x", (unsigned char)src[i]);
        n += len ? len : 4;
    }
    snprintf(dst + n, cap - n, "%s", whole < cap ? "" : "...");
    return dst;
}

/* Little-endian bytes of element i, zero-extended. */
static uint64_t load(const struct gguf_kv *kv, int64_t i, int bytes) {
    const uint8_t *p = kv->data + (size_t)i * (size_t)bytes;
    uint64_t v = 0;
    for (int b = bytes - 1; b >= 0; b--) v = v << 8 | p[b];
    return v;
}

static int elem_bytes(int type) {
    switch (type) {
#define X(name, id, bytes)                                                                                             \
    case GGUF_##name: return bytes;
        GGUF_TYPE_LIST(X)
#undef X
    default: return 0;
    }
}

/* An integer as sign and 64 bits. false: not an integer type. */
static bool load_int(const struct gguf_kv *kv, int64_t i, bool *negative, uint64_t *bits) {
    int bytes = elem_bytes(kv->elem_type);
    switch (kv->elem_type) {
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_U64:
    case GGUF_BOOL:
        *bits = load(kv, i, bytes);
        *negative = false;
        return true;
    case GGUF_I8:
    case GGUF_I16:
    case GGUF_I32:
    case GGUF_I64: {
        uint64_t v = load(kv, i, bytes), sign = (uint64_t)1 << (bytes * 8 - 1);
        *bits = (v ^ sign) - sign; /* sign-extended */
        *negative = (v & sign) != 0;
        return true;
    }
    default: return false;
    }
}

bool gguf_elem_u64(const struct gguf_kv *kv, int64_t i, uint64_t *v) {
    bool negative;
    uint64_t bits;
    if (!load_int(kv, i, &negative, &bits) || negative) return false;
    *v = bits;
    return true;
}

bool gguf_elem_i64(const struct gguf_kv *kv, int64_t i, int64_t *v) {
    bool negative;
    uint64_t bits;
    if (!load_int(kv, i, &negative, &bits) || (!negative && bits > INT64_MAX)) return false;
    *v = (int64_t)bits;
    return true;
}

bool gguf_elem_f64(const struct gguf_kv *kv, int64_t i, double *v) {
    bool negative;
    uint64_t bits;
    if (kv->elem_type == GGUF_F32) {
        uint32_t u = (uint32_t)load(kv, i, 4);
        float f;
        memcpy(&f, &u, sizeof f);
        *v = f;
        return true;
    }
    if (kv->elem_type == GGUF_F64) {
        bits = load(kv, i, 8);
        memcpy(v, &bits, sizeof *v);
        return true;
    }
    if (!load_int(kv, i, &negative, &bits)) return false;
    *v = negative ? (double)(int64_t)bits : (double)bits;
    return true;
}

const char *gguf_elem_str(const struct gguf_kv *kv, int64_t i, size_t *bytes) {
    if (kv->elem_type != GGUF_STR) return NULL;
    if (kv->type == GGUF_STR) {
        *bytes = (size_t)kv->n;
        return (const char *)kv->data;
    }
    const uint8_t *p = kv->data + kv->index[i];
    *bytes = (size_t)load(&(struct gguf_kv){.data = p}, 0, 8);
    return (const char *)p + 8;
}

/* --- by key ------------------------------------------------------------------------------------------------------- */

/* What a key holds, for the sentence that says it is not what it must be. */
static int wrong(const struct gguf *g, const struct gguf_kv *kv, const char *must) {
    double v;
    char has[64] = "";
    if (kv->type != GGUF_ARR && gguf_elem_f64(kv, 0, &v)) snprintf(has, sizeof has, " %.17g", v);
    return err_set(ERR_FORMAT, "%s: key %s is %s%s, must be %s", gguf_path(g, 0), kv->key, gguf_type_name(kv->type), has, must);
}

int gguf_u64(const struct gguf *g, const char *key, uint64_t *v) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return GGUF_ABSENT;
    if (kv->type == GGUF_ARR || !gguf_elem_u64(kv, 0, v)) return wrong(g, kv, "an integer of 0 or more");
    return 0;
}

int gguf_i64(const struct gguf *g, const char *key, int64_t *v) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return GGUF_ABSENT;
    if (kv->type == GGUF_ARR || !gguf_elem_i64(kv, 0, v)) return wrong(g, kv, "an integer below 2^63");
    return 0;
}

int gguf_f64(const struct gguf *g, const char *key, double *v) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return GGUF_ABSENT;
    if (kv->type == GGUF_ARR || kv->type == GGUF_BOOL || !gguf_elem_f64(kv, 0, v)) return wrong(g, kv, "a number");
    return 0;
}

int gguf_bool(const struct gguf *g, const char *key, bool *v) {
    const struct gguf_kv *kv = gguf_find(g, key);
    uint64_t u;
    if (!kv) return GGUF_ABSENT;
    if (kv->type == GGUF_ARR || !gguf_elem_u64(kv, 0, &u) || u > 1) return wrong(g, kv, "true or false");
    *v = u != 0;
    return 0;
}

int gguf_str(const struct gguf *g, const char *key, const char **p, size_t *bytes) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return GGUF_ABSENT;
    if (kv->type != GGUF_STR) return wrong(g, kv, "a string");
    *p = gguf_elem_str(kv, 0, bytes);
    return 0;
}

int gguf_arr(const struct gguf *g, const char *key, const struct gguf_kv **arr) {
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return GGUF_ABSENT;
    if (kv->type != GGUF_ARR) return wrong(g, kv, "an array");
    *arr = kv;
    return 0;
}
