/* test_emu_run.cpp: what correct programs get: results of kernels in every order and policy, memory and its limits, errors
 * on demand, events, host functions, graphs, cuBLAS. */
#include "tests/emu/check.h"
#include "tests/emu/demo.h"

#include "gpu/compat.h"
#include "gpu/ptx.h"

#include <cublas_v2.h>
#include <mma.h>

#include <math.h>

#include <functional>
#include <vector>

static float noise(int i) { return (float)((i * 37 + i / 7 * 11) % 129 - 64) / 64.0f; }

static double worst(const float *got, const std::vector<double> &want) {
    double max_want = 0, bad = 0;
    for (size_t i = 0; i < want.size(); i++) {
        max_want = fmax(max_want, fabs(want[i]));
        bad = isnan(got[i]) ? INFINITY : fmax(bad, fabs(got[i] - want[i]));
    }
    return bad / max_want;
}

/* Runs the same work in all policies, orders and with one and two workers. */
static void everywhere(const std::function<void()> &work) {
    for (emu_policy p : ALL_POLICIES)
        for (int order = 0; order < 3; order++) {
            emu_reset(nullptr);
            emu_set_policy(p, (uint64_t)order + 7);
            emu_set_order(order);
            emu_set_workers(1 + order % 2);
            work();
        }
}

/* --- kernels ------------------------------------------------------------------------------------------------------------------------ */

