/* plan.h: where everything goes and how many bytes it takes. Placement is data: plan_make is a pure function, the loader
 * and the session allocate exactly what it says, the pass loop decides nothing, and `longhaul plan` prints it.
 *
 * Three places (enum plan_place): in VRAM; in host memory and worked on by the CPU where it lies; in host memory and
 * streamed into VRAM for every pass. Two phases share one VRAM arena: prefill (long passes; the CPU computes nothing) and
 * decode (a token, or a few, per pass). What goes where:
 *   mixer (attention or Gated DeltaNet)  a unit, whole. Its recurrent state is where it is computed
 *   dense FFN                            split by its inner rows (rows of gate and up, columns of down): VRAM, CPU,
 *                                        streamed, in this order; each part but the first a multiple of PLAN_ROWS. A part
 *                                        gives a summand of the output. Norms and biases are with the first part
 *   experts                              by number: the first in VRAM, then those of the CPU, then streamed ones
 *   KV                                   by page: the newest in VRAM, the oldest streamed, the CPU attends those between.
 *                                        Layers with a sliding window have theirs in one place
 *   token embedding                      in host memory (rows are looked up there) unless it is the output matrix as well
 *   output matrix                        a unit, whole
 * In prefill a part is resident where it is in decode, or streamed as a whole: then host memory has it too. Streamed
 * weights go through a ring of equal slots, in the order of the pass; streamed KV through slots that hold one layer's.
 *
 * Time of one decoded token, with Bv VRAM, Bp link, Bd DRAM bandwidth and windows that follow each other:
 *   T0 = sum over parts of their GPU time, or CPU time; where both work on a layer the longer of the two, and a hand-over
 *   T  = max(T0 + d, X / Bp): X bytes streamed. Of these, X - Bp * (T0 - W) are copied in the windows W of the CPU, which
 *        then gets Bd - Bp instead of all that it can read; d is how much longer it takes, less what it waits for the GPU
 * What is made small is the time at the asked depth plus a share (low_share) of that at 1 / PLAN_LOW of it: KV outside VRAM
 * costs nothing before the context is full, weights always do. A pass of prefill takes the longer of its arithmetic and its copies (their sum where there is a single slot, refilled after its use).
 * All of it is linear in the bytes of each place, so a small linear program finds the optimum of the average layer; whole
 * pages, rows and layers are then improved step by step with the sums over the real layers.
 *
 * Not in the model: copies are as fast as the link can even where slower ones would leave the CPU more of DRAM; which experts are chosen (each is equally likely, GPU and CPU wait for the average of each other);
 * experts are not streamed in decode; disk speed (load_s is from the page cache); blocks for multi-token prediction count
 * like other layers; several tokens per decode pass use the factors of plan_time.c; clocks that drop. */
#ifndef LH_OFFLOAD_PLAN_H
#define LH_OFFLOAD_PLAN_H

#include "core/model.h"
#include "cpu/isa.h"
#include "offload/machine.h"

#include <stddef.h>
#include <stdint.h>

enum plan_place { PLAN_VRAM, PLAN_CPU, PLAN_STREAM, PLAN_PLACES };
enum plan_phase_id { PLAN_PREFILL, PLAN_DECODE, PLAN_PHASES };
enum { PLAN_ROWS = 512, PLAN_DECODE_TOKENS = 16, PLAN_RING_SLOTS = 3, PLAN_STAGE_SLOTS = 3, PLAN_WHY = 5 };

/* A pin of -ot: units whose tensors' names match the pattern (POSIX extended) go where it says. */
struct plan_rule {
    const char *pattern;
    enum plan_place place; /* PLAN_VRAM or PLAN_CPU */
};

/* Pins: what the user has decided. Their values are the fields of struct plan_request beside the bit. */
enum plan_pin {
    PLAN_PIN_LAYERS = 1,    /* n_gpu_layers */
    PLAN_PIN_MOE = 2,       /* n_cpu_moe */
    PLAN_PIN_KV_HOST = 4,   /* all KV in host memory */
    PLAN_PIN_KV_TOKENS = 8, /* kv_vram_tokens */
    PLAN_PIN_KV_SHARE = 16, /* kv_cpu_share */
    PLAN_NO_STREAM = 32,    /* decode without streaming, without the CPU, without FFNs in two places: what they are worth */
    PLAN_NO_CPU = 64,
    PLAN_NO_SPLIT = 128,
};

