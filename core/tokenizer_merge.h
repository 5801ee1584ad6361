/* tokenizer_merge.h: joins neighbours of a word in the order of their rank, leftmost first among equals, with a heap:
 * n log n for any word. Included by tokenizer_bpe.c and tokenizer_spm.c, which say what a pair is worth, so that the
 * question is compiled into the loop. Private. */
#ifndef LH_CORE_TOKENIZER_MERGE_H
#define LH_CORE_TOKENIZER_MERGE_H

#include "core/tokenizer_impl.h"

#define MERGE_NONE UINT32_MAX

/* Node i of a word stands for the bytes [i, next); nodes are numbered by their first byte. */
struct merge_node {
    uint32_t prev, next; /* of the first node prev is MERGE_NONE; of the last node next is the length of the word */
    uint32_t rank;       /* of joining this node and the next one: lower first; MERGE_NONE: they do not join */
    int32_t sym;         /* for the caller: symbol of this node */
};
_Static_assert(sizeof(struct merge_node) == 16, "four in a cache line: long words are bound by it");

#define MERGE_LONG 256 /* bytes up to which a plain heap does */

/* A heap of 64-bit keys with four children per entry. Every join takes one candidate out and puts at most two in, so
 * 2 * n entries are enough for a word of n bytes. */

static inline void heap_up(uint64_t *h, size_t i, uint64_t key) {
    while (i) {
        size_t up = (i - 1) / 4;
        if (h[up] <= key) break;
        h[i] = h[up];
        i = up;
    }
    h[i] = key;
}

static inline void heap_down(uint64_t *h, size_t n, size_t i, uint64_t key) {
    for (;;) {
        size_t c = 4 * i + 1, best = c, last = c + 4 < n ? c + 4 : n;
        if (c >= n) break;
        for (size_t k = c + 1; k < last; k++)
            if (h[k] < h[best]) best = k;
        if (h[best] >= key) break;
        h[i] = h[best];
        i = best;
    }
    h[i] = key;
}

/* Candidates of a long word. Those of one rank mostly turn up from left to right, so each rank has a queue and only the
 * ranks in use are in a heap; what turns up out of order goes to a heap of its own. Runs of one character, where a
 * plain heap gets deep and out of cache, stay linear. */
struct merge_queue {
    struct merge_fifo {
        uint32_t head, tail; /* in pool; 0: empty */
    } *fifo;                 /* [n_ranks of the tokenizer] all empty between words */
    uint64_t *ranks;         /* heap of the ranks whose queue is not empty, each rank << 32 */
    size_t n_ranks;
    uint64_t *pool; /* [3 * n + 1] next << 32 | node; 0 stays 0. Places are not used again: n at first, 2 per join */
    uint32_t n_pool;
    uint64_t *heap; /* rank << 32 | node */
    size_t n_heap;
};

static inline void merge_put(struct merge_queue *q, uint32_t rank, uint32_t node) {
    struct merge_fifo *f = &q->fifo[rank];
    if (f->head && (uint32_t)q->pool[f->tail] > node) {
        heap_up(q->heap, q->n_heap++, (uint64_t)rank << 32 | node);
        return;
    }
    uint32_t at = ++q->n_pool;
    q->pool[at] = node;
    if (f->head)
        q->pool[f->tail] |= (uint64_t)at << 32;
    else
        heap_up(q->ranks, q->n_ranks++, (uint64_t)rank << 32);
    if (!f->head) f->head = at;
    f->tail = at;
}

/* Takes the candidate of the lowest rank, leftmost among equals. false: none left. The nodes of one rank are scattered
 * over the word: those of the next one are fetched while this one is joined. */
static inline bool merge_take(struct merge_queue *q, const struct merge_node *node, uint64_t *key) {
    uint64_t in_heap = q->n_heap ? q->heap[0] : UINT64_MAX, in_fifo = UINT64_MAX;
    struct merge_fifo *f = NULL;
    if (q->n_ranks) {
        f = &q->fifo[q->ranks[0] >> 32];
        in_fifo = q->ranks[0] | (uint32_t)q->pool[f->head];
    }
    if (in_heap < in_fifo) {
        *key = in_heap;
        if (--q->n_heap) heap_down(q->heap, q->n_heap, 0, q->heap[q->n_heap]);
        return true;
    }
    if (!f) return false;
    *key = in_fifo;
    f->head = (uint32_t)(q->pool[f->head] >> 32);
    __builtin_prefetch(&node[(uint32_t)q->pool[f->head]]);
    __builtin_prefetch(&q->pool[q->pool[f->head] >> 32]);
    if (!f->head && --q->n_ranks) heap_down(q->ranks, q->n_ranks, 0, q->ranks[q->n_ranks]);
    return true;
}

