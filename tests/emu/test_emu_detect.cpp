/* test_emu_detect.cpp: planted bugs, each must be found. Those that a device leaves undefined end in a report; those that
 * only give wrong numbers must give them in the stated policies or orders. */
#include "tests/emu/check.h"

#include "gpu/compat.h"
#include "gpu/ptx.h"

#include <cuda.h>

#include <math.h>

/* --- kernels with bugs --------------------------------------------------------------------------------------------------------- */

static __global__ void divergent_k(int *p) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    p[threadIdx.x] = 1;
}
static __global__ void partial_k(int *p) {
    if (threadIdx.x < 32) {
        p[threadIdx.x] = 1;
        __syncthreads();
    }
}
static __global__ void early_return_k(int *p, int n) {
    if ((int)threadIdx.x >= n) return;
    __syncthreads();
    p[threadIdx.x] = 1;
}
static __global__ void missing_lane_k(int *p) {
    if (threadIdx.x == 5) return;
    p[threadIdx.x] = __shfl_xor_sync(FULL_MASK, (int)threadIdx.x, 1);
}
static __global__ void masks_meet_k(int *p) {
    unsigned mask = threadIdx.x < 16 ? 0xffffu : FULL_MASK;
    p[threadIdx.x] = __any_sync(mask, 1);
}
static __global__ void two_ops_k(int *p) {
    if (threadIdx.x % 2)
        p[threadIdx.x] = (int)__ballot_sync(FULL_MASK, 1);
    else
        p[threadIdx.x] = __shfl_sync(FULL_MASK, 1, 0);
}
static __global__ void crossed_k(int *p) {
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __syncthreads();
    p[threadIdx.x] = 1;
}
static __global__ void short_block_k(int *p) { p[threadIdx.x] = (int)warp_sum(1.0f); }
/* Reverses 256 values through shared memory; without the barrier. */
static __global__ void reverse_k(int *p, int barrier) {
    SMEM_ARRAY(int, s, [256]);
    s[threadIdx.x] = p[threadIdx.x];
    if (barrier) __syncthreads();
    p[threadIdx.x] = s[255 - threadIdx.x];
}
/* Neighbours inside a warp; without __syncwarp. */
static __global__ void neighbour_k(int *p, int sync) {
    SMEM_ARRAY(int, s, [32]);
    s[threadIdx.x] = p[threadIdx.x];
    if (sync) __syncwarp();
    p[threadIdx.x] = s[threadIdx.x ^ 1];
}
static __global__ void async_k(int4 *y, const int4 *x, int wait) {
    SMEM_ARRAY(int4, s, [32]);
    s[threadIdx.x] = make_int4(7, 7, 7, 7);
    __syncwarp();
    cp_async16(&s[threadIdx.x], &x[threadIdx.x]);
    cp_async_commit();
    if (wait == 1) cp_async_wait<0>();
    y[threadIdx.x] = s[threadIdx.x];
    if (wait == 2) cp_async_wait<0>();
}
static __global__ void fill_k(float *p, int n, float v) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] = v;
}
static __global__ void add_k(float *y, const float *x, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = x[i] + 1.0f;
}
static __global__ void smem_overrun_k(int n) {
    SMEM_ARRAY(int, s, [32]);
    int *p = s;
    for (int i = 0; i < n; i++) p[i] = 1;
}
static __global__ void big_smem_k() {
    SMEM_ARRAY(char, a, [32768]);
    SMEM_ARRAY(char, b, [32768]);
    a[0] = b[0] = 1;
}
static __global__ void dyn_smem_k(int n) {
    SMEM_DYN(char, s);
    if (threadIdx.x == 0) s[n - 1] = 1;
}
struct table { float *p; };
static __global__ void pointer_in_memory_k(const table *t) { t->p[threadIdx.x] = 1; }
static __global__ void loaded_pointer_k(const table *t) { GPU_LOADPTR(t->p)[threadIdx.x] = 1; }
#ifndef __SANITIZE_ADDRESS__
static __global__ void big_frame_k(float *p, int at) {
    volatile char big[100000];
    big[at] = 1;
    p[0] = big[at];
}
#endif

#define LAUNCH(k, threads, s, ...)                                                                                     \
    do {                                                                                                               \
        GPU_COST(1, 1, GPU_UNIT_F32);                                                                                  \
        OK(GPU_LAUNCH(k, dim3(1), dim3(threads), 0, s, __VA_ARGS__));                                                  \
    } while (0)

