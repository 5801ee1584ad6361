/* gpu_orders.h: what the GPU tests share when they run on the emulator (GPU_EMU): every case again in other orders of lanes,
 * blocks and streams, all with the same bits. On a device a case runs once. Include after tests/support.h.
 *
 * TEST_ORDERS (environment): few, the default, three orders that differ in everything; 0, 1 or 2: one of the three; all: each
 * stream policy with each lane order, and more seeds. */
#ifndef LH_TESTS_GPU_ORDERS_H
#define LH_TESTS_GPU_ORDERS_H

#include "core/err.h"

#if defined(GPU_EMU)
#include <emu.h>
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void ok(int rc) {
    if (rc) fail_msg("%d: %s", rc, err_text());
}

/* Results go in here. */
static uint64_t orders_sum;
static inline void add_digest(const void *p, size_t bytes) {
    const unsigned char *b = p;
    for (size_t i = 0; i < bytes; i++) orders_sum = (orders_sum ^ b[i]) * 0x100000001b3u;
}

#if defined(GPU_EMU)
struct gpu_order {
    enum emu_policy policy;
    int lanes; /* 0 forward, 1 reverse, 2 random */
    uint64_t seed;
};

/* The i-th order of the environment's choice; false past the last. */
static inline bool gpu_order_at(struct gpu_order *o, int i) {
    static const struct gpu_order few[] = {{EMU_EAGER, 0, 1}, {EMU_LAZY, 1, 1}, {EMU_RANDOM, 2, 7}};
    const char *how = getenv("TEST_ORDERS");
    if (how && !strcmp(how, "all")) {
        if (i < 15) *o = (struct gpu_order){(enum emu_policy)(i / 3), i % 3, (uint64_t)i + 1};
        else *o = (struct gpu_order){EMU_RANDOM, 2, (uint64_t)i * 7919};
        return i < 25;
    }
    if (how && *how >= '0' && *how <= '2' && !how[1]) {
        *o = few[*how - '0'];
        return i < 1;
    }
    if (how && *how && strcmp(how, "few")) fail_msg("TEST_ORDERS=%s: expected few, all, 0, 1 or 2", how);
    if (i < 3) *o = few[i];
    return i < 3;
}

/* A fresh device that works in this order. */
static inline void gpu_order_set(const struct gpu_order *o) {
    emu_reset(NULL);
    emu_set_policy(o->policy, o->seed);
    emu_set_order(o->lanes);
}
#endif

/* f in each order: the same digest, nothing left open. */
static inline void in_all_orders(void (*f)(void)) {
#if defined(GPU_EMU)
    struct gpu_order o;
    uint64_t first = 0;
    for (int i = 0; gpu_order_at(&o, i); i++) {
        gpu_order_set(&o);
        orders_sum = 0xcbf29ce484222325u;
        f();
        if (emu_leaks()) fail_msg("policy %d, lanes %d, seed %llu: something was left open", o.policy, o.lanes, (unsigned long long)o.seed);
        if (i == 0) first = orders_sum;
        if (orders_sum != first) fail_msg("other bits with policy %d, lanes %d, seed %llu", o.policy, o.lanes, (unsigned long long)o.seed);
    }
#else
    f();
#endif
}

/* f_in_all_orders: a test of cmocka. */
#define ORDERS(f)                                                                                                      \
    static void f##_in_all_orders(void **state) {                                                                      \
        (void)state;                                                                                                   \
        in_all_orders(f);                                                                                              \
    }

#endif
