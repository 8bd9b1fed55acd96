// The dropout of core/dropout.h for the columns that a thread holds.
//
// One Philox call makes the words of four columns. It takes 10 rounds of two full 64-bit products
// and two three-way XORs. The round keys are the same in all threads and cost nothing on the
// uniform datapath. A row's first products are computed once: 10 instructions a column. The
// comparison and its bit take 2 more: the word plus 2^32 less the threshold carries if the word is
// kept, and the next instruction adds the carry to twice the bits so far. A comparison, a shifted
// 0 or 1 and an OR take 4. None of them waits for memory, so place them between a kernel's loads
// and the first use of the loaded values.
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
        complement_(-dropout.threshold),
        always_(dropout.threshold == 0 ? ~0u : 0u) {}

  // Bits that say which of N columns from `column` on are kept; `column` is a multiple of four.
  template <int N>
  __device__ __forceinline__ unsigned kept(int64_t column) const {
    static_assert(N % 4 == 0 && N + 4 <= 32);
    const int64_t group = (first_ + column) >> 2;
    unsigned bits = 0, beyond = 0;
    // The last column first, since each bit moves the others up.
#pragma unroll
    for (int i = N - 4; i >= 0; i -= 4) add_group(bits, group + i / 4);
    if constexpr (Skewed) {
      const int skew = first_ & 3;
      if (skew) {
        add_group(beyond, group + N / 4);
        bits = (bits | beyond << N) >> skew & ((1u << N) - 1);
      }
    }
    return bits | (always_ & ((1u << N) - 1));
  }

 private:
  __device__ __forceinline__ void add_group(unsigned& bits, int64_t group) const {
    const PhiloxWords words = dropout_words(seed_, row_, group);
#pragma unroll
    for (int i = 3; i >= 0; --i) add_carry(bits, words.word[i]);
  }

  // Twice the bits, plus 1 if the word is at least the threshold, which is not 0.
  __device__ __forceinline__ void add_carry(unsigned& bits, uint32_t word) const {
#if defined(TW_EMULATED)
    bits = 2 * bits + (unsigned)(((uint64_t)word + complement_) >> 32);
#else
    asm("{\n\t.reg .u32 sum;\n\tadd.cc.u32 sum, %1, %2;\n\taddc.u32 %0, %0, %0;\n\t}"
        : "+r"(bits)
        : "r"(word), "r"(complement_));
#endif
  }

  int64_t seed_, row_, first_;
  uint32_t complement_, always_;
};

TW_NAMESPACE_END