static void rmsnorm() {
    const int rows = 5, dim = 517;
    cudaStream_t s = new_stream();
    float *x = device<float>(rows * dim), *w = device<float>(dim), *y = device<float>(rows * dim), *h = pinned<float>(rows * dim);
    std::vector<double> want;
    for (int i = 0; i < rows * dim; i++) h[i] = noise(i);
    for (int r = 0; r < rows; r++) {
        double q = 0;
        for (int i = 0; i < dim; i++) q += (double)h[r * dim + i] * h[r * dim + i];
        for (int i = 0; i < dim; i++) want.push_back(h[i] * h[r * dim + i] / sqrt(q / dim + 1e-5));
    }
    upload(x, h, rows * dim * 4, s);
    upload(w, h, dim * 4, s);
    OK(demo_rmsnorm(y, x, w, rows, dim, 1e-5f, s));
    OK(cudaStreamSynchronize(s));
    download(h, y, rows * dim * 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(worst(h, want) < 1e-6);
}

static void gemm() {
    const int m = 64, n = 128, k = 96;
    cudaStream_t s = new_stream();
    half *a = device<half>(m * k), *b = device<half>(n * k), *ha = pinned<half>(m * k), *hb = pinned<half>(n * k);
    float *c = device<float>(m * n), *h = pinned<float>(m * n);
    for (int i = 0; i < m * k; i++) ha[i] = __float2half(noise(i));
    for (int i = 0; i < n * k; i++) hb[i] = __float2half(noise(i * 3 + 1));
    std::vector<double> want;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double q = 0;
            for (int l = 0; l < k; l++) q += (double)__half2float(ha[i * k + l]) * __half2float(hb[j * k + l]);
            want.push_back(q);
        }
    upload(a, ha, m * k * 2, s);
    upload(b, hb, n * k * 2, s);
    OK(demo_gemm(c, a, b, m, n, k, s));
    download(h, c, m * n * 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(worst(h, want) < 1e-6);
    /* the same by cuBLAS: row-major C = A B^T is column-major C^T = B A^T */
    cublasHandle_t blas;
    CHECK(!cublasCreate(&blas) && !cublasSetStream(blas, s));
    OK(cudaMemsetAsync(c, 0xff, m * n * 4, s));
    float one = 1, zero = 0;
    CHECK(!cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_16F, k, a, CUDA_R_16F, k, &zero, c, CUDA_R_32F, n,
                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    download(h, c, m * n * 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(worst(h, want) < 1e-6);
    CHECK(!cublasDestroy(blas));
}

static void mma() {
    cudaStream_t s = new_stream();
    half *a = device<half>(256), *ha = pinned<half>(256);
    float *d = device<float>(128), *h = pinned<float>(128);
    for (int i = 0; i < 256; i++) ha[i] = __float2half(noise(i * 5));
    std::vector<double> want;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double q = 0;
            for (int l = 0; l < 16; l++) q += (double)__half2float(ha[i * 16 + l]) * __half2float(ha[(j + 3) * 16 + l]);
            want.push_back(q);
        }
    upload(a, ha, 512, s);
    OK(demo_mma(d, a, a + 48, s));
    download(h, d, 512, s);
    OK(cudaStreamSynchronize(s));
    CHECK(worst(h, want) < 1e-6);
}

#if EMU_ARCH >= 800
/* D[16, 8] of int8 A[16, 32], B[8, 32] by one instruction, operands loaded as gpu/ptx.h states. */
static __global__ void mma_s8_k(int *d, const signed char *a, const signed char *b) {
    int g = threadIdx.x / 4, t = threadIdx.x % 4, r[4] = {1, 2, 3, 4};
    uint32_t ra[4], rb[2];
    for (int i = 0; i < 4; i++) ra[i] = *(const uint32_t *)(a + (g + i % 2 * 8) * 32 + 4 * t + i / 2 * 16);
    for (int i = 0; i < 2; i++) rb[i] = *(const uint32_t *)(b + g * 32 + 4 * t + i * 16);
    mma_s8_16832(r, ra, rb);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = r[i] - i - 1;
}
static __global__ void ldmatrix_trans_k(unsigned short *y, const unsigned short *x) {
    SMEM_ARRAY(unsigned short, s, [8][8]);
    for (int i = threadIdx.x; i < 64; i += 32) s[i / 8][i % 8] = x[i];
    __syncwarp();
    uint32_t r[1];
    ldmatrix_x1_trans(r, &s[threadIdx.x % 8][0]);
    y[threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2] = (unsigned short)r[0];
    y[threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2 + 1] = (unsigned short)(r[0] >> 16);
}
static void mma_s8() {
    cudaStream_t s = new_stream();
    signed char *a = device<signed char>(768), *ha = pinned<signed char>(768);
    int *d = device<int>(128), *h = pinned<int>(128);
    for (int i = 0; i < 768; i++) ha[i] = (signed char)(i * 73 + i / 5);
    upload(a, ha, 768, s);
    GPU_COST(1, 1, GPU_UNIT_INT8);
    OK(GPU_LAUNCH(mma_s8_k, dim3(1), dim3(32), 0, s, d, a, a + 512));
    download(h, d, 512, s);
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < 128; i++) {
        int q = 0;
        for (int l = 0; l < 32; l++) q += ha[i / 8 * 32 + l] * ha[512 + i % 8 * 32 + l];
        CHECK(h[i] == q);
    }
    unsigned short *x = device<unsigned short>(128), *hx = pinned<unsigned short>(64);
    for (int i = 0; i < 64; i++) hx[i] = (unsigned short)i;
    upload(x, hx, 128, s);
    GPU_COST(1, 1, GPU_UNIT_INT8);
    OK(GPU_LAUNCH(ldmatrix_trans_k, dim3(1), dim3(32), 0, s, x + 64, x));
    download(hx, x + 64, 128, s);
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < 64; i++) CHECK(hx[i] == i % 8 * 8 + i / 8);
}
#endif

