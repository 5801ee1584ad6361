/* sizes.c: see sizes.h. */
#include "gpu/sizes.h"

#include "core/kv.h"
#include "core/mem.h"
#include "core/ops.h"
#include "core/strip.h"
#include "gpu/gpu.h"

int64_t attn_runs_at_most(int64_t n_ctx) {
    int64_t page = n_ctx / KV_PAGE + (n_ctx % KV_PAGE != 0), runs = page + 1;
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

static size_t multiple(size_t n, size_t of) { return (n + of - 1) / of * of; }
static size_t lesser(size_t a, size_t b) { return a < b ? a : b; }

struct gpu_gemm_scratch gpu_gemm_scratch_of(const struct ops_limits *l) {
    struct gpu_gemm_scratch s = {0};
    if (l->n_tok < PREFILL_MIN_TOK) return s;
    const size_t n = (size_t)choices(l), ld = multiple((size_t)l->cols, 8), rows = (size_t)l->rows, n_expert = (size_t)l->n_expert;
    /* all weights of a layer as f32, where that is little; one strip at least */
    const size_t height = multiple(n_expert && l->rows < l->cols ? (size_t)l->cols : rows, GEMM_ROW_STEP);
    const size_t all = size_mul3(height * (n_expert ? n_expert : 1), ld, sizeof(float)), strip = size_mul3(STRIP_ROWS, ld, sizeof(float));
    s.tile_bytes = lesser(all, strip > GEMM_TILE_BYTES ? strip : GEMM_TILE_BYTES);
    /* a sum that is split has a few partial outputs at most: small problems need no large workspace */
    s.workspace_bytes = lesser(size_mul3(rows, (size_t)l->n_tok, 8 * sizeof(float)), GEMM_WORKSPACE);
    s.x = take(&s.bytes, size_mul3(n, ld, sizeof(uint16_t)));
    s.x_exp = take(&s.bytes, size_mul3(n, sizeof(int), 1));
    s.w_exp = take(&s.bytes, GEMM_TILE_ROWS * sizeof(int));
    s.starts = take(&s.bytes, n_expert ? (n_expert + 1) * sizeof(int) : 0);
    s.list = take(&s.bytes, n_expert ? size_mul3(n, sizeof(int), 1) : 0);
    s.tile = take(&s.bytes, s.tile_bytes);
    return s;
}

struct gpu_attn_scratch gpu_attn_scratch_of(const struct ops_limits *l) {
    struct gpu_attn_scratch s = {0};
    if (l->n_tok < PREFILL_MIN_TOK) return s;
    const size_t rows = size_mul3((size_t)l->n_tok, (size_t)l->n_head, 1), dim = multiple((size_t)l->head_dim, 16);
    const size_t pages = multiple((size_t)l->n_ctx, KV_PAGE) / KV_PAGE, page = size_mul3((size_t)l->n_kv * KV_PAGE, dim, 2 * sizeof(uint16_t));
    s.stage_bytes = lesser(size_mul3(pages, page, 1), page > ATTN_STAGE_BYTES ? page : ATTN_STAGE_BYTES);
    s.q = take(&s.bytes, size_mul3(rows, dim, sizeof(uint16_t)));
    s.q_exp = take(&s.bytes, size_mul3(rows, sizeof(int), 1));
    s.state = take(&s.bytes, size_mul3(rows, ATTN_STATE, sizeof(float)));
    /* small heads have many pages in the same bytes; a head of a page is 8 dims of one side at least */
    s.stage_exp = take(&s.bytes, size_mul3(s.stage_bytes / (KV_PAGE * 8 * sizeof(uint16_t)) + 1, 2 * sizeof(int), 1));
    s.stage = take(&s.bytes, s.stage_bytes);
    return s;
}

struct gpu_scratch gpu_scratch_of(const struct ops_limits *l) {
    struct gpu_scratch s = {0};
    size_t n = (size_t)choices(l), cols = (size_t)l->cols, moe = l->n_expert > 0;
    s.xq = take(&s.bytes, size_mul3(n, cols / 32 + 1, sizeof(struct gpu_xq)));
    s.gate = take(&s.bytes, size_mul3(moe * n, cols, sizeof(float)));
    s.up = take(&s.bytes, size_mul3(moe * n, cols, sizeof(float)));
    s.held = take(&s.bytes, size_mul3(moe * n, sizeof(int32_t), 1));
    s.part = take(&s.bytes, size_mul3((size_t)ATTN_TOKENS * (size_t)l->n_head, (size_t)attn_runs_at_most(l->n_ctx),
                                      ((size_t)l->head_dim + 2) * sizeof(float)));
    s.delta = take(&s.bytes, delta_work_bytes(l));
    s.bad = take(&s.bytes, GPU_N_BAD * sizeof(unsigned long long));
    struct gpu_gemm_scratch gemm = gpu_gemm_scratch_of(l);
    struct gpu_attn_scratch attn = gpu_attn_scratch_of(l);
    s.blas = take(&s.bytes, gemm.workspace_bytes);
    s.pass = take(&s.bytes, gemm.bytes > attn.bytes ? gemm.bytes : attn.bytes);
    return s;
}

size_t gpu_ops_scratch_bytes(const struct ops_limits *l) { return gpu_scratch_of(l).bytes; }
