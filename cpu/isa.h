/* isa.h: which kernel build runs on this CPU. */
#ifndef LH_CPU_ISA_H
#define LH_CPU_ISA_H

/* In increasing order of preference. cpu/kern_*.c are compiled once for each (CMakeLists.txt). */
enum isa { ISA_GENERIC, ISA_AVX2, ISA_AVX512, ISA_COUNT };

/* "generic", "avx2", "avx512". */
const char *isa_name(enum isa isa);

/* Whether this binary holds the build and this CPU and OS can run it (cpuid feature bits and XCR0, each needed bit on
 * its own: avx2+fma+f16c+bmi2; avx512f/bw/dq/vl/vnni). */
int isa_usable(enum isa isa);

/* The best usable one, or the one named by `want` ("auto" or NULL: best). ERR_ARG: unknown name or not usable here. */
int isa_choose(enum isa *out, const char *want);

#endif
