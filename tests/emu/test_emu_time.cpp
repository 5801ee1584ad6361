/* test_emu_time.cpp: the virtual timeline against arithmetic done by hand, and the same in every policy. */
#include "tests/emu/check.h"

#include "gpu/compat.h"

#include <cuda.h>

#include <math.h>
#include <pthread.h>

#include <vector>

static __global__ void nothing_k(float *) {}

/* Round numbers: a launch or copy call 3 us, other calls 1, sync 2; kernels 1 GB/s x 1.0; copies 1 GB/s + 8 us; DRAM 4 GB/s. */
static emu_machine simple() {
    emu_machine m;
    CHECK(!emu_machine_get(&m, "emu"));
    m.vram_gbps = m.h2d_gbps = m.d2h_gbps = 1;
    m.vram_share = 1;
    m.dram_gbps = m.dram_with_dma_gbps = 4;
    m.cpu_share = 1;
    m.cpu_gflops = 1;
    m.pageable_gbps = 0.5;
    return m;
}
static void begin(emu_policy p) {
    emu_machine m = simple();
    emu_reset(&m);
    emu_set_policy(p, 11);
}
static void kernel_us(float *d, double us, cudaStream_t s) {
    GPU_COST(us * 1e3, 0, GPU_UNIT_F32);
    OK(GPU_LAUNCH(nothing_k, dim3(1), dim3(32), 0, s, d));
}
static bool near_us(double got_s, double want_us) {
    if (fabs(got_s * 1e6 - want_us) < 1e-6) return true;
    fprintf(stderr, "got %.6f us, want %.6f us\n", got_s * 1e6, want_us);
    return false;
}

static void one_stream() {
    for (emu_policy p : ALL_POLICIES) {
        begin(p);
        cudaStream_t s = new_stream();        /* 1 */
        float *d = device<float>(1000);       /* + 10 = 11 */
        kernel_us(d, 50, s);                  /* issued at 14, runs 15 .. 65 */
        kernel_us(d, 1, s);                   /* at least 2 us: 66 .. 68 */
        OK(cudaMemsetAsync(d, 0, 4000, s));   /* 4 us at full bandwidth: 69 .. 73 */
        CHECK(near_us(emu_now(), 20));
        OK(cudaStreamSynchronize(s));
        CHECK(near_us(emu_now(), 75));
        float host[1000];
        download(host, d, 4000, s);           /* pageable: 78 + 16 .. + 8; then 2 */
        CHECK(near_us(emu_now(), 104));
    }
}

/* Two slots of 100 us copies and 60 us kernels: after the first copy everything hides behind the link. */
static double overlap(std::vector<double> *times) {
    cudaStream_t copy = new_stream(), work = new_stream();
    cudaEvent_t ready[2], free_[2];
    float *slot[2], *h = pinned<float>(25000);
    for (int i = 0; i < 2; i++) {
        ready[i] = new_event();
        free_[i] = new_event();
        slot[i] = device<float>(25000);
    }
    for (int i = 0; i < 6; i++) {
        int j = i % 2;
        if (i > 1) OK(cudaStreamWaitEvent(copy, free_[j], 0));
        upload(slot[j], h, 100000, copy);
        OK(cudaEventRecord(ready[j], copy));
        OK(cudaStreamWaitEvent(work, ready[j], 0));
        kernel_us(slot[j], 60, work);
        OK(cudaEventRecord(free_[j], work));
        if (i == 3) {
            OK(cudaEventSynchronize(ready[1]));
            times->push_back(emu_now());
        }
    }
    OK(cudaStreamSynchronize(work));
    times->push_back(emu_now());
    emu_stats st;
    emu_stats_get(&st);
    CHECK(near_us(st.h2d_busy_s, 600) && near_us(st.compute_busy_s, 360));
    return emu_now();
}
static void overlapped_copies() {
    std::vector<double> first;
    for (emu_policy p : ALL_POLICIES)
        for (uint64_t seed = 1; seed < 6; seed++) {
            begin(p);
            emu_set_policy(p, seed);
            std::vector<double> t;
            overlap(&t);
            if (first.empty()) first = t;
            CHECK(t == first); /* to the last bit */
        }
    /* set-up: 2 streams, 4 events: 6; pinned 50, 2 x 10: 76; first copy issued at 79, 87 .. 187, then one every 108 (their
     * slots are free in time: kernel 1 runs 188 .. 248). Copy 4 ends at 511, the sync returns at 513, so that copy 5 is issued at
     * 517 only: 525 .. 625, copy 6 633 .. 733. */
    CHECK(near_us(first[0], 513));
    CHECK(near_us(first[1], 733 + 1 + 60 + 2));
}

