/* memory.cpp: device memory as two equal ranges of addresses. Handles (what cudaMalloc returns) lie in a range that nobody
 * can touch; the storage lies at the same offset of the other, accessible only where something is allocated. Every
 * allocation ends at a page that cannot be touched, up to 511 bytes of slack that are checked. Addresses are not used again
 * while there are fresh ones, so that a use after free faults. Pinned memory is a map of ranges; what operations write into
 * it becomes visible to the host when the host has waited for it. */
#include "runtime.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

namespace {

const size_t PAGE = 4096, UNIT = 512, POISON_MAX = (size_t)256 << 20;
const unsigned char SLACK = 0xfb;

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

char *reserve(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<char *>(p);
}

/* The allocation that holds offset `off`, ends included. */
std::map<size_t, device_alloc>::iterator holder(size_t off) {
    auto &m = rt().allocs;
    auto it = m.upper_bound(off);
    if (it == m.begin()) return m.end();
    --it;
    return off <= it->first + it->second.bytes ? it : m.end();
}

void on_fault(int sig, siginfo_t *info, void *) {
    signal(sig, SIG_DFL);
    std::string what = memory_describe(info->si_addr);
    emu_report("%s: access to %p: %s", sig == SIGSEGV ? "SIGSEGV" : "SIGBUS", info->si_addr, what.c_str());
}

/* Only what can be poisoned: the shadow of a whole card would be gigabytes. */
void unpoison(size_t off, const device_alloc &a) {
    size_t from = a.pieced ? 0 : a.bytes;
    __asan_unpoison_memory_region(rt().s_base + off + from, a.rounded - from);
}

thread_local param_use t_params;

} // namespace

void memory_open(const emu_machine &m) {
    runtime &r = rt();
    r.capacity = (size_t)(m.vram_bytes - m.runtime_bytes);
    size_t spare = tsan_on() || asan_on() ? (size_t)1 << 30 : (size_t)64 << 30; /* addresses for use once */
    r.reserve = up(std::max(r.capacity + ((size_t)256 << 20), std::min(4 * r.capacity, spare)), PAGE);
    r.d_base = reserve(r.reserve);
    r.s_base = reserve(r.reserve);
    if (!r.d_base || !r.s_base) emu_report("cannot reserve 2 x %zu MiB of addresses", r.reserve >> 20);
    r.bump = 0;
    static bool once;
    if (!once && !asan_on()) {
        struct sigaction a = {};
        a.sa_sigaction = on_fault;
        a.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &a, nullptr);
        sigaction(SIGBUS, &a, nullptr);
    }
    once = true;
    simt_altstack();
}

void memory_close() {
    runtime &r = rt();
    if (r.d_base) munmap(r.d_base, r.reserve);
    if (r.s_base) {
        if (asan_on())
            for (auto &a : r.allocs) unpoison(a.first, a.second);
        munmap(r.s_base, r.reserve);
    }
    r.d_base = r.s_base = nullptr;
    r.allocs.clear();
    while (!r.pinned.empty()) pinned_del(reinterpret_cast<void *>(r.pinned.begin()->first), r.pinned.begin()->second.owned);
    r.pending.clear();
    r.updates.clear();
}

bool in_device_range(const void *p) {
    runtime &r = rt();
    return r.d_base && p >= r.d_base && p < r.d_base + r.reserve;
}

/* First region of `need` bytes behind the bump pointer, or between the allocations once that is used up. */
static bool find_region(size_t need, size_t *off) {
    runtime &r = rt();
    if (r.bump + need <= r.reserve) {
        *off = r.bump;
        r.bump += need;
        return true;
    }
    size_t at = 0;
    for (auto &a : r.allocs) {
        if (a.second.region_off >= at + need) break;
        at = a.second.region_off + a.second.region;
    }
    *off = at;
    return at + need <= r.reserve;
}

