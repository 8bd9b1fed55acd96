// 8-bit blocks as vectors: look-ups, and a block's way from floats to codes and back.
#pragma once

#include "core/quant8.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

using detail::F32;
using detail::I32;
using detail::U32;

// table[index] for each lane.
inline U32 look_up(const uint32_t* table, U32 index) {
#if defined(__AVX512F__)
  return (U32)_mm512_i32gather_epi32((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (U32)_mm256_i32gather_epi32((const int*)table, (__m256i)index, 4);
#else
  U32 result;
  for (int64_t i = 0; i < kLanes<float>; ++i) result[i] = table[index[i]];
  return result;
#endif
}

// The same for a table of 256 floats, which AVX-512 can hold in registers.
inline F32 look_up_256(const float* table, U32 index) {
#if defined(__AVX512F__)
  const __m512i at = (__m512i)index;
  __m512 found[8];
  for (int i = 0; i < 8; ++i) {
    found[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32 * i), at,
                                      _mm512_loadu_ps(table + 32 * i + 16));
  }
  for (int bit = 32, left = 4; left > 0; bit *= 2, left /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(bit));
    for (int i = 0; i < left; ++i) {
      found[i] = _mm512_mask_blend_ps(upper, found[2 * i], found[2 * i + 1]);
    }
  }
  return (F32)found[0];
#else
  return (F32)look_up((const uint32_t*)table, index);
#endif
}

typedef uint8_t Codes __attribute__((vector_size(kVectorBytes / 4)));

template <bool Signed>
inline F32 decode(const uint8_t* codes) {
  Codes narrow;
  std::memcpy(&narrow, codes, sizeof narrow);
  return look_up_256(kQuant8Map<Signed>.value, __builtin_convertvector(narrow, U32));
}

template <bool Signed>
inline void encode(uint8_t* codes, F32 fraction) {
  const U32 code = quant8_code<Signed>(
      (U32)fraction, [](U32 run) { return look_up(kQuant8Map<Signed>.place, run); });
  const Codes narrow = __builtin_convertvector(code, Codes);
  std::memcpy(codes, &narrow, sizeof narrow);
}

// Magnitudes as integers have their order, and NaN is the largest of all.
inline U32 magnitude_bits(F32 v) { return (U32)v & ~kSignBit; }
inline U32 larger(U32 a, U32 b) { return a > b ? a : b; }

inline float largest(U32 magnitudes) {
  uint32_t lane[kLanes<float>], most = 0;
  std::memcpy(lane, &magnitudes, sizeof lane);
  for (uint32_t bits : lane) most = bits > most ? bits : most;
  float value;
  std::memcpy(&value, &most, sizeof value);
  return value;
}

// `count` codes of a block from its kQuantBlock floats, of which the first `count` matter.
template <bool Signed>
inline void encode_block(uint8_t* codes, const float* values, int64_t count, float absmax) {
  const F32 divisor = splat(quant_divisor(absmax));
  int64_t i = 0;
  for (; i + kLanes<float> <= count; i += kLanes<float>) {
    encode<Signed>(codes + i, load(values + i) / divisor);
  }
  if (i < count) {
    uint8_t rest[kLanes<float>];
    encode<Signed>(rest, load(values + i) / divisor);
    std::memcpy(codes + i, rest, count - i);
  }
}

TW_NAMESPACE_END