/* What is asked for. Zero means: choose. */
struct plan_request {
    int64_t n_ctx;        /* positions; > 0 */
    int type_k, type_v;   /* enum quant_type of the KV */
    int chunk_tokens;     /* most tokens of one pass; with a GPU: of one call of a part in prefill */
    int logits_rows;      /* rows of logits kept at a time, >= 1 */
    int n_thread;
    enum isa isa;
    size_t host_limit;    /* bytes that may be used in all; SIZE_MAX: unlimited */

    const struct machine *machine; /* ?rates; NULL, or one without a GPU: everything is on the CPU */
    size_t vram_limit;    /* bytes of the arena, headroom 0; a caller whose allocation failed plans again with less */
    size_t headroom;      /* VRAM that stays free beside the arena when vram_limit is 0 */
    int pass_tokens;      /* most tokens of a pass of prefill */
    int64_t depth;        /* tokens in the context that decode is planned for (n_ctx) */
    int64_t prompt;       /* tokens that prefill is planned for (n_ctx) */
    int decode_tokens;    /* per decode pass (1) */
    double low_share;     /* see above (0.2); negative: only the asked depth counts, but for ties */
    unsigned pins;        /* enum plan_pin */
    int64_t n_gpu_layers; /* the last so many layers in VRAM, the others on the CPU; more than there are: the output too */
    int64_t n_cpu_moe;    /* experts of the first so many layers on the CPU */
    int64_t kv_vram_tokens;
    double kv_cpu_share;  /* of the KV outside VRAM that the CPU attends; the rest is streamed */
    const struct plan_rule *rules; /* [n_rule]; the first that matches decides */
    int n_rule;
};

/* One layer in one phase. */
struct plan_layer {
    uint8_t mixer;              /* enum plan_place */
    uint8_t ffn;                /* the rest of UNIT_FFN: norms, router, shared expert; with a dense FFN its first part's place */
    uint8_t state;              /* Gated DeltaNet: PLAN_VRAM or PLAN_CPU */
    int16_t experts[PLAN_PLACES];
    int32_t ff_rows[PLAN_PLACES];
    int32_t kv_pages[PLAN_PLACES]; /* of n_ctx positions; plan_kv_pages for fewer */
};

/* Bytes of one memory in one phase. Parts of VRAM begin at multiples of GPU_ALIGN, which is counted. */
struct plan_table {
    size_t weights, kv, state, saved, scratch, hidden, ring, stage, runtime, headroom;
    size_t sum;           /* of all that */
    size_t limit;         /* sum <= limit */
};

enum plan_bound { PLAN_BY_VRAM, PLAN_BY_DRAM, PLAN_BY_LINK, PLAN_BY_CPU, PLAN_BY_GPU, PLAN_BY_LAUNCH };

/* Predicted time of one pass. Busy times overlap. */
struct plan_step {
    double s;             /* the step */
    double gpu_s, cpu_s, link_s, fixed_s; /* busy; fixed: launches, hand-overs, logits */
    double cpu_bytes, link_bytes, vram_bytes;
    enum plan_bound bound;
};

struct plan_phase {
    struct plan_layer layers[MODEL_MAX_LAYER]; /* [n_block] */
    uint8_t embed, head;  /* enum plan_place */
    int chunk_tokens;     /* most tokens of one call of a part */
    int pass_tokens;      /* of a pass; weights cross the link once per pass */
    int ring_slots, stage_slots; /* 0: nothing is streamed */
    size_t ring_slot_bytes, stage_slot_bytes;
    int ring_wanted, stage_wanted; /* slots if anything is streamed */
    bool stage_whole;     /* prefill: a slot holds all streamed KV of a layer, which crosses once per pass, not per chunk */
    int n_thread;         /* of the CPU pool */
    struct plan_table vram, host;
};

