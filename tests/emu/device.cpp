/* device.cpp: what the emulated device says about itself, and the texts of errors. */
#include "runtime.h"

#include <string.h>

int device_sm() { return rt().machine.sm ? rt().machine.sm : rt().arch / 10; }

#define ERRORS(X)                                                                                                      \
    X(cudaSuccess, "no error")                                                                                         \
    X(cudaErrorInvalidValue, "invalid argument")                                                                       \
    X(cudaErrorMemoryAllocation, "out of memory")                                                                      \
    X(cudaErrorInitializationError, "initialization error")                                                            \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                                 \
    X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                                            \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")                     \
    X(cudaErrorInvalidDeviceFunction, "invalid device function")                                                       \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                                         \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                                                \
    X(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")                     \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                       \
    X(cudaErrorSymbolNotFound, "named symbol not found")                                                               \
    X(cudaErrorNotReady, "device not ready")                                                                           \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                             \
    X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                                        \
    X(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped")             \
    X(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")                   \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                                            \
    X(cudaErrorNotSupported, "operation not supported")                                                                \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                           \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")                    \
    X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")                  \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                            \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")                      \
    X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")               \
    X(cudaErrorGraphExecUpdateFailure, "the graph update was not performed because it included changes which violated constraints") \
    X(cudaErrorUnknown, "unknown error")

const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
#define X(code, text)                                                                                                  \
    case code: return text;
        ERRORS(X)
#undef X
    default: return "unrecognized error code";
    }
}
const char *cudaGetErrorName(cudaError_t e) {
    switch (e) {
#define X(code, text)                                                                                                  \
    case code: return #code;
        ERRORS(X)
#undef X
    default: return "unrecognized error code";
    }
}

/* --- device ------------------------------------------------------------------------------------------------------------------------ */

cudaError_t cudaGetDeviceCount(int *count) {
    api a("cudaGetDeviceCount", 0, cudaErrorInitializationError);
    *count = a.err ? 0 : rt().devices;
    return a.err;
}
static cudaError_t check_device(const char *call, int device) {
    api a(call, 0, cudaErrorInitializationError);
    if (a.err) return a.err;
    return device >= 0 && device < rt().devices ? cudaSuccess : set_error(cudaErrorInvalidDevice);
}
cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return check_device("cudaGetDevice", 0);
}
cudaError_t cudaSetDevice(int device) { return check_device("cudaSetDevice", device); }
cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return check_device("cudaInitDevice", device); }
cudaError_t cudaSetDeviceFlags(unsigned) { return check_device("cudaSetDeviceFlags", 0); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return check_device("cudaDeviceGetStreamPriorityRange", 0);
}
cudaError_t cudaDriverGetVersion(int *version) {
    LOCKED;
    *version = rt().devices ? rt().driver : 0;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

size_t smem_optin() {
    switch (device_sm()) {
    case 70: return 96 * 1024;
    case 75: return 64 * 1024;
    case 80: return 163 * 1024;
    case 86:
    case 89:
    case 120: return 99 * 1024;
    case 90:
    case 100: return 227 * 1024;
    default: return 48 * 1024;
    }
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    cudaError_t e = check_device("cudaGetDeviceProperties", device);
    if (e) return e;
    const emu_machine &m = rt().machine;
    *p = {};
    snprintf(p->name, sizeof p->name, "Emulated %s", m.name);
    memcpy(p->uuid.bytes, "emulated-device", 16);
    p->totalGlobalMem = (size_t)m.vram_bytes;
    p->sharedMemPerBlock = 48 * 1024;
    p->sharedMemPerBlockOptin = smem_optin();
    p->sharedMemPerMultiprocessor = smem_optin() + 1024;
    p->reservedSharedMemPerBlock = device_sm() >= 80 ? 1024 : 0;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = device_sm() / 10;
    p->minor = device_sm() % 10;
    p->multiProcessorCount = m.n_sm;
    p->canMapHostMemory = p->unifiedAddressing = p->canUseHostPointerForRegisteredMem = p->hostRegisterSupported = 1;
    p->pciBusID = 1;
    p->asyncEngineCount = m.copy_engines;
    p->memoryBusWidth = 384;
    p->l2CacheSize = 6 << 20;
    p->maxThreadsPerMultiProcessor = device_sm() >= 86 && device_sm() != 90 && device_sm() != 100 ? 1536 : device_sm() == 75 ? 1024 : 2048;
    p->maxBlocksPerMultiProcessor = 16;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device) {
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e) return e;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1500000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated: *value = 0; break;
    case cudaDevAttrMemoryClockRate: *value = (int)(rt().machine.vram_gbps * 1e6 / (2 * 384 / 8)); break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrCanFlushRemoteWrites: *value = 0; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device) {
    cudaError_t e = check_device("cudaDeviceGetPCIBusId", device);
    if (!e) snprintf(id, (size_t)len, "0000:01:00.0");
    return e;
}

cudaError_t cudaDeviceSynchronize() {
    api a("cudaDeviceSynchronize", api_s(), cudaErrorUnknown);
    if (a.err) return a.err;
    if (any_capture_refuses()) return set_error(cudaErrorStreamCaptureUnsupported);
    rt().stats.device_syncs++;
    host_wait_all(a.lock);
    pending_flush_all();
    return cudaSuccess;
}

cudaError_t cudaDeviceReset() {
    emu_machine m;
    emu_machine_now(&m);
    emu_reset(&m);
    return cudaSuccess;
}
