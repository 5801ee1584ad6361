/* test_mix.c: the mixes and the built-in shapes against parameter counts and byte totals of published models. */
#include "core/err.h"
#include "core/mix.h"
#include "core/quant.h"
#include "core/shape.h"
#include "tests/support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Parameters are exact; sizes are tensor bytes in 1e9, printed with three decimals. */
static const struct {
    const char *name;
    uint64_t params;
    double q4_k_m, q8_0;
    int64_t kv_bytes; /* per token, f16 */
    int n_tensors;    /* 0: not published */
} published[] = {
    {"qwen2.5-7b", 7615616512, 4.677, 8.093, 57344, 339},
    {"qwen2.5-14b", 14770033664, 8.982, 15.696, 196608, 579},
    {"qwen2.5-32b", 32763876352, 19.845, 34.815, 262144, 771},
    {"qwen3-0.6b", 596049920, 0.391, 0.633, 114688, 310},
    {"qwen3-1.7b", 1720574976, 1.101, 1.828, 114688, 310},
    {"qwen3-4b", 4022468096, 2.491, 4.274, 147456, 398},
    {"qwen3-8b", 8190735360, 5.022, 8.704, 147456, 399},
    {"qwen3-14b", 14768307200, 8.996, 15.693, 163840, 443},
    {"qwen3-32b", 32762123264, 19.756, 34.812, 262144, 707},
    {"qwen3-30b-a3b", 30532122624, 18.551, 32.478, 98304, 579},
    {"qwen3.5-27b", 26895998464, 16.536, 28.585, 65536, 851},
    {"qwen3.8-27b-mtp", 26895998464 + 424699392, 16.800, 29.036, 65536, 866},
    {"qwen3.5-9b", 8953803264, 5.618, 9.517, 32768, 0},
    {"qwen3.5-4b", 4205751296, 2.698, 4.471, 32768, 0},
    {"qwen3.5-0.8b", 752393024, 0.518, 0.801, 12288, 0},
    {"qwen3.6-35b-a3b", 34660610688, 21.156, 36.892, 20480, 0},
    {"qwen3-next-80b-a3b", 79674391296, 48.483, 84.806, 24576, 0},
    {"llama-3.1-8b", 8030261248 + 64, 4.913, 8.533, 131072, 292},
    {"gemma-3-27b", 27009002240, 16.540, 28.701, 507904, 808},
    {"mistral-small-24b", 23572403200, 14.326, 25.047, 163840, 363},
};

static void check_size(const char *shape, enum mix mix, double want) {
    struct shape_totals sum;
    shape_totals(&sum, shape_find(shape), mix);
    /* Half of the last printed digit. */
    if (!(fabs((double)sum.bytes / 1e9 - want) <= 0.00051))
        fail_msg("%s %s: %.4f GB, published %.3f", shape, mix_name(mix), (double)sum.bytes / 1e9, want);
}

static void shapes_have_published_sizes(void **s) {
    (void)s;
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        const struct shape *p = shape_find(published[i].name);
        if (!p) fail_msg("%s: no such shape", published[i].name);
        struct shape_totals sum;
        shape_totals(&sum, p, MIX_F16);
        if (sum.params != published[i].params)
            fail_msg("%s: %llu parameters, published %llu", p->name, (unsigned long long)sum.params,
                     (unsigned long long)published[i].params);
        if (published[i].n_tensors && sum.n_tensors != published[i].n_tensors)
            fail_msg("%s: %d tensors, published %d", p->name, sum.n_tensors, published[i].n_tensors);
        check_size(published[i].name, MIX_Q4_K_M, published[i].q4_k_m);
        check_size(published[i].name, MIX_Q8_0, published[i].q8_0);
        assert_int_equal((int64_t)4 * p->n_kv * p->head_dim * shape_n_attn(p), published[i].kv_bytes);
    }
}