static void one_kernel(void (*k)(int *), unsigned threads) {
    cudaStream_t s = new_stream();
    LAUNCH(k, threads, s, device<int>(256));
    OK(cudaStreamSynchronize(s));
}
static void divergent() { one_kernel(divergent_k, 64); }
static void partial() { one_kernel(partial_k, 64); }
static void missing_lane() { one_kernel(missing_lane_k, 32); }
static void masks_meet() { one_kernel(masks_meet_k, 32); }
static void two_ops() { one_kernel(two_ops_k, 32); }
static void crossed() { one_kernel(crossed_k, 32); }
static void short_block() { one_kernel(short_block_k, 40); }
static void early_return() {
    cudaStream_t s = new_stream();
    LAUNCH(early_return_k, 64, s, device<int>(64), 33);
    OK(cudaStreamSynchronize(s));
}

/* Whether k on 0..n-1 gives what it gives with its synchronisation in place. */
static bool same_as_synchronised(void (*k)(int *, int), int n) {
    cudaStream_t s = new_stream();
    int *d = device<int>((size_t)n), *h = pinned<int>((size_t)n), *want = pinned<int>((size_t)n);
    for (int sync = 1; sync >= 0; sync--) {
        int *out = sync ? want : h;
        for (int i = 0; i < n; i++) out[i] = i;
        upload(d, out, (size_t)n * 4, s);
        LAUNCH(k, (unsigned)n, s, d, sync);
        download(out, d, (size_t)n * 4, s);
        OK(cudaStreamSynchronize(s));
    }
    return !memcmp(h, want, (size_t)n * 4);
}
static void missing_barrier() {
    for (int order = 0; order < 3; order++) {
        emu_set_order(order);
        CHECK(!same_as_synchronised(reverse_k, 256));
        CHECK(!same_as_synchronised(neighbour_k, 32));
    }
}

static bool async_is_right(int wait) {
    cudaStream_t s = new_stream();
    int4 *x = device<int4>(32), *y = device<int4>(32), *h = pinned<int4>(32);
    for (int i = 0; i < 32; i++) h[i] = make_int4(i, i, i, i);
    upload(x, h, 512, s);
    LAUNCH(async_k, 32, s, y, x, wait);
    download(h, y, 512, s);
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < 32; i++)
        if (h[i].x != i || h[i].w != i) return false;
    return true;
}
static void async_waits() {
    CHECK(async_is_right(1));
    CHECK(!async_is_right(2)); /* read before the wait */
}
static void async_never_waited() { async_is_right(0); }