void *memory_alloc(size_t bytes) {
    runtime &r = rt();
    size_t rounded = up(bytes, UNIT), region = up(rounded, PAGE) + PAGE, region_off;
    if (rounded < bytes || r.stats.vram_used + rounded > r.capacity || !find_region(region, &region_off)) return nullptr;
    size_t off = region_off + region - PAGE - rounded;
    char *s = r.s_base + off;
    if (!r.dry) {
        if (mprotect(r.s_base + region_off, region - PAGE, PROT_READ | PROT_WRITE)) return nullptr;
        if (rounded <= POISON_MAX) raw_fill(s, 0xff, bytes);
        raw_fill(s + bytes, SLACK, rounded - bytes);
        if (asan_on()) __asan_poison_memory_region(s + bytes, rounded - bytes);
    }
    r.allocs[off] = {bytes, rounded, region, region_off, false, {}};
    r.stats.vram_used += rounded;
    r.stats.vram_peak = std::max(r.stats.vram_peak, r.stats.vram_used);
    r.stats.allocations++;
    return r.d_base + off;
}

static void check_slack(size_t off, const device_alloc &a, const char *after) {
    if (asan_on() || rt().dry) return;
    const unsigned char *s = reinterpret_cast<unsigned char *>(rt().s_base + off);
    for (size_t i = a.bytes; i < a.rounded; i++)
        if (s[i] != SLACK)
            emu_report("out of bounds: byte %zu of the allocation of %zu bytes at %p was written, seen after %s", i, a.bytes,
                       (void *)(rt().d_base + off), after);
}

void memory_check_bounds(const char *after) {
    if (rt().allocs.size() > 512) return;
    for (auto &a : rt().allocs) check_slack(a.first, a.second, after);
}

bool memory_free(void *d) {
    runtime &r = rt();
    if (!in_device_range(d)) return false;
    auto it = r.allocs.find((size_t)(static_cast<char *>(d) - r.d_base));
    if (it == r.allocs.end()) return false;
    check_slack(it->first, it->second, "cudaFree");
    device_alloc &a = it->second;
    if (!r.dry) {
        if (asan_on()) unpoison(it->first, a);
        madvise(r.s_base + a.region_off, a.region - PAGE, MADV_DONTNEED);
        mprotect(r.s_base + a.region_off, a.region - PAGE, PROT_NONE);
    }
    r.stats.vram_used -= a.rounded;
    r.stats.allocations--;
    r.allocs.erase(it);
    return true;
}

void emu_piece_add(const void *d, size_t bytes) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    size_t off = (size_t)(static_cast<const char *>(d) - r.d_base);
    auto it = in_device_range(d) ? holder(off) : r.allocs.end();
    if (it == r.allocs.end() || off + bytes > it->first + it->second.bytes)
        emu_report("piece of %zu bytes at %p is not inside an allocation", bytes, d);
    auto &p = it->second.pieces;
    auto next = p.lower_bound(off);
    if ((next != p.end() && next->first < off + bytes) ||
        (next != p.begin() && std::prev(next)->first + std::prev(next)->second > off))
        emu_report("piece of %zu bytes at %p overlaps another one", bytes, d);
    if (asan_on() && !it->second.pieced) __asan_poison_memory_region(r.s_base + it->first, it->second.bytes);
    it->second.pieced = true;
    p[off] = bytes;
    if (r.dry) return;
    if (asan_on()) __asan_unpoison_memory_region(r.s_base + off, bytes);
    if (bytes <= POISON_MAX) raw_fill(r.s_base + off, 0xff, bytes);
}

/* A piece may be given back only when nothing that is queued works on it. */
static void check_unused(const char *storage, size_t bytes) {
    if (rt().sticky) return; /* a lost device does nothing any more */
    auto inside = [&](const char *p) { return p >= storage && p < storage + bytes; };
    auto meets = [&](const span &s) { return s.n && s.p < storage + bytes && s.p + s.n > storage; };
    for (cudaStream_t st : rt().streams)
        for (auto &o : st->queue)
            if (!o->done && (meets(o->reads) || meets(o->writes) || std::any_of(o->device.begin(), o->device.end(), inside)))
                emu_report("device memory at %p is given back while %s, which works on it, has yet to run",
                           (void *)(rt().d_base + (storage - rt().s_base)), o->name.c_str());
}

