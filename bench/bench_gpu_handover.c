/* bench_gpu_handover.c: what it costs to launch work and to hand over between a stream and the CPU.
 *
 *   bench_gpu_handover [--device I] [--steps N] [--small]
 *
 * launch: N small kernels (an addition) in a row, each launched, and recorded as a graph: microseconds of host time per kernel,
 * and from the first to the last on the device per kernel.
 * handover: a step is a small kernel on the stream, then the CPU is told, then the stream goes on. Microseconds from one step
 * to the next as the CPU sees them, p50 and p99 of N: kernel, way out and way back. The CPU does nothing in between.
 *   flags      the stream signals and waits by stream memory operations, the CPU spins; all steps are queued ahead
 *   events     the CPU asks for an event until it is done, then launches the next step
 *   host_func  the stream calls a function of the host between steps; all steps are queued ahead
 *   mapped     the kernel writes mapped memory, on which the CPU spins, then launches the next step; no fence tells when a
 *              kernel's writes arrive, so that this is for comparison only, and not run on the emulator, which reports it
 *   sync       the CPU waits for the stream, then launches the next step
 * After each way the sum of what the steps added is checked. Status 1: wrong. --small: few steps, for the emulator. */
#include "bench/common.h"
#include "core/err.h"
#include "gpu/gpu.h"

#include <stdbool.h>
#include <stdio.h>

#if defined(GPU_EMU)
#include <emu.h>
enum { SIMULATED = 1 };
static double clock_now(void) { return emu_now(); }
#else
enum { SIMULATED = 0 };
static double clock_now(void) { return now_s(); }
#endif

enum { DIM = 4096, MAX_STEPS = 1 << 16, AHEAD = 64 };
enum { TOLD, GO_ON, N_FLAG };

struct bench {
    struct gpu *g;
    struct gpu_arena *arena;
    struct gpu_stream *stream;
    struct gpu_ops *gpu_ops;
    struct ops *ops;
    struct gpu_flags *flags; /* NULL: the driver has none */
    struct gpu_event *event, *from, *to;
    float *d_x, *d_one, *host;  /* x += one, DIM values; host: pinned, DIM values */
    float *mapped, *d_mapped, *d_count; /* mapped: 1 value; d_count [MAX_STEPS]: 1, 2, 3 ... */
    int n;
    double *at;   /* [n + 1] when the CPU was told */
    int n_called; /* of host_func */
    bool wrong;
};

static void check(int rc) {
    if (!rc) return;
    fprintf(stderr, "bench_gpu_handover: %s\n", err_text());
    exit(err_exit_status(rc));
}

static void small_kernel(struct bench *b) { check(b->ops->add(b->ops, b->d_x, b->d_one, DIM)); }

static void clear(struct bench *b) {
    check(gpu_fill(b->stream, b->d_x, 0, DIM * sizeof(float)));
    check(gpu_stream_sync(b->stream));
}

/* x counts the kernels that ran. */
static bool counted(struct bench *b, int want) {
    check(gpu_copy_out(b->stream, b->host, b->d_x, DIM * sizeof(float)));
    check(gpu_stream_sync(b->stream));
    bool ok = true;
    for (int i = 0; i < DIM; i++) ok &= b->host[i] == (float)want;
    if (!ok) b->wrong = true;
    return ok;
}

/* --- launches ---------------------------------------------------------------------------------------------------------------- */

static void report_launch(struct bench *b, const char *how, int n, double host_s, double device_s) {
    printf("launch,%s,%d,%.3f,%.3f,%s,%s\n", how, n, host_s / n * 1e6, device_s / n * 1e6, counted(b, 2 * n) ? "ok" : "WRONG",
           SIMULATED ? "simulated" : "measured");
}

/* Twice: the first is not counted. */
static void bench_launches(struct bench *b) {
    double host = 0, device = 0;
    int n = b->n < 512 ? b->n : 512;
    clear(b);
    for (int twice = 0; twice < 2; twice++) {
        check(gpu_event_record(b->from, b->stream));
        double t = clock_now();
        for (int i = 0; i < n; i++) small_kernel(b);
        host = clock_now() - t;
        check(gpu_event_record(b->to, b->stream));
        check(gpu_stream_sync(b->stream));
    }
    check(gpu_event_seconds(&device, b->from, b->to));
    report_launch(b, "kernel", n, host, device);

    struct gpu_graph *q;
    clear(b);
    check(gpu_graph_begin(b->stream));
    for (int i = 0; i < n; i++) small_kernel(b);
    check(gpu_graph_end(&q, b->stream));
    for (int twice = 0; twice < 2; twice++) {
        check(gpu_event_record(b->from, b->stream));
        double t = clock_now();
        check(gpu_graph_launch(q, b->stream));
        host = clock_now() - t;
        check(gpu_event_record(b->to, b->stream));
        check(gpu_stream_sync(b->stream));
    }
    check(gpu_event_seconds(&device, b->from, b->to));
    report_launch(b, "graph", n, host, device);
    gpu_graph_close(q);
}

