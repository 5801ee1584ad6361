/* emu.h: controls of the emulated CUDA runtime, for tests and longhaul-emu, and the few calls that gpu/compat.h makes.
 *
 * One emulated device. Device memory is a range of addresses that the host cannot touch; kernels get the storage behind it.
 * Streams are queues; what runs when is the policy's choice. Every operation also has a place on a virtual timeline, which
 * does not depend on the policy or on real time. Thread-safe unless said. Bugs of the caller (a missing barrier, a wait
 * that nothing can end, a host pointer in a kernel) are reported on stderr, line "EMU: ...", and abort the process.
 *
 * Environment, read at the first call (the functions below override it):
 *   EMU_POLICY=eager|lazy|random|copy_first|compute_first   EMU_SEED=n   EMU_ORDER=0|1|2 lanes and blocks forward, reverse,
 *   random   EMU_WORKERS=n   EMU_MACHINE=name   EMU_VRAM_MIB=n   EMU_PINNED_MIB=n   EMU_FAIL=call:n[,call:n]  EMU_DRY=1
 *   EMU_DEVICES=0|1   EMU_DRIVER=13000   EMU_TIMELINE=file   EMU_TSAN_LANES=0   EMU_TSAN_FRESH=1   EMU_HANG_S=seconds
 *   EMU_LEAKS=1: report what is still open at exit, status 1
 *   EMU_SHUFFLE_SUM=1: warp_sum and warp_max as five real shuffles
 *   EMU_SKIP=file:line: __syncthreads, __syncwarp and waits for asynchronous copies at this line do nothing: a test of the
 *   tests (mutate.py) */
#ifndef EMU_H
#define EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- the machine ------------------------------------------------------------------------------------------------------- */

enum emu_unit { EMU_F32, EMU_F16, EMU_INT8, EMU_TENSOR, EMU_UNITS };

/* Rates in units of the names; a machine file's figures fit in. Durations: kernel = max(bytes / (vram_gbps * vram_share),
 * flops / tflops[unit], min_kernel_us); copy = bytes / rate + copy_latency_us; CPU work see emu_work. */
struct emu_machine {
    char name[64];
    int sm;                   /* 70, 75, 80 ...; 0: what the kernels were built for */
    int n_sm;                 /* multiprocessors */
    double vram_bytes;
    double runtime_bytes;     /* taken by the context */
    double vram_gbps, vram_share;
    double tflops[EMU_UNITS]; /* reached, not peak */
    double min_kernel_us;     /* shortest kernel */
    double launch_us;         /* host time of a launch or copy call */
    double gap_us;            /* device time between kernels of a stream; graph_gap_us inside a graph */
    double graph_gap_us;
    double graph_launch_us;   /* host time of a graph launch */
    double api_us;            /* host time of event and query calls */
    double sync_us;           /* from completion to the return of a blocking wait */
    double handover_us;       /* from a flag written on one side to its being seen on the other */
    int copy_engines;         /* 2: one for each direction; 1: shared */
    double h2d_gbps, d2h_gbps, pageable_gbps, copy_latency_us;
    double dram_gbps;         /* host memory, all readers together; while copies run: dram_with_dma_gbps */
    double dram_with_dma_gbps;
    double cpu_share;         /* of dram_gbps that CPU kernels reach alone */
    double cpu_gflops;        /* of CPU work */
    double dispatch_us;       /* per piece of CPU work */
    double pinned_bytes;      /* most that can be pinned, < 0: no limit */
};

/* Fills *m from the built-in of this name: v100-16g-pcie3, v100-16g-pcie3-6ch, 2080ti-11g, 3090-24g, 4090-24g,
 * 5070ti-16g, 5090-32g, 5090-32g-8ch, h200-141g, and "emu": 256 MiB, sm as built. Returns 0, or -1: unknown name. */
int emu_machine_get(struct emu_machine *m, const char *name);

/* A fresh device of this kind: clock 0, counters 0, no faults, every handle of before invalid (whatever was open is
 * dropped; emu_leaks first). NULL: as the environment says. Not while other threads use the device. */
