// Kernel launches, and what kernels need from them. The emulator (tests/emulator) has its own
// versions of what plain C++ cannot express: the launch, dynamic shared memory, and inline PTX.
#pragma once

#include <cuda_runtime.h>

#if !defined(TW_EMULATED)
#include <map>
#include <mutex>
#include <tuple>
#endif

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
#error "CUDA 12.1 or later is needed: older versions allow only 4 KB of launch arguments"
#endif
constexpr size_t kLaunchBytes = 32764;

// The dynamic shared memory that a kernel may use without opting in to more.
constexpr size_t kSharedBytes = 48 << 10;

struct Launch {
  dim3 grid, threads;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // neighbouring blocks that run together and share their shared memory
};

// Clusters of up to 8 blocks are what every GPU with clusters (sm_90) can run.
constexpr int kMostBlocks = 8;

#if !defined(TW_EMULATED)
// `config` points to `cluster`. Opts in to the shared memory that the launch asks for.
template <class... Params>
cudaError_t configure(void (*kernel)(Params...), const Launch& how, cudaLaunchConfig_t& config,
                      cudaLaunchAttribute& cluster) {
  config = {};
  config.gridDim = how.grid;
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  if (how.cluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = how.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  if (how.shared_bytes <= kSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              (int)how.shared_bytes);
}
#endif

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const Launch& how, cudaStream_t stream,
                   const Args&... args) {
#if defined(TW_EMULATED)
  (void)stream;
  return emulator::launch(how.grid, how.threads, how.shared_bytes, how.cluster,
                          [=] { kernel(args...); });
#else
  cudaLaunchConfig_t config;
  cudaLaunchAttribute cluster;
  const cudaError_t error = configure(kernel, how, config, cluster);
  if (error != cudaSuccess) return error;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
#endif
}

// Both read the current device.
inline int device_attribute(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = otherwise;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount, 1); }
// The most shared memory that a block can have if its kernel opts in.
inline int64_t most_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)kSharedBytes);
}

// The number of clusters of a launch that run at the same time on the current device: 0 if it has
// no clusters, or if a part of a GPU has no room for one.
template <class... Params>
int clusters_at_once(void (*kernel)(Params...), const Launch& how) {
#if defined(TW_EMULATED)
  (void)kernel;
  return emulator::emulator_cluster_blocks / (int)how.cluster;
#else
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  // The driver takes some microseconds to answer, more than a small kernel: it is asked once.
  using Asked = std::tuple<int, const void*, unsigned, size_t>;
  static std::mutex mutex;
  static std::map<Asked, int> answers;
  const std::lock_guard<std::mutex> lock(mutex);
  const Asked asked{device, (const void*)kernel, how.cluster, how.shared_bytes};
  if (const auto at = answers.find(asked); at != answers.end()) return at->second;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) < 9) return answers[asked] = 0;
  cudaLaunchConfig_t config;
  cudaLaunchAttribute cluster;
  int clusters = 0;
  if (configure(kernel, how, config, cluster) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // otherwise the next launch would report it
    return 0;
  }
  return answers[asked] = clusters;
#endif
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

// Copies 16 aligned bytes to shared memory, bypassing registers and L1. After wait_for_copies a
// thread may read its own copies.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if defined(TW_EMULATED)
  emulator::copy_async(shared, global, 16);
#else
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
      "l"(global)
      : "memory");
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_of_copies() {
#if defined(TW_EMULATED)
  emulator::end_of_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `groups` of this thread's last groups, up to 2, are still being copied.
__device__ __forceinline__ void wait_for_copies(int groups) {
#if defined(TW_EMULATED)
  emulator::wait_for_copies(groups);
#else
  if (groups == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else if (groups == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  }
#endif
}

// --- Clusters: nothing calls these below sm_90 ---

// Stores to the place that `shared` has in this block, in the shared memory of the cluster's block
// `rank`. All blocks must have synchronised before, so that the memory exists.
__device__ __forceinline__ void store_to_block(float* shared, unsigned rank, float value) {
#if defined(TW_EMULATED)
  *(float*)emulator::shared_of_block(rank, shared) = value;
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"((unsigned)__cvta_generic_to_shared(shared)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#else
  __trap();
#endif
}

// All threads of the cluster's blocks wait for each other: each arrives, may do work of its own,
// and waits. Stores before a thread's arrival are visible to all threads after their wait. Without
// `.aligned`, since a warp may arrive in parts after a branch.
__device__ __forceinline__ void arrive_at_cluster() {
#if defined(TW_EMULATED)
  emulator::arrive_at_cluster();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(TW_EMULATED)
  emulator::wait_for_cluster({"wait_for_cluster", __FILE__, __LINE__});
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __trap();
#endif
}

TW_NAMESPACE_END
