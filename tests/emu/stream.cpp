/* stream.cpp: streams as queues of operations, what the policy runs when, waiting, events and host functions.
 * Nothing runs by itself: operations are executed by the host threads inside their calls, one at a time, under the lock.
 *   eager          everything that can run does so at once, in the order of the calls
 *   lazy           only what a wait needs: its dependencies and no more
 *   random         now and then some operation that can run; during a wait any of them until the awaited one is done
 *   copy_first     copies as soon as they can, kernels only when a wait needs them; compute_first the other way round */
#include "runtime.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

bool stream_valid(cudaStream_t st) {
    auto &s = rt().streams;
    return std::find(s.begin(), s.end(), st) != s.end();
}

cudaStream_t stream_new(bool hidden) {
    runtime &r = rt();
    size_t id = 0;
    while (id < r.slot_used.size() && r.slot_used[id]) id++;
    if (id == r.slot_used.size()) {
        r.slot_used.push_back(false);
        r.slot_next.push_back(0);
    }
    r.slot_used[id] = true;
    cudaStream_t st = new CUstream_st();
    st->id = (int)id;
    st->hidden = hidden;
    if (tsan_on()) st->tsan = __tsan_create_fiber(0);
    r.streams.push_back(st);
    if (!hidden) r.stats.streams++;
    return st;
}

void stream_free(cudaStream_t st) {
    runtime &r = rt();
    r.slot_used[(size_t)st->id] = false;
    if (st->tsan) __tsan_destroy_fiber(st->tsan);
    if (!st->hidden) r.stats.streams--;
    r.streams.erase(std::find(r.streams.begin(), r.streams.end(), st));
    delete st;
}

op_ref op_new(op_kind k, const char *name, cudaStream_t st) {
    auto o = std::make_shared<op>();
    o->kind = k;
    o->name = name;
    o->stream = st;
    o->sid = st ? st->id : -1;
    o->eng = ENGINE_NONE;
    return o;
}

static void merge(std::vector<uint32_t> &a, const std::vector<uint32_t> &b) {
    if (a.size() < b.size()) a.resize(b.size());
    for (size_t i = 0; i < b.size(); i++) a[i] = std::max(a[i], b[i]);
}

void op_push(const op_ref &o) {
    runtime &r = rt();
    cudaStream_t st = o->stream;
    o->seq = ++r.seq;
    o->index = ++r.slot_next[(size_t)st->id];
    o->issue = me().now;
    for (auto &d : o->deps) {
        merge(st->seen, d->seen);
        if (st->seen.size() <= (size_t)d->sid) st->seen.resize((size_t)d->sid + 1);
        uint32_t &s = st->seen[(size_t)d->sid];
        s = std::max(s, d->index);
    }
    o->seen = st->seen;
    st->last = o;
    st->queue.push_back(o);
    st->vqueue.push_back(o);
    flags_logged(o);
    tsan_release(o.get());
}

/* --- running ----------------------------------------------------------------------------------------------------------------- */

static bool can_run(const op_ref &o) {
    for (auto &d : o->deps)
        if (!d->done) return false;
    for (auto &m : o->mem) {
        if (m.wait && !memop_satisfied(m)) return false;
        if (!m.wait) break; /* a batch: later waits are looked at when they come */
    }
    return !o->running;
}

static void finish(const op_ref &o) {
    o->done = true;
    o->running = false;
    o->stream->queue.pop_front();
    if (o->committed) o->deps.clear();
}

static void run_host_function(const op_ref &o) {
    o->running = true;
    rt().host_running++;
    std::thread([o] {
        runtime &r = rt();
        tsan_acquire(o.get());
        {
            std::lock_guard<std::mutex> l(r.lock);
            me() = {0, false, false, nullptr}; /* its clock counts its own work */
        }
        o->body();
        tsan_release(o.get());
        std::lock_guard<std::mutex> l(r.lock);
        o->body = nullptr;
        o->dur += me().now;
        o->stream->join = o;
        r.host_running--;
        finish(o);
        after_enqueue();
        r.changed.notify_all();
    }).detach();
}

