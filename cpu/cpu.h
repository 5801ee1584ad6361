/* cpu.h: the CPU back end. */
#ifndef LH_CPU_CPU_H
#define LH_CPU_CPU_H

#include "core/ops.h"
#include "cpu/isa.h"

struct cpu;

struct cpu_opts {
    int n_thread;             /* >= 1, the caller included */
    const int *cores;         /* ?[n_core], see pool.h */
    int n_core;
    enum isa isa;             /* from isa_choose */
    struct ops_limits limits; /* scratch is sized for these at open; nothing is allocated afterwards */
};

int cpu_open(struct cpu **out, const struct cpu_opts *opts);
void cpu_close(struct cpu *c);

/* Bytes of scratch that cpu_open will allocate for these limits and threads: what the planner prints. */
size_t cpu_scratch_bytes(const struct cpu_opts *opts);

struct ops *cpu_ops(struct cpu *c); /* owned by c */
struct pool *cpu_pool(struct cpu *c);

/* The table's attn over pages first .. end alone (those that the queries see), as what merges with other pages' results:
 * part [n_tok, n_head, head_dim_v + 2] = o not divided by l and not rotated back, m of scores in units of log2, l. Where no
 * page is seen: 0, -infinity, 0. a->o is not used. The layer's base may lack pages that are not attended to. */
int cpu_attn_pages(struct cpu *c, const struct attn_args *a, int64_t first, int64_t end, float *part);

#endif
