/* flags.cpp: hand-over flags. On the device side stream memory operations write and wait; on the host side emu_flag_*.
 * A wait that is satisfied makes the other side's payload visible, not before. For the virtual clock every write is logged
 * in the order of the calls, and a wait is matched with the first write that satisfies it. Writing 0 resets a flag. */
#include "runtime.h"

#include <algorithm>
#include <cstring>

static bool satisfies(uint32_t have, uint32_t value, unsigned cond) {
    switch (cond & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return (int32_t)(have - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return have == value;
    case CU_STREAM_WAIT_VALUE_AND: return (have & value) != 0;
    default: return ~(have | value) != 0;
    }
}

bool memop_satisfied(const memop &m) { return satisfies(__atomic_load_n(m.flag, __ATOMIC_ACQUIRE), m.value, m.cond); }

/* A new value: waits that it does not satisfy may take the flag again. */
static void written(flag_state &f, uint32_t value) {
    for (auto it = f.consumed.begin(); it != f.consumed.end();)
        it = satisfies(value, it->second.value, it->second.cond) ? std::next(it) : f.consumed.erase(it);
}

void flags_run(op &o) {
    for (memop &m : o.mem) {
        flag_state &f = rt().flags[m.flag];
        if (m.wait) {
            if (!memop_satisfied(m))
                emu_report("batch of stream memory operations: wait for flag %p behind a write of the same batch", (void *)m.flag);
            if (m.node && !f.consumed.emplace(m.node, m).second)
                emu_report("graph replayed without reset: its wait for flag %p to reach %u was satisfied by the replay before",
                           (void *)m.flag, m.value);
            host_writes_now();
            continue;
        }
        pending_flush(o);
        __atomic_store_n(m.flag, m.value, __ATOMIC_RELEASE);
        uintptr_t base;
        pinned_range *h = pinned_find(m.flag, &base);
        if (h && h->two_views) {
            size_t off = (uintptr_t)m.flag - base;
            raw_copy(h->host_seen + off, m.flag, 4);
            raw_copy(h->device + off, m.flag, 4);
            raw_copy(h->device_seen + off, m.flag, 4);
        }
        written(f, m.value);
    }
}

/* --- the virtual side ------------------------------------------------------------------------------------------------------- */

void flags_logged(const op_ref &o) {
    for (memop &m : o->mem)
        if (!m.wait && m.value) rt().flags[m.flag].log.push_back({++rt().flag_ids, m.value, false, 0, o});
}

flag_entry *flag_match(const memop &m) {
    for (auto &e : rt().flags[m.flag].log)
        if (satisfies(e.value, m.value, m.cond)) return &e;
    return nullptr;
}

static void reset(flag_state &f) {
    while (!f.log.empty() && f.log.front().id <= f.last_matched) f.log.pop_front();
    f.shown = 0;
}

void flags_commit(op &o) {
    for (memop &m : o.mem) {
        flag_state &f = rt().flags[m.flag];
        if (!m.wait) {
            if (!m.value) reset(f);
            continue;
        }
        if (flag_entry *e = flag_match(m)) {
            f.last_matched = std::max(f.last_matched, e->id);
            while (f.log.size() > 1 && f.log[1].id <= f.last_matched) f.log.pop_front(); /* counters: older values are of no use */
        }
    }
}

/* --- the host's side ---------------------------------------------------------------------------------------------------------- */

void emu_flag_store(uint32_t *flag, uint32_t value) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    flag_state &f = r.flags[flag];
    if (value)
        f.log.push_back({++r.flag_ids, value, true, me().now, nullptr});
    else
        reset(f);
    written(f, value);
    tsan_release(flag);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    after_enqueue();
    r.changed.notify_all();
}

static double entry_time(const flag_entry &e) { return e.by_host ? e.t : e.by->end + rt().machine.handover_us * 1e-6; }

uint32_t emu_flag_load(const uint32_t *flag) {
    runtime &r = rt();
    std::unique_lock<std::mutex> l(r.lock);
    static int in_vain;
    host_thread &h = me();
    h.now += api_s();
    vt_commit_upto(l, h.now);
    flag_state &f = r.flags[flag];
    uint32_t before = f.shown;
    op_ref writer;
    for (auto &e : f.log) {
        if (!e.by_host && !e.by->committed) break;
        if (entry_time(e) > h.now) break;
        f.shown = e.value;
        writer = e.by;
    }
    in_vain = f.shown == before ? in_vain + 1 : 0;
    if (in_vain > 10 * 1000 * 1000) emu_report("polled %d times for flag %p, which does not change", in_vain, (const void *)flag);
    if (f.log.empty() && !f.last_matched) { /* never written through us */
        run_one(nullptr);
        return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    }
    if (writer) run_until(l, writer);
    tsan_acquire(const_cast<uint32_t *>(flag));
    return f.shown;
}

