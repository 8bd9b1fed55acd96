// Kernel launches, and what kernels ask of them. The emulator (tests/emulator) has its own versions
// of what plain C++ cannot express: the launch, dynamic shared memory, and inline PTX.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// The block's dynamic shared memory, of the size that its launch asked for.
#if defined(TW_EMULATED)
inline unsigned char* dynamic_shared() { return (unsigned char*)emulator::dynamic_shared(); }
#else
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return dynamic_shared_bytes;
}
#endif

// The most bytes that a launch's arguments may take.
#if !defined(TW_EMULATED) && CUDART_VERSION < 12010
#error "CUDA 12.1 is needed: before it a launch's arguments could take 4 KB alone"
#endif
constexpr size_t kLaunchBytes = 32764;

struct Launch {
  dim3 grid, threads;
  size_t shared_bytes = 0;
  bool cooperative = false;  // all blocks run at the same time, or the launch fails
};

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const Launch& how, cudaStream_t stream,
                   const Args&... args) {
#if defined(TW_EMULATED)
  (void)stream;
  return emulator::launch(how.grid, how.threads, how.shared_bytes, how.cooperative,
                          [=] { kernel(args...); });
#else
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = how.cooperative;
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = how.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
#endif
}

// Reads the current device.
inline int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  return count;
}

// --- Inline PTX, each with an emulated version ---

// 2^x within a relative error of 2^-22; 0 if it is below the smallest normal number.
__device__ __forceinline__ float power_of_2(float x) {
#if defined(TW_EMULATED)
  return x < -126 ? 0 : std::exp2(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// Brings a cache line into L2 for a later read.
__device__ __forceinline__ void prefetch_l2(const void* p) {
#if defined(TW_EMULATED)
  (void)p;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// A word that blocks pass to each other. It arrives whole, in memory visible to all blocks, and is
// not ordered with any other access.
__device__ __forceinline__ void publish(uint64_t* p, uint64_t word) {
#if defined(TW_EMULATED)
  __atomic_store_n(p, word, __ATOMIC_RELAXED);
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
#endif
}
__device__ __forceinline__ uint64_t observe(const uint64_t* p) {
#if defined(TW_EMULATED)
  emulator::yield();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#else
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
  return word;
#endif
}

TW_NAMESPACE_END
