/* tokenizer_pre.c: splits a text into the words inside of which tokens are merged. A table from pre-tokenizer names to
 * expressions, and their execution with PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/tokenizer_impl.h"

#include <stdlib.h>

#include "core/err.h"
#include "core/utf8.h"

/* --- expressions --- */

/* Insides of character classes. White is Unicode's White_Space, spelled out because PCRE2's \s also has U+180E. */
#define WHITE "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"

#define CONTRACTION "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])" /* ASCII only: (?i) would fold U+017F to s */
#define TAIL "|[" WHITE "]*[\\r\\n]+|[" WHITE "]+(?![^" WHITE "])|[" WHITE "]+"

#define RE_QWEN2 CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n]*" TAIL
#define RE_QWEN35                                                                                                      \
    CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^" WHITE "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" TAIL
#define RE_LLAMA3 CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n]*" TAIL
#define RE_GPT2                                                                                                        \
    "'(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^" WHITE "\\p{L}\\p{N}]+|[" WHITE "]+(?![^" WHITE "])|[" WHITE "]+"
#define CASED(after)                                                                                                   \
    "[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]*[" LOWER "]+" after "|[^\\r\\n\\p{L}\\p{N}]?[" UPPER "]+[" LOWER "]*" after
#define RE_TEKKEN CASED("") "|\\p{N}| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n/]*" TAIL
#define RE_O200K CASED("(?:" CONTRACTION ")?") "|\\p{N}{1,3}| ?[^" WHITE "\\p{L}\\p{N}]+[\\r\\n/]*" TAIL

#define MAX_STEPS 4
enum { FLAG_BOS = 1, FLAG_IGNORE_MERGES = 2 };

struct pre_rule {
    const char *names;           /* blank before and after each */
    const char *step[MAX_STEPS]; /* applied one after the other, each to the words that the previous one left */
    int flags;
    struct scan_rule scan; /* word 0: no hand scanner */
};

static const struct pre_rule rules[] = {
    {" qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan ", {RE_QWEN2}, 0, {PRE_L, 1}},
    {" qwen35 ", {RE_QWEN35}, 0, {PRE_L | PRE_M, 1}},
    {" llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 ",
     {RE_LLAMA3},
     FLAG_BOS | FLAG_IGNORE_MERGES,
     {PRE_L, 3}},
    {" dbrx smaug-bpe glm4 chatglm-bpe ", {RE_LLAMA3}, 0, {PRE_L, 3}},
    {" gpt-2 phi-2 mpt olmo jais exaone4 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat "
     "roberta-bpe mellum ",
     {RE_GPT2},
     0,
     {0, 0}},
    {" smollm starcoder refact command-r codeshell exaone minerva-7b ", {"\\p{N}", RE_GPT2}, 0, {0, 0}},
    {" default ", {"[\\p{P}$+<=>^~|]+", RE_GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}, 0, {0, 0}},
    {" tekken ", {RE_TEKKEN}, FLAG_BOS | FLAG_IGNORE_MERGES, {0, 0}},
    {" gpt-4o o200k llama4 ", {RE_O200K}, FLAG_IGNORE_MERGES, {0, 0}},
};

static const struct pre_rule *rule_find(const char *name) {
    size_t n = strlen(name);
    if (!n || strchr(name, ' ')) return NULL;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (const char *p = rules[i].names; (p = strstr(p, name)); p++)
            if (p[-1] == ' ' && p[n] == ' ') return &rules[i]; /* the list begins with a blank, the name does not */
    return NULL;
}

struct tok_pre {
    const struct pre_rule *rule;
    pcre2_code *re[MAX_STEPS];
    int n_re;
    uint8_t *cls; /* [0x110000] enum pre_class bits; NULL without a hand scanner */
};

static int compile(pcre2_code **out, const char *expression) {
    int code;
    size_t at;
    *out = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    if (!*out) {
        char why[120] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return err_set(code == PCRE2_ERROR_NOMEMORY ? ERR_NOMEM : ERR_UNSUPPORTED,
                       "pre-tokenizer: PCRE2 cannot compile at %zu: %s", at, why);
    }
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE); /* without a JIT the interpreter does it, slower */
    return 0;
}

/* --- classes of characters --- */

/* Where characters with a category we ask for are: planes 0 to 3, and the variation selectors. */
static const struct {
    uint32_t begin, end;
} assigned[] = {{0, 0xD800}, {0xE000, 0x40000}, {0xE0000, 0xE1000}};

static const uint16_t white_space[] = {9,      0xA,    0xB,    0xC,    0xD,    0x20,   0x85,   0xA0,   0x1680,
                                       0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                       0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};

/* Marks the runs of one range of characters. PCRE2 is asked, so that the scanner and the expressions know the same
 * version of Unicode, and no table has to be kept. */
static int classify_range(uint8_t *cls, pcre2_code *re, pcre2_match_data *md, uint32_t begin, uint32_t end, char *text) {
    size_t n = 0;
    uint32_t cp;
    for (cp = begin; cp < end; cp++) n += (size_t)utf8_encode(cp, text + n);
    for (size_t at = 0; at < n;) {
        int rc = pcre2_match(re, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, md, NULL);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) return err_set(ERR_NOMEM, "pre-tokenizer: PCRE2 fails to match (%d)", rc);
        const size_t *ov = pcre2_get_ovector_pointer(md);
        uint8_t bit = (uint8_t)(1 << (rc - 2)); /* group 1: L, 2: M, 3: N */
        for (at = ov[0]; at < ov[1];) {
            at += (size_t)utf8_decode(text + at, n - at, &cp);
            cls[cp] = bit;
        }
    }
    return 0;
}

