// The random bits of core/rounding.h for a group of four elements.
#pragma once

#include <cuda_runtime.h>

#include "core/rounding.h"

TW_NAMESPACE_BEGIN

// 16 bits per element, lowest first. If the four elements are adjacent in the whole tensor, one
// Philox call gives the bits of all four. One loop serves both cases, to keep the code short: a
// kernel inlines it four times.
__device__ __forceinline__ uint64_t rounding_bits(const Rounding& rounding, int64_t first) {
  const bool together = rounding.in_fours && first % 4 == 0;
  uint64_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 4; i += together ? 4 : 1) {
    const uint64_t element = (uint64_t)rounding.elements(first + i);
    const PhiloxWords words = rounding_words(rounding, element / kRoundedAtOnce);
    const bool upper = element & 4;
    const uint32_t low = upper ? words.word[2] : words.word[0];
    const uint32_t high = upper ? words.word[3] : words.word[1];
    const uint64_t four = (uint64_t)high << 32 | low;
    bits |= together ? four : (four >> element % 4 * 16 & 0xffffu) << i * 16;
  }
  return bits;
}

TW_NAMESPACE_END
