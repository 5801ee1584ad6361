/* pool.h: worker threads bound to cores. The caller's thread is worker 0 and takes part in every run.
 * Workers spin while a pass is under way (a barrier costs well under a microsecond) and sleep on a futex otherwise.
 * One driver thread per pool. No allocation after open. */
#ifndef LH_CPU_POOL_H
#define LH_CPU_POOL_H

struct pool;

/* task: 0..n_task-1; worker: 0..threads-1 (for per-thread scratch). */
typedef void (*pool_fn)(void *arg, int task, int worker);

/* n_thread >= 1 workers, the caller included. cores: ?[n_core] CPU numbers, worker i is bound to cores[i % n_core];
 * NULL: workers stay unbound. Never binds the calling thread unless it is given cores. A failed binding (container,
 * cpuset) is not an error: pool_unbound tells how many workers run unbound. */
int pool_open(struct pool **out, int n_thread, const int *cores, int n_core);
void pool_close(struct pool *p);
int pool_threads(const struct pool *p);
int pool_unbound(const struct pool *p);

/* Runs fn for every task and returns when all are done. Tasks are handed out in increasing order as workers become
 * free, so which worker gets which task is not fixed: results must not depend on it. n_task 0 or 1 run in place. */
void pool_run(struct pool *p, pool_fn fn, void *arg, int n_task);

/* Between passes: workers stop spinning until the next pool_run (which wakes them). */
void pool_rest(struct pool *p);

#endif
