/* pipe.c: see pipe.h. Loads are counted through all passes (`copied`, `got`, `done`); load number n is in slot n % n_slot. */
#include "offload/pipe.h"

#include "core/err.h"
#include "gpu/gpu.h"

#include <stdlib.h>
#include <string.h>

enum { HALVES = 2 };

struct slot {
    struct gpu_event *ready, *free;
    int load; /* in it, or on its way */
};

struct pipe {
    struct gpu *gpu;
    struct gpu_stream *compute, *copy;
    char *d_ring;
    size_t slot_bytes;
    int n_slot, n_load, tail;
    const struct pipe_load *loads;
    struct slot *slots;
    long copied, got, done; /* done <= got <= copied <= done + n_slot */
    long pass_end;          /* value of `done` when the pass is over */
    long pass_start;        /* number of its first load */
    int next;               /* index of the load to copy next */
    void *half[HALVES];     /* ?locked buffer */
    struct gpu_event *half_free[HALVES];
    int turn;
    struct pipe_stats stats;
};

static bool pageable(const struct pipe *p) {
    for (int i = 0; i < p->n_load; i++)
        for (int k = 0; k < p->loads[i].n_piece; k++)
            if (!p->loads[i].pieces[k].pinned) return true;
    return false;
}

static int check(const struct pipe *p) {
    if (p->n_slot < 1) return err_set(ERR_ARG, "pipe: a ring of %d slots", p->n_slot);
    for (int i = 0; i < p->n_load; i++)
        for (int k = 0; k < p->loads[i].n_piece; k++) {
            size_t end = p->loads[i].pieces[k].at + p->loads[i].pieces[k].bytes;
            if (end > p->slot_bytes)
                return err_set(ERR_ARG, "pipe: load %d needs %zu bytes, a slot of the ring has %zu", i, end, p->slot_bytes);
        }
    return 0;
}

