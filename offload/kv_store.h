/* kv_store.h: the KV of a session over three places, as a plan says: the newest pages of a layer in VRAM, older ones in host
 * memory, of which some are attended by the CPU where they lie and the oldest are streamed into VRAM for every pass. It takes
 * the place of kv_put and attn of the GPU's table (gpu_ops_hook); the decoder does not notice.
 *
 * How a session uses it (everything on its one driver thread):
 *   open     kv_store_open: host memory of all layers, page-locked where it can be; VRAM that both phases have
 *   phase    kv_store_enter: VRAM of the phase; from then on the operations of `ops` are the store's. kv_store_leave before the
 *            operations are closed and the arena is released: what is in VRAM only goes to host memory
 *   pass     kv_store_begin(pos0, n), then the decoder's parts with kv_store_device as their KV. The CPU's decoder works with
 *            kv_store_host, whose `n` the session advances and truncates (kv_advance, kv_truncate): the store sees from kv_put
 *            how far back a pass begins, and brings back what VRAM no longer has
 *   end      kv_store_leave, kv_store_close
 *
 * VRAM: each layer whose mixer is on the GPU has a ring of its pages; new ones are written there and copied to host memory as
 * soon as they are full, oldest first, on a stream of their own, so that a page is there by the time its slot is taken. A
 * layer with fewer VRAM pages than one call of a part can touch has no ring: its pages are written to a landing place that all
 * such layers share, and are copied to host memory at once; in decode that costs the copy of a page in and out for each token,
 * so plans should give such a layer kv_store_ring_pages or more. Streamed pages go through the plan's staging slots, copied
 * ahead across layers and passes.
 * Attention of up to 32 tokens: VRAM pages, then streamed ones as they arrive, on the GPU; those between on the CPU at the same
 * time; merged on the GPU in this order. The CPU gets q and returns its result through mapped memory; flags tell each other
 * when (gpu_flag_*), or events where the driver has no stream memory operations. More tokens: all pages outside VRAM are streamed.
 * The same plan and positions give the same bits.
 *
 * Window layers are in one place: a ring in VRAM, or in host memory (attended by the CPU, or streamed).
 * Functions return 0 or a negative enum err. After ERR_DEVICE of a pass the pass may be repeated, unless the device is lost. */
#ifndef LH_OFFLOAD_KV_STORE_H
#define LH_OFFLOAD_KV_STORE_H

#include "core/kv.h"
#include "offload/plan.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cpu;
struct gpu;
struct gpu_arena;
struct gpu_ops;
struct gpu_stream;
struct kv_store;

enum kv_store_handover { KV_STORE_BEST, KV_STORE_EVENTS }; /* BEST: flags where there are some */

struct kv_store_opts {
    const struct kv_spec *spec;       /* as the plan was made with; not kept */
    const struct plan_phase *phases;  /* [PLAN_PHASES] borrowed */
    int n_head, head_dim;             /* largest of all layers: what is handed over */
    struct gpu *gpu;                  /* these are borrowed */
    struct gpu_arena *arena;
    struct gpu_stream *compute;       /* of the operations */
    struct cpu *cpu;                  /* opened for calls of PLAN_DECODE_TOKENS or fewer, or more */
    enum kv_store_handover handover;
};

/* Pages of a ring below which a layer goes through the landing place, which has as many; and whether a layer of n_slot pages
 * does so. Its host memory then has all of its pages. The planner's tables count with these. */
int64_t kv_store_ring_pages(const struct plan_phase *phase);
bool kv_store_lands(int64_t n_slot, const struct plan_layer *p, const struct plan_phase *phase);

/* VRAM that a phase takes for KV and staging, rounded as the arena does it: rings, landing place, slots; layers as kv_plan gives
 * them. SIZE_MAX: overflow. */
size_t kv_store_vram_bytes(const struct kv_layer *layers, int n_layer, const struct plan_phase *phase);

/* ERR_NOMEM, ERR_BUDGET (the arena is full), ERR_ARG (a plan that cannot be kept): nothing is left behind. Memory that cannot be
 * page-locked is used all the same, copied slower: kv_store_stats. */
int kv_store_open(struct kv_store **out, const struct kv_store_opts *o);
void kv_store_close(struct kv_store *s); /* NULL is fine */

/* Records of the KV. host: base is that of a layer's pages in host memory, page 0 first, where they are allocated on first
 * touch. device: for the GPU's decoder, without addresses. Owned by the store. */
struct kv *kv_store_host(struct kv_store *s);
struct kv *kv_store_device(struct kv_store *s);

/* The phase that calls run in from now on. Carves its VRAM and brings in what lies there; waits for the device. */
int kv_store_enter(struct kv_store *s, enum plan_phase_id phase, struct gpu_ops *ops);
/* Copies to host memory what only VRAM has and would not keep (host memory beyond the plan's until the next enter), waits for the
 * device, gives the operations back their own. Fine when nothing was entered. ERR_DEVICE: positions in VRAM are lost; the store
 * can only be closed. */
int kv_store_leave(struct kv_store *s);

/* A pass of n tokens at pos0 begins: starts copies for its first layers. Optional but for speed. */
int kv_store_begin(struct kv_store *s, int64_t pos0, int n);

/* kv_fill_synthetic for the store, between enter and the first pass: host memory of a layer more than the plan's, at most. */
int kv_store_fill_synthetic(struct kv_store *s, int64_t n, uint64_t seed);

struct kv_store_stats {
    double in_bytes, out_bytes;  /* copied to VRAM (streamed and brought back), to host memory */
    double cpu_bytes;            /* attended by the CPU */
    size_t pageable_bytes;       /* host memory of the plan that could not be page-locked */
    long misses;                 /* streamed batches that were not copied ahead */
    bool flags;                  /* hand-over by flags */
};
void kv_store_stats_get(const struct kv_store *s, struct kv_store_stats *out);

#endif