void emu_piece_del(const void *d) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    size_t off = (size_t)(static_cast<const char *>(d) - r.d_base);
    auto it = in_device_range(d) ? holder(off) : r.allocs.end();
    auto p = it == r.allocs.end() ? decltype(it->second.pieces.begin()){} : it->second.pieces.find(off);
    if (it == r.allocs.end() || p == it->second.pieces.end()) emu_report("piece at %p does not exist", d);
    check_unused(r.s_base + off, p->second);
    if (!r.dry && p->second <= POISON_MAX) raw_fill(r.s_base + off, 0xdd, p->second);
    if (asan_on()) __asan_poison_memory_region(r.s_base + off, p->second);
    it->second.pieces.erase(p);
}

void emu_pieces_del(const void *from, size_t bytes) {
    std::vector<const char *> gone;
    {
        runtime &r = rt();
        std::lock_guard<std::mutex> l(r.lock);
        size_t off = (size_t)(static_cast<const char *>(from) - r.d_base);
        auto it = in_device_range(from) ? holder(off) : r.allocs.end();
        if (it == r.allocs.end()) return;
        auto &p = it->second.pieces;
        for (auto q = p.lower_bound(off); q != p.end() && q->first < off + bytes; ++q) gone.push_back(r.d_base + q->first);
    }
    for (const char *p : gone) emu_piece_del(p);
}

/* --- pinned memory --------------------------------------------------------------------------------------------------------- */

pinned_range *pinned_find(const void *p, uintptr_t *base) {
    auto &m = rt().pinned;
    auto it = m.upper_bound((uintptr_t)p);
    if (it == m.begin()) return nullptr;
    --it;
    if ((uintptr_t)p >= it->first + it->second.bytes) return nullptr;
    if (base) *base = it->first;
    return &it->second;
}

