/* simt.cpp: runs the blocks of a kernel with one fiber per CUDA thread. A fiber runs until it needs others (barrier, warp
 * collective); the last to arrive computes everybody's result and the waiting ones become ready again. A block stays on
 * one host thread. Everything that a real block would hang on or leave undefined is reported with source lines. */
#include "simt.h"

#include "fiber.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

__thread uint3 threadIdx, blockIdx;
__thread emu_dim blockDim, gridDim;

namespace {

enum { MAX_THREADS = 1024, MAX_WARPS = 32, MAX_WORKERS = 64, SMEM_ARENA = 512 * 1024, SMEM_GAP = 32, MAX_ARRAYS = 64 };
enum lane_state : uint8_t { NEW, RUNNABLE, AT_BARRIER, AT_COLLECTIVE, DONE };

struct copy16 { char *dst; const char *src; unsigned bytes, src_bytes; };
enum { MAX_COPIES = 128, MAX_GROUPS = 16 };

struct lane {
    fiber_context ctx;
    fiber_stack stack;
    uint3 idx;
    int tid;
    lane_state state;
    int op;                    /* collective it waits in */
    unsigned mask;
    const char *file;          /* where it waits */
    int line;
    void *tsan, *fake_stack;
    int n_copy, n_group;       /* cp.async not yet performed; committed groups: in async_queue of the same thread */
};
struct async_queue {           /* apart from what every switch touches */
    copy16 copies[MAX_COPIES];
    int group_end[MAX_GROUPS]; /* ends in copies */
};

/* A place where the lanes of one mask meet; several masks of a warp can be under way at the same time. */
struct meeting {
    unsigned mask, arrived;
    int op;
    const char *file;
    int line;
    char tsan[2]; /* objects for memory order, alternating so that a fast lane's next round is not seen by slow ones */
    int round;
};
struct warp {
    meeting meet[32];
    int n_meet;                /* masks used so far by the block */
    unsigned exists, exited;
    uint64_t in[32], out[32];
    int aux[32];
};
struct array { const void *key; const char *name; size_t off, bytes; };

struct worker {
    fiber_context main;
    lane *cur;
    lane lanes[MAX_THREADS];
    async_queue queues[MAX_THREADS];
    warp warps[MAX_WARPS];
    uint16_t ready[MAX_THREADS], order[MAX_THREADS];
    int ready_head, ready_n, n, next_new, done;
    struct {
        int arrived, how, acc, round, result[2];
        const char *file;
        int line;
        char tsan[2];
    } bar;
    std::vector<fiber_stack> free_stacks;
    char *smem;
    array arrays[MAX_ARRAYS];
    int n_array;
    size_t smem_used, smem_static;
    const grid_run *g;
    const simt_options *o;
    uint64_t rng;
    void *tsan_main, *main_fake;
    const void *main_bottom;
    size_t main_bytes;
    bool keep_stacks; /* one stack per lane: the sanitizers know stacks by their lane */
    bool tsan_lanes;
    char tsan_start, tsan_end;
};

__thread __attribute__((tls_model("initial-exec"))) worker *tls_worker;
worker *g_workers[MAX_WORKERS];

const char *op_name(int op) {
    static const char *const names[] = {
        "__syncwarp", "__shfl_sync", "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync",
        "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync", "warp_sum", "warp_max", "ldmatrix", "mma", "wmma"};
    return names[op];
}

unsigned next_random(worker *w) {
    w->rng = w->rng * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(w->rng >> 33);
}

size_t stack_bytes() { return asan_on() ? 256 * 1024 : 64 * 1024; }

/* --- switching ----------------------------------------------------------------------------------------------------------- */

void switch_to(worker *w, lane *from, lane *to, bool dying) {
    w->cur = to;
    if (to) threadIdx = to->idx;
    if (w->tsan_lanes) __tsan_switch_to_fiber(to ? to->tsan : w->tsan_main, 1);
    if (__sanitizer_start_switch_fiber) {
        void **save = dying ? nullptr : from ? &from->fake_stack : &w->main_fake;
        if (to)
            __sanitizer_start_switch_fiber(save, to->stack.base, to->stack.bytes);
        else
            __sanitizer_start_switch_fiber(save, w->main_bottom, w->main_bytes);
    }
    fiber_switch(from ? &from->ctx : &w->main, to ? &to->ctx : &w->main);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(from ? from->fake_stack : w->main_fake, nullptr, nullptr);
}

void lane_main();

void begin_lane(worker *w, int tid) {
    lane *l = &w->lanes[tid];
    l->state = RUNNABLE;
    l->fake_stack = nullptr;
    l->n_copy = l->n_group = 0;
}

/* Gives the next new thread of the block a stack. */
lane *start_new(worker *w) {
    int tid = w->order[w->next_new++];
    lane *l = &w->lanes[tid];
    begin_lane(w, tid);
    if (!l->stack.base) {
        if (!w->keep_stacks && !w->free_stacks.empty()) {
            l->stack = w->free_stacks.back();
            w->free_stacks.pop_back();
        } else {
            l->stack = fiber_stack_new(stack_bytes());
        }
    }
    if (asan_on()) __asan_unpoison_memory_region(l->stack.base, l->stack.bytes);
    fiber_make(&l->ctx, l->stack, (size_t)(tid * 208 % 4096) & ~(size_t)15, lane_main);
    return l;
}

/* The thread to run next; null: none can, back to the scheduler. */
lane *pick(worker *w) {
    bool fresh = w->next_new < w->n;
    if (w->ready_n && !(w->o->order == 2 && fresh && (next_random(w) & 1))) {
        if (w->o->order == 2) {
            int a = w->ready_head, b = (a + (int)(next_random(w) % (unsigned)w->ready_n)) % MAX_THREADS;
            std::swap(w->ready[a], w->ready[b]);
        }
        lane *l = &w->lanes[w->ready[w->ready_head]];
        w->ready_head = (w->ready_head + 1) % MAX_THREADS;
        w->ready_n--;
        return l;
    }
    return fresh ? start_new(w) : nullptr;
}

void make_ready(worker *w, int tid) {
    w->lanes[tid].state = RUNNABLE;
    w->ready[(w->ready_head + w->ready_n++) % MAX_THREADS] = (uint16_t)tid;
}

void wait_here(worker *w, lane *l, lane_state s, const char *file, int line) {
    l->state = s;
    l->file = file;
    l->line = line;
    switch_to(w, l, pick(w), false);
}

void lane_done(worker *w, lane *l) {
    warp *v = &w->warps[l->tid / 32];
    unsigned bit = 1u << (l->tid % 32);
    if (l->n_copy) emu_report("thread ends with cp.async copies that were never waited for");
    for (int i = 0; i < v->n_meet; i++)
        if (v->meet[i].arrived && (v->meet[i].mask & bit))
            emu_report("thread %d ends but is named in the mask %08x of %s at %s:%d", l->tid, v->meet[i].mask,
                       op_name(v->meet[i].op), v->meet[i].file, v->meet[i].line);
    if (w->bar.arrived)
        emu_report("thread %d ends while %d threads wait in __syncthreads at %s:%d", l->tid, w->bar.arrived, w->bar.file,
                   w->bar.line);
    v->exited |= bit;
    l->state = DONE;
    w->done++;
    if (w->tsan_lanes) tsan_release(&w->tsan_end);
}

/* First function of every fiber. A thread that ends without others being ready hands its stack to the next new one. */
void lane_main() {
    worker *w = tls_worker;
    if (__sanitizer_finish_switch_fiber) {
        const void *bottom;
        size_t bytes;
        __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
        if (!w->main_bottom) {
            w->main_bottom = bottom;
            w->main_bytes = bytes;
        }
    }
    for (;;) {
        lane *l = w->cur;
        if (w->tsan_lanes) tsan_acquire(&w->tsan_start);
        w->g->invoke(w->g->args);
        lane_done(w, l);
        if (w->keep_stacks) switch_to(w, l, pick(w), true);
        if (!w->ready_n && w->next_new < w->n) {
            int tid = w->order[w->next_new++];
            begin_lane(w, tid);
            lane *next = &w->lanes[tid];
            next->stack = l->stack;
            l->stack.base = nullptr;
            w->cur = next;
            threadIdx = next->idx;
            continue;
        }
        lane *next = pick(w); /* before the stack is free: a new thread must not begin on it */
        w->free_stacks.push_back(l->stack); /* in use until the switch below, by nobody else */
        l->stack.base = nullptr;
        switch_to(w, l, next, true);
    }
}

/* --- blocks --------------------------------------------------------------------------------------------------------------- */

void new_arena(worker *w) {
    if (w->smem) munmap(w->smem, SMEM_ARENA);
    void *p = mmap(nullptr, SMEM_ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) emu_report("no memory for shared memory");
    w->smem = static_cast<char *>(p);
}

void poison_arena(worker *w) {
    if (asan_on()) __asan_unpoison_memory_region(w->smem, w->smem_used);
    raw_fill(w->smem, 0xff, w->smem_used);
    if (!asan_on()) return;
    __asan_poison_memory_region(w->smem + w->g->smem_dyn, SMEM_GAP);
    for (int i = 0; i < w->n_array; i++)
        __asan_poison_memory_region(w->smem + w->arrays[i].off + w->arrays[i].bytes, SMEM_GAP);
}

/* The bytes behind each array still hold the poison, unless somebody wrote past the array. */
void check_gap(worker *w, size_t end, const char *name) {
    if (asan_on()) return;
    for (int i = 0; i < SMEM_GAP; i++)
        if (w->smem[end + (size_t)i] != (char)0xff) emu_report("shared array %s was written %d bytes past its end", name, i + 1);
}

void report_deadlock(worker *w) {
    fprintf(stderr, "EMU: deadlock in a block: where its threads are\n");
    for (int i = 0; i < w->n;) {
        lane *a = &w->lanes[i];
        int j = i + 1;
        for (; j < w->n; j++) {
            lane *b = &w->lanes[j];
            if (b->state != a->state || (a->state != DONE && (b->line != a->line || b->op != a->op || b->file != a->file))) break;
        }
        fprintf(stderr, "EMU:   threads %d..%d: ", i, j - 1);
        if (a->state == DONE)
            fprintf(stderr, "ended\n");
        else if (a->state == AT_BARRIER)
            fprintf(stderr, "__syncthreads at %s:%d\n", a->file, a->line);
        else
            fprintf(stderr, "%s, mask %08x, at %s:%d\n", op_name(a->op), a->mask, a->file, a->line);
        i = j;
    }
    emu_report("the block cannot go on: lanes are missing from a collective or threads from a barrier");
}

void run_block(worker *w, unsigned bx, unsigned by, unsigned bz) {
    const grid_run *g = w->g;
    blockIdx = {bx, by, bz};
    blockDim = {g->block.x, g->block.y, g->block.z};
    gridDim = {g->grid.x, g->grid.y, g->grid.z};
    w->ready_head = w->ready_n = w->next_new = w->done = 0;
    w->bar.arrived = 0;
    for (int i = 0; i < (w->n + 31) / 32; i++) {
        w->warps[i].n_meet = 0;
        w->warps[i].exited = 0;
        w->warps[i].exists = w->n - 32 * i >= 32 ? ~0u : (1u << (w->n - 32 * i)) - 1;
    }
    if (w->o->order == 2)
        for (int i = w->n - 1; i > 0; i--) std::swap(w->order[i], w->order[next_random(w) % (unsigned)(i + 1)]);
    if (w->tsan_lanes) {
        new_arena(w); /* a fresh mapping: reuse by another block must not look like a race */
        for (int i = 0; i < w->n; i++) /* here, in the main context: a fiber knows what its creator knows */
            if (!w->lanes[i].tsan) {
                w->lanes[i].tsan = __tsan_create_fiber(0);
                fiber_stack_renew(w->lanes[i].stack);
            }
    }
    poison_arena(w);
    if (w->tsan_lanes) tsan_release(&w->tsan_start);
    while (w->done < w->n) {
        lane *l = pick(w);
        if (!l) report_deadlock(w);
        switch_to(w, nullptr, l, false);
    }
    check_gap(w, g->smem_dyn, "dynamic");
    for (int i = 0; i < w->n_array; i++) check_gap(w, w->arrays[i].off + w->arrays[i].bytes, w->arrays[i].name);
    if (w->tsan_lanes && w->o->tsan_fresh)
        for (int i = 0; i < w->n; i++) {
            __tsan_destroy_fiber(w->lanes[i].tsan);
            w->lanes[i].tsan = nullptr;
        }
}

worker *get_worker(int i) {
    if (!g_workers[i]) {
        g_workers[i] = new worker();
        g_workers[i]->free_stacks.reserve(MAX_THREADS + 1);
    }
    return g_workers[i];
}

void begin_grid(worker *w, const grid_run *g, const simt_options *o, int id) {
    w->g = g;
    w->o = o;
    w->rng = o->seed * 2654435761u + (uint64_t)id * 977u + 1;
    w->n = (int)(g->block.x * g->block.y * g->block.z);
    w->tsan_lanes = o->tsan_lanes && tsan_on();
    w->keep_stacks = w->tsan_lanes || asan_on();
    w->tsan_main = w->tsan_lanes ? __tsan_get_current_fiber() : nullptr;
    w->main_bottom = nullptr;
    w->n_array = 0;
    w->smem_static = 0;
    w->smem_used = (g->smem_dyn + SMEM_GAP + 31) & ~(size_t)31;
    if (!w->smem || tsan_on()) new_arena(w);
    if (asan_on()) __asan_unpoison_memory_region(w->smem, SMEM_ARENA); /* gaps of the grid before */
    if (tsan_on() && !w->tsan_lanes)
        for (fiber_stack s : w->free_stacks) fiber_stack_renew(s);
    for (int i = 0; i < w->n; i++) {
        unsigned x = g->block.x, y = g->block.y, t = (unsigned)i;
        w->order[i] = (uint16_t)(o->order == 1 ? w->n - 1 - i : i);
        w->lanes[i].tid = i;
        w->lanes[i].idx = {t % x, t / x % y, t / (x * y)};
    }
}

void end_grid(worker *w) {
    if (w->tsan_lanes) tsan_acquire(&w->tsan_end); /* not before: blocks know nothing of each other */
    for (int i = 0; i < w->n && w->tsan_lanes; i++)
        if (w->lanes[i].tsan) {
            __tsan_destroy_fiber(w->lanes[i].tsan);
            w->lanes[i].tsan = nullptr;
        }
    w->g = nullptr;
    w->cur = nullptr;
}

} // namespace

