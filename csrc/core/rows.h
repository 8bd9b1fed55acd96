// Maps the rows of a shard or of a broadcast tensor to rows of the whole tensor. The position is an
// affine function of the row's leading coordinates.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

struct RowMap {
  static constexpr int kDims = 6;
  // Leading dimensions, outermost first, merged where possible. Without dimensions every row is at
  // `offset`.
  int32_t dims = 0;
  int64_t size[kDims] = {};
  int64_t stride[kDims] = {};
  int64_t offset = 0;

  // The row's offset. The map is in host memory.
  TW_HD int64_t operator()(int64_t row) const {
    return locate<1>(row, [this](int d, int64_t n) { return n / size[d]; });
  }

  // The row's offset, with divide(d, n) in place of n / size[d]: GPU kernels divide by reciprocals
  // and take the map as a kernel argument. Unrolling every iteration keeps the arrays out of a GPU's local
  // memory.
  template <int Unrolled = kDims, class Divide>
  TW_HD int64_t locate(int64_t row, Divide&& divide) const {
    int64_t at = offset;
#if defined(__CUDACC__)
#pragma unroll Unrolled
#endif
    for (int d = (Unrolled > 1 ? kDims : dims) - 1; d > 0; --d) {
      if (d >= dims) continue;
      const int64_t above = divide(d, row);
      at += (row - above * size[d]) * stride[d];
      row = above;
    }
    return at + row * stride[0];
  }
};

TW_NAMESPACE_END
