// Dropout without a stored mask. Whether an element is dropped depends only on the seed and on the
// element's position in the whole tensor, so every backend, shard and recomputation drops the same
// elements.
//
//   counter = (column >> 3, low and high half of row, 0), key = the seed's low and high half;
//   an element takes number column & 7 of the eight that the four words have in 16 bits each, a
//   word's low half first, and is dropped if that number is below round(p * 2^16).
//
// Row and column are positions in the whole tensor. `rows` maps this part's rows to the whole's.
#pragma once

#include "core/rows.h"

TW_NAMESPACE_BEGIN

struct Dropout {
  const int64_t* seed = nullptr;  // one number on the kernel's device; null: nothing is dropped
  uint32_t threshold = 0;         // numbers below it are dropped
  double scale = 1;               // for kept elements: 2^16 / (2^16 - threshold), or 0 if p is 1
  RowMap rows;
  int64_t column = 0;  // the whole tensor's column where this part begins
};

TW_NAMESPACE_END
