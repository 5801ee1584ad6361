/* test_gpu_faults.c: every CUDA call of every function of gpu/gpu.h made to fail once, in several orders of streams: a code and a
 * sentence that names the call, nothing left open, a device that works on after a failure that it survives (out of memory is
 * ERR_BUDGET) and closes after one that it does not. On the emulated GPU only (GPU_EMU): a real one fails when it likes. */
#include "tests/support.h"

#include <stdio.h>

#ifndef GPU_EMU
int main(void) {
    printf("skipped: faults on demand need the emulated GPU\n");
    return 77;
}
#else

#include "core/kv.h"
#include "core/quant.h"
#include "core/strip.h"
#include "gpu/gpu.h"
#include "tests/gpu_orders.h"

#include <unistd.h>

enum { TOK = 3, DIM = 64, HEADS = 2, HEAD = 32, CTX = 256, EXPERTS = 4, USED = 2, ARENA = 4 << 20, PAGE = 4096 };
static const struct delta_shape delta = {1, 2, 16, DELTA_CONV, false};
static const struct ops_limits limits = {.n_tok = TOK, .cols = DIM, .rows = DIM, .n_head = HEADS, .n_kv = 1, .head_dim = HEAD,
                                         .n_ctx = CTX, .n_expert = EXPERTS, .n_expert_used = USED,
                                         .delta = {1, 2, 16, DELTA_CONV, false}};

/* All that can be open. */
struct open {
    struct gpu *g;
    struct gpu_arena *a;
    struct gpu_stream *s, *other;
    struct gpu_event *order, *from, *to;
    struct gpu_ops *o;
    struct gpu_flags *f;
    struct gpu_graph *q;
    struct kv *kv;
    unsigned char *pinned, *own; /* own: memory of ours that was pinned */
    void *mapped, *d_mapped;
    bool own_pinned;
    char *d;                     /* zeros */
};

/* Closers accept what never opened; own memory is unpinned before it is freed. */
static void close_all(struct open *x) {
    gpu_graph_close(x->q);
    gpu_flags_close(x->f);
    gpu_ops_close(x->o);
    gpu_event_close(x->order), gpu_event_close(x->from), gpu_event_close(x->to);
    gpu_stream_close(x->s), gpu_stream_close(x->other);
    if (x->own_pinned) gpu_unpin(x->g, x->own);
    free(x->own);
    if (x->g) gpu_host_free(x->g, x->pinned), gpu_host_free(x->g, x->mapped);
    kv_close(x->kv);
    gpu_arena_close(x->a);
    gpu_close(x->g);
    memset(x, 0, sizeof *x);
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = call;                                                                                                \
        if (rc_) return rc_;                                                                                           \
    } while (0)

static int open_all(struct open *x) {
    int n;
    size_t free_bytes;
    memset(x, 0, sizeof *x);
    TRY(gpu_count(&n));
    TRY(gpu_open(&x->g, 0));
    TRY(gpu_mem_free(x->g, &free_bytes));
    TRY(gpu_arena_open(&x->a, x->g, gpu_ops_scratch_bytes(&limits) + ARENA));
    TRY(gpu_stream_open(&x->s, x->g));
    TRY(gpu_stream_open(&x->other, x->g));
    TRY(gpu_event_open(&x->order, x->g, GPU_EVENT_ORDER));
    TRY(gpu_event_open(&x->from, x->g, GPU_EVENT_TIMED));
    TRY(gpu_event_open(&x->to, x->g, GPU_EVENT_TIMED));
    TRY(gpu_ops_open(&x->o, x->g, x->a, x->s, &limits));
    TRY(gpu_flags_open(&x->f, x->g, 1));
    TRY(gpu_host_alloc((void **)&x->pinned, x->g, PAGE));
    TRY(gpu_mapped_alloc(&x->mapped, &x->d_mapped, x->g, PAGE));
    x->own = aligned_alloc(PAGE, PAGE);
    TRY(gpu_pin(x->g, x->own, PAGE));
    x->own_pinned = true;
    TRY(gpu_alloc((void **)&x->d, x->a, ARENA / 2, "zeros"));
    return gpu_fill(x->s, x->d, 0, ARENA / 2);
}

