/* test_gpu_handover.c: what streams and threads of the CPU hand each other: flags, functions that a stream calls, recorded work.
 * Built with LH_GPU where there is a GPU back end, the emulated one (GPU_EMU) included. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "tests/gpu_dev.h"

#include <stdatomic.h>

enum { DIM = 96, STEPS = 7 };
enum { ASKED, ANSWERED, N_FLAG };

/* A step on the device: x -> ask (mapped); the CPU answers from ask; x += answer. */
struct handover {
    struct dev d;
    struct gpu_flags *flags;
    float *d_x, *d_got, *ask, *d_ask, *answer, *d_answer;
};

static const struct ops_limits limits = {.n_tok = 1, .cols = DIM, .rows = DIM, .n_head = 1, .n_kv = 1, .head_dim = 32, .n_ctx = 256};

static void open_all(struct handover *h) {
    float x[DIM];
    dev_open(&h->d, &limits, 1 << 20);
    ok(gpu_flags_open(&h->flags, h->d.g, N_FLAG));
    ok(gpu_mapped_alloc((void **)&h->ask, (void **)&h->d_ask, h->d.g, sizeof x));
    ok(gpu_mapped_alloc((void **)&h->answer, (void **)&h->d_answer, h->d.g, sizeof x));
    for (int i = 0; i < DIM; i++) x[i] = (float)i;
    h->d_x = dev_new(&h->d, x, sizeof x);
    h->d_got = dev_new(&h->d, NULL, sizeof x);
}

static void close_all(struct handover *h) {
    gpu_host_free(h->d.g, h->ask);
    gpu_host_free(h->d.g, h->answer);
    gpu_flags_close(h->flags);
    dev_close(&h->d);
}

static void enqueue_step(struct handover *h, uint32_t value, enum gpu_flag_after after) {
    const int32_t row = 0;
    ok(h->d.t->gather(h->d.t, h->d_ask, h->d_x, &row, 1, DIM));
    ok(gpu_flag_signal(h->flags, ASKED, value, h->d.stream));
    ok(gpu_flag_wait(h->flags, ANSWERED, value, after, h->d.stream));
    ok(h->d.t->gather(h->d.t, h->d_got, h->d_answer, &row, 1, DIM));
    ok(h->d.t->add(h->d.t, h->d_x, h->d_got, DIM));
}

static void answer(struct handover *h) {
    for (int i = 0; i < DIM; i++) h->answer[i] = 2 * h->ask[i] + 1;
}

/* x -> 3 x + 1, STEPS times */
static void check_result(struct handover *h) {
    float got[DIM];
    dev_read(&h->d, got, h->d_x, sizeof got);
    for (int i = 0; i < DIM; i++) {
        float want = (float)i;
        for (int s = 0; s < STEPS; s++) want = 3 * want + 1;
        if (got[i] != want) fail_msg("x[%d]: got %g, want %g", i, (double)got[i], (double)want);
    }
    add_digest(got, sizeof got);
}

/* Steps queued ahead, each waits for the CPU: counting flags. */
static void flags_count(void) {
    const uint32_t first = INT32_MAX - STEPS + 1;
    struct handover h;
    open_all(&h);
    assert_false(gpu_flag_host_seen(h.flags, ASKED, 1));
    for (uint32_t s = 0; s < STEPS; s++) enqueue_step(&h, first + s, GPU_FLAG_KEEP);
    for (uint32_t s = 0; s < STEPS; s++) {
        gpu_flag_host_wait(h.flags, ASKED, first + s);
        assert_true(gpu_flag_host_seen(h.flags, ASKED, first + s));
        answer(&h);
        gpu_flag_host_signal(h.flags, ANSWERED, first + s);
    }
    check_result(&h);
    close_all(&h);
}

/* One recorded step, replayed: the wait resets its flag, the CPU resets the other before it answers. */
static void graphs_repeat(void) {
    struct handover h;
    struct gpu_graph *step = NULL;
    open_all(&h);
    ok(gpu_graph_begin(h.d.stream));
    enqueue_step(&h, 1, GPU_FLAG_RESET);
    ok(gpu_graph_end(&step, h.d.stream));
    for (int s = 0; s < STEPS; s++) {
        ok(gpu_graph_launch(step, h.d.stream));
        gpu_flag_host_wait(h.flags, ASKED, 1);
        answer(&h);
        gpu_flag_host_signal(h.flags, ASKED, 0);
        gpu_flag_host_signal(h.flags, ANSWERED, 1);
    }
    check_result(&h);
    gpu_graph_close(step);
    close_all(&h);
}

/* Fewer steps than STEPS would fail: the functions run once each, in the stream's order. */
static void answer_of(void *arg) { answer(arg); }
static void functions_are_called_in_order(void) {
    struct handover h;
    const int32_t row = 0;
    open_all(&h);
    for (int s = 0; s < STEPS; s++) {
        ok(gpu_copy_out(h.d.stream, h.ask, h.d_x, sizeof(float) * DIM));
        ok(gpu_call_host(h.d.stream, answer_of, &h));
        ok(gpu_copy_in(h.d.stream, h.d_got, h.answer, sizeof(float) * DIM));
        ok(h.d.t->add(h.d.t, h.d_x, h.d_got, DIM));
        ok(h.d.t->gather(h.d.t, h.d_got, h.d_x, &row, 1, DIM));
    }
    check_result(&h);
    close_all(&h);
}

