// Block-wise 8-bit numbers. A block is 256 elements of a row, or fewer at the row's end. It stores
// the largest magnitude among its elements, and for each element a code: the index of the map's
// value nearest to element / largest.
//
// The two maps of 256 values are the dynamic maps of bitsandbytes, bit for bit. They hold 0, 1 and,
// for each of the seven decades below 1, the midpoints of 2^decade (signed) or 2^(decade + 1)
// (unsigned) equal parts. In the signed map every value except 1 appears with either sign.
//
// Finding the nearest value takes one look-up. `place` has an entry for every run of floats with
// the same leading bits. Runs are short enough to contain at most one threshold between two values.
// Adding the float's bits to the entry carries into the value's number exactly if the float is at
// or above the threshold.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr int64_t kQuantBlock = 256;

struct Quantize8 {
  const void* x;   // [rows, width], dtype
  uint8_t* codes;  // [rows, width]
  float* absmax;   // [rows, ceil(width / kQuantBlock)]
  int64_t rows, width;
  DType dtype;
  bool is_signed;
};

struct Dequantize8 {
  const uint8_t* codes;
  const float* absmax;
  void* y;  // [rows, width], dtype
  int64_t rows, width;
  DType dtype;
  bool is_signed;
};

TW_HD int64_t quant_blocks(int64_t width) { return (width + kQuantBlock - 1) / kQuantBlock; }

// A block's elements: [begin, begin + count) of the whole tensor.
struct QuantBlock {
  int64_t begin, count;
};
template <class Count>  // Count should be narrow: divisions are expensive on a GPU
TW_HD QuantBlock quant_block(Count block, int64_t width) {
  const Count per_row = (Count)quant_blocks(width), row = block / per_row;
  const int64_t column = (int64_t)(block - row * per_row) * kQuantBlock;
  const int64_t left = width - column;
  return {(int64_t)row * width + column, left < kQuantBlock ? left : kQuantBlock};
}

// The divisor of a block's elements. A block of zeros is divided by 1, so that its codes stand for
// 0.
TW_HD float quant_divisor(float absmax) { return absmax == 0 ? 1.0f : absmax; }

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kOneBits = 0x3f800000u;
constexpr uint32_t kInfinityBits = 0x7f800000u;

// Values are numbered by magnitude: 0 is number 0, 1 is number kTop.
template <bool Signed>
struct Quant8Map {
  static constexpr int kTop = Signed ? 128 : 255;
  static constexpr int kShift = Signed ? 17 : 16;  // low bits in which the floats of a run differ
  static constexpr uint32_t kFirst = 0x34000000u;  // 2^-23: smaller fractions are nearest to 0
  static constexpr int kRuns = ((kOneBits - kFirst) >> kShift) + 1;

  alignas(64) float value[256];  // indexed by code
  float threshold[kTop];         // the smallest float that is at least as near to the next number
  uint32_t place[kRuns];
  bool is_exact;  // no run has two thresholds, and none lies below kFirst
};

// The bits of a positive normal float, computed: nvcc cannot bit-cast in a constant expression.
constexpr uint32_t bits_of_positive(float v) {
  uint32_t exponent = 127;
  for (; v < 1; v *= 2) --exponent;
  return (exponent << 23) + (uint32_t)((v - 1) * 0x1p23f);  // v is at most 1
}

template <bool Signed>
constexpr Quant8Map<Signed> quant8_map() {
  using Map = Quant8Map<Signed>;
  constexpr float kDecade[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1e0f};
  float magnitude[Map::kTop + 1] = {};
  int count = 1;
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = 1 << (Signed ? decade : decade + 1);
    // torch.linspace computes boundaries this way: from both ends, rounded once.
    const float step = (1.0f - 0.1f) / parts;
    float below = 0.1f;
    for (int part = 1; part <= parts; ++part) {
      const bool upper = part >= (parts + 1) / 2;
      const float boundary =
          (float)(upper ? 1.0 - (double)step * (parts - part) : (double)0.1f + (double)step * part);
      magnitude[count++] = kDecade[decade] * ((below + boundary) / 2);
      below = boundary;
    }
  }
  magnitude[Map::kTop] = 1;

  Map map{};
  for (int code = 0; code < 256; ++code) {
    map.value[code] = !Signed      ? magnitude[code]
                      : code < 127 ? -magnitude[127 - code]
                                   : magnitude[code - 127];
  }
  uint32_t threshold_bits[Map::kTop] = {};
  for (int number = 0; number < Map::kTop; ++number) {
    const double middle = ((double)magnitude[number] + (double)magnitude[number + 1]) / 2;
    const float nearest = (float)middle;
    const bool is_below = (double)nearest < middle;
    // The next float is larger by a factor of 1 + 2^-24 to 1 + 2^-23. This product rounds to it.
    map.threshold[number] = is_below ? (float)((double)nearest * (1 + 0x1.4p-24)) : nearest;
    threshold_bits[number] = bits_of_positive(nearest) + is_below;
  }
  map.is_exact = true;
  int number = 0;
  for (int run = 0; run < Map::kRuns; ++run) {
    const uint32_t begin = Map::kFirst + ((uint32_t)run << Map::kShift);
    const uint32_t end = begin + (1u << Map::kShift);
    map.place[run] = ((uint32_t)number << Map::kShift) - begin;
    for (int count = 0; number < Map::kTop; ++count, ++number) {
      const uint32_t bits = threshold_bits[number];
      if (bits >= end) break;
      if (bits < begin || count > 0) map.is_exact = false;
      map.place[run] += end - bits;
    }
  }
  return map;
}

template <bool Signed>
inline constexpr Quant8Map<Signed> kQuant8Map = quant8_map<Signed>();
static_assert(kQuant8Map<true>.is_exact && kQuant8Map<false>.is_exact, "a run is too long");

// Maps the bits of a fraction, or of a vector of fractions, to the number of the value nearest to
// its magnitude. `look_up(run)` returns place[run]. A block whose largest magnitude is not finite
// produces NaN fractions, which get the number of 1.
template <bool Signed, class Bits, class LookUp>
TW_HD Bits quant8_number(Bits fraction, LookUp&& look_up) {
  using Map = Quant8Map<Signed>;
  const Bits none = fraction - fraction;
  Bits magnitude = fraction & ~kSignBit;
  magnitude = magnitude < Map::kFirst ? none + Map::kFirst : magnitude;
  magnitude = magnitude > kOneBits ? none + kOneBits : magnitude;
  return (look_up((magnitude - Map::kFirst) >> Map::kShift) + magnitude) >> Map::kShift;
}

// The code for that number with the fraction's sign.
template <bool Signed, class Bits>
TW_HD Bits quant8_code(Bits fraction, Bits number) {
  if constexpr (!Signed) return number;
  const Bits most = fraction - fraction + 127u;
  const Bits below = most - (number > 127u ? most : number);  // the map has no -1
  return fraction >= kSignBit ? below : 127u + number;
}

TW_NAMESPACE_END