/* Each thread writes what the collectives gave it. */
static __global__ void collectives_k(int *y) {
    int l = threadIdx.x % 32, *o = y + threadIdx.x * 12;
    o[0] = __shfl_sync(FULL_MASK, l * 3, 7);
    o[1] = __shfl_up_sync(FULL_MASK, l, 2);
    o[2] = __shfl_down_sync(FULL_MASK, l, 2);
    o[3] = __shfl_xor_sync(FULL_MASK, l, 5);
    o[4] = __shfl_sync(FULL_MASK, l, 1, 8);
    o[5] = (int)__ballot_sync(FULL_MASK, l % 3 == 0);
    o[6] = __any_sync(FULL_MASK, l == 31) + 2 * __all_sync(FULL_MASK, l < 31);
    o[7] = warp_sum(l) + 1000 * warp_max(l);
    o[8] = (int)(warp_sum((float)l) + 1000 * warp_max(-(float)l));
    unsigned half_warp = l < 16 ? 0xffffu : 0xffff0000u;
    o[9] = __shfl_xor_sync(half_warp, l, 15);
    o[10] = (int)__match_any_sync(FULL_MASK, l / 8);
    o[11] = __syncthreads_count(threadIdx.x % 5 == 0);
}
static void collectives() {
    cudaStream_t s = new_stream();
    const int n = 96;
    int *d = device<int>(n * 12), *h = pinned<int>(n * 12);
    GPU_COST(1, 1, GPU_UNIT_F32);
    OK(GPU_LAUNCH(collectives_k, dim3(1), dim3(n), 0, s, d));
    download(h, d, n * 48, s);
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < n; i++) {
        int l = i % 32, *o = h + i * 12;
        CHECK(o[0] == 21 && o[1] == (l < 2 ? l : l - 2) && o[2] == (l > 29 ? l : l + 2) && o[3] == (l ^ 5));
        CHECK(o[4] == l / 8 * 8 + 1 && o[5] == 0x49249249 && o[6] == 1 && o[7] == 496 + 31000 && o[8] == 496);
        CHECK(o[9] == (l ^ 15) && o[10] == (int)(0xffu << l / 8 * 8) && o[11] == 20);
    }
}

/* Threads that end while others wait and yet others have not begun: stacks change hands. */
static __global__ void ends_k(int *y, int n) {
    int warp = threadIdx.x / 32, v = threadIdx.x, keep[16];
    for (int i = 0; i < 16; i++) keep[i] = v + i;
    if (warp >= n) return;
    for (int i = 0; i < warp % 3; i++) v += __shfl_xor_sync(FULL_MASK, keep[i], 1 + i);
    if (threadIdx.x % 32 < 9) v += keep[threadIdx.x % 16];
    else if (threadIdx.x % 32 > 20) v += __shfl_xor_sync(0xffe00000u, keep[3], 0);
    y[blockIdx.x * 256 + threadIdx.x] = v;
}
static void ends() {
    const int blocks = 40, n = 6;
    std::vector<int> first;
    for (uint64_t seed = 1; seed < 20; seed++) {
        emu_reset(nullptr);
        emu_set_policy(EMU_EAGER, seed);
        emu_set_order(seed == 1 ? 0 : 2);
        cudaStream_t s = new_stream();
        int *d = device<int>(blocks * 256), *h = pinned<int>(blocks * 256);
        GPU_COST(1, 1, GPU_UNIT_F32);
        OK(GPU_LAUNCH(ends_k, dim3(blocks), dim3(256), 0, s, d, n));
        download(h, d, blocks * 1024, s);
        OK(cudaStreamSynchronize(s));
        if (seed == 1) first.assign(h, h + blocks * 256);
        CHECK(!memcmp(h, first.data(), blocks * 1024));
    }
}

