/* test_pool.c: every task of every run exactly once, whatever the number of threads, sleeping workers or bindings. Run it
 * under -fsanitize=thread as well. */
#include "core/err.h"
#include "cpu/pool.h"
#include "tests/support.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_TASK = 300, MAX_THREAD = 4 };

struct seen {
    int count[MAX_TASK];             /* plain: each task is run by one worker, the run's end must publish it */
    _Atomic int per_worker[MAX_THREAD];
    _Atomic int bad;
    int n_task, n_thread, round;
};

static void mark(void *arg, int task, int worker) {
    struct seen *s = arg;
    if (task < 0 || task >= s->n_task || worker < 0 || worker >= s->n_thread) {
        atomic_fetch_add(&s->bad, 1);
        return;
    }
    s->count[task] += s->round;
    atomic_fetch_add(&s->per_worker[worker], 1);
}

static void run_and_check(struct pool *p, struct seen *s, int n_task) {
    s->n_task = n_task;
    s->n_thread = pool_threads(p);
    s->round++;
    for (int i = 0; i < n_task; i++) s->count[i] = i;
    pool_run(p, mark, s, n_task);
    assert_int_equal(atomic_load(&s->bad), 0);
    for (int i = 0; i < n_task; i++)
        if (s->count[i] != i + s->round)
            fail_msg("round %d, %d threads, %d tasks: task %d left %d, expected %d", s->round, s->n_thread, n_task, i,
                     s->count[i], i + s->round);
}

static void every_task_once(void **state) {
    (void)state;
    static const int n_task[] = {0, 1, 2, 3, 7, 64, MAX_TASK};
    for (int n_thread = 1; n_thread <= MAX_THREAD; n_thread++) {
        struct seen *s = calloc(1, sizeof *s);
        struct pool *p;
        assert_int_equal(pool_open(&p, n_thread, NULL, 0), 0);
        assert_int_equal(pool_threads(p), n_thread);
        assert_int_equal(pool_unbound(p), n_thread);
        for (int i = 0; i < 400; i++) run_and_check(p, s, n_task[i % 7]);
        pool_close(p);
        free(s);
    }
}

static void many_tiny_runs(void **state) {
    (void)state;
    struct seen *s = calloc(1, sizeof *s);
    struct pool *p;
    assert_int_equal(pool_open(&p, 2, NULL, 0), 0);
    for (int i = 0; i < 20000; i++) run_and_check(p, s, 2 + i % 3);
    pool_close(p);
    free(s);
}

/* Workers that were told to rest, or that fell asleep by themselves, are woken by the next run. */
static void wakes_after_rest(void **state) {
    (void)state;
    struct seen *s = calloc(1, sizeof *s);
    struct pool *p;
    assert_int_equal(pool_open(&p, 3, NULL, 0), 0);
    for (int i = 0; i < 200; i++) {
        pool_rest(p);
        if (i % 20 == 0) usleep(5000);
        run_and_check(p, s, 50);
        run_and_check(p, s, 5);
    }
    usleep(50000); /* past the spin limit without pool_rest */
    run_and_check(p, s, 50);
    pool_rest(p);
    usleep(2000);
    pool_close(p); /* closing a sleeping pool ends too */
    free(s);
}

struct rendezvous {
    _Atomic int arrived;
    int want;
};

/* Only passes when `want` workers are inside at the same time. */
static void meet(void *arg, int task, int worker) {
    (void)task, (void)worker;
    struct rendezvous *r = arg;
    atomic_fetch_add(&r->arrived, 1);
    for (int i = 0; i < 100000 && atomic_load(&r->arrived) < r->want; i++) usleep(50);
}

static void all_workers_take_part(void **state) {
    (void)state;
    struct pool *p;
    assert_int_equal(pool_open(&p, MAX_THREAD, NULL, 0), 0);
    for (int i = 0; i < 20; i++) {
        struct rendezvous r = {.want = MAX_THREAD};
        if (i % 2) pool_rest(p), usleep(1000);
        pool_run(p, meet, &r, MAX_THREAD);
        assert_int_equal(atomic_load(&r.arrived), MAX_THREAD);
    }
    pool_close(p);
}

static void binding_failures_are_counted(void **state) {
    (void)state;
    struct seen *s = calloc(1, sizeof *s);
    struct pool *p;
    const int none[] = {-1, 100000, 1023}; /* never in a cpuset of this machine */
    assert_int_equal(pool_open(&p, 3, none, 3), 0);
    assert_int_equal(pool_unbound(p), 3);
    for (int i = 0; i < 10; i++) run_and_check(p, s, 20);
    pool_close(p);
    free(s);
}

static void rejects_bad_counts(void **state) {
    (void)state;
    struct pool *p = NULL;
    const int core = 0;
    assert_int_equal(pool_open(&p, 0, NULL, 0), ERR_ARG);
    assert_int_equal(pool_open(&p, -3, NULL, 0), ERR_ARG);
    assert_int_equal(pool_open(&p, 1 << 20, NULL, 0), ERR_ARG);
    assert_int_equal(pool_open(&p, 2, &core, 0), ERR_ARG);
    assert_null(p);
    pool_close(NULL);
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(every_task_once),        cmocka_unit_test(many_tiny_runs),
        cmocka_unit_test(wakes_after_rest),       cmocka_unit_test(all_workers_take_part),
        cmocka_unit_test(binding_failures_are_counted), cmocka_unit_test(rejects_bad_counts),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
