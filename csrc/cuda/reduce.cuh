// Sums over the threads of a row, in an order that the launch alone decides.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr int kWarp = 32;

// `threads` threads share a row: a power of two within a warp, or the whole block of whole warps.
// Every thread of the block calls, and gets the sums of its row. `scratch`, N floats for each warp,
// must not be that of the previous call: the one barrier lies between writing and reading.
template <int N>
__device__ __forceinline__ void sum_over_row(float (&values)[N], int threads, float* scratch) {
  for (int offset = min(threads, kWarp) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(0xffffffffu, values[n], offset);
  }
  if (threads <= kWarp) return;
  const int warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int n = 0; n < N; ++n) scratch[n * warps + threadIdx.x / kWarp] = values[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = 0;
    for (int warp = 0; warp < warps; ++warp) values[n] += scratch[n * warps + warp];
  }
}

TW_NAMESPACE_END
