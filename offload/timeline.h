/* timeline.h: replays a plan as a schedule of what happens when: GPU, copies to it, the CPU pool, all reading the same host
 * memory. Copies run ahead as far as ring and staging slots allow, across layers and passes; passes repeat until they take
 * the same time, and the last one is kept. The planner adds up averages, this follows each piece: they must agree.
 * Pure functions on data; a timeline belongs to its caller. */
#ifndef LH_OFFLOAD_TIMELINE_H
#define LH_OFFLOAD_TIMELINE_H

#include "offload/plan.h"

#include <stdio.h>

enum timeline_lane { LANE_GPU, LANE_H2D, LANE_CPU, LANE_COUNT };
enum timeline_kind { TIMELINE_MIXER, TIMELINE_ATTN, TIMELINE_FFN, TIMELINE_HEAD, TIMELINE_KV, TIMELINE_KINDS }; /* KV: its copies */

struct timeline_event {
    enum timeline_lane lane;
    enum timeline_kind kind;
    int il;                    /* -1: head */
    double start_s, end_s;     /* from the start of the pass; copies for it may have started before */
    double bytes;              /* copied, or read by the CPU */
};

/* Seconds by kind of unit. */
struct timeline_use {
    double gpu_s, cpu_s, copy_s;
    double exposed_s;          /* waited for copies */
    double cpu_exposed_s;      /* the CPU's part beyond the GPU's beside it */
};

struct timeline {
    double step_s;
    double busy_s[LANE_COUNT];
    double exposed_s, hidden_s; /* of copies: waited for, and beside other work */
    struct timeline_use use[TIMELINE_KINDS];
    int n_event;
    struct timeline_event *events; /* [n_event] */
    char title[120];
};

struct plan_work;

/* A decode pass at the plan's depth, or the pass in the middle of its prompt. ERR_ARG: a plan without a GPU or rates. */
int timeline_open(struct timeline **out, const struct plan *p, const struct model *m, const struct plan_request *r, enum plan_phase_id phase);
/* The same of sizes that were made before. */
int timeline_of(struct timeline **out, const struct plan *p, const struct plan_work *w, enum plan_phase_id phase);
void timeline_close(struct timeline *t);

/* Lanes as rows of characters with what was hidden and exposed. ERR_IO for the file, which is replaced in one step. */
void timeline_text(const struct timeline *t, FILE *to);
int timeline_svg(const struct timeline *t, const char *path);

#endif
