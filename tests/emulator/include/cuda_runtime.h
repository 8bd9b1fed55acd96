// The part of CUDA's runtime and device functions that csrc/cuda uses, for kernels run by
// tests/emulator. It comes before the toolkit's header of this name on the include path.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "../runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__ &  // follows the type: all threads share one copy, on no stack of theirs
#define __align__(n) alignas(n)
// One block runs at a time, or one cluster, whose kernels have none: its variables can be static.
#define __shared__ static
#define __constant__ static

// --- Types ---

using uint3 = emulator::Index;
struct dim3 : emulator::Index {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : emulator::Index{x, y, z} {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// --- Indices ---

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->block_dim)
#define gridDim (emulator::current->grid_dim)
constexpr int warpSize = 32;

// --- Barriers, shuffles, votes: each records the line that it is called from ---

#define TW_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define TW_SITE(what) \
  emulator::Site { what, file, line }

inline void __syncthreads(TW_HERE) { emulator::block_barrier(false, TW_SITE("__syncthreads")); }
inline int __syncthreads_count(int p, TW_HERE) {
  return emulator::block_barrier(p, TW_SITE("__syncthreads_count"));
}
inline int __syncthreads_or(int p, TW_HERE) {
  return emulator::block_barrier(p, TW_SITE("__syncthreads_or")) > 0;
}
inline int __syncthreads_and(int p, TW_HERE) {
  return emulator::block_barrier(!p, TW_SITE("__syncthreads_and")) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, TW_HERE) {
  emulator::warp_barrier(mask, TW_SITE("__syncwarp"));
}

namespace emulator {
template <class T>
T exchange(uint32_t mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = warp_exchange(mask, bits, source, site, nullptr);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t vote(uint32_t mask, bool predicate, Site site) {
  uint32_t votes;
  warp_exchange(mask, predicate, lane(), site, &votes);
  return votes;
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, TW_HERE) {
  const int first = emulator::lane() / width * width;
  return emulator::exchange(mask, value, first + source % width, TW_SITE("__shfl_sync"));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, TW_HERE) {
  const int source = emulator::lane() ^ lanes;
  const bool stays = source / width <= emulator::lane() / width;
  return emulator::exchange(mask, value, stays ? source : emulator::lane(),
                            TW_SITE("__shfl_xor_sync"));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, TW_HERE) {
  const int source = emulator::lane() + (int)delta;
  const bool stays = source / width == emulator::lane() / width;
  return emulator::exchange(mask, value, stays ? source : emulator::lane(),
                            TW_SITE("__shfl_down_sync"));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, TW_HERE) {
  const int source = emulator::lane() % width - (int)delta;
  const int first = emulator::lane() / width * width;
  return emulator::exchange(mask, value, source >= 0 ? first + source : emulator::lane(),
                            TW_SITE("__shfl_up_sync"));
}
inline unsigned __ballot_sync(unsigned mask, int p, TW_HERE) {
  return emulator::vote(mask, p, TW_SITE("__ballot_sync"));
}
inline int __any_sync(unsigned mask, int p, TW_HERE) {
  return emulator::vote(mask, p, TW_SITE("__any_sync")) != 0;
}
inline int __all_sync(unsigned mask, int p, TW_HERE) {
  return emulator::vote(mask, p, TW_SITE("__all_sync")) == mask;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, TW_HERE) {
  unsigned most = 0;
  for (int i = 0; i < warpSize; ++i) {
    if (mask >> i & 1) {
      most = std::max(most, emulator::exchange(mask, value, i, TW_SITE("__reduce_max_sync")));
    }
  }
  return most;
}

// --- Memory ---

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { emulator::yield(); }

template <class T>
T atomicAdd(T* p, T value) {
  T before, after;
  __atomic_load(p, &before, __ATOMIC_RELAXED);
  do {
    after = before + value;
  } while (
      !__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

// --- Arithmetic ---

using std::max;
using std::min;
inline float __uint_as_float(unsigned v) {
  float f;
  __builtin_memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned v;
  __builtin_memcpy(&v, &f, 4);
  return v;
}
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
// Results that are not fused with an operation before or after.
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float __fsub_rn(float a, float b) {
  const volatile float from = a, taken = b;
  return from - taken;
}
inline float __fdividef(float a, float b) { return a / b; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return (uint64_t)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }

// --- The host side ---

#define CUDART_VERSION 0

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulator::last_error()
         : error == cudaSuccess          ? "no error"
                                         : "invalid argument";
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return std::memset(p, value, bytes), cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// Events read a clock that only emulated libraries advance.
namespace emulator {
inline double clock_ms = 0;
}
using cudaEvent_t = double*;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = new double(0), cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return *event = emulator::clock_ms, cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return *ms = (float)(*end - *begin), cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return *mode = cudaStreamCaptureModeGlobal, cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = (cudaStreamCaptureStatus)emulator::emulator_captures, cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  if (!emulator::emulator_device_guards)
    throw std::logic_error("the current device is asked for unguarded");
  return *device = 0, cudaSuccess;
}

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
// A device with so few multiprocessors that small tensors fill it, and an RTX 4090's shared memory.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 20 : 99 << 10;
  return cudaSuccess;
}

namespace emulator {
// csrc/cuda/launch.cuh calls this in place of <<<>>>.
template <class Body>
cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster, Body&& body) {
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || shared_bytes > 99 << 10 || grid.x == 0 || grid.y > 65535 ||
      grid.z > 65535 || grid.x % cluster) {
    return cudaErrorInvalidValue;
  }
  return run(grid, block, shared_bytes, cluster, body) ? cudaSuccess : cudaErrorLaunchFailure;
}
}  // namespace emulator