/* 1.2 MB of CPU work at 4 GB/s, alone: 10 + 300 us. With a copy of 200 us at 1 GB/s in it the CPU has 3 GB/s meanwhile. */
static void shared_dram() {
    for (emu_policy p : ALL_POLICIES) {
        begin(p);
        double t0 = emu_now();
        emu_work(1.2e6, 0);
        CHECK(near_us(emu_now() - t0, 310));
        t0 = emu_now();
        emu_work(0, 5e5); /* bound by flops */
        CHECK(near_us(emu_now() - t0, 510));
        cudaStream_t s = new_stream();
        float *d = device<float>(50000), *h = pinned<float>(50000);
        t0 = emu_now();
        upload(d, h, 200000, s); /* issued at 3, active 11 .. 211 */
        emu_work(1.2e6, 0);      /* starts at 13: 198 us at 3 GB/s = 594 KB, the other 606 KB take 151.5 */
        CHECK(near_us(emu_now() - t0, 362.5));
    }
}

static void polls() {
    for (emu_policy p : ALL_POLICIES) {
        begin(p);
        cudaStream_t s = new_stream();
        float *d = device<float>(1);
        kernel_us(d, 20, s); /* issued at 14, 15 .. 35 */
        int n = 0;
        while (cudaStreamQuery(s) == cudaErrorNotReady) n++;
        CHECK(n == 20 && near_us(emu_now(), 35));
    }
}

static void graph_time() {
    for (emu_policy p : ALL_POLICIES) {
        begin(p);
        cudaStream_t s = new_stream(); /* 1 */
        float *d = device<float>(1);   /* 11 */
        cudaGraph_t g;
        cudaGraphExec_t e;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 10; i++) kernel_us(d, 5, s);
        OK(cudaStreamEndCapture(s, &g));
        OK(cudaGraphInstantiate(&e, g, 0));
        double t0 = emu_now();
        OK(cudaGraphLaunch(e, s));
        CHECK(near_us(emu_now() - t0, 8));
        OK(cudaStreamSynchronize(s));
        CHECK(near_us(emu_now() - t0, 8 + 10 * 5.6 + 2));
        cudaGraphDestroy(g);
        cudaGraphExecDestroy(e);
    }
}

/* Device works 50 us, signals; host sees it 10 us later, works 30, answers; the device goes on 10 us after that. */
static void handover_time() {
    for (emu_policy p : ALL_POLICIES) {
        begin(p);
        cudaStream_t s = new_stream();                                 /* 1 */
        float *d = device<float>(1);                                   /* 11 */
        uint32_t *f = pinned<uint32_t>(2, cudaHostAllocMapped);        /* 61 */
        f[0] = f[1] = 0;
        kernel_us(d, 50, s);                                           /* issued at 64: 65 .. 115 */
        CHECK(!cuStreamWriteValue32(s, (CUdeviceptr)(uintptr_t)&f[0], 1, 0));
        CHECK(!cuStreamWaitValue32(s, (CUdeviceptr)(uintptr_t)&f[1], 1, CU_STREAM_WAIT_VALUE_GEQ));
        kernel_us(d, 20, s);
        emu_flag_wait(&f[0], 1);
        CHECK(near_us(emu_now(), 125));
        emu_work(0, 20e3);                                             /* 10 + 20: 155 */
        emu_flag_store(&f[1], 1);
        OK(cudaStreamSynchronize(s));                                  /* 165: 166 .. 186, 188 */
        CHECK(near_us(emu_now(), 188));
    }
}