void simt_run(const grid_run &g, const simt_options &o) {
    uint64_t n = (uint64_t)g.grid.x * g.grid.y * g.grid.z;
    /* order 2: a stride that has no factor in common with n visits every block once */
    uint64_t stride = 1, first = 0;
    if (o.order == 2 && n > 2) {
        for (stride = n / 2 + o.seed % (n / 2) + 1; std::__gcd(stride, n) != 1; stride++) {}
        first = o.seed % n;
    }
    std::atomic<uint64_t> next{0};
    auto work = [&](int id) {
        worker *w = get_worker(id), *outer = tls_worker;
        begin_grid(w, &g, &o, id);
        tls_worker = w;
        simt_altstack();
        for (uint64_t i; (i = next.fetch_add(1)) < n;) {
            uint64_t b = o.order == 1 ? n - 1 - i : (first + i * stride) % n;
            run_block(w, (unsigned)(b % g.grid.x), (unsigned)(b / g.grid.x % g.grid.y),
                      (unsigned)(b / ((uint64_t)g.grid.x * g.grid.y)));
        }
        end_grid(w);
        tls_worker = outer;
    };
    int workers = (int)std::min<uint64_t>((uint64_t)std::min<int>(o.workers, MAX_WORKERS), n);
    if (workers <= 1) {
        work(0);
        return;
    }
    for (int i = 0; i < workers; i++) get_worker(i);
    std::vector<std::thread> threads;
    for (int i = 1; i < workers; i++) threads.emplace_back(work, i);
    work(0);
    for (auto &t : threads) t.join();
}

