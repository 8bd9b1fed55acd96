// Sums and maxima over the threads of a row, in an order that depends only on the launch.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr int kWarp = 32;
constexpr int kNarrowBlock = 128;  // threads of a block whose rows are narrower than a warp

// The number of threads that share a row of `accesses` loads, with `per_thread` loads each: a power
// of two within a warp, or whole warps.
inline int threads_of_row(int64_t accesses, int per_thread) {
  const int64_t needed = (accesses + per_thread - 1) / per_thread;
  if (needed > kWarp) return (int)((needed + kWarp - 1) / kWarp * kWarp);
  int threads = 1;
  while (threads < needed) threads *= 2;
  return threads;
}

// Combines values over the `threads` threads of a row: a power of two within a warp, or whole
// warps. The row takes the whole block, or, if SideBySide, shares it with other rows. Every thread
// of the block calls it and gets its row's result, combined in a fixed order. `scratch` holds N
// floats per warp of the block. It must differ from the previous call's, since the only barrier is
// between writing and reading.
template <bool SideBySide = false, int N, class Combine>
__device__ __forceinline__ void combine_over_row(float (&values)[N], int threads, float* scratch,
                                                 float neutral, Combine&& combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset >= threads) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] = combine(values[n], __shfl_xor_sync(0xffffffffu, values[n], offset));
    }
  }
  if (threads <= kWarp) return;
  const int warps = threads / kWarp, of_block = SideBySide ? blockDim.x / kWarp : warps;
  const int first = SideBySide ? (int)threadIdx.x / threads * warps : 0;
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int n = 0; n < N; ++n) scratch[n * of_block + threadIdx.x / kWarp] = values[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = neutral;
    for (int warp = first; warp < first + warps; ++warp) {
      values[n] = combine(values[n], scratch[n * of_block + warp]);
    }
  }
}

template <bool SideBySide = false, int N>
__device__ __forceinline__ void sum_over_row(float (&values)[N], int threads, float* scratch) {
  combine_over_row<SideBySide>(values, threads, scratch, 0, [](float a, float b) { return a + b; });
}

// Ignores NaN.
__device__ __forceinline__ float max_over_row(float value, int threads, float* scratch) {
  float values[1] = {value};
  combine_over_row(values, threads, scratch, -__builtin_inff(),
                   [](float a, float b) { return fmaxf(a, b); });
  return values[0];
}

TW_NAMESPACE_END
