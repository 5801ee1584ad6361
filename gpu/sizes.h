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

/* Calls of fewer tokens go through matvec.cu, which reads the weights once per 8 tokens. A tensor-core product reads them
 * once, but writes and reads them again as half: 4 bytes a weight, as much as 7 readings of Q4_K, 4 of Q8_0, 2 of F16. Four
 * readings are about where the two meet. Attention changes at the same number, so that "prefill" is one thing. */
enum { PREFILL_MIN_TOK = 33 };

/* Decoded weights at a time: large enough that a tile fills the chip many times over (6500 rows of 5120 columns), small
 * beside the weights; its rows are bounded too, for their exponents. cuBLAS recommends this workspace for its newest chips. */
enum { GEMM_TILE_BYTES = 64 << 20, GEMM_TILE_ROWS = 65536, GEMM_ROW_STEP = 128, GEMM_WORKSPACE = 32 << 20 };
struct gpu_gemm_scratch {
    size_t x, x_exp;     /* inputs as half, their exponents */
    size_t w_exp, tile;  /* weights as half, their exponents */
    size_t starts, list; /* choices by expert */
    size_t bytes, tile_bytes, workspace_bytes;
};
struct gpu_gemm_scratch gpu_gemm_scratch_of(const struct ops_limits *l);

/* Attention of many tokens; pages that are turned into half come in batches of at most ATTN_STAGE_BYTES. */
enum { ATTN_STAGE_BYTES = 64 << 20, ATTN_STATE = 6 /* floats per query row between batches */ };
struct gpu_attn_scratch {
    size_t q, q_exp, state, stage, stage_exp, bytes, stage_bytes;
};
struct gpu_attn_scratch gpu_attn_scratch_of(const struct ops_limits *l);

/* Where each piece lies; sizes saturate at SIZE_MAX. */
struct gpu_scratch {
    size_t xq, gate, up, held, part, delta, bad;
    size_t blas;  /* cuBLAS's workspace */
    size_t pass;  /* of one call of many tokens, of gemm.c or of attention */
    size_t bytes;
};
struct gpu_scratch gpu_scratch_of(const struct ops_limits *l);

#ifdef __cplusplus
}
#endif
#endif
