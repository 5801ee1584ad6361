/* test_gpu_device.c: opening a card, memory, streams and events of gpu/gpu.h; what is said when they fail. Built with LH_GPU
 * where there is a GPU back end, the emulated one (GPU_EMU) included. */
#include "tests/support.h"

#include <stdio.h>

#ifndef LH_GPU
int main(void) {
    printf("skipped: built without a GPU back end\n");
    return 77;
}
#else

#include "gpu/gpu.h"
#include "tests/gpu_orders.h"

#include <string.h>

/* --- device and memory ---------------------------------------------------------------------------------------------------- */

static void devices(void) {
    struct gpu *g;
    int n;
    ok(gpu_count(&n));
    assert_true(n >= 1);
    assert_int_equal(gpu_open(&g, n), ERR_ARG);
    ok(gpu_open(&g, 0));
    const struct gpu_info *i = gpu_info(g);
    struct gpu_info seen;
    ok(gpu_look(&seen, 0));
    assert_memory_equal(&seen, i, sizeof seen);
    assert_int_equal(gpu_look(&seen, n), ERR_ARG);
    assert_true(i->name[0] && i->pci[0] && i->sm >= 60 && i->n_sm > 0 && i->copy_engines > 0 && i->vram_bytes > 0);
    size_t before, after;
    ok(gpu_mem_free(g, &before));
    struct gpu_arena *a;
    assert_int_equal(gpu_arena_open(&a, g, before + ((size_t)1 << 34)), ERR_BUDGET);
    assert_non_null(strstr(err_text(), "MiB device memory are free"));
    ok(gpu_arena_open(&a, g, 1 << 20));
    void *p, *q;
    ok(gpu_alloc(&p, a, 1, "one byte"));
    ok(gpu_alloc(&q, a, 1000, "more"));
    assert_int_equal((char *)q - (char *)p, GPU_ALIGN);
    assert_int_equal(gpu_alloc(&q, a, 1 << 20, "too much"), ERR_BUDGET);
    assert_int_equal(gpu_alloc(&q, a, SIZE_MAX, "far too much"), ERR_BUDGET);
    gpu_arena_close(a);
    ok(gpu_mem_free(g, &after));
    assert_int_equal(before, after);
    gpu_close(g);
}

/* Copies, events and their time, one stream waiting for another. */
static void streams(void) {
    struct gpu *g;
    struct gpu_arena *a;
    struct gpu_stream *copy, *work;
    struct gpu_event *from, *to, *order;
    unsigned char *in, *out;
    void *d_p, *d_q;
    enum { N = 1 << 20 };
    ok(gpu_open(&g, 0));
    ok(gpu_arena_open(&a, g, 4 * N));
    ok(gpu_stream_open(&copy, g));
    ok(gpu_stream_open(&work, g));
    ok(gpu_event_open(&from, g, GPU_EVENT_TIMED));
    ok(gpu_event_open(&to, g, GPU_EVENT_TIMED));
    ok(gpu_event_open(&order, g, GPU_EVENT_ORDER));
    ok(gpu_host_alloc((void **)&in, g, N));
    ok(gpu_host_alloc((void **)&out, g, N));
    ok(gpu_alloc(&d_p, a, N, "p"));
    ok(gpu_alloc(&d_q, a, N, "q"));
    for (int i = 0; i < N; i++) in[i] = (unsigned char)(i * 7 + i / 256);
    ok(gpu_event_record(from, copy));
    ok(gpu_copy_in(copy, d_p, in, N));
    ok(gpu_event_record(to, copy));
    ok(gpu_event_record(order, copy));
    ok(gpu_stream_wait(work, order));
    ok(gpu_copy_on(work, d_q, d_p, N));
    ok(gpu_copy_out(work, out, d_q, N));
    ok(gpu_stream_sync(work));
    assert_memory_equal(in, out, N);
    double s = 0;
    bool done = false;
    ok(gpu_event_sync(to));
    ok(gpu_event_done(to, &done));
    assert_true(done);
    ok(gpu_event_seconds(&s, from, to));
    assert_true(s > 0 && s < 10);
    gpu_host_free(g, in), gpu_host_free(g, out);
    gpu_event_close(from), gpu_event_close(to), gpu_event_close(order);
    gpu_stream_close(copy), gpu_stream_close(work);
    gpu_arena_close(a);
    gpu_close(g);
}

