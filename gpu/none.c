/* none.c: gpu.h for a build without CUDA: there is no card, and whatever would need one says so. Built instead of the other
 * files of gpu/ but sizes.c. */
#include "core/err.h"
#include "gpu/gpu.h"

static int none(void) {
    return err_set(ERR_DEVICE, "this program was built without CUDA; it runs on the CPU (-dev none)");
}

bool gpu_built(void) { return false; }
int gpu_count(int *n) { return *n = 0; }
int gpu_look(struct gpu_info *out, int index) { return (void)out, (void)index, none(); }
int gpu_open(struct gpu **out, int index) { return (void)out, (void)index, none(); }
void gpu_close(struct gpu *g) { (void)g; }
const struct gpu_info *gpu_info(const struct gpu *g) {
    static const struct gpu_info no_card = {.name = "none"};
    return (void)g, &no_card;
}
int gpu_mem_free(struct gpu *g, size_t *bytes) { return (void)g, *bytes = 0, none(); }

int gpu_arena_open(struct gpu_arena **out, struct gpu *g, size_t bytes) { return (void)out, (void)g, (void)bytes, none(); }
void gpu_arena_close(struct gpu_arena *a) { (void)a; }
int gpu_alloc(void **d_p, struct gpu_arena *a, size_t bytes, const char *what) {
    return (void)d_p, (void)a, (void)bytes, (void)what, none();
}
void gpu_arena_release(struct gpu_arena *a, size_t mark) { (void)a, (void)mark; }
size_t gpu_arena_used(const struct gpu_arena *a) { return (void)a, (size_t)0; }
int gpu_pin(struct gpu *g, void *p, size_t bytes) { return (void)g, (void)p, (void)bytes, none(); }
void gpu_unpin(struct gpu *g, void *p) { (void)g, (void)p; }
int gpu_host_alloc(void **p, struct gpu *g, size_t bytes) { return (void)p, (void)g, (void)bytes, none(); }
void gpu_host_free(struct gpu *g, void *p) { (void)g, (void)p; }
int gpu_copy_in(struct gpu_stream *s, void *d_dst, const void *src, size_t bytes) {
    return (void)s, (void)d_dst, (void)src, (void)bytes, none();
}
int gpu_copy_out(struct gpu_stream *s, void *dst, const void *d_src, size_t bytes) {
    return (void)s, (void)dst, (void)d_src, (void)bytes, none();
}
int gpu_copy_on(struct gpu_stream *s, void *d_dst, const void *d_src, size_t bytes) {
    return (void)s, (void)d_dst, (void)d_src, (void)bytes, none();
}
int gpu_fill(struct gpu_stream *s, void *d_dst, int byte, size_t bytes) {
    return (void)s, (void)d_dst, (void)byte, (void)bytes, none();
}

int gpu_stream_open(struct gpu_stream **out, struct gpu *g) { return (void)out, (void)g, none(); }
void gpu_stream_close(struct gpu_stream *s) { (void)s; }
int gpu_stream_sync(struct gpu_stream *s) { return (void)s, none(); }
int gpu_event_open(struct gpu_event **out, struct gpu *g, enum gpu_event_kind kind) {
    return (void)out, (void)g, (void)kind, none();
}
void gpu_event_close(struct gpu_event *e) { (void)e; }
int gpu_event_record(struct gpu_event *e, struct gpu_stream *s) { return (void)e, (void)s, none(); }
int gpu_stream_wait(struct gpu_stream *s, struct gpu_event *e) { return (void)s, (void)e, none(); }
int gpu_event_sync(struct gpu_event *e) { return (void)e, none(); }
int gpu_event_done(struct gpu_event *e, bool *done) { return (void)e, (void)done, none(); }
int gpu_event_seconds(double *s, struct gpu_event *from, struct gpu_event *to) {
    return (void)s, (void)from, (void)to, none();
}

int gpu_mapped_alloc(void **p, void **d_p, struct gpu *g, size_t bytes) {
    return (void)p, (void)d_p, (void)g, (void)bytes, none();
}
int gpu_flags_open(struct gpu_flags **out, struct gpu *g, int n) { return (void)out, (void)g, (void)n, none(); }
void gpu_flags_close(struct gpu_flags *f) { (void)f; }
int gpu_flag_signal(struct gpu_flags *f, int i, uint32_t value, struct gpu_stream *s) {
    return (void)f, (void)i, (void)value, (void)s, none();
}
int gpu_flag_wait(struct gpu_flags *f, int i, uint32_t value, enum gpu_flag_after after, struct gpu_stream *s) {
    return (void)f, (void)i, (void)value, (void)after, (void)s, none();
}
void gpu_flag_host_signal(struct gpu_flags *f, int i, uint32_t value) { (void)f, (void)i, (void)value; }
void gpu_flag_host_wait(const struct gpu_flags *f, int i, uint32_t value) { (void)f, (void)i, (void)value; }
bool gpu_flag_host_seen(const struct gpu_flags *f, int i, uint32_t value) { return (void)f, (void)i, (void)value, false; }
int gpu_call_host(struct gpu_stream *s, void (*fn)(void *), void *arg) { return (void)s, (void)fn, (void)arg, none(); }
int gpu_graph_begin(struct gpu_stream *s) { return (void)s, none(); }
int gpu_graph_end(struct gpu_graph **out, struct gpu_stream *s) { return (void)out, (void)s, none(); }
int gpu_graph_launch(struct gpu_graph *q, struct gpu_stream *s) { return (void)q, (void)s, none(); }
void gpu_graph_close(struct gpu_graph *q) { (void)q; }
int gpu_probe_gemm(double *s, struct gpu_arena *a, struct gpu_stream *st, int m, int n, int k, int reps) {
    return (void)s, (void)a, (void)st, (void)m, (void)n, (void)k, (void)reps, none();
}

int gpu_ops_open(struct gpu_ops **out, struct gpu *g, struct gpu_arena *a, struct gpu_stream *s, const struct ops_limits *l) {
    return (void)out, (void)g, (void)a, (void)s, (void)l, none();
}
void gpu_ops_close(struct gpu_ops *o) { (void)o; }
struct ops *gpu_ops_table(struct gpu_ops *o) { return (void)o, (struct ops *)0; }
int gpu_ops_check(struct gpu_ops *o) { return (void)o, none(); }

void gpu_ops_hook(struct gpu_ops *o, const struct gpu_kv_hook *h) { (void)o, (void)h; }
int gpu_pages_put(struct gpu_ops *o, const struct kv_layer *l, const struct gpu_pages *to, int64_t pos0, int n_tok, const float *k,
                  const float *v) {
    return (void)o, (void)l, (void)to, (void)pos0, (void)n_tok, (void)k, (void)v, none();
}
int gpu_pages_begin(struct gpu_ops *o, const struct kv_layer *l, const struct attn_args *a, enum gpu_pages_way way) {
    return (void)o, (void)l, (void)a, (void)way, none();
}
int gpu_pages_attend(struct gpu_ops *o, const struct gpu_pages *p, enum gpu_pages_turn turn) {
    return (void)o, (void)p, (void)turn, none();
}
int gpu_pages_add(struct gpu_ops *o, const float *d_part) { return (void)o, (void)d_part, none(); }
int gpu_pages_end(struct gpu_ops *o) { return (void)o, none(); }