static void bounds(int n, int alloc) {
    cudaStream_t s = new_stream();
    float *d = device<float>((size_t)alloc);
    GPU_COST(1, 1, GPU_UNIT_F32);
    OK(GPU_LAUNCH(fill_k, dim3((unsigned)(n + 255) / 256), dim3(256), 0, s, d, n, 1.0f));
    OK(cudaStreamSynchronize(s));
}
static void bounds_near() { bounds(101, 100); }
static void bounds_far() { bounds(4096, 100); }
static void bounds_shared() {
    cudaStream_t s = new_stream();
    LAUNCH(smem_overrun_k, 1, s, 34);
    OK(cudaStreamSynchronize(s));
}
static void bounds_piece() { /* two pieces of one allocation: the emulator knows them, a parameter in neither is refused */
    cudaStream_t s = new_stream();
    float *d = device<float>(4096);
    emu_piece_add(d, 1024);
    emu_piece_add(d + 1024, 1024);
    CHECK(cudaMemsetAsync(d + 128, 0, 1024, s) == cudaErrorInvalidValue);
    OK(cudaMemsetAsync(d + 128, 0, 512, s));
    emu_piece_del(d);
    CHECK(cudaMemsetAsync(d + 128, 0, 512, s) == cudaErrorInvalidValue);
    emu_pieces_del(d, 4096);
    OK(cudaMemsetAsync(d + 1024, 0, 512, s));
    emu_pieces_del(d + 1000, 4096);
    CHECK(cudaMemsetAsync(d + 1024, 0, 512, s) == cudaErrorInvalidValue);
    OK(cudaStreamSynchronize(s));
}
static void piece_in_use() {
    emu_set_policy(EMU_LAZY, 1);
    cudaStream_t s = new_stream();
    float *d = device<float>(4096);
    emu_piece_add(d, 1024);
    OK(cudaMemsetAsync(d, 0, 512, s));
    emu_pieces_del(d, 4096);
}
static void bounds_copy() {
    cudaStream_t s = new_stream();
    float *d = device<float>(100), *h = pinned<float>(200);
    CHECK(cudaMemcpyAsync(d, h, 404, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(d + 50, h, 204, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(d, h, 400, cudaMemcpyDeviceToHost, s) == cudaErrorInvalidValue); /* direction */
    OK(cudaMemcpyAsync(d, h, 400, cudaMemcpyHostToDevice, s));
    OK(cudaStreamSynchronize(s));
}

static void host_pointer() {
    cudaStream_t s = new_stream();
    static float host[256];
    GPU_LAUNCH(fill_k, dim3(1), dim3(256), 0, s, host, 256, 1.0f);
}
static void freed_pointer() {
    cudaStream_t s = new_stream();
    float *d = device<float>(256);
    OK(cudaFree(d));
    GPU_LAUNCH(fill_k, dim3(1), dim3(256), 0, s, d, 256, 1.0f);
}
static void device_pointer_on_host() {
    volatile float *d = device<float>(256);
    d[3] = 1;
}
template <class K> static void with_table(K k) {
    cudaStream_t s = new_stream();
    table *d = device<table>(1), *h = pinned<table>(1);
    h->p = device<float>(32);
    upload(d, h, sizeof *h, s);
    LAUNCH(k, 32, s, d);
    OK(cudaStreamSynchronize(s));
}
static void pointer_in_memory() { with_table(pointer_in_memory_k); }
static void loaded_pointer() { with_table(loaded_pointer_k); }
#ifndef __SANITIZE_ADDRESS__ /* it has larger stacks and a report of its own */
static void stack_overflow() {
    cudaStream_t s = new_stream();
    LAUNCH(big_frame_k, 1, s, device<float>(1), 5);
    OK(cudaStreamSynchronize(s));
}
#endif

static void big_smem() {
    cudaStream_t s = new_stream();
    GPU_COST(1, 1, GPU_UNIT_F32);
    OK(GPU_LAUNCH(big_smem_k, dim3(1), dim3(1), 0, s));
    OK(cudaStreamSynchronize(s));
}
static void dynamic_smem() {
    cudaStream_t s = new_stream();
    auto launch = [&](int n) {
        GPU_COST(1, 1, GPU_UNIT_F32);
        return GPU_LAUNCH(dyn_smem_k, dim3(1), dim3(32), (size_t)n, s, n);
    };
    OK(launch(48 * 1024));
    CHECK(launch(48 * 1024 + 1) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(dyn_smem_k, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20) == cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(dyn_smem_k, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024));
    OK(launch(64 * 1024));
    CHECK(launch(64 * 1024 + 1) == cudaErrorInvalidValue);
    OK(cudaStreamSynchronize(s));
}
static void shapes() {
    cudaStream_t s = new_stream();
    float *d = device<float>(1);
    auto launch = [&](dim3 g, dim3 b) {
        GPU_COST(1, 1, GPU_UNIT_F32);
        return GPU_LAUNCH(fill_k, g, b, 0, s, d, 0, 1.0f);
    };
    OK(launch(dim3(1, 1, 65535), dim3(1)));
    CHECK(launch(dim3(1, 65536), dim3(1)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1, 1, 65536), dim3(1)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(0), dim3(1)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1), dim3(0)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1), dim3(1025)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1), dim3(32, 33)) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1), dim3(1, 1, 65)) == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    OK(launch(dim3(70000), dim3(1)));
    OK(cudaStreamSynchronize(s));
}

/* --- host code with bugs --------------------------------------------------------------------------------------------------------- */

