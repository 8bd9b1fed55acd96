// A step of an optimizer: a rule, a state codec and a parameter codec, in one pass over a list of
// tensors.
//
// A rule computes on floats: it takes a parameter, its gradient and its moments, and leaves the new
// ones in their place. Codecs say how these are kept: moments as float32, bfloat16, or codes of
// 8-bit blocks; a parameter as it is, beside a float32 master of which it is the rounded copy, or
// as a bfloat16 and the 16 bits that complete it to a float32.
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

TW_NAMESPACE_BEGIN

enum class StateCodec : int32_t { f32, bf16, blocks };
enum class ParamCodec : int32_t { plain, master, remainder };

constexpr int kMaxMoments = 3;

// Blocks lie within rows of `width` elements; where moments are not in blocks, all is one row.
struct StepTensor {
  void* param;                // dtype
  const void* grad;           // dtype
  void* completion;           // the master or the remainder, or null
  void* moment[kMaxMoments];  // numbers or codes
  float* absmax[kMaxMoments];
  int64_t width;
  int64_t first_block;
};

// What changes from step to step: its number is that of this tensor's steps, from 1.
struct StepScalars {
  double lr, number;
  double ratio;  // an adaptive rule's, or 1
};

template <class Rule>
struct Step {
  const StepTensor* tensors;  // and one more, whose first_block is the number of all blocks
  const Rule* rules;          // each tensor's
  int64_t count;
  double (*squares)[2];  // a measure's result: each block's, of parameters and of steps
  float grad_factor;     // what gradients are multiplied by before anything else
  DType dtype;
  StateCodec state;
  ParamCodec param;
};

// The tensor that a block belongs to. Tensors without elements have no blocks.
TW_HD int64_t step_tensor(const StepTensor* tensors, int64_t count, int64_t block) {
  int64_t low = 0, high = count;  // first_block[low] <= block < first_block[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (tensors[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

// The squared gradients' sums, over pieces of the work: the same at any number of threads.
constexpr int64_t kSquarePiece = 64;  // blocks
struct GradSquares {
  const StepTensor* tensors;
  int64_t count;
  double* sums;  // [ceil(blocks / kSquarePiece)]
  DType dtype;
};

TW_NAMESPACE_END