/* The last block to finish adds up what all wrote. */
static __global__ void last_block_k(float *part, unsigned *count, float *sum) {
    SMEM_ARRAY(int, last, [1]);
    if (threadIdx.x == 0) {
        part[blockIdx.x] = (float)blockIdx.x;
        __threadfence();
        last[0] = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last[0] && threadIdx.x == 0) {
        float s = 0;
        for (unsigned i = 0; i < gridDim.x; i++) s += part[i];
        *sum = s;
    }
}
struct by_value { const float *p; int n; float *q; };
static __global__ void struct_k(by_value v) {
    if ((int)threadIdx.x < v.n) v.q[threadIdx.x] = 2 * v.p[threadIdx.x];
}
static void atomics_and_structs() {
    cudaStream_t s = new_stream();
    float *part = device<float>(101), *h = pinned<float>(8);
    unsigned *count = device<unsigned>(1);
    OK(cudaMemsetAsync(count, 0, 4, s));
    for (int i = 0; i < 2; i++) {
        GPU_COST(1, 1, GPU_UNIT_F32);
        OK(GPU_LAUNCH(last_block_k, dim3(100), dim3(64), 0, s, part, count, part + 100));
    }
    download(h, part + 100, 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(h[0] == 4950);
    by_value v = {part + 1, 3, part + 50};
    GPU_COST(1, 1, GPU_UNIT_F32);
    OK(GPU_LAUNCH(struct_k, dim3(1), dim3(32), 0, s, v));
    download(h, part + 50, 16, s);
    OK(cudaStreamSynchronize(s));
    CHECK(h[0] == 2 && h[2] == 6 && h[3] == 53);
}

/* --- memory ----------------------------------------------------------------------------------------------------------------------------- */

static __global__ void poison_k(int *y, const unsigned *fresh) {
    SMEM_ARRAY(unsigned, s, [32]);
    y[threadIdx.x] = s[threadIdx.x] == 0xffffffffu && fresh[threadIdx.x] == 0xffffffffu;
}
static void poison() {
    cudaStream_t s = new_stream();
    int *y = device<int>(32), *h = pinned<int>(32);
    for (int run = 0; run < 2; run++) {
        unsigned *fresh = device<unsigned>(32);
        GPU_COST(1, 1, GPU_UNIT_F32);
        OK(GPU_LAUNCH(poison_k, dim3(3), dim3(32), 0, s, y, fresh));
        download(h, y, 128, s);
        OK(cudaStreamSynchronize(s));
        for (int i = 0; i < 32; i++) CHECK(h[i] == 1);
        OK(cudaMemsetAsync(fresh, 0, 128, s));
        OK(cudaFree(fresh));
    }
}

static void out_of_memory() {
    emu_machine m;
    CHECK(!emu_machine_get(&m, "emu"));
    m.vram_bytes = 64 << 20;
    m.runtime_bytes = 8 << 20;
    m.pinned_bytes = 1 << 20;
    emu_reset(&m);
    size_t free_bytes, total;
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total == 64u << 20 && free_bytes == 56u << 20);
    void *big, *p, *q;
    CHECK(cudaMalloc(&p, (56u << 20) + 1) == cudaErrorMemoryAllocation && !p);
    CHECK(cudaMalloc(&p, SIZE_MAX - 100) == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&big, 55u << 20));
    CHECK(cudaMalloc(&p, 2u << 20) == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    OK(cudaMalloc(&p, 1u << 20));
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(free_bytes == 0);
    OK(cudaFree(p));
    CHECK(cudaHostAlloc(&q, (1 << 20) + 1, 0) == cudaErrorMemoryAllocation);
    OK(cudaHostAlloc(&q, 1 << 19, 0));
    static char own[1 << 20];
    CHECK(cudaHostRegister(own, sizeof own, 0) == cudaErrorMemoryAllocation);
    OK(cudaHostRegister(own, 1 << 19, 0));
    CHECK(cudaHostRegister(own + 5, 10, 0) == cudaErrorHostMemoryAlreadyRegistered);
    CHECK(cudaHostUnregister(own + 5) == cudaErrorHostMemoryNotRegistered);
    OK(cudaHostUnregister(own));
    OK(cudaFreeHost(q));
    OK(cudaFree(big));
    rmsnorm(); /* the device is as good as new */
    for (int i = 0; i < 20; i++) { /* addresses come back once they are used up */
        OK(cudaMalloc(&p, 40u << 20));
        OK(cudaFree(p));
    }
}

/* A small program that stops at the first error and closes what it opened. */
static cudaError_t program() {
    cudaStream_t s = nullptr;
    cudaEvent_t e = nullptr;
    float *d = nullptr, *h = nullptr;
    cudaError_t rc = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    if (!rc) rc = cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    if (!rc) rc = cudaMalloc(&d, 4096);
    if (!rc) rc = cudaHostAlloc(&h, 4096, 0);
    if (!rc) rc = cudaMemcpyAsync(d, h, 4096, cudaMemcpyHostToDevice, s);
    if (!rc) rc = demo_rmsnorm(d, d, d, 1, 1024, 1e-5f, s);
    if (!rc) rc = cudaEventRecord(e, s);
    if (!rc) rc = cudaEventSynchronize(e);
    if (s) cudaStreamSynchronize(s);
    cudaFree(d);
    cudaFreeHost(h);
    if (e) cudaEventDestroy(e);
    if (s) cudaStreamDestroy(s);
    return rc;
}
static void every_call_fails() {
    emu_reset(nullptr);
    OK(program());
    long calls = emu_calls("any");
    CHECK(calls == 13);
    for (int sticky = 0; sticky < 2; sticky++)
        for (long n = 1; n <= calls; n++) {
            emu_reset(nullptr);
            emu_fail("any", n, 0, sticky);
            cudaError_t rc = program();
            CHECK((rc != cudaSuccess) == (n <= 8));
            CHECK(emu_leaks() == 0);
            emu_fail_clear();
            OK(program());
        }
    emu_reset(nullptr);
    emu_fail("cudaMalloc", 1, 0, 0);
    CHECK(program() == cudaErrorMemoryAllocation);
    emu_fail("launch", 1, cudaErrorIllegalAddress, 1);
    CHECK(program() == cudaErrorIllegalAddress);
    void *p;
    CHECK(cudaMalloc(&p, 1) == cudaErrorIllegalAddress); /* a device fault stays */
}