static void other_mixes_have_published_sizes(void **s) {
    (void)s;
    check_size("qwen3.8-27b", MIX_Q4_0, 15.466);
    check_size("qwen3.8-27b", MIX_Q4_K_S, 15.575);
    check_size("qwen3.8-27b", MIX_Q5_K_M, 19.220);
    check_size("qwen3.8-27b", MIX_Q6_K, 22.072);
    check_size("qwen3.8-27b", MIX_BF16, 53.797);
    check_size("qwen3-30b-a3b", MIX_Q4_K_S, 17.450);
    check_size("qwen3-30b-a3b", MIX_Q5_K_M, 21.720);
    check_size("qwen3-30b-a3b", MIX_Q6_K, 25.087);
    check_size("qwen3-8b", MIX_Q4_K_S, 4.796);
    check_size("qwen3-8b", MIX_Q5_K_M, 5.845);
    check_size("qwen3-8b", MIX_Q6_K, 6.720);
    check_size("llama-3.1-8b", MIX_Q4_K_S, 4.685);
    check_size("llama-3.1-8b", MIX_Q5_K_M, 5.725);
    check_size("llama-3.1-8b", MIX_Q6_K, 6.588);
    check_size("qwen3-32b", MIX_Q4_K_S, 18.765);
    check_size("qwen3-32b", MIX_Q5_K_M, 23.209);
    check_size("qwen3-32b", MIX_Q6_K, 26.877);
    struct shape_totals sum;
    shape_totals(&sum, shape_find("qwen3.8-27b"), MIX_Q8_0);
    assert_int_equal(sum.bytes, 28584769536);
    shape_totals(&sum, shape_find("qwen3.8-27b-mtp"), MIX_Q8_0);
    assert_int_equal(sum.bytes, 29036089344);
}

/* What llama-quantize --dry-run (llama.cpp v0.5.0) says of bf16 files of these shapes: MiB of tensors, two decimals. */
static const enum mix theirs_of[] = {MIX_Q4_K_M, MIX_Q4_K_S, MIX_Q5_K_M, MIX_Q6_K, MIX_Q8_0, MIX_Q4_0, MIX_IQ4_XS};
enum { N_THEIRS = sizeof theirs_of / sizeof *theirs_of };
static const struct {
    const char *name;
    double mib[N_THEIRS];
} theirs[] = {
    {"qwen2.5-7b", {4460.45, 4245.58, 5186.92, 5958.79, 7717.68, 4220.43, 4047.72}},
    {"qwen2.5-14b", {8566.04, 8170.57, 10016.35, 11557.31, 14968.52, 8117.45, 7801.27}},
    {"qwen2.5-32b", {18926.01, 17908.51, 22178.82, 25634.93, 33202.08, 17771.01, 17036.55}},
    {"qwen3-0.6b", {372.65, 359.84, 418.15, 466.50, 604.15, 358.21, 346.50}},
    {"qwen3-1.7b", {1050.43, 1005.40, 1193.93, 1346.40, 1743.77, 999.90, 963.53}},
    {"qwen3-4b", {2375.91, 2267.22, 2749.97, 3147.42, 4076.43, 2254.10, 2174.72}},
    {"qwen3-8b", {4789.19, 4573.88, 5574.38, 6408.64, 8300.36, 4547.88, 4374.83}},
    {"qwen3-14b", {8579.06, 8170.62, 10021.79, 11554.70, 14965.61, 8115.00, 7795.72}},
    {"qwen3-32b", {18840.96, 17895.96, 22133.69, 25632.22, 33199.07, 17768.46, 17021.52}},
    {"qwen3-30b-a3b", {17691.34, 16641.65, 20713.44, 23924.41, 30973.40, 16497.15, 15784.38}},
    {"qwen3-30b-a3b-2507", {17691.34, 16641.65, 20713.44, 23924.41, 30973.40, 16497.15, 15784.38}},
    {"qwen3.8-27b", {15770.35, 14853.78, 18329.72, 21049.06, 27260.56, 14749.41, 14479.56}},
    {"qwen3.8-27b-mtp", {16021.46, 15081.70, 18620.21, 21381.38, 27690.97, 14977.32, 14695.60}},
    {"qwen3.5-9b", {5357.88, 5093.25, 6157.88, 7007.88, 9075.67, 5056.75, 4975.25}},
    {"qwen3.5-4b", {2572.86, 2434.65, 2922.08, 3293.12, 4264.29, 2415.59, 2401.41}},
    {"qwen3.5-0.8b", {494.32, 471.39, 540.77, 590.12, 763.78, 467.77, 471.92}},
    {"qwen3.6-35b-a3b", {20175.71, 18958.01, 23573.06, 27182.73, 35183.10, 18791.26, 18051.46}},
    {"qwen3-next-80b-a3b", {46237.05, 43377.94, 54115.95, 62487.29, 80877.56, 42987.06, 41196.21}},
    {"llama-3.1-8b", {4685.30, 4467.80, 5459.93, 6282.97, 8137.64, 4437.80, 4269.15}},
    {"mistral-small-24b", {13662.36, 12914.08, 15979.86, 18442.21, 23886.58, 12811.58, 12285.33}},
    {"gemma3-27b", {15773.62, 14941.42, 18372.37, 21133.55, 27371.45, 14839.70, 14197.39}},
    {"generic-27b", {15665.74, 14793.16, 18309.49, 21118.48, 27352.99, 14673.16, 14055.98}},
};

