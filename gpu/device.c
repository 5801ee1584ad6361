/* device.c: finding and opening a card, and what becomes of a failed CUDA call. Memory is in memory.c, order in stream.c. */
#include "core/err.h"
#include "gpu/impl.h"
#include "gpu/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPU_MIN_SM = 70 };

bool gpu_built(void) { return true; }

/* Errors after which the context answers every call with the same error. */
static bool is_sticky(cudaError_t e) {
    switch (e) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorUnknown: return true;
    default: return false;
    }
}

int gpu_is_lost(const struct gpu *g) {
    return err_set(ERR_DEVICE, "GPU %d (%s) failed earlier and cannot be used any more; close it", g->index, g->info.name);
}

int gpu_failed(struct gpu *g, cudaError_t e, const char *call, size_t bytes) {
    size_t free_bytes = 0, total = 0;
    char memory[80] = "";
    (void)cudaGetLastError();
    if (is_sticky(e)) g->lost = true;
    else if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        snprintf(memory, sizeof memory, "; %zu of %zu MiB device memory are free", free_bytes >> 20, total >> 20);
    int code = e == cudaErrorMemoryAllocation ? ERR_BUDGET : ERR_DEVICE;
    if (bytes) return err_set(code, "GPU %d: %s of %zu bytes: %s%s", g->index, call, bytes, cudaGetErrorString(e), memory);
    return err_set(code, "GPU %d: %s: %s%s", g->index, call, cudaGetErrorString(e), memory);
}

int gpu_count(int *n) {
    *n = 0;
    int driver = 0, runtime = 0, found = 0;
    cudaError_t e = cudaGetDeviceCount(&found);
    if (e == cudaSuccess) {
        *n = found;
        return 0;
    }
    (void)cudaGetLastError();
    bool known = cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess;
    (void)cudaGetLastError();
    if (e == cudaErrorNoDevice || (known && driver == 0)) return 0;
    if (e == cudaErrorInsufficientDriver)
        return err_set(ERR_DEVICE, "GPU driver too old: it supports CUDA %d.%d, this program needs %d.%d; update the driver, or"
                       " run on the CPU with -dev none", driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return err_set(ERR_DEVICE, "GPU driver: %s; -dev none runs on the CPU", cudaGetErrorString(e));
}

static int read_info(struct gpu *g) {
    struct cudaDeviceProp p;
    int rc = 0;
    GPU_TRY(g, cudaGetDeviceProperties(&p, g->index), 0);
    struct gpu_info *i = &g->info;
    snprintf(i->name, sizeof i->name, "%.255s", p.name);
    i->sm = 10 * p.major + p.minor;
    i->n_sm = p.multiProcessorCount;
    i->copy_engines = p.asyncEngineCount;
    i->vram_bytes = p.totalGlobalMem;
    i->l2_bytes = (size_t)p.l2CacheSize;
    i->smem_bytes = p.sharedMemPerBlockOptin;
    i->map_host = p.canMapHostMemory != 0;
    GPU_TRY(g, cudaDeviceGetPCIBusId(i->pci, (int)sizeof i->pci, g->index), 0);
    GPU_TRY(g, cudaDriverGetVersion(&i->driver), 0);
    GPU_TRY(g, cudaRuntimeGetVersion(&i->runtime), 0);
out:
    return rc;
}

static int check_index(int index) {
    int n, rc = gpu_count(&n);
    if (rc) return rc;
    if (index < 0 || index >= n) return err_set(ERR_ARG, "GPU %d: there are %d", index, n);
    return 0;
}

int gpu_look(struct gpu_info *out, int index) {
    struct gpu g = {.index = index};
    int rc = check_index(index);
    if (!rc) rc = read_info(&g);
    if (!rc) *out = g.info;
    return rc;
}

static int not_built_for(const struct gpu *g) {
    int sm = g->info.sm;
    if (sm < GPU_MIN_SM)
        return err_set(ERR_DEVICE, "GPU %d (%s) is of architecture sm_%d, the kernels need sm_%d or newer; -dev none runs on the CPU",
                       g->index, g->info.name, sm, GPU_MIN_SM);
    return err_set(ERR_DEVICE, "GPU %d (%s) is of architecture sm_%d, which this program was not built for; build it with"
                   " -DLONGHAUL_CUDA=ON -DLONGHAUL_CUDA_ARCHS=%d%s, or run on the CPU with -dev none", g->index, g->info.name, sm,
                   sm, sm < 75 ? " and CUDA 11.8 to 12.9" : "");
}

int gpu_open(struct gpu **out, int index) {
    int rc = check_index(index);
    if (rc) return rc;
    struct gpu *g = calloc(1, sizeof *g);
    if (!g) return err_set(ERR_NOMEM, "GPU %d: out of memory", index);
    g->index = index;
    GPU_TRY(g, cudaSetDevice(index), 0);
    rc = read_info(g);
    if (rc) goto out;
    cudaError_t e = kernels_loadable();
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
        (void)cudaGetLastError();
        rc = not_built_for(g);
    } else if (e != cudaSuccess) {
        rc = gpu_failed(g, e, "loading the kernels", 0);
    }
out:
    if (rc) {
        gpu_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

void gpu_close(struct gpu *g) {
    if (!g) return;
    (void)cudaGetLastError();
    free(g);
}

const struct gpu_info *gpu_info(const struct gpu *g) { return &g->info; }

int gpu_mem_free(struct gpu *g, size_t *bytes) {
    size_t total;
    int rc = 0;
    if (g->lost) return gpu_is_lost(g);
    GPU_TRY(g, cudaMemGetInfo(bytes, &total), 0);
out:
    return rc;
}
