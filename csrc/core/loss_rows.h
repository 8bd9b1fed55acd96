// The rows of a cross entropy: what a loss needs of each row of logits, and the gradient.
//
//   s = cap * tanh(scale * z / cap), or scale * z without a cap;   u = s / temperature
//   highest = max u,  sum = sum exp(u - highest),  log p = u - highest - log sum
//
// A row gives highest, sum and, where they are wanted, sum exp(u - highest) * (u - highest) for the
// entropy, sum w * u for label smoothing, sum w * q * u and sum w * q for probabilities q as the
// target, the first column of `highest`, and u at each target.
//
//   du = p * (on_p + on_lse * (highest + log sum) + on_entropy * log p - on_dot * sum w * q)
//        + on_smooth * w + on_dot * w * q + sum over the targets k of grad_picked[k] * (column == t_k)
//   dz = du / temperature * (1 - (s / cap)^2) * scale
//
// Where p is 0, so is its term, which keeps logits of -inf from giving 0 * inf. A target of -1 is
// ignored: its u is 0. A row whose targets are all ignored is not read: its sum is 1, its other
// statistics are 0, the largest logit's column is -1, and its gradient is 0. A target below -1 is a
// column that another device has: its u is 0. A target beyond the row makes the row NaN.
#pragma once

#include "core/act.h"

TW_NAMESPACE_BEGIN

// Columns of the statistics and of the coefficients of a row.
enum LossStatistic { kHighest, kSum, kEntropySum, kSmooth, kDot, kMass, kLossStatistics };
enum LossCoefficient { kOnP, kOnLse, kOnEntropy, kOnSmooth, kOnDot, kLossCoefficients };

// Tensors are contiguous. A is Accumulate<dtype>.
struct LossRows {
  const void* logits;               // [rows, width], dtype
  const int64_t* target;            // [rows, targets]
  const void* weight;               // [width], A, or null: ones
  const void* probabilities;        // [rows, width], probabilities_dtype, or null
  const void* inverse_temperature;  // [rows], A, or null: ones
  double scale, softcap;            // a softcap of 0 is none
  int64_t rows, width, targets;
  DType dtype, probabilities_dtype;
  bool entropy, smooth;  // which sums are wanted
  void* picked;          // [rows, targets], A
  void* statistics;      // [rows, kLossStatistics], A
  int64_t* argmax;       // [rows], or null
};

struct LossRowsGradient {
  LossRows rows;             // with statistics that were computed; picked and argmax are not read
  const void* coefficients;  // [rows, kLossCoefficients], A
  const void* grad_picked;   // [rows, targets], A
  void* grad_logits;         // [rows, width], dtype; may be the logits
  bool fused;                // compute the statistics first, row by row
  DType dtype;
};

TW_NAMESPACE_END
