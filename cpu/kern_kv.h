/* kern_kv.h: packing of keys and values into KV pages (layout in core/kv.h), the same bytes as kv_put_ref. */
#ifndef LH_CPU_KERN_KV_H
#define LH_CPU_KERN_KV_H

#include "core/kv.h"
#include "cpu/impl.h"

struct kern_kv {
    /* Stores n positions of one head, rows r0 .. r0 + n of a page (r0 + n <= KV_PAGE). head: address of the head in the
     * page. k[n][head_dim_k] and v[n][head_dim_v] with rows k_row and v_row floats apart. Returns how many were stored:
     * less than n when the next one has a value that its type cannot hold as a finite number. */
    int (*put)(const struct kv_layer *l, unsigned char *head, int r0, int n, const float *k, size_t k_row, const float *v,
               size_t v_row);
};

KERN_TABLES(kern_kv)

#endif