/* Copies between two streams, with time. */
static int order_all(struct open *x) {
    double s;
    bool done;
    memset(x->pinned, 7, PAGE);
    memset(x->own, 1, PAGE);
    TRY(gpu_stream_sync(x->s)); /* the zeros */
    TRY(gpu_event_record(x->from, x->other));
    TRY(gpu_copy_in(x->other, x->d, x->pinned, PAGE));
    TRY(gpu_event_record(x->order, x->other));
    TRY(gpu_stream_wait(x->s, x->order));
    TRY(gpu_copy_on(x->s, x->d + PAGE, x->d, PAGE));
    TRY(gpu_copy_out(x->s, x->own, x->d + PAGE, PAGE));
    TRY(gpu_event_record(x->to, x->s));
    TRY(gpu_event_done(x->to, &done));
    TRY(gpu_event_sync(x->to));
    TRY(gpu_event_seconds(&s, x->from, x->to));
    assert_memory_equal(x->own, x->pinned, PAGE);
    return gpu_fill(x->s, x->d, 0, PAGE);
}

/* Every operation of the table, on zeros. */
static int ops_all(struct open *x) {
    static const int32_t rows[TOK] = {1, 0, 2};
    static const double freq[HEAD / 2] = {1};
    struct ops *t = gpu_ops_table(x->o);
    float *y = (float *)(void *)(x->d + ARENA / 4), *in = (float *)(void *)x->d; /* results, zeros */
    int32_t *ids = (int32_t *)(void *)(x->d + ARENA / 2 - PAGE);
    struct mat quantised = {x->d, QT_Q8_0, DIM, DIM}, plain = {x->d, QT_F16, DIM, DIM};
    struct kv_shape shape = {1, HEAD, HEAD, 0};
    struct kv_spec spec = {.n_layer = 1, .shapes = &shape, .n_ctx = CTX, .n_tok = TOK, .type_k = QT_Q8_0, .type_v = QT_F16};
    if (!x->kv) ok(kv_open(&x->kv, &spec));
    struct kv kv = *x->kv;
    struct kv_layer layer = kv.layers[0];
    size_t mark = gpu_arena_used(x->a);
    kv.layers = &layer;
    TRY(gpu_alloc((void **)&layer.base, x->a, layer.bytes, "KV"));
    struct matmul m = {.x = in, .cols = DIM, .n_tok = TOK, .n = 2, .out = {{&quantised, y, NULL}, {&plain, y, in}}};
    struct rope_args r = {.x = y, .n_tok = TOK, .n_head = HEADS, .head_dim = HEAD, .norm = in, .eps = 1, .cs = in, .n_rot = HEAD};
    struct attn_args at = {.o = y, .q = in, .kv = &kv, .n_tok = TOK, .n_head = HEADS, .scale = 1};
    struct experts_args e = {.y = y, .x = in, .ids = ids, .weight = in, .n_tok = TOK, .n_used = USED, .n_expert = EXPERTS,
                             .gate = quantised, .up = plain, .down = quantised};
    struct delta_args d = {.y = y, .u = y + 4096, .z = in, .b = in, .a = in, .conv = in, .dt = in, .rate = in, .norm = in,
                           .last = y + 8192, .s = y + 16384, .shape = delta, .n_tok = TOK, .eps = 1};
    int rc = t->embed(t, y, &quantised, rows, TOK, 1);
    if (!rc) rc = t->gather(t, y, in, rows, TOK, DIM);
    if (!rc) rc = t->rmsnorm(t, y, in, in, TOK, DIM, 1);
    if (!rc) rc = t->add(t, y, in, DIM);
    if (!rc) rc = t->matmul(t, &m);
    if (!rc) rc = t->rope_table(t, y, freq, HEAD / 2, 1, 0, TOK);
    if (!rc) rc = t->rope(t, &r);
    if (!rc) rc = t->kv_put(t, &kv, 0, 0, TOK, in, in);
    if (!rc) rc = t->attn(t, &at);
    if (!rc) rc = t->glu(t, y, in, in, DIM, ACT_GELU);
    if (!rc) rc = t->add_gated(t, y, in, in, TOK, DIM);
    if (!rc) rc = t->softcap(t, y, DIM, 30);
    if (!rc) rc = t->route(t, ids, y, in, TOK, EXPERTS, USED, true);
    if (!rc) rc = t->experts(t, &e);
    if (!rc) rc = t->delta(t, &d);
    if (!rc) rc = gpu_ops_check(x->o);
    if (!rc) gpu_arena_release(x->a, mark); /* else the device may not be done with it */
    return rc;
}

