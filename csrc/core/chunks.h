// Sums over rows in two stages, without atomics: chunk c sums its rows into partials[c], and a
// second stage adds the chunks of each column in order. The split depends only on the shape, so the
// result has the same bits at any thread count.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// Chunk c covers rows [chunk_begin(rows, chunks, c), chunk_begin(rows, chunks, c + 1)).
TW_HD int64_t chunk_begin(int64_t rows, int64_t chunks, int64_t chunk) {
  return rows / chunks * chunk + (rows % chunks < chunk ? rows % chunks : chunk);
}

TW_NAMESPACE_END
