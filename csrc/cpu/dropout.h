// The dropout of core/dropout.h, a vector of Philox counters at a time.
#pragma once

#include "core/dropout.h"
#include "cpu/philox.h"

TW_NAMESPACE_BEGIN

namespace detail {

// The words of kWide groups of four columns, in column order.
inline WordsInOrder dropout_words(uint64_t seed, uint64_t row, int64_t group) {
  const U64 low = U64{} + row, high = U64{} + (row >> 32);
  return philox_in_order(count_from((uint64_t)group), low, high, U64{}, seed);
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
  static constexpr int64_t kAtOnce = 4 * detail::kWide;  // columns per vector of counters
  static constexpr int64_t kRun = 16 * kAtOnce;

  // Not inlined, to keep one copy of the code. The loop reads only locals: the compiler would
  // otherwise reload members after each store.
  __attribute__((noinline)) void fill(int64_t i) {
    const int64_t column = dropout_.column + i;
    const int64_t end = column % 4 ? kRun + kAtOnce : kRun;
    const uint64_t seed = seed_, row = row_;
    const uint32_t threshold = dropout_.threshold;
    const A scale = (A)dropout_.scale;
    begin_ = i;
    end_ = i + kRun;
    skew_ = column % 4;
    A* to = factors_;
    for (int64_t done = 0; done < end; done += kAtOnce) {
      const auto words = detail::dropout_words(seed, row, (column + done) >> 2);
      put(to + done, words.first >= threshold, scale);
      put(to + done + kAtOnce / 2, words.second >= threshold, scale);
    }
  }

  static void put(A* to, detail::I32 kept, A scale) {
    if constexpr (sizeof(A) == 4) {
      store(to, choose<A>(kept, splat(scale), Vec<A>{}));
    } else {
      for (int64_t k = 0; k < kAtOnce / 2; ++k) to[k] = kept[k] ? scale : 0;
    }
  }

  const Dropout& dropout_;
  const uint64_t seed_, row_;
  int64_t begin_ = 0, end_ = 0, skew_ = 0;
  alignas(kVectorBytes) A factors_[kRun + kAtOnce];
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
