/* arch.c: the table of model families. */
#include "core/arch.h"

#include <string.h>

#define HYBRID ARCH_QK_NORM | ARCH_HYBRID
#define HYBRID_MOE HYBRID | ARCH_MUST_EXPERTS | ARCH_EXPERT_NORM | ARCH_SHARED_EXPERT

static const struct arch table[] = {
    {.name = "llama", .pairing = ROPE_NORM, .act = ACT_SILU, .flags = ARCH_MAY_EXPERTS | ARCH_EXPERT_NORM},
    {.name = "qwen2", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = ARCH_QKV_BIAS},
    {.name = "qwen3", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = ARCH_QK_NORM},
    {.name = "qwen3moe", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = ARCH_QK_NORM | ARCH_MUST_EXPERTS | ARCH_EXPERT_NORM},
    {.name = "gemma3", .pairing = ROPE_NEOX, .act = ACT_GELU, .window_period = 6, .window_base = 10000,
     .flags = ARCH_QK_NORM | ARCH_POST_NORM | ARCH_EMBD_SCALE | ARCH_BIG_SCALE},
    {.name = "phi3", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = ARCH_FUSED_GATE},
    {.name = "qwen2moe", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = ARCH_QKV_BIAS | ARCH_MUST_EXPERTS | ARCH_SHARED_EXPERT},
    {.name = "qwen3next", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = HYBRID_MOE},
    {.name = "qwen35", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = HYBRID | ARCH_TILED},
    {.name = "qwen35moe", .pairing = ROPE_NEOX, .act = ACT_SILU, .flags = HYBRID_MOE | ARCH_TILED},
};

const struct arch *arch_at(int i) { return i >= 0 && i < (int)(sizeof table / sizeof *table) ? &table[i] : NULL; }

const struct arch *arch_find(const char *name, size_t bytes) {
    const struct arch *a;
    for (int i = 0; (a = arch_at(i)); i++)
        if (strlen(a->name) == bytes && !memcmp(a->name, name, bytes)) return a;
    return NULL;
}
