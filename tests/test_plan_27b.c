/* test_plan_27b.c: the plan of the 27B hybrid at 262,144 positions, q8_0 KV, Q4_K_M, on a 16 GB card: what the memory table
 * says of weights, KV and recurrent state, to the byte, against arithmetic that is written out here. */
#include "core/err.h"
#include "core/quant.h"
#include "offload/engine.h"
#include "offload/machine.h"
#include "tests/support.h"

#include <stdlib.h>

enum { LAYERS = 64, DIM = 5120, FF = 17408, VOCAB = 248320, HEADS = 24, KV_HEADS = 4, HEAD = 256, /* attention, every 4th layer */
       KEY_HEADS = 16, VALUE_HEADS = 48, STATE = 128, CONV = (2 * KEY_HEADS + VALUE_HEADS) * STATE, INNER = VALUE_HEADS * STATE };
static const int64_t positions = 262144;

static size_t q4(int64_t rows, int64_t cols) { return (size_t)(rows * cols / 256 * 144); }
static size_t q6(int64_t rows, int64_t cols) { return (size_t)(rows * cols / 256 * 210); }
static size_t f32(int64_t n) { return (size_t)n * 4; }

/* Q4_K_M: half of the layers have attn_v or attn_qkv, and ffn_down, in Q6_K: the first and last 8, and every third between. */
static bool more(int il) { return il < 8 || il >= 56 || (il - 8) % 3 == 2; }
static size_t mixed(int il, int64_t rows, int64_t cols) { return more(il) ? q6(rows, cols) : q4(rows, cols); }
static bool attends(int il) { return il % 4 == 3; }

static size_t mixer_bytes(int il) {
    if (attends(il)) /* q and its gate, k, v, output, norms of q and k */
        return q4(2 * HEADS * HEAD, DIM) + q4(KV_HEADS * HEAD, DIM) + mixed(il, KV_HEADS * HEAD, DIM) + q4(DIM, HEADS * HEAD) +
               2 * f32(HEAD);
    /* qkv, z, output, alpha and beta, taps, rate and bias of the decay, norm */
    return mixed(il, CONV, DIM) + q4(INNER, DIM) + q4(DIM, INNER) + 2 * q4(VALUE_HEADS, DIM) + f32(4 * CONV) +
           2 * f32(VALUE_HEADS) + f32(STATE);
}

/* Of the weights, what is no matrix. */
static size_t vectors(void) {
    return 48 * (f32(4 * CONV) + 2 * f32(VALUE_HEADS) + f32(STATE)) + 16 * 2 * f32(HEAD) + LAYERS * 2 * f32(DIM) + f32(DIM);
}

static size_t weights(void) {
    size_t sum = q4(VOCAB, DIM) + q6(VOCAB, DIM) + f32(DIM); /* embedding, output, last norm */
    for (int il = 0; il < LAYERS; il++) sum += mixer_bytes(il) + 2 * q4(FF, DIM) + mixed(il, DIM, FF) + 2 * f32(DIM);
    return sum;
}

/* One position of one layer: K and V, each a byte per value and a 2-byte scale per 32. */
enum { KV_POSITION = 2 * KV_HEADS * (HEAD + HEAD / 32 * 2) };
/* The 3 inputs of the convolution and S of one layer, f32. */
enum { STATE_LAYER = 4 * (3 * CONV + VALUE_HEADS * STATE * STATE) };

static struct engine *open_27b(void) {
    struct engine *e;
    if (engine_open_shape(&e, "qwen3.8-27b:q4_k_m", NULL)) fail_msg("%s", err_text());
    return e;
}

static struct plan_request request(const char *machine) {
    struct plan_request q = {.n_ctx = positions, .type_k = QT_Q8_0, .type_v = QT_Q8_0, .chunk_tokens = 2048, .logits_rows = 1,
                             .n_thread = 8, .isa = ISA_AVX2, .host_limit = SIZE_MAX};
    if (machine && machine_find(&q.machine, machine)) fail_msg("%s", err_text());
    return q;
}

