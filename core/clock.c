/* clock.c: see clock.h. */
#include "core/clock.h"

#include <stddef.h>
#include <time.h>

static struct clock_source source;

void clock_use(const struct clock_source *c) { source = c ? *c : (struct clock_source){NULL, NULL}; }

bool clock_simulated(void) { return source.now_s != NULL; }

double clock_now_s(void) {
    if (source.now_s) return source.now_s();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void clock_work(double bytes, double flops) {
    if (source.work) source.work(bytes, flops);
}
