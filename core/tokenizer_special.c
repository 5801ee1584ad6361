/* tokenizer_special.c: cuts special tokens out of a text.
 * The definition is one search per token, longest token first, each from the left in what is still uncut. The same
 * result in one pass: an Aho-Corasick automaton over the reversed texts reads the text backwards and so knows, at every
 * position, the longest special token that begins there and all shorter ones. Where these do not overlap, that is it.
 * Otherwise a heap takes them in the order (longest, lowest id, leftmost), trying the next shorter one where the space
 * left is too small. */
#include "core/tokenizer_impl.h"

#include <stdlib.h>

#include "core/err.h"

struct node {
    uint32_t fail;  /* node of the longest proper suffix (a prefix, read forwards) that is in the trie */
    uint32_t match; /* nearest node on the fail chain, itself excluded, that is a token; 0: none */
    uint32_t depth; /* bytes */
    int32_t id;     /* -1: no token ends here */
};

struct edge {
    uint64_t key; /* parent << 8 | byte, plus 1; 0: empty */
    uint32_t child;
};

struct tok_special {
    struct node *node; /* [n] node 0 is the root */
    uint32_t n;
    struct edge *edge; /* [mask + 1] open addressing */
    size_t mask;
    uint32_t first[256]; /* edges of the root, for speed */
    bool *user;          /* [n] the node's token is recognised everywhere */
    int n_tokens, n_user;
};

static size_t edge_slot(const struct tok_special *sp, uint64_t key) {
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15u >> 20) & sp->mask;
    while (sp->edge[i].key && sp->edge[i].key != key) i = (i + 1) & sp->mask;
    return i;
}

static uint64_t edge_key(uint32_t parent, unsigned char byte) { return ((uint64_t)parent << 8 | byte) + 1; }

static uint32_t child_of(const struct tok_special *sp, uint32_t parent, unsigned char byte) {
    return parent ? sp->edge[edge_slot(sp, edge_key(parent, byte))].child : sp->first[byte];
}

static uint32_t step(const struct tok_special *sp, uint32_t state, unsigned char byte) {
    for (;;) {
        uint32_t to = child_of(sp, state, byte);
        if (to || !state) return to;
        state = sp->node[state].fail;
    }
}

static bool is_special(uint8_t type) { return type == TOK_UNKNOWN || type == TOK_CONTROL || type == TOK_USER; }

/* Adds a reversed text. Of equal texts the first id counts. */
static void insert(struct tok_special *sp, const char *p, size_t n, int32_t id, bool user) {
    uint32_t at = 0;
    while (n-- > 0) {
        unsigned char byte = (unsigned char)p[n];
        uint32_t to = child_of(sp, at, byte);
        if (!to) {
            to = sp->n++;
            sp->node[to] = (struct node){.depth = sp->node[at].depth + 1, .id = -1};
            uint64_t key = edge_key(at, byte);
            sp->edge[edge_slot(sp, key)] = (struct edge){key, to};
            if (!at) sp->first[byte] = to;
        }
        at = to;
    }
    if (!at || sp->node[at].id >= 0) return;
    sp->node[at].id = id;
    sp->user[at] = user;
    sp->n_tokens++;
    sp->n_user += user;
}

/* Edges in the order of the depth of their parent, so that fail links of shorter texts are there when needed. */
static int by_depth(const void *a, const void *b, void *ctx) {
    const struct tok_special *sp = ctx;
    const struct edge *x = a, *y = b;
    uint32_t dx = sp->node[x->child].depth, dy = sp->node[y->child].depth;
    return dx < dy ? -1 : dx > dy ? 1 : (x->child > y->child) - (x->child < y->child);
}

