// Rotary embeddings of one or two tensors that share their angles, after an optional RMSNorm.
//
//   norm       n = x * rstd * w,  rstd = 1 / sqrt(mean(x^2) + eps),  w = weight, 1 + weight or 1
//   forward    y[j] = n[j] * cos(j) + n[partner(j)] * sign(j) * sin(j)  for the rotated elements,
//              y[j] = n[j] for the others
//   backward   the transpose, which is not the inverse where cos^2 + sin^2 is not 1:
//              u[j] = g[j] * cos(j) + g[partner(j)] * sign(partner(j)) * sin(partner(j)),
//              grad_x = rstd * (u * w - x_hat * mean(u * w * x_hat)),  grad_weight = sum of u * x_hat
//
// Pair i is made of the elements i and i + distance, or 2 i and 2 i + 1. The sign is -1 for the first
// of a pair and 1 for the second. A full table has one angle an element, others have one a pair.
#pragma once

#include "core/chunks.h"

TW_NAMESPACE_BEGIN

// The tokens of a batch are [batch, tokens], and a token has `heads` rows of `width` elements.
// Strides are between batches, tokens and heads, in elements.
struct RotaryStream {
  const void* x;       // the forward's input; null in a backward pass without a norm
  const void* grad;    // the gradient of y; null in a forward pass
  void* result;        // y, or the gradient of x
  const void* weight;  // [heads or 1, width], param_dtype, or null: ones
  void* rstd;          // Accumulate<dtype>; null without a norm
  // The gradient of weight takes the two stages of core/chunks.h; null: not wanted.
  void* grad_weight;  // as weight
  void* partials;     // [chunks, heads or 1, width], Accumulate<dtype>
  int64_t heads;
  int64_t x_stride[3], grad_stride[3], result_stride[3], rstd_stride[3];
};

struct Rotary {
  static constexpr int kStreams = 2;
  RotaryStream streams[kStreams];
  int64_t count;         // of streams
  const void* table[2];  // cos and sin, table_dtype
  // Strides of batch, token and angle; with positions, the second is between the table's rows.
  int64_t table_stride[2][3];
  const int64_t* positions;  // the rows of the table, or null: the tokens' own
  int64_t position_stride[2];
  int64_t batch, tokens, width, pairs, distance;
  bool interleaved, full;
  bool norm, plus_one, across;  // `across` normalises over all heads of a token
  // What of a norm is rounded to dtype: nothing, its result, or also x * rstd before the weight.
  int32_t rounded;
  double eps;
  int64_t chunks;
  DType dtype, param_dtype, table_dtype;
};

TW_NAMESPACE_END
