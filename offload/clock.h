/* clock.h: monotonic seconds. */
#ifndef LH_OFFLOAD_CLOCK_H
#define LH_OFFLOAD_CLOCK_H

#include <time.h>

static inline double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
