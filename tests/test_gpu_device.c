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
        cmocka_unit_test(what_cannot_be_opened_says_why),
#endif
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
