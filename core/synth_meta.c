/* synth_meta.c: metadata and tokenizers of made-up models. See synth.h. */
#include "core/synth.h"

#include "core/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- architecture keys --------------------------------------------------------------------------------------------------- */

/* Builds "ARCH.name" in a buffer. */
struct key {
    char text[128];
};

static const char *key(struct key *k, const struct shape *s, const char *name) {
    snprintf(k->text, sizeof k->text, "%s.%s", s->arch, name);
    return k->text;
}

static int put_u32(struct gguf_writer *w, const struct shape *s, const char *name, int64_t v) {
    struct key k;
    return gguf_writer_u32(w, key(&k, s, name), (uint32_t)v);
}

static void put_f32(struct gguf_writer *w, const struct shape *s, const char *name, double v) {
    struct key k;
    gguf_writer_f32(w, key(&k, s, name), (float)v);
}

static void put_str(struct gguf_writer *w, const char *name, const char *v) {
    gguf_writer_str(w, name, v, strlen(v));
}

static void put_experts(struct gguf_writer *w, const struct shape *s) {
    put_u32(w, s, "expert_count", s->n_expert);
    put_u32(w, s, "expert_used_count", s->n_expert_used);
    put_u32(w, s, "expert_feed_forward_length", s->n_ff_expert);
    if (s->n_ff_shared) put_u32(w, s, "expert_shared_feed_forward_length", s->n_ff_shared);
}

static void put_hybrid(struct gguf_writer *w, const struct shape *s) {
    put_u32(w, s, "full_attention_interval", s->full_interval);
    put_u32(w, s, "ssm.conv_kernel", s->n_conv);
    put_u32(w, s, "ssm.state_size", s->state_dim);
    put_u32(w, s, "ssm.group_count", s->n_key_head);
    put_u32(w, s, "ssm.time_step_rank", s->n_value_head);
    put_u32(w, s, "ssm.inner_size", (int64_t)s->n_value_head * s->state_dim);
    if (!strcmp(s->arch, "qwen3next")) return;
    struct key k;
    gguf_writer_arr(w, key(&k, s, "rope.dimension_sections"), GGUF_I32, 4, (const int32_t[]){11, 11, 10, 0});
}

static void put_rope(struct gguf_writer *w, const struct shape *s) {
    put_u32(w, s, "rope.dimension_count", s->n_rot);
    put_f32(w, s, "rope.freq_base", s->rope_base);
    if (s->rope_factor == 1) return;
    struct key k;
    put_str(w, key(&k, s, "rope.scaling.type"), "linear");
    put_f32(w, s, "rope.scaling.factor", s->rope_factor);
}

int synth_metadata(struct gguf_writer *w, const struct shape *s, enum mix mix, int n_layer) {
    char name[128];
    int main_layers = n_layer > 0 && n_layer < s->n_layer ? n_layer : s->n_layer;
    snprintf(name, sizeof name, "%s with random weights", s->name);
    put_str(w, "general.architecture", s->arch);
    put_str(w, "general.type", "model");
    put_str(w, "general.name", name);
    gguf_writer_u32(w, "general.file_type", (uint32_t)mix_file_type(mix));
    gguf_writer_u32(w, "general.quantization_version", 2);
    put_u32(w, s, "block_count", main_layers + s->n_mtp);
    if (s->n_mtp) put_u32(w, s, "nextn_predict_layers", s->n_mtp);
    put_u32(w, s, "context_length", s->n_ctx);
    put_u32(w, s, "embedding_length", s->dim);
    if (s->n_ff) put_u32(w, s, "feed_forward_length", s->n_ff);
    put_u32(w, s, "attention.head_count", s->n_head);
    put_u32(w, s, "attention.head_count_kv", s->n_kv);
    put_u32(w, s, "attention.key_length", s->head_dim);
    put_u32(w, s, "attention.value_length", s->head_dim);
    put_f32(w, s, "attention.layer_norm_rms_epsilon", s->eps);
    if (s->window) put_u32(w, s, "attention.sliding_window", s->window);
    put_rope(w, s);
    if (s->n_expert) put_experts(w, s);
    if (s->full_interval > 1) put_hybrid(w, s);
    return put_u32(w, s, "vocab_size", s->n_vocab);
}

/* --- tokenizers ---------------------------------------------------------------------------------------------------------- */

/* Values of tokenizer.ggml.token_type. */
enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_UNUSED = 5 };

/* Pairs that are merged, in order; each makes the next token after the bytes. "\xc4\xa0" is the visible space. */
static const char *const merges[] = {"\xc4\xa0 t", "h e", "i n", "\xc4\xa0 a", "\xc4\xa0t he", "a n", "an d", "o n"};
static const char *const controls[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
enum {
    N_BYTE = 256,
    N_MERGE = sizeof merges / sizeof *merges,
    N_CONTROL = sizeof controls / sizeof *controls,
    N_USED = N_BYTE + N_MERGE + N_CONTROL,
    ID_TEXT_END = N_BYTE + N_MERGE,
    ID_TURN_END = ID_TEXT_END + 2,
};

static const char chat_template[] =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/* Byte-level BPE writes every byte as a visible character: printable Latin-1 ones as themselves, the others as U+0100 and
 * up in order. Tokens 0.. are the printable ones first. */
static int visible_char(int id) {
    int n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int b = 0, other = 0; b < N_BYTE; b++) {
            bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
            if (printable == (pass == 0) && n++ == id) return pass == 0 ? b : 0x100 + other;
            other += !printable;
        }
    return '?';
}