static void nothing(void *arg) { (void)arg; }

static int handover_all(struct open *x) {
    double s;
    TRY(gpu_flag_signal(x->f, 0, 1, x->s));
    TRY(gpu_flag_wait(x->f, 0, 1, GPU_FLAG_RESET, x->s));
    TRY(gpu_call_host(x->s, nothing, NULL));
    TRY(gpu_graph_begin(x->s));
    int rc = gpu_fill(x->s, x->d, 0, PAGE), end = gpu_graph_end(&x->q, x->s);
    if (rc || end) return rc ? rc : end;
    TRY(gpu_graph_launch(x->q, x->s));
    TRY(gpu_probe_gemm(&s, x->a, x->s, 16, 16, 16, 1));
    return gpu_stream_sync(x->s);
}

static int work_all(struct open *x) {
    TRY(order_all(x));
    TRY(ops_all(x));
    return handover_all(x);
}

static int everything(struct open *x) {
    TRY(open_all(x));
    return work_all(x);
}

/* --- each call by its place ------------------------------------------------------------------------------------------------- */

static const struct gpu_order orders[] = {{EMU_EAGER, 0, 1}, {EMU_LAZY, 1, 2}, {EMU_RANDOM, 2, 7}, {EMU_COPY_FIRST, 0, 3}};
enum { N_ORDER = sizeof orders / sizeof *orders };

/* Calls that release something: their failure is nobody's. */
static long releases(void) { return emu_calls("cudaGraphDestroy") + emu_calls("cublasDestroy") + emu_calls("cudaEventDestroy"); }

/* *quiet: those of them whose failure is not reported. */
static long calls_of_everything(long *quiet) {
    struct open x;
    emu_reset(NULL);
    long before = emu_calls("any"), quiet_before = releases();
    ok(everything(&x));
    long calls = emu_calls("any") - before;
    *quiet = releases() - quiet_before;
    close_all(&x);
    if (emu_leaks()) fail_msg("something was left open");
    return calls;
}

static void every_call_may_fail(void **state) {
    (void)state;
    struct open x;
    long quiet, passed = 0, calls = calls_of_everything(&quiet);
    if (calls < 80) fail_msg("only %ld calls", calls);
    for (long n = 1; n <= calls; n++) {
        gpu_order_set(&orders[n % N_ORDER]);
        emu_fail("any", n, 0, 0);
        int rc = everything(&x);
        if (rc == 0) passed++;
        else if (rc != ERR_DEVICE && rc != ERR_BUDGET && rc != ERR_UNSUPPORTED) fail_msg("call %ld failed, and the result is %d (%s)", n, rc, err_text());
        if (rc && !strstr(err_text(), "GPU")) fail_msg("call %ld: %s", n, err_text());
        close_all(&x);
        if (emu_leaks()) fail_msg("call %ld failed (%s) and something was left open", n, err_text());
        ok(everything(&x)); /* the device works on */
        close_all(&x);
        if (emu_leaks()) fail_msg("after call %ld failed something was left open", n);
    }
    if (passed != quiet) fail_msg("%ld failures were not noticed, %ld calls release something", passed, quiet);
}

/* The device is gone after any call: whatever is called then says so at once, and closing returns. */
static void a_lost_device_can_be_closed(void **state) {
    (void)state;
    struct open x;
    long quiet, calls = calls_of_everything(&quiet);
    for (long n = 1; n <= calls; n++) {
        gpu_order_set(&orders[n % N_ORDER]);
        emu_fail("any", n, 719, 1); /* cudaErrorLaunchFailure */
        int rc = everything(&x);
        if (rc != ERR_DEVICE) fail_msg("call %ld lost the device, and the result is %d (%s)", n, rc, err_text());
        if (x.g && x.o && x.own_pinned) {
            long before = emu_calls("any");
            assert_int_equal(order_all(&x), ERR_DEVICE);
            assert_int_equal(ops_all(&x), ERR_DEVICE);
            if (strstr(err_text(), "failed earlier") && emu_calls("any") - before > 0)
                fail_msg("call %ld lost the device, and %ld calls were made after that", n, emu_calls("any") - before);
        }
        close_all(&x);
    }
    emu_reset(NULL);
}