static void run(const op_ref &o) {
    runtime &r = rt();
    cudaStream_t st = o->stream;
    host_writes_apply(o->seq);
    for (span s : o->pinned) pending_flush_range(*o, s);
    if (o->kind == OP_HOST) pending_flush(*o);
    if (o->kind == OP_FLAGS) flags_run(*o);
    if (o->move) o->move();
    if (o->hold) o->hold(*o);
    if (tsan_on()) { /* the rest in the stream's own thread of time: it knows what the stream has waited for and no more */
        void *self = __tsan_get_current_fiber();
        __tsan_switch_to_fiber(st->tsan, 1);
        tsan_acquire(o.get());
        for (auto &d : o->deps) tsan_acquire(d.get());
        if (st->join) tsan_acquire(st->join.get());
        tsan_read(o->reads.p, o->reads.n);
        tsan_write(const_cast<char *>(o->writes.p), o->writes.n);
        if (o->kind == OP_KERNEL && o->body) {
            o->body();
            o->body = nullptr;
        }
        for (auto &m : o->mem) m.wait ? tsan_acquire(m.flag) : tsan_release(m.flag);
        tsan_release(o.get());
        __tsan_switch_to_fiber(self, 1);
        st->join = nullptr;
    } else if (o->kind == OP_KERNEL && o->body) {
        o->body();
        o->body = nullptr;
    }
    if (o->mapped) device_writes_note(*o);
    if (o->kind == OP_KERNEL) memory_check_bounds(o->name.c_str());
    if (o->kind == OP_HOST)
        run_host_function(o);
    else
        finish(o);
    r.changed.notify_all();
}

static uint64_t next_random() {
    uint64_t &x = rt().rng;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

/* The earliest operation that can run (or any, at random) among those that `wanted` accepts. */
template <class F> static op_ref choose(F wanted, bool random) {
    op_ref best;
    unsigned n = 0;
    for (cudaStream_t st : rt().streams) {
        if (st->queue.empty()) continue;
        const op_ref &o = st->queue.front();
        if (!can_run(o) || !wanted(*o)) continue;
        n++;
        if (!best || (random ? next_random() % n == 0 : o->seq < best->seq)) best = o;
    }
    return best;
}

static bool is_copy(const op &o) { return o.eng == ENGINE_H2D || o.eng == ENGINE_D2H || o.eng == ENGINE_NONE; }
static bool is_compute(const op &o) { return o.eng == ENGINE_COMPUTE || o.eng == ENGINE_NONE; }

/* An operation that can run now and that `target` needs: itself, one before it in its stream, an awaited one, or the
 * writer of a flag that one of these waits for. */
static op_ref needed(const op_ref &target, int depth) {
    if (target->done || depth > 64) return nullptr;
    const op_ref &head = target->stream->queue.front();
    if (can_run(head)) return head;
    for (auto &d : head->deps)
        if (op_ref o = needed(d, depth + 1)) return o;
    for (auto &m : head->mem) {
        if (!m.wait || memop_satisfied(m)) continue;
        for (cudaStream_t st : rt().streams)
            for (auto &o : st->queue)
                for (auto &w : o->mem)
                    if (!w.wait && w.flag == m.flag)
                        if (op_ref n = needed(o, depth + 1)) return n;
    }
    return nullptr;
}

op_ref find_runnable(const op_ref &target) {
    switch (rt().policy) {
    case EMU_EAGER: return choose([](const op &) { return true; }, false);
    case EMU_RANDOM: return choose([](const op &) { return true; }, true);
    case EMU_COPY_FIRST:
        if (op_ref o = choose(is_copy, false)) return o;
        break;
    case EMU_COMPUTE_FIRST:
        if (op_ref o = choose(is_compute, false)) return o;
        break;
    case EMU_LAZY: break;
    }
    return target ? needed(target, 0) : choose([](const op &) { return true; }, false);
}

bool run_one(const op_ref &toward) {
    op_ref o = find_runnable(toward);
    if (o) run(o);
    return o != nullptr;
}

void after_enqueue() {
    for (;;) {
        op_ref o;
        switch (rt().policy) {
        case EMU_EAGER: o = choose([](const op &) { return true; }, false); break;
        case EMU_RANDOM:
            if (next_random() & 1) o = choose([](const op &) { return true; }, true);
            break;
        case EMU_COPY_FIRST: o = choose(is_copy, false); break;
        case EMU_COMPUTE_FIRST: o = choose(is_compute, false); break;
        case EMU_LAZY: break;
        }
        if (!o) return;
        run(o);
    }
}

/* --- waiting ------------------------------------------------------------------------------------------------------------------ */

static int process_threads() {
    int n = 1;
    if (FILE *f = fopen("/proc/self/status", "r")) {
        char line[128];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "Threads: %d", &n) == 1) break;
        fclose(f);
    }
    return n;
}

