/* topo.c: hwloc discovery flattened into struct topo. The only file that includes hwloc. See topo.h. */
#include "offload/topo.h"

#include "core/err.h"
#include "offload/allow.h"

#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CPUs that the calling thread may run on: what cpusets, taskset and containers leave. Empty when it cannot be read. */
static void read_affinity(hwloc_bitmap_t set) {
    hwloc_bitmap_zero(set);
    for (int n = 1024; n <= 1 << 20; n *= 4) { /* the kernel refuses masks smaller than its own */
        cpu_set_t *mask = CPU_ALLOC(n);
        size_t bytes = CPU_ALLOC_SIZE(n);
        if (!mask) return;
        bool ok = !sched_getaffinity(0, bytes, mask);
        for (int i = 0; ok && i < n; i++)
            if (CPU_ISSET_S(i, bytes, mask)) hwloc_bitmap_set(set, i);
        CPU_FREE(mask);
        if (ok) return;
    }
}

static int by_use(const void *pa, const void *pb) {
    const struct topo_cpu *a = pa, *b = pb;
    if (a->sibling != b->sibling) return a->sibling - b->sibling;
    if (a->efficiency != b->efficiency) return b->efficiency - a->efficiency;
    if (a->package != b->package) return a->package - b->package;
    if (a->core != b->core) return a->core - b->core;
    return a->id - b->id;
}

/* Only NUMA nodes, packages, cores, CPUs and two cache levels are asked for: the rest costs time at every start. Groups
 * that carry structure stay too: without its group a memory-only node is hung under the machine and seems local to all. */
