// Transposes a matrix of 16-bit elements as raw bits, or mirrors its lower triangle.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

struct Transpose {
  const void* x;  // [rows, columns]
  void* y;        // [columns, rows]
  int64_t rows, columns;
  DType dtype;
};

struct Mirror {
  void* matrix;  // [size, size]
  int64_t size;
  DType dtype;
};

// Columns, or rows, per work item.
constexpr int64_t kTransposeBlock = 64;

TW_NAMESPACE_END
