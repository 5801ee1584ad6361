/* simt.h: internal. Running one grid of a kernel, and reports. */
#ifndef EMU_SIMT_H
#define EMU_SIMT_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

struct grid_run {
    const char *name, *file;
    int line;
    dim3 grid, block;
    size_t smem_dyn;     /* dynamic shared memory of the launch */
    size_t smem_limit;   /* static and dynamic together */
    void (*invoke)(void *args);
    void *args;
};

/* Runs all blocks, on the calling thread or on `workers` threads. order: 0 forward, 1 reverse, 2 random. */
struct simt_options {
    int order, workers;
    bool tsan_lanes, tsan_fresh; /* a TSan fiber per lane; new ones for each block */
    bool shuffle_sum;            /* warp_sum, warp_max as five rendezvous */
    const char *skip_file;       /* end of a path, and a line: the barriers and waits there do nothing */
    int skip_line;
    uint64_t seed;
};
void simt_run(const grid_run &g, const simt_options &o);

/* Prints "EMU: ..." with the kernel, block and thread that is running, if any, and aborts. */
[[noreturn]] void emu_report(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Where the calling thread is: "kernel k, block (x, y, z), thread t", or "host code". */
void simt_where(char *text, size_t bytes);
bool simt_in_kernel();
void simt_altstack(); /* so that an overflowing stack can still be reported */

/* Leader function of the matrix instructions: in[32] are the lanes' operand records (emu_ptx.h). */
void matrix_leader(int op, const uint64_t *in);

#endif
