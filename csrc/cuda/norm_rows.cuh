// Shared by the kernels of norm.cu.
#pragma once

#include "core/norm.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

TW_NAMESPACE_BEGIN

constexpr int kWideThreads = 512;

// A thread's V accesses to a row. The width is a multiple of an access.
template <class T, int V>
struct Shares {
  static constexpr int kElements = Packed<T>::kElements;
  int thread, threads;
  int64_t begin, end;  // columns

  __device__ __forceinline__ int64_t at(int v) const {
    return begin + (int64_t)(v * threads + thread) * kElements;
  }
  __device__ __forceinline__ bool has(int v) const { return at(v) < end; }
};

// Kernels multiply by this: an exact division is a call, which spills registers around it.
inline float per_width_of(int64_t width) { return (float)(1.0 / (double)width); }

TW_NAMESPACE_END