static int link_nodes(struct tok_special *sp) {
    struct edge *sorted = malloc(sp->n * sizeof *sorted);
    if (!sorted) return err_set(ERR_NOMEM, "tokenizer: out of memory for special tokens");
    size_t n = 0;
    for (size_t i = 0; i <= sp->mask; i++)
        if (sp->edge[i].key) sorted[n++] = sp->edge[i];
    qsort_r(sorted, n, sizeof *sorted, by_depth, sp);
    for (size_t i = 0; i < n; i++) {
        uint32_t parent = (uint32_t)((sorted[i].key - 1) >> 8);
        struct node *child = &sp->node[sorted[i].child];
        child->fail = parent ? step(sp, sp->node[parent].fail, (unsigned char)(sorted[i].key - 1)) : 0;
        child->match = sp->node[child->fail].id >= 0 ? child->fail : sp->node[child->fail].match;
    }
    free(sorted);
    return 0;
}

int special_open(struct tok_special **out, const struct tok_symbols *s, const uint8_t *type, int32_t n_vocab) {
    size_t bytes = 1;
    for (int32_t i = 0; i < n_vocab; i++)
        if (is_special(type[i])) bytes += s->off[i + 1] - s->off[i];
    if (bytes > UINT32_MAX / 2) return err_set(ERR_FORMAT, "tokenizer: special tokens hold %zu bytes, limit 2 GiB", bytes);
    size_t slots = 64;
    while (slots < 2 * bytes) slots *= 2;
    struct tok_special *sp = calloc(1, sizeof *sp);
    if (!sp) return err_set(ERR_NOMEM, "tokenizer: out of memory for special tokens");
    sp->node = calloc(bytes, sizeof *sp->node);
    sp->user = calloc(bytes, sizeof *sp->user);
    sp->edge = calloc(slots, sizeof *sp->edge);
    sp->mask = slots - 1;
    int rc = 0;
    if (!sp->node || !sp->user || !sp->edge) {
        rc = err_set(ERR_NOMEM, "tokenizer: out of memory for special tokens");
    } else {
        sp->node[0].id = -1;
        sp->n = 1;
        for (int32_t i = 0; i < n_vocab; i++)
            if (is_special(type[i])) insert(sp, s->bytes + s->off[i], s->off[i + 1] - s->off[i], i, type[i] == TOK_USER);
        rc = link_nodes(sp);
    }
    if (rc) {
        special_close(sp);
        return rc;
    }
    *out = sp;
    return 0;
}

void special_close(struct tok_special *sp) {
    if (!sp) return;
    free(sp->node);
    free(sp->user);
    free(sp->edge);
    free(sp);
}

/* --- finding --- */

struct found {
    size_t pos;
    uint32_t node;
};

struct search {
    const struct tok_special *sp;
    bool parse;
    const struct tok_span *plain;
    size_t n_plain;
    uint8_t *taken;     /* [n]? bytes that belong to a token already; NULL: none yet */
    struct found *heap; /* at first a list, by descending position */
    size_t n_heap, cap_heap;
    bool overlap; /* some of them do */
};

/* Does [begin, end) touch a plain range? */
static bool touches_plain(const struct search *s, size_t begin, size_t end) {
    size_t lo = 0, hi = s->n_plain; /* first range that ends after begin */
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (s->plain[mid].end <= begin)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < s->n_plain && s->plain[lo].begin < end; lo++)
        if (s->plain[lo].begin < s->plain[lo].end) return true; /* an empty range touches nothing */
    return false;
}

/* The longest token at `pos` on the chain from `node` on that may stand there and is free; 0: none. All that is taken
 * is at least as long as what is asked for, so looking at both ends is enough. */
static uint32_t fitting(const struct search *s, uint32_t node, size_t pos) {
    if (node && s->sp->node[node].id < 0) node = s->sp->node[node].match;
    for (; node; node = s->sp->node[node].match) {
        size_t end = pos + s->sp->node[node].depth;
        if (s->taken && s->taken[end - 1]) continue;
        if (s->sp->user[node] || (s->parse && !touches_plain(s, pos, end))) return node;
    }
    return 0;
}

static bool before(const struct search *s, struct found a, struct found b) {
    const struct node *x = &s->sp->node[a.node], *y = &s->sp->node[b.node];
    if (x->depth != y->depth) return x->depth > y->depth;
    if (x->id != y->id) return x->id < y->id;
    return a.pos < b.pos;
}

