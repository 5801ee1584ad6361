/* fiber.h: stacks and context switches for the threads of a block. x86-64 has its own switch (six registers and the stack
 * pointer; about 3 ns), others use ucontext. Never built with sanitizers: it tells them what it does. */
#ifndef EMU_FIBER_H
#define EMU_FIBER_H

#include <stddef.h>

#include <vector>

#if !defined(__x86_64__)
#define EMU_UCONTEXT 1
#endif

#ifdef EMU_UCONTEXT
#include <ucontext.h>
struct fiber_context { ucontext_t uc; };
#else
struct fiber_context { void *sp; };
#endif

struct fiber_stack {
    char *base;   /* lowest usable byte; a guard page below */
    size_t bytes;
};

fiber_stack fiber_stack_new(size_t bytes);
void fiber_stack_free(fiber_stack s);
/* Maps the stack anew, so that the thread sanitizer forgets who used it. Nothing for a stack without memory. */
void fiber_stack_renew(fiber_stack s);

/* A context that will run entry() (which never returns) on the stack, its top lowered by `stagger` bytes (a multiple of
 * 16: equal tops would put the hot lines of all stacks into the same cache set). */
void fiber_make(fiber_context *c, fiber_stack s, size_t stagger, void (*entry)());

#ifdef EMU_UCONTEXT
static inline void fiber_switch(fiber_context *from, fiber_context *to) { swapcontext(&from->uc, &to->uc); }
#else
extern "C" void emu_fiber_switch(void **save_sp, void *to_sp);
static inline void fiber_switch(fiber_context *from, fiber_context *to) { emu_fiber_switch(&from->sp, to->sp); }
#endif

/* Interfaces of the sanitizers, absent (null) in a plain build. */
extern "C" {
#define EMU_WEAK __attribute__((weak))
void *__tsan_get_current_fiber(void) EMU_WEAK;
void *__tsan_create_fiber(unsigned flags) EMU_WEAK;
void __tsan_destroy_fiber(void *fiber) EMU_WEAK;
void __tsan_switch_to_fiber(void *fiber, unsigned flags) EMU_WEAK;
void __tsan_acquire(void *addr) EMU_WEAK;
void __tsan_release(void *addr) EMU_WEAK;
void __tsan_read_range(void *addr, unsigned long size) EMU_WEAK;
void __tsan_write_range(void *addr, unsigned long size) EMU_WEAK;
void __asan_poison_memory_region(void const volatile *addr, size_t size) EMU_WEAK;
void __asan_unpoison_memory_region(void const volatile *addr, size_t size) EMU_WEAK;
void __sanitizer_start_switch_fiber(void **fake_stack_save, const void *bottom, size_t size) EMU_WEAK;
void __sanitizer_finish_switch_fiber(void *fake_stack_save, const void **bottom_old, size_t *size_old) EMU_WEAK;
}
static inline bool tsan_on() { return __tsan_create_fiber != nullptr; }
static inline bool asan_on() { return __asan_poison_memory_region != nullptr; }
static inline void tsan_acquire(void *p) { if (__tsan_acquire) __tsan_acquire(p); }
static inline void tsan_release(void *p) { if (__tsan_release) __tsan_release(p); }
static inline void tsan_read(const void *p, size_t n) { if (__tsan_read_range && n) __tsan_read_range((void *)p, n); }
static inline void tsan_write(void *p, size_t n) { if (__tsan_write_range && n) __tsan_write_range(p, n); }

/* Copy and fill that the sanitizers do not see: storage of the emulated device and of blocks is no memory of the host's
 * threads; what the program did with it is told by tsan_read and tsan_write. */
static inline void raw_copy(void *dst, const void *src, size_t n) {
#if defined(__x86_64__)
    asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(n)::"memory");
#else
    for (size_t i = 0; i < n; i++) static_cast<volatile char *>(dst)[i] = static_cast<const volatile char *>(src)[i];
#endif
}
static inline void raw_fill(void *dst, int value, size_t n) {
#if defined(__x86_64__)
    asm volatile("rep stosb" : "+D"(dst), "+c"(n) : "a"(value) : "memory");
#else
    for (size_t i = 0; i < n; i++) static_cast<volatile char *>(dst)[i] = (char)value;
#endif
}

static inline std::vector<char> raw_bytes(const char *src, size_t n) {
    std::vector<char> v(n);
    raw_copy(v.data(), src, n);
    return v;
}

#endif
