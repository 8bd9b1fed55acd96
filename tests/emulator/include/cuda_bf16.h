// The part of CUDA's bfloat16 header that csrc/cuda uses.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned{v.bits} << 16); }
// Rounds to nearest, ties to even. A NaN becomes the canonical one.
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  const unsigned bits = __float_as_uint(f);
  if (f != f) return {0x7fff};
  return {(unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
