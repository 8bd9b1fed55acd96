// Softmax of scaled and masked scores, with dropout, row by row.
//
//   z = scores * scale + mask, -inf where a boolean mask or the causal mask excludes;
//   s = exp(z - max z) / sum exp(z - max z), zero in a fully masked row;
//   y = s * kept
//   grad_scores = scale * s * (g - sum(s * g)),  g = grad_y * kept
//
// kept is 0 where an element is dropped, else 1 / (1 - p). Backward reads s from y if nothing was
// dropped. With dropout y no longer holds s, so backward recomputes s from the scores.
#pragma once

#include "core/dropout.h"

TW_NAMESPACE_BEGIN

enum class MaskKind : int32_t { none, boolean, additive };

// A mask of shape [..., width] for rows x width scores. A boolean mask has one byte per element,
// where 0 excludes.
struct ScoreMask {
  MaskKind kind = MaskKind::none;
  DType dtype = DType::f32;  // an additive mask has the scores' dtype, or float32 for 16 bits
  const void* data = nullptr;
  RowMap rows;         // row of the scores -> offset of the mask's row, in elements
  int64_t stride = 0;  // between the mask's columns: 0 or 1
};

// Row r of the scores is query (r % queries) + first_query of a block. The block's last query sees
// all `width` keys: key <= query + width - all_queries.
struct Causal {
  bool on = false;
  int64_t queries = 1;      // rows of a block in this tensor
  int64_t first_query = 0;  // position of the first of them in the whole block
  int64_t all_queries = 1;  // rows of the whole block
};

// The number of leading keys that row r sees, 0 to width. `query` is r % queries.
TW_HD int64_t keys_of_query(const Causal& causal, int64_t query, int64_t width) {
  const int64_t keys = query + causal.first_query + width - causal.all_queries + 1;
  return keys < 0 ? 0 : keys > width ? width : keys;
}
TW_HD int64_t visible_keys(const Causal& causal, int64_t row, int64_t width) {
  return causal.on ? keys_of_query(causal, row % causal.queries, width) : width;
}

// 1 / sum. The kernels replace a maximum of -inf by 0, which makes the sum 0. A fully masked row
// then yields zeros (0 * 0). A row whose own scores are all -inf yields NaN (0 * inf), as in torch.
template <class A>
TW_HD A softmax_inverse(A sum, const ScoreMask& mask, const Causal& causal) {
  const bool masked = mask.kind != MaskKind::none || causal.on;
  return sum == 0 && masked ? 0 : 1 / sum;
}

// Tensors are contiguous, [rows, width].
struct SoftmaxForward {
  const void* scores;
  void* y;
  void* statistics;  // [rows, 2], Accumulate<dtype>: max z, 1 / sum (0: no visible keys); or null
  int64_t rows, width;
  double scale;
  DType dtype;
  ScoreMask mask;
  Causal causal;
  Dropout dropout;
};

struct SoftmaxBackward {
  const void* grad_y;
  const void* y;           // without dropout; scores, statistics, mask and causal are then unused
  const void* scores;      // with dropout
  const void* statistics;  // likewise
  void* grad_scores;
  int64_t rows, width;
  double scale;
  DType dtype;
  ScoreMask mask;
  Causal causal;
  Dropout dropout;
};

TW_NAMESPACE_END
