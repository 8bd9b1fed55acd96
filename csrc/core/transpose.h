// The transposition of a matrix of 16-bit elements, which are bits to it.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

struct Transpose {
  const void* x;  // [rows, columns]
  void* y;        // [columns, rows]
  int64_t rows, columns;
  DType dtype;
};

// An item of the work is as many columns.
constexpr int64_t kTransposeBlock = 64;

TW_NAMESPACE_END