/* y = x + 1 on the second stream after an upload on the first, with or without the event between. */
static bool pipeline_is_right(bool wait, bool sync) {
    const int n = 256;
    cudaStream_t copy = new_stream(), work = new_stream();
    cudaEvent_t ready = new_event();
    float *x = device<float>(n), *y = device<float>(n), *h = pinned<float>(n), *out = pinned<float>(n);
    for (int i = 0; i < n; i++) h[i] = (float)i;
    LAUNCH(fill_k, 256, work, x, n, 50.0f);
    OK(cudaStreamSynchronize(work));
    upload(x, h, n * 4, copy);
    OK(cudaEventRecord(ready, copy));
    if (wait) OK(cudaStreamWaitEvent(work, ready, 0));
    LAUNCH(add_k, 256, work, y, x, n);
    download(out, y, n * 4, work);
    if (sync) OK(cudaStreamSynchronize(work));
    bool right = true;
    for (int i = 0; i < n; i++) right = right && out[i] == (float)i + 1;
    OK(cudaStreamSynchronize(copy));
    OK(cudaStreamSynchronize(work));
    return right;
}
static void missing_event_wait() {
    int wrong = 0;
    for (emu_policy p : ALL_POLICIES)
        for (uint64_t seed = 1; seed <= (p == EMU_RANDOM ? 20 : 1); seed++) {
            emu_reset(nullptr);
            emu_set_policy(p, seed);
            CHECK(pipeline_is_right(true, true));
            bool right = pipeline_is_right(false, true);
            if (p == EMU_LAZY || p == EMU_COMPUTE_FIRST) CHECK(!right);
            wrong += !right;
        }
    CHECK(wrong >= 5); /* random finds it as well */
}
static void read_before_sync() {
    for (emu_policy p : ALL_POLICIES) {
        emu_reset(nullptr);
        emu_set_policy(p, 3);
        CHECK(!pipeline_is_right(true, false));
    }
}
static void overwritten_source() { /* a copy reads its source when it runs */
    emu_set_policy(EMU_LAZY, 1);
    cudaStream_t s = new_stream();
    float *d = device<float>(1), *h = pinned<float>(1), *out = pinned<float>(1);
    h[0] = 1;
    upload(d, h, 4, s);
    h[0] = 2;
    download(out, d, 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(out[0] == 2);
}
static void pageable() {
    cudaStream_t s = new_stream();
    float *d = device<float>(64), h[64] = {1, 2, 3}, out[64] = {};
    emu_stats before, after;
    emu_stats_get(&before);
    double t0 = emu_now();
    upload(d, h, sizeof h, s);
    h[0] = 9; /* allowed: the call has returned */
    download(out, d, sizeof out, s);
    CHECK(out[0] == 1 && out[2] == 3);
    emu_stats_get(&after);
    CHECK(after.pageable_copies == before.pageable_copies + 2);
    CHECK(emu_now() - t0 > 2 * 16e-6); /* and it waited for both */
}
static void leak() {
    cudaStream_t s = new_stream();
    cudaEvent_t e = new_event();
    float *d = device<float>(10), *h = pinned<float>(10);
    CHECK(emu_leaks() == 4);
    OK(cudaFree(d));
    OK(cudaFreeHost(h));
    OK(cudaEventDestroy(e));
    CHECK(emu_leaks() == 1);
    OK(cudaStreamDestroy(s));
    CHECK(emu_leaks() == 0);
}
static void default_stream() {
    float *d = device<float>(1), *h = pinned<float>(1);
    CHECK(cudaMemcpyAsync(d, h, 4, cudaMemcpyHostToDevice, nullptr) == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemcpy(d, h, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidResourceHandle);
    CHECK(GPU_LAUNCH(fill_k, dim3(1), dim3(1), 0, (cudaStream_t) nullptr, d, 1, 1.0f) == cudaErrorInvalidResourceHandle);
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s) == cudaErrorInvalidValue); /* it would wait for the default stream */
}
static void double_free() {
    float *d = device<float>(1);
    OK(cudaFree(d));
    CHECK(cudaFree(d) == cudaErrorInvalidValue);
    CHECK(cudaFree(device<float>(1000) + 1) == cudaErrorInvalidValue);
}

/* --- hand-over flags ---------------------------------------------------------------------------------------------------------------- */

static CUdeviceptr address(const void *p) { return (CUdeviceptr)(uintptr_t)p; }

