// A step of an optimizer: a rule, a state codec and a parameter codec, in one pass over a list of
// tensors.
//
// A rule computes on floats. It takes a parameter, its gradient and its moments, and updates
// parameter and moments in place. Codecs say how parameters and moments are stored. Moments are
// float32, bfloat16, or codes of 8-bit blocks. A parameter is stored in one of five ways: plainly,
// as the rounded copy of a float32 master, as a bfloat16 plus the 16 bits that complete it to a
// float32 or the 8 bits that complete it to 24, or as a bfloat16 with stochastic rounding.
//
// A tensor may have per-element float32 companions: an average of the parameter that every step
// moves towards it, or the second iterate of a rule that has one.
//
// An adaptive rule scales the step of each tensor by a ratio of norms, which an earlier pass
// measures. That pass also computes the step but writes only norms. If it wrote the moments, they
// would be read and written twice, and with 8-bit codecs the ratio would be that of rounded
// moments.
//
// Work is counted in blocks of 256 elements over all tensors. Equal ranges of blocks are equal
// amounts of work, whatever the tensors' sizes.
#pragma once

#include <cmath>

#include "core/quant8.h"
#include "core/rounding.h"

TW_NAMESPACE_BEGIN

enum class StateCodec : int32_t { f32, bf16, blocks };
enum class ParamCodec : int32_t { plain, master, remainder, short_remainder, rounded };

constexpr int kMaxMoments = 3;

// Blocks lie within rows of `width` elements. If moments are not stored in blocks, the tensor is
// one row.
struct StepTensor {
  void* param;                // dtype
  const void* grad;           // dtype
  void* master;               // the master, the remainder or the Rounding, or null
  void* moment[kMaxMoments];  // numbers or codes
  float* absmax[kMaxMoments];
  float* companion;  // or null
  int64_t width;
  int64_t first_block;
};

// Rows split across devices. The local part of a block is a piece. A step decodes a piece with the
// whole block's old absmax and encodes it with the whole block's new absmax.
struct SplitRows {
  const int64_t* edges;  // [pieces + 1], in elements of a row
  int64_t pieces;
  float* new_absmax[kMaxMoments];  // [rows, pieces]: an earlier pass finds it, the step reads it
};
// The elements of a piece.
template <class Count>  // as in quant_block
TW_HD QuantBlock piece_of(const SplitRows& rows, Count piece, int64_t width) {
  const Count row = piece / (Count)rows.pieces;
  const int64_t* edge = rows.edges + (piece - row * (Count)rows.pieces);
  return {(int64_t)row * width + edge[0], edge[1] - edge[0]};
}

// A number that changes from step to step: a value that the host knows, or one in the memory of the
// device that runs the step.
struct Number {
  double value;
  void* at;        // null if `value` is known
  bool is_double;  // the type at `at`; otherwise float

  TW_HD double read() const {
    return !at ? value : is_double ? *(const double*)at : (double)*(const float*)at;
  }
  TW_HD void write(double number) const {
    is_double ? void(*(double*)at = number) : void(*(float*)at = (float)number);
  }
};

// The per-tensor numbers that a rule's constructor takes.
struct StepScalars {
  double lr;
  double number;  // of the tensor's steps, from 1
  double ratio;   // for adaptive rules, else 1
};

// A pass over tensors with any rule.
struct AnyStep {
  const StepTensor* tensors;  // plus a sentinel, whose first_block is the number of blocks
  int64_t count;
  DType dtype;
  StateCodec state;
  ParamCodec param;
  Number lr;
  const double* lrs;        // one per tensor, in host memory; or null: all use lr
  const Number* steps;      // steps taken by each tensor
  const double* ratios;     // one per tensor, or null
  Number grad_factor;       // multiplies gradients first
  Number found_inf;         // if not zero, nothing changes
  Number average_rate;      // of companions that are averages: the weight of a new parameter
  double (*squares)[2];     // measuring pass: sums per block or piece, of parameters and of steps
  double (*sums)[2];        // measuring pass: sums per tensor
  const SplitRows* splits;  // one per tensor; or null if rows are whole
  bool only_absmaxes;       // split rows: write new_absmax of the pieces and nothing else
  // One per tensor, or null. On a GPU a kernel writes them, with the step numbers, to the tensors'
  // masters.
  const Rounding* roundings;
};