static void check_sizes(const struct plan *p) {
    assert_true(weights() == 16536406016u);
    assert_true(p->weights_bytes == weights());
    assert_true(p->kv_bytes == (size_t)positions * 16 * KV_POSITION);
    assert_true(p->kv_bytes == 9126805504u);
    assert_true(p->state_bytes == (size_t)48 * STATE_LAYER);
    assert_true(p->state_bytes == 156893184u); /* 149.6 MiB */
    assert_true(p->saved_bytes == p->state_bytes);
    assert_true(p->kv_bytes_per_position == 16 * KV_POSITION);
    assert_true(p->state_bytes_per_tok == 48.0 * STATE_LAYER);
    /* Every matrix is read for a token, but of the embedding only a row. */
    assert_true(p->weight_bytes_per_tok == (double)(weights() - vectors() - q4(VOCAB, DIM) + q4(1, DIM)));
}

static void without_a_card(void **state) {
    (void)state;
    struct engine *e = open_27b();
    struct plan_request q = request(NULL);
    struct plan p;
    if (plan_make(&p, engine_model(e), &q)) fail_msg("%s", err_text());
    check_sizes(&p);
    size_t kv = (size_t)positions * 16 * KV_POSITION, states = 2 * 48 * (size_t)STATE_LAYER;
    assert_true(p.host_bytes == weights() + kv + states + p.scratch_bytes + p.runtime_bytes);
    engine_close(e);
}

static size_t sum_of(const struct plan_table *t) {
    return t->weights + t->kv + t->state + t->saved + t->scratch + t->hidden + t->ring + t->stage + t->runtime + t->headroom;
}

static void on_cards_of_16_and_24_gb(void **unused) {
    (void)unused;
    static const char *const machines[] = {"v100-16g-pcie3", "v100-16g-pcie3-6ch", "rtx3090"};
    struct engine *e = open_27b();
    struct plan *p = malloc(sizeof *p);
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        struct plan_request q = request(machines[i]);
        if (plan_make(p, engine_model(e), &q)) fail_msg("%s: %s", machines[i], err_text());
        assert_true(p->gpu);
        check_sizes(p);
        const struct plan_phase *pre = &p->phase[PLAN_PREFILL], *dec = &p->phase[PLAN_DECODE];
        size_t kv = 0, kv_vram = 0, state[PLAN_PLACES] = {0};
        for (int il = 0; il < LAYERS; il++) {
            const struct plan_layer *l = &dec->layers[il];
            int64_t pages = (int64_t)l->kv_pages[PLAN_VRAM] + l->kv_pages[PLAN_CPU] + l->kv_pages[PLAN_STREAM];
            assert_int_equal(pages, attends(il) ? positions / 256 : 0);
            kv += (size_t)pages * 256 * KV_POSITION;
            kv_vram += (size_t)l->kv_pages[PLAN_VRAM] * 256 * KV_POSITION;
            if (!attends(il)) state[l->state] += STATE_LAYER;
        }
        assert_true(kv == p->kv_bytes && dec->vram.kv == kv_vram && dec->host.kv >= kv - kv_vram);
        assert_true(pre->vram.kv + pre->host.kv == kv);
        assert_true(state[PLAN_VRAM] == dec->vram.state && state[PLAN_CPU] == dec->host.state && !state[PLAN_STREAM]);
        for (int phase = 0; phase < PLAN_PHASES; phase++) {
            const struct plan_table *v = &p->phase[phase].vram, *h = &p->phase[phase].host;
            assert_true(v->state + h->state == p->state_bytes && v->saved + h->saved == p->state_bytes);
            /* Each unit begins at a multiple of 256 bytes of VRAM. What prefill streams and decode has in VRAM lies in both
             * memories, and the host's table is that of both phases. */
            size_t twice = phase == PLAN_DECODE && v->weights > pre->vram.weights ? v->weights - pre->vram.weights : 0;
            assert_true(v->weights + h->weights >= weights() && v->weights + h->weights <= weights() + twice + 255 * 3 * LAYERS);
            assert_true(v->sum == sum_of(v) && v->sum <= v->limit);
            assert_true(h->sum == sum_of(h) && h->sum <= h->limit);
        }
    }
    free(p);
    engine_close(e);
}

int main(void) {
    const struct CMUnitTest t[] = {cmocka_unit_test(without_a_card), cmocka_unit_test(on_cards_of_16_and_24_gb)};
    return cmocka_run_group_tests(t, NULL, NULL);
}
