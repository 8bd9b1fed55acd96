// Adafactor: the second moment of a matrix as the product of its rows' means and its columns' means,
// by the rules of torch and of transformers.
//
//   rows, columns   moving averages of the means of g^2 + eps_square, a row or a column each
//   variance        v_ij = rows_i columns_j / mean(rows); of a tensor that is no matrix, its own
//   direction       u = g / sqrt(max(v, eps_floor^2)), its mean square at most clip^2
//   step            p = p decay - u length;  with a first moment, of beta1: p = p decay - m
//
// `length` and `decay` depend on the means of p^2 and u^2, so that a gradient is read three times:
// for the averages, for the mean of u^2, and for the step. Float32: 24 bytes a parameter.
//
// The sums of a matrix are made in chunks of its rows, as core/chunks.h has it; what is no matrix is
// cut into rows of kVectorRow elements.
//
// Where devices have parts of a tensor, a pass sums up what is here, and the next one takes the sums
// of all: averages and means are those of the whole.
#pragma once

#include "core/chunks.h"
#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdafactorSettings {
  double decay_rate;  // averages take in a new mean by number^decay_rate
  double eps_square, eps_floor, eps_scale, clip, beta1, weight_decay;
  bool relative;      // a step of at most 1 / sqrt(number)
  bool warmup;        // and of at most 10^-6 number, not lr
  bool scaled;        // in proportion to the parameter, or to eps_scale where that is larger
  bool scaled_decay;  // weight decay too; otherwise by lr alone
};

struct AdafactorLengths {
  double decay, length;
};

// From the mean squares of a parameter and of its direction.
inline AdafactorLengths adafactor_lengths(const AdafactorSettings& s, const StepScalars& now,
                                          double of_param, double of_direction) {
  double rate = s.warmup ? 1e-6 * now.number : now.lr;
  if (s.relative) rate = std::fmin(rate, 1 / std::sqrt(now.number));
  const double scale = s.scaled ? std::fmax(s.eps_scale, std::sqrt(of_param)) : 1;
  const double excess = std::fmax(1.0, std::sqrt(of_direction) / s.clip);
  const double decayed = s.scaled_decay ? rate * scale : now.lr;
  return {1 - s.weight_decay * decayed, rate * scale / excess};
}

constexpr int64_t kVectorRow = 4096;

// moment[0] are the rows' averages and moment[1] the columns', or moment[0] the elements';
// moment[2] is the first moment, or null.
struct FactoredTensor : StepTensor {
  int64_t matrices, height, columns;  // of `columns` elements a row; the last row may have less
  int64_t chunks;                     // of a matrix
  int64_t first_matrix, first_chunk;  // among those of all tensors
  int64_t whole_height, whole_columns, whole_elements;  // with other devices' parts
  double* row_sums;                                     // [matrices, height], of g^2
  double* column_sums;                                  // [matrices, columns]
  double* average_sums;                                 // [matrices], of the rows' averages
  double* squares;                                      // of parameters, of directions
  double* partials;                                     // [matrices, chunks, columns], of g^2
  float* row_scales;     // [matrices, height]: 1 / sqrt(rows / mean(rows))
  float* column_scales;  // [matrices, columns]: 1 / sqrt(columns)
  float rate;            // what averages take in a new mean by
  float decay, length;
};

struct Adafactor {
  const FactoredTensor* tensors;
  int64_t count;
  double (*squares)[2];  // each chunk's part of a tensor's
  double eps_square, eps_floor;
  float beta1, grad_factor;
  DType dtype;
  ParamCodec param;
  bool factored;
};

TW_NAMESPACE_END
