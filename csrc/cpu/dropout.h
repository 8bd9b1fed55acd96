// What core/dropout.h drops, a vector of Philox counters at a time.
#pragma once

#include "core/dropout.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

namespace detail {

// A lane holds a word in its low half; what is above it does not matter.
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
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Lanes of a and b in turn: the first half of the pairs, and the second.
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

// The words of kWide groups of four columns, in the order of the columns.
struct WordsInOrder {
  U32 first, second;
};

inline WordsInOrder dropout_words(uint64_t seed, uint64_t row, int64_t group) {
  U64 lane;
  for (int i = 0; i < kWide; ++i) lane[i] = i;
  U64 c0 = lane + (uint64_t)group, c1 = U64{} + row, c2 = U64{} + (row >> 32), c3 = {};
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
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
  U64 first, second;
  interleave((c0 & 0xffffffffu) | (c1 << 32), (c2 & 0xffffffffu) | (c3 << 32), first, second);
  return {(U32)first, (U32)second};
}

}  // namespace detail

// Factors of a row's elements: 0 where dropped, else the scale. Asked for by ascending columns.
template <class A>
class DropoutFactors {
 public:
  DropoutFactors(const Dropout& dropout, int64_t row)
      : dropout_(dropout), seed_((uint64_t)*dropout.seed), row_((uint64_t)dropout.rows(row)) {}

  // Of kLanes<A> columns from i on, a multiple of kLanes<A>; those past the row's end are something.
  Vec<A> operator()(int64_t i) {
    if (i >= end_) fill(i);
    return load(factors_ + skew_ + (i - begin_));
  }

 private:
  static constexpr int64_t kAtOnce = 4 * detail::kWide;  // columns of a vector of counters
  static constexpr int64_t kRun = 16 * kAtOnce;

  // One copy of it, and all that its loop reads in locals: what it writes might else be a member.
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

// body(factors) with factors(i) those of columns i on, 1 where nothing is dropped.
template <class A, class Body>
inline void with_factors(const Dropout& dropout, int64_t row, Body&& body) {
  if (dropout.seed) {
    body(DropoutFactors<A>(dropout, row));
  } else {
    body([](int64_t) { return (A)1; });
  }
}

TW_NAMESPACE_END