static void put_utf8(char *dst, int c) { /* below U+0800 */
    if (c < 0x80)
        snprintf(dst, 4, "%c", c);
    else
        snprintf(dst, 4, "%c%c", 0xc0 | c >> 6, 0x80 | (c & 63));
}

static void token_text(char *dst, size_t cap, int id) {
    if (id < N_BYTE) {
        put_utf8(dst, visible_char(id));
    } else if (id < ID_TEXT_END) {
        const char *m = merges[id - N_BYTE], *gap = strchr(m, ' ');
        snprintf(dst, cap, "%.*s%s", (int)(gap - m), m, gap + 1);
    } else if (id < N_USED) {
        snprintf(dst, cap, "%s", controls[id - ID_TEXT_END]);
    } else {
        snprintf(dst, cap, "[PAD%d]", id);
    }
}

/* A token beyond the used ones of a vocabulary. */
static int put_unused(struct gguf_writer *w, int64_t id) {
    char text[32];
    int n = snprintf(text, sizeof text, "[PAD%lld]", (long long)id);
    return gguf_writer_str_elem(w, text, (size_t)n);
}

/* Array of n_vocab i32 through small pieces is not possible with gguf_writer_arr, so it is made whole. */
static int put_types(struct gguf_writer *w, int n_vocab) {
    int32_t *type = malloc((size_t)n_vocab * sizeof *type);
    if (!type) return err_set(ERR_NOMEM, "tokenizer: out of memory");
    for (int i = 0; i < n_vocab; i++)
        type[i] = i < ID_TEXT_END ? TOKEN_NORMAL : i < N_USED ? TOKEN_CONTROL : TOKEN_UNUSED;
    int rc = gguf_writer_arr(w, "tokenizer.ggml.token_type", GGUF_I32, n_vocab, type);
    free(type);
    return rc;
}

int synth_tokenizer(struct gguf_writer *w, int n_vocab) {
    if (n_vocab < 300) return err_set(ERR_ARG, "tokenizer: %d tokens, at least 300 are needed", n_vocab);
    put_str(w, "tokenizer.ggml.model", "gpt2");
    put_str(w, "tokenizer.ggml.pre", "qwen2");
    gguf_writer_str_arr(w, "tokenizer.ggml.tokens", n_vocab);
    for (int i = 0; i < n_vocab; i++) {
        char text[32];
        token_text(text, sizeof text, i);
        gguf_writer_str_elem(w, text, strlen(text));
    }
    int rc = put_types(w, n_vocab);
    if (rc) return rc;
    gguf_writer_str_arr(w, "tokenizer.ggml.merges", N_MERGE);
    for (int i = 0; i < N_MERGE; i++) gguf_writer_str_elem(w, merges[i], strlen(merges[i]));
    gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", ID_TEXT_END);
    gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", ID_TURN_END);
    gguf_writer_u32(w, "tokenizer.ggml.padding_token_id", ID_TEXT_END);
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", false);
    return gguf_writer_str(w, "tokenizer.chat_template", chat_template, sizeof chat_template - 1);
}

/* Copies an array of one entry per token and adds entries of value `unused` up to n_vocab. */
static int copy_padded(struct gguf_writer *w, const struct gguf_kv *kv, int n_vocab) {
    if (kv->elem_type == GGUF_STR) {
        int rc = gguf_writer_str_arr(w, kv->key, n_vocab);
        for (int64_t i = 0; i < n_vocab && !rc; i++) {
            size_t n = 0;
            const char *s = i < kv->n ? gguf_elem_str(kv, i, &n) : NULL;
            rc = s ? gguf_writer_str_elem(w, s, n) : put_unused(w, i);
        }
        return rc;
    }
    if (kv->elem_type != GGUF_I32 && kv->elem_type != GGUF_F32)
        return err_set(ERR_FORMAT, "%s: elements are %s, expected i32 or f32", kv->key, gguf_type_name(kv->elem_type));
    int32_t *all = calloc((size_t)n_vocab, sizeof *all); /* scores of unused tokens: 0, the same bits in f32 */
    if (!all) return err_set(ERR_NOMEM, "tokenizer: out of memory");
    memcpy(all, kv->data, (size_t)kv->n * sizeof *all);
    if (kv->elem_type == GGUF_I32)
        for (int64_t i = kv->n; i < n_vocab; i++) all[i] = TOKEN_UNUSED;
    int rc = gguf_writer_arr(w, kv->key, kv->elem_type, n_vocab, all);
    free(all);
    return rc;
}

int synth_copy_tokenizer(struct gguf_writer *w, const struct gguf *from, int n_vocab) {
    const struct gguf_kv *tokens = gguf_find(from, "tokenizer.ggml.tokens");
    if (!tokens || tokens->elem_type != GGUF_STR)
        return err_set(ERR_FORMAT, "%s: tokenizer.ggml.tokens is missing or no array of strings", gguf_path(from, 0));
    if (tokens->n > n_vocab)
        return err_set(ERR_ARG, "%s: its vocabulary of %lld tokens is larger than the %d of the shape",
                       gguf_path(from, 0), (long long)tokens->n, n_vocab);
    int rc = 0;
    for (int i = 0; i < gguf_n_kv(from) && !rc; i++) {
        const struct gguf_kv *kv = gguf_kv(from, i);
        if (strncmp(kv->key, "tokenizer.", 10)) continue;
        bool per_token = kv->type == GGUF_ARR && strcmp(kv->key, "tokenizer.ggml.merges") && kv->n == tokens->n;
        rc = per_token ? copy_padded(w, kv, n_vocab) : gguf_writer_copy_kv(w, kv);
    }
    return rc;
}