static void report_hang(const char *what) {
    fprintf(stderr, "EMU: %s cannot end; heads of the streams:\n", what);
    for (cudaStream_t st : rt().streams) {
        if (st->queue.empty()) continue;
        const op &o = *st->queue.front();
        fprintf(stderr, "EMU:   stream %d: %s%s", st->id, o.name.c_str(), o.running ? " (running)" : "");
        for (auto &m : o.mem)
            if (m.wait && !memop_satisfied(m))
                fprintf(stderr, ", waits for flag %p (%u) to reach %u", (void *)m.flag, *(volatile uint32_t *)m.flag, m.value);
        for (auto &d : o.deps)
            if (!d->done) fprintf(stderr, ", waits for %s of stream %d", d->name.c_str(), d->sid);
        fprintf(stderr, "\n");
    }
    emu_report("deadlock: %s waits for something that nothing can bring about", what);
}

void wait_for_others(std::unique_lock<std::mutex> &l, const char *what, double *waited_s) {
    runtime &r = rt();
    if (!r.host_running && (process_threads() <= (tsan_on() ? 2 : 1) || *waited_s > r.hang_s)) report_hang(what);
    r.changed.wait_for(l, std::chrono::milliseconds(1)); /* a flag may be stored without telling us */
    *waited_s += 1e-3;
}

void run_until(std::unique_lock<std::mutex> &l, const op_ref &target) {
    double waited = 0;
    while (!target->done) {
        if (run_one(target))
            waited = 0;
        else
            wait_for_others(l, target->name.c_str(), &waited);
    }
}

void host_wait(std::unique_lock<std::mutex> &l, const op_ref &target) {
    runtime &r = rt();
    run_until(l, target);
    vt_commit_until(l, target);
    pending_flush(*target);
    host_thread &h = me();
    h.now = std::max(h.now, target->end) + r.machine.sync_us * 1e-6;
    tsan_acquire(target.get());
}

void host_wait_all(std::unique_lock<std::mutex> &l) {
    for (size_t i = 0; i < rt().streams.size(); i++)
        if (op_ref o = rt().streams[i]->last) host_wait(l, o);
}

/* --- API ----------------------------------------------------------------------------------------------------------------------- */

