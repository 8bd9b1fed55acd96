// A step of an optimizer: a rule, a state codec and a parameter codec, in one pass over a list of
// tensors.
//
// A rule computes on floats: it takes a parameter, its gradient and its moments, and leaves the new
// ones in their place. Codecs say how these are kept: moments as float32, bfloat16, or codes of
// 8-bit blocks; a parameter as it is, beside a float32 master of which it is the rounded copy, as a
// bfloat16 and the 16 bits that complete it to a float32, or as a bfloat16 that is rounded at random.
//
// An adaptive rule's step is longer or shorter for each tensor: by a ratio of norms, which are
// measured in a pass before it. That computes the step too, and leaves everything as it is: moments
// would have to be written and read again otherwise, and the ratio of what 8 bits keep of them is
// another.
//
// The work is counted in blocks of 256 elements, from the first tensor's first to the last tensor's
// last, so that a range of it is as much work as another of its length, whatever the tensors' sizes.
#pragma once

#include <cmath>

#include "core/quant8.h"
#include "core/rounding.h"

TW_NAMESPACE_BEGIN

enum class StateCodec : int32_t { f32, bf16, blocks };
enum class ParamCodec : int32_t { plain, master, remainder, rounded };

constexpr int kMaxMoments = 3;

// Blocks lie within rows of `width` elements; where moments are not in blocks, all is one row.
struct StepTensor {
  void* param;                // dtype
  const void* grad;           // dtype
  void* completion;           // the master, the remainder or the Rounding, or null
  void* moment[kMaxMoments];  // numbers or codes
  float* absmax[kMaxMoments];
  int64_t width;
  int64_t first_block;
};

// Rows of which other devices have a part, and of some blocks too: what is here of one is a piece.
// absmax is [2, rows, pieces] then: of the whole blocks as they were, and as they become.
struct CutRows {
  const int64_t* edges;  // [pieces + 1], elements of a row
  int64_t pieces;
  int64_t all_pieces;  // of all rows: from an absmax as it was to what it becomes
};
// The elements of a piece.
template <class Count>  // as quant_block's
TW_HD QuantBlock cut_block(const CutRows& rows, Count piece, int64_t width) {
  const Count row = piece / (Count)rows.pieces;
  const int64_t* edge = rows.edges + (piece - row * (Count)rows.pieces);
  return {(int64_t)row * width + edge[0], edge[1] - edge[0]};
}

// A number that changes from step to step: in memory that the step's device reads when it is there,
// or known already.
struct Number {
  double value;
  void* at;        // or null, where it is known
  bool is_double;  // what lies there; otherwise it is a float

  TW_HD double read() const {
    return !at ? value : is_double ? *(const double*)at : (double)*(const float*)at;
  }
  TW_HD void write(double number) const {
    is_double ? void(*(double*)at = number) : void(*(float*)at = (float)number);
  }
};

// What a tensor's rule is made of: its number is that of this tensor's steps, from 1.
struct StepScalars {
  double lr, number;
  double ratio;  // an adaptive rule's, or 1
};

template <class Rule>
struct Step {
  const StepTensor* tensors;  // and one more, whose first_block is the number of all blocks
  Rule* rules;                // each tensor's; on a GPU room for them, since they are made there
  int64_t count;
  typename Rule::Settings settings;
  Number lr;
  const double* lrs;     // each tensor's, in the host's memory, or null where it is the same
  const Number* steps;   // taken by each tensor
  const double* ratios;  // each tensor's, or null
  Number grad_factor;    // what gradients are multiplied by before anything else
  Number found_inf;      // where it is not zero, all stays as it is
  double (*squares)[2];  // of a measure: a block's or a piece's, of parameters and of steps
  double (*sums)[2];     // of a measure: each tensor's
  DType dtype;
  StateCodec state;
  ParamCodec param;
  const CutRows* cuts;  // each tensor's, or null where rows are whole
  bool only_absmaxes;   // of cut rows: find what the absmax of pieces become, and leave all else
  // Each tensor's, or null; on a GPU the tensors' completions are room for them and the steps.
  const Rounding* roundings;
};

// The last of `count` things in order that has begun(i); the first one has.
template <class Index, class Begun>
TW_HD Index last_begun(Index count, Begun&& begun) {
  Index low = 0, high = count;
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (begun(middle) ? low : high) = middle;
  }
  return low;
}
// The tensor that a block belongs to, or another item whose first one tensors have. Tensors without
// elements have no blocks.
template <class Tensor>
TW_HD int64_t step_tensor(const Tensor* tensors, int64_t count, int64_t block,
                          int64_t Tensor::* first = &Tensor::first_block) {
  return last_begun(count, [=](int64_t i) { return tensors[i].*first <= block; });
}

// An element whose last moment is not finite is skipped, and its moments start anew: blocks have no
// room for it, and it would take its neighbours with it. No other moment of a rule is infinite
// before the last. For one element or a vector of them.
template <int N, class V, class Sound>
TW_HD void skip_unless(Sound sound, V& p, V before, V* m) {
  p = sound ? p : before;
  for (int k = 0; k < N; ++k) m[k] = sound ? m[k] : V{};
}

// A float32's bits are those of the bfloat16 and 16 zeros, plus the remainder, a signed number. The
// bfloat16 is the nearest one, of two as near that of larger magnitude: the remainder of the other
// would be 2^15, one too many.
template <class Bits>
TW_HD Bits completed(Bits half, Bits remainder) {
  return (half << 16) + ((remainder ^ 0x8000u) - 0x8000u);
}
template <class Bits>
TW_HD Bits nearest_half(Bits bits) {
  return (bits + 0x8000u) >> 16;
}

// The squared gradients' sums, over pieces of the work: the same at any number of threads. On a GPU
// a piece lies within a tensor.
constexpr int64_t kSquarePiece = 64;  // blocks
struct GradSquares {
  const StepTensor* tensors;
  int64_t count;
  double* sums;   // each piece's
  double* total;  // on a GPU
  DType dtype;
};

TW_NAMESPACE_END
