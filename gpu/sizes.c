/* sizes.c: see sizes.h. */
#include "gpu/sizes.h"

#include "core/kv.h"
#include "core/mem.h"
#include "core/ops.h"
#include "gpu/gpu.h"

int64_t attn_runs_at_most(int64_t n_ctx) {
    int64_t page = (n_ctx + KV_PAGE - 1) / KV_PAGE, runs = page + 1;
    if (page >= ATTN_RUN_4)
        runs = ATTN_RUNS_4 + (page - ATTN_RUN_4) / 16 + 1;
    else if (page >= ATTN_RUN_1)
        runs = ATTN_RUN_1 + (page - ATTN_RUN_1) / 4 + 1;
    return runs > ATTN_RUN_1 + 2 ? runs : ATTN_RUN_1 + 2;
}

static size_t take(size_t *at, size_t bytes) {
    size_t here = *at, end;
    *at = here == SIZE_MAX || bytes == SIZE_MAX || !size_add(&end, here, bytes) || !size_align_up(&end, end, GPU_ALIGN) ? SIZE_MAX : end;
    return here;
}

size_t delta_work_bytes(const struct ops_limits *l) {
    int64_t n_tok = l->n_tok < DELTA_GROUP ? l->n_tok : DELTA_GROUP;
    if (!l->delta.n_value || n_tok < DELTA_CHUNK) return 0;
    size_t chunks = (size_t)(n_tok + DELTA_CHUNK - 1) / DELTA_CHUNK, sum;
    size_t work = size_mul3(chunks, (size_t)l->delta.n_value, sizeof(struct delta_work));
    size_t before = size_mul3(chunks * (DELTA_CONV - 1), (size_t)delta_conv_dim(&l->delta), sizeof(float));
    return work == SIZE_MAX || before == SIZE_MAX || !size_add(&sum, work, before) ? SIZE_MAX : sum;
}

static int64_t choices(const struct ops_limits *l) {
    return (int64_t)l->n_tok * (l->n_expert_used > 1 ? l->n_expert_used : 1);
}

struct gpu_scratch gpu_scratch_of(const struct ops_limits *l) {
    struct gpu_scratch s = {0};
    size_t n = (size_t)choices(l), cols = (size_t)l->cols, moe = l->n_expert > 0;
    s.xq = take(&s.bytes, size_mul3(n, cols / 32 + 1, sizeof(struct gpu_xq)));
    s.gate = take(&s.bytes, size_mul3(moe * n, cols, sizeof(float)));
    s.up = take(&s.bytes, size_mul3(moe * n, cols, sizeof(float)));
    s.part = take(&s.bytes, size_mul3((size_t)ATTN_TOKENS * (size_t)l->n_head, (size_t)attn_runs_at_most(l->n_ctx),
                                      ((size_t)l->head_dim + 2) * sizeof(float)));
    s.delta = take(&s.bytes, delta_work_bytes(l));
    s.bad = take(&s.bytes, GPU_N_BAD * sizeof(unsigned long long));
    return s;
}

size_t gpu_ops_scratch_bytes(const struct ops_limits *l) { return gpu_scratch_of(l).bytes; }
