// The GEMMs of cuBLASLt's on either side of gelu by tanh: what their launchers take.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// Tensors are contiguous, and all of dtype; products of float32 may be those of tf32 if it says so.

// linear_act: y = gelu(z), z = x @ weight^T + bias.
struct LinearAct {
  const void* x;       // [rows, inner]
  const void* weight;  // [columns, inner]
  const void* bias;    // [columns], or null: zeros
  void* y;             // [rows, columns]
  void* z;             // [rows, columns], or null: not wanted
  int64_t rows, columns, inner;
  DType dtype;
  bool tf32;
};

// The layer behind it, y = gelu(z) @ weight^T: grad_z = (grad_y @ weight) * gelu'(z), grad_bias its sum
// over rows.
struct ActLinearBackward {
  const void* grad_y;  // [rows, inner]
  const void* weight;  // [inner, columns]
  const void* z;       // [rows, columns]
  void* grad_z;        // [rows, columns]
  void* grad_bias;     // [columns], or null: not wanted
  int64_t rows, columns, inner;
  DType dtype;
  bool tf32;
};

// What a launcher returns where cuBLASLt does not serve; 0 is success, others are its own.
constexpr int kNotServed = -1;

}  // namespace torchweld
