/* test_emu_race.cpp: built with the thread sanitizer, whatever the rest is built with. Every CUDA thread and every stream is a
 * thread to it: a missing barrier or event wait is reported at its source lines, correct programs are not. */
#include "tests/emu/check.h"
#include "tests/emu/demo.h"

#include "gpu/compat.h"
#include "gpu/ptx.h"

/* Reverses 64 values through shared memory; sync: 0 none, 1 as it should be. */
static __global__ void reverse_k(int *p, int sync) {
    SMEM_ARRAY(int, s, [64]);
    s[threadIdx.x] = p[threadIdx.x]; /* race: reverse */
    if (sync) __syncthreads();
    p[threadIdx.x] = s[63 - threadIdx.x];
}
static __global__ void neighbour_k(int *p, int sync) {
    SMEM_ARRAY(int, s, [64]);
    s[threadIdx.x] = p[threadIdx.x]; /* race: neighbour */
    (void)__shfl_xor_sync(FULL_MASK, 1, 1); /* orders no memory */
    if (sync) __syncwarp();
    p[threadIdx.x] = s[threadIdx.x ^ 1];
}
static __global__ void async_k(int4 *y, const int4 *x, int sync) {
    SMEM_ARRAY(int4, s, [64]);
    cp_async16(&s[threadIdx.x], &x[threadIdx.x]);
    cp_async_commit();
    cp_async_wait<0>(); /* of this thread's copies */
    if (sync) __syncthreads();
    y[threadIdx.x] = s[63 - threadIdx.x]; /* race: async */
}
static __global__ void blocks_k(int *p, int apart) {
    if (threadIdx.x == 0) p[blockIdx.x * (unsigned)apart] = 1; /* race: blocks */
    __syncthreads();
}
static __global__ void scale_k(float *y, const float *x, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = 2 * x[i]; /* race: kernel */
}

static int bug; /* set by the case */

#define RUN(k, grid, block, s, ...)                                                                                    \
    do {                                                                                                               \
        GPU_COST(1, 1, GPU_UNIT_F32);                                                                                  \
        OK(GPU_LAUNCH(k, dim3(grid), dim3(block), 0, s, __VA_ARGS__));                                                 \
    } while (0)

static void reverse() {
    cudaStream_t s = new_stream();
    int *d = device<int>(64);
    RUN(reverse_k, 3, 64, s, d + 0, !bug);
    OK(cudaStreamSynchronize(s));
}
static void one_block_reverse() {
    cudaStream_t s = new_stream();
    int *d = device<int>(64);
    for (int i = 0; i < 3; i++) RUN(reverse_k, 1, 64, s, d, !bug);
    OK(cudaStreamSynchronize(s));
}
static void neighbour() {
    cudaStream_t s = new_stream();
    RUN(neighbour_k, 1, 64, s, device<int>(64), !bug);
    OK(cudaStreamSynchronize(s));
}
static void async() {
    cudaStream_t s = new_stream();
    int4 *d = device<int4>(128);
    OK(cudaMemsetAsync(d, 0, 2048, s));
    RUN(async_k, 1, 64, s, d, d + 64, !bug);
    OK(cudaStreamSynchronize(s));
}
static void blocks() {
    cudaStream_t s = new_stream();
    RUN(blocks_k, 4, 32, s, device<int>(64), bug ? 0 : 1);
    OK(cudaStreamSynchronize(s));
}
static void demo() {
    cudaStream_t s = new_stream(), t = new_stream();
    float *h = pinned<float>(4096);
    for (int i = 0; i < 4096; i++) h[i] = 1;
    for (cudaStream_t st : {s, t}) { /* two streams that know nothing of each other share fibers, stacks, shared memory */
        float *own = device<float>(16384);
        upload(own, h, 16384, st);
        RUN(scale_k, 3, 64, st, own + 4096, own, 192);
        OK(demo_rmsnorm(own + 8192, own, own, 2, 300, 1e-5f, st));
        half *a = reinterpret_cast<half *>(own);
        OK(demo_gemm(own + 4096, a, a, 64, 64, 64, st));
        OK(demo_mma(own + 8192, a, a, st));
    }
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamSynchronize(t));
}

/* Upload, kernel on another stream, download on the first; bug 1: no wait for the upload, 2: download does not wait,
 * 3: the host reads early, 4: the host overwrites the source early. */
