/* pool.c: see pool.h.
 *
 * All coordination of a run is in one 64-bit word: its number in the upper half, the tasks not yet handed out in the
 * lower. A worker claims a task by a compare-and-swap that takes one off. A claim that succeeds belongs to a run that
 * cannot end before the task is done, so fn, arg and n_task are stable while they are read; a claim that fails touches
 * nothing. The driver therefore waits for tasks, never for workers: one that sleeps, or that the system has descheduled,
 * costs nothing when the others get through without it. */
#include "cpu/pool.h"

#include "core/err.h"
#include "core/mem.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    LINE = 64,
    SPIN_LIMIT = 20000, /* pauses (20-70 ns each) before an idle worker sleeps: longer than any gap inside a pass */
    YIELD_AFTER = 2000, /* pauses before the waiting driver lets others run: workers may outnumber the free cores */
    MAX_THREADS = 1024
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    int index, core; /* core < 0: unbound */
};

struct pool {
    _Alignas(LINE) _Atomic uint64_t run; /* number << 32 | tasks not handed out */
    pool_fn fn;                          /* of this run, written before `run` is published */
    void *arg;
    int n_task;
    _Atomic bool resting, quit;
    _Alignas(LINE) _Atomic int done;     /* tasks of this run that have ended */
    _Alignas(LINE) _Atomic int sleeping; /* workers in the futex or about to enter it */
    _Atomic uint32_t wake;               /* futex word, changed before each wake-up */
    int n_thread, n_created;
    _Atomic int n_started, n_unbound;
    struct worker *workers; /* [n_thread]; 0 is the driver */
};

static void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static bool bind_self(int core) {
    cpu_set_t set;
    if (core < 0 || core >= CPU_SETSIZE) return false;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

/* Runs tasks until none is left to claim. */
static void run_tasks(struct pool *p, int worker) {
    uint64_t run = atomic_load_explicit(&p->run, memory_order_acquire);
    while ((uint32_t)run) {
        if (!atomic_compare_exchange_weak_explicit(&p->run, &run, run - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        p->fn(p->arg, p->n_task - (int)(uint32_t)run, worker);
        atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
        run = atomic_load_explicit(&p->run, memory_order_acquire);
    }
}

static bool idle(struct pool *p) { return !(uint32_t)atomic_load(&p->run) && !atomic_load(&p->quit); }

/* A sleeper counts itself and then looks at `run`; the driver publishes `run` and then looks at the count. All of it is
 * sequentially consistent, so one of the two sees the other, and the changed futex word catches what lies between. */
static void sleep_until_work(struct pool *p) {
    atomic_fetch_add(&p->sleeping, 1);
    uint32_t seen = atomic_load(&p->wake);
    if (idle(p)) syscall(SYS_futex, &p->wake, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&p->sleeping, 1);
}

static void wake_sleepers(struct pool *p) {
    if (atomic_load(&p->sleeping) == 0) return;
    atomic_fetch_add(&p->wake, 1);
    syscall(SYS_futex, &p->wake, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    struct pool *p = w->pool;
    if (!bind_self(w->core)) atomic_fetch_add(&p->n_unbound, 1);
    atomic_fetch_add(&p->n_started, 1);
    while (!atomic_load_explicit(&p->quit, memory_order_acquire)) {
        run_tasks(p, w->index);
        int spins = 0;
        while (idle(p) && ++spins < SPIN_LIMIT && !atomic_load_explicit(&p->resting, memory_order_relaxed)) pause_cpu();
        if (idle(p)) sleep_until_work(p);
    }
    return NULL;
}

static void wait_for(_Atomic int *count, int want) {
    for (int i = 0; atomic_load_explicit(count, memory_order_acquire) != want; i++) {
        if (i < YIELD_AFTER) pause_cpu();
        else sched_yield();
    }
}

static int start_workers(struct pool *p) {
    for (p->n_created = 1; p->n_created < p->n_thread; p->n_created++) {
        struct worker *w = &p->workers[p->n_created];
        int e = pthread_create(&w->thread, NULL, worker_main, w);
        if (e)
            return err_set(ERR_NOMEM, "thread pool: thread %d of %d cannot be started: %s", p->n_created + 1, p->n_thread,
                           strerror(e));
    }
    wait_for(&p->n_started, p->n_thread - 1);
    return 0;
}

int pool_open(struct pool **out, int n_thread, const int *cores, int n_core) {
    if (n_thread < 1 || n_thread > MAX_THREADS)
        return err_set(ERR_ARG, "thread pool of %d threads (allowed: 1 to %d)", n_thread, MAX_THREADS);
    if (cores && n_core < 1) return err_set(ERR_ARG, "thread pool with an empty list of cores");
    struct pool *p = mem_alloc(sizeof *p, LINE, "thread pool");
    if (!p) return ERR_NOMEM;
    p->n_thread = n_thread;
    p->workers = mem_alloc((size_t)n_thread * sizeof *p->workers, LINE, "thread pool");
    int rc = p->workers ? 0 : ERR_NOMEM;
    if (rc) goto out;
    for (int i = 0; i < n_thread; i++)
        p->workers[i] = (struct worker){.pool = p, .index = i, .core = cores ? cores[i % n_core] : -1};
    if (!bind_self(p->workers[0].core)) atomic_fetch_add(&p->n_unbound, 1);
    rc = start_workers(p);
    if (rc) goto out;
    *out = p;
    return 0;
out:
    pool_close(p);
    return rc;
}

void pool_close(struct pool *p) {
    if (!p) return;
    atomic_store(&p->quit, true);
    wake_sleepers(p);
    for (int i = 1; i < p->n_created; i++) pthread_join(p->workers[i].thread, NULL);
    mem_free(p->workers);
    mem_free(p);
}

int pool_threads(const struct pool *p) { return p->n_thread; }
int pool_unbound(const struct pool *p) { return atomic_load(&p->n_unbound); }

void pool_run(struct pool *p, pool_fn fn, void *arg, int n_task) {
    if (n_task <= 1 || p->n_thread == 1) {
        for (int i = 0; i < n_task; i++) fn(arg, i, 0);
        return;
    }
    p->fn = fn, p->arg = arg, p->n_task = n_task;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store_explicit(&p->resting, false, memory_order_relaxed);
    uint64_t number = (atomic_load_explicit(&p->run, memory_order_relaxed) >> 32) + 1;
    atomic_store(&p->run, number << 32 | (uint32_t)n_task);
    wake_sleepers(p);
    run_tasks(p, 0);
    wait_for(&p->done, n_task);
}

void pool_rest(struct pool *p) { atomic_store_explicit(&p->resting, true, memory_order_relaxed); }
