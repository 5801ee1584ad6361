/* test_unit.c: units cover a model exactly once, and their bytes are those of the layouts. */
#include "core/err.h"
#include "core/quant.h"
#include "core/strip.h"
#include "core/unit.h"
#include "tests/support.h"

#include <stdlib.h>
#include <string.h>

static struct gguf *g;
static struct model m;
static struct unit *units;
static int n;

static void open_units(const char *name) {
    if (gguf_open(&g, test_path(name)) || model_open(&m, g) || model_units(&units, &n, &m)) fail_msg("%s: %s", name, err_text());
}

static void close_units(void) {
    free(units);
    model_close(&m);
    gguf_close(g);
}

/* Home bytes from the descriptions alone: 16-row strips, planes of 64 bytes; f32 vectors. All test models have whole blocks. */
static size_t expected_bytes(const struct unit_tensor *u) {
    const struct quant_info *q = quant_info(u->t.type);
    if (u->vector) return ((size_t)u->t.cols * 4 + 63) / 64 * 64;
    size_t n_block = (size_t)(u->t.cols / q->block_elems), words = (size_t)q->block_bytes / 4, rest = (size_t)q->block_bytes % 4;
    if (q->block_elems == 1) {
        n_block = 1;
        words = ((size_t)u->t.cols * (size_t)q->block_bytes + 3) / 4;
        rest = 0;
    }
    size_t strip = (n_block * words * 64) + (n_block * rest * 16 + 63) / 64 * 64;
    return (size_t)((u->t.rows + 15) / 16) * strip * (size_t)u->t.stack;
}

static void check_units(const char *name) {
    open_units(name);
    size_t file = 0, home = 0;
    uint64_t params = 0;
    for (int i = 0; i < n; i++) {
        size_t at = 0, read = 0;
        for (int k = 0; k < units[i].n_tensor; k++) {
            const struct unit_tensor *t = &units[i].tensors[k];
            if (t->bytes != expected_bytes(t)) fail_msg("%s: unit %d tensor %d: %zu bytes, want %zu", name, i, k, t->bytes, expected_bytes(t));
            assert_int_equal(t->offset, at);
            assert_int_equal(t->bytes % UNIT_ALIGN, 0);
            at += t->bytes;
            read += t->t.bytes;
            params += (uint64_t)(t->t.rows * t->t.cols * t->t.stack);
        }
        assert_int_equal(units[i].home_bytes, at);
        assert_int_equal(units[i].file_bytes, read);
        home += at;
        file += read;
    }
    assert_int_equal(file, m.file_bytes);
    assert_true(params == m.n_params);
    size_t all = 0;
    for (int il = 0; il < m.n_layer; il++)
        for (int t = 0; t < LT_COUNT; t++) all += tensor_home_bytes(&m.layers[il].t[t], layer_tensor_is_vector(t));
    all += tensor_home_bytes(&m.embd, false) + tensor_home_bytes(&m.out, false) + tensor_home_bytes(&m.out_norm, true) +
           tensor_home_bytes(&m.out_bias, true) + tensor_home_bytes(&m.rope_freqs, true);
    assert_int_equal(home, all);
    close_units();
}

static void units_cover_the_model_once(void **s) {
    (void)s;
    const char *names[] = {"tiny-models/tiny-random-llama-f32.gguf",    "tiny-models/tiny-random-llama31rope-f32.gguf",
                           "tiny-models/tiny-random-qwen2-f32.gguf",    "tiny-models/tiny-random-qwen3-f32.gguf",
                           "tiny-models/tiny-random-qwen3moe-f32.gguf", "tiny-models/tiny-random-gemma3-f32.gguf",
                           "stories260K/stories260K-q8_0.gguf",         "bad-gguf/valid_split-00001-of-00002.gguf",
                           "bad-gguf/valid_q4_0.gguf",                  "bad-gguf/valid_f16_small.gguf",
                           "tiny-models/tiny-random-qwen35-f32.gguf",   "tiny-models/tiny-random-qwen3next-f32.gguf"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) check_units(names[i]);
}

static void units_come_in_the_order_of_a_pass(void **s) {
    (void)s;
    open_units("tiny-models/tiny-random-qwen3moe-f32.gguf");
    assert_int_equal(n, 2 + 3 * (2 + 8));
    assert_int_equal(units[0].kind, UNIT_EMBED);
    assert_int_equal(units[n - 1].kind, UNIT_HEAD);
    assert_false(units[n - 1].tied);
    for (int i = 1; i < n - 1; i++) {
        int il = (i - 1) / 10, k = (i - 1) % 10;
        assert_int_equal(units[i].il, il);
        assert_int_equal(units[i].kind, k == 0 ? UNIT_ATTN : k == 1 ? UNIT_FFN : UNIT_EXPERT);
        assert_int_equal(units[i].expert, k < 2 ? -1 : k - 2);
    }
    close_units();
}

static void experts_tile_their_stack(void **s) {
    (void)s;
    open_units("tiny-models/tiny-random-qwen3moe-f32.gguf");
    const struct tensor *gate = &m.layers[1].t[LT_MOE_GATE];
    uint64_t at = gate->offset;
    for (int i = 0; i < n; i++) {
        if (units[i].kind != UNIT_EXPERT || units[i].il != 1) continue;
        assert_int_equal(units[i].n_tensor, 3);
        assert_int_equal(units[i].tensors[0].t.offset, at);
        assert_int_equal(units[i].tensors[0].t.stack, 1);
        at += units[i].tensors[0].t.bytes;
    }
    assert_int_equal(at, gate->offset + gate->bytes);
    close_units();
}

static void a_tied_head_has_no_matrix(void **s) {
    (void)s;
    open_units("tiny-models/tiny-random-qwen3-f32.gguf");
    const struct unit *head = &units[n - 1];
    assert_true(head->tied);
    assert_int_equal(head->n_tensor, 1);
    assert_true(head->tensors[0].vector);
    close_units();
}

static void unread_tensors_are_known(void **s) {
    (void)s;
    open_units("bad-gguf/valid_unknown_keys.gguf");
    for (int i = 0; i < gguf_n_tensors(g); i++) assert_true(model_uses(&m, gguf_tensor(g, i)));
    struct gguf_tensor other = *gguf_tensor(g, 0);
    other.offset = gguf_file_bytes(g, 0);
    assert_false(model_uses(&m, &other));
    close_units();
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(units_cover_the_model_once),
        cmocka_unit_test(units_come_in_the_order_of_a_pass),
        cmocka_unit_test(experts_tile_their_stack),
        cmocka_unit_test(a_tied_head_has_no_matrix),
        cmocka_unit_test(unread_tensors_are_known),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
