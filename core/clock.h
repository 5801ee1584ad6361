/* clock.h: the time that the program goes by: real monotonic seconds or, in simulations, those of a described machine.
 * Whoever does CPU work of known size reports it here; a simulated clock then moves by what the machine would need, the
 * real one ignores it. Thread-safe after clock_use, which is called before threads start. */
#ifndef LH_CORE_CLOCK_H
#define LH_CORE_CLOCK_H

#include <stdbool.h>

struct clock_source {
    double (*now_s)(void);                       /* of the calling thread */
    void (*work)(double bytes, double flops);    /* the calling thread did this: bytes moved through DRAM, operations */
};

/* NULL: real time. *c is copied. */
void clock_use(const struct clock_source *c);
bool clock_simulated(void);
double clock_now_s(void);
void clock_work(double bytes, double flops);

#endif
