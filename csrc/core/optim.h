// A step of an optimizer: a rule, a state codec and a parameter codec, in one pass over a list of
// tensors.
//
// A rule computes on floats. It takes a parameter, its gradient and its moments, and leaves the new
// ones in their place. Codecs say how parameters and moments are stored. Moments are float32,
// bfloat16, or codes of 8-bit blocks. A parameter is stored in one of four ways: as it is, as the
// rounded copy of a float32 master, as a bfloat16 and the 16 bits that complete it to a float32, or
// as a bfloat16 that is rounded stochastically.
//
// An adaptive rule scales the step of each tensor by a ratio of norms, which a pass before the step
// measures. That pass computes the step too and writes nothing. Writing the moments there would cost
// their memory traffic twice, and the ratio of what 8 bits keep of them is another one.
//
// The work is counted in blocks of 256 elements, from the first block of the first tensor to the last
// one of the last tensor. So equal ranges are equal amounts of work, whatever the tensors' sizes.
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
  void* master;               // the master, the remainder or the Rounding, or null
  void* moment[kMaxMoments];  // numbers or codes
  float* absmax[kMaxMoments];
  int64_t width;
  int64_t first_block;
};

// Rows split across devices. The local part of a block is a piece. A step decodes a piece with the
// whole block's absmax as it was, and encodes it with the absmax that the block has from now on.
struct SplitRows {
  const int64_t* edges;  // [pieces + 1], elements of a row
  int64_t pieces;
  float* new_absmax[kMaxMoments];  // [rows, pieces]: found by a pass of its own, read by the step
};
// The elements of a piece.
template <class Count>  // as quant_block's
TW_HD QuantBlock piece_of(const SplitRows& rows, Count piece, int64_t width) {
  const Count row = piece / (Count)rows.pieces;
  const int64_t* edge = rows.edges + (piece - row * (Count)rows.pieces);
  return {(int64_t)row * width + edge[0], edge[1] - edge[0]};
}

// A number that changes from step to step. It is known already, or in memory that the device of the
// step reads.
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

// The numbers that the rule of a tensor is made from.
struct StepScalars {
  double lr;
  double number;  // of this step of the tensor, from 1
  double ratio;   // an adaptive rule's, or 1
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
  Number grad_factor;    // multiplies gradients before anything else
  Number found_inf;      // where it is not zero, nothing changes
  double (*squares)[2];  // of a measure: sums for each block or piece, of parameters and of steps
  double (*sums)[2];     // of a measure: sums for each tensor
  DType dtype;
  StateCodec state;
  ParamCodec param;
  const SplitRows* splits;  // each tensor's, or null where rows are whole
  bool only_absmaxes;       // of split rows: find new_absmax of the pieces, and write nothing else
  // Each tensor's, or null; on a GPU the tensors' masters are room for them and the steps.
  const Rounding* roundings;
};

// The last of `count` ordered things for which begun(i) holds; it holds for the first one.
template <class Index, class Begun>
TW_HD Index last_begun(Index count, Begun&& begun) {
  Index low = 0, high = count;
  while (high - low > 1) {
    const Index middle = (low + high) / 2;
    (begun(middle) ? low : high) = middle;
  }
  return low;
}
// The tensor that a block lies in; with another `first`, an item of another kind. Tensors without
// elements have no blocks.
template <class Tensor>
TW_HD int64_t step_tensor(const Tensor* tensors, int64_t count, int64_t block,
                          int64_t Tensor::* first = &Tensor::first_block) {
  return last_begun(count, [=](int64_t i) { return tensors[i].*first <= block; });
}

// Skip an element whose last moment is not finite, and start its moments anew. Blocks have no room
// for such a moment, and it would spoil its neighbours. No other moment of a rule is infinite before
// the last one is. For one element or a vector of them.
template <int N, class V, class Sound>
TW_HD void skip_unless(Sound sound, V& p, V before, V* m) {
  p = sound ? p : before;
  for (int k = 0; k < N; ++k) m[k] = sound ? m[k] : V{};
}

// The bits of a float32 are those of its bfloat16 followed by 16 zeros, plus the remainder, a signed
// number. The bfloat16 is the nearest one, and the larger in magnitude of two that are as near: the
// remainder of the other one would be 2^15, one too many.
template <class Bits>
TW_HD Bits completed(Bits half, Bits remainder) {
  return (half << 16) + ((remainder ^ 0x8000u) - 0x8000u);
}
template <class Bits>
TW_HD Bits nearest_half(Bits bits) {
  return (bits + 0x8000u) >> 16;
}

// Sums of squared gradients over pieces of the work, the same at any number of threads. On a GPU a
// piece lies within a tensor.
constexpr int64_t kSquarePiece = 64;  // blocks
struct GradSquares {
  const StepTensor* tensors;
  int64_t count;
  double* sums;   // of each piece
  double* total;  // on a GPU: of all
  DType dtype;
};

TW_NAMESPACE_END