/* --- what device code calls ----------------------------------------------------------------------------------------------- */

static bool same_site(const char *fa, int la, const char *fb, int lb) { return la == lb && (fa == fb || !strcmp(fa, fb)); }

/* Butterfly in the order of warp_sum's shuffles: the same additions in the same tree. */
static void butterfly(uint64_t *out, const uint64_t *in, bool sum) {
    float v[32], t[32];
    for (int i = 0; i < 32; i++) v[i] = emu::unpack<float>(in[i]);
    for (int x = 16; x; x >>= 1) {
        for (int i = 0; i < 32; i++) t[i] = sum ? v[i] + v[i ^ x] : fmaxf(v[i], v[i ^ x]);
        memcpy(v, t, sizeof v);
    }
    for (int i = 0; i < 32; i++) out[i] = emu::pack(v[i]);
}

static void leader(warp *w, const meeting &m) {
    uint64_t *in = w->in, *out = w->out, r = 0;
    auto lanes = [&](auto f) {
        for (unsigned k = m.mask; k; k &= k - 1) f(__builtin_ctz(k));
    };
    auto reduce = [&](auto init, auto f) {
        auto acc = init;
        bool first = true;
        lanes([&](int i) {
            auto v = emu::unpack<decltype(init)>(in[i]);
            acc = first ? v : f(acc, v);
            first = false;
        });
        r = emu::pack(acc);
        lanes([&](int i) { out[i] = r; });
    };
    switch (m.op) {
    case EMU_SYNCWARP: break;
    case EMU_SHFL:
        lanes([&](int i) {
            if (!(m.mask >> (w->aux[i] & 31) & 1))
                emu_report("%s:%d: lane %d shuffles from lane %d, which is not in mask %08x", m.file, m.line, i, w->aux[i] & 31, m.mask);
            out[i] = in[w->aux[i] & 31];
        });
        break;
    case EMU_BALLOT:
    case EMU_ANY:
    case EMU_ALL:
        lanes([&](int i) { r |= in[i] << i; });
        r = m.op == EMU_BALLOT ? r : m.op == EMU_ANY ? r != 0 : r == m.mask;
        lanes([&](int i) { out[i] = r; });
        break;
    case EMU_MATCH_ANY:
        lanes([&](int i) {
            unsigned same = 0;
            lanes([&](int j) { same |= (unsigned)(in[j] == in[i]) << j; });
            out[i] = same;
        });
        break;
    case EMU_ADD_I32: reduce(0u, [](unsigned a, unsigned b) { return a + b; }); break;
    case EMU_MIN_I32: reduce(0, [](int a, int b) { return a < b ? a : b; }); break;
    case EMU_MAX_I32: reduce(0, [](int a, int b) { return a > b ? a : b; }); break;
    case EMU_MIN_U32: reduce(0u, [](unsigned a, unsigned b) { return a < b ? a : b; }); break;
    case EMU_MAX_U32: reduce(0u, [](unsigned a, unsigned b) { return a > b ? a : b; }); break;
    case EMU_AND: reduce(0u, [](unsigned a, unsigned b) { return a & b; }); break;
    case EMU_OR: reduce(0u, [](unsigned a, unsigned b) { return a | b; }); break;
    case EMU_XOR: reduce(0u, [](unsigned a, unsigned b) { return a ^ b; }); break;
    case EMU_SUM_F32: butterfly(out, in, true); break;
    case EMU_MAX_F32: butterfly(out, in, false); break;
    default: matrix_leader(m.op, in);
    }
}