/* A product of constants: the time is of a product that was done. */
static void the_probe_measures(void) {
    struct dev d;
    double s = -1;
    dev_open(&d, &limits, 1 << 20);
    size_t used = gpu_arena_used(d.arena);
    ok(gpu_probe_gemm(&s, d.arena, d.stream, 64, 32, 48, 3));
    assert_true(s > 0 && s < 1);
    assert_int_equal(gpu_arena_used(d.arena), used);
    assert_int_equal(gpu_probe_gemm(&s, d.arena, d.stream, 1 << 20, 1 << 20, 64, 1), ERR_BUDGET);
    assert_int_equal(gpu_probe_gemm(&s, d.arena, d.stream, 0, 1, 1, 1), ERR_ARG);
    assert_int_equal(gpu_arena_used(d.arena), used);
    struct gpu_flags *f;
    assert_int_equal(gpu_flags_open(&f, d.g, 0), ERR_ARG);
    assert_int_equal(gpu_flags_open(&f, d.g, GPU_MAX_FLAGS + 1), ERR_ARG);
    dev_close(&d);
}

ORDERS(flags_count)
ORDERS(graphs_repeat)
ORDERS(functions_are_called_in_order)
ORDERS(the_probe_measures)

#if defined(GPU_EMU)
static void nothing(void *arg) { (void)arg; }

/* Everything once; with nth, the nth call of this name fails: a code, no leak, all closes. Returns the calls made. */
static long once(const char *call, long nth) {
    struct gpu *g = NULL;
    struct gpu_arena *a = NULL;
    struct gpu_stream *s = NULL;
    struct gpu_flags *f = NULL;
    struct gpu_graph *q = NULL;
    void *d_x = NULL;
    double seconds;
    emu_reset(NULL);
    long before = emu_calls(call);
    if (nth) emu_fail(call, nth, 2, 0); /* out of memory: the device works on */
    int rc = gpu_open(&g, 0);
    if (!rc) rc = gpu_arena_open(&a, g, 1 << 20);
    if (!rc) rc = gpu_stream_open(&s, g);
    if (!rc) rc = gpu_flags_open(&f, g, 1);
    if (!rc) rc = gpu_alloc(&d_x, a, 4096, "x");
    if (!rc) rc = gpu_flag_signal(f, 0, 1, s);
    if (!rc) rc = gpu_flag_wait(f, 0, 1, GPU_FLAG_KEEP, s);
    if (!rc) rc = gpu_call_host(s, nothing, NULL);
    if (!rc && !(rc = gpu_graph_begin(s))) {
        int in = gpu_fill(s, d_x, 0, 4096);
        rc = gpu_graph_end(&q, s);
        if (in) rc = in;
    }
    if (!rc) rc = gpu_graph_launch(q, s);
    if (!rc) rc = gpu_probe_gemm(&seconds, a, s, 16, 16, 16, 1);
    if (!rc) rc = gpu_stream_sync(s);
    long calls = emu_calls(call) - before;
    if (nth && rc != ERR_DEVICE && rc != ERR_BUDGET && rc != ERR_UNSUPPORTED) fail_msg("%s %ld failed, and the result is %d (%s)", call, nth, rc, err_text());
    if (!nth && rc) fail_msg("%s", err_text());
    emu_fail_clear();
    if (s) (void)gpu_stream_sync(s);
    gpu_graph_close(q);
    gpu_flags_close(f);
    gpu_stream_close(s);
    gpu_arena_close(a);
    gpu_close(g);
    return calls;
}

static void every_call_may_fail(void **state) {
    (void)state;
    static const char *const calls[] = {"cudaGetDriverEntryPoint", "cudaHostAlloc", "cudaHostGetDevicePointer", "cuStreamBatchMemOp",
                                        "cudaLaunchHostFunc", "cudaStreamBeginCapture", "cudaMemsetAsync", "cudaStreamEndCapture",
                                        "cudaGraphInstantiate", "cudaGraphLaunch", "cublasCreate", "cublasSetStream", "cublasGemm",
                                        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize",
                                        "cudaEventElapsedTime", "cudaStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        long made = once(calls[i], 0);
        if (made < 1) fail_msg("%s is not called", calls[i]);
        for (long n = 1; n <= made; n++) {
            once(calls[i], n);
            if (emu_leaks()) fail_msg("%s %ld failed (%s) and something was left open", calls[i], n, err_text());
        }
    }
    emu_reset(NULL);
}
#endif

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(flags_count_in_all_orders),
        cmocka_unit_test(graphs_repeat_in_all_orders),
        cmocka_unit_test(functions_are_called_in_order_in_all_orders),
        cmocka_unit_test(the_probe_measures_in_all_orders),
#if defined(GPU_EMU)
        cmocka_unit_test(every_call_may_fail),
#endif
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