int pipe_open(struct pipe **out, struct gpu *g, struct gpu_stream *compute, void *d_ring, int n_slot, size_t slot_bytes,
              const struct pipe_load *loads, int n_load, int tail) {
    struct pipe *p = calloc(1, sizeof *p);
    if (!p) return err_set(ERR_NOMEM, "pipe: out of memory");
    *p = (struct pipe){.gpu = g, .compute = compute, .d_ring = d_ring, .slot_bytes = slot_bytes, .n_slot = n_slot, .n_load = n_load,
                       .tail = tail, .loads = loads};
    int rc = check(p);
    if (!rc && !(p->slots = calloc((size_t)n_slot, sizeof *p->slots))) rc = err_set(ERR_NOMEM, "pipe: out of memory");
    if (!rc) rc = gpu_stream_open(&p->copy, g);
    for (int i = 0; i < n_slot && !rc; i++) {
        rc = gpu_event_open(&p->slots[i].ready, g, GPU_EVENT_ORDER);
        if (!rc) rc = gpu_event_open(&p->slots[i].free, g, GPU_EVENT_ORDER);
    }
    for (int i = 0; i < HALVES && !rc && pageable(p); i++) {
        rc = gpu_host_alloc(&p->half[i], g, PIPE_BOUNCE_BYTES);
        if (!rc) rc = gpu_event_open(&p->half_free[i], g, GPU_EVENT_ORDER);
    }
    if (rc) {
        pipe_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

int pipe_settle(struct pipe *p) { return gpu_stream_sync(p->copy); }

void pipe_close(struct pipe *p) {
    if (!p) return;
    if (p->copy) gpu_stream_sync(p->copy); /* copies ahead read memory that its owner may free next */
    for (int i = 0; i < HALVES; i++) {
        gpu_event_close(p->half_free[i]);
        gpu_host_free(p->gpu, p->half[i]);
    }
    for (int i = 0; i < p->n_slot && p->slots; i++) {
        gpu_event_close(p->slots[i].ready);
        gpu_event_close(p->slots[i].free);
    }
    gpu_stream_close(p->copy);
    free(p->slots);
    free(p);
}

/* --- copies -------------------------------------------------------------------------------------------------------------- */

static int copy_pageable(struct pipe *p, char *d, const char *src, size_t bytes) {
    int rc = 0;
    p->stats.pageable_bytes += (double)bytes;
    while (bytes && !rc) {
        size_t n = bytes < PIPE_BOUNCE_BYTES ? bytes : PIPE_BOUNCE_BYTES;
        int t = p->turn;
        rc = gpu_event_sync(p->half_free[t]);
        if (rc) break;
        memcpy(p->half[t], src, n);
        rc = gpu_copy_in(p->copy, d, p->half[t], n);
        if (!rc) rc = gpu_event_record(p->half_free[t], p->copy);
        p->turn = (t + 1) % HALVES;
        d += n, src += n, bytes -= n;
    }
    return rc;
}

static int copy_next(struct pipe *p) {
    struct slot *s = &p->slots[p->copied % p->n_slot];
    const struct pipe_load *l = &p->loads[p->next];
    char *d = p->d_ring + (size_t)(p->copied % p->n_slot) * p->slot_bytes;
    /* An event that was never recorded does not hold anything up. */
    int rc = gpu_stream_wait(p->copy, s->free);
    for (int i = 0; i < l->n_piece && !rc; i++) {
        const struct pipe_piece *c = &l->pieces[i];
        p->stats.bytes += (double)c->bytes;
        rc = c->pinned ? gpu_copy_in(p->copy, d + c->at, c->src, c->bytes) : copy_pageable(p, d + c->at, c->src, c->bytes);
    }
    if (!rc) rc = gpu_event_record(s->ready, p->copy);
    if (rc) return rc;
    s->load = p->next;
    p->stats.loads++;
    p->copied++;
    return 0;
}

/* What may be copied ahead: the rest of this pass, and of the next one what every pass takes. */
static bool may_copy(const struct pipe *p) {
    if (p->copied >= p->done + p->n_slot) return false;
    return p->copied < p->pass_end || p->next < p->n_load - p->tail;
}

static int run_ahead(struct pipe *p) {
    int rc = 0;
    while (!rc && may_copy(p)) {
        rc = copy_next(p);
        if (!rc) p->next = p->copied == p->pass_end ? 0 : p->next + 1;
    }
    return rc;
}

/* --- passes -------------------------------------------------------------------------------------------------------------- */

int pipe_begin(struct pipe *p, enum pipe_pass pass) {
    int n = pass == PIPE_ALL ? p->n_load : p->n_load - p->tail;
    if (p->done != p->pass_end || p->got != p->done) {
        /* The last pass was broken off. Whatever it had copied may still be read by what was enqueued: this point of the
         * compute stream is behind all of it, and the copies are in order among themselves. */
        for (int i = 0; i < p->n_slot; i++) {
            int rc = gpu_event_record(p->slots[i].free, p->compute);
            if (rc) return rc;
        }
        p->got = p->done = p->pass_end = p->copied;
        p->next = 0;
    }
    p->pass_start = p->done;
    p->pass_end = p->done + n;
    if (p->copied == p->pass_end) p->next = 0; /* all of it was copied ahead */
    return run_ahead(p);
}

int pipe_get(struct pipe *p, int load, const void **d_p) {
    struct slot *s = &p->slots[p->got % p->n_slot];
    if (p->got >= p->pass_end || load != p->got - p->pass_start) return err_set(ERR_ARG, "pipe: load %d is not the next one", load);
    if (p->got >= p->copied) return err_set(ERR_ARG, "pipe: load %d does not fit beside those that are held (%d slots)", load, p->n_slot);
    int rc = gpu_stream_wait(p->compute, s->ready);
    if (rc) return rc;
    *d_p = p->d_ring + (size_t)(p->got % p->n_slot) * p->slot_bytes;
    p->got++;
    return 0;
}

int pipe_done(struct pipe *p, int load) {
    struct slot *s = &p->slots[p->done % p->n_slot];
    if (p->done >= p->got || load != p->done - p->pass_start) return err_set(ERR_ARG, "pipe: load %d is not the oldest that is held", load);
    int rc = gpu_event_record(s->free, p->compute);
    if (rc) return rc;
    p->done++;
    return run_ahead(p);
}

void pipe_stats_get(const struct pipe *p, struct pipe_stats *s) { *s = p->stats; }