struct plan {
    int64_t n_ctx;
    int type_k, type_v;
    int chunk_tokens, logits_rows, n_thread;
    enum isa isa;
    bool gpu;             /* false: all on the CPU, in host memory; the phases are empty */
    /* Host bytes, exact: what is allocated. With a GPU the bytes of both memories, but for scratch_bytes, load_bytes,
     * runtime_bytes and host_bytes, which are the host's. */
    size_t weights_bytes;
    size_t kv_bytes;      /* for n_ctx positions of every layer */
    size_t state_bytes;   /* recurrent state of Gated DeltaNet layers, 0: none */
    size_t saved_bytes;   /* its copy, to go back to */
    size_t scratch_bytes; /* activations, logits, back end scratch */
    size_t load_bytes;    /* read buffers, only while loading */
    size_t runtime_bytes; /* program, tokenizer, thread stacks: an allowance */
    size_t host_bytes;    /* most that is in use at once: the sum, read buffers counted instead of KV and scratch if larger */
    size_t host_limit;
    /* Of one decoded token, from a dry run on the cost table. */
    double weight_bytes_per_tok;
    double kv_bytes_per_position; /* read for each position in the context (windows not counted in) */
    double state_bytes_per_tok;   /* recurrent state read; as much is written */

    /* With a machine. */
    bool predicted;
    int64_t depth, prompt;
    int decode_tokens;
    struct plan_step decode;      /* at `depth` */
    double prefill_s, load_s, rehome_s; /* of `prompt` tokens; from the page cache; between the phases */
    enum plan_bound prefill_bound;
    size_t rehome_bytes;
    size_t pinned_bytes;          /* host memory that copies need page-locked */
    size_t pageable_bytes;        /* of it beyond what may be locked: goes through a pinned ring at the pageable rate */
    struct plan_phase phase[PLAN_PHASES]; /* empty without a GPU */
    char why[PLAN_WHY][280];      /* what decided; "" where there are no more */
};

/* ERR_BUDGET: does not fit; *out is filled and the sentence has need, limit, shortfall and what would fit.
 * ERR_ARG: an impossible request, or pins that cannot be kept. ERR_UNSUPPORTED: a KV type that this model's heads cannot
 * have. */
int plan_make(struct plan *out, const struct model *m, const struct plan_request *r);

/* The share that a request asks for. */
static inline double plan_low_share(const struct plan_request *r) { return r->low_share < 0 ? 1e-4 : r->low_share > 0 ? r->low_share : 0.2; }

/* Largest n_ctx (a multiple of 256, or n_ctx_most itself) that fits, at most n_ctx_most; 0: none does. */
int64_t plan_max_ctx(const struct model *m, const struct plan_request *r, int64_t n_ctx_most);

/* Decode of a plan at another depth: where the KV lies then is that of plan_kv_pages. The plan was made with these. */
int plan_predict(struct plan_step *out, const struct plan *p, const struct model *m, const struct plan_request *r, int64_t depth);

enum { PLAN_LOW = 8 };

/* Pages of a layer by place when n_pos positions are filled: the newest in VRAM as long as there is room, of the others
 * the same share streamed as at n_ctx. */
static inline void plan_kv_pages(int64_t pages[PLAN_PLACES], const struct plan_layer *l, int64_t n_pos) {
    int64_t all = (n_pos + 255) / 256, held = (int64_t)l->kv_pages[0] + l->kv_pages[1] + l->kv_pages[2];
    if (all > held) all = held; /* a ring */
    int64_t outside = all > l->kv_pages[PLAN_VRAM] ? all - l->kv_pages[PLAN_VRAM] : 0, room = held - l->kv_pages[PLAN_VRAM];
    pages[PLAN_VRAM] = all - outside;
    pages[PLAN_STREAM] = room ? (outside * l->kv_pages[PLAN_STREAM] + room / 2) / room : 0;
    pages[PLAN_CPU] = outside - pages[PLAN_STREAM];
}

/* Bytes of the one VRAM allocation: what the larger phase takes of its own. 0: no GPU. */
static inline size_t plan_arena_bytes(const struct plan *p) {
    size_t most = 0;
    for (int i = 0; i < PLAN_PHASES && p->gpu; i++) {
        const struct plan_table *t = &p->phase[i].vram;
        size_t own = t->sum - t->runtime - t->headroom;
        if (own > most) most = own;
    }
    return most;
}

const char *plan_place_name(enum plan_place p); /* "vram", "cpu", "streamed" */
const char *plan_bound_name(enum plan_bound b); /* "VRAM bandwidth", "host memory bandwidth", ... */

#endif
