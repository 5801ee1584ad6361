/* runtime.cpp: set-up and the environment, counters and faults on demand, and the API of memory, copies and launches. */
#include "runtime.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

runtime &rt() {
    static runtime *r = new runtime(); /* never destroyed: threads may outlive main */
    return *r;
}

/* --- set-up ---------------------------------------------------------------------------------------------------------------------- */

static double env_number(const char *name, double otherwise) {
    const char *v = getenv(name);
    return v && *v ? atof(v) : otherwise;
}

static void machine_from_env(emu_machine *m) {
    const char *name = getenv("EMU_MACHINE");
    if (emu_machine_get(m, name && *name ? name : "emu")) emu_report("EMU_MACHINE=%s: no such machine", name);
}

static void faults_from_env() {
    const char *v = getenv("EMU_FAIL");
    std::string all = v ? v : "";
    for (size_t at = 0; at < all.size();) {
        size_t comma = std::min(all.find(',', at), all.size()), colon = all.find(':', at);
        if (colon == std::string::npos || colon > comma) emu_report("EMU_FAIL=%s: expected call:n", v);
        rt().faults.push_back({all.substr(at, colon - at), atol(all.c_str() + colon + 1), 0, false});
        at = comma + 1;
    }
}

static void skip_from_env() {
    const char *v = getenv("EMU_SKIP");
    if (!v || !*v) return;
    static std::string file;
    const char *colon = strrchr(v, ':');
    rt().simt.skip_line = colon ? atoi(colon + 1) : 0;
    if (rt().simt.skip_line < 1) emu_report("EMU_SKIP=%s: expected file:line", v);
    file.assign(v, colon);
    rt().simt.skip_file = file.c_str();
}

static void open_device(const emu_machine *given) {
    runtime &r = rt();
    if (given)
        r.machine = *given;
    else
        machine_from_env(&r.machine);
    if (double mib = env_number("EMU_VRAM_MIB", 0)) r.machine.vram_bytes = mib * 1048576 + r.machine.runtime_bytes;
    if (double mib = env_number("EMU_PINNED_MIB", 0)) r.machine.pinned_bytes = mib * 1048576;
    memory_open(r.machine);
}

/* What the environment says about everything but the machine. */
void first_time() {
    runtime &r = rt();
    if (r.ready) return;
    r.ready = true;
    const char *p = getenv("EMU_POLICY");
    static const char *const names[] = {"eager", "lazy", "random", "copy_first", "compute_first"};
    for (int i = 0; p && *p; i++) {
        if (i == 5) emu_report("EMU_POLICY=%s: expected eager, lazy, random, copy_first or compute_first", p);
        if (strcmp(p, names[i])) continue;
        r.policy = static_cast<emu_policy>(i);
        break;
    }
    r.rng = (uint64_t)env_number("EMU_SEED", 1) * 0x9e3779b97f4a7c15u + 1;
    r.simt.seed = (uint64_t)env_number("EMU_SEED", 1);
    r.simt.order = (int)env_number("EMU_ORDER", 0);
    r.simt.workers = (int)env_number("EMU_WORKERS", 1);
    r.simt.tsan_lanes = env_number("EMU_TSAN_LANES", 1) != 0;
    r.simt.tsan_fresh = env_number("EMU_TSAN_FRESH", 0) != 0;
    r.simt.shuffle_sum = env_number("EMU_SHUFFLE_SUM", 0) != 0;
    r.dry = env_number("EMU_DRY", 0) != 0;
    r.devices = (int)env_number("EMU_DEVICES", 1);
    r.driver = (int)env_number("EMU_DRIVER", CUDART_VERSION);
    r.hang_s = env_number("EMU_HANG_S", 10);
    faults_from_env();
    skip_from_env();
    open_device(nullptr);
    if (getenv("EMU_TIMELINE")) atexit([] { emu_timeline_dump(getenv("EMU_TIMELINE")); });
    if (env_number("EMU_LEAKS", 0) != 0)
        atexit([] {
            if (emu_leaks()) _exit(1);
        });
}

void emu_reset(const emu_machine *m) {
    runtime &r = rt();
    std::lock_guard<std::mutex> l(r.lock);
    first_time();
    for (cudaStream_t st : r.streams) delete st;
    for (cudaEvent_t ev : r.events) delete ev;
    r.streams.clear();
    r.events.clear();
    r.graphs.clear();
    r.execs.clear();
    r.slot_next.clear();
    r.slot_used.clear();
    r.flags.clear();
    r.dyn_limit.clear();
    r.timeline.clear();
    r.copies.clear();
    r.faults.clear();
    r.calls.clear();
    r.calls_any = 0;
    r.sticky = cudaSuccess;
    memory_close();
    r.stats = {};
    for (double &t : r.engine_free) t = 0;
    me() = {0, false, false, nullptr};
    open_device(m);
}

