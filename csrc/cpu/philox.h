// core/philox.h, a vector of counters at a time.
#pragma once

#include "core/philox.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

namespace detail {

// Each lane holds a word in its low half. The upper half is ignored.
typedef uint64_t U64 __attribute__((vector_size(kVectorBytes)));
constexpr int kWide = kVectorBytes / 8;

// Products of the low halves.
inline U64 multiply(U64 a, uint32_t b) {
#if defined(__AVX512F__)
  return (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (U64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#elif defined(__aarch64__)
  return (U64)vmull_n_u32(vmovn_u64((uint64x2_t)a), b);
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Interleaves the lanes of a and b. `first` receives the first half of the pairs, `second` the
// rest.
inline void interleave(U64 a, U64 b, U64& first, U64& second) {
#if defined(__AVX512F__)
  first = (U64)_mm512_permutex2var_epi64((__m512i)a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                                         (__m512i)b);
  second = (U64)_mm512_permutex2var_epi64((__m512i)a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15),
                                          (__m512i)b);
#else
  for (int i = 0; i < kWide / 2; ++i) {
    first[2 * i] = a[i], first[2 * i + 1] = b[i];
    second[2 * i] = a[kWide / 2 + i], second[2 * i + 1] = b[kWide / 2 + i];
  }
#endif
}

// `first` and the next numbers, one per lane.
inline U64 count_from(uint64_t first) {
  U64 lane;
  for (int i = 0; i < kWide; ++i) lane[i] = i;
  return lane + first;
}

// Four words of each of kWide counters.
struct Words {
  U64 word[4];
};

inline Words philox(U64 c0, U64 c1, U64 c2, U64 c3, uint64_t key) {
  uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const U64 product0 = multiply(c0, kPhiloxMultiplier[0]);
    const U64 product1 = multiply(c2, kPhiloxMultiplier[1]);
    c0 = (product1 >> 32) ^ c1 ^ key0;
    c1 = product1;
    c2 = (product0 >> 32) ^ c3 ^ key1;
    c3 = product0;
    key0 += kPhiloxKeyStep[0];
    key1 += kPhiloxKeyStep[1];
  }
  return {{c0, c1, c2, c3}};
}

// The words of kWide counters, in counter order.
struct WordsInOrder {
  U32 first, second;
};

inline WordsInOrder philox_in_order(U64 c0, U64 c1, U64 c2, U64 c3, uint64_t key) {
  const Words words = philox(c0, c1, c2, c3, key);
  const U64(&c)[4] = words.word;
  U64 first, second;
  interleave((c[0] & 0xffffffffu) | (c[1] << 32), (c[2] & 0xffffffffu) | (c[3] << 32), first,
             second);
  return {(U32)first, (U32)second};
}

}  // namespace detail

TW_NAMESPACE_END
