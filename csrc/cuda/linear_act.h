// linear_act as one GEMM of cuBLASLt's: what its launcher takes.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace torchweld {

// Tensors are contiguous, and all of dtype.
struct LinearAct {
  const void* x;       // [rows, inner]
  const void* weight;  // [columns, inner]
  const void* bias;    // [columns], or null: zeros
  void* y;             // [rows, columns]: gelu, by tanh, of z
  void* z;             // [rows, columns]: x @ weight^T + bias; or null: not wanted
  int64_t rows, columns, inner;
  DType dtype;
  bool tf32;  // whether products of float32 may be
};

// What a launcher returns where cuBLASLt does not serve; 0 is success, others are its own.
constexpr int kNotServed = -1;

}  // namespace torchweld
