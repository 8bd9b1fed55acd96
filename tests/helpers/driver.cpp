// A stand-in for NVIDIA's driver, for machines without a GPU: it runs nothing, and writes down what
// it is given. tests/helpers/stand_in.py loads it in its place.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

// The header renames some functions to their later versions.
#define ENTRY extern "C" __attribute__((visibility("default")))

namespace {

struct Function {
  std::vector<size_t> sizes;  // of its parameters, as its compiled code declares them
};

std::map<CUfunction, Function> functions;
std::string log;
bool writes = false;
CUresult failure = CUDA_SUCCESS;
// A thread begins without a context.
thread_local CUcontext context = nullptr;

void write(const char* name, const void* bytes, size_t count) {
  log += name;
  char hex[3];
  for (size_t i = 0; i < count; ++i) {
    std::snprintf(hex, sizeof hex, "%02x", static_cast<const unsigned char*>(bytes)[i]);
    log += hex;
  }
}

template <class T>
void write(const char* name, T number) {
  log += name + std::to_string(number);
}

}  // namespace

ENTRY void stand_in_declare(CUfunction function, const size_t* sizes, size_t count) {
  functions[function].sizes.assign(sizes, sizes + count);
}
ENTRY void stand_in_write(int on) { writes = on; }
ENTRY void stand_in_fail(int code) { failure = static_cast<CUresult>(code); }
ENTRY const char* stand_in_read() { return log.c_str(); }
ENTRY void stand_in_clear() { log.clear(); }

ENTRY CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                void** parameters, void**) {
  if (failure != CUDA_SUCCESS) return failure;
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!writes) return CUDA_SUCCESS;
  write("launch ", reinterpret_cast<size_t>(function));
  for (unsigned size : {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes})
    write(" ", size);
  write(" stream ", reinterpret_cast<size_t>(config->hStream));
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& each = config->attrs[i];
    write(" attribute ", static_cast<int>(each.id));
    // Of a number only 4 bytes are meant.
    const bool is_cluster = each.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    write(" ", &each.value, is_cluster ? 12 : 4);
  }
  const std::vector<size_t>& sizes = functions[function].sizes;
  for (size_t i = 0; i < sizes.size(); ++i) write(" ", parameters[i], sizes[i]);
  log += "\n";
  return CUDA_SUCCESS;
}

// All that it is told, in place of the driver's code of it.
ENTRY CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank,
                                      void* address, const cuuint64_t* sizes,
                                      const cuuint64_t* strides, const cuuint32_t* box,
                                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                      CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<size_t>(map) % 64) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i)
    if (steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  const unsigned char kinds[] = {
      static_cast<unsigned char>(dtype),   static_cast<unsigned char>(rank),
      static_cast<unsigned char>(swizzle), static_cast<unsigned char>(interleave),
      static_cast<unsigned char>(fill),    static_cast<unsigned char>(promotion)};
  auto* to = reinterpret_cast<char*>(map);
  std::memset(to, 0, sizeof *map);
  std::memcpy(to, &address, 8);
  std::memset(to + 8, 0xff, 8);  // the bit that small tensors must not have
  std::memcpy(to + 16, kinds, sizeof kinds);
  std::memcpy(to + 24, sizes, 8 * rank);
  std::memcpy(to + 64, strides, 8 * (rank - 1));
  std::memcpy(to + 96, box, 4 * rank);
  return CUDA_SUCCESS;
}

ENTRY CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuCtxSetCurrent(CUcontext given) {
  context = given;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
ENTRY CUresult cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice) {
  *made = reinterpret_cast<CUcontext>(&functions);
  return CUDA_SUCCESS;
}
ENTRY CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 232448;  // an H200's shared memory
  return CUDA_SUCCESS;
}
ENTRY CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuFuncGetAttribute(int* value, CUfunction_attribute asked, CUfunction) {
  *value = asked == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
ENTRY CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
ENTRY CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the stand-in refuses";
  return CUDA_SUCCESS;
}
ENTRY CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = nullptr;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
ENTRY CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
ENTRY CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = reinterpret_cast<CUfunction>(new char);
  return CUDA_SUCCESS;
}
ENTRY CUresult cuPointerGetAttribute(void* to, CUpointer_attribute, CUdeviceptr address) {
  std::memcpy(to, &address, 8);
  return CUDA_SUCCESS;
}
