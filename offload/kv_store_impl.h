/* kv_store_impl.h: inside of a KV store, for kv_store.c (memory and phases), kv_pass.c (kv_put and attention) and kv_stage.c
 * (streamed pages). */
#ifndef LH_OFFLOAD_KV_STORE_IMPL_H
#define LH_OFFLOAD_KV_STORE_IMPL_H

#include "gpu/gpu.h"
#include "offload/kv_store.h"

enum { KV_STORE_PIN_BYTES = 64 << 20, KV_STORE_AHEAD = 8 };

/* Where the KV of a layer is. Page numbers are those of the sequence: position / KV_PAGE. */
struct store_layer {
    int64_t host_pages;         /* front of the host range that the plan counts */
    size_t pinned;              /* bytes of it, page-locked in pieces of KV_STORE_PIN_BYTES */
    bool keep;                  /* its ring is the same in both phases */
    unsigned char *d_kept;

    /* In this phase. */
    bool mine;                  /* attention is on the GPU */
    bool landing;
    unsigned char *d_ring;
    int64_t n_ring;             /* pages */
    int64_t outside, streamed;  /* of the plan: pages outside VRAM, of them streamed */

    /* What is there. */
    int64_t end;                /* positions 0 .. end are stored */
    int64_t first;              /* the ring has pages first .. up to end; none if first is behind it */
    int64_t host_end;           /* positions before it are in host memory, or on their way */
    int64_t synced;             /* of them, those whose arrival the host has waited for */
    bool rewritten;             /* pages that had been copied to host memory will be again */
    struct gpu_event *spilled;  /* behind the last copy to host memory */
};

/* Streamed pages come in batches: pages k * cap .. of a layer, cap being what a slot holds. */
struct stage_slot {
    unsigned char *d;
    int il;                     /* -1: nothing */
    int64_t a, b;               /* pages in it, or on their way: at p % cap */
    bool cut;                   /* b was taken back while something may still read what was behind it */
    int wanted;                 /* batches of the queue that it is bound to */
    struct gpu_event *ready, *free;
};

/* One batch of a pass that will be asked for: batch k of chunk `chunk` in layer il. */
struct stage_place {
    int64_t pos0;               /* of the pass */
    int n;
    int il, chunk;
    int64_t k;
};

struct kv_store {
    struct kv_store_opts o;
    int phase;                  /* enum plan_phase_id, -1 */
    const struct plan_phase *ph;
    struct kv host, device;
    struct store_layer *layers; /* [host.n_layer] */
    struct gpu_ops *ops;
    struct gpu_stream *in, *out;
    struct gpu_event *point;    /* recorded and waited for at once: a point of a stream for another */
    struct gpu_event *landed;   /* behind the last copy out of the landing place */
    unsigned char *d_landing;
    int64_t landing_pages;
    size_t landing_page_bytes;

    /* Hand-over. */
    struct gpu_flags *flags;    /* ? */
    struct gpu_event *asked;
    uint32_t turn;
    float *ask, *d_ask, *answer, *d_answer; /* mapped: [PLAN_DECODE_TOKENS.., n_head, head_dim], and + 2 */

    /* Staging. */
    struct stage_slot *slots;
    int open_slots, n_slot, turn_slot; /* slots with events; those of this phase; the next to be used */
    size_t slot_bytes;
    struct stage_want {
        int il, slot;
        int64_t a;              /* first page of the batch */
    } queue[KV_STORE_AHEAD];
    int n_queue;
    struct stage_place now, tail; /* the batch asked for last; the last one in the queue */
    struct kv_store_stats stats;
};

static inline int64_t pages_of(int64_t positions) { return (positions + KV_PAGE - 1) / KV_PAGE; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Pages of layer il that lie outside VRAM when a call stores positions pos0 .. pos0 + n. */
int64_t store_first(const struct store_layer *l, int64_t pos0, int n);
/* Of pages lo .. first outside VRAM the first ones, up to the result, are streamed. few: the CPU may attend the others. */
int64_t store_streamed(const struct kv_store *s, int il, int64_t lo, int64_t first, bool few);

/* kv_store.c */
enum store_way { STORE_IN, STORE_OUT };
/* Copies pages a .. b between host memory and a place of n_slot pages, on the stream of the direction. */
int store_copy(struct kv_store *s, enum store_way way, int il, unsigned char *d_base, int64_t n_slot, int64_t a, int64_t b);
/* The stream waits for what `of` has been given so far. */
int store_behind(struct kv_store *s, struct gpu_stream *waits, struct gpu_stream *of);
/* Pages `want` .. up to those that are stored should be in the ring: brings in those that are not. */
int store_bring_back(struct kv_store *s, int il, int64_t want);

/* kv_pass.c */
int store_put(void *arg, struct kv *kv, int il, int64_t pos0, int n_tok, const float *k, const float *v);
int store_attn(void *arg, const struct attn_args *a);
/* Positions from pos0 on are no longer there. */
void store_cut(struct kv_store *s, int il, int64_t pos0);

/* kv_stage.c */
/* Waits (on the device) until pages a .. b, of one batch, are in a slot. The caller enqueues what reads them, then stage_done. */
int stage_get(struct kv_store *s, const struct stage_place *at, int64_t a, int64_t b, struct gpu_pages *out, int *slot);
int stage_done(struct kv_store *s, int slot);
int64_t stage_cap(const struct kv_store *s, int il);
int stage_ahead(struct kv_store *s);
void stage_reset(struct kv_store *s);
void stage_cut(struct kv_store *s, int il, int64_t page);

#endif
