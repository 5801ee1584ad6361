/* machine.h: what a computer can do, as data: one GPU, its link, the host memory and the CPU. The same description comes
 * from measuring, from a file, or from the built-in list; planning, checking claims and the emulator read it.
 * Rates: gbps = 1e9 bytes/s, tflops = 1e12/s, gflops and gops = 1e9/s. A struct machine is plain data without pointers:
 * copy it freely, no close. Functions are pure apart from the file they name, and thread-safe.
 *
 * The file is JSON: {"name", "origin", "date", "gpu": {...}, "link": {...}, "host": {...}, "cpu": {...}} with the field
 * names below. Groups take "origin" (measured, datasheet, edited) and "date" (YYYY-MM-DD) of their own. A file without
 * "gpu" describes a machine without one. Names and numbers that make no sense are refused by name. */
#ifndef LH_OFFLOAD_MACHINE_H
#define LH_OFFLOAD_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MACHINE_MAX_NODE = 16, MACHINE_MAX_RATE = 64, MACHINE_NAME = 64 };

enum machine_origin { MACHINE_MEASURED, MACHINE_DATASHEET, MACHINE_EDITED };

struct machine_source {
    enum machine_origin origin;
    char date[12]; /* "2026-12-01"; "" unknown */
};

struct machine_gpu {
    struct machine_source source;
    char name[MACHINE_NAME];
    int sm;                      /* compute capability times 10 */
    double vram_bytes;           /* what the driver reports as total */
    double datasheet_vram_bytes; /* what the box says, 0: not known apart. Only an upper bound is ever taken from it */
    double runtime_bytes;        /* context, modules, libraries: gone before the first weight */
    double vram_gbps;            /* peak */
    double matvec_share, attn_share; /* of vram_gbps, reached by decode */
    double peak_tflops;          /* f16 in, f32 sums, dense */
    double gemm_tflops, attn_tflops; /* reached by prefill */
    int copy_engines, near_node;
    double launch_us, graph_launch_us;
};

struct machine_link {
    struct machine_source source;
    double h2d_gbps, d2h_gbps;   /* pinned memory, large copies */
    double pageable_gbps, copy_latency_us;
    int gen, width;
};

struct machine_node {
    int id;
    double bytes;
    char cores[MACHINE_NAME];    /* "0-7,16-23" */
};

struct machine_host {
    struct machine_source source;
    struct machine_node nodes[MACHINE_MAX_NODE];
    int n_node;
    double dram_gbps;            /* all readers together */
    double dram_with_dma_gbps;   /* the same while the link copies, copies included */
    double cpu_share;            /* of dram_gbps, reached by the CPU alone */
    double memlock_bytes;        /* most that may be pinned, -1: unlimited */
};

struct machine_rate {
    char key[24];                /* attn_gbps: "q8_0/g6/d256" (type, query heads per KV head, head dim); matvec_gbps: "q4_k" */
    double gbps;                 /* bytes of KV or weights consumed */
};

struct machine_cpu {
    struct machine_source source;
    int threads;
    double attn_gflops, matvec_gops, handover_us;
    struct machine_rate attn[MACHINE_MAX_RATE], matvec[MACHINE_MAX_RATE]; /* measured; may be none */
    int n_attn, n_matvec;
};

struct machine {
    char name[MACHINE_NAME];
    bool has_gpu;                /* false: gpu and link are zero */
    struct machine_gpu gpu;
    struct machine_link link;
    struct machine_host host;
    struct machine_cpu cpu;
    char filled[640];            /* "gpu.attn_tflops, cpu.handover_us (from v100-16g-pcie3)": what a file did not say; "" */
};

/* Built in. The rates of the GPUs are datasheet peaks, and what is usually reached. */
int machine_count(void);
const struct machine *machine_at(int i); /* 0 <= i < machine_count() */

/* The built-in machine of this name, any case, with or without maker, dashes and size: "v100-16g-pcie3", "RTX 4090",
 * "3090". *out is static. ERR_ARG: unknown (names the known ones), or short for several (lists them). */
int machine_find(const struct machine **out, const char *name);

/* The same for who asks about the GPU alone: of several machines with this GPU, the plainest. */
int machine_find_gpu(const struct machine **out, const char *name);

/* A file. What it leaves out is taken from the built-in machine of the same class (same GPU, else same generation and
 * nearest VRAM) and named in out->filled. ERR_ARG: cannot be read or is malformed; *out is undefined then. */
int machine_load(struct machine *out, const char *path);

/* The same from text[bytes]; `what` names it in errors. */
int machine_parse(struct machine *out, const char *text, size_t bytes, const char *what);

/* A built-in name, or else a file that exists; what contains a slash or ends in .json is always a file. */
int machine_open(struct machine *out, const char *name_or_path);

/* Writes all fields, so that machine_load gives the same machine with nothing filled. Replaces the file in one step.
 * ERR_IO. */
int machine_save(const struct machine *m, const char *path);

const char *machine_origin_name(enum machine_origin o); /* "measured" ... */

/* The built-in machine whose rates stand in where this one has none; never NULL. */
const struct machine *machine_class(const struct machine *m);

#endif
