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

  TW_HD int64_t operator()(int64_t row) const {
    int64_t at = offset;
#if defined(__CUDACC__)
#pragma unroll 1  // else the optimizers' kernels spill
#endif
    for (int d = dims - 1; d > 0; --d) {
      const int64_t above = row / size[d];
      at += (row - above * size[d]) * stride[d];
      row = above;
    }
    return at + row * stride[0];
  }
};

TW_NAMESPACE_END
