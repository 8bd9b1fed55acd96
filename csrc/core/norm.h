// LayerNorm and RMSNorm, row by row.
//
//   forward    y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//   backward   grad_x = rstd * (g - mean(g) - x_hat * mean(g * x_hat)),  g = grad_y * weight,
//              x_hat = (x - mean) * rstd;  grad_weight = sum over rows of grad_y * x_hat,
//              grad_bias = sum over rows of grad_y
//
// RMSNorm is the same with mean = 0 and without the mean(g) term. One kernel template serves both:
// `Centered` is true for LayerNorm.
#pragma once

#include "core/chunks.h"

TW_NAMESPACE_BEGIN

// Statistics (mean, rstd) and partial sums are of type Accumulate<dtype>. Tensors are contiguous.
struct NormForward {
  const void* x;       // [rows, width], dtype
  const void* weight;  // [width], param_dtype, or null: ones
  const void* bias;    // [width], param_dtype, or null: zeros
  void* y;             // [rows, width], dtype
  void* mean;          // [rows]; null for RMSNorm
  void* rstd;          // [rows]
  int64_t rows, width;
  double eps;
  DType dtype, param_dtype;
};

struct NormBackward {
  const void* grad_y;  // [rows, width], dtype
  const void* x;       // [rows, width], dtype
  const void* weight;  // [width], param_dtype, or null: ones
  const void* mean;    // [rows]; null for RMSNorm
  const void* rstd;    // [rows]
  void* grad_x;        // [rows, width], dtype
  void* grad_weight;   // [width], param_dtype, or null: not wanted
  void* grad_bias;     // [width], param_dtype, or null: not wanted
  // Parameter gradients take the two stages of core/chunks.h.
  void* weight_partials;  // [chunks, width], or null with grad_weight
  void* bias_partials;    // [chunks, width], or null with grad_bias
  void* workspace;        // norm_workspace_bytes(rows, width), uninitialised; null if that is 0
  int64_t rows, width, chunks;
  DType dtype, param_dtype;
};

// x_hat of one element.
template <class A>
TW_HD A norm_normalize(A x, A mean, A rstd) {
  return (x - mean) * rstd;
}

// grad_x of one element; mean_g is zero for RMSNorm.
template <class A>
TW_HD A norm_grad_x(A g, A x_hat, A rstd, A mean_g, A mean_g_x_hat) {
  return rstd * (g - mean_g - x_hat * mean_g_x_hat);
}

TW_NAMESPACE_END
