/* mem.h: checked 64-bit size arithmetic and aligned host memory. Thread-safe. */
#ifndef LH_CORE_MEM_H
#define LH_CORE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *out = a * b, a + b, or a rounded up to a multiple of the power of two `align`. false on overflow (*out untouched). */
bool size_mul(size_t *out, size_t a, size_t b);
bool size_add(size_t *out, size_t a, size_t b);
bool size_align_up(size_t *out, size_t a, size_t align);

/* a * b * c with no overflow possible for the caller to miss: SIZE_MAX when it overflows (never allocatable). */
size_t size_mul3(size_t a, size_t b, size_t c);

/* Round-up that the caller knows cannot overflow (sizes below 2^62). */
static inline size_t align_up(size_t a, size_t align) { return (a + align - 1) & ~(align - 1); }

/* Zeroed memory aligned to `align` (power of two >= 16), released with mem_free. NULL with err_set when it cannot be
 * had; `what` names it in the sentence. Blocks of 2 MiB and more come from mmap and ask for huge pages, and are not
 * touched: the first writer decides the NUMA node. */
void *mem_alloc(size_t bytes, size_t align, const char *what);
void mem_free(void *p);

#endif
