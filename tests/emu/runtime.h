/* runtime.h: internal. The emulated device: memory, streams, the executor, the virtual timeline. One lock guards it all and
 * is held while an operation runs, so that one operation at a time is executed in real time; concurrency exists in the
 * order that the policy chooses and in virtual time.
 *
 *   memory.cpp    device, pinned and pageable memory; translation of pointers; what the host may see yet
 *   stream.cpp    queues, policies, waiting, events, host functions
 *   flags.cpp     stream memory operations and the host's side of hand-over flags
 *   graph.cpp     capture and replay
 *   vtime.cpp     machines, the timeline, host clocks, CPU work
 *   runtime.cpp   environment, faults on demand; memory and copy calls, launches
 *   device.cpp    properties of the device, texts of errors
 *   blas.cpp      the cuBLAS subset */
#ifndef EMU_RUNTIME_H
#define EMU_RUNTIME_H

#include "fiber.h"
#include "simt.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <emu.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

enum op_kind { OP_KERNEL, OP_COPY, OP_SET, OP_HOST, OP_RECORD, OP_WAIT, OP_FLAGS, OP_MARK };
enum engine { ENGINE_NONE, ENGINE_COMPUTE, ENGINE_H2D, ENGINE_D2H, ENGINES };

struct op;
using op_ref = std::shared_ptr<op>;

struct memop { /* of a stream memory operation */
    bool wait;
    uint32_t *flag;
    uint32_t value;
    unsigned cond;      /* CU_STREAM_WAIT_VALUE_* */
    uint64_t node;      /* identity across replays of a graph, 0: not in a graph */
    uint64_t entry;     /* set when committed: what the wait was matched with */
};

struct span { const char *p; size_t n; };

struct op {
    op_kind kind;
    std::string name;
    cudaStream_t stream;             /* valid while the operation is in its queues */
    int sid;                         /* its id */
    uint64_t seq;                    /* order of the calls */
    uint32_t index;                  /* in its stream, from 1 */
    std::vector<uint32_t> seen;      /* per stream: how many of its operations are done before this one starts */
    std::vector<op_ref> deps;        /* of other streams */
    std::function<void()> move;      /* data movement: outside of the stream's TSan fiber */
    std::function<void(const op &)> hold; /* a copy into pinned memory: its bytes, not yet shown to the host */
    std::function<void()> body;      /* a kernel: inside */
    span reads, writes;              /* of a copy, told to TSan */
    std::vector<span> pinned;        /* pinned memory that it reads */
    std::vector<const char *> device; /* a kernel's pointers to device memory: the storage */
    bool mapped;                     /* a kernel with memory of two views */
    std::vector<memop> mem;
    bool done, running;
    /* virtual */
    engine eng;
    double issue, dur, gap, start, end, bytes;
    bool committed;
};

struct capture;

struct CUstream_st {
    int id;
    bool hidden;                     /* belongs to a graph */
    std::deque<op_ref> queue, vqueue; /* not done; not committed */
    op_ref last;
    std::vector<uint32_t> seen;      /* of the next operation */
    double vend;                     /* end of the last committed operation */
    capture *cap;
    int cap_slot;
    void *tsan;
    op_ref join;                     /* a host function whose end the fiber has not acquired yet */
};

struct CUevent_st {
    unsigned flags;
    op_ref rec;                      /* the latest cudaEventRecord */
    capture *cap;                    /* recorded while capturing: node of that capture */
    uint64_t cap_id;
    int cap_node;
};

struct device_alloc {
    size_t bytes, rounded, region;          /* region: pages and guard, from its start */
    size_t region_off;
    bool pieced;                            /* a sub-allocator told its pieces: nothing else is valid */
    std::map<size_t, size_t> pieces;        /* offset in the range: bytes */
};
struct pinned_range {
    size_t bytes;
    bool owned, two_views;                  /* allocated here; kernels see `device`, not the host's bytes */
    char *device, *host_seen, *device_seen; /* the device's view; what each side last agreed on */
};
/* Bytes that an operation wrote into host memory and that the host has not waited for yet. */
struct pending_write {
    char *dst;
    std::vector<char> data;
    int stream;
    uint32_t index;
};
struct host_update { pinned_range *range; size_t off; std::vector<char> data; uint64_t seq; };

struct flag_entry { uint64_t id; uint32_t value; bool by_host; double t; op_ref by; };
struct flag_state {
    std::deque<flag_entry> log;
    uint64_t last_matched, dropped;
    uint32_t shown;                          /* value that polls see, by the virtual clock */
    std::map<uint64_t, memop> consumed;      /* waits of graphs that took the flag since it was reset */
};

struct timeline_row { engine eng; int stream; double start, end, bytes; std::string name; };

struct host_thread { /* a host clock; unregistered threads get one that does not hold others back */
    double now;
    bool registered, waiting;
    op_ref waits_for;
};

struct fault { std::string call; long n; int code; bool sticky; };

struct runtime {
    std::mutex lock;
    std::condition_variable changed;
    emu_machine machine;
    bool ready, dry;
    int devices, driver;
    emu_policy policy;
    uint64_t rng;
    simt_options simt;
    double hang_s;
    cudaError_t sticky;
    std::vector<fault> faults;
    std::map<std::string, long> calls;
    long calls_any;
    emu_stats stats;
    int arch;