static int append(struct search *s, struct found f) {
    if (s->n_heap == s->cap_heap) {
        size_t cap = s->cap_heap ? s->cap_heap * 2 : 64;
        struct found *heap = realloc(s->heap, cap * sizeof *heap);
        if (!heap) return err_set(ERR_NOMEM, "tokenizer: out of memory for %zu special tokens in the text", cap);
        s->heap = heap;
        s->cap_heap = cap;
    }
    s->heap[s->n_heap++] = f;
    return 0;
}

static int find_all(struct search *s, const char *text, size_t n) {
    uint32_t state = 0;
    for (size_t pos = n, next = n; pos-- > 0;) {
        state = step(s->sp, state, (unsigned char)text[pos]);
        if (!state) continue;
        uint32_t node = fitting(s, state, pos);
        if (!node) continue;
        s->overlap |= pos + s->sp->node[node].depth > next;
        next = pos;
        int rc = append(s, (struct found){pos, node});
        if (rc) return rc;
    }
    return 0;
}

static void sift_down(struct search *s, size_t i) {
    struct found f = s->heap[i];
    for (;;) {
        size_t c = 2 * i + 1;
        if (c >= s->n_heap) break;
        if (c + 1 < s->n_heap && before(s, s->heap[c + 1], s->heap[c])) c++;
        if (!before(s, s->heap[c], f)) break;
        s->heap[i] = s->heap[c];
        i = c;
    }
    s->heap[i] = f;
}

static struct tok_cut cut_of(const struct search *s, struct found f) {
    const struct node *t = &s->sp->node[f.node];
    return (struct tok_cut){f.pos, f.pos + t->depth, t->id};
}

static int by_begin(const void *a, const void *b) {
    const struct tok_cut *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Empties the heap into cuts[], which has room for as many as were found. Whatever is at the top either becomes a token,
 * or falls out, or comes back shorter. */
static void take_overlapping(struct search *s, struct tok_cut *cuts, size_t *n_cuts) {
    size_t n = 0;
    for (size_t i = s->n_heap / 2; i-- > 0;) sift_down(s, i);
    while (s->n_heap) {
        struct found f = s->heap[0];
        uint32_t node = s->taken[f.pos] ? 0 : fitting(s, f.node, f.pos);
        if (node && node == f.node) {
            memset(s->taken + f.pos, 1, s->sp->node[node].depth);
            cuts[n++] = cut_of(s, f);
            node = 0;
        }
        s->heap[0] = node ? (struct found){f.pos, node} : s->heap[--s->n_heap];
        if (s->n_heap) sift_down(s, 0);
    }
    qsort(cuts, n, sizeof *cuts, by_begin);
    *n_cuts = n;
}

static int take(struct search *s, size_t n_text, struct tok_cut **cuts, size_t *n_cuts) {
    if (!s->n_heap) return 0;
    *cuts = malloc(s->n_heap * sizeof **cuts);
    s->taken = s->overlap ? calloc(n_text, 1) : NULL;
    if (!*cuts || (s->overlap && !s->taken))
        return err_set(ERR_NOMEM, "tokenizer: out of memory for %zu special tokens in the text", s->n_heap);
    if (s->overlap) {
        take_overlapping(s, *cuts, n_cuts);
    } else {
        for (size_t i = s->n_heap; i-- > 0;) (*cuts)[(*n_cuts)++] = cut_of(s, s->heap[i]);
    }
    return 0;
}

int special_find(const struct tok_special *sp, const char *text, size_t n, bool parse, const struct tok_span *plain,
                 size_t n_plain, struct tok_cut **cuts, size_t *n_cuts) {
    *cuts = NULL;
    *n_cuts = 0;
    if (!n || !(parse ? sp->n_tokens : sp->n_user)) return 0;
    struct search s = {.sp = sp, .parse = parse, .plain = plain, .n_plain = n_plain};
    int rc = find_all(&s, text, n);
    if (!rc) rc = take(&s, n, cuts, n_cuts);
    free(s.heap);
    free(s.taken);
    if (rc) {
        free(*cuts);
        *cuts = NULL;
    }
    return rc;
}
