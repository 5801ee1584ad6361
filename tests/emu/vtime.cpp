/* vtime.cpp: machines and the virtual timeline. Operations are placed on it ("committed") in the order of the time at which
 * they become ready, not in the order in which they really ran, and never further than a host thread's wait needs: what is
 * issued later can still go in front. So the times do not depend on the policy.
 *   ready = max(call, end of the operation before in the stream, ends of awaited ones); start = max(ready + gap, engine free)
 * Engines: compute, H2D, D2H, each in order of ready time, ties by stream. CPU work is cut where copies begin and end. */
#include "runtime.h"

#include <algorithm>
#include <cmath>
#include <cstring>

/* --- machines ---------------------------------------------------------------------------------------------------------------- */

struct preset {
    const char *name;
    int sm, n_sm;
    double vram, vram_gbps, f32, tensor, link, pageable, dram, cpu_gflops;
};
/* Rates of the built-in machine files; shares as there: 0.70 of VRAM bandwidth, 0.9 of DRAM for CPU kernels. */
static const preset presets[] = {
    {"emu", 0, 8, 256 << 20, 500, 8, 30, 12, 4, 40, 350},
    {"v100-16g-pcie3", 70, 80, 16.94e9, 900, 9, 60, 12, 4, 40, 350},
    {"v100-16g-pcie3-6ch", 70, 80, 16.94e9, 900, 9, 60, 12, 4, 100, 1000},
    {"2080ti-11g", 75, 68, 11.55e9, 616, 8, 50, 12, 4, 40, 500},
    {"3090-24g", 86, 82, 25.77e9, 936, 18, 55, 25, 8, 65, 900},
    {"4090-24g", 89, 128, 25.76e9, 1008, 40, 130, 25, 8, 65, 900},
    {"5070ti-16g", 120, 70, 17.1e9, 896, 22, 90, 52, 12, 75, 1200},
    {"5090-32g", 120, 170, 34.19e9, 1792, 50, 170, 52, 12, 75, 1200},
    {"5090-32g-8ch", 120, 170, 34.19e9, 1792, 50, 170, 52, 12, 220, 2400},
    {"h200-141g", 90, 132, 150.75e9, 4800, 40, 550, 52, 12, 250, 2400},
};

int emu_machine_get(struct emu_machine *m, const char *name) {
    for (const preset &p : presets) {
        if (strcmp(p.name, name)) continue;
        *m = {};
        snprintf(m->name, sizeof m->name, "%s", p.name);
        m->sm = p.sm;
        m->n_sm = p.n_sm;
        m->vram_bytes = p.vram;
        m->runtime_bytes = p.sm ? 0.5e9 : 0;
        m->vram_gbps = p.vram_gbps;
        m->vram_share = 0.70;
        m->tflops[EMU_F32] = p.f32;
        m->tflops[EMU_F16] = 2 * p.f32;
        m->tflops[EMU_INT8] = 4 * p.f32;
        m->tflops[EMU_TENSOR] = p.tensor;
        m->min_kernel_us = 2;
        m->launch_us = 3;
        m->gap_us = 1;
        m->graph_gap_us = 0.6;
        m->graph_launch_us = 8;
        m->api_us = 1;
        m->sync_us = 2;
        m->handover_us = 10;
        m->copy_engines = 2;
        m->h2d_gbps = m->d2h_gbps = p.link;
        m->pageable_gbps = p.pageable;
        m->copy_latency_us = 8;
        m->dram_gbps = m->dram_with_dma_gbps = p.dram;
        m->cpu_share = 0.9;
        m->cpu_gflops = p.cpu_gflops;
        m->dispatch_us = 10;
        m->pinned_bytes = -1;
        return 0;
    }
    return -1;
}

/* --- placing operations --------------------------------------------------------------------------------------------------------- */

double vt_kernel_s(double bytes, double flops, int unit) {
    const emu_machine &m = rt().machine;
    double t = std::max(bytes / (m.vram_gbps * 1e9 * m.vram_share), flops / (m.tflops[unit] * 1e12));
    return std::max(t, m.min_kernel_us * 1e-6);
}

/* When the head of a stream becomes ready; false: not known yet. */
bool vt_ready(const op_ref &o, double *t) {
    *t = std::max(o->issue, o->stream->vend);
    for (auto &d : o->deps) {
        if (!d->committed) return false;
        *t = std::max(*t, d->end);
    }
    for (auto &m : o->mem) {
        if (!m.wait) continue;
        flag_entry *e = flag_match(m);
        if (!e) {
            if (!o->done) return false;
            continue; /* the host stored it without telling: no time is known */
        }
        if (!e->by_host && !e->by->committed && e->by != o) return false;
        *t = std::max(*t, (e->by_host ? e->t : e->by->end) + rt().machine.handover_us * 1e-6);
    }
    return true;
}