static void streams() {
    const int n = 256;
    cudaStream_t copy = new_stream(), work = new_stream();
    cudaEvent_t ready = new_event(), done = new_event();
    float *x = device<float>(n), *y = device<float>(n), *h = pinned<float>(n), *out = pinned<float>(n);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < n; i++) h[i] = (float)i; /* race: host write */
        upload(x, h, n * 4, copy);
        OK(cudaEventRecord(ready, copy));
        if (bug != 1) OK(cudaStreamWaitEvent(work, ready, 0));
        RUN(scale_k, 4, 64, work, y, x, n);
        OK(cudaEventRecord(done, work));
        if (bug != 2) OK(cudaStreamWaitEvent(copy, done, 0));
        download(out, y, n * 4, copy);
        if (bug == 4) continue;
        if (bug != 3) OK(cudaStreamSynchronize(copy));
        volatile float sum = 0;
        for (int i = 0; i < n; i++) sum = sum + out[i]; /* race: host read */
        OK(cudaStreamSynchronize(copy));
    }
    OK(cudaStreamSynchronize(copy));
    OK(cudaStreamSynchronize(work));
}

static int line_of(const char *mark) {
    FILE *f = fopen(__FILE__, "r");
    if (!f) return -1;
    char text[512];
    int line = 0, found = -1;
    while (fgets(text, sizeof text, f)) {
        line++;
        if (strstr(text, mark) && !strstr(text, "\"")) found = line;
    }
    fclose(f);
    return found;
}

/* lanes: threads of a kernel apart; fresh: for each block. mark: a line of the report; null: there must be no report. */
struct race_case {
    const char *name;
    void (*run)();
    int bug;
    bool lanes, fresh;
    const char *mark;
};
static const race_case cases[] = {
    {"reverse", one_block_reverse, 0, true, false, nullptr},
    {"reverse without barrier", one_block_reverse, 1, true, false, "/* race: reverse */"},
    {"two blocks in place", reverse, 0, true, true, "/* race: reverse */"},
    {"neighbour", neighbour, 0, true, false, nullptr},
    {"neighbour without syncwarp", neighbour, 1, true, false, "/* race: neighbour */"},
    {"cp.async", async, 0, true, false, nullptr},
    {"cp.async without barrier", async, 1, true, false, "/* race: async */"},
    {"blocks apart", blocks, 0, true, true, nullptr},
    {"blocks on one word", blocks, 1, true, true, "/* race: blocks */"},
    {"demo kernels", demo, 0, true, false, nullptr},
    {"demo kernels, fresh", demo, 0, true, true, nullptr},
    {"demo kernels, stream mode", demo, 0, false, false, nullptr},
    {"streams", streams, 0, false, false, nullptr},
    {"streams, lanes", streams, 0, true, false, nullptr},
    {"kernel before the upload", streams, 1, false, false, "/* race: kernel */"},
    {"download before the kernel", streams, 2, false, false, "/* race: kernel */"},
    {"early read", streams, 3, false, false, "/* race: host read */"},
    {"early overwrite", streams, 4, false, false, "/* race: host write */"},
};

static const race_case *now;
static emu_policy now_policy;
static void run_now() {
    setenv("EMU_TSAN_LANES", now->lanes ? "1" : "0", 1);
    setenv("EMU_TSAN_FRESH", now->fresh ? "1" : "0", 1);
    emu_set_policy(now_policy, 1);
    bug = now->bug;
    now->run();
}

int main(int argc, char **argv) {
    int failed = 0;
    for (const race_case &c : cases)
        for (emu_policy p : {EMU_EAGER, EMU_LAZY, EMU_RANDOM}) {
            if (argc > 1 && strcmp(argv[1], c.name)) continue;
            now = &c;
            now_policy = p;
            std::string err;
            int status = in_child(run_now, &err);
            if (err.find("unexpected memory mapping") != std::string::npos) {
                printf("SKIPPED: the thread sanitizer does not run on this kernel's address layout\n");
                return 77;
            }
            bool reported = err.find("WARNING: ThreadSanitizer: data race") != std::string::npos;
            std::string site = "test_emu_race.cpp:" + std::to_string(c.mark ? line_of(c.mark) : 0);
            bool right = c.mark ? reported && err.find(site) != std::string::npos : !reported && status == 0;
            if (right) continue;
            failed++;
            fprintf(stderr, "FAILED %s, policy %d: status %#x, expected %s\n%.3000s\n", c.name, p, (unsigned)status,
                    c.mark ? site.c_str() : "no report", err.c_str());
        }
    return failed != 0;
}
