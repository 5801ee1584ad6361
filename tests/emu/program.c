/* program.c: makes longhaul-emu a simulation when --machine NAME is given: the emulated card is that machine's, and time is the
 * emulator's, in which kernels, copies and CPU work take what they would take there. Runs before main. Without --machine, or
 * with a file, the card is the one that the environment says and time is real. */
#include "core/clock.h"

#include <emu.h>

#include <string.h>

static void simulate(int argc, char **argv) __attribute__((constructor));
static void simulate(int argc, char **argv) {
    struct emu_machine m, built;
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--machine") || emu_machine_get(&m, argv[i + 1]) || emu_machine_get(&built, "emu")) continue;
        m.sm = built.sm; /* the kernels are those of this build, whatever the card */
        emu_reset(&m);
        clock_use(&(struct clock_source){emu_now, emu_work});
    }
}
