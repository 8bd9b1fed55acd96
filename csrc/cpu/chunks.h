// Sums over rows on the CPU, see core/chunks.h.
#pragma once

#include "core/chunks.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

// The number of chunks that rows are summed in. It depends only on the shape, is enough for any
// core count, and adds at most 2 rows of traffic per 16 rows.
inline int64_t chunks_of(int64_t rows) {
  const int64_t chunks = (rows + 15) / 16;
  return chunks < 1 ? 1 : chunks > 64 ? 64 : chunks;
}

// Row `chunk` of the partial sums, set to zero; null if there are none.
template <class A>
inline A* fresh_partial(void* partials, int64_t chunk, int64_t width) {
  if (!partials) return nullptr;
  A* partial = (A*)partials + chunk * width;
  std::memset(partial, 0, width * sizeof(A));
  return partial;
}

// partial[i...] += v; does nothing if partial is null.
template <class A, class Place>
inline void accumulate(A* partial, int64_t i, Vec<A> v, Place at) {
  if (partial) store(partial + i, load(partial + i, at) + v, at);
}

// grad[column] = sum of partials[chunk][column] over the chunks; does nothing if grad is null.
template <class P, class A>
inline void add_chunks(P* grad, const A* partials, int64_t chunks, int64_t width, int64_t begin,
                       int64_t end) {
  if (!grad) return;
  for_vectors<A>(end - begin, [&](int64_t i, auto at) {
    Vec<A> sum = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      sum += load(partials + chunk * width + begin + i, at);
    }
    store(grad + begin + i, sum, at);
  });
}

TW_NAMESPACE_END
