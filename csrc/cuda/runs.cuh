// Sums of squares of short runs, in float32 with their rounding errors.
//
// Consumer GPUs run float64 at 1/64 of the float32 rate. So a lane sums a run of eight squares in
// float32, accumulates the rounding errors of the run, and adds both to its float64 sum. That is
// half a float64 addition per element in place of a conversion, a product and an addition.
//
// With u = 2^-24, the errors are at most 4 u of the run: one from the squares, which are exact for
// 16-bit floats, and one from each of three levels of sums. Adding up the errors rounds by at most
// 5 u of them. So a run's relative error is at most 20 u^2 = 7e-14.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// A sum of floats and its rounding error. Together they are exact.
struct ExactSum {
  float sum, error;
  __device__ __forceinline__ ExactSum(float a, float b) : sum(a + b) {
    const float from_b = sum - a;
    error = (a - (sum - from_b)) + (b - from_b);
  }
};

// The sum of the squares of a run. Squares of float32 are Rounded, those of 16-bit floats are
// exact.
constexpr int kRun = 8;
template <bool Rounded>
__device__ __forceinline__ double sum_of_run(const float (&run)[kRun]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) largest = fmaxf(largest, fabsf(run[i]));
  // Larger squares overflow, and the errors of smaller ones underflow.
  if (largest != 0 && !(largest >= 0x1p-40f && largest <= 0x1p60f)) {
    double sum = 0;
#pragma unroll  // unrolled, since a variable index would put the run in local memory
    for (int i = 0; i < kRun; ++i) sum += (double)run[i] * run[i];
    return sum;
  }
  float sums[kRun], errors[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    sums[i] = run[i] * run[i];
    errors[i] = Rounded ? fmaf(run[i], run[i], -sums[i]) : 0;
  }
#pragma unroll
  for (int count = kRun / 2; count > 0; count /= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const ExactSum both(sums[i], sums[i + count]);
      sums[i] = both.sum;
      errors[i] += errors[i + count] + both.error;
    }
  }
  return (double)sums[0] + errors[0];
}

TW_NAMESPACE_END
