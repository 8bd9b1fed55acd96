// Adaptive norms and gated residuals: rows are modulated by a condition.
//
//   z = x + gate * branch,  y = norm(z) * (1 + scale) + shift, see core/norm.h
//   grad_x = grad_z + the norm's gradient of z,  grad_branch = grad_x * gate,
//   grad_gate = sum of grad_x * branch,  grad_scale = sum of grad_y * z_hat,
//   grad_shift = sum of grad_y, each over the rows that share a row of the modulation
//
// Without a branch, z is x. y is computed from z before z is rounded for storage. The backward pass
// reads the stored z, so mean and rstd are taken from the stored z.
#pragma once

#include "core/norm.h"

TW_NAMESPACE_BEGIN

// A modulation has a row for each `period` rows of x; rows are `stride` elements apart.
struct Modulation {
  const void* data;  // param_dtype; null: absent
  int64_t stride;
};

// In the NormForward, weight and bias are null: scale and shift take their place. x, z and y have
// stream_dtype, which is dtype, or float32 if dtype has 16 bits.
struct ModulationForward : NormForward {
  Modulation gate, scale, shift;
  const void* branch;  // [rows, width], dtype; null: z is x
  void* z;             // [rows, width], stream_dtype; null without a branch
  int64_t period;
  DType stream_dtype;
};

// In the NormBackward, x is z, and grad_weight and grad_bias are the gradients of scale and shift,
// [rows / period, width]. x, grad_y and grad_x have stream_dtype. grad_y is null if there is no norm
// or y was not used, and grad_x if it is not wanted. Each modulation's rows are summed in
// `chunks_each` chunks. If that is 1 there are no partial sums.
struct ModulationBackward : NormBackward {
  Modulation gate, scale;
  const void* grad_z;   // [rows, width], stream_dtype, or null: zeros
  const void* branch;   // [rows, width], dtype; null: there is none
  void* grad_branch;    // [rows, width], dtype, or null: not wanted
  void* grad_gate;      // [rows / period, width], param_dtype, or null: not wanted
  void* gate_partials;  // [chunks, width], or null
  int64_t period, chunks_each;
  DType stream_dtype;
};

TW_NAMESPACE_END
