// Softmax of scaled and masked scores, with dropout, row by row.
//
//   z = scores * scale + mask, -inf where a boolean or the causal mask excludes;
//   s = exp(z - max z) / sum exp(z - max z), zero in a row that the masks leave nothing of;
//   y = s * kept
//   grad_scores = scale * s * (g - sum(s * g)),  g = grad_y * kept
//
// kept is 0 where an element is dropped, else 1 / (1 - p). Backward has s from y where nothing was
// dropped, and else again from the scores: y has lost what was dropped.
#pragma once

#include "core/dropout.h"

TW_NAMESPACE_BEGIN

enum class MaskKind : int32_t { none, boolean, additive };

// [..., width] against rows x width scores. A boolean mask is a byte an element, 0: excluded.
struct ScoreMask {
  MaskKind kind = MaskKind::none;
  DType dtype = DType::f32;  // of an additive mask: the scores', or float32 under 16-bit scores
  const void* data = nullptr;
  RowMap rows;         // row of the scores -> offset of the mask's row, in elements
  int64_t stride = 0;  // of its columns: 0 or 1
};

// Row r of the scores is query (r % queries) + first_query of a block whose last query sees every
// one of the `width` keys: key <= query + width - all_queries.
struct Causal {
  bool on = false;
  int64_t queries = 1;      // rows of a block that are here
  int64_t first_query = 0;  // of the first of them in the whole block
  int64_t all_queries = 1;  // in the whole block
};

// Number of leading keys that row r sees, 0 to width; `query` is r % queries.
TW_HD int64_t keys_of_query(const Causal& causal, int64_t query, int64_t width) {
  const int64_t keys = query + causal.first_query + width - causal.all_queries + 1;
  return keys < 0 ? 0 : keys > width ? width : keys;
}
TW_HD int64_t visible_keys(const Causal& causal, int64_t row, int64_t width) {
  return causal.on ? keys_of_query(causal, row % causal.queries, width) : width;
}

// 1 / sum, where max z is taken for 0 if it is -inf: then the sum is 0. Of a row that is masked away
// zeros are left, by 0 * 0; one that is -inf by itself gives NaN, as in torch, by 0 * inf.
template <class A>
TW_HD A softmax_inverse(A sum, const ScoreMask& mask, const Causal& causal) {
  const bool masked = mask.kind != MaskKind::none || causal.on;
  return sum == 0 && masked ? 0 : 1 / sum;
}

// Tensors are contiguous, [rows, width].
struct SoftmaxForward {
  const void* scores;
  void* y;
  void* statistics;  // [rows, 2], Accumulate<dtype>: max z, 1 / sum (0: nothing to see); or null
  int64_t rows, width;
  double scale;
  DType dtype;
  ScoreMask mask;
  Causal causal;
  Dropout dropout;
};

struct SoftmaxBackward {
  const void* grad_y;
  const void* y;       // where nothing was dropped; then the next two, mask and causal are unused
  const void* scores;  // where something was
  const void* statistics;  // with the scores
  void* grad_scores;
  int64_t rows, width;
  double scale;
  DType dtype;
  ScoreMask mask;
  Causal causal;
  Dropout dropout;
};

TW_NAMESPACE_END