/* Whether this is the barrier or wait that EMU_SKIP leaves out. Says so when it is met, for whoever counts on it. */
static bool left_out(const worker *w, const char *file, int line) {
    if (line != w->o->skip_line) return false;
    size_t n = strlen(file), m = strlen(w->o->skip_file);
    if (n < m || strcmp(file + n - m, w->o->skip_file)) return false;
    static std::atomic<bool> said;
    if (!said.exchange(true)) fprintf(stderr, "EMU: leaves out %s:%d\n", w->o->skip_file, line);
    return true;
}

static meeting *meeting_of(warp *p, unsigned mask) {
    for (int i = 0; i < p->n_meet; i++)
        if (p->meet[i].mask == mask) return &p->meet[i];
    if (p->n_meet == 32) emu_report("a warp uses more than 32 masks");
    meeting *m = &p->meet[p->n_meet++];
    m->mask = mask;
    m->arrived = 0;
    return m;
}

uint64_t emu_collective(int op, unsigned mask, uint64_t v, int aux, const char *file, int line) {
    worker *w = tls_worker;
    if (!w || !w->cur) emu_report("%s:%d: %s in host code", file, line, op_name(op));
    lane *l = w->cur;
    if (op == EMU_SYNCWARP && left_out(w, file, line)) return 0;
    if (w->o->shuffle_sum && (op == EMU_SUM_F32 || op == EMU_MAX_F32)) {
        float x = emu::unpack<float>(v);
        for (int d = 16; d; d >>= 1) {
            float y = emu::unpack<float>(emu_collective(EMU_SHFL, mask, emu::pack(x), l->tid % 32 ^ d, file, line));
            x = op == EMU_SUM_F32 ? x + y : fmaxf(x, y);
        }
        return emu::pack(x);
    }
    warp *p = &w->warps[l->tid / 32];
    int i = l->tid % 32;
    if (!(mask >> i & 1)) emu_report("%s:%d: %s: lane %d is not in its mask %08x", file, line, op_name(op), i, mask);
    meeting *m = meeting_of(p, mask);
    if (!m->arrived) {
        if (mask & ~p->exists)
            emu_report("%s:%d: %s: mask %08x names lanes that the block does not have (%d threads)", file, line, op_name(op), mask, w->n);
        if (mask & p->exited)
            emu_report("%s:%d: %s: lanes %08x of mask %08x have already ended", file, line, op_name(op), mask & p->exited, mask);
        m->op = op;
        m->file = file;
        m->line = line;
    } else if (m->op != op) {
        emu_report("%s:%d: %s, mask %08x, meets %s at %s:%d", file, line, op_name(op), mask, op_name(m->op), m->file, m->line);
    }
    p->in[i] = v;
    p->aux[i] = aux;
    m->arrived |= 1u << i;
    bool orders_memory = w->tsan_lanes && (op == EMU_SYNCWARP || op >= EMU_LDMATRIX);
    int round = m->round & 1;
    if (orders_memory) tsan_release(&m->tsan[round]);
    if (m->arrived == mask) {
        if (orders_memory) tsan_acquire(&m->tsan[round]);
        leader(p, *m);
        if (orders_memory) tsan_release(&m->tsan[round]);
        m->arrived = 0;
        m->round++;
        int base = l->tid & ~31;
        if (w->o->order == 1) {
            for (int j = 31; j >= 0; j--)
                if (j != i && (mask >> j & 1)) make_ready(w, base + j);
        } else {
            for (unsigned k = mask & ~(1u << i); k; k &= k - 1) make_ready(w, base + __builtin_ctz(k));
        }
    } else {
        l->op = op;
        l->mask = mask;
        wait_here(w, l, AT_COLLECTIVE, file, line);
        if (orders_memory) tsan_acquire(&m->tsan[round]);
    }
    return p->out[i];
}

