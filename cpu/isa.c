/* isa.c: see isa.h. */
#include "cpu/isa.h"

#include "core/err.h"

#include <string.h>

static const char *const names[ISA_COUNT] = {"generic", "avx2", "avx512"};

const char *isa_name(enum isa isa) { return isa >= 0 && isa < ISA_COUNT ? names[isa] : "?"; }

int isa_usable(enum isa isa) {
    if (isa == ISA_GENERIC) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
               __builtin_cpu_supports("bmi2");
    if (isa == ISA_AVX2) return avx2;
    if (isa == ISA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}

int isa_choose(enum isa *out, const char *want) {
    if (!want || !strcmp(want, "auto")) {
        enum isa best = ISA_GENERIC;
        for (int i = 0; i < ISA_COUNT; i++)
            if (isa_usable(i)) best = i;
        *out = best;
        return 0;
    }
    for (int i = 0; i < ISA_COUNT; i++) {
        if (strcmp(want, names[i])) continue;
        if (!isa_usable(i)) return err_set(ERR_ARG, "kernels '%s' were asked for, but this CPU cannot run them", want);
        *out = i;
        return 0;
    }
    return err_set(ERR_ARG, "unknown kernel set '%s' (known: auto, generic, avx2, avx512)", want);
}