void emu_reset(const struct emu_machine *m);
void emu_machine_now(struct emu_machine *m);

enum emu_policy { EMU_EAGER, EMU_LAZY, EMU_RANDOM, EMU_COPY_FIRST, EMU_COMPUTE_FIRST };
void emu_set_policy(enum emu_policy p, uint64_t seed);
void emu_set_order(int order);     /* of lanes and blocks: 0 forward, 1 reverse, 2 random */
void emu_set_workers(int n);       /* host threads that run blocks */
void emu_set_dry(int on);          /* no kernel bodies, no bytes moved, memory without storage; before the first allocation */
void emu_set_devices(int n, int driver_version); /* 0 devices; driver older than 13000: too old */

/* The n-th call (1 = next) of `call` ("cudaMalloc", "launch", "any" ...) fails, with the code that the call fails with on
 * a device, or `code` if not 0. sticky: every later call fails as well, as after a device fault. */
void emu_fail(const char *call, long n, int code, int sticky);
void emu_fail_clear(void);
long emu_calls(const char *call);  /* so far, of this name or "any" */

/* --- what happened ------------------------------------------------------------------------------------------------------ */

struct emu_stats {
    int64_t launches, graph_launches, launches_without_cost, copies, pageable_copies, device_syncs, host_funcs;
    int64_t h2d_bytes, d2h_bytes, d2d_bytes;
    double cost_bytes, cost_flops;              /* sums of GPU_COST */
    size_t vram_used, vram_peak, pinned_used, pinned_peak;
    int allocations, pinned, streams, events, graphs; /* open now */
    double compute_busy_s, h2d_busy_s, d2h_busy_s, cpu_busy_s; /* virtual, of committed operations */
};
void emu_stats_get(struct emu_stats *s);
void emu_stats_zero(void); /* counters and busy times; not what is open or used */

/* Lists on stderr what is still open (memory, pinned ranges, streams, events, graphs) and returns how many. */
int emu_leaks(void);

/* Writes the virtual timeline so far, one operation a line: engine, stream, start_us, end_us, name, bytes. 0 or -1. */
int emu_timeline_dump(const char *path);

/* --- virtual time ------------------------------------------------------------------------------------------------------- */

double emu_now(void);               /* seconds on the calling thread's clock */
void emu_advance(double seconds);   /* the calling thread was busy */
/* CPU work of the calling thread: dispatch_us + max(bytes / DRAM rate, flops / cpu_gflops). The DRAM rate is
 * cpu_share * dram_gbps, less while copies run: they keep their rate, the CPU gets what is left of dram_with_dma_gbps. */
void emu_work(double bytes, double flops);

/* Threads with clocks of their own. The creator calls emu_thread_new before the thread starts and passes the id; the
 * thread calls emu_thread_begin(id) first and emu_thread_end last. Between registered threads work is handed over only
 * through channels, which carry the clock: pop waits for a push and moves the clock to the pusher's. */
int emu_thread_new(void);
void emu_thread_begin(int id);
void emu_thread_end(void);
struct emu_chan;
struct emu_chan *emu_chan_new(void);
void emu_chan_free(struct emu_chan *c);
void emu_chan_push(struct emu_chan *c, void *item);
void *emu_chan_pop(struct emu_chan *c);

/* --- called through gpu/compat.h ---------------------------------------------------------------------------------------- */

void emu_cost(double bytes, double flops, int unit);        /* of the calling thread's next launch */
uint32_t emu_flag_load(const uint32_t *flag);               /* runs one operation if there is one; costs api_us */
void emu_flag_store(uint32_t *flag, uint32_t value);
/* Blocks until (int32_t)(*flag - value) >= 0, running what has to run; the clock moves to the signal + handover_us. */
void emu_flag_wait(const uint32_t *flag, uint32_t value);
void emu_piece_add(const void *device_pointer, size_t bytes);
void emu_piece_del(const void *device_pointer);
void emu_pieces_del(const void *from, size_t bytes); /* all that begin there; none is fine */

#ifdef __cplusplus
}
#endif
#endif
