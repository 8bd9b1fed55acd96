// Divisions by numbers that the host knows. A 64-bit division on a GPU is a call of about a hundred
// instructions, which spills registers around it.
#pragma once

#include <cuda_runtime.h>

#include "core/rows.h"

TW_NAMESPACE_BEGIN

class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t size) : size_(size), reciprocal_(~uint64_t{0} / (uint64_t)size) {}

  // n is not negative. The reciprocal is rounded down, by less than 2^-64, so that its product with
  // n is the quotient or one less.
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    const int64_t below = (int64_t)__umul64hi((uint64_t)n, reciprocal_);
    return below + (n - below * size_ >= size_);
  }
  __device__ __forceinline__ int64_t remainder(int64_t n) const { return n - quotient(n) * size_; }

 private:
  int64_t size_ = 1;
  uint64_t reciprocal_ = ~uint64_t{0};
};

// A RowMap for kernels.
class Rows {
 public:
  explicit Rows(const RowMap& map) : map_(map) {
    for (int d = 0; d < map.dims; ++d) divisor_[d] = Divisor(map.size[d]);
  }
  __device__ __forceinline__ int64_t operator()(int64_t row) const {
    return map_.locate(row, [this](int d, int64_t n) { return divisor_[d].quotient(n); });
  }

 private:
  RowMap map_;
  Divisor divisor_[RowMap::kDims];
};

TW_NAMESPACE_END
