// A router's choice of experts, and its two losses; python/torchweld/ops/experts/route.py has the
// formulas.
//
// Rows are in blocks of a fixed size, whose sums are added in order: results do not depend on the
// number of threads.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr int64_t kRouteBlock = 64;

// Tensors are contiguous. A is Accumulate<dtype>.
struct Route {
  const void* logits;  // [rows, experts], dtype
  const void* bias;    // [experts], A, or null
  const bool* mask;    // [rows], or null: all count
  int64_t rows, experts, k, groups, top_groups, best_of_group;
  bool sigmoid, renormalize;
  double scale;
  DType dtype;
  int64_t* indices;  // [rows, k]
  void* weights;     // [rows, k], A
  void* scratch;     // [blocks, 4 * experts], A
  void* sums;        // [blocks, 2 * experts + 2], A: choices, shares, squares and tokens
};

struct RouteGradient {
  Route route;               // with indices; weights and sums are not written
  const void* grad_weights;  // [rows, k], A
  const void* counts;        // [experts + 1], A: the share of the choices, and the tokens
  double grad_balance, grad_z;
  void* grad_logits;  // [rows, experts], dtype
  DType dtype;
};

TW_NAMESPACE_END