/* A dry run of a model of 80 layers x 0.5 GB on a card for 29 of them: no bytes, no kernels, the same times every time. */
static void dry_run() {
    double first = 0;
    for (emu_policy p : ALL_POLICIES) {
        emu_machine m;
        CHECK(!emu_machine_get(&m, "v100-16g-pcie3"));
        m.sm = 0; /* as built */
        emu_reset(&m);
        emu_set_policy(p, 3);
        emu_set_dry(1);
        cudaStream_t s = new_stream();
        const size_t layer = 514 << 20;
        char *d, *h;
        OK(cudaMalloc(&d, 28 * layer));
        OK(cudaHostAlloc(&h, 52 * layer, 0)); /* 28 GB that this machine need not have */
        float *x = device<float>(8192), *hx = pinned<float>(8192);
        double t0 = emu_now();
        for (int token = 0; token < 4; token++) {
            for (int il = 0; il < 80; il++) {
                if (il < 28) {
                    GPU_COST(layer, 0, GPU_UNIT_F32);
                    OK(GPU_LAUNCH(nothing_k, dim3(1), dim3(32), 0, s, reinterpret_cast<float *>(d)));
                    continue;
                }
                if (il == 28) {
                    download(hx, x, 32768, s);
                    OK(cudaStreamSynchronize(s));
                }
                emu_work((double)layer, 0);
            }
            upload(x, hx, 32768, s);
        }
        OK(cudaStreamSynchronize(s));
        double t = (emu_now() - t0) / 4;
        double want = 28 * layer / 630e9 + 52 * layer / 36e9;
        CHECK(fabs(t / want - 1) < 0.01);
        if (first == 0) first = t;
        CHECK(t == first);
        CHECK(!emu_timeline_dump("/dev/null"));
        emu_set_dry(0);
    }
}

/* Two threads with clocks: the main one submits, a worker computes between two channels. Real delays are random. */
static emu_chan *to_worker, *to_main;
static int worker_id;
static unsigned nap_seed;
static void nap() { usleep((unsigned)rand_r(&nap_seed) % 300); }
static void *worker_main(void *) {
    emu_thread_begin(worker_id);
    for (;;) {
        void *item = emu_chan_pop(to_worker);
        if (!item) break;
        nap();
        emu_work(0, 40e3); /* 50 us */
        emu_chan_push(to_main, item);
    }
    emu_thread_end();
    return nullptr;
}
static void threads() {
    double first = 0;
    for (int run = 0; run < 30; run++) {
        begin(ALL_POLICIES[run % 5]);
        nap_seed = (unsigned)run;
        to_worker = emu_chan_new();
        to_main = emu_chan_new();
        worker_id = emu_thread_new();
        pthread_t t;
        pthread_create(&t, nullptr, worker_main, nullptr);
        cudaStream_t s = new_stream(), s2 = new_stream();
        float *d = device<float>(1), *h = pinned<float>(10000), *x = device<float>(10000);
        for (int i = 1; i <= 5; i++) {
            kernel_us(d, 30, s);
            emu_chan_push(to_worker, d);
            upload(x, h, 40000, s2);
            nap();
            OK(cudaStreamSynchronize(s));
            CHECK(emu_chan_pop(to_main) == d);
        }
        OK(cudaStreamSynchronize(s2));
        emu_chan_push(to_worker, nullptr);
        pthread_join(t, nullptr);
        if (run == 0) first = emu_now();
        CHECK(emu_now() == first);
        emu_chan_free(to_worker);
        emu_chan_free(to_main);
    }
}

static const test_case cases[] = {
    {"one stream", one_stream, nullptr},       {"overlapped copies", overlapped_copies, nullptr},
    {"shared DRAM", shared_dram, nullptr},     {"polls", polls, nullptr},
    {"graph", graph_time, nullptr},            {"hand-over", handover_time, nullptr},
    {"dry run", dry_run, nullptr},             {"threads", threads, nullptr},
};

int main(int argc, char **argv) { return run_cases(cases, sizeof cases / sizeof *cases, argc, argv); }
