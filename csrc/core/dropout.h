// Dropout without a stored mask. Whether an element is dropped depends only on the seed and on the
// element's position in the whole tensor, so every backend, shard and recomputation drops the same
// elements.
//
//   counter = (column >> 2, low and high half of row, 0), key = the seed's low and high half;
//   an element takes word column & 3 and is dropped if that word is below round(p * 2^32).
//
// Row and column are positions in the whole tensor. `rows` maps this part's rows to the whole's.
#pragma once

#include "core/philox.h"
#include "core/rows.h"

TW_NAMESPACE_BEGIN

struct Dropout {
  const int64_t* seed = nullptr;  // one number on the kernel's device; null: nothing is dropped
  uint32_t threshold = 0;         // words below it are dropped
  double scale = 1;               // for kept elements: 1 / (1 - p), or 0 if p is 1
  RowMap rows;
  int64_t column = 0;  // the whole tensor's column where this part begins
};

// The words of columns 4 * group to 4 * group + 3 of a row; row and columns are the whole tensor's.
TW_HD PhiloxWords dropout_words(int64_t seed, int64_t row, int64_t group) {
  const PhiloxWords counter{{(uint32_t)group, (uint32_t)row, (uint32_t)((uint64_t)row >> 32), 0}};
  return philox(counter, (uint32_t)seed, (uint32_t)((uint64_t)seed >> 32));
}

TW_NAMESPACE_END
