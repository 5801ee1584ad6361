/* cli.h: what the subcommands share. Only offload/cli prints and decides exit statuses. */
#ifndef LH_OFFLOAD_CLI_CLI_H
#define LH_OFFLOAD_CLI_CLI_H

#include "offload/cli/opts.h"
#include "offload/engine.h"

#include <jansson.h>
#include <stdio.h>

/* X(name, one-line summary): main.c makes the dispatch table and the overview from it. */
#define COMMAND_LIST(X)                                                                                                \
    X(run, "write text: completion or chat from a prompt, a file or standard input")                                   \
    X(plan, "memory table and placement for a model and a context, without reading weights")                           \
    X(bench, "speed of prefill and decode with llama-bench's options and fields")                                      \
    X(check, "take a claimed speed and context apart: what is possible, only if ..., impossible")                         \
    X(perplexity, "quality of a model or of a KV type over a text")                                                    \
    X(info, "what a GGUF file holds")                                                                                  \
    X(tokenize, "token ids of a text, and back")                                                                       \
    X(quantize, "write a smaller GGUF")

#define X(name, summary) int cmd_##name(int argc, char **argv);
COMMAND_LIST(X)
#undef X

/* Options of every command that runs or plans a model. Fill with cli_defaults, parse with CLI_MODEL_OPTS in the table. */
enum { CLI_DEV_AUTO = -2, CLI_DEV_NONE = -1 };
struct cli_opts {
    const char *model;
    int64_t ctx;          /* -c; 0: the model's */
    bool ctx_seen;
    int64_t threads;      /* 0: the performance cores */
    int64_t chunk;        /* 0: chosen */
    int type_k, type_v;
    int64_t host_mib;     /* 0: what is available */
    const char *kernels;  /* "auto" */
    bool strict, json, dry_run, quiet;
    int64_t ngl;
    bool ngl_seen;
    int dev;              /* CLI_DEV_AUTO: any card, CLI_DEV_NONE: the CPU, else a card's number */
    int flash;            /* index into "auto,on,off" */
    struct rope_user rope;
};

void cli_defaults(struct cli_opts *o);

/* call functions of the table below */
int cli_kv_type(const char *option, const char *value, void *dst);
int cli_ngl(const char *option, const char *value, void *dst);
int cli_device(const char *option, const char *value, void *dst);
int cli_rope_scaling(const char *option, const char *value, void *dst);

#define CLI_MODEL_OPTS(o)                                                                                              \
    {.names = "Model and memory", .type = OPT_GROUP},                                                                  \
    {.names = "-m,--model", .type = OPT_STRING, .dst = &(o).model, .metavar = "FILE", .help = "GGUF file (first shard of a split one)"}, \
    {.names = "-c,--ctx-size", .type = OPT_INT, .dst = &(o).ctx, .metavar = "N", .help = "context in tokens, 0 = the model's; accepts 256K", .min = 0, .max = 1LL << 40, .seen = &(o).ctx_seen}, \
    {.names = "-t,--threads", .type = OPT_INT, .dst = &(o).threads, .metavar = "N", .help = "CPU threads (default: performance cores)", .min = 1, .max = 1024}, \
    {.names = "-ub,--ubatch-size,--chunk-tokens", .type = OPT_INT, .dst = &(o).chunk, .metavar = "N", .help = "prompt tokens per pass (default: chosen)", .min = 1, .max = 16384}, \
    {.names = "-ctk,--cache-type-k", .type = OPT_CALL, .dst = &(o).type_k, .metavar = "TYPE", .help = "type of K: f32 f16 bf16 q8_0 q4_0", .call = cli_kv_type}, \
    {.names = "-ctv,--cache-type-v", .type = OPT_CALL, .dst = &(o).type_v, .metavar = "TYPE", .help = "type of V: f32 f16 bf16 q8_0 q4_0", .call = cli_kv_type}, \
    {.names = "--host-mib", .type = OPT_INT, .dst = &(o).host_mib, .metavar = "N", .help = "host memory to plan with (default: what is available)", .min = 1, .max = 1LL << 40}, \
    {.names = "--strict", .type = OPT_FLAG, .dst = &(o).strict, .help = "refuse instead of warn (exit 5)"},            \
    {.names = "--kernels", .type = OPT_STRING, .dst = &(o).kernels, .metavar = "SET", .help = "auto, generic, avx2, avx512", .rare = true}, \
    {.names = "-fa,--flash-attn", .type = OPT_ENUM, .dst = &(o).flash, .metavar = "on|off|auto", .choices = "auto,on,off", .help = "attention is always fused here; off is refused", .rare = true}, \
    {.names = "-ngl,--gpu-layers,--n-gpu-layers", .type = OPT_CALL, .dst = &(o), .metavar = "N", .call = cli_ngl, .help = "layers in VRAM, with --machine: N, auto, all", .rare = true}, \
    {.names = "-dev,--device", .type = OPT_CALL, .dst = &(o), .metavar = "none|0", .call = cli_device, .help = "card to use, or none: the CPU", .rare = true}, \
    {.names = "Rotary positions", .type = OPT_GROUP, .rare = true},                                                    \
    {.names = "--rope-scaling", .type = OPT_CALL, .dst = &(o).rope, .metavar = "none|linear|yarn", .call = cli_rope_scaling, .help = "context extension method", .rare = true}, \
    {.names = "--rope-scale", .type = OPT_DOUBLE, .dst = &(o).rope.factor, .metavar = "F", .min = 1, .max = 1e6, .help = "extension factor", .rare = true}, \
    {.names = "--rope-freq-base", .type = OPT_DOUBLE, .dst = &(o).rope.freq_base, .metavar = "F", .min = 1, .max = 1e12, .help = "base frequency", .rare = true}, \
    {.names = "--rope-freq-scale", .type = OPT_DOUBLE, .dst = &(o).rope.freq_scale, .metavar = "F", .min = 1e-6, .max = 1, .help = "1 / extension factor", .rare = true}, \
    {.names = "--yarn-orig-ctx", .type = OPT_INT, .dst = &(o).rope.n_ctx_orig, .metavar = "N", .min = 1, .max = 1LL << 40, .help = "context the model was trained with", .rare = true}, \
    {.names = "--yarn-ext-factor", .type = OPT_DOUBLE, .dst = &(o).rope.ext_factor, .metavar = "F", .min = 0, .max = 1, .help = "blend of extrapolation", .rare = true}, \
    {.names = "--yarn-attn-factor", .type = OPT_DOUBLE, .dst = &(o).rope.attn_factor, .metavar = "F", .min = 0.01, .max = 100, .help = "magnitude factor", .rare = true}, \
    {.names = "--yarn-beta-slow", .type = OPT_DOUBLE, .dst = &(o).rope.beta_slow, .metavar = "F", .min = 0.01, .max = 1e4, .help = "high correction dim", .rare = true}, \
    {.names = "--yarn-beta-fast", .type = OPT_DOUBLE, .dst = &(o).rope.beta_fast, .metavar = "F", .min = 0.01, .max = 1e4, .help = "low correction dim", .rare = true}, \
    {.names = "-sm,--split-mode", .type = OPT_CALL, .dst = &(o), .metavar = "none", .call = opts_one_gpu, .help = "one GPU at most", .rare = true}, \
    {.names = "-ts,--tensor-split", .type = OPT_REFUSED, .metavar = "N", .help = "one GPU at most: --tensor-split is not available"}, \
    {.names = "-mg,--main-gpu", .type = OPT_CALL, .dst = &(o), .metavar = "0", .call = opts_one_gpu, .help = "one GPU at most", .rare = true}