/* --- ways ---------------------------------------------------------------------------------------------------------------------- */

/* Steps are queued AHEAD of the CPU at most: a stream takes so many before a call blocks. */
static void by_flags(struct bench *b) {
    int queued = 0;
    for (int i = 1; i <= b->n + 1; i++) {
        for (; queued < b->n + 1 && queued < i + AHEAD; queued++) {
            small_kernel(b);
            check(gpu_flag_signal(b->flags, TOLD, (uint32_t)queued + 1, b->stream));
            check(gpu_flag_wait(b->flags, GO_ON, (uint32_t)queued + 1, GPU_FLAG_KEEP, b->stream));
        }
        gpu_flag_host_wait(b->flags, TOLD, (uint32_t)i);
        b->at[i - 1] = clock_now();
        gpu_flag_host_signal(b->flags, GO_ON, (uint32_t)i);
    }
}

static void by_events(struct bench *b) {
    for (int i = 0; i <= b->n; i++) {
        bool done = false;
        small_kernel(b);
        check(gpu_event_record(b->event, b->stream));
        while (!done) check(gpu_event_done(b->event, &done));
        b->at[i] = clock_now();
    }
}

static void called(void *arg) {
    struct bench *b = arg;
    b->at[b->n_called++] = clock_now();
}
static void by_host_func(struct bench *b) {
    double device;
    b->n_called = 0;
    check(gpu_event_record(b->from, b->stream));
    for (int i = 0; i <= b->n; i++) {
        small_kernel(b);
        check(gpu_call_host(b->stream, called, b));
    }
    check(gpu_event_record(b->to, b->stream));
    check(gpu_stream_sync(b->stream));
    check(gpu_event_seconds(&device, b->from, b->to));
    if (SIMULATED) /* functions have no clock of their own there: the mean of the stream's */
        for (int i = 0; i <= b->n; i++) b->at[i] = device * i / (b->n + 1);
    if (b->n_called != b->n + 1) b->wrong = true;
}

/* The kernel that gathers row i of 1, 2, 3 ... into mapped memory. */
static void by_mapped(struct bench *b) {
    for (int32_t i = 0; i <= b->n; i++) {
        small_kernel(b);
        check(b->ops->gather(b->ops, b->d_mapped, b->d_count, &i, 1, 1));
        while (*(volatile float *)b->mapped != (float)(i + 1)) {
        }
        b->at[i] = clock_now();
    }
}

static void by_sync(struct bench *b) {
    for (int i = 0; i <= b->n; i++) {
        small_kernel(b);
        check(gpu_stream_sync(b->stream));
        b->at[i] = clock_now();
    }
}

static void bench_way(struct bench *b, const char *name, void (*way)(struct bench *)) {
    clear(b);
    way(b);
    bool ok = counted(b, b->n + 1);
    for (int i = 0; i < b->n; i++) b->at[i] = b->at[i + 1] - b->at[i];
    qsort(b->at, (size_t)b->n, sizeof *b->at, by_value);
    printf("handover,%s,%d,%.2f,%.2f,%s,%s\n", name, b->n, b->at[b->n / 2] * 1e6, b->at[b->n - 1 - b->n / 100] * 1e6, ok ? "ok" : "WRONG",
           SIMULATED ? "simulated" : "measured");
    fflush(stdout);
}

/* --- the card -------------------------------------------------------------------------------------------------------------------- */

static void fill_count(struct bench *b) {
    for (int at = 0; at <= b->n; at += DIM) {
        for (int i = 0; i < DIM; i++) b->host[i] = (float)(at + i + 1);
        check(gpu_copy_in(b->stream, b->d_count + at, b->host, DIM * sizeof(float)));
        check(gpu_stream_sync(b->stream));
    }
}