/* A lost device does nothing any more: what is queued goes with its stream, whatever has been freed before. */
static void lost_device() {
    for (emu_policy p : ALL_POLICIES) {
        emu_reset(nullptr);
        emu_set_policy(p, 3);
        cudaStream_t s = new_stream();
        float *d = device<float>(1024), *h = pinned<float>(1024);
        GPU_COST(1, 1, GPU_UNIT_F32);
        OK(GPU_LAUNCH(ends_k, dim3(4), dim3(256), 0, s, reinterpret_cast<int *>(d), 8));
        download(h, d, 4096, s);
        emu_fail("cudaStreamSynchronize", 1, cudaErrorIllegalAddress, 1);
        CHECK(cudaStreamSynchronize(s) == cudaErrorIllegalAddress);
        cudaFreeHost(h);
        cudaFree(d);
        cudaStreamDestroy(s);
        CHECK(emu_leaks() == 0);
    }
}

static void no_device() {
    int n = 7;
    emu_set_devices(0, 13000);
    CHECK(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0);
    emu_set_devices(0, 0); /* no driver at all */
    CHECK(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver);
    emu_set_devices(1, 11080);
    CHECK(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver);
    emu_set_devices(1, 13000);
    emu_machine m;
    CHECK(!emu_machine_get(&m, "v100-16g-pcie3"));
    m.sm = 60;
    emu_reset(&m);
    CHECK(program() == cudaErrorNoKernelImageForDevice);
    CHECK(emu_machine_get(&m, "unheard-of") == -1);
}

static void properties() {
    static const char *const names[] = {"v100-16g-pcie3", "v100-16g-pcie3-6ch", "2080ti-11g", "3090-24g", "4090-24g",
                                        "5070ti-16g", "5090-32g", "5090-32g-8ch", "h200-141g"};
    for (const char *name : names) {
        emu_machine m;
        CHECK(!emu_machine_get(&m, name));
        emu_reset(&m);
        cudaDeviceProp p;
        OK(cudaGetDeviceProperties(&p, 0));
        CHECK(p.major * 10 + p.minor == m.sm && p.totalGlobalMem == (size_t)m.vram_bytes);
        void *d;
        OK(cudaMalloc(&d, (size_t)(m.vram_bytes - m.runtime_bytes) - 1024)); /* costs nothing until it is used */
        OK(cudaFree(d));
    }
    int v;
    CHECK(cudaDeviceGetAttribute(&v, cudaDevAttrWarpSize, 1) == cudaErrorInvalidDevice);
    OK(cudaDeviceGetAttribute(&v, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(v == 227 * 1024);
}

/* --- streams ------------------------------------------------------------------------------------------------------------------------------ */

static __global__ void step_k(float *x, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] = 2 * x[i] + 1;
}
static void launch_step(float *x, int n, cudaStream_t s) {
    GPU_COST(8.0 * n, n, GPU_UNIT_F32);
    OK(GPU_LAUNCH(step_k, dim3((unsigned)(n + 63) / 64), dim3(64), 0, s, x, n));
}

/* Two slots: copied in on one stream, worked on by another, copied out by a third, with ready and free events. */
static void double_buffer() {
    const int n = 200, pieces = 9;
    cudaStream_t in = new_stream(), work = new_stream(), out = new_stream();
    cudaEvent_t ready[2], done[2], free_[2];
    float *slot[2], *h = pinned<float>(n * pieces), *got = pinned<float>(n * pieces);
    for (int i = 0; i < 2; i++) {
        ready[i] = new_event();
        done[i] = new_event();
        free_[i] = new_event();
        slot[i] = device<float>(n);
    }
    for (int i = 0; i < n * pieces; i++) h[i] = noise(i);
    for (int p = 0; p < pieces; p++) {
        int i = p % 2;
        if (p > 1) OK(cudaStreamWaitEvent(in, free_[i], 0));
        upload(slot[i], h + p * n, n * 4, in);
        OK(cudaEventRecord(ready[i], in));
        OK(cudaStreamWaitEvent(work, ready[i], 0));
        launch_step(slot[i], n, work);
        OK(cudaEventRecord(done[i], work));
        OK(cudaStreamWaitEvent(out, done[i], 0));
        download(got + p * n, slot[i], n * 4, out);
        OK(cudaEventRecord(free_[i], out));
    }
    OK(cudaStreamSynchronize(out));
    for (int i = 0; i < n * pieces; i++) CHECK(got[i] == 2 * h[i] + 1);
}

static void host_functions() {
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t e = new_event();
    float *d = device<float>(64), *h = pinned<float>(64);
    for (int i = 0; i < 64; i++) h[i] = 1;
    upload(d, h, 256, s);
    launch_step(d, 64, s);
    download(h, d, 256, s);
    OK(cudaLaunchHostFunc(s, [](void *p) {
        usleep(2000);
        for (int i = 0; i < 64; i++) static_cast<float *>(p)[i] *= 10;
    }, h));
    upload(d, h, 256, s);
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(t, e, 0));
    launch_step(d, 64, t);
    download(h, d, 256, t);
    OK(cudaStreamSynchronize(t));
    for (int i = 0; i < 64; i++) CHECK(h[i] == 61);
    CHECK(cudaStreamQuery(s) == cudaSuccess);
}