template <class Rule>
struct Step : AnyStep {
  Rule* rules;  // one per tensor; on a GPU uninitialised, a kernel makes them
  typename Rule::Settings settings;
};

// The last index below `count` for which begun(i) holds. begun is monotonic and holds for index 0.
template <class Index, class Begun>
TW_HD Index last_begun(Index count, Begun&& begun) {
  Index low = 0, high = count;
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (begun(middle) ? low : high) = middle;
  }
  return low;
}
// The tensor that a block lies in. Another `first` looks up another kind of item. Tensors without
// elements have no blocks.
template <class Tensor>
TW_HD int64_t step_tensor(const Tensor* tensors, int64_t count, int64_t block,
                          int64_t Tensor::* first = &Tensor::first_block) {
  return last_begun(count, [=](int64_t i) { return tensors[i].*first <= block; });
}

// Skip an element whose last moment is not finite, and reset its moments to zero. A block cannot
// store such a moment: the block's absmax would become infinite or NaN for all its elements. In
// every rule the last moment overflows first. Works on one element or on a vector.
template <int N, class V, class Sound>
TW_HD void skip_unless(Sound sound, V& p, V before, V* m) {
  p = sound ? p : before;
  for (int k = 0; k < N; ++k) m[k] = sound ? m[k] : V{};
}

// Whether a rule reads and writes companions: it takes them as its last argument. Other rules'
// companions are averages.
template <class Rule, class = void>
constexpr bool kHasCompanion = false;
template <class Rule>
constexpr bool kHasCompanion<Rule, decltype((void)Rule::kIterates)> = true;

// Whether two numbers have the same sign, or opposite signs. A product could underflow.
template <class V>
TW_HD auto agree(V a, V b) {
  return ((a > 0) & (b > 0)) | ((a < 0) & (b < 0));
}
template <class V>
TW_HD auto oppose(V a, V b) {
  return ((a > 0) & (b < 0)) | ((a < 0) & (b > 0));
}

// A float32's bits are its bfloat16's bits followed by 16 zeros, plus the remainder, a signed
// number. The bfloat16 is the nearest one; ties go to the larger magnitude, since the other one's
// remainder would be 2^15, which does not fit.
template <class Bits>
TW_HD Bits complete(Bits half, Bits remainder) {
  return (half << 16) + ((remainder ^ 0x8000u) - 0x8000u);
}
template <class Bits>
TW_HD Bits round_to_nearest_half(Bits bits) {
  return (bits + 0x8000u) >> 16;
}

// A float of 24 bits is the float32 whose last 8 bits are zeros. A bfloat16 and a signed number of 8
// bits make one as above. A float32 is rounded to the nearest one, at a tie to the even one.
template <class Bits>
TW_HD Bits complete_24(Bits half, Bits remainder) {
  return ((half << 8) + ((remainder ^ 0x80u) - 0x80u)) << 8;
}
template <class Bits>
TW_HD Bits round_to_24(Bits bits) {
  return (bits + 0x7fu + ((bits >> 8) & 1u)) >> 8;
}
template <class Bits>
TW_HD Bits half_of_24(Bits bits) {
  return (bits + 0x80u) >> 8;
}

// Sums of squared gradients over pieces of the work, so that the result is the same at any number
// of threads. On a GPU a piece lies within one tensor.
constexpr int64_t kSquarePiece = 64;  // blocks
struct GradSquares {
  const StepTensor* tensors;
  int64_t count;
  double* sums;   // one per piece
  double* total;  // on a GPU: their sum
  DType dtype;
};

TW_NAMESPACE_END
