// LayerNorm and RMSNorm of a residual stream that what dropout leaves of x has been added to.
//
//   z = x * kept + residual,  y = norm(z), see core/norm.h
//   grad_residual = grad_z + the norm's gradient of z,  grad_x = grad_residual * kept
//
// kept is 0 where an element is dropped, else 1 / (1 - p). y is computed from z as it was before it
// was rounded to be stored, its gradients from the z that was. y is of dtype, or, as under autocast,
// of float32 where that has 16 bits.
#pragma once

#include "core/dropout.h"
#include "core/norm.h"

TW_NAMESPACE_BEGIN

// The stream, z and residual, is of dtype, or of float32 where that has 16 bits.
struct DropoutAddNormForward : NormForward {
  const void* residual;  // [rows, width], stream_dtype, or null: zeros
  void* z;               // [rows, width], stream_dtype
  DType stream_dtype, y_dtype;
  Dropout dropout;
};

// Of the NormBackward, x is z and of stream_dtype, grad_y of y_dtype; grad_x may be null, not wanted.
struct DropoutAddNormBackward : NormBackward {
  const void* grad_z;   // [rows, width], stream_dtype, or null: zeros
  void* grad_residual;  // [rows, width], stream_dtype, or null: not wanted
  DType stream_dtype, y_dtype;
  Dropout dropout;
};

TW_NAMESPACE_END