static void stream_wait_forever() {
    cudaStream_t s = new_stream();
    uint32_t *flag = pinned<uint32_t>(1, cudaHostAllocMapped);
    *flag = 0;
    CHECK(!cuStreamWaitValue32(s, address(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cudaStreamSynchronize(s));
}
static void host_wait_forever() {
    uint32_t *flag = pinned<uint32_t>(1, cudaHostAllocMapped);
    *flag = 0;
    emu_flag_wait(flag, 1);
}
static void wait_in_circle() { /* each stream waits for what the other would write afterwards */
    emu_set_policy(EMU_LAZY, 1);
    cudaStream_t a = new_stream(), b = new_stream();
    uint32_t *f = pinned<uint32_t>(2, cudaHostAllocMapped);
    f[0] = f[1] = 0;
    CHECK(!cuStreamWaitValue32(a, address(&f[0]), 1, CU_STREAM_WAIT_VALUE_GEQ));
    CHECK(!cuStreamWriteValue32(a, address(&f[1]), 1, 0));
    CHECK(!cuStreamWaitValue32(b, address(&f[1]), 1, CU_STREAM_WAIT_VALUE_GEQ));
    CHECK(!cuStreamWriteValue32(b, address(&f[0]), 1, 0));
    OK(cudaStreamSynchronize(b));
}

/* One step: the device asks (payload q, flag 0), the host answers (payload r, flag 1), the device uses the answer. */
struct handover {
    cudaStream_t s;
    uint32_t *flag;
    float *q, *r, *d_in, *d_out, *out;
};
static void handover_open(handover *h) {
    h->s = new_stream();
    h->flag = pinned<uint32_t>(2, cudaHostAllocMapped);
    h->flag[0] = h->flag[1] = 0;
    h->q = pinned<float>(64, cudaHostAllocMapped);
    h->r = pinned<float>(64, cudaHostAllocMapped);
    h->d_in = device<float>(64);
    h->d_out = device<float>(64);
    h->out = pinned<float>(64);
    LAUNCH(fill_k, 64, h->s, h->d_in, 64, 4.0f);
}
enum step_bug { NO_BUG, NO_RESET, NO_SIGNAL_WAIT };
static void handover_queue(handover *h, step_bug bug) {
    LAUNCH(add_k, 64, h->s, h->q, h->d_in, 64); /* q = in + 1 */
    CHECK(!cuStreamWriteValue32(h->s, address(&h->flag[0]), 1, 0));
    CUstreamBatchMemOpParams ops[2] = {};
    ops[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    ops[0].waitValue.address = address(&h->flag[1]);
    ops[0].waitValue.value = 1;
    ops[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    ops[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    ops[1].writeValue.address = address(&h->flag[1]);
    if (bug != NO_SIGNAL_WAIT) CHECK(!cuStreamBatchMemOp(h->s, bug == NO_RESET ? 1 : 2, ops, 0));
    LAUNCH(add_k, 64, h->s, h->d_out, h->r, 64);
    download(h->out, h->d_out, 256, h->s);
}
static void handover_answer(handover *h, float add) {
    emu_flag_wait(&h->flag[0], 1);
    for (int i = 0; i < 64; i++) CHECK(h->q[i] == 5.0f);
    for (int i = 0; i < 64; i++) h->r[i] = h->q[i] + add;
    emu_flag_store(&h->flag[0], 0);
    emu_flag_store(&h->flag[1], 1);
}
static void handover_works() {
    for (emu_policy p : ALL_POLICIES) {
        emu_reset(nullptr);
        emu_set_policy(p, 5);
        handover h;
        handover_open(&h);
        for (int step = 0; step < 3; step++) {
            handover_queue(&h, NO_BUG);
            handover_answer(&h, (float)step);
            OK(cudaStreamSynchronize(h.s));
            for (int i = 0; i < 64; i++) CHECK(h.out[i] == 6.0f + (float)step);
        }
    }
}
static void payload_poisoned() { /* read before the signal was waited for, on either side */
    for (emu_policy p : ALL_POLICIES) {
        emu_reset(nullptr);
        emu_set_policy(p, 5);
        handover h;
        handover_open(&h);
        OK(cudaStreamSynchronize(h.s));
        for (int i = 0; i < 64; i++) h.q[i] = -1;
        LAUNCH(add_k, 64, h.s, h.q, h.d_in, 64);
        cudaStreamQuery(h.s);
        CHECK(h.q[0] != 5.0f);
        OK(cudaStreamSynchronize(h.s));
        CHECK(h.q[0] == 5.0f);
        emu_reset(nullptr);
        emu_set_policy(p, 5);
        handover_open(&h);
        handover_queue(&h, NO_SIGNAL_WAIT);
        handover_answer(&h, 0);
        OK(cudaStreamSynchronize(h.s));
        CHECK(isnan(h.out[0]));
    }
}
static void replay(step_bug bug) {
    handover h;
    handover_open(&h);
    OK(cudaStreamSynchronize(h.s));
    cudaGraph_t g;
    cudaGraphExec_t e;
    OK(cudaStreamBeginCapture(h.s, cudaStreamCaptureModeThreadLocal));
    handover_queue(&h, bug);
    OK(cudaStreamEndCapture(h.s, &g));
    OK(cudaGraphInstantiate(&e, g, 0));
    for (int step = 0; step < 3; step++) {
        OK(cudaGraphLaunch(e, h.s));
        handover_answer(&h, (float)step);
        OK(cudaStreamSynchronize(h.s));
        for (int i = 0; i < 64; i++) CHECK(h.out[i] == 6.0f + (float)step);
    }
    OK(cudaGraphExecDestroy(e));
    OK(cudaGraphDestroy(g));
}
static void replay_works() {
    for (emu_policy p : ALL_POLICIES) {
        emu_reset(nullptr);
        emu_set_policy(p, 5);
        replay(NO_BUG);
    }
}
static void replay_without_reset() { replay(NO_RESET); }

/* Where the address sanitizer sees the access first, the report is its own. */
#ifdef __SANITIZE_ADDRESS__
#define OR_ASAN(text) "AddressSanitizer"
#else
#define OR_ASAN(text) text
#endif

static const test_case cases[] = {
    {"divergent barrier", divergent, "divergent barrier: __syncthreads"},
    {"barrier of some", partial, "ends while 32 threads wait in __syncthreads"},
    {"early return", early_return, "__syncthreads"},
    {"missing lane", missing_lane, "__shfl_sync"},
    {"masks meet", masks_meet, "lanes 0000ffff of mask ffffffff have already ended"},
    {"two operations meet", two_ops, "__ballot_sync, mask ffffffff, meets __shfl_sync"},
    {"crossed barriers", crossed, "threads 16..31: __syncthreads at"},
    {"lanes that do not exist", short_block, "names lanes that the block does not have"},
    {"missing barrier", missing_barrier, nullptr},
    {"cp.async read early", async_waits, nullptr},
    {"cp.async never waited", async_never_waited, "never waited for"},
    {"bounds: one past", bounds_near, OR_ASAN("out of bounds: byte 400 of the allocation of 400 bytes")},
    {"bounds: far", bounds_far, OR_ASAN("out of bounds or freed device memory")},
    {"bounds: shared", bounds_shared, OR_ASAN("shared array s was written")},
    {"bounds: pieces", bounds_piece, nullptr},
    {"piece in use", piece_in_use, "is given back while memset"},
    {"bounds: copies", bounds_copy, nullptr},
    {"host pointer in a kernel", host_pointer, "kernel fill_k, parameter 0: host pointer"},
    {"freed pointer in a kernel", freed_pointer, "is in no allocation"},
    {"device pointer on the host", device_pointer_on_host, OR_ASAN("host code used a device pointer")},
    {"pointer in device memory", pointer_in_memory, OR_ASAN("needs GPU_LOADPTR")},
    {"loaded pointer", loaded_pointer, nullptr},
#ifndef __SANITIZE_ADDRESS__
    {"stack overflow", stack_overflow, "kernel big_frame_k"},
#endif
    {"static shared memory", big_smem, "static shared memory is 65536 bytes"},
    {"dynamic shared memory", dynamic_smem, nullptr},
    {"launch shapes", shapes, nullptr},
    {"missing event wait", missing_event_wait, nullptr},
    {"read before sync", read_before_sync, nullptr},
    {"source overwritten", overwritten_source, nullptr},
    {"pageable copies", pageable, nullptr},
    {"leak", leak, nullptr},
    {"default stream", default_stream, nullptr},
    {"double free", double_free, nullptr},
    {"stream waits for ever", stream_wait_forever, "waits for something that nothing can bring about"},
    {"host waits for ever", host_wait_forever, "wait for a flag waits for something that nothing can bring about"},
    {"waits in a circle", wait_in_circle, "waits for flag"},
    {"hand-over", handover_works, nullptr},
    {"payload before the signal", payload_poisoned, nullptr},
    {"graph replay", replay_works, nullptr},
    {"graph replay without reset", replay_without_reset, "graph replayed without reset"},
};

int main(int argc, char **argv) { return run_cases(cases, sizeof cases / sizeof *cases, argc, argv); }