static void commit(const op_ref &o, double ready) {
    runtime &r = rt();
    engine e = o->eng == ENGINE_D2H && r.machine.copy_engines < 2 ? ENGINE_H2D : o->eng;
    o->start = ready;
    if (e != ENGINE_NONE) {
        o->start = std::max(ready + o->gap, r.engine_free[e]);
        r.engine_free[e] = o->start + o->dur;
        if (r.timeline.size() < 4 * 1000 * 1000)
            r.timeline.push_back({o->eng, o->stream->id, o->start, o->start + o->dur, o->bytes, o->name});
    }
    o->end = o->start + o->dur;
    if (o->eng == ENGINE_COMPUTE) r.stats.compute_busy_s += o->dur;
    if (o->eng == ENGINE_H2D) r.stats.h2d_busy_s += o->dur;
    if (o->eng == ENGINE_D2H) r.stats.d2h_busy_s += o->dur;
    if ((o->eng == ENGINE_H2D || o->eng == ENGINE_D2H) && o->dur > 0)
        r.copies.push_back({o->eng, 0, o->start, o->end, o->bytes, {}});
    flags_commit(*o);
    o->committed = true;
    o->stream->vend = o->end;
    o->stream->vqueue.pop_front();
    if (o->done) o->deps.clear();
    for (auto &t : r.threads)
        if (t.second->waits_for == o) { /* at this very moment: others must not run ahead of it */
            t.second->waits_for = nullptr;
            t.second->waiting = false;
            t.second->now = std::max(t.second->now, o->end);
        }
    r.changed.notify_all();
}

/* The head with the smallest ready time, null: none is known. Host functions must have run: how long they take is theirs. */
static op_ref next_head(double *t) {
    op_ref best;
    for (cudaStream_t st : rt().streams) {
        if (st->vqueue.empty()) continue;
        double at;
        const op_ref &o = st->vqueue.front();
        if (!vt_ready(o, &at)) continue;
        if (!best || at < *t || (at == *t && st->id < best->stream->id)) {
            best = o;
            *t = at;
        }
    }
    return best;
}

/* Whether a thread with an earlier clock may still issue something that becomes ready before t. */
static bool held_back(double t) {
    host_thread *self = &me();
    for (auto &h : rt().threads)
        if (h.second.get() != self && h.second->registered && !h.second->waiting && h.second->now <= t) return true;
    return false;
}

/* Commits the next head if it becomes ready by `limit`. False: nothing is known that does. */
static bool commit_next(std::unique_lock<std::mutex> &l, double limit) {
    double t = 0, waited = 0;
    for (;;) {
        op_ref o = next_head(&t);
        if (!o || t > limit) return false;
        if (held_back(t)) {
            wait_for_others(l, "virtual time: a registered thread does not go on, and", &waited);
            continue;
        }
        if (o->kind == OP_HOST && !o->done) {
            run_until(l, o);
            continue;
        }
        commit(o, t);
        return true;
    }
}

void vt_thread_waits(const op_ref &o) {
    host_thread &h = me();
    h.waiting = true;
    h.waits_for = o;
    rt().changed.notify_all();
}

void vt_commit_until(std::unique_lock<std::mutex> &l, const op_ref &target) {
    double waited = 0;
    if (!target->committed && me().registered) vt_thread_waits(target);
    while (!target->committed) {
        if (!commit_next(l, HUGE_VAL)) wait_for_others(l, "virtual time: nothing can go on, and the thread", &waited);
    }
    me().waiting = false;
    me().waits_for = nullptr;
}

void vt_commit_upto(std::unique_lock<std::mutex> &l, double t) {
    while (commit_next(l, t)) {}
}

/* --- host clocks ------------------------------------------------------------------------------------------------------------------ */

static thread_local std::shared_ptr<host_thread> t_me;

host_thread &me() {
    if (!t_me) t_me = std::make_shared<host_thread>(host_thread{0, false, false, nullptr});
    return *t_me;
}

double emu_now(void) {
    std::lock_guard<std::mutex> l(rt().lock);
    return me().now;
}

void emu_advance(double seconds) {
    std::lock_guard<std::mutex> l(rt().lock);
    me().now += seconds;
    rt().changed.notify_all();
}

