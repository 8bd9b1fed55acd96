// Columns of a row at any alignment, N adjacent ones per access. An aligned row is accessed 16
// bytes at a time, any other row one column at a time. Threads past the row's end pass a count of 0
// or less.
#pragma once

#include "cuda/vec.cuh"

TW_NAMESPACE_BEGIN

// Columns per access: at least four, the columns of one Philox call.
template <class T, bool Aligned>
constexpr int kAccessColumns = Aligned ? kAccessBytes / (int)sizeof(T) : 4;

// Loads `count` columns from p, at most N, and fills the rest with zeros. If Aligned, count is N or
// at most 0.
template <bool Aligned, class T, int N>
__device__ __forceinline__ void load_columns(Packed<T, N>& to, const T* p, int count) {
  constexpr int kWords = Packed<T, N>::kWords;
#pragma unroll
  for (int w = 0; w < kWords; ++w) to.word[w] = 0;
  if constexpr (!Aligned) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) {
        to.word[i / to.kInWord] |= bits_of(p[i]) << (i % to.kInWord * 8 * sizeof(T));
      }
    }
  } else if (count > 0) {
    if constexpr (kWords == 1) {
      to.word[0] = __ldg((const unsigned*)p);
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldg((const uint2*)p);
      to.word[0] = two.x, to.word[1] = two.y;
    } else {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = __ldg((const uint4*)p + w / 4);
        to.word[w] = four.x, to.word[w + 1] = four.y;
        to.word[w + 2] = four.z, to.word[w + 3] = four.w;
      }
    }
  }
}

template <bool Aligned, class T, int N>
__device__ __forceinline__ void store_columns(T* p, const float (&values)[N], int count) {
  if constexpr (Aligned) {
    if (count > 0) store(p, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) p[i] = from_float<T>(values[i]);
    }
  }
}

TW_NAMESPACE_END
