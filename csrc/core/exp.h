// exp for arguments <= 0, where it cannot overflow. Softmax, sigmoid, tanh and gelu need no more:
// they pass the negative of a magnitude, or the difference from a maximum.
#pragma once

#include "core/bits.h"

TW_NAMESPACE_BEGIN

constexpr double kLog2E = 1.4426950408889634074;

namespace detail {

// Coefficients are listed from the lowest power.
template <class Polynomial, class V>
TW_HD V evaluate(V x) {
  V sum = V{} + Polynomial::term(Polynomial::kTerms - 1);
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 32
#endif
  for (int i = Polynomial::kTerms - 2; i >= 0; --i) sum = sum * x + Polynomial::term(i);
  return sum;
}

// exp(x) = 2^n * exp(r), where n is the integer nearest to x / ln(2), and r = x - n * ln(2). ln(2) is
// kLn2High + kLn2Low; n * kLn2High is exact. Below kLowest exp(x) is subnormal.
//
// exp(r) is 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2. The polynomials are minimax (Remez),
// with relative errors of exp(r) below 2^-28 and 2^-57.
template <class A>
struct Exp;
template <>
struct Exp<float> {
  static constexpr int kMantissaBits = 23, kBias = 127, kTerms = 5;
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kLowest = -0x1.5d58ap6f;
  static TW_HD float term(int i) {
    constexpr float kTerm[kTerms] = {0.49999994f, 0.16666521f, 0.041668385f, 0.00836871f,
                                     0.0013814635f};
    return kTerm[i];
  }
};
template <>
struct Exp<double> {
  static constexpr int kMantissaBits = 52, kBias = 1023, kTerms = 10;
  static constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
  static constexpr double kLowest = -0x1.6232bdd7abcd2p9;
  static TW_HD double term(int i) {
    constexpr double kTerm[kTerms] = {0.50000000000000105496,   0.1666666666666641304,
                                      0.041666666666530701048,  0.0083333333334943261578,
                                      0.0013888888943505829446, 0.00019841269506587204123,
                                      2.4801493214283131616e-5, 2.7557586548639070358e-6,
                                      2.7630210833367531407e-7, 2.4999962980694549858e-8};
    return kTerm[i];
  }
};

}  // namespace detail

// Within 1.2 units in the last place. Results below the smallest normal number are 0, NaN stays NaN.
template <class V>
TW_HD V exp_nonpositive(V x) {
  using A = Element<V>;
  using E = detail::Exp<A>;
  using Bits = typename BitsOf<V>::Unsigned;
  using Word = typename BitsOf<A>::Unsigned;
  // Adding kMagic rounds to an integer, which then sits in the low bits of the sum.
  constexpr A kMagic = (A)1.5 * (A)((Word)1 << E::kMantissaBits);
  const V shifted = x * (A)kLog2E + kMagic;
  const V n = shifted - kMagic;
  const V r = (x - n * E::kLn2High) - n * E::kLn2Low;
  const V fraction = (detail::evaluate<E>(r) * r + (A)1) * r + (A)1;
  const Bits power = (reinterpret<Bits>(shifted) + (Word)E::kBias) << E::kMantissaBits;
  // Multiply rather than add exponents: the product keeps NaN, whatever bits of x end up in
  // `power`.
  const V result = fraction * reinterpret<V>(power);
  return x < E::kLowest ? V{} : result;
}

TW_NAMESPACE_END