static void events() {
    cudaStream_t s = new_stream();
    cudaEvent_t e = new_event(), a, b;
    OK(cudaEventCreate(&a));
    OK(cudaEventCreate(&b));
    OK(cudaEventQuery(e)); /* never recorded: complete */
    OK(cudaStreamWaitEvent(s, e, 0));
    float *d = device<float>(1 << 16), ms;
    OK(cudaMemsetAsync(d, 0, 4 << 16, s));
    OK(cudaEventRecord(a, s));
    launch_step(d, 1 << 16, s);
    OK(cudaEventRecord(b, s));
    int polls = 0;
    while (cudaEventQuery(b) == cudaErrorNotReady) polls++;
    CHECK(polls > 0);
    OK(cudaEventElapsedTime(&ms, a, b));
    CHECK(ms > 0 && ms < 1);
    OK(cudaEventRecord(e, s));
    OK(cudaEventSynchronize(e));
    CHECK(cudaEventElapsedTime(&ms, a, e) == cudaErrorInvalidResourceHandle); /* made without timing */
}

/* --- graphs ----------------------------------------------------------------------------------------------------------------------------------- */

static void graphs() {
    const int n = 128;
    cudaStream_t s = new_stream(), side = new_stream();
    cudaEvent_t fork_ = new_event(), join = new_event();
    float *x = device<float>(n), *y = device<float>(n), *h = pinned<float>(n), *gx = pinned<float>(n), *gy = pinned<float>(n);
    cudaGraph_t g;
    cudaGraphExec_t e;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    upload(x, h, n * 4, s);
    upload(y, h, n * 4, s);
    OK(cudaEventRecord(fork_, s));
    OK(cudaStreamWaitEvent(side, fork_, 0));
    launch_step(x, n, s);
    launch_step(y, n, side);
    launch_step(y, n, side);
    OK(cudaEventRecord(join, side));
    OK(cudaStreamWaitEvent(s, join, 0));
    download(gx, x, n * 4, s);
    download(gy, y, n * 4, s);
    cudaStreamCaptureStatus st;
    OK(cudaStreamIsCapturing(side, &st));
    CHECK(st == cudaStreamCaptureStatusActive);
    OK(cudaStreamEndCapture(s, &g));
    OK(cudaStreamIsCapturing(side, &st));
    CHECK(st == cudaStreamCaptureStatusNone);
    OK(cudaGraphInstantiate(&e, g, 0));
    for (int run = 0; run < 3; run++) { /* nothing ran during the capture; each launch reads h anew */
        for (int i = 0; i < n; i++) h[i] = noise(i + run);
        OK(cudaGraphLaunch(e, s));
        OK(cudaStreamSynchronize(s));
        for (int i = 0; i < n; i++) CHECK(gx[i] == 2 * h[i] + 1 && gy[i] == 4 * h[i] + 3);
    }
    OK(cudaGraphExecDestroy(e));
    OK(cudaGraphDestroy(g));
    /* misuse */
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaStreamSynchronize(s) == cudaErrorStreamCaptureUnsupported);
    float pageable[4];
    CHECK(cudaMemcpyAsync(pageable, x, 16, cudaMemcpyDeviceToHost, s) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaStreamEndCapture(s, &g) == cudaErrorStreamCaptureInvalidated && !g);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(fork_, s));
    OK(cudaStreamWaitEvent(side, fork_, 0));
    launch_step(y, n, side);
    CHECK(cudaStreamEndCapture(s, &g) == cudaErrorStreamCaptureUnjoined);
    launch_step(y, n, side); /* usable again */
    OK(cudaStreamSynchronize(side));
}

