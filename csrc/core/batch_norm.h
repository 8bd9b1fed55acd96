// Batch normalisation of the columns of a matrix, followed by an activation.
//
//   statistics  mean and var of each column's elements
//   forward     y = act(z),  z = x_hat * weight + bias,  x_hat = (x - mean) / sqrt(var + eps)
//   backward    g = grad_y * act'(z);  grad_bias = sum over rows of g,
//               grad_weight = sum over rows of g * x_hat,
//               grad_x = weight / sqrt(var + eps) * (g - mean_g - x_hat * mean_g_x_hat)
//
// When the statistics were computed from x, mean_g and mean_g_x_hat are grad_bias and grad_weight
// divided by the number of rows. When the statistics were given, both are zero. The statistics and
// the number of rows may cover more rows than this tensor holds.
#pragma once

#include "core/act.h"
#include "core/norm.h"

TW_NAMESPACE_BEGIN

// Statistics and chunk sums have type Accumulate<dtype>, with shapes [width] and [chunks, width];
// see core/chunks.h.
struct ColumnStatistics {
  const void* x;  // [rows, width], dtype
  void* mean;
  void* var;  // divided by the number of rows
  void* chunk_means;
  void* chunk_squares;  // sums of squares of x minus the chunk's mean
  int64_t rows, width, chunks;
  DType dtype;
};

// Converts statistics and parameters of several dtypes to one type for the passes over x.
struct NormalizeColumns {
  const void* mean;  // [width], statistics_dtype
  const void* var;
  const void* weight;  // [width], param_dtype, or null: ones
  const void* bias;    // [width], param_dtype, or null: zeros
  void* columns;       // [4, width], Accumulate<dtype>: see Columns
  int64_t width;
  double eps;
  DType dtype, param_dtype, statistics_dtype;
};

struct NormalizeActForward {
  const void* x;        // [rows, width], dtype
  const void* columns;  // from NormalizeColumns
  void* y;              // [rows, width], dtype; may be x
  int64_t rows, width;
  Activation activation;
  DType dtype;
};

struct NormalizeActBackward {
  const void* grad_y;        // [rows, width], dtype
  const void* x;             // [rows, width], dtype
  const void* columns;       // from NormalizeColumns
  const void* mean_g;        // [width], Accumulate<dtype>, or null: zeros
  const void* mean_g_x_hat;  // as mean_g
  void* grad_x;              // [rows, width], dtype, or null: not wanted
  void* grad_weight;         // [width], param_dtype, or null: not wanted
  void* grad_bias;           // [width], param_dtype, or null: not wanted
  void* weight_partials;     // [chunks, width], Accumulate<dtype>; null with grad_weight
  void* bias_partials;       // [chunks, width], Accumulate<dtype>; null with grad_bias
  int64_t rows, width, chunks;
  Activation activation;
  DType dtype, param_dtype;
};

template <class A>
struct Columns {
  static constexpr int64_t kCount = 4;
  const A *mean, *rstd, *weight, *bias;

  Columns(const void* columns, int64_t width)
      : mean((const A*)columns), rstd(mean + width), weight(rstd + width), bias(weight + width) {}
};

TW_NAMESPACE_END
