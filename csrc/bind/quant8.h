// Divides a tensor's elements into blocks.
#pragma once

#include "bind/tensor.h"
#include "core/quant8.h"

namespace torchweld {

// The first dimension is the rows, and the others form the width. A vector is one row.
struct BlockRows {
  int64_t rows = 1, width = 1;

  explicit BlockRows(Sizes sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      (i == 0 && sizes.size() > 1 ? rows : width) *= sizes[i];
    }
  }
  int64_t blocks() const { return rows * quant_blocks(width); }

  // Whether an absmax of these sizes fits this tensor.
  bool fits(Sizes absmax) const {
    const int64_t expected[] = {rows, quant_blocks(width)};
    return same_sizes(absmax, Sizes(expected, 2));
  }
};

}  // namespace torchweld