static cudaError_t create(cudaStream_t *st, unsigned flags) {
    if (flags != cudaStreamNonBlocking) {
        fprintf(stderr, "EMU: streams must be created with cudaStreamNonBlocking\n");
        return set_error(cudaErrorInvalidValue);
    }
    *st = stream_new(false);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *st) {
    api a("cudaStreamCreate", api_s(), cudaErrorMemoryAllocation);
    return a.err ? a.err : create(st, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *st, unsigned flags) {
    api a("cudaStreamCreateWithFlags", api_s(), cudaErrorMemoryAllocation);
    return a.err ? a.err : create(st, flags);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *st, unsigned flags, int) {
    api a("cudaStreamCreateWithPriority", api_s(), cudaErrorMemoryAllocation);
    return a.err ? a.err : create(st, flags);
}

static bool usable(cudaStream_t st, const char *call) {
    if (stream_valid(st) && !st->hidden) return true;
    if (!st || st == cudaStreamLegacy || st == cudaStreamPerThread)
        fprintf(stderr, "EMU: %s on the default stream: use an explicit one\n", call);
    return false;
}

cudaError_t cudaStreamDestroy(cudaStream_t st) {
    api a("cudaStreamDestroy", api_s(), cudaErrorUnknown);
    if (!usable(st, "cudaStreamDestroy")) return set_error(cudaErrorInvalidResourceHandle);
    if (st->cap) return set_error(cudaErrorStreamCaptureUnsupported);
    if (rt().sticky) { /* a lost device does nothing any more, but a function that it has called goes on */
        while (!st->queue.empty() && st->queue.front()->running) rt().changed.wait(a.lock);
        for (auto &o : st->queue) o->done = true;
        st->queue.clear();
    } else if (st->last) { /* a device would finish in the background */
        run_until(a.lock, st->last);
        vt_commit_until(a.lock, st->last);
    }
    stream_free(st);
    return a.err;
}

cudaError_t cudaStreamSynchronize(cudaStream_t st) {
    api a("cudaStreamSynchronize", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!usable(st, "cudaStreamSynchronize")) return set_error(cudaErrorInvalidResourceHandle);
    if (st->cap) return set_error(cudaErrorStreamCaptureUnsupported);
    if (op_ref last = st->last)
        host_wait(a.lock, last);
    else
        me().now += rt().machine.sync_us * 1e-6;
    return cudaSuccess;
}

/* Answers by the virtual clock, so that the number of polls does not depend on what really ran. */
static cudaError_t query(std::unique_lock<std::mutex> &l, const op_ref &o) {
    static int in_vain;
    vt_commit_upto(l, me().now);
    if (!o->committed || o->end > me().now + 1e-12) { /* sums of microseconds are not exact */
        if (++in_vain > 10 * 1000 * 1000) emu_report("polled %d times for %s, which does not end", in_vain, o->name.c_str());
        return cudaErrorNotReady;
    }
    in_vain = 0;
    run_until(l, o);
    pending_flush(*o);
    tsan_acquire(o.get());
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t st) {
    api a("cudaStreamQuery", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!usable(st, "cudaStreamQuery")) return set_error(cudaErrorInvalidResourceHandle);
    if (st->cap) return set_error(cudaErrorStreamCaptureUnsupported);
    return st->last ? query(a.lock, st->last) : cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t st, cudaHostFn_t fn, void *user) {
    api a("cudaLaunchHostFunc", launch_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!usable(st, "cudaLaunchHostFunc")) return set_error(cudaErrorInvalidResourceHandle);
    op_ref o = op_new(OP_HOST, "host function", st);
    o->body = [fn, user] { fn(user); };
    o->dur = 15e-6;
    rt().stats.host_funcs++;
    return op_enqueue(o);
}

/* --- events -------------------------------------------------------------------------------------------------------------------- */

static cudaError_t event_new(cudaEvent_t *ev, unsigned flags) {
    *ev = new CUevent_st();
    (*ev)->flags = flags;
    rt().events.insert(*ev);
    rt().stats.events++;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *ev) {
    api a("cudaEventCreate", api_s(), cudaErrorMemoryAllocation);
    return a.err ? a.err : event_new(ev, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ev, unsigned flags) {
    api a("cudaEventCreateWithFlags", api_s(), cudaErrorMemoryAllocation);
    return a.err ? a.err : event_new(ev, flags);
}

static bool event_valid(cudaEvent_t ev) { return rt().events.count(ev) != 0; }

cudaError_t cudaEventDestroy(cudaEvent_t ev) {
    api a("cudaEventDestroy", api_s(), cudaErrorUnknown);
    if (!event_valid(ev)) return set_error(cudaErrorInvalidResourceHandle);
    rt().events.erase(ev);
    rt().stats.events--;
    delete ev;
    return a.err;
}

cudaError_t cudaEventSynchronize(cudaEvent_t ev) {
    api a("cudaEventSynchronize", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!event_valid(ev)) return set_error(cudaErrorInvalidResourceHandle);
    if (ev->cap) return set_error(cudaErrorCapturedEvent);
    if (op_ref o = ev->rec) host_wait(a.lock, o);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t ev) {
    api a("cudaEventQuery", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!event_valid(ev)) return set_error(cudaErrorInvalidResourceHandle);
    if (ev->cap) return set_error(cudaErrorCapturedEvent);
    return ev->rec ? query(a.lock, ev->rec) : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    api a("cudaEventElapsedTime", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!event_valid(from) || !event_valid(to) || !from->rec || !to->rec || ((from->flags | to->flags) & cudaEventDisableTiming))
        return set_error(cudaErrorInvalidResourceHandle);
    if (!from->rec->committed || !to->rec->committed || std::max(from->rec->end, to->rec->end) > me().now + 1e-12)
        return set_error(cudaErrorNotReady);
    *ms = (float)((to->rec->end - from->rec->end) * 1e3);
    return cudaSuccess;
}
