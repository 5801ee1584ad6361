/* allow.h: what the kernel lets this process use: memory and CPU time. Reads /proc and control groups (v1 and v2), every
 * level from the process's own group up to the root, because any ancestor's limit kills as surely as its own.
 * No hwloc here: sysfs node sizes can be far below the machine's memory on virtual machines. Thread-safe. */
#ifndef LH_OFFLOAD_ALLOW_H
#define LH_OFFLOAD_ALLOW_H

#include <stddef.h>

struct allowance {
    size_t total_bytes;      /* memory of the machine */
    size_t available_bytes;  /* min(MemAvailable, limit - usage of every group); the file cache inside a group counts as
                              * available, as it does in MemAvailable: the kernel gives it back */
    char available_why[320]; /* what set available_bytes: "MemAvailable", or the group's file and its limit */
    double cpu_quota;        /* CPUs' worth of time, e.g. 1.5; 0: unlimited */
    char cpu_model[128];     /* "model name" of the first CPU, or "unknown CPU" */
};

/* Roots are "/proc" and "/sys/fs/cgroup", or trees of the same form in tests. Never fails: what cannot be read does not
 * limit, and without /proc the memory comes from sysconf. */
void allow_read(struct allowance *out, const char *proc_root, const char *cgroup_root);

#endif
