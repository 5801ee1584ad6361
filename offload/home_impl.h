/* home_impl.h: inside of a home, for home.c and load.c. */
#ifndef LH_OFFLOAD_HOME_IMPL_H
#define LH_OFFLOAD_HOME_IMPL_H

#include "offload/home.h"

struct home {
    const struct model *model;
    struct parts parts;
    struct home_at {
        size_t offset;        /* in the arena */
        char *host;           /* ? */
        void *d;              /* ?address in VRAM, of parts that are not fixed in their phase only */
    } *at;                    /* [parts.n] */
    char *arena;
    size_t bytes;             /* of it */
    size_t copied;            /* the front that copies read */
    size_t pinned;            /* of it, page-locked; whole pages */
    struct gpu *gpu;
    struct gpu_arena *arena_d;
    size_t mark;              /* of arena_d before */
    struct weights weights;
};

#endif
