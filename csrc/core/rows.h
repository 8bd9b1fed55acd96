// Rows of a tensor that is a part of another, or is broadcast: where row `i` of the part lies in the
// whole, an affine function of the row's leading coordinates.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

struct RowMap {
  static constexpr int kDims = 6;
  // Leading dimensions, outermost first; those that could be merged are. Zero: every row at offset.
  int32_t dims = 0;
  int64_t size[kDims] = {};
  int64_t stride[kDims] = {};
  int64_t offset = 0;

  // Of a map in memory.
  TW_HD int64_t operator()(int64_t row) const {
    return locate<1>(row, [this](int d, int64_t n) { return n / size[d]; });
  }

  // The same with divide(d, n) for n / size[d]: kernels on a GPU have reciprocals, and maps among
  // their arguments. All turns of the loop unrolled keep the arrays out of a GPU's local memory.
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