/* --- each call by its name --------------------------------------------------------------------------------------------------- */

static void failures_name_the_call(void **state) {
    (void)state;
    static const char *const names[] = {"cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cudaStreamCreateWithFlags",
                                        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize",
                                        "cudaEventElapsedTime", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize",
                                        "cudaLaunchHostFunc", "cudaGraphLaunch", "cudaStreamBeginCapture", "cudaStreamEndCapture",
                                        "cudaHostGetDevicePointer"};
    enum { INVALID = 1 }; /* cudaErrorInvalidValue: the device works on; out of memory for the first five */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct open x;
        emu_reset(NULL);
        emu_fail(names[i], 1, i < 5 ? 0 : INVALID, 0);
        int rc = everything(&x);
        if (rc != ERR_DEVICE && rc != ERR_BUDGET) fail_msg("%s failed, and the result is %d", names[i], rc);
        if (!strstr(err_text(), names[i]) || !strstr(err_text(), "MiB device memory are free"))
            fail_msg("%s failed, and the sentence is: %s", names[i], err_text());
        close_all(&x);
    }
    static const char *const ops[] = {"embed", "gather", "rmsnorm", "add", "matmul", "rope_table", "rope", "kv_put", "attention"};
    long first = 0; /* the first launch of each operation, in the order of ops_all */
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        struct open x;
        for (bool found = false; !found;) {
            emu_reset(NULL);
            ok(open_all(&x));
            emu_fail("launch", ++first, 0, 0);
            if (ops_all(&x) != ERR_DEVICE) fail_msg("no launch of %s failed", ops[i]);
            found = strstr(err_text(), ops[i]) != NULL;
            emu_fail_clear();
            close_all(&x);
        }
    }
    emu_reset(NULL);
}

/* --- memory -------------------------------------------------------------------------------------------------------------------- */

static void out_of_memory_leaves_the_device_usable(void **state) {
    (void)state;
    struct open x;
    struct gpu_arena *big, *rest;
    struct gpu_ops *o = NULL;
    struct ops_limits huge = limits;
    void *p;
    size_t before, after;
    emu_reset(NULL);
    ok(open_all(&x));
    ok(gpu_mem_free(x.g, &before));
    assert_int_equal(gpu_arena_open(&big, x.g, before + 1), ERR_BUDGET);
    ok(gpu_arena_open(&rest, x.g, before / 2));
    assert_int_equal(gpu_arena_open(&big, x.g, before / 2 + PAGE), ERR_BUDGET);
    gpu_arena_close(rest);
    ok(gpu_mem_free(x.g, &after));
    assert_int_equal(before, after);
    size_t used = gpu_arena_used(x.a);
    assert_int_equal(gpu_alloc(&p, x.a, ARENA, "more than is left"), ERR_BUDGET);
    huge.n_ctx = INT64_C(1) << 40;
    assert_int_equal(gpu_ops_open(&o, x.g, x.a, x.s, &huge), ERR_BUDGET);
    huge.n_ctx = INT64_MAX;
    assert_int_equal(gpu_ops_open(&o, x.g, x.a, x.s, &huge), ERR_BUDGET);
    assert_int_equal(gpu_arena_used(x.a), used);
    emu_fail("cudaHostAlloc", 1, 0, 0);
    assert_int_equal(gpu_host_alloc(&p, x.g, PAGE), ERR_BUDGET);
    emu_fail("cudaHostRegister", 1, 0, 0);
    gpu_unpin(x.g, x.own);
    assert_int_equal(gpu_pin(x.g, x.own, PAGE), ERR_BUDGET);
    ok(gpu_pin(x.g, x.own, PAGE));
    ok(work_all(&x));
    close_all(&x);
    if (emu_leaks()) fail_msg("something was left open");
}

int main(int argc, char **argv) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_call_may_fail),
        cmocka_unit_test(a_lost_device_can_be_closed),
        cmocka_unit_test(failures_name_the_call),
        cmocka_unit_test(out_of_memory_leaves_the_device_usable),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(t, NULL, NULL);
}
#endif
