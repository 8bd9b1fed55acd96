// Sums over rows in two stages, without atomics: chunk c sums its rows into partials[c], then every
// column adds up its chunks in order. The split depends only on the shape, so the order of
// summation and every bit of the result are the same at any thread count.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// Chunk c has the rows [chunk_begin(rows, chunks, c), chunk_begin(rows, chunks, c + 1)).
TW_HD int64_t chunk_begin(int64_t rows, int64_t chunks, int64_t chunk) {
  return rows / chunks * chunk + (rows % chunks < chunk ? rows % chunks : chunk);
}

TW_NAMESPACE_END
