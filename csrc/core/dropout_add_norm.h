// LayerNorm and RMSNorm of a residual stream, to which x is added after dropout.
//
//   z = x * kept + residual,  y = norm(z), see core/norm.h
//   grad_residual = grad_z + the norm's gradient of z,  grad_x = grad_residual * kept
//
// kept is 0 where an element is dropped, else 1 / (1 - p). y is computed from z before z is rounded
// for storage. The backward pass reads the stored z, so mean and rstd are taken from the stored z:
// in a row of nearly equal elements, other statistics would make x_hat large. y has dtype, or
// float32 if dtype has 16 bits, as under autocast.
#pragma once

#include "core/dropout.h"
#include "core/norm.h"

TW_NAMESPACE_BEGIN

// The stream (z and residual) has dtype, or float32 if dtype has 16 bits.
struct DropoutAddNormForward : NormForward {
  const void* residual;  // [rows, width], stream_dtype, or null: zeros
  void* z;               // [rows, width], stream_dtype
  DType stream_dtype, y_dtype;
  Dropout dropout;
};

// In the NormBackward, x is z and has stream_dtype, and grad_x is null if it is not wanted. grad_y has
// y_dtype; null: y was not used, so there is only grad_z, and the partials are zeros.
struct DropoutAddNormBackward : NormBackward {
  const void* grad_z;   // [rows, width], stream_dtype, or null: zeros
  void* grad_residual;  // [rows, width], stream_dtype, or null: not wanted
  DType stream_dtype, y_dtype;
  Dropout dropout;
};

TW_NAMESPACE_END
