// The part of CUDA's half precision header that csrc/cuda uses.
#pragma once

#include <cuda_runtime.h>

struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }

inline float __half2float(__half v) {
  const unsigned sign = (v.bits & 0x8000u) << 16, exponent = v.bits >> 10 & 31;
  const unsigned mantissa = v.bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  const float magnitude = exponent ? std::ldexp((float)(mantissa | 0x400u), (int)exponent - 25)
                                   : std::ldexp((float)mantissa, -24);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
// Rounds to nearest, ties to even. A NaN becomes the canonical one.
inline __half __float2half_rn(float f) {
  const unsigned short sign = __float_as_uint(f) >> 16 & 0x8000u;
  const float magnitude = std::fabs(f);
  if (f != f) return {0x7fff};
  if (magnitude >= 65520.0f) return {(unsigned short)(sign | 0x7c00u)};
  // The spacing of halves at this magnitude. nearbyint rounds to even.
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const unsigned steps = (unsigned)std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return {(unsigned short)(sign | (magnitude == 0 ? 0 : ((exponent + 14) << 10) + steps))};
}
inline __half __float2half(float f) { return __float2half_rn(f); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