void emu_machine_now(emu_machine *m) {
    std::lock_guard<std::mutex> l(rt().lock);
    first_time();
    *m = rt().machine;
}

int emu_register_arch(int arch) { return rt().arch = arch; }

void emu_set_policy(emu_policy p, uint64_t seed) {
    LOCKED;
    rt().policy = p;
    rt().rng = seed * 0x9e3779b97f4a7c15u + 1;
    rt().simt.seed = seed;
}
void emu_set_order(int order) {
    LOCKED;
    rt().simt.order = order;
}
void emu_set_workers(int n) {
    LOCKED;
    rt().simt.workers = n;
}
void emu_set_dry(int on) {
    LOCKED;
    rt().dry = on != 0;
}
void emu_set_devices(int n, int driver) {
    LOCKED;
    rt().devices = n;
    rt().driver = driver;
}
void emu_fail(const char *call, long n, int code, int sticky) {
    LOCKED;
    rt().faults.push_back({call, n, code, sticky != 0});
}
void emu_fail_clear() {
    LOCKED;
    rt().faults.clear();
    rt().sticky = cudaSuccess;
}
long emu_calls(const char *call) {
    LOCKED;
    if (!strcmp(call, "any")) return rt().calls_any;
    auto it = rt().calls.find(call);
    return it == rt().calls.end() ? 0 : it->second;
}
void emu_stats_get(emu_stats *s) {
    LOCKED;
    *s = rt().stats;
}
void emu_stats_zero() {
    LOCKED;
    emu_stats &s = rt().stats, old = s;
    s = {};
    s.vram_used = s.vram_peak = old.vram_used;
    s.pinned_used = s.pinned_peak = old.pinned_used;
    s.allocations = old.allocations;
    s.pinned = old.pinned;
    s.streams = old.streams;
    s.events = old.events;
    s.graphs = old.graphs;
}

int emu_leaks() {
    LOCKED;
    runtime &r = rt();
    for (auto &a : r.allocs) fprintf(stderr, "EMU: leak: device memory, %zu bytes at %p\n", a.second.bytes, (void *)(r.d_base + a.first));
    for (auto &p : r.pinned) fprintf(stderr, "EMU: leak: pinned memory, %zu bytes at %p\n", p.second.bytes, (void *)p.first);
    if (r.stats.streams) fprintf(stderr, "EMU: leak: %d streams\n", r.stats.streams);
    if (r.stats.events) fprintf(stderr, "EMU: leak: %d events\n", r.stats.events);
    if (r.stats.graphs) fprintf(stderr, "EMU: leak: %d graphs\n", r.stats.graphs);
    return (int)(r.allocs.size() + r.pinned.size()) + r.stats.streams + r.stats.events + r.stats.graphs;
}

/* --- every call -------------------------------------------------------------------------------------------------------------------- */

static thread_local cudaError_t t_last;
static thread_local launch_cost t_cost;

cudaError_t set_error(cudaError_t e) {
    if (e) t_last = e;
    return e;
}

api::api(const char *name, double cost_s, cudaError_t code) : lock(rt().lock), err(cudaSuccess) {
    runtime &r = rt();
    first_time();
    r.calls[name]++;
    r.calls_any++;
    me().now += cost_s;
    if (!r.threads.empty()) r.changed.notify_all();
    if (r.driver < CUDART_VERSION / 1000 * 1000)
        err = cudaErrorInsufficientDriver;
    else if (!r.devices)
        err = cudaErrorNoDevice;
    else if (r.sticky)
        err = r.sticky;
    for (auto it = r.faults.begin(); it != r.faults.end();) {
        if ((it->call != "any" && it->call != name) || --it->n > 0) {
            ++it;
            continue;
        }
        err = it->code ? static_cast<cudaError_t>(it->code) : code;
        if (it->sticky) r.sticky = err;
        it = r.faults.erase(it);
    }
    set_error(err);
}

double api_s() { return rt().machine.api_us * 1e-6; }
double launch_s() { return rt().machine.launch_us * 1e-6; }

cudaError_t cudaGetLastError() {
    cudaError_t e = t_last;
    t_last = rt().sticky;
    return e;
}
cudaError_t cudaPeekAtLastError() { return t_last; }

