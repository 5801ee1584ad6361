/* mem.c: checked sizes and aligned allocation. Node binding and pinning are not done here (offload/). */
#include "core/mem.h"

#include "core/err.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

/* Sits in front of every block. base/bytes describe what the system gave. */
struct header {
    void *base;
    size_t bytes;
    bool mapped;
};

bool size_mul(size_t *out, size_t a, size_t b) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

bool size_add(size_t *out, size_t a, size_t b) {
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

bool size_align_up(size_t *out, size_t a, size_t align) {
    size_t r;
    if (__builtin_add_overflow(a, align - 1, &r)) return false;
    *out = r & ~(align - 1);
    return true;
}

size_t size_mul3(size_t a, size_t b, size_t c) {
    size_t r;
    return size_mul(&r, a, b) && size_mul(&r, r, c) ? r : SIZE_MAX;
}

void *mem_alloc(size_t bytes, size_t align, const char *what) {
    if (align < 64) align = 64;
    size_t slack = align + sizeof(struct header), total;
    bool mapped = bytes >= HUGE_PAGE;
    if (mapped) slack += HUGE_PAGE;
    if (!size_add(&total, bytes ? bytes : 1, slack) || !size_align_up(&total, total, 4096)) {
        err_set(ERR_NOMEM, "%s: %zu bytes overflow the address space", what, bytes);
        return NULL;
    }
    char *base = mapped ? mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                        : calloc(1, total);
    if (!base || base == MAP_FAILED) {
        err_set(ERR_NOMEM, "%s: cannot allocate %zu bytes", what, bytes);
        return NULL;
    }
    uintptr_t start = (uintptr_t)base + sizeof(struct header);
    uintptr_t grain = mapped && align < HUGE_PAGE ? HUGE_PAGE : align;
    char *p = (char *)((start + grain - 1) & ~(grain - 1));
    if (mapped) madvise(p, bytes, MADV_HUGEPAGE);
    struct header h = {base, total, mapped};
    memcpy(p - sizeof h, &h, sizeof h);
    return p;
}

void mem_free(void *p) {
    if (!p) return;
    struct header h;
    memcpy(&h, (char *)p - sizeof h, sizeof h);
    if (h.mapped)
        munmap(h.base, h.bytes);
    else
        free(h.base);
}
