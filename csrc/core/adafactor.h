// Adafactor, by the rules of torch and of transformers: the second moment of a matrix is the product of
// the means of its rows and of its columns.
//
//   rows, columns   moving averages of the means of g^2 + eps_square over each row and each column
//   variance        v_ij = rows_i columns_j / mean(rows); a tensor that is no matrix keeps v itself
//   direction       u = g / sqrt(max(v, eps_floor^2)), its mean square at most clip^2
//   step            p = p decay - u length;  with a first moment, of beta1: p = p decay - m
//
// `length` and `decay` depend on the means of p^2 and u^2. So a gradient is read three times: for the
// averages, for the mean of u^2, and for the step. That is 24 bytes a float32 parameter.
//
// A matrix is summed in chunks of its rows, as core/chunks.h has it, and on a GPU in slices of chunks.
// A tensor that is no matrix is divided into rows of kVectorRow elements.
//
// Where devices have parts of a tensor, a pass sums over the part that is here, and the next pass takes
// the sums of all devices. Averages and means are those of the whole.
#pragma once

#include "core/chunks.h"
#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdafactorSettings {
  double decay_rate;  // averages move towards a new mean by number^decay_rate
  double eps_square, eps_floor, eps_scale, clip, beta1, weight_decay;
  bool relative;      // a step of at most 1 / sqrt(number)
  bool warmup;        // and of at most 10^-6 number, not lr
  bool scaled;        // in proportion to the parameter, or to eps_scale where that is larger
  bool scaled_decay;  // weight decay too; otherwise only by lr
};

struct AdafactorLengths {
  double decay, length;
};

// NaN stays NaN.
template <class V, class Bound>
TW_HD V at_least(V v, Bound least) {
  return v < least ? V{} + least : v;
}
template <class V, class Bound>
TW_HD V at_most(V v, Bound most) {
  return v > most ? V{} + most : v;
}

// From the mean squares of a parameter and of its direction.
TW_HD AdafactorLengths adafactor_lengths(const AdafactorSettings& s, double lr, double number,
                                         double of_param, double of_direction) {
  double rate = s.warmup ? 1e-6 * number : lr;
  if (s.relative) rate = at_most(rate, 1 / sqrt(number));
  const double scale = s.scaled ? at_least(sqrt(of_param), s.eps_scale) : 1;
  const double excess = at_least(sqrt(of_direction) / s.clip, 1.0);
  const double decayed = s.scaled_decay ? rate * scale : lr;
  return {1 - s.weight_decay * decayed, rate * scale / excess};
}

// How far averages move towards a new mean.
TW_HD float adafactor_rate(const AdafactorSettings& s, double number) {
  return (float)pow(number, s.decay_rate);
}

// The average after it takes in the mean of `elements` squares with this sum.
TW_HD float take_in_mean(const AdafactorSettings& s, float rate, float average, double sum,
                         int64_t elements) {
  const float mean = (float)(sum / elements + s.eps_square);
  return average + rate * (mean - average);
}

// The mean of the averages of a matrix's rows, from their sum.
TW_HD float adafactor_mean(const AdafactorSettings& s, double of_averages, int64_t rows) {
  return (float)at_least(of_averages / rows, s.eps_floor);
}

// The direction of one element or a vector of them.
struct AdafactorDirection {
  float rate, eps, floor, ceiling;

  TW_HD AdafactorDirection(const AdafactorSettings& s, float rate)
      : rate(rate),
        eps((float)s.eps_square),
        floor((float)(s.eps_floor * s.eps_floor)),
        ceiling((float)(s.eps_floor > 0 ? 1 / s.eps_floor : __builtin_inf())) {}

  // An element of a matrix, by the scales of its row and its column.
  template <class V>
  TW_HD V factored(V g, float row_scale, V column_scale) const {
    return g * at_most(column_scale * row_scale, ceiling);
  }
  // Another element, by its own average, which takes the gradient in.
  template <class V>
  TW_HD V own(V g, V& variance) const {
    variance = variance + (g * g + eps - variance) * rate;
    return g / square_root(at_least(variance, floor));
  }
};

constexpr int64_t kVectorRow = 4096;

// moment[0] has the averages of rows and moment[1] those of columns, or moment[0] those of elements.
// moment[2] is the first moment, or null. A matrix has `chunks` of rows times `slices` of columns as
// blocks, and first_block counts these over all tensors.
struct FactoredTensor : StepTensor {
  int64_t matrices, height, columns;  // of `columns` elements a row; the last row may have less
  int64_t chunks, slices;
  int64_t first_matrix, first_average;                  // among those of all tensors
  int64_t whole_height, whole_columns, whole_elements;  // with other devices' parts
  double* row_sums;                                     // [matrices, height], of g^2
  double* column_sums;                                  // [matrices, columns], right after them
  double* average_sums;                                 // [matrices], of the rows' averages
  double* squares;                                      // of parameters, of directions
  double* row_partials;                                 // on a GPU: [matrices, height, slices]
  double* column_partials;                              // [matrices, chunks, columns]
  float* row_scales;     // [matrices, height]: 1 / sqrt(rows / mean(rows))
  float* column_scales;  // [matrices, columns], right after them: 1 / sqrt(columns)
  Number lr;
  double number;  // of this step, from 1
  float rate;     // what averages take in a new mean by
  float decay, length;
  bool in_fours;  // on a GPU: rows can be accessed in groups of four elements
};

struct Adafactor {
  FactoredTensor* tensors;      // on a GPU room for them,
  const FactoredTensor* given;  // and these are copied to it
  int64_t count;
  int64_t blocks, matrices, averages;  // of all tensors
  double (*squares)[2];                // each block's part of a tensor's
  AdafactorSettings settings;
  const Number* steps;  // taken by each tensor
  Number grad_factor;
  Number found_inf;           // where it is not zero, all stays as it is
  const Rounding* roundings;  // as Step has it
  DType dtype;
  ParamCodec param;
  bool factored;
  bool counts;  // whether the steps are counted up
};

// From the squares of a tensor.
TW_HD void set_lengths(const Adafactor& a, FactoredTensor& t) {
  const double elements = t.whole_elements > 0 ? (double)t.whole_elements : 1;
  const auto lengths = adafactor_lengths(a.settings, t.lr.read(), t.number, t.squares[0] / elements,
                                         t.squares[1] / elements);
  t.decay = (float)lengths.decay;
  t.length = (float)lengths.length;
}

TW_NAMESPACE_END