static void every_shape_has_the_size_that_llama_cpp_gives_it(void **s) {
    (void)s;
    assert_int_equal(sizeof theirs / sizeof *theirs, shape_count());
    for (int i = 0; i < shape_count(); i++) {
        assert_string_equal(theirs[i].name, shape_at(i)->name);
        for (int k = 0; k < N_THEIRS; k++) {
            struct shape_totals sum;
            shape_totals(&sum, shape_at(i), theirs_of[k]);
            double mib = (double)sum.bytes / (1 << 20);
            if (!(fabs(mib - theirs[i].mib[k]) <= 0.0051))
                fail_msg("%s %s: %.3f MiB, llama-quantize %.2f", theirs[i].name, mix_name(theirs_of[k]), mib, theirs[i].mib[k]);
        }
    }
}

/* One tensor of a model of 32 dense blocks with 32/8 heads, first in its mix. */
static int first_type(enum mix mix, const char *name, int64_t row) {
    struct mix_model m = {.n_block = 32, .n_head = 32, .n_kv = 8, .n_attn_v = 32};
    struct mix_state s;
    mix_begin(&s, mix, false, &m);
    return mix_type(&s, name, 2, (int64_t[]){row, 64, 1, 1});
}

static void rows_that_do_not_fit_fall_back(void **s) {
    (void)s;
    static const struct {
        enum mix mix;
        const char *name;
        int64_t row;
        int type;
    } cases[] = {
        {MIX_Q4_K_M, "blk.0.attn_q.weight", 256, QT_Q4_K},
        {MIX_Q4_K_M, "blk.0.attn_q.weight", 288, QT_Q5_0},
        {MIX_Q5_K_S, "blk.0.attn_q.weight", 288, QT_Q5_1},
        {MIX_Q6_K, "blk.0.attn_q.weight", 288, QT_Q8_0},
        {MIX_Q2_K, "blk.0.attn_q.weight", 288, QT_Q4_0},
        {MIX_Q3_K_M, "blk.0.ffn_up.weight", 288, QT_Q4_0},
        {MIX_IQ4_XS, "blk.0.attn_q.weight", 288, QT_IQ4_NL},
        {MIX_Q4_K_M, "blk.0.attn_q.weight", 172, QT_F16},
        {MIX_Q8_0, "blk.0.ffn_down.weight", 172, QT_F16},
        {MIX_Q4_K_M, "output.weight", 288, QT_Q8_0},
        {MIX_Q4_0, "output.weight", 172, QT_F16},
        {MIX_Q4_K_M, "blk.0.attn_v.weight", 288, QT_Q8_0},
        {MIX_Q8_0, "blk.0.attn_norm.weight", 256, QT_F32},
        {MIX_Q4_0, "blk.0.ffn_gate_inp.weight", 256, QT_F32},
        {MIX_Q4_0, "blk.0.ssm_conv1d.weight", 256, QT_F32},
        {MIX_Q4_0, "blk.0.attn_q.bias", 256, QT_F32},
        {MIX_BF16, "blk.0.attn_q.weight", 7, QT_BF16},
        {MIX_NVFP4, "blk.0.attn_q.weight", 96, QT_Q8_0},
        {MIX_Q3_K_M, "blk.0.attn_v.weight", 256, QT_Q5_K},
        {MIX_Q3_K_M, "blk.0.attn_output.weight", 256, QT_Q4_K},
        {MIX_Q2_K, "blk.0.attn_v.weight", 256, QT_Q4_K},
        {MIX_Q2_K, "blk.0.ffn_down.weight", 256, QT_Q3_K},
        {MIX_IQ4_XS, "blk.0.attn_v.weight", 256, QT_Q5_K},
        {MIX_IQ4_NL, "blk.0.attn_k.weight", 256, QT_IQ4_NL},
        {MIX_Q4_K_S, "blk.0.ffn_down.weight", 256, QT_Q5_K},
        {MIX_MXFP4_MOE, "blk.0.ffn_up.weight", 256, QT_Q8_0},
        {MIX_MXFP4_MOE, "blk.0.ffn_up_exps.weight", 256, QT_MXFP4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int got = first_type(cases[i].mix, cases[i].name, cases[i].row);
        if (got != cases[i].type)
            fail_msg("%s %s row %lld: %s, expected %s", mix_name(cases[i].mix), cases[i].name, (long long)cases[i].row,
                     quant_name(got), quant_name(cases[i].type));
    }
}

static void special_models_have_exceptions(void **s) {
    (void)s;
    struct mix_state st;
    const int64_t d[4] = {4096, 64, 1, 1};
    struct mix_model mixtral = {.n_block = 32, .n_head = 32, .n_kv = 8, .n_expert = 8, .n_attn_v = 32};
    mix_begin(&st, MIX_Q4_K_M, false, &mixtral);
    assert_int_equal(mix_type(&st, "blk.5.attn_k.weight", 2, d), QT_Q8_0);
    assert_int_equal(mix_type(&st, "blk.5.attn_v.weight", 2, d), QT_Q8_0);
    assert_int_equal(mix_type(&st, "blk.5.attn_output.weight", 2, d), QT_Q5_K);
    /* With experts the block number decides, not how many have been seen. */
    assert_int_equal(mix_type(&st, "blk.4.ffn_down_exps.weight", 3, d), QT_Q4_K);
    assert_int_equal(mix_type(&st, "blk.6.ffn_down_exps.weight", 3, d), QT_Q6_K);
    struct mix_model big = {.n_block = 80, .n_head = 64, .n_kv = 8, .n_attn_v = 80};
    mix_begin(&st, MIX_Q4_K_S, false, &big);
    for (int i = 0; i < 80; i++) assert_int_equal(mix_type(&st, "blk.0.attn_v.weight", 2, d), QT_Q5_K);
    struct mix_model tied = {.n_block = 2, .n_head = 4, .n_kv = 4, .n_attn_v = 2, .tied = true};
    mix_begin(&st, MIX_Q4_K_M, false, &tied);
    assert_int_equal(mix_type(&st, "token_embd.weight", 2, d), QT_Q6_K);
    mix_begin(&st, MIX_Q4_K_M, true, &tied);
    assert_int_equal(mix_type(&st, "token_embd.weight", 2, d), QT_Q4_K);
    assert_int_equal(mix_type(&st, "output_norm.weight", 1, d), QT_F32);
}

static void names_are_parsed(void **s) {
    (void)s;
    const struct shape *p = NULL;
    enum mix mix = MIX_F32;
    assert_int_equal(shape_parse(&p, &mix, "Qwen3.6-27B:q4_k_s"), 0);
    assert_string_equal(p->name, "qwen3.8-27b");
    assert_int_equal(mix, MIX_Q4_K_S);
    assert_int_equal(shape_parse(&p, &mix, "qwen3-0.6b"), 0);
    assert_int_equal(mix, MIX_Q4_K_M);
    assert_int_equal(shape_parse(&p, &mix, "qwen3-0.6b:q5_k"), 0);
    assert_int_equal(mix, MIX_Q5_K_M);
    assert_int_equal(shape_parse(&p, &mix, "qwen9-1b:q8_0"), ERR_ARG);
    assert_non_null(strstr(err_text(), "qwen9-1b"));
    assert_non_null(strstr(err_text(), "llama-3.1-8b"));
    assert_int_equal(shape_parse(&p, &mix, "qwen3-0.6b:q9"), ERR_ARG);
    assert_non_null(strstr(err_text(), "Q4_K_M"));
    assert_int_equal(shape_parse(&p, &mix, "qwen3-0.6b:"), ERR_ARG);
    assert_null(shape_find(""));
    assert_null(shape_find("qwen3.6-27b qwen3.5-27b"));
}

static int in_order(void *ctx, const struct shape_tensor *t) {
    struct shape_tensor *last = ctx;
    int a = -1, b = -1;
    sscanf(last->name, "blk.%d.", &a);
    sscanf(t->name, "blk.%d.", &b);
    if (a > b || (a == b && strcmp(last->name, t->name) >= 0)) fail_msg("%s comes after %s", t->name, last->name);
    *last = *t;
    return 0;
}

static void tensors_come_in_order(void **s) {
    (void)s;
    for (int i = 0; i < shape_count(); i++) {
        struct shape_tensor last = {.name = ""};
        assert_int_equal(shape_tensors(shape_at(i), MIX_Q4_K_M, false, 0, in_order, &last), 0);
        last = (struct shape_tensor){.name = ""};
        assert_int_equal(shape_tensors(shape_at(i), MIX_Q4_K_M, false, 3, in_order, &last), 0);
        int block = -1;
        sscanf(last.name, "blk.%d.", &block);
        assert_int_equal(block, 2 + shape_at(i)->n_mtp);
    }
}

int main(void) {
    const struct CMUnitTest t[] = {
        cmocka_unit_test(shapes_have_published_sizes),
        cmocka_unit_test(other_mixes_have_published_sizes),
        cmocka_unit_test(every_shape_has_the_size_that_llama_cpp_gives_it),
        cmocka_unit_test(rows_that_do_not_fit_fall_back),
        cmocka_unit_test(special_models_have_exceptions),
        cmocka_unit_test(names_are_parsed),
        cmocka_unit_test(tensors_come_in_order),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
