// Products of small matrices in registers: C[rows][lanes] = A B, with broadcast elements of A and
// whole vectors of B[inner][lanes].
#pragma once

#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

// The effect of a product on C: replace it, add to it, or scale its lanes and then add.
enum class Into { set, add, scaled };

namespace detail {

#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

// a(r, x) is a[r * lda + x], or a[x * lda + r] if transposed.
template <Into into, bool transposed, int rows, int vectors, class A>
inline void tile(A* c, int64_t ldc, const A* a, int64_t lda, const A* b, int64_t ldb, int64_t inner,
                 const A* factors) {
  constexpr int64_t kStep = kLanes<A>;
  Vec<A> sum[rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) {
      if constexpr (into == Into::set) {
        sum[r][n] = Vec<A>{};
      } else {
        sum[r][n] = load(c + r * ldc + n * kStep);
        if constexpr (into == Into::scaled) sum[r][n] *= load(factors + n * kStep);
      }
    }
  }
  for (int64_t x = 0; x < inner; ++x) {
    Vec<A> right[vectors];
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) right[n] = load(b + x * ldb + n * kStep);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const A left = transposed ? a[x * lda + r] : a[r * lda + x];
#pragma GCC unroll 4
      for (int n = 0; n < vectors; ++n) sum[r][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < vectors; ++n) store(c + r * ldc + n * kStep, sum[r][n]);
  }
}

template <Into into, bool transposed, int vectors, class A>
inline void panel(A* c, int64_t ldc, const A* a, int64_t lda, const A* b, int64_t ldb, int64_t rows,
                  int64_t inner, const A* factors) {
  const int64_t step = transposed ? 1 : lda;
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    tile<into, transposed, kTileRows, vectors>(c + r * ldc, ldc, a + r * step, lda, b, ldb, inner,
                                               factors);
  }
  for (; r < rows; ++r) {
    tile<into, transposed, 1, vectors>(c + r * ldc, ldc, a + r * step, lda, b, ldb, inner, factors);
  }
}

}  // namespace detail

// C = A B, C += A B, or C = C * factors + A B with a factor for each lane. Not inlined, to keep one
// copy of the code.
template <Into into, bool transposed, class A>
__attribute__((noinline)) void multiply(A* c, int64_t ldc, const A* a, int64_t lda, const A* b,
                                        int64_t ldb, int64_t rows, int64_t lanes, int64_t inner,
                                        const A* factors = nullptr) {
  constexpr int64_t kStep = kLanes<A>;
  int64_t i = 0;
  for (; i + 2 * kStep <= lanes; i += 2 * kStep) {
    detail::panel<into, transposed, 2>(c + i, ldc, a, lda, b + i, ldb, rows, inner, factors + i);
  }
  if (i < lanes) {
    detail::panel<into, transposed, 1>(c + i, ldc, a, lda, b + i, ldb, rows, inner, factors + i);
  }
}

// --- Transposition ---

namespace detail {

#if !defined(__clang__)
// Interleaves the first, or the second, halves of a and b.
template <class A, int half>
inline Vec<A> zip(Vec<A> a, Vec<A> b) {
  Bits<A> index;
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes<A> / 2; ++i) {
    index[2 * i] = i + half * (kLanes<A> / 2);
    index[2 * i + 1] = index[2 * i] + kLanes<A>;
  }
  return __builtin_shuffle(a, b, index);
}

// Transposes kLanes x kLanes elements. Every round rotates the bits of an element's index (row,
// column) by one.
template <class A>
inline void transpose_tile(Vec<A> (&tile)[kLanes<A>]) {
  constexpr int64_t kHalf = kLanes<A> / 2;
#pragma GCC unroll 4
  for (int64_t round = kHalf; round > 0; round /= 2) {
    Vec<A> next[kLanes<A>];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kHalf; ++i) {
      next[2 * i] = zip<A, 0>(tile[i], tile[i + kHalf]);
      next[2 * i + 1] = zip<A, 1>(tile[i], tile[i + kHalf]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes<A>; ++i) tile[i] = next[i];
  }
}
#else
template <class A>
inline void transpose_tile(Vec<A> (&tile)[kLanes<A>]) {
  for (int64_t i = 0; i < kLanes<A>; ++i) {
    for (int64_t k = 0; k < i; ++k) {
      const A kept = tile[i][k];
      tile[i][k] = tile[k][i];
      tile[k][i] = kept;
    }
  }
}
#endif

}  // namespace detail

// to[x][lane] = from[lane][x] * scale for `count` lanes, and 0 for the rest of `lanes`, a multiple
// of the vector.
template <class T, class A>
__attribute__((noinline)) void lanes_from_rows(A* to, int64_t lanes, const T* from, int64_t pitch,
                                               int64_t count, int64_t width, A scale) {
  constexpr int64_t kStep = kLanes<A>;
  for (int64_t i = 0; i < lanes; i += kStep) {
    for_vectors<A>(width, [&](int64_t x, auto at) {
      Vec<A> tile[kStep];
      for (int64_t k = 0; k < kStep; ++k) {
        tile[k] = i + k < count ? load(from + (i + k) * pitch + x, at) * scale : Vec<A>{};
      }
      detail::transpose_tile<A>(tile);
      const int64_t end = width - x < kStep ? width - x : kStep;
      for (int64_t k = 0; k < end; ++k) store(to + (x + k) * lanes + i, tile[k]);
    });
  }
}

// to[lane][x] = from[x][lane] * factors[lane] for `count` lanes.
template <class T, class A>
__attribute__((noinline)) void rows_from_lanes(T* to, int64_t pitch, const A* from, int64_t lanes,
                                               int64_t count, int64_t width, const A* factors) {
  constexpr int64_t kStep = kLanes<A>;
  for (int64_t i = 0; i < lanes; i += kStep) {
    const Vec<A> factor = load(factors + i);
    for_vectors<A>(width, [&](int64_t x, auto at) {
      Vec<A> tile[kStep];
      for (int64_t k = 0; k < kStep; ++k) {
        tile[k] = x + k < width ? load(from + (x + k) * lanes + i) * factor : Vec<A>{};
      }
      detail::transpose_tile<A>(tile);
      const int64_t end = count - i < kStep ? count - i : kStep;
      for (int64_t k = 0; k < end; ++k) store(to + (i + k) * pitch + x, tile[k], at);
    });
  }
}

TW_NAMESPACE_END
