// The arguments of the launchers of cuBLASLt's two GEMMs: the one before and the one after gelu
// (tanh form).
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// Tensors are contiguous and of dtype. With tf32, float32 products may be computed in tf32.

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

// The layer after it, y = gelu(z) @ weight^T: grad_z = (grad_y @ weight) * gelu'(z), and grad_bias,
// its sum over rows.
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

}  // namespace torchweld
