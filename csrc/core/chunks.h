// Sums over rows take two stages, without atomics: chunk c adds its rows into partials[c], then every
// column adds up its chunks in order.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// Rows of chunk c: [chunk_begin(c), chunk_begin(c + 1)). Depends on the shape alone, so that the
// order of summation, and with it every bit of the result, is the same at any thread count.
TW_HD int64_t chunk_begin(int64_t rows, int64_t chunks, int64_t chunk) {
  return rows / chunks * chunk + (rows % chunks < chunk ? rows % chunks : chunk);
}

TW_NAMESPACE_END