static int classify(uint8_t **out) {
    pcre2_code *re = NULL;
    uint8_t *cls = calloc(0x110000, 1);
    char *text = malloc(4 * 0x40000);
    pcre2_match_data *md = pcre2_match_data_create(4, NULL);
    int rc = cls && text && md ? compile(&re, "(\\p{L}+)|(\\p{M}+)|(\\p{N}+)") : err_set(ERR_NOMEM, "pre-tokenizer: out of memory");
    for (size_t i = 0; !rc && i < sizeof assigned / sizeof *assigned; i++)
        rc = classify_range(cls, re, md, assigned[i].begin, assigned[i].end, text);
    for (size_t i = 0; !rc && i < sizeof white_space / sizeof *white_space; i++) cls[white_space[i]] |= PRE_W;
    if (!rc) {
        cls['\r'] |= PRE_CRLF;
        cls['\n'] |= PRE_CRLF;
        *out = cls;
        cls = NULL;
    }
    pcre2_match_data_free(md);
    pcre2_code_free(re);
    free(text);
    free(cls);
    return rc;
}

/* --- open, close --- */

int pre_open(struct tok_pre **out, const char *name, enum pre_path path) {
    if (!name) name = "default";
    const struct pre_rule *rule = rule_find(name);
    if (!rule)
        return err_set(ERR_UNSUPPORTED, "tokenizer.ggml.pre: no pre-tokenizer \"%.64s\" here, only qwen2, qwen35, llama-bpe, glm4, gpt-2, "
                       "smollm, default, tekken, gpt-4o and their aliases",
                       name);
    struct tok_pre *p = calloc(1, sizeof *p);
    if (!p) return err_set(ERR_NOMEM, "pre-tokenizer: out of memory");
    p->rule = rule;
    int rc = 0;
    if (rule->scan.word && path == PRE_FASTEST) {
        rc = classify(&p->cls);
    } else {
        for (; !rc && p->n_re < MAX_STEPS && rule->step[p->n_re]; p->n_re++) rc = compile(&p->re[p->n_re], rule->step[p->n_re]);
    }
    if (rc) {
        pre_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

void pre_close(struct tok_pre *p) {
    if (!p) return;
    for (int i = 0; i < MAX_STEPS; i++) pcre2_code_free(p->re[i]);
    free(p->cls);
    free(p);
}

bool pre_adds_bos(const struct tok_pre *p) { return p->rule->flags & FLAG_BOS; }
bool pre_ignores_merges(const struct tok_pre *p) { return p->rule->flags & FLAG_IGNORE_MERGES; }

/* --- splitting --- */

struct split {
    const struct tok_pre *pre;
    pcre2_match_data *md;
    pcre2_match_context *mc; /* for the interpreter only */
    const char *text;        /* whole text: words are reported relative to it */
    pre_sink sink;
    void *ctx;
};

/* Like pcre2_match. A word too long for the JIT's stack goes to the interpreter, with no limit of its own. */
static int match(struct split *sp, int step, const char *s, size_t n, size_t at) {
    int rc = pcre2_match(sp->pre->re[step], (PCRE2_SPTR)s, n, at, PCRE2_NO_UTF_CHECK, sp->md, sp->mc);
    if (rc >= 0 || rc == PCRE2_ERROR_NOMATCH) return rc;
    return pcre2_match(sp->pre->re[step], (PCRE2_SPTR)s, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, sp->md, sp->mc);
}

static int split_step(struct split *sp, int step, size_t begin, size_t end) {
    if (begin == end) return 0;
    if (step == sp->pre->n_re) return sp->sink(sp->ctx, begin, end);
    const char *s = sp->text + begin; /* a word of its own: "not followed by" must not see what comes after it */
    size_t n = end - begin, at = 0;
    while (at < n) {
        int rc = match(sp, step, s, n, at);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) return err_set(ERR_NOMEM, "pre-tokenizer: PCRE2 fails to match (%d)", rc);
        const size_t *ov = pcre2_get_ovector_pointer(sp->md);
        size_t from = ov[0], to = ov[1]; /* never empty: no expression matches the empty text */
        rc = split_step(sp, step + 1, begin + at, begin + from);
        if (!rc) rc = split_step(sp, step + 1, begin + from, begin + to);
        if (rc) return rc;
        at = to;
    }
    return split_step(sp, step + 1, begin + at, end);
}

static int split_scan(const struct tok_pre *p, const char *text, size_t n, pre_sink sink, void *ctx) {
    for (size_t i = 0; i < n;) {
        size_t end = scan_word(&p->rule->scan, p->cls, text, i, n);
        int rc = sink(ctx, i, end);
        if (rc) return rc;
        i = end;
    }
    return 0;
}

int pre_split(const struct tok_pre *p, const char *text, size_t n, pre_sink sink, void *ctx) {
    if (p->cls) return split_scan(p, text, n, sink, ctx);
    struct split sp = {p, pcre2_match_data_create(1, NULL), pcre2_match_context_create(NULL), text, sink, ctx};
    int rc = ERR_NOMEM;
    if (sp.md && sp.mc) {
        pcre2_set_match_limit(sp.mc, UINT32_MAX);
        pcre2_set_depth_limit(sp.mc, UINT32_MAX);
        pcre2_set_heap_limit(sp.mc, UINT32_MAX);
        rc = split_step(&sp, 0, 0, n);
    } else {
        err_set(ERR_NOMEM, "pre-tokenizer: out of memory");
    }
    pcre2_match_context_free(sp.mc);
    pcre2_match_data_free(sp.md);
    return rc;
}
