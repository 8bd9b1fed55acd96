// Stochastic rounding of float32 to bfloat16: up or down to one of the two next to the value, with
// probabilities that make the result right on average. Steps that are too small to change the nearest
// bfloat16 are not lost.
//
// The random bits depend on the parameter, the step, and where an element lies in the whole tensor. So
// every backend and every shard rounds the element alike, and no generator has a state:
//
//   counter = (low and high half of element >> 3, step, 1 + the parameter's number), key = 0;
//   eight elements take the halves of four words, the low half first.
//
// Dropout's counters end in 0.
#pragma once

#include "core/philox.h"
#include "core/rows.h"

TW_NAMESPACE_BEGIN

struct Rounding {
  RowMap elements;     // of this part, in the whole tensor
  int64_t run;         // so many after each other here are so there
  uint32_t parameter;  // 1 + its number
  uint32_t step;       // from 1
  bool in_fours;       // four elements from a multiple of four on are so there too
};

constexpr int kRoundedAtOnce = 8;

TW_HD PhiloxWords rounding_words(const Rounding& rounding, uint64_t group) {
  const uint32_t low = (uint32_t)group, high = (uint32_t)(group >> 32);
  return philox({{low, high, rounding.step, rounding.parameter}}, 0, 0);
}

// The bits of a float as those of a bfloat16; `random` is 16 bits. From the largest bfloat16 on,
// rounding is to the nearest: randomness brings infinity no nearer. NaN becomes torch's quiet NaN.
template <class Bits>
TW_HD Bits rounded_half(Bits bits, Bits random) {
  const Bits magnitude = bits & 0x7fffffffu, zero = Bits{};
  const Bits half = (bits + (magnitude < 0x7f7f0000u ? random : zero + 0x8000u)) >> 16;
  return magnitude > 0x7f800000u ? zero + 0x7fc0u : half;
}

TW_NAMESPACE_END
