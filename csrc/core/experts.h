// What the experts of a mixture compute between their GEMMs.
#pragma once

#include "core/act.h"

TW_NAMESPACE_BEGIN

// Rows are contiguous. Accumulate is Accumulate<dtype>.
struct ExpertsAct {
  const void* z;      // [rows, 2 * width], gates and then ups; [rows, width] without gates
  const void* grad;   // [rows, width], the gradient of a row's result by its hidden layer
  const void* scale;  // [rows], Accumulate, factors of the rows' results; or null: ones
  void* hidden;       // [rows, width], in the backward pass times scale; may be grad
  void* grad_z;       // like z; may be z
  void* grad_scale;   // [rows], Accumulate, the sums of grad * hidden
  int64_t rows, width;
  double limit, up_offset;  // of gated rows: clamps gate from above and up on both sides
  bool gated;
  Activation activation;
  DType dtype;
};

// Adds rows to the sums of their tokens, in the order of the rows.
struct ExpertsSum {
  const void* rows;       // [count, width], dtype
  const int64_t* places;  // [tokens, top], ascending: where each token's rows are among all rows
  const void* scale;      // [count], Accumulate<dtype>, factors of the rows; or null: ones
  void* sums;             // [tokens, width], Accumulate<dtype>
  int64_t tokens, top, width;
  int64_t first, count;  // the rows are a part of all rows
  DType dtype;
};

TW_NAMESPACE_END
