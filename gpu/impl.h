/* impl.h: what the C files of gpu/ share. Nobody outside gpu/ includes this. */
#ifndef LH_GPU_IMPL_H
#define LH_GPU_IMPL_H

#include "gpu/compat.h"
#include "gpu/gpu.h"

struct gpu {
    int index;
    struct gpu_info info;
    bool lost; /* an error that the device does not recover from: nothing more is asked of it */
};
struct gpu_stream {
    struct gpu *g;
    cudaStream_t s;
};
struct gpu_event {
    struct gpu *g;
    cudaEvent_t e;
};

/* Records a failed call (its text, the bytes it was about, free device memory), clears the runtime's error and marks the
 * device as lost where it is. Returns the code: ERR_BUDGET for memory, else ERR_DEVICE. */
int gpu_failed(struct gpu *g, cudaError_t e, const char *call, size_t bytes);
/* ERR_DEVICE with a sentence. */
int gpu_is_lost(const struct gpu *g);

/* rc = 0 or the code of a failed runtime call; jumps to `out` when it failed. */
#define GPU_TRY(g, call, bytes)                                                                                        \
    do {                                                                                                               \
        cudaError_t gpu_try_e = (call);                                                                                \
        if (gpu_try_e != cudaSuccess) {                                                                                \
            rc = gpu_failed(g, gpu_try_e, #call, bytes);                                                               \
            goto out;                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
