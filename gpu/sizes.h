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

/* Where each piece lies; sizes saturate at SIZE_MAX. */
struct gpu_scratch {
    size_t xq, gate, up, part, bad, bytes;
};
struct gpu_scratch gpu_scratch_of(const struct ops_limits *l);

#ifdef __cplusplus
}
#endif
#endif
