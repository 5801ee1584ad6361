/* clock.h: seconds that pass, real or simulated (core/clock.h). */
#ifndef LH_OFFLOAD_CLOCK_H
#define LH_OFFLOAD_CLOCK_H

#include "core/clock.h"

static inline double clock_s(void) { return clock_now_s(); }

#endif
