// Adds x + bias, after dropout, to a residual stream.
//
//   y = residual + (x + bias) * kept;   grad_x = grad_y * kept, grad_bias = sum over rows of grad_x
//
// kept is 0 where an element is dropped, else 1 / (1 - p). grad_residual is grad_y.
#pragma once

#include "core/chunks.h"
#include "core/dropout.h"

TW_NAMESPACE_BEGIN

// Tensors are contiguous. stream_dtype and bias_dtype are dtype, or float32 if dtype has 16 bits.
struct BiasDropoutAddForward {
  const void* x;         // [rows, width], dtype
  const void* bias;      // [width], bias_dtype, or null: zeros
  const void* residual;  // [rows, width], stream_dtype
  void* y;               // [rows, width], stream_dtype
  int64_t rows, width;
  DType dtype, bias_dtype, stream_dtype;
  Dropout dropout;
};

struct BiasDropoutAddBackward {
  const void* grad_y;  // [rows, width], stream_dtype
  void* grad_x;        // [rows, width], dtype, or null: not wanted
  void* grad_bias;     // [width], bias_dtype, or null: not wanted
  void* partials;      // [chunks, width], Accumulate<dtype>, or null with grad_bias
  int64_t rows, width, chunks;
  DType dtype, bias_dtype, stream_dtype;
  Dropout dropout;
};

TW_NAMESPACE_END