/* Prints "longhaul COMMAND: sentence" to stderr and returns the exit status of code. */
int cli_fail(const char *command, int code);
/* One line to stderr. */
void cli_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Threads, kernels and the request for a plan, from options and the machine; n_ctx must be resolved by the caller. */
int cli_request(struct plan_request *r, const struct cli_opts *o, const struct engine *e, int64_t n_ctx, int logits_rows);
/* The memory table. */
void cli_print_plan(FILE *to, const struct plan *p, const struct model *m);
json_t *cli_plan_json(const struct plan *p);
/* The same for a plan of a described machine, with predictions over depths. */
int cli_print_machine_plan(FILE *to, const struct plan *p, const struct engine *e, const struct plan_request *r);
int cli_json_machine_plan(FILE *to, const struct plan *p, const struct engine *e, const struct plan_request *r, int64_t max_ctx);
/* "none in this build", "no GPU found", the cards by number, or why there is none that works. `opened`: each card is opened and
 * closed again, which takes a moment and tells whether this build has kernels for it. */
enum cli_gpu_look { CLI_GPU_SEEN, CLI_GPU_OPENED };
void cli_gpu_line(char *out, size_t bytes, enum cli_gpu_look look);
/* A card that is there and not used is named; ERR_DEVICE: a driver that does not work, unless -dev none was given. */
int cli_gpu_warn(const struct cli_opts *o);
/* Notes about what was asked for and is not what runs (context past training, lossy KV, -ngl without GPU).
 * ERR_STRICT under --strict. */
int cli_warn(const struct cli_opts *o, const struct engine *e, const struct plan *p);

/* Progress line with rate and time left, only when stderr is a terminal. */
struct cli_progress {
    const char *what;  /* "loading", "prefill" */
    const char *unit;  /* "tok", "MiB" */
    double scale;      /* units per reported amount */
    double start_s, shown_s;
    bool shown;
};
void cli_progress_begin(struct cli_progress *p, const char *what, const char *unit, double scale);
void cli_progress_show(void *p, double done, double total); /* a progress_fn */
void cli_progress_end(struct cli_progress *p);

/* Set by SIGINT and SIGTERM after cli_catch_signals. A second signal ends the process at once. */
extern volatile sig_atomic_t cli_stop;
void cli_catch_signals(void);

/* Whole file ("-": standard input) with a NUL after it; *bytes without it. ERR_ARG: missing or unreadable. */
int cli_read_file(char **out, size_t *bytes, const char *path);

/* ERR_ARG: text[n] is not valid UTF-8; names `what` and the byte. */
int cli_utf8(const char *what, const char *text, size_t n);

/* Peak resident bytes of this process. */
size_t cli_rss_peak(void);

/* "f16", "q8_0": as the options spell it; rotating static buffer. */
const char *cli_type_name(int type);

/* "12.3 MiB", "4.56 GiB" into a rotating static buffer. */
const char *cli_bytes(double bytes);

#endif