void emu_work(double bytes, double flops) {
    runtime &r = rt();
    std::unique_lock<std::mutex> l(r.lock);
    const emu_machine &m = r.machine;
    double t = me().now + m.dispatch_us * 1e-6, begin = me().now, left = bytes;
    double alone = m.dram_gbps * 1e9 * m.cpu_share, by_flops = t + flops / (m.cpu_gflops * 1e9);
    while (left > 0) {
        vt_commit_upto(l, t);
        while (!r.copies.empty() && r.copies.front().end <= begin) r.copies.pop_front();
        double dma = 0, next = HUGE_VAL, ready;
        for (auto &c : r.copies) {
            if (c.start <= t && t < c.end) dma += c.bytes / (c.end - c.start);
            if (c.start > t) next = std::min(next, c.start);
            if (c.end > t) next = std::min(next, c.end);
        }
        if (next_head(&ready) && ready > t) next = std::min(next, ready);
        double rate = dma > 0 ? std::min(alone, std::max(m.dram_with_dma_gbps * 1e9 - dma, 0.05 * alone)) : alone;
        double step = std::min(left / rate, next - t);
        left = step * rate >= left * (1 - 1e-12) ? 0 : left - step * rate;
        t += step;
    }
    t = std::max(t, by_flops);
    r.stats.cpu_busy_s += t - begin;
    if (r.timeline.size() < 4 * 1000 * 1000) r.timeline.push_back({ENGINES, -1, begin, t, bytes, "cpu work"});
    me().now = t;
    r.changed.notify_all();
}

int emu_thread_new(void) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    me();
    if (!t_me->registered) {
        t_me->registered = true;
        r.threads[++r.thread_ids] = t_me;
    }
    r.threads[++r.thread_ids] = std::make_shared<host_thread>(host_thread{t_me->now, true, false, nullptr});
    return r.thread_ids;
}

void emu_thread_begin(int id) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    auto it = r.threads.find(id);
    if (it == r.threads.end()) emu_report("emu_thread_begin(%d): no such thread was announced", id);
    t_me = it->second;
}

void emu_thread_end(void) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    for (auto it = r.threads.begin(); it != r.threads.end(); ++it)
        if (it->second == t_me) {
            r.threads.erase(it);
            break;
        }
    t_me = nullptr;
    r.changed.notify_all();
}

/* Items with the clock of the pusher; a waiting popper goes on, in virtual time, at the moment of the push. */
struct emu_chan {
    std::deque<std::pair<void *, double>> items;
    std::deque<std::shared_ptr<host_thread>> poppers;
    char tsan;
};

struct emu_chan *emu_chan_new(void) { return new emu_chan(); }
void emu_chan_free(struct emu_chan *c) { delete c; }

void emu_chan_push(struct emu_chan *c, void *item) {
    std::lock_guard<std::mutex> l(rt().lock);
    c->items.push_back({item, me().now});
    if (!c->poppers.empty()) {
        host_thread &p = *c->poppers.front();
        p.waiting = false;
        p.now = std::max(p.now, me().now);
        c->poppers.pop_front();
    }
    tsan_release(&c->tsan);
    rt().changed.notify_all();
}

void *emu_chan_pop(struct emu_chan *c) {
    runtime &r = rt();
    std::unique_lock<std::mutex> l(r.lock);
    me();
    double waited = 0;
    if (c->items.empty()) {
        t_me->waiting = true;
        c->poppers.push_back(t_me);
        r.changed.notify_all();
        while (c->items.empty()) wait_for_others(l, "emu_chan_pop", &waited);
    }
    auto item = c->items.front();
    c->items.pop_front();
    t_me->waiting = false;
    t_me->now = std::max(t_me->now, item.second);
    c->poppers.erase(std::remove(c->poppers.begin(), c->poppers.end(), t_me), c->poppers.end());
    tsan_acquire(&c->tsan);
    return item.first;
}

int emu_timeline_dump(const char *path) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    FILE *f = fopen(path, "w");
    if (!f) return -1;
    static const char *const names[] = {"none", "compute", "h2d", "d2h", "cpu"};
    std::vector<timeline_row> rows(r.timeline);
    std::stable_sort(rows.begin(), rows.end(), [](const timeline_row &a, const timeline_row &b) { return a.start < b.start; });
    fprintf(f, "engine,stream,start_us,end_us,name,bytes\n");
    for (auto &t : rows)
        fprintf(f, "%s,%d,%.3f,%.3f,\"%s\",%.0f\n", names[t.eng], t.stream, t.start * 1e6, t.end * 1e6, t.name.c_str(), t.bytes);
    return fclose(f) ? -1 : 0;
}
