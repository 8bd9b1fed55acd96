// The bits of core/rounding.h for four elements of a lane.
#pragma once

#include <cuda_runtime.h>

#include "core/rounding.h"

TW_NAMESPACE_BEGIN

// 16 bits each, the first one's lowest. Where four elements lie side by side in the whole tensor a
// call of Philox has those of all of them, 12 instructions an element; it has those of four more,
// which are another lane's.
__device__ __forceinline__ uint64_t rounding_bits(const Rounding& rounding, int64_t first) {
  if (rounding.in_fours && first % 4 == 0) {
    const uint64_t element = (uint64_t)rounding.elements(first);
    const PhiloxWords words = rounding_words(rounding, element / kRoundedAtOnce);
    const bool second = element % kRoundedAtOnce >= 4;
    const uint32_t low = second ? words.word[2] : words.word[0];
    const uint32_t high = second ? words.word[3] : words.word[1];
    return (uint64_t)high << 32 | low;
  }
  uint64_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const uint64_t element = (uint64_t)rounding.elements(first + i);
    const PhiloxWords words = rounding_words(rounding, element / kRoundedAtOnce);
    const int place = (int)(element % kRoundedAtOnce);
    const uint32_t even = place >= 4 ? words.word[2] : words.word[0];
    const uint32_t odd = place >= 4 ? words.word[3] : words.word[1];
    const uint32_t word = place & 2 ? odd : even;
    bits |= (uint64_t)(word >> (place & 1) * 16 & 0xffffu) << i * 16;
  }
  return bits;
}

TW_NAMESPACE_END