#if defined(GPU_EMU)
/* Every call of opening, working and closing fails once: a code, no leak, still closable. Returns the calls before closing. */
static long open_work_close(long nth) {
    struct gpu *g = NULL;
    struct gpu_arena *a = NULL;
    struct gpu_stream *s = NULL;
    struct gpu_ops *o = NULL;
    struct ops_limits l = {.n_tok = 2, .cols = 64, .rows = 64, .n_head = 2, .n_kv = 1, .head_dim = 64, .n_ctx = 256};
    void *d_x = NULL;
    long before = emu_calls("any");
    int rc = gpu_open(&g, 0);
    if (!rc) rc = gpu_arena_open(&a, g, gpu_ops_scratch_bytes(&l) + 65536);
    if (!rc) rc = gpu_stream_open(&s, g);
    if (!rc) rc = gpu_ops_open(&o, g, a, s, &l);
    if (!rc) rc = gpu_alloc(&d_x, a, 4096, "x");
    if (!rc) rc = gpu_fill(s, d_x, 0, 4096);
    if (!rc) rc = gpu_ops_table(o)->add(gpu_ops_table(o), d_x, d_x, 100);
    if (!rc) rc = gpu_ops_check(o);
    long calls = emu_calls("any") - before;
    if (nth && rc != ERR_DEVICE && rc != ERR_BUDGET) fail_msg("call %ld failed, and the result is %d (%s)", nth, rc, err_text());
    if (!nth && rc) fail_msg("%s", err_text());
    if (s && !rc) emu_fail_clear();
    gpu_ops_close(o);
    gpu_stream_close(s);
    gpu_arena_close(a);
    gpu_close(g);
    emu_fail_clear();
    return calls;
}

static void every_call_may_fail(void **state) {
    (void)state;
    emu_reset(NULL);
    long calls = open_work_close(0);
    if (emu_leaks()) fail_msg("something was left open");
    for (long n = 1; n <= calls; n++) {
        emu_reset(NULL);
        emu_fail("any", n, 0, 0);
        open_work_close(n);
        if (emu_leaks()) fail_msg("call %ld failed and something was left open", n);
        emu_reset(NULL);
        emu_fail("any", n, 0, 1); /* the device is gone: nothing can be released, but closing returns */
        open_work_close(n);
    }
    emu_reset(NULL);
    open_work_close(0);
}

static void what_cannot_be_opened_says_why(void **state) {
    (void)state;
    struct gpu *g;
    int n = 1;
    emu_reset(NULL);
    emu_set_devices(0, 13000);
    ok(gpu_count(&n));
    assert_int_equal(n, 0);
    emu_reset(NULL);
    emu_set_devices(1, 11000);
    assert_int_equal(gpu_count(&n), ERR_DEVICE);
    assert_non_null(strstr(err_text(), "-dev none"));
    emu_set_devices(1, 13000);
    emu_reset(NULL);
    emu_fail("cudaFuncGetAttributes", 1, 209, 0); /* cudaErrorNoKernelImageForDevice */
    assert_int_equal(gpu_open(&g, 0), ERR_DEVICE);
    assert_non_null(strstr(err_text(), "was not built for"));
    assert_non_null(strstr(err_text(), "-DLONGHAUL_CUDA_ARCHS="));
    assert_non_null(strstr(err_text(), "-dev none"));
    struct emu_machine m;
    assert_int_equal(emu_machine_get(&m, "emu"), 0);
    static const struct {
        int sm;
        const char *says;
    } chips[] = {{61, "sm_61, the kernels need sm_70 or newer"}, {70, "-DLONGHAUL_CUDA_ARCHS=70 and CUDA 11.8 to 12.9,"}, {103, "-DLONGHAUL_CUDA_ARCHS=103,"}};
    for (int i = 0; i < 3; i++) {
        m.sm = chips[i].sm;
        emu_reset(&m);
        emu_fail("cudaFuncGetAttributes", 1, 209, 0);
        assert_int_equal(gpu_open(&g, 0), ERR_DEVICE);
        assert_non_null(strstr(err_text(), chips[i].says));
    }
    emu_reset(NULL);
}
#endif

ORDERS(devices)
ORDERS(streams)

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(devices_in_all_orders),
        cmocka_unit_test(streams_in_all_orders),
#if defined(GPU_EMU)
        cmocka_unit_test(every_call_may_fail),
        cmocka_unit_test(what_cannot_be_opened_says_why),
#endif
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