static void open_all(struct bench *b, int device) {
    const struct ops_limits l = {.n_tok = 1, .cols = DIM, .rows = DIM, .n_head = 1, .n_kv = 1, .head_dim = 64, .n_ctx = 256};
    size_t count = ((size_t)b->n / DIM + 1) * DIM * sizeof(float);
    check(gpu_open(&b->g, device));
    check(gpu_arena_open(&b->arena, b->g, gpu_ops_scratch_bytes(&l) + count + (1 << 20)));
    check(gpu_stream_open(&b->stream, b->g));
    check(gpu_ops_open(&b->gpu_ops, b->g, b->arena, b->stream, &l));
    b->ops = gpu_ops_table(b->gpu_ops);
    check(gpu_event_open(&b->event, b->g, GPU_EVENT_ORDER));
    check(gpu_event_open(&b->from, b->g, GPU_EVENT_TIMED));
    check(gpu_event_open(&b->to, b->g, GPU_EVENT_TIMED));
    check(gpu_host_alloc((void **)&b->host, b->g, DIM * sizeof(float)));
    check(gpu_mapped_alloc((void **)&b->mapped, (void **)&b->d_mapped, b->g, sizeof(float)));
    b->mapped[0] = 0;
    check(gpu_alloc((void **)&b->d_x, b->arena, DIM * sizeof(float), "x"));
    check(gpu_alloc((void **)&b->d_one, b->arena, DIM * sizeof(float), "one"));
    check(gpu_alloc((void **)&b->d_count, b->arena, count, "1, 2, 3"));
    for (int i = 0; i < DIM; i++) b->host[i] = 1;
    check(gpu_copy_in(b->stream, b->d_one, b->host, DIM * sizeof(float)));
    check(gpu_stream_sync(b->stream));
    fill_count(b);
    int rc = gpu_flags_open(&b->flags, b->g, N_FLAG);
    if (rc != ERR_UNSUPPORTED) check(rc);
    b->at = mem_alloc(((size_t)b->n + 1) * sizeof *b->at, 64, "times");
    if (!b->at) check(ERR_NOMEM);
}

static void close_all(struct bench *b) {
    mem_free(b->at);
    gpu_flags_close(b->flags);
    gpu_host_free(b->g, b->mapped);
    gpu_host_free(b->g, b->host);
    gpu_event_close(b->event), gpu_event_close(b->from), gpu_event_close(b->to);
    gpu_ops_close(b->gpu_ops);
    gpu_stream_close(b->stream);
    gpu_arena_close(b->arena);
    gpu_close(b->g);
}

int main(int argc, char **argv) {
    struct bench b = {.n = 2000};
    int device = 0, n = 0;
    bool good = true;
    for (int i = 1; i < argc && good; i++) {
        if (!strcmp(argv[i], "--small")) b.n = 100;
        else if (i + 1 < argc && !strcmp(argv[i], "--device")) device = atoi(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--steps")) b.n = atoi(argv[++i]);
        else good = false;
    }
    if (!good || b.n < 1 || b.n > MAX_STEPS) {
        fprintf(stderr, "usage: bench_gpu_handover [--device I] [--steps N] [--small]\n");
        return 2;
    }
    if (!gpu_built()) {
        fprintf(stderr, "bench_gpu_handover: this build has no GPU back end; build with -DLONGHAUL_CUDA=ON\n");
        return 77;
    }
    check(gpu_count(&n));
    if (!n) {
        fprintf(stderr, "bench_gpu_handover: no GPU found\n");
        return 77;
    }
    open_all(&b, device);
    const struct gpu_info *g = gpu_info(b.g);
    printf("# bench_gpu_handover%s: %s, sm_%d, driver %d, CUDA %d, %d copy engines\n", SIMULATED ? " (simulated)" : "", g->name, g->sm, g->driver,
           g->runtime, g->copy_engines);
    printf("what,how,n,host_us_or_p50_us,device_us_or_p99_us,result,time\n");
    bench_launches(&b);
    if (b.flags) bench_way(&b, "flags", by_flags);
    else printf("# flags: %s\n", err_text());
    bench_way(&b, "events", by_events);
    bench_way(&b, "host_func", by_host_func);
    if (!SIMULATED) bench_way(&b, "mapped", by_mapped);
    bench_way(&b, "sync", by_sync);
    close_all(&b);
    if (b.wrong) fprintf(stderr, "bench_gpu_handover: a result is wrong\n");
    return b.wrong ? 1 : 0;
}
