/* topo.h: the machine as the engine sees it: which CPUs it may use and how they are related, caches, NUMA nodes, memory
 * that can be had. The only file that knows hwloc is topo.c.
 * Open once, before other threads start (hwloc reads and topo_open may set environment variables); afterwards the object
 * is constant and may be read by any thread. Functions return 0 or a negative enum err. */
#ifndef LH_OFFLOAD_TOPO_H
#define LH_OFFLOAD_TOPO_H

#include <stdbool.h>
#include <stddef.h>

/* One hardware thread that this process may run on. */
struct topo_cpu {
    int id;         /* the operating system's number: what binding takes */
    int core;       /* 0..n_core-1, in the order of the machine */
    int sibling;    /* 0: first allowed hardware thread of its core, 1: second, ... */
    int package;    /* 0.. */
    int node;       /* NUMA node (operating system's number); -1: belongs to none */
    int efficiency; /* rank of the core's kind: higher is faster; 0 everywhere when all are alike or nothing is known */
};

struct topo_node {
    int id;       /* the operating system's number */
    int n_cpu;    /* of topo.cpus; 0: memory only, or its CPUs are not allowed */
    size_t bytes; /* as sysfs says, which can be far below the truth on virtual machines: never a budget */
};

struct topo {
    struct topo_cpu *cpus; /* [n_cpu] in the order to use them: one per core first, fast kinds before slow ones, second
                            * hardware threads last; within that by package and core, so that a few workers share one */
    int n_cpu;             /* >= 1 */
    int n_core;            /* physical cores with at least one allowed CPU */
    int n_package;
    struct topo_node *nodes; /* [n_node] */
    int n_node;
    size_t l2_bytes, l3_bytes; /* of the caches that cpus[0] uses; 0: unknown */
    bool this_machine;         /* false: described by HWLOC_XMLFILE or the like. Counts are right, binding makes no sense */
    size_t host_total_bytes, host_available_bytes; /* as in allow.h: the memory budget */
    char available_why[320];   /* what set host_available_bytes */
    double cpu_quota;          /* CPUs' worth of time; 0: unlimited */
    char cpu_model[128];
    char note[200];            /* what could not be found out ("" if nothing): worth a line under -v */
};

/* Reads the machine (or what HWLOC_XMLFILE, HWLOC_SYNTHETIC describe). When hwloc fails or gives no usable CPU, the
 * layout is flat: every allowed CPU a core of one package and node. ERR_NOMEM only. Takes about 5 ms. */
int topo_open(struct topo **out);

/* The same with other roots of /proc and /sys/fs/cgroup for allow_read: tests. */
int topo_open_at(struct topo **out, const char *proc_root, const char *cgroup_root);

void topo_close(struct topo *t);

/* Number of worker threads when the user gave none: allowed cores of the fastest kind, not above the CPU quota (rounded
 * up), at least 1. Second hardware threads never count: the kernels are bound by memory or by the vector units, which
 * siblings share. */
int topo_default_threads(const struct topo *t);

/* CPU numbers to bind n workers to, in order, into cpus[n]. Returns how many were written: min(n, n_cpu). */
int topo_pick_cores(const struct topo *t, int n, int *cpus);

#endif
