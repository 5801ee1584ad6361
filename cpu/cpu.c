/* cpu.c: opens the CPU back end: pool, then each family of operations with its scratch. */
#include "cpu/cpu.h"

#include "core/err.h"
#include "cpu/impl.h"

#include <stdlib.h>

size_t cpu_scratch_bytes(const struct cpu_opts *opts) {
    return matmul_scratch_bytes(opts) + attn_scratch_bytes(opts) + delta_scratch_bytes(opts) + elem_scratch_bytes(opts);
}

int cpu_open(struct cpu **out, const struct cpu_opts *opts) {
    if (opts->n_thread < 1 || opts->n_thread > 1024)
        return err_set(ERR_ARG, "threads: %d is outside 1..1024", opts->n_thread);
    if (!isa_usable(opts->isa)) return err_set(ERR_ARG, "kernels '%s' cannot run on this CPU", isa_name(opts->isa));
    struct cpu *c = calloc(1, sizeof *c);
    if (!c) return err_set(ERR_NOMEM, "cpu: out of memory");
    c->ops.name = "cpu";
    c->opts = *opts;
    int rc = pool_open(&c->pool, opts->n_thread, opts->cores, opts->n_core);
    if (!rc) rc = matmul_open(c);
    if (!rc) rc = attn_open(c);
    if (!rc) rc = elem_open(c);
    if (!rc) rc = delta_open(c);
    c->opts.cores = NULL; /* the caller's array */
    if (rc) {
        cpu_close(c);
        return rc;
    }
    *out = c;
    return 0;
}

void cpu_close(struct cpu *c) {
    if (!c) return;
    delta_close(c);
    elem_close(c);
    attn_close(c);
    matmul_close(c);
    pool_close(c->pool);
    free(c);
}

struct ops *cpu_ops(struct cpu *c) { return &c->ops; }

struct pool *cpu_pool(struct cpu *c) { return c->pool; }
