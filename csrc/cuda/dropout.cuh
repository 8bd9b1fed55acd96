// The dropout of core/dropout.h for the columns that a thread holds.
//
// One Philox call makes the words of four columns. It takes 10 rounds of two full 64-bit products
// and two three-way XORs. The round keys are the same in all threads and cost nothing on the
// uniform datapath. A row's first products are computed once. Including the comparison and its bit,
// that is 12 instructions a column. None of them waits for memory, so place them between a kernel's
// loads and the first use of the loaded values.
#pragma once

#include <cuda_runtime.h>

#include "core/dropout.h"

TW_NAMESPACE_BEGIN

// A row of the dropped tensor. Skewed: the tensor may be a shard whose first column is not a
// multiple of four. A thread's columns then touch one more group of four.
template <bool Skewed>
class DropoutRow {
 public:
  // `row` is the whole tensor's.
  __device__ __forceinline__ DropoutRow(const Dropout& dropout, int64_t row)
      : seed_(*dropout.seed),
        row_(row),
        first_(Skewed ? dropout.column : 0),
        threshold_(dropout.threshold) {}

  // Bits that say which of N columns from `column` on are kept; `column` is a multiple of four.
  template <int N>
  __device__ __forceinline__ unsigned kept(int64_t column) const {
    static_assert(N % 4 == 0 && N + 4 <= 32);
    const int64_t group = (first_ + column) >> 2;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < N; i += 4) bits |= kept_of_group(group + i / 4) << i;
    if constexpr (Skewed) {
      const int skew = first_ & 3;
      if (skew) bits = (bits | kept_of_group(group + N / 4) << N) >> skew & ((1u << N) - 1);
    }
    return bits;
  }

 private:
  __device__ __forceinline__ unsigned kept_of_group(int64_t group) const {
    const PhiloxWords words = dropout_words(seed_, row_, group);
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (unsigned)(words.word[i] >= threshold_) << i;
    return bits;
  }

  int64_t seed_, row_, first_;
  uint32_t threshold_;
};

TW_NAMESPACE_END