/* --- memory -------------------------------------------------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **p, size_t bytes) {
    api a("cudaMalloc", 10e-6, cudaErrorMemoryAllocation);
    *p = nullptr;
    if (a.err || !bytes) return a.err;
    if (any_capture_refuses()) return set_error(cudaErrorStreamCaptureUnsupported);
    *p = memory_alloc(bytes);
    return *p ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *p) {
    api a("cudaFree", 10e-6, cudaErrorUnknown);
    if (!p) return a.err;
    if (any_capture_refuses()) return set_error(cudaErrorStreamCaptureUnsupported);
    if (!rt().sticky) host_wait_all(a.lock);
    return memory_free(p) ? a.err : set_error(cudaErrorInvalidValue);
}

static bool pin_fits(size_t bytes) {
    const emu_machine &m = rt().machine;
    return m.pinned_bytes < 0 || (double)(rt().stats.pinned_used + bytes) <= m.pinned_bytes;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    api a("cudaHostAlloc", 50e-6, cudaErrorMemoryAllocation);
    *p = nullptr;
    if (a.err || !bytes) return a.err;
    if (any_capture_refuses()) return set_error(cudaErrorStreamCaptureUnsupported);
    if (pin_fits(bytes)) *p = pinned_alloc(bytes, flags & cudaHostAllocMapped);
    return *p ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, cudaHostAllocDefault); }

cudaError_t cudaFreeHost(void *p) {
    api a("cudaFreeHost", 10e-6, cudaErrorUnknown);
    if (!p) return a.err;
    if (!rt().sticky) host_wait_all(a.lock);
    return pinned_del(p, true) ? a.err : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
    api a("cudaHostRegister", 50e-6, cudaErrorMemoryAllocation);
    if (a.err) return a.err;
    if (!p || !bytes || in_device_range(p)) return set_error(cudaErrorInvalidValue);
    auto next = rt().pinned.lower_bound((uintptr_t)p);
    if (pinned_find(p, nullptr) || (next != rt().pinned.end() && next->first < (uintptr_t)p + bytes))
        return set_error(cudaErrorHostMemoryAlreadyRegistered);
    if (!pin_fits(bytes)) return set_error(cudaErrorMemoryAllocation);
    pinned_add(p, bytes, false, false);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p) {
    api a("cudaHostUnregister", 10e-6, cudaErrorUnknown);
    if (!rt().sticky) host_wait_all(a.lock);
    return pinned_del(p, false) ? a.err : set_error(cudaErrorHostMemoryNotRegistered);
}

/* One address serves both sides, as on every device since compute capability 6. */
cudaError_t cudaHostGetDevicePointer(void **dev, void *host, unsigned) {
    api a("cudaHostGetDevicePointer", 0, cudaErrorUnknown);
    if (a.err) return a.err;
    *dev = host;
    return pinned_find(host, nullptr) ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *p) {
    api a("cudaPointerGetAttributes", 0, cudaErrorUnknown);
    if (a.err) return a.err;
    mem_kind k;
    char *s;
    bool live = memory_resolve(p, 1, &k, &s);
    void *q = const_cast<void *>(p);
    *out = {cudaMemoryTypeUnregistered, 0, nullptr, nullptr};
    if (k == MEM_DEVICE && live) *out = {cudaMemoryTypeDevice, 0, q, nullptr};
    if (k == MEM_PINNED) *out = {cudaMemoryTypeHost, 0, q, q};
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    api a("cudaMemGetInfo", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    *free_bytes = rt().capacity - rt().stats.vram_used;
    *total = (size_t)rt().machine.vram_bytes;
    return cudaSuccess;
}

/* --- copies ---------------------------------------------------------------------------------------------------------------------------- */

struct copy2d { void *dst; const void *src; size_t dpitch, spitch, width, height; };

static size_t extent(size_t pitch, const copy2d &c) { return c.height ? (c.height - 1) * pitch + c.width : 0; }

static void move_rows(const copy2d &c, char *dst, const char *src) {
    for (size_t i = 0; i < c.height; i++) raw_copy(dst + i * c.dpitch, src + i * c.spitch, c.width);
}

static bool default_stream(cudaStream_t st, const char *call) {
    if (st && st != cudaStreamLegacy && st != cudaStreamPerThread) return false;
    fprintf(stderr, "EMU: %s on the default stream: use an explicit one\n", call);
    return true;
}

static cudaError_t copy(const char *call, const copy2d &c, cudaMemcpyKind kind, cudaStream_t st) {
    api a(call, launch_s(), cudaErrorUnknown);
    runtime &r = rt();
    if (a.err) return a.err;
    if (default_stream(st, call) || !stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    if (c.width > c.dpitch || c.width > c.spitch) return set_error(cudaErrorInvalidValue);
    mem_kind dk, sk;
    char *dst, *src;
    size_t bytes = c.width * c.height, dn = extent(c.dpitch, c), sn = extent(c.spitch, c);
    if (!memory_resolve(c.dst, dn, &dk, &dst) || !memory_resolve(c.src, sn, &sk, &src)) return set_error(cudaErrorInvalidValue);
    bool to_device = dk == MEM_DEVICE, from_device = sk == MEM_DEVICE;
    cudaMemcpyKind real = to_device ? from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                                    : from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    if ((kind != cudaMemcpyDefault && kind != real) || real == cudaMemcpyHostToHost) return set_error(cudaErrorInvalidValue);
    if (!bytes) return cudaSuccess;
    bool pageable = dk == MEM_PAGEABLE || sk == MEM_PAGEABLE;
    if (pageable && capture_refuses(st)) return set_error(cudaErrorStreamCaptureUnsupported);
    const emu_machine &m = r.machine;
    op_ref o = op_new(OP_COPY, real == cudaMemcpyHostToDevice ? "copy h2d" : real == cudaMemcpyDeviceToHost ? "copy d2h" : "copy d2d", st);
    o->bytes = (double)bytes;
    o->eng = real == cudaMemcpyHostToDevice ? ENGINE_H2D : real == cudaMemcpyDeviceToHost ? ENGINE_D2H : ENGINE_COMPUTE;
    double gbps = o->eng == ENGINE_H2D ? m.h2d_gbps : o->eng == ENGINE_D2H ? m.d2h_gbps : m.vram_gbps / 2;
    o->dur = (double)bytes / ((pageable ? std::min(gbps, m.pageable_gbps) : gbps) * 1e9);
    o->gap = o->eng == ENGINE_COMPUTE ? m.gap_us * 1e-6 : m.copy_latency_us * (pageable ? 2e-6 : 1e-6);
    o->reads = {src, sn};
    o->writes = {dst, dn};
    if (sk == MEM_PINNED) o->pinned.push_back({src, sn});
    r.stats.copies++;
    (o->eng == ENGINE_H2D ? r.stats.h2d_bytes : o->eng == ENGINE_D2H ? r.stats.d2h_bytes : r.stats.d2d_bytes) += (int64_t)bytes;
    if (r.dry) {
        o->reads = o->writes = {nullptr, 0};
    } else if (dk == MEM_PINNED) { /* shown to the host when it has waited for it */
        o->move = [c, dst, src] {
            for (size_t i = 0; i < c.height; i++) device_view_set(dst + i * c.dpitch, src + i * c.spitch, c.width);
        };
        o->hold = [c, dst, src](const op &self) {
            for (size_t i = 0; i < c.height; i++) {
                pending_add(self, dst + i * c.dpitch, raw_bytes(src + i * c.spitch, c.width));
            }
        };
    } else {
        o->move = [c, dst, src] { move_rows(c, dst, src); };
    }
    cudaError_t e = op_enqueue(o);
    if (!e && pageable) { /* the source may be reused, the destination read, when the call returns */
        r.stats.pageable_copies++;
        host_wait(a.lock, o);
    }
    return e;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t st) {
    return copy("cudaMemcpyAsync", {dst, src, bytes, bytes, bytes, bytes ? 1u : 0u}, kind, st);
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t st) {
    return copy("cudaMemcpy2DAsync", {dst, src, dpitch, spitch, width, height}, kind, st);
}
cudaError_t cudaMemcpy(void *, const void *, size_t, cudaMemcpyKind) {
    api a("cudaMemcpy", 0, cudaErrorUnknown);
    default_stream(nullptr, "cudaMemcpy");
    return set_error(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaMemset(void *, int, size_t) {
    api a("cudaMemset", 0, cudaErrorUnknown);
    default_stream(nullptr, "cudaMemset");
    return set_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t st) {
    api a("cudaMemsetAsync", launch_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (default_stream(st, "cudaMemsetAsync") || !stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    mem_kind k;
    char *s;
    if (!memory_resolve(p, bytes, &k, &s) || k != MEM_DEVICE) return set_error(cudaErrorInvalidValue);
    op_ref o = op_new(OP_SET, "memset", st);
    o->eng = ENGINE_COMPUTE;
    o->bytes = (double)bytes;
    o->dur = std::max((double)bytes / (rt().machine.vram_gbps * 1e9), rt().machine.min_kernel_us * 1e-6);
    o->gap = rt().machine.gap_us * 1e-6;
    if (!rt().dry) {
        o->writes = {s, bytes};
        o->move = [s, value, bytes] { raw_fill(s, value, bytes); };
    }
    return op_enqueue(o);
}

/* --- launches ------------------------------------------------------------------------------------------------------------------------------ */

void emu_cost(double bytes, double flops, int unit) { t_cost = {bytes, flops, unit, true}; }

launch_cost cost_take() {
    launch_cost c = t_cost;
    t_cost = {};
    rt().stats.cost_bytes += c.bytes;
    rt().stats.cost_flops += c.flops;
    if (!c.set) rt().stats.launches_without_cost++;
    return c;
}

static size_t dyn_limit(const void *fn) {
    auto it = rt().dyn_limit.find(fn);
    return it == rt().dyn_limit.end() ? 48 * 1024 : (size_t)it->second;
}

static cudaError_t check_shape(const emu::launch_info &l) {
    const dim3 &g = l.grid, &b = l.block;
    uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (!threads || threads > 1024 || b.x > 1024 || b.y > 1024 || b.z > 64) return cudaErrorInvalidConfiguration;
    if (!g.x || !g.y || !g.z || g.x > 2147483647u || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
    if (l.smem > dyn_limit(l.fn)) return cudaErrorInvalidValue;
    return cudaSuccess;
}

cudaError_t emu_launch(const emu::launch_info &l) {
    param_use used = params_take();
    api a("launch", launch_s(), cudaErrorLaunchOutOfResources);
    runtime &r = rt();
    launch_cost cost = cost_take();
    if (a.err) return a.err;
    if (default_stream(l.stream, "launch") || !stream_valid(l.stream)) return set_error(cudaErrorInvalidResourceHandle);
    if (device_sm() * 10 < r.arch) return set_error(cudaErrorNoKernelImageForDevice);
    if (cudaError_t e = check_shape(l)) return set_error(e);
    op_ref o = op_new(OP_KERNEL, l.name, l.stream);
    o->eng = ENGINE_COMPUTE;
    o->bytes = cost.bytes;
    o->dur = vt_kernel_s(cost.bytes, cost.flops, cost.unit);
    o->gap = r.machine.gap_us * 1e-6;
    o->pinned = used.pinned;
    o->device = used.device;
    o->mapped = used.mapped;
    r.stats.launches++;
    if (!r.dry) {
        size_t limit = dyn_limit(l.fn) > 48 * 1024 ? smem_optin() : 48 * 1024;
        const char *bytes = static_cast<const char *>(l.args);
        o->body = [l, limit, args = std::vector<char>(bytes, bytes + l.arg_bytes)] {
            /* One place for all launches, written only where the thread sanitizer does not look: to it the parameters are
             * constants. One operation runs at a time. */
            alignas(64) static char space[8192];
            raw_copy(space, args.data(), args.size());
            grid_run g = {l.name, l.file, l.line, l.grid, l.block, l.smem, limit, l.invoke, space};
            simt_run(g, rt().simt);
        };
    }
    return op_enqueue(o);
}

cudaError_t cudaFuncSetAttribute(const void *fn, cudaFuncAttribute attr, int value) {
    api a("cudaFuncSetAttribute", 0, cudaErrorInvalidDeviceFunction);
    if (a.err) return a.err;
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > smem_optin()) return set_error(cudaErrorInvalidValue);
    rt().dyn_limit[fn] = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *fn) {
    api a("cudaFuncGetAttributes", 0, cudaErrorInvalidDeviceFunction);
    if (a.err) return a.err;
    if (device_sm() * 10 < rt().arch) return set_error(cudaErrorNoKernelImageForDevice);
    *out = {};
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = rt().arch / 10;
    out->maxDynamicSharedSizeBytes = (int)dyn_limit(fn);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int block, size_t smem) {
    api a("cudaOccupancyMaxActiveBlocksPerMultiprocessor", 0, cudaErrorInvalidDeviceFunction);
    if (a.err) return a.err;
    int by_threads = 2048 / std::max(block, 32), by_smem = smem ? (int)(smem_optin() / smem) : 16;
    *blocks = std::min({by_threads, by_smem, 16});
    return cudaSuccess;
}