int emu_barrier(int how, int pred, const char *file, int line) {
    worker *w = tls_worker;
    if (!w || !w->cur) emu_report("%s:%d: __syncthreads in host code", file, line);
    lane *l = w->cur;
    auto &b = w->bar;
    if (how == 0 && left_out(w, file, line)) return 0;
    if (w->done) emu_report("%s:%d: __syncthreads after %d threads of the block have ended", file, line, w->done);
    if (!b.arrived) {
        b.file = file;
        b.line = line;
        b.how = how;
        b.acc = how == 2;
    } else if (b.how != how || !same_site(b.file, b.line, file, line)) {
        emu_report("divergent barrier: __syncthreads at %s:%d while %d threads wait at %s:%d", file, line, b.arrived, b.file, b.line);
    }
    b.acc = how == 1 ? b.acc + (pred != 0) : how == 2 ? b.acc && pred : b.acc || pred;
    int round = b.round & 1;
    if (w->tsan_lanes) tsan_release(&b.tsan[round]);
    if (++b.arrived == w->n) {
        b.result[round] = b.acc;
        b.arrived = 0;
        b.round++;
        if (w->o->order == 1) {
            for (int i = w->n - 1; i >= 0; i--)
                if (i != l->tid) make_ready(w, i);
        } else {
            for (int i = 0; i < w->n; i++)
                if (i != l->tid) make_ready(w, i);
        }
    } else {
        l->op = -1;
        wait_here(w, l, AT_BARRIER, file, line);
    }
    if (w->tsan_lanes) tsan_acquire(&b.tsan[round]);
    return b.result[round];
}