void emu_flag_wait(const uint32_t *flag, uint32_t value) {
    runtime &r = rt();
    std::unique_lock<std::mutex> l(r.lock);
    memop m = {true, const_cast<uint32_t *>(flag), value, CU_STREAM_WAIT_VALUE_GEQ, 0, 0};
    double waited = 0;
    for (;;) {
        if (flag_entry *e = flag_match(m)) {
            flag_entry found = *e;
            flag_state &held = r.flags[flag];
            if (found.id <= held.last_matched && held.log.back().id > found.id && held.log.back().value == value &&
                held.log.back().by && !held.log.back().by->done)
                emu_report("hand-over flag %p holds the %u of an earlier signal: it was not reset before it is signalled again",
                           (const void *)flag, value);
            if (found.by) {
                run_until(l, found.by);
                vt_commit_until(l, found.by);
            }
            flag_state &f = r.flags[flag];
            f.last_matched = std::max(f.last_matched, found.id);
            f.shown = found.value;
            host_thread &h = me();
            h.now = std::max(h.now, entry_time(found));
            break;
        }
        if (memop_satisfied(m)) break;
        if (!run_one(nullptr)) wait_for_others(l, "wait for a flag", &waited);
    }
    tsan_acquire(const_cast<uint32_t *>(flag));
}

/* --- stream memory operations -------------------------------------------------------------------------------------------------- */

static CUresult enqueue(cudaStream_t st, std::vector<memop> mem, const char *name) {
    api a(name, api_s(), cudaErrorUnknown);
    if (a.err) return static_cast<CUresult>(a.err);
    if (!stream_valid(st)) return CUDA_ERROR_INVALID_VALUE;
    for (auto &m : mem) {
        mem_kind kind;
        char *p;
        if ((uintptr_t)m.flag % 4 || !memory_resolve(m.flag, 4, &kind, &p) || kind == MEM_PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
        m.flag = reinterpret_cast<uint32_t *>(p);
    }
    op_ref o = op_new(OP_FLAGS, name, st);
    o->mem = std::move(mem);
    return static_cast<CUresult>(op_enqueue(o));
}

CUresult cuStreamWriteValue32(CUstream st, CUdeviceptr addr, cuuint32_t value, unsigned flags) {
    if (flags) return CUDA_ERROR_NOT_SUPPORTED;
    return enqueue(st, {{false, reinterpret_cast<uint32_t *>(addr), value, 0, 0, 0}}, "cuStreamWriteValue32");
}

CUresult cuStreamWaitValue32(CUstream st, CUdeviceptr addr, cuuint32_t value, unsigned flags) {
    if (flags & CU_STREAM_WAIT_VALUE_FLUSH) return CUDA_ERROR_NOT_SUPPORTED;
    return enqueue(st, {{true, reinterpret_cast<uint32_t *>(addr), value, flags, 0, 0}}, "cuStreamWaitValue32");
}

CUresult cuStreamBatchMemOp(CUstream st, unsigned count, CUstreamBatchMemOpParams *ops, unsigned flags) {
    if (flags || count > 256) return CUDA_ERROR_INVALID_VALUE;
    std::vector<memop> mem;
    for (unsigned i = 0; i < count; i++) {
        if (ops[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32)
            mem.push_back({true, reinterpret_cast<uint32_t *>(ops[i].waitValue.address), ops[i].waitValue.value, ops[i].waitValue.flags, 0, 0});
        else if (ops[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32)
            mem.push_back({false, reinterpret_cast<uint32_t *>(ops[i].writeValue.address), ops[i].writeValue.value, 0, 0, 0});
        else
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return enqueue(st, std::move(mem), "cuStreamBatchMemOp");
}

static cudaError_t entry_point(const char *symbol, void **fn, cudaDriverEntryPointQueryResult *status) {
    api a("cudaGetDriverEntryPoint", 0, cudaErrorSymbolNotFound);
    if (a.err) return a.err;
    std::string s = symbol;
    *fn = s == "cuStreamWriteValue32"  ? reinterpret_cast<void *>(cuStreamWriteValue32)
          : s == "cuStreamWaitValue32" ? reinterpret_cast<void *>(cuStreamWaitValue32)
          : s == "cuStreamBatchMemOp"  ? reinterpret_cast<void *>(cuStreamBatchMemOp)
                                       : nullptr;
    if (status) *status = *fn ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *fn ? cudaSuccess : set_error(cudaErrorSymbolNotFound);
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **fn, unsigned long long, cudaDriverEntryPointQueryResult *status) {
    return entry_point(symbol, fn, status);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *status) {
    return entry_point(symbol, fn, status);
}
