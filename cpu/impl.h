/* impl.h: what the files of cpu/ share. Nobody outside cpu/ and tests includes this. */
#ifndef LH_CPU_IMPL_H
#define LH_CPU_IMPL_H

#include "core/ops.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/pool.h"

/* cpu/kern_X.c is compiled once per instruction set; each build exports one constant table `kern_X_<isa>`, declared in
 * cpu/kern_X.h by KERN_TABLES(kern_X) and picked by KERN_PICK(kern_X, isa). */
#define LH_CAT2(a, b) a##_##b
#define LH_CAT(a, b) LH_CAT2(a, b)
#define KERN_SYM(name) LH_CAT(name, LH_ISA)
#if defined(__x86_64__)
#define KERN_TABLES(name)                                                                                              \
    extern const struct name name##_generic, name##_avx2, name##_avx512;                                               \
    static inline const struct name *name##_pick(enum isa isa) {                                                       \
        return isa == ISA_AVX512 ? &name##_avx512 : isa == ISA_AVX2 ? &name##_avx2 : &name##_generic;                  \
    }
#else
#define KERN_TABLES(name)                                                                                              \
    extern const struct name name##_generic;                                                                           \
    static inline const struct name *name##_pick(enum isa isa) { return (void)isa, &name##_generic; }
#endif

struct cpu {
    struct ops ops; /* first: a struct ops * given to an operation is the struct cpu * */
    struct cpu_opts opts;
    struct pool *pool;
    struct matmul_state *matmul; /* cpu/matmul.c */
    struct attn_state *attn;     /* cpu/attn.c */
    struct delta_state *delta;   /* cpu/delta.c; NULL for models without */
    const struct kern_elem *elem; /* cpu/elemwise.c */
};

/* Each family opens its scratch, says its size beforehand, and fills its entries of c->ops. */
size_t matmul_scratch_bytes(const struct cpu_opts *o);
int matmul_open(struct cpu *c);
void matmul_close(struct cpu *c);
size_t attn_scratch_bytes(const struct cpu_opts *o);
int attn_open(struct cpu *c);
void attn_close(struct cpu *c);
size_t delta_scratch_bytes(const struct cpu_opts *o);
int delta_open(struct cpu *c);
void delta_close(struct cpu *c);
size_t elem_scratch_bytes(const struct cpu_opts *o);
int elem_open(struct cpu *c);
void elem_close(struct cpu *c);

#endif
