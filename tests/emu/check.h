/* check.h: a small harness for the emulator's own tests. Each case runs in a child process with a fresh device: cases that
 * end in a report are as good as others. Quiet on success. The argument is a case's name; none: all. */
#ifndef EMU_CHECK_H
#define EMU_CHECK_H

#include <cuda_runtime.h>
#include <emu.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond);                                         \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        cudaError_t e_ = call;                                                                                         \
        if (e_ != cudaSuccess) {                                                                                       \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_));                     \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

struct test_case {
    const char *name;
    void (*run)();
    const char *report; /* text that the report must hold; null: the case must pass */
};

/* Runs fn in a child; its standard error and exit status. */
static inline int in_child(void (*fn)(), std::string *err) {
    int fd[2];
    if (pipe(fd)) abort();
    fflush(nullptr);
    pid_t pid = fork();
    if (!pid) {
        close(fd[0]);
        dup2(fd[1], 2);
        close(fd[1]);
        alarm(800);
        fn();
        fflush(nullptr);
        _exit(0);
    }
    close(fd[1]);
    char buf[4096];
    for (ssize_t n; (n = read(fd[0], buf, sizeof buf)) > 0;) err->append(buf, (size_t)n);
    close(fd[0]);
    int status;
    waitpid(pid, &status, 0);
    return status;
}

static inline int run_cases(const test_case *cases, int n, int argc, char **argv) {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) {
        printf("SKIPPED: this processor lacks AVX2 or F16C, which the emulated build uses\n");
        return 77;
    }
#endif
    int failed = 0, ran = 0;
    for (int i = 0; i < n; i++) {
        const test_case &c = cases[i];
        if (argc > 1 && strcmp(argv[1], c.name)) continue;
        ran++;
        std::string err;
        int status = in_child(c.run, &err);
        bool passed = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        bool reported = c.report && !passed && err.find(c.report) != std::string::npos;
        if (c.report ? reported : passed) continue;
        failed++;
        fprintf(stderr, "FAILED %s: status %#x, %s%s\n%s\n", c.name, (unsigned)status,
                c.report ? "expected a report with: " : "expected to pass", c.report ? c.report : "", err.c_str());
    }
    if (!ran) fprintf(stderr, "no such case\n");
    return failed || !ran;
}

static const emu_policy ALL_POLICIES[] = {EMU_EAGER, EMU_LAZY, EMU_RANDOM, EMU_COPY_FIRST, EMU_COMPUTE_FIRST};

static inline cudaStream_t new_stream() {
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}
static inline cudaEvent_t new_event() {
    cudaEvent_t e;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}
template <class T> static inline T *device(size_t n) {
    T *p;
    OK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T> static inline T *pinned(size_t n, unsigned flags = cudaHostAllocDefault) {
    T *p;
    OK(cudaHostAlloc(&p, n * sizeof(T), flags));
    return p;
}
static inline void upload(void *d, const void *h, size_t bytes, cudaStream_t s) {
    OK(cudaMemcpyAsync(d, h, bytes, cudaMemcpyHostToDevice, s));
}
static inline void download(void *h, const void *d, size_t bytes, cudaStream_t s) {
    OK(cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, s));
}

#endif
