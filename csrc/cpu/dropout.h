// The dropout of core/dropout.h, a vector of Philox counters at a time.
#pragma once

#include "core/dropout.h"
#include "cpu/philox.h"

TW_NAMESPACE_BEGIN

namespace detail {

constexpr int64_t kDrawn = 8 * kWide;  // columns of a vector of counters

// call(i, kept) for each vector of words of float32: whether the columns from group's first plus i
// on are kept, of kWide groups of eight columns.
template <class Call>
inline void for_each_kept(uint64_t seed, uint64_t row, int64_t group, uint32_t threshold,
                          Call&& call) {
  const U64 low = U64{} + row, high = U64{} + (row >> 32);
  const WordsInOrder words = philox_in_order(count_from((uint64_t)group), low, high, U64{}, seed);
  uint16_t numbers[kDrawn];
  std::memcpy(numbers, &words, sizeof(numbers));
  for (int64_t i = 0; i < kDrawn; i += kDrawn / 4) call(i, widen(numbers + i) >= threshold);
}

}  // namespace detail

// The factors of a row's elements: 0 if dropped, else the scale. Columns must be requested in
// ascending order.
template <class A>
class DropoutFactors {
 public:
  DropoutFactors(const Dropout& dropout, int64_t row)
      : dropout_(dropout), seed_((uint64_t)*dropout.seed), row_((uint64_t)dropout.rows(row)) {}

  // The factors of kLanes<A> columns from i on, a multiple of kLanes<A>. Lanes past the row's end
  // are undefined.
  Vec<A> operator()(int64_t i) {
    if (i >= end_) fill(i);
    return load(factors_ + skew_ + (i - begin_));
  }

 private:
  static constexpr int64_t kRun = 8 * detail::kDrawn;

  // Not inlined, to keep one copy of the code. The loop reads only locals: the compiler would
  // otherwise reload members after each store.
  __attribute__((noinline)) void fill(int64_t i) {
    const int64_t column = dropout_.column + i;
    const int64_t end = column % 8 ? kRun + detail::kDrawn : kRun;
    const uint64_t seed = seed_, row = row_;
    const uint32_t threshold = dropout_.threshold;
    const A scale = (A)dropout_.scale;
    begin_ = i;
    end_ = i + kRun;
    skew_ = column % 8;
    A* to = factors_;
    for (int64_t done = 0; done < end; done += detail::kDrawn) {
      detail::for_each_kept(seed, row, (column + done) >> 3, threshold,
                            [&](int64_t i, detail::I32 kept) { put(to + done + i, kept, scale); });
    }
  }

  static void put(A* to, detail::I32 kept, A scale) {
    if constexpr (sizeof(A) == 4) {
      store(to, choose<A>(kept, splat(scale), Vec<A>{}));
    } else {
      for (int64_t k = 0; k < detail::kDrawn / 4; ++k) to[k] = kept[k] ? scale : 0;
    }
  }

  const Dropout& dropout_;
  const uint64_t seed_, row_;
  int64_t begin_ = 0, end_ = 0, skew_ = 0;
  alignas(kVectorBytes) A factors_[kRun + detail::kDrawn];
};

// body(factors), where factors(i) returns the factors of the columns from i on, or 1 without
// dropout.
template <class A, class Body>
inline void with_factors(const Dropout& dropout, int64_t row, Body&& body) {
  if (dropout.seed) {
    body(DropoutFactors<A>(dropout, row));
  } else {
    body([](int64_t) { return (A)1; });
  }
}

TW_NAMESPACE_END