    char *d_base, *s_base;                   /* handles and storage */
    size_t reserve, capacity, bump;
    std::map<size_t, device_alloc> allocs;   /* by offset */
    std::map<uintptr_t, pinned_range> pinned;
    std::deque<pending_write> pending;
    std::deque<host_update> updates;
    std::map<const void *, int> dyn_limit;   /* cudaFuncSetAttribute */

    std::vector<cudaStream_t> streams;       /* all, hidden ones too */
    std::set<cudaEvent_t> events;
    std::set<cudaGraph_t> graphs;
    std::set<cudaGraphExec_t> execs;
    std::vector<uint32_t> slot_next;         /* per stream id: next index; ids are used again */
    std::vector<bool> slot_used;
    uint64_t seq;
    int host_running;                        /* host functions under way */
    std::map<const uint32_t *, flag_state> flags;
    uint64_t flag_ids;

    double engine_free[ENGINES];
    std::vector<timeline_row> timeline;
    std::deque<timeline_row> copies;         /* committed copies that may still overlap CPU work */
    std::map<int, std::shared_ptr<host_thread>> threads;
    int thread_ids;
};
runtime &rt();
host_thread &me();                           /* the calling thread's clock */

/* --- memory.cpp ----------------------------------------------------------------------------------------------------------- */

enum mem_kind { MEM_DEVICE, MEM_PINNED, MEM_PAGEABLE };
void memory_open(const emu_machine &m);
void memory_close();
void *memory_alloc(size_t bytes);            /* handle; null: does not fit */
bool memory_free(void *d);
bool pinned_add(void *p, size_t bytes, bool owned, bool two_views);
bool pinned_del(void *p, bool owned);
void *pinned_alloc(size_t bytes, bool mapped);
pinned_range *pinned_find(const void *p, uintptr_t *base);
bool in_device_range(const void *p);
/* Kind of the memory at p and, for the device, its storage. False: device address outside of what is allocated. */
bool memory_resolve(const void *p, size_t bytes, mem_kind *kind, char **storage);
void memory_check_bounds(const char *after); /* bytes behind each allocation still as they were left */
std::string memory_describe(const void *p);

/* What a launch's parameters refer to, collected by emu_param_* on the calling thread. */
struct param_use { std::vector<span> pinned; std::vector<const char *> device; bool mapped; };
param_use params_take();

void host_writes_noted(uint64_t seq);        /* the host's writes into mapped memory so far belong to operations from seq on */
void host_writes_apply(uint64_t seq);        /* operations up to seq see them */
void host_writes_now();                      /* seen at once: a flag said so */
void device_writes_note(const op &o);        /* what a kernel wrote into mapped memory waits for a synchronisation */
void pending_add(const op &o, char *dst, std::vector<char> &&data);
void pending_flush(const op &o);             /* everything that is done before o ends becomes visible */
void pending_flush_range(const op &o, span s); /* the same, in one range: o reads it */
void pending_flush_all();
void device_view_set(char *host, const char *src, size_t n); /* a copy wrote into mapped memory */

/* --- stream.cpp ----------------------------------------------------------------------------------------------------------- */

bool stream_valid(cudaStream_t st);
cudaStream_t stream_new(bool hidden);
void stream_free(cudaStream_t st);
op_ref op_new(op_kind k, const char *name, cudaStream_t st);
cudaError_t op_enqueue(const op_ref &o);     /* or captured, when the stream is capturing */
void op_push(const op_ref &o);               /* never captured */
void run_until(std::unique_lock<std::mutex> &l, const op_ref &target); /* really done */
/* Really done, virtually done, results visible, clock moved. */
void host_wait(std::unique_lock<std::mutex> &l, const op_ref &target);
void host_wait_all(std::unique_lock<std::mutex> &l);
void after_enqueue();                        /* what the policy runs by itself */
bool run_one(const op_ref &toward);          /* one operation; false: none can run */
op_ref find_runnable(const op_ref &target);
/* Nothing can run here: waits for another thread to change that; reports when there is none, or after EMU_HANG_S. */
void wait_for_others(std::unique_lock<std::mutex> &l, const char *what, double *waited_s);
bool memop_satisfied(const memop &m);

/* --- flags.cpp ------------------------------------------------------------------------------------------------------------- */

void flags_run(op &o);
flag_entry *flag_match(const memop &m);
void flags_commit(op &o);
void flags_logged(const op_ref &o);          /* at enqueue */

/* --- vtime.cpp ------------------------------------------------------------------------------------------------------------- */

bool vt_ready(const op_ref &o, double *t);
void vt_commit_until(std::unique_lock<std::mutex> &l, const op_ref &target);
void vt_commit_upto(std::unique_lock<std::mutex> &l, double t);
double vt_kernel_s(double bytes, double flops, int unit);
void vt_thread_waits(const op_ref &o);

/* --- runtime.cpp ----------------------------------------------------------------------------------------------------------- */

void first_time();                           /* reads the environment; under the lock */
#define LOCKED                                                                                                         \
    std::lock_guard<std::mutex> l(rt().lock);                                                                          \
    first_time()

/* Start of every API call: takes the lock, counts, charges the clock, fails on demand. */
struct api {
    std::unique_lock<std::mutex> lock;
    cudaError_t err;
    api(const char *name, double cost_s, cudaError_t code);
};
bool capture_refuses(cudaStream_t st);       /* capturing: the call spoils it */
bool any_capture_refuses();
cudaError_t set_error(cudaError_t e);        /* the thread's last error */
struct launch_cost { double bytes, flops; int unit; bool set; };
launch_cost cost_take();
size_t smem_optin();
int device_sm();
double api_s();
double launch_s();

#endif
