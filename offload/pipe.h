/* pipe.h: streams weights from host memory into a ring of VRAM slots, ahead of use, on a copy stream of its own.
 *
 * What is streamed is a fixed list of loads, each of which fills a slot; a pass takes them in order and the next pass starts
 * over, so copies run ahead across layers and across passes. Each slot has two events: "ready" for the consumer (compute
 * stream), "free" for the copies. Nothing waits on the host, except for memory that could not be page-locked: that goes
 * through a small locked buffer, and the host waits for its halves.
 * Not thread-safe: one pipe belongs to one session. Functions return 0 or a negative enum err; err_text() has the reason.
 * After ERR_DEVICE the pipe can only be closed. */
#ifndef LH_OFFLOAD_PIPE_H
#define LH_OFFLOAD_PIPE_H

#include <stdbool.h>
#include <stddef.h>

struct gpu;
struct gpu_stream;
struct pipe;

/* One copy: host memory that is locked as a whole, or not at all. */
struct pipe_piece {
    const void *src;
    size_t at, bytes; /* place in the slot */
    bool pinned;
};
struct pipe_load {
    const struct pipe_piece *pieces; /* [n_piece] */
    int n_piece;
};

enum { PIPE_BOUNCE_BYTES = 4 << 20 }; /* of each half of the locked buffer */

/* loads [n_load] with their pieces are borrowed. d_ring: n_slot slots of slot_bytes, the caller's. tail: loads at the end of
 * the list that only some passes take (the output matrix). ERR_ARG: a load is larger than a slot, or n_slot < 1. */
int pipe_open(struct pipe **out, struct gpu *g, struct gpu_stream *compute, void *d_ring, int n_slot, size_t slot_bytes,
              const struct pipe_load *loads, int n_load, int tail);
/* Waits until no copy is under way, so that the ring and the loads may be given up. */
int pipe_settle(struct pipe *p);
void pipe_close(struct pipe *p);

/* Starts a pass that takes all loads, or all but the tail. What was copied ahead for it is kept. After a pass that was broken
 * off: starts over. */
enum pipe_pass { PIPE_ALL, PIPE_NO_TAIL };
int pipe_begin(struct pipe *p, enum pipe_pass pass);

/* Makes the compute stream wait (on the device) until the load is in VRAM, and gives its address. Loads come in order; several
 * may be held. *d_p stays valid until pipe_done. ERR_ARG: out of order, or more are held than there are slots. */
int pipe_get(struct pipe *p, int load, const void **d_p);

/* The compute stream needs the oldest load that is held no longer, once it has done what it was given so far. */
int pipe_done(struct pipe *p, int load);

/* Since pipe_open. */
struct pipe_stats {
    double bytes, pageable_bytes;
    long loads;
};
void pipe_stats_get(const struct pipe *p, struct pipe_stats *s);

#endif