/* Sets the rank of node i, whose next node exists and whose rank is MERGE_NONE. */
typedef void (*merge_rank_fn)(const void *ctx, struct merge_node *node, uint32_t i);

/* What a merge works with. */
struct merge_rule {
    merge_rank_fn rank;
    const void *ctx;
    const int32_t *joined; /* [n_ranks]? symbol that a join of this rank makes; NULL: sym is not kept up */
};

/* Joins node i with the next one. Their new neighbourhood has new ranks: those of node i and of *left (MERGE_NONE: i is
 * the first). */
static inline __attribute__((always_inline)) void merge_join(struct merge_node *node, uint32_t n, uint32_t i,
                                                             uint32_t *left, const struct merge_rule *m) {
    uint32_t gone = node[i].next;
    if (m->joined) node[i].sym = m->joined[node[i].rank];
    node[i].next = node[gone].next;
    node[gone].rank = node[i].rank = MERGE_NONE;
    if (node[i].next < n) {
        node[node[i].next].prev = i;
        m->rank(m->ctx, node, i);
    }
    *left = node[i].prev;
    if (*left == MERGE_NONE) return;
    node[*left].rank = MERGE_NONE;
    m->rank(m->ctx, node, *left);
}

/* Ranks of all neighbours of a fresh word. */
static inline __attribute__((always_inline)) void merge_rank_all(struct merge_node *node, uint32_t n,
                                                                 const struct merge_rule *m) {
    for (uint32_t i = 0; i < n; i = node[i].next) {
        node[i].rank = MERGE_NONE;
        if (node[i].next < n) m->rank(m->ctx, node, i);
    }
}

static inline __attribute__((always_inline)) void merge_long(struct merge_node *node, uint32_t n, struct merge_queue *q,
                                                             const struct merge_rule *m) {
    q->n_ranks = q->n_heap = q->n_pool = 0;
    merge_rank_all(node, n, m);
    for (uint32_t i = 0; i < n; i = node[i].next)
        if (node[i].rank != MERGE_NONE) merge_put(q, node[i].rank, i);
    for (uint64_t key; merge_take(q, node, &key);) {
        uint32_t i = (uint32_t)key, left;
        if (node[i].rank != key >> 32) continue; /* one of the two has changed since */
        merge_join(node, n, i, &left, m);
        if (node[i].rank != MERGE_NONE) merge_put(q, node[i].rank, i);
        if (left != MERGE_NONE && node[left].rank != MERGE_NONE) merge_put(q, node[left].rank, left);
    }
}

static inline __attribute__((always_inline)) void merge_short(struct merge_node *node, uint32_t n, uint64_t *h,
                                                              const struct merge_rule *m) {
    size_t n_heap = 0;
    merge_rank_all(node, n, m);
    for (uint32_t i = 0; i < n; i = node[i].next)
        if (node[i].rank != MERGE_NONE) heap_up(h, n_heap++, (uint64_t)node[i].rank << 32 | i);
    while (n_heap) {
        uint64_t key = h[0];
        uint32_t i = (uint32_t)key, left;
        if (--n_heap) heap_down(h, n_heap, 0, h[n_heap]);
        if (node[i].rank != key >> 32) continue;
        merge_join(node, n, i, &left, m);
        if (node[i].rank != MERGE_NONE) heap_up(h, n_heap++, (uint64_t)node[i].rank << 32 | i);
        if (left != MERGE_NONE && node[left].rank != MERGE_NONE)
            heap_up(h, n_heap++, (uint64_t)node[left].rank << 32 | left);
    }
}

/* node: the list of a word of n bytes, sym set if it is used. q: reserved for n (tok_pass_reserve). */
static inline __attribute__((always_inline)) void merge_word(struct merge_node *node, uint32_t n, struct merge_queue *q,
                                                             const struct merge_rule *m) {
    if (n <= MERGE_LONG)
        merge_short(node, n, q->heap, m);
    else
        merge_long(node, n, q, m);
}

#endif
