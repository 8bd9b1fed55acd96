// Stochastic rounding of float32 to bfloat16: up or down to a neighbouring value, with
// probabilities that make the expected result exact. Steps too small to change the nearest bfloat16
// still accumulate.
//
// The random bits depend only on the parameter, the step, and the element's position in the whole
// tensor. So every backend and every shard rounds an element the same way, and no generator state
// is kept:
//
//   counter = (low and high half of element >> 3, step, 1 + the parameter's number), key = 0;
//   eight elements take the halves of four words, low half first.
//
// Dropout's counters end in 0, so the two never share a counter.
#pragma once

#include "core/philox.h"
#include "core/rows.h"

TW_NAMESPACE_BEGIN

struct Rounding {
  RowMap elements;     // maps local elements to elements of the whole tensor
  int64_t run;         // local elements that are contiguous in the whole tensor
  uint32_t parameter;  // 1 + its number
  uint32_t step;       // from 1
  bool in_fours;       // aligned groups of four elements are aligned groups in the whole tensor
};

constexpr int kRoundedAtOnce = 8;

TW_HD PhiloxWords rounding_words(const Rounding& rounding, uint64_t group) {
  const uint32_t low = (uint32_t)group, high = (uint32_t)(group >> 32);
  return philox({{low, high, rounding.step, rounding.parameter}}, 0, 0);
}

// Rounds a float's bits to a bfloat16's; `random` has 16 bits. From the largest finite bfloat16 on,
// rounding is to nearest, so that noise cannot turn a finite value into infinity. NaN becomes
// torch's quiet NaN.
template <class Bits>
TW_HD Bits round_randomly(Bits bits, Bits random) {
  const Bits magnitude = bits & 0x7fffffffu, zero = Bits{};
  const Bits half = (bits + (magnitude < 0x7f7f0000u ? random : zero + 0x8000u)) >> 16;
  return magnitude > 0x7f800000u ? zero + 0x7fc0u : half;
}

TW_NAMESPACE_END