static int load_hwloc(hwloc_topology_t *out) {
    hwloc_topology_t h;
    setenv("HWLOC_HIDE_ERRORS", "2", 0); /* it would print boxes on stderr about firmware faults that we live with */
    if (hwloc_topology_init(&h)) return -1;
    hwloc_topology_set_all_types_filter(h, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(h, HWLOC_OBJ_GROUP, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
    const hwloc_obj_type_t wanted[] = {HWLOC_OBJ_PACKAGE, HWLOC_OBJ_CORE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        hwloc_topology_set_type_filter(h, wanted[i], HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_load(h)) {
        hwloc_topology_destroy(h);
        return -1;
    }
    *out = h;
    return 0;
}

/* The node whose CPUs fit this one most closely: with memory of two kinds several nodes hold it. NULL: none. */
static hwloc_obj_t node_of(hwloc_topology_t h, unsigned cpu) {
    hwloc_obj_t best = NULL, node = NULL;
    int best_weight = 0;
    while ((node = hwloc_get_next_obj_by_type(h, HWLOC_OBJ_NUMANODE, node))) {
        if (!node->cpuset || !hwloc_bitmap_isset(node->cpuset, cpu)) continue;
        int weight = hwloc_bitmap_weight(node->cpuset);
        if (best && weight >= best_weight) continue;
        best = node;
        best_weight = weight;
    }
    return best;
}

static int efficiency_of(hwloc_topology_t h, hwloc_const_bitmap_t one_cpu) {
    int efficiency = 0, kind = hwloc_cpukinds_get_by_cpuset(h, one_cpu, 0);
    if (kind < 0 || hwloc_cpukinds_get_info(h, (unsigned)kind, NULL, &efficiency, NULL, NULL, 0)) return 0;
    return efficiency > 0 ? efficiency : 0;
}

static int index_of_ancestor(hwloc_topology_t h, hwloc_obj_type_t type, hwloc_obj_t pu) {
    hwloc_obj_t obj = hwloc_get_ancestor_obj_by_type(h, type, pu);
    return obj ? (int)obj->logical_index : -1;
}

static size_t cache_bytes(hwloc_topology_t h, hwloc_obj_type_t type, unsigned cpu) {
    hwloc_obj_t pu = hwloc_get_pu_obj_by_os_index(h, cpu);
    hwloc_obj_t cache = pu ? hwloc_get_ancestor_obj_by_type(h, type, pu) : NULL;
    return cache && cache->attr ? (size_t)cache->attr->cache.size : 0;
}

/* Numbers cores and siblings densely. On entry .core is hwloc's index, the same for neighbours of one core; negative: the
 * CPU belongs to no known core and becomes one. */
static void number_cores(struct topo *t) {
    int before = -1;
    for (int i = 0; i < t->n_cpu; i++) {
        struct topo_cpu *c = &t->cpus[i];
        bool same = i > 0 && c->core >= 0 && c->core == before;
        before = c->core;
        c->sibling = same ? c[-1].sibling + 1 : 0;
        c->core = same ? c[-1].core : t->n_core++;
    }
}

/* hwloc's view of the allowed CPUs, in logical order. Leaves n_cpu 0 when there is none. A CPU that a broken topology
 * lists twice counts where it is first. */
static void add_cpus(struct topo *t, hwloc_topology_t h, hwloc_const_bitmap_t allowed) {
    hwloc_obj_t pu = NULL;
    hwloc_bitmap_t one = hwloc_bitmap_alloc(), seen = hwloc_bitmap_alloc();
    int room = hwloc_get_nbobjs_by_type(h, HWLOC_OBJ_PU);
    t->cpus = room > 0 && one && seen ? calloc((size_t)room, sizeof *t->cpus) : NULL;
    while (t->cpus && t->n_cpu < room && (pu = hwloc_get_next_obj_by_type(h, HWLOC_OBJ_PU, pu))) {
        if (!hwloc_bitmap_isset(allowed, pu->os_index) || hwloc_bitmap_isset(seen, pu->os_index)) continue;
        hwloc_bitmap_set(seen, pu->os_index);
        hwloc_obj_t node = node_of(h, pu->os_index);
        int package = index_of_ancestor(h, HWLOC_OBJ_PACKAGE, pu);
        hwloc_bitmap_only(one, pu->os_index);
        t->cpus[t->n_cpu++] = (struct topo_cpu){
            .id = (int)pu->os_index,
            .core = index_of_ancestor(h, HWLOC_OBJ_CORE, pu),
            .package = package > 0 ? package : 0,
            .node = node ? (int)node->os_index : -1,
            .efficiency = efficiency_of(h, one),
        };
    }
    hwloc_bitmap_free(one);
    hwloc_bitmap_free(seen);
    number_cores(t);
}

static void add_nodes(struct topo *t, hwloc_topology_t h) {
    hwloc_obj_t node = NULL;
    int room = hwloc_get_nbobjs_by_type(h, HWLOC_OBJ_NUMANODE);
    t->nodes = room > 0 ? calloc((size_t)room, sizeof *t->nodes) : NULL;
    while (t->nodes && t->n_node < room && (node = hwloc_get_next_obj_by_type(h, HWLOC_OBJ_NUMANODE, node))) {
        struct topo_node *n = &t->nodes[t->n_node++];
        *n = (struct topo_node){(int)node->os_index, 0, (size_t)node->attr->numanode.local_memory};
        for (int i = 0; i < t->n_cpu; i++) n->n_cpu += t->cpus[i].node == n->id;
    }
}

static void discover(struct topo *t, hwloc_const_bitmap_t affinity) {
    hwloc_topology_t h;
    if (load_hwloc(&h)) {
        snprintf(t->note, sizeof t->note, "hwloc cannot read the machine's topology");
        return;
    }
    t->this_machine = hwloc_topology_is_thissystem(h);
    /* Another machine's description is not narrowed by what this process may use here. */
    bool narrow = t->this_machine && !hwloc_bitmap_iszero(affinity);
    add_cpus(t, h, narrow ? affinity : hwloc_topology_get_topology_cpuset(h));
    add_nodes(t, h);
    if (t->n_cpu) {
        qsort(t->cpus, (size_t)t->n_cpu, sizeof *t->cpus, by_use);
        t->l2_bytes = cache_bytes(h, HWLOC_OBJ_L2CACHE, (unsigned)t->cpus[0].id);
        t->l3_bytes = cache_bytes(h, HWLOC_OBJ_L3CACHE, (unsigned)t->cpus[0].id);
        t->n_package = hwloc_get_nbobjs_by_type(h, HWLOC_OBJ_PACKAGE);
    } else {
        snprintf(t->note, sizeof t->note, "the topology that hwloc reads holds no CPU that this process may use");
    }
    hwloc_topology_destroy(h);
}

/* Every allowed CPU a core of its own, one package, one node. */
static int make_flat(struct topo *t, hwloc_const_bitmap_t affinity) {
    int n = hwloc_bitmap_weight(affinity);
    bool blind = n < 1; /* no affinity either: count what is online and number it from 0 */
    if (blind) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (n < 1) n = 1;
    free(t->cpus);
    free(t->nodes);
    t->cpus = calloc((size_t)n, sizeof *t->cpus);
    t->nodes = calloc(1, sizeof *t->nodes);
    if (!t->cpus || !t->nodes) return err_set(ERR_NOMEM, "topology: out of memory");
    for (int i = 0, id = -1; i < n; i++) {
        id = blind ? i : hwloc_bitmap_next(affinity, id);
        t->cpus[i] = (struct topo_cpu){.id = id, .core = i};
    }
    t->n_cpu = t->n_core = n;
    t->n_node = 1;
    t->nodes[0] = (struct topo_node){0, n, t->host_total_bytes};
    t->this_machine = true;
    return 0;
}

static void add_limits(struct topo *t, const char *proc_root, const char *cgroup_root) {
    struct allowance a;
    allow_read(&a, proc_root, cgroup_root);
    t->host_total_bytes = a.total_bytes;
    t->host_available_bytes = a.available_bytes;
    t->cpu_quota = a.cpu_quota;
    memcpy(t->available_why, a.available_why, sizeof t->available_why);
    memcpy(t->cpu_model, a.cpu_model, sizeof t->cpu_model);
}

int topo_open_at(struct topo **out, const char *proc_root, const char *cgroup_root) {
    *out = NULL;
    struct topo *t = calloc(1, sizeof *t);
    hwloc_bitmap_t affinity = hwloc_bitmap_alloc();
    int rc = t && affinity ? 0 : err_set(ERR_NOMEM, "topology: out of memory");
    if (rc) goto out;
    add_limits(t, proc_root, cgroup_root);
    read_affinity(affinity);
    discover(t, affinity);
    if (!t->n_cpu) rc = make_flat(t, affinity);
    if (rc) goto out;
    if (t->n_package < 1) t->n_package = 1;
    *out = t;
    t = NULL;
out:
    hwloc_bitmap_free(affinity);
    topo_close(t);
    return rc;
}

int topo_open(struct topo **out) { return topo_open_at(out, "/proc", "/sys/fs/cgroup"); }

void topo_close(struct topo *t) {
    if (!t) return;
    free(t->cpus);
    free(t->nodes);
    free(t);
}

int topo_default_threads(const struct topo *t) {
    int n = 0;
    while (n < t->n_cpu && t->cpus[n].sibling == 0 && t->cpus[n].efficiency == t->cpus[0].efficiency) n++;
    double quota = t->cpu_quota;
    if (quota > 0 && quota < n) n = (int)quota + (quota > (int)quota);
    return n > 0 ? n : 1;
}

int topo_pick_cores(const struct topo *t, int n, int *cpus) {
    int i = 0;
    for (; i < n && i < t->n_cpu; i++) cpus[i] = t->cpus[i].id;
    return i;
}
