/* sizes.h: how much scratch the operations take, without CUDA: the planner adds it up on machines that have no GPU, and
 * gpu/ops.c allocates it. A kernel that needs scratch has its piece in struct gpu_scratch. */
#ifndef LH_GPU_SIZES_H
#define LH_GPU_SIZES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 32 activations of a token, quantised by the contract of core/ops.h: x = d * q. 48 bytes: three 16-byte loads. */
struct gpu_xq {
    int32_t q[8];   /* 4 signed bytes each */
    float d;
    int32_t sum[2]; /* of each half of q */
    float s;        /* d * (sum[0] + sum[1]) */
};

struct ops_limits;

enum { GPU_N_BAD = 3 };   /* words of positions of what went wrong */
enum { ATTN_TOKENS = 8 }; /* query tokens of one step of attention in decode */

/* Runs of pages: single pages at the start, then 4, then 16. Most runs that a query can see in a context of n_ctx. */
enum { ATTN_RUN_1 = 16, ATTN_RUN_4 = 256, ATTN_RUNS_4 = ATTN_RUN_1 + (ATTN_RUN_4 - ATTN_RUN_1) / 4 };
int64_t attn_runs_at_most(int64_t n_ctx);

/* Gated DeltaNet in chunks: work of one chunk and value head, filled for up to DELTA_GROUP tokens before S is taken through
 * them. */
enum { DELTA_CHUNK = 64, DELTA_GROUP = 8 * DELTA_CHUNK };
struct delta_work {
    float t[DELTA_CHUNK * DELTA_CHUNK]; /* (I + A)^-1 diag(beta): row i up to the diagonal, then 0 */
    float p[DELTA_CHUNK * DELTA_CHUNK]; /* q.k with decay: row i up to the diagonal, then 0 */
    float decay[DELTA_CHUNK];           /* from the start of the chunk through token i */
    float rest[DELTA_CHUNK];            /* from token i to the end */
};
/* These works of a call of up to n_tok tokens, and the 3 inputs before each chunk that its convolution needs. */
size_t delta_work_bytes(const struct ops_limits *l);

/* Where each piece lies; sizes saturate at SIZE_MAX. */
struct gpu_scratch {
    size_t xq, gate, up, part, delta, bad, bytes;
};
struct gpu_scratch gpu_scratch_of(const struct ops_limits *l);

#ifdef __cplusplus
}
#endif
#endif
