// Adafactor, following the rules of torch and transformers: the second moment of a matrix is the
// product of its row means and its column means.
//
//   rows, columns   moving averages of the means of g^2 + eps_square over each row and each column
//   variance        v_ij = rows_i columns_j / mean(rows); a vector keeps v itself
//   direction       u = g / sqrt(max(v, eps_floor^2)), scaled to a mean square of at most clip^2
//   step            p = p decay - u length;  with a first moment (beta1): p = p decay - m
//
// `length` and `decay` depend on the means of p^2 and u^2. So each step reads a gradient three
// times: for the averages, for the mean of u^2, and for the update. That moves 24 bytes per float32
// parameter.
//
// Sums over a matrix run over chunks of rows (core/chunks.h); on a GPU each chunk is also split
// into slices of columns. A vector is divided into rows of kVectorRow elements.
//
// Each pass sums over the local shard of a sharded tensor, and the next pass reads the sums of all
// devices. Averages and means are over the whole tensor.
#pragma once

#include "core/chunks.h"
#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdafactorSettings {
  double decay_rate;  // averages move towards a new mean by number^decay_rate of the difference
  double eps_square, eps_floor, eps_scale, clip, beta1, weight_decay;
  bool relative;      // limit the rate to 1 / sqrt(number)
  bool warmup;        // use a rate of 10^-6 number instead of lr
  bool scaled;        // scale steps by the parameter's root mean square, at least eps_scale
  bool scaled_decay;  // scale weight decay like the step; otherwise by lr only
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

// Computes the lengths from the mean squares of a parameter and of its direction.
TW_HD AdafactorLengths adafactor_lengths(const AdafactorSettings& s, double lr, double number,
                                         double of_param, double of_direction) {
  double rate = s.warmup ? 1e-6 * number : lr;
  if (s.relative) rate = at_most(rate, 1 / sqrt(number));
  const double scale = s.scaled ? at_least(sqrt(of_param), s.eps_scale) : 1;
  const double excess = at_least(sqrt(of_direction) / s.clip, 1.0);
  const double decayed = s.scaled_decay ? rate * scale : lr;
  return {1 - s.weight_decay * decayed, rate * scale / excess};
}

// The weight of a new mean in the moving averages.
TW_HD float adafactor_rate(const AdafactorSettings& s, double number) {
  return (float)pow(number, s.decay_rate);
}

// The updated average, given the sum of `elements` squares.
TW_HD float take_in_mean(const AdafactorSettings& s, float rate, float average, double sum,
                         int64_t elements) {
  const float mean = (float)(sum / elements + s.eps_square);
  return average + rate * (mean - average);
}

// The mean of a matrix's row averages, from their sum.
TW_HD float adafactor_mean(const AdafactorSettings& s, double of_averages, int64_t rows) {
  return (float)at_least(of_averages / rows, s.eps_floor);
}

// The update direction of one element or of a vector of elements.
struct AdafactorDirection {
  float rate, eps, floor, ceiling;

  TW_HD AdafactorDirection(const AdafactorSettings& s, float rate)
      : rate(rate),
        eps((float)s.eps_square),
        floor((float)(s.eps_floor * s.eps_floor)),
        ceiling((float)(s.eps_floor > 0 ? 1 / s.eps_floor : __builtin_inf())) {}

  // An element of a matrix, scaled by the factors of its row and column.
  template <class V>
  TW_HD V scale_by_factors(V g, float row_scale, V column_scale) const {
    return g * at_most(column_scale * row_scale, ceiling);
  }
  // An element of a vector, scaled by its own average, which is updated with the gradient.
  template <class V>
  TW_HD V scale_by_average(V g, V& variance) const {
    variance = variance + (g * g + eps - variance) * rate;
    return g / square_root(at_least(variance, floor));
  }
};

constexpr int64_t kVectorRow = 4096;

// A matrix keeps row averages in moment[0] and column averages in moment[1]. A vector keeps one
// average per element in moment[0]. moment[2] is the first moment, or null. A matrix has chunks x
// slices blocks, and first_block counts blocks over all tensors.
struct FactoredTensor : StepTensor {
  int64_t matrices, height, columns;  // a vector's last row may have fewer elements
  int64_t chunks, slices;
  int64_t first_matrix, first_average;                  // counted over all tensors
  int64_t whole_height, whole_columns, whole_elements;  // including other devices' shards
  double* row_sums;                                     // [matrices, height], of g^2
  double* column_sums;                                  // [matrices, columns], right after them
  double* average_sums;                                 // [matrices], of row averages
  double* squares;                                      // [2]: of parameter and direction
  double* row_partials;                                 // on a GPU: [matrices, height, slices]
  double* column_partials;                              // [matrices, chunks, columns]
  float* row_scales;     // [matrices, height]: 1 / sqrt(rows / mean(rows))
  float* column_scales;  // [matrices, columns], right after them: 1 / sqrt(columns)
  Number lr;
  double number;  // of this step, from 1
  float rate;     // the weight of a new mean
  float decay, length;
  bool in_fours;  // on a GPU: rows can be accessed in groups of four elements
};

struct Adafactor {
  FactoredTensor* tensors;      // on a GPU uninitialised memory,
  const FactoredTensor* given;  // to which a kernel copies these
  int64_t count;
  int64_t blocks, matrices, averages;  // of all tensors
  double (*squares)[2];                // each block's share of its tensor's sums
  AdafactorSettings settings;
  const Number* steps;  // steps taken by each tensor
  Number grad_factor;
  Number found_inf;           // if not zero, nothing is written
  const Rounding* roundings;  // as in Step
  DType dtype;
  ParamCodec param;
  bool factored;
  bool counts;  // whether this pass increments `steps`
};

// Computes decay and length from the tensor's sums of squares.
TW_HD void set_lengths(const Adafactor& a, FactoredTensor& t) {
  const double elements = t.whole_elements > 0 ? (double)t.whole_elements : 1;
  const auto lengths = adafactor_lengths(a.settings, t.lr.read(), t.number, t.squares[0] / elements,
                                         t.squares[1] / elements);
  t.decay = (float)lengths.decay;
  t.length = (float)lengths.length;
}

TW_NAMESPACE_END