/* The same by hand on the host, in double. */
static void host_in_c() {
    const int dim = 300, steps = 4;
    cudaStream_t s = new_stream();
    float *x = device<float>(dim), *w = device<float>(dim), *h = pinned<float>(dim);
    float *ask = pinned<float>(dim, cudaHostAllocMapped), *answer = pinned<float>(dim, cudaHostAllocMapped);
    uint32_t *flag = pinned<uint32_t>(2, cudaHostAllocMapped);
    flag[0] = flag[1] = 0;
    for (int i = 0; i < dim; i++) h[i] = 1;
    upload(w, h, dim * 4, s);
    OK(cudaStreamSynchronize(s));
    std::vector<double> v;
    for (int i = 0; i < dim; i++) v.push_back(h[i] = noise(i));
    upload(x, h, dim * 4, s);
    OK(cudaStreamSynchronize(s));
    auto norm = [&] {
        double q = 0;
        for (double e : v) q += e * e;
        for (double &e : v) e /= sqrt(q / dim);
    };
    for (int k = 0; k < steps; k++) {
        norm();
        for (double &e : v) e = 3 * e + 1;
        norm();
    }
    CHECK(demo_host_steps(x, w, dim, ask, answer, flag, steps) == 0);
    download(h, x, dim * 4, s);
    OK(cudaStreamSynchronize(s));
    CHECK(worst(h, v) < 1e-5);
}

static void host_in_c_all() { everywhere(host_in_c); }
static void rmsnorm_all() { everywhere(rmsnorm); }
static void gemm_all() { everywhere(gemm); }
static void collectives_all() { everywhere(collectives); }
static void atomics_all() { everywhere(atomics_and_structs); }
static void double_buffer_all() { everywhere(double_buffer); }
static void host_functions_all() { everywhere(host_functions); }
static void graphs_all() { everywhere(graphs); }
static void events_all() { everywhere(events); }

static const test_case cases[] = {
    {"rmsnorm", rmsnorm_all, nullptr},
    {"gemm", gemm_all, nullptr},
    {"mma", mma, nullptr},
#if EMU_ARCH >= 800
    {"mma s8, ldmatrix trans", mma_s8, nullptr},
#endif
    {"collectives", collectives_all, nullptr},
    {"early ends", ends, nullptr},
    {"atomics, structures", atomics_all, nullptr},
    {"poison", poison, nullptr},
    {"out of memory", out_of_memory, nullptr},
    {"every call fails", every_call_fails, nullptr},
    {"lost device", lost_device, nullptr},
    {"no device", no_device, nullptr},
    {"properties", properties, nullptr},
    {"double buffer", double_buffer_all, nullptr},
    {"host functions", host_functions_all, nullptr},
    {"events", events_all, nullptr},
    {"graphs", graphs_all, nullptr},
    {"host code in C", host_in_c_all, nullptr},
};

int main(int argc, char **argv) { return run_cases(cases, sizeof cases / sizeof *cases, argc, argv); }
