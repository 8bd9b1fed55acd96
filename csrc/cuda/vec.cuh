// Elements of a row, 16 bytes at a time. They stay in their storage format and are converted on
// use, so that 16-bit elements take half the registers of floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr int kAccessBytes = 16;
constexpr int kWarp = 32;  // threads

// --- One element ---

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(BFloat16 v) {
  return __uint_as_float((unsigned)v.bits << 16);
}
__device__ __forceinline__ float to_float(Half v) { return __half2float(__ushort_as_half(v.bits)); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float(float v) {
  return v;
}
template <>
__device__ __forceinline__ BFloat16 from_float(float v) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(v))};
}
template <>
__device__ __forceinline__ Half from_float(float v) {
  return {__half_as_ushort(__float2half_rn(v))};
}

__device__ __forceinline__ unsigned bits_of(float v) { return __float_as_uint(v); }
__device__ __forceinline__ unsigned bits_of(BFloat16 v) { return v.bits; }
__device__ __forceinline__ unsigned bits_of(Half v) { return v.bits; }
__device__ __forceinline__ unsigned bits_of(uint8_t v) { return v; }
__device__ __forceinline__ unsigned bits_of(uint16_t v) { return v; }

// The element with these bits. Higher bits are ignored.
template <class T>
__device__ __forceinline__ T element(unsigned bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else if constexpr (sizeof(T) == 2) {
    return T{(uint16_t)bits};
  } else {
    return (T)bits;
  }
}

// --- Several elements, 16 bytes of them by default ---

template <class T, int N = kAccessBytes / (int)sizeof(T)>
struct Packed {
  static constexpr int kElements = N;
  static constexpr int kInWord = 4 / sizeof(T);
  static constexpr int kWords = N / kInWord;
  unsigned word[kWords];

  Packed() = default;
  __device__ __forceinline__ explicit Packed(uint4 bits) : word{bits.x, bits.y, bits.z, bits.w} {}

  // Element i in the low bits; the higher bits are undefined.
  __device__ __forceinline__ unsigned bits(int i) const {
    return word[i / kInWord] >> (i % kInWord * 8 * sizeof(T));
  }
  __device__ __forceinline__ float operator[](int i) const { return to_float(element<T>(bits(i))); }
};

template <class T>
__device__ __forceinline__ void store(T* p, const float (&values)[Packed<T>::kElements]) {
  unsigned word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      word[i] = __float_as_uint(values[i]);
    } else {
      word[i] = from_float<T>(values[2 * i]).bits | (unsigned)from_float<T>(values[2 * i + 1]).bits
                                                        << 16;
    }
  }
  __stcs((uint4*)p, make_uint4(word[0], word[1], word[2], word[3]));
}

inline bool is_aligned(const void* p) { return (uintptr_t)p % kAccessBytes == 0; }

TW_NAMESPACE_END
