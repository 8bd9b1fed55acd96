// The natural logarithm of positive normal numbers, infinity and NaN.
#pragma once

#include "core/bits.h"

TW_NAMESPACE_BEGIN

namespace detail {

template <class A>
struct Log;
template <>
struct Log<float> {
  static constexpr int kMantissaBits = 23, kTerms = 5;
};
template <>
struct Log<double> {
  static constexpr int kMantissaBits = 52, kTerms = 11;
};

}  // namespace detail

// x = 2^n * m with m within a factor of sqrt(2) of 1; log(m) = 2 atanh(t), t = (m - 1) / (m + 1).
// The first omitted term is below 2^-28 (float) and 2^-58 (double) of the first term.
template <class A>
TW_HD A log_positive(A x) {
  using L = detail::Log<A>;
  using Word = typename BitsOf<A>::Signed;
  const Word bits = reinterpret<Word>(x), half = reinterpret<Word>((A)0.70710678118654752440);
  const Word n = (bits - half) >> L::kMantissaBits;
  const A m = reinterpret<A>(bits - n * ((Word)1 << L::kMantissaBits));
  const A t = (m - 1) / (m + 1), square = t * t;
  A series = 0;
  for (int k = L::kTerms; k >= 0; --k) series = series * square + (A)2 / (A)(2 * k + 1);
  return (A)n * (A)0.69314718055994530942 + t * series + (x - x);  // keeps infinity and NaN
}

TW_NAMESPACE_END