void *emu_smem(const void *key, size_t bytes, size_t align, const char *name) {
    worker *w = tls_worker;
    if (!w || !w->cur) emu_report("shared array %s in host code", name);
    for (int i = 0; i < w->n_array; i++)
        if (w->arrays[i].key == key) return w->smem + w->arrays[i].off;
    size_t off = (w->smem_used + align - 1) / align * align;
    w->smem_static += bytes;
    if (w->smem_static > 48 * 1024)
        emu_report("static shared memory is %zu bytes with array %s, limit 49152", w->smem_static, name);
    if (w->smem_static + w->g->smem_dyn > w->g->smem_limit)
        emu_report("shared memory: %zu bytes static (with array %s) and %zu dynamic, limit %zu", w->smem_static, name,
                   w->g->smem_dyn, w->g->smem_limit);
    if (w->n_array == MAX_ARRAYS) emu_report("more than %d shared arrays", MAX_ARRAYS);
    w->arrays[w->n_array++] = {key, name, off, bytes};
    raw_fill(w->smem + w->smem_used, 0xff, off + bytes + SMEM_GAP - w->smem_used);
    w->smem_used = off + bytes + SMEM_GAP;
    if (asan_on()) __asan_poison_memory_region(w->smem + off + bytes, SMEM_GAP);
    return w->smem + off;
}

