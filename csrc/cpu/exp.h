// exp on vectors, for what is not positive: all that a softmax asks for.
#pragma once

#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

// 2^n times a Taylor polynomial on |r| <= ln(2) / 2, whose remainder is below a tenth of a unit
// roundoff; within 1.5 units in the last place. Results below the smallest normal number are 0,
// -inf gives 0 and NaN stays NaN.
inline Vec<float> exp_nonpositive(Vec<float> x) {
  const Vec<float> magic = splat(0x1.8p23f);  // adding it rounds to an integer, in the low bits
  const Vec<float> shifted = x * 0x1.715476p0f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  Vec<float> p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const detail::U32 power = ((detail::U32)shifted << 23) + (127u << 23);
  const Vec<float> result = p * (Vec<float>)power;
  return (Vec<float>)((detail::U32)result & ~(detail::U32)(x < -0x1.5d58ap6f));
}

inline Vec<double> exp_nonpositive(Vec<double> x) {
  typedef uint64_t U64 __attribute__((vector_size(kVectorBytes)));
  const Vec<double> magic = splat(0x1.8p52);
  const Vec<double> shifted = x * 0x1.71547652b82fep0 + magic;
  const Vec<double> n = shifted - magic;
  const Vec<double> r = (x - n * 0x1.62e42fefa3800p-1) - n * 0x1.ef35793c76730p-45;
  Vec<double> p = splat(1.0 / 6227020800);
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const U64 power = ((U64)shifted << 52) + (uint64_t{1023} << 52);
  const Vec<double> result = p * (Vec<double>)power;
  return (Vec<double>)((U64)result & ~(U64)(x < -0x1.6232bdd7abcd2p9));
}

TW_NAMESPACE_END