bool pinned_add(void *p, size_t bytes, bool owned, bool two_views) {
    runtime &r = rt();
    pinned_range n = {bytes, owned, two_views, nullptr, nullptr, nullptr};
    if (two_views) {
        char *views = static_cast<char *>(mmap(nullptr, 3 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (views == MAP_FAILED) return false;
        n.device = views;
        n.host_seen = views + bytes;
        n.device_seen = views + 2 * bytes;
        raw_copy(n.device, p, bytes);
        raw_copy(n.host_seen, p, bytes);
        raw_copy(n.device_seen, p, bytes);
    }
    r.pinned[(uintptr_t)p] = n;
    r.stats.pinned_used += bytes;
    r.stats.pinned_peak = std::max(r.stats.pinned_peak, r.stats.pinned_used);
    r.stats.pinned++;
    return true;
}

void *pinned_alloc(size_t bytes, bool mapped) {
    void *p = mmap(nullptr, up(bytes, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    if (!rt().dry && bytes <= ((size_t)64 << 20)) raw_fill(p, 0xff, bytes);
    if (pinned_add(p, bytes, true, mapped)) return p;
    munmap(p, up(bytes, PAGE));
    return nullptr;
}

bool pinned_del(void *p, bool owned) {
    runtime &r = rt();
    auto it = r.pinned.find((uintptr_t)p);
    if (it == r.pinned.end() || it->second.owned != owned) return false;
    char *b = static_cast<char *>(p);
    size_t n = it->second.bytes;
    auto inside = [&](const char *q) { return q >= b && q < b + n; };
    r.pending.erase(std::remove_if(r.pending.begin(), r.pending.end(), [&](const pending_write &w) { return inside(w.dst); }),
                    r.pending.end());
    r.updates.erase(std::remove_if(r.updates.begin(), r.updates.end(),
                                   [&](const host_update &u) { return u.range == &it->second; }),
                    r.updates.end());
    for (auto f = r.flags.begin(); f != r.flags.end();)
        f = inside(reinterpret_cast<const char *>(f->first)) ? r.flags.erase(f) : std::next(f);
    if (it->second.two_views) munmap(it->second.device, 3 * n);
    if (owned) munmap(p, up(n, PAGE));
    r.stats.pinned_used -= n;
    r.stats.pinned--;
    r.pinned.erase(it);
    return true;
}

/* --- translation ------------------------------------------------------------------------------------------------------------ */

bool memory_resolve(const void *p, size_t bytes, mem_kind *kind, char **storage) {
    runtime &r = rt();
    if (in_device_range(p)) {
        size_t off = (size_t)(static_cast<const char *>(p) - r.d_base);
        *kind = MEM_DEVICE;
        *storage = r.s_base + off;
        auto it = holder(off);
        if (it == r.allocs.end() || bytes > it->first + it->second.bytes - off) return false;
        auto &pieces = it->second.pieces;
        if (!it->second.pieced || !bytes) return true;
        auto q = pieces.upper_bound(off);
        if (q == pieces.begin()) return false;
        --q;
        return off + bytes <= q->first + q->second;
    }
    uintptr_t base;
    pinned_range *h = pinned_find(p, &base);
    *kind = h && (uintptr_t)p + bytes <= base + h->bytes ? MEM_PINNED : MEM_PAGEABLE;
    *storage = const_cast<char *>(static_cast<const char *>(p));
    return true;
}

std::string memory_describe(const void *p) {
    runtime &r = rt();
    const char *c = static_cast<const char *>(p);
    char text[256];
    bool handle = r.d_base && c >= r.d_base && c < r.d_base + r.reserve;
    bool storage = r.s_base && c >= r.s_base && c < r.s_base + r.reserve;
    if (!handle && !storage) return "not memory of the device";
    size_t off = (size_t)(c - (handle ? r.d_base : r.s_base));
    auto it = r.allocs.upper_bound(off);
    char near[160] = "no allocation before it";
    if (it != r.allocs.begin()) {
        --it;
        snprintf(near, sizeof near, "the nearest allocation, %zu bytes at %p, starts %zu bytes before it", it->second.bytes,
                 (void *)(r.d_base + it->first), off - it->first);
    }
    if (handle && !simt_in_kernel())
        snprintf(text, sizeof text, "host code used a device pointer (%s)", near);
    else if (handle)
        snprintf(text, sizeof text, "a device pointer that a kernel loaded from memory needs GPU_LOADPTR (%s)", near);
    else
        snprintf(text, sizeof text, "out of bounds or freed device memory, device address %p; %s", (void *)(r.d_base + off), near);
    return text;
}

void *emu_param_pointer(const void *p, const char *kernel, int index, const char *file, int line) {
    if (!p) return nullptr;
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    mem_kind kind;
    char *storage;
    if (!memory_resolve(p, 0, &kind, &storage))
        emu_report("%s:%d: kernel %s, parameter %d: device pointer %p is in no allocation (freed, or out of bounds)", file, line,
                   kernel, index, p);
    if (kind == MEM_DEVICE) {
        t_params.device.push_back(storage);
        return storage;
    }
    uintptr_t base;
    pinned_range *h = pinned_find(p, &base);
    if (!h) emu_report("%s:%d: kernel %s, parameter %d: host pointer %p passed to a kernel", file, line, kernel, index, p);
    t_params.pinned.push_back({reinterpret_cast<char *>(base), h->bytes});
    if (!h->two_views) return storage;
    t_params.mapped = true;
    return h->device + ((uintptr_t)p - base);
}

/* Structures by value are searched for device pointers, word by word. Pointers to host memory cannot be told from data. */
void emu_param_struct(void *p, size_t bytes, const char *kernel, int index, const char *file, int line) {
    for (size_t i = 0; i + sizeof(void *) <= bytes; i += sizeof(void *)) {
        char *w = static_cast<char *>(p) + i;
        void *v;
        memcpy(&v, w, sizeof v);
        if (!in_device_range(v) && !pinned_find(v, nullptr)) continue;
        v = emu_param_pointer(v, kernel, index, file, line);
        memcpy(w, &v, sizeof v);
    }
}

void *emu_loadptr(const void *p) {
    runtime &r = rt(); /* the lock is held while kernels run */
    if (!in_device_range(p)) return const_cast<void *>(p);
    return r.s_base + (static_cast<const char *>(p) - r.d_base);
}

param_use params_take() {
    param_use u;
    std::swap(u, t_params);
    return u;
}

/* --- what each side sees ----------------------------------------------------------------------------------------------------- */

/* Calls f(offset, bytes) for each run of bytes in which a and b differ. Plain loops: the sanitizers must not see the host's
 * memory read here. */
template <class F> static void differences(const char *a, const char *b, size_t n, F f) {
    for (size_t i = 0; i < n;) {
        uint64_t x, y;
        if (i + 8 <= n) {
            __builtin_memcpy(&x, a + i, 8);
            __builtin_memcpy(&y, b + i, 8);
            if (x == y) {
                i += 8;
                continue;
            }
        }
        if (a[i] == b[i]) {
            i++;
            continue;
        }
        size_t j = i;
        while (j < n && a[j] != b[j]) j++;
        f(i, j - i);
        i = j;
    }
}

template <class F> static void host_differences(F f) {
    for (auto &p : rt().pinned) {
        pinned_range &h = p.second;
        if (!h.two_views) continue;
        const char *host = reinterpret_cast<const char *>(p.first);
        differences(host, h.host_seen, h.bytes, [&](size_t off, size_t n) {
            f(h, off, host + off, n);
            raw_copy(h.host_seen + off, host + off, n);
        });
    }
}

static void show_device(pinned_range &h, size_t off, const char *src, size_t n) {
    raw_copy(h.device + off, src, n);
    raw_copy(h.device_seen + off, src, n);
}

void device_view_set(char *host, const char *src, size_t n) {
    uintptr_t base;
    pinned_range *h = pinned_find(host, &base);
    if (h && h->two_views) show_device(*h, (uintptr_t)host - base, src, n);
}

void host_writes_noted(uint64_t seq) {
    if (rt().dry) return;
    host_differences([&](pinned_range &h, size_t off, const char *src, size_t n) {
        rt().updates.push_back({&h, off, raw_bytes(src, n), seq});
    });
}

void host_writes_apply(uint64_t seq) {
    auto &u = rt().updates;
    for (; !u.empty() && u.front().seq <= seq; u.pop_front())
        show_device(*u.front().range, u.front().off, u.front().data.data(), u.front().data.size());
}

void host_writes_now() {
    host_writes_apply(UINT64_MAX);
    host_differences([&](pinned_range &h, size_t off, const char *src, size_t n) { show_device(h, off, src, n); });
}

void device_writes_note(const op &o) {
    for (auto &p : rt().pinned) {
        pinned_range &h = p.second;
        if (!h.two_views) continue;
        char *host = reinterpret_cast<char *>(p.first);
        differences(h.device, h.device_seen, h.bytes, [&](size_t off, size_t n) {
            pending_add(o, host + off, raw_bytes(h.device + off, n));
            raw_copy(h.device_seen + off, h.device + off, n);
        });
    }
}

/* Host bytes in [dst, +n) become `src` (null: poison), and are not taken for the host's own writing. */
static void host_set(char *dst, const char *src, size_t n) {
    if (src)
        raw_copy(dst, src, n);
    else
        raw_fill(dst, 0xff, n);
    uintptr_t base;
    pinned_range *h = pinned_find(dst, &base);
    if (h && h->two_views) raw_copy(h->host_seen + ((uintptr_t)dst - base), dst, n);
}

void pending_add(const op &o, char *dst, std::vector<char> &&data) {
    host_set(dst, nullptr, data.size());
    rt().pending.push_back({dst, std::move(data), o.sid, o.index});
}

template <class F> static void flush_if(F f) {
    auto &p = rt().pending;
    for (auto it = p.begin(); it != p.end();) {
        if (!f(*it)) {
            ++it;
            continue;
        }
        host_set(it->dst, it->data.data(), it->data.size());
        it = p.erase(it);
    }
}

static bool covered(const op &o, const pending_write &w) {
    if (w.stream == o.sid) return w.index <= o.index;
    return (size_t)w.stream < o.seen.size() && w.index <= o.seen[(size_t)w.stream];
}

void pending_flush(const op &o) {
    flush_if([&](const pending_write &w) { return covered(o, w); });
}
void pending_flush_range(const op &o, span s) {
    flush_if([&](const pending_write &w) { return w.dst < s.p + s.n && w.dst + w.data.size() > s.p && covered(o, w); });
}
void pending_flush_all() {
    flush_if([](const pending_write &) { return true; });
}