void *emu_smem_dyn() {
    worker *w = tls_worker;
    if (!w || !w->cur) emu_report("dynamic shared memory in host code");
    return w->smem;
}

void emu_cp_async(void *dst, const void *src, unsigned bytes, unsigned src_bytes, const char *file, int line) {
    worker *w = tls_worker;
    if ((uintptr_t)dst % 16 || (src_bytes && (uintptr_t)src % 16))
        emu_report("%s:%d: cp.async: %p <- %p must be multiples of 16", file, line, dst, src);
    if ((char *)dst < w->smem || (char *)dst + bytes > w->smem + w->smem_used)
        emu_report("%s:%d: cp.async: destination %p is not in the block's shared memory", file, line, dst);
    raw_fill(dst, 0xff, bytes); /* undefined until waited for */
    if (w->tsan_lanes) tsan_write(dst, bytes);
    lane *l = w->cur;
    if (l->n_copy == MAX_COPIES) emu_report("%s:%d: more than %d cp.async copies of a thread in flight", file, line, MAX_COPIES);
    w->queues[l->tid].copies[l->n_copy++] = {static_cast<char *>(dst), static_cast<const char *>(src), bytes, src_bytes};
}

void emu_cp_async_commit() {
    worker *w = tls_worker;
    lane *l = w->cur;
    if (l->n_group == MAX_GROUPS) emu_report("more than %d cp.async groups of a thread in flight", MAX_GROUPS);
    w->queues[l->tid].group_end[l->n_group++] = l->n_copy;
}

void emu_cp_async_wait(int newest, const char *file, int line) {
    worker *w = tls_worker;
    if (left_out(w, file, line)) return;
    lane *l = w->cur;
    if (l->n_group <= newest) return;
    async_queue *q = &w->queues[l->tid];
    int n = l->n_group - newest, end = q->group_end[n - 1];
    for (int i = 0; i < end; i++) {
        const copy16 &c = q->copies[i];
        raw_copy(c.dst, c.src, c.src_bytes);
        raw_fill(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
        if (w->tsan_lanes) {
            tsan_read(c.src, c.src_bytes);
            tsan_write(c.dst, c.bytes);
        }
    }
    l->n_copy -= end;
    l->n_group -= n;
    for (int i = 0; i < l->n_copy; i++) q->copies[i] = q->copies[end + i];
    for (int i = 0; i < l->n_group; i++) q->group_end[i] = q->group_end[n + i] - end;
}

/* --- reports --------------------------------------------------------------------------------------------------------------- */

bool simt_in_kernel() { return tls_worker && tls_worker->cur; }

void simt_where(char *text, size_t bytes) {
    worker *w = tls_worker;
    if (w && w->cur && w->g)
        snprintf(text, bytes, "kernel %s (launched at %s:%d), block (%u, %u, %u), thread %d", w->g->name, w->g->file,
                 w->g->line, blockIdx.x, blockIdx.y, blockIdx.z, w->cur->tid);
    else if (w && w->g)
        snprintf(text, bytes, "kernel %s (launched at %s:%d), block (%u, %u, %u)", w->g->name, w->g->file, w->g->line,
                 blockIdx.x, blockIdx.y, blockIdx.z);
    else
        snprintf(text, bytes, "host code");
}

void emu_report(const char *fmt, ...) {
    char where[512], text[2048];
    simt_where(where, sizeof where);
    va_list a;
    va_start(a, fmt);
    vsnprintf(text, sizeof text, fmt, a);
    va_end(a);
    fprintf(stderr, "EMU: %s\nEMU: in %s\n", text, where);
    fflush(stderr);
    abort();
}

void emu_trap(const char *file, int line) { emu_report("%s:%d: trap", file, line); }

void simt_altstack() {
    static __thread bool done;
    if (done || asan_on() || tsan_on()) return;
    done = true;
    stack_t s = {};
    s.ss_size = 64 * 1024;
    s.ss_sp = malloc(s.ss_size); /* lives as long as the thread can fault */
    if (s.ss_sp) sigaltstack(&s, nullptr);
}
