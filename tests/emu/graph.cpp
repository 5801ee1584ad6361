/* graph.cpp: capture and replay. While a stream is capturing, its operations become nodes instead of being queued; other
 * streams join by waiting for a captured event and must be joined back. A launch queues copies of the nodes: those of the
 * first stream on the stream of the launch, the others on streams of the graph. Values in nodes are those of the capture. */
#include "runtime.h"

#include <algorithm>

struct node { op_ref op; int slot; std::vector<int> deps; };

struct capture {
    uint64_t id;
    std::vector<node> nodes;
    std::vector<cudaStream_t> slots;       /* slot 0: where the capture began */
    std::vector<int> last;                 /* per slot: its last node, -1: none */
    std::vector<std::vector<int>> waits;   /* per slot: nodes that the next one depends on besides */
    bool bad;
};
struct CUgraph_st { std::vector<node> nodes; int slots; std::vector<int> joins; };
struct CUgraphExec_st {
    std::vector<node> nodes;
    int slots;
    std::vector<int> joins;                /* nodes of other slots that the launch's end depends on */
    std::vector<cudaStream_t> aux;         /* streams of slots 1.. */
};

static uint64_t capture_ids, node_ids;

static void invalidate(capture *c) { c->bad = true; }

cudaError_t op_enqueue(const op_ref &o) {
    capture *c = o->stream->cap;
    if (c) {
        if (c->bad) return set_error(cudaErrorStreamCaptureInvalidated);
        int slot = o->stream->cap_slot;
        node n = {o, slot, c->waits[(size_t)slot]};
        if (c->last[(size_t)slot] >= 0) n.deps.push_back(c->last[(size_t)slot]);
        c->waits[(size_t)slot].clear();
        c->nodes.push_back(n);
        c->last[(size_t)slot] = (int)c->nodes.size() - 1;
        return cudaSuccess;
    }
    op_push(o);
    host_writes_noted(o->seq);
    after_enqueue();
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t ev, cudaStream_t st) {
    api a("cudaEventRecord", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!rt().events.count(ev) || !stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    op_ref o = op_new(OP_RECORD, "event record", st);
    cudaError_t e = op_enqueue(o);
    if (e) return e;
    ev->cap = st->cap;
    if (st->cap) {
        ev->cap_id = st->cap->id;
        ev->cap_node = st->cap->last[(size_t)st->cap_slot];
    } else {
        ev->rec = o;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t st, cudaEvent_t ev, unsigned) {
    api a("cudaStreamWaitEvent", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!rt().events.count(ev) || !stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    if (ev->cap) {
        capture *c = ev->cap;
        if (st->cap && st->cap != c) return set_error(cudaErrorStreamCaptureMerge);
        if (!st->cap) {
            st->cap = c;
            st->cap_slot = (int)c->slots.size();
            c->slots.push_back(st);
            c->last.push_back(-1);
            c->waits.emplace_back();
        }
        c->waits[(size_t)st->cap_slot].push_back(ev->cap_node);
        return cudaSuccess;
    }
    if (st->cap) { /* an event from outside of the capture */
        invalidate(st->cap);
        return set_error(cudaErrorStreamCaptureIsolation);
    }
    if (!ev->rec) return cudaSuccess;
    op_ref o = op_new(OP_WAIT, "event wait", st);
    o->deps.push_back(ev->rec);
    return op_enqueue(o);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t st, cudaStreamCaptureMode) {
    api a("cudaStreamBeginCapture", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (!stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    if (st->cap) return set_error(cudaErrorInvalidValue);
    capture *c = new capture();
    c->id = ++capture_ids;
    c->slots.push_back(st);
    c->last.push_back(-1);
    c->waits.emplace_back();
    st->cap = c;
    st->cap_slot = 0;
    return cudaSuccess;
}

/* Every node of the other streams must lead to something that the first stream waited for. */
static bool joined(const capture &c, std::vector<int> *joins) {
    std::vector<bool> reached(c.nodes.size(), false);
    std::vector<int> todo(c.waits[0]);
    if (c.last[0] >= 0) todo.push_back(c.last[0]);
    while (!todo.empty()) {
        int n = todo.back();
        todo.pop_back();
        if (reached[(size_t)n]) continue;
        reached[(size_t)n] = true;
        for (int d : c.nodes[(size_t)n].deps) todo.push_back(d);
    }
    for (int n : c.waits[0]) joins->push_back(n);
    return std::all_of(reached.begin(), reached.end(), [](bool b) { return b; });
}

cudaError_t cudaStreamEndCapture(cudaStream_t st, cudaGraph_t *graph) {
    api a("cudaStreamEndCapture", api_s(), cudaErrorStreamCaptureInvalidated);
    *graph = nullptr;
    if (!stream_valid(st) || !st->cap) return set_error(cudaErrorInvalidValue);
    capture *c = st->cap;
    if (st->cap_slot) return set_error(cudaErrorStreamCaptureUnmatched);
    std::vector<int> joins;
    cudaError_t e = a.err ? a.err : c->bad ? cudaErrorStreamCaptureInvalidated : joined(*c, &joins) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
    for (cudaStream_t s : c->slots)
        if (stream_valid(s)) s->cap = nullptr;
    for (cudaEvent_t ev : rt().events)
        if (ev->cap == c) ev->cap = nullptr;
    if (!e) {
        *graph = new CUgraph_st{c->nodes, (int)c->slots.size(), joins};
        for (node &n : (*graph)->nodes)
            for (memop &m : n.op->mem) m.node = ++node_ids;
        rt().graphs.insert(*graph);
        rt().stats.graphs++;
    }
    delete c;
    return e ? set_error(e) : e;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t st, cudaStreamCaptureStatus *status) {
    api a("cudaStreamIsCapturing", 0, cudaErrorUnknown);
    if (a.err) return a.err;
    if (!stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    *status = !st->cap ? cudaStreamCaptureStatusNone : st->cap->bad ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    std::swap(now, *mode);
    return cudaSuccess;
}

static bool graph_valid(cudaGraph_t g) { return rt().graphs.count(g) != 0; }

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long) {
    api a("cudaGraphInstantiate", 50e-6, cudaErrorMemoryAllocation);
    if (a.err) return a.err;
    if (!graph_valid(g)) return set_error(cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{g->nodes, g->slots, g->joins, {}};
    for (int i = 1; i < g->slots; i++) (*exec)->aux.push_back(stream_new(true));
    rt().execs.insert(*exec);
    rt().stats.graphs++;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t st) {
    api a("cudaGraphUpload", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    return rt().execs.count(exec) && stream_valid(st) ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t st) {
    api a("cudaGraphLaunch", rt().machine.graph_launch_us * 1e-6, cudaErrorUnknown);
    if (a.err) return a.err;
    if (!rt().execs.count(exec)) return set_error(cudaErrorInvalidValue);
    if (!stream_valid(st)) return set_error(cudaErrorInvalidResourceHandle);
    if (st->cap) return set_error(cudaErrorStreamCaptureUnsupported);
    rt().stats.graph_launches++;
    op_ref before = st->last;
    std::vector<op_ref> made;
    std::vector<bool> begun((size_t)exec->slots, false);
    for (const node &n : exec->nodes) {
        op_ref o = std::make_shared<op>(*n.op);
        o->stream = n.slot ? exec->aux[(size_t)n.slot - 1] : st;
        o->sid = o->stream->id;
        for (int d : n.deps)
            if (exec->nodes[(size_t)d].slot != n.slot) o->deps.push_back(made[(size_t)d]);
        if (n.slot && !begun[(size_t)n.slot] && before) o->deps.push_back(before);
        begun[(size_t)n.slot] = true;
        if (o->eng == ENGINE_COMPUTE) o->gap = rt().machine.graph_gap_us * 1e-6;
        op_push(o);
        if (made.empty()) host_writes_noted(o->seq);
        made.push_back(o);
    }
    op_ref end = op_new(OP_MARK, "graph end", st);
    for (int j : exec->joins) end->deps.push_back(made[(size_t)j]);
    op_push(end);
    after_enqueue();
    return cudaSuccess;
}

/* Same nodes, other values: what a capture of the same code with other arguments gives. */
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t g, cudaGraphExecUpdateResultInfo *info) {
    api a("cudaGraphExecUpdate", 20e-6, cudaErrorGraphExecUpdateFailure);
    if (a.err) return a.err;
    if (!rt().execs.count(exec) || !graph_valid(g)) return set_error(cudaErrorInvalidValue);
    bool same = exec->nodes.size() == g->nodes.size() && exec->slots == g->slots;
    for (size_t i = 0; same && i < g->nodes.size(); i++)
        same = exec->nodes[i].slot == g->nodes[i].slot && exec->nodes[i].deps == g->nodes[i].deps &&
               exec->nodes[i].op->kind == g->nodes[i].op->kind;
    if (info) *info = {same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged, nullptr, nullptr};
    if (!same) return set_error(cudaErrorGraphExecUpdateFailure);
    exec->nodes = g->nodes;
    exec->joins = g->joins;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *, size_t *n) {
    api a("cudaGraphGetNodes", 0, cudaErrorUnknown);
    if (a.err) return a.err;
    if (!graph_valid(g)) return set_error(cudaErrorInvalidValue);
    *n = 0;
    for (node &k : g->nodes) *n += k.op->kind != OP_RECORD && k.op->kind != OP_WAIT;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    api a("cudaGraphDestroy", api_s(), cudaErrorUnknown);
    if (!graph_valid(g)) return set_error(cudaErrorInvalidValue);
    rt().graphs.erase(g);
    rt().stats.graphs--;
    delete g;
    return a.err;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    api a("cudaGraphExecDestroy", api_s(), cudaErrorUnknown);
    if (!rt().execs.count(exec)) return set_error(cudaErrorInvalidValue);
    for (cudaStream_t st : exec->aux) {
        if (st->last) {
            run_until(a.lock, st->last);
            vt_commit_until(a.lock, st->last);
        }
        stream_free(st);
    }
    rt().execs.erase(exec);
    rt().stats.graphs--;
    delete exec;
    return a.err;
}

/* Calls that a stream must not be given while it captures, and that spoil the capture. */
bool capture_refuses(cudaStream_t st) {
    if (!st->cap) return false;
    invalidate(st->cap);
    return true;
}

bool any_capture_refuses() {
    bool any = false;
    for (cudaStream_t st : rt().streams) any = capture_refuses(st) || any;
    return any;
}
