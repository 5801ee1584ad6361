/* fiber.cpp: see fiber.h. */
#include "fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { GUARD = 65536 }; /* more than a page: a large frame must not step over it */

fiber_stack fiber_stack_new(size_t bytes) {
    void *p = mmap(nullptr, bytes + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("EMU: stack of a fiber");
        abort();
    }
    mprotect(p, GUARD, PROT_NONE);
    return {static_cast<char *>(p) + GUARD, bytes};
}

void fiber_stack_free(fiber_stack s) { munmap(s.base - GUARD, s.bytes + GUARD); }

void fiber_stack_renew(fiber_stack s) {
    if (s.base && mmap(s.base, s.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        abort();
}

#ifdef EMU_UCONTEXT

void fiber_make(fiber_context *c, fiber_stack s, size_t stagger, void (*entry)()) {
    getcontext(&c->uc);
    c->uc.uc_stack.ss_sp = s.base;
    c->uc.uc_stack.ss_size = s.bytes - stagger;
    c->uc.uc_link = nullptr;
    makecontext(&c->uc, entry, 0);
}

#else

/* Saves the callee-saved registers on the old stack. The indirect jump at the end predicts, a ret would not. */
asm(R"(
.text
.globl emu_fiber_switch
.type emu_fiber_switch, @function
emu_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size emu_fiber_switch, .-emu_fiber_switch
)");

void fiber_make(fiber_context *c, fiber_stack s, size_t stagger, void (*entry)()) {
    uintptr_t top = ((uintptr_t)s.base + s.bytes - stagger) & ~(uintptr_t)15;
    void **sp = reinterpret_cast<void **>(top);
    *--sp = nullptr; /* where entry()'s return address would be: sp % 16 == 8 at its first instruction */
    *--sp = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    c->sp = sp;
}

#endif
