// What the ops on rows of logits share.
#pragma once

#include "core/loss_rows.h"

#include "bind/launch.h"

TW_KERNEL(loss_rows, LossRows);
TW_KERNEL(loss_rows_gradient, LossRowsGradient);

namespace torchweld {
namespace {

// What the ops share: the arguments, checked, as the kernels take them.
struct Rows {
  LossRows args{};
  Tensor logits, target;
  OptionalTensor weight, probabilities, inverse_temperature;

  Rows(const Tensor& logits_in, const Tensor& target_in, const OptionalTensor& weight_in,
       const OptionalTensor& probabilities_in, const OptionalTensor& inverse_temperature_in,
       double scale, double softcap)
      : logits(make_contiguous(logits_in)), target(make_contiguous(target_in)) {
    const auto sizes = logits.sizes();
    STD_TORCH_CHECK(sizes.size() == 2, "logits are not [rows, width]");
    args.rows = sizes[0];
    args.width = sizes[1];
    args.dtype = dtype_of(logits);
    args.scale = scale;
    args.softcap = softcap;
    STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long && target.sizes().size() == 2 &&
                        target.sizes()[0] == args.rows && same_device(target, logits),
                    "target is not int64 [rows, targets] on the logits' device");
    args.targets = target.sizes()[1];
    weight = beside(weight_in, {args.width}, "weight");
    inverse_temperature = beside(inverse_temperature_in, {args.rows}, "inverse_temperature");
    args.probabilities_dtype = args.dtype;
    if (probabilities_in) {
      args.probabilities_dtype = dtype_of(*probabilities_in);
      STD_TORCH_CHECK(same_sizes(probabilities_in->sizes(), sizes) &&
                          same_device(*probabilities_in, logits) &&
                          fits_beside(args.probabilities_dtype, args.dtype),
                      "probabilities do not fit the logits");
      probabilities = make_contiguous(probabilities_in);
    }
    args.logits = data(logits);
    args.target = (const int64_t*)data(target);
    args.weight = data(weight);
    args.probabilities = data(probabilities);
    args.inverse_temperature = data(inverse_temperature);
  }

  // A tensor of this shape and of the accumulators' type.
  OptionalTensor beside(const OptionalTensor& tensor, Shape shape, const char* name) const {
    if (!tensor) return tensor;
    STD_TORCH_CHECK(same_sizes(tensor->sizes(), Sizes(shape.data(), shape.size())) &&
                        tensor->scalar_type() == accumulate_type(args.dtype) &&
                        same_device(*tensor, logits),
                    name, " does not fit the logits");
    return make_contiguous(tensor);
  }

  Tensor make(int64_t columns) const {
    const int64_t sizes[] = {args.rows, columns};
    return empty(logits, Sizes(sizes, 2), accumulate_type(args.dtype));
  }
};

// Not by empty(), which may fill new tensors with NaN.
inline Tensor make_argmax(const Rows& rows, bool wanted) {
  const int64_t size[] = {wanted ? rows.args.rows : 0};
  return torch::stable::new_empty(rows.target, Sizes(size, 1));
}

// The results of the forward pass: u at the targets, the statistics and the largest logit's column.
struct Results {
  Tensor picked, statistics, argmax;

  Results(Rows& rows, bool entropy, bool smooth, bool with_argmax)
      : picked(rows.make(rows.args.targets)),
        statistics(rows.make(kLossStatistics)),
        argmax(make_argmax(rows, with_argmax)) {
    rows.args.picked = picked.mutable_data_ptr();
    rows.args.statistics = statistics.mutable_data_ptr();
    rows.args.argmax = with_argmax ? (int64_t*)argmax.mutable_data_ptr() : nullptr;
    rows.args.entropy = entropy;
    rows.args.smooth = smooth;
  }
};

// Adds what the gradient needs, and launches it.
inline void launch_gradient(const Rows& rows, const Tensor& coefficients_in,
                            const Tensor& grad_picked_in, Tensor& grad_logits, bool fused) {
  const Tensor coefficients =
      *rows.beside(coefficients_in, {rows.args.rows, kLossCoefficients}, "coefficients");
  const Tensor grad_picked =
      *rows.beside(grad_picked_in, {rows.args.rows, rows.args.targets}, "grad_picked");
  const LossRowsGradient args{
      rows.args, data(coefficients), data(grad_picked), grad_logits.mutable_data_ptr(),
      fused,     rows.args.dtype};
  launch(loss_rows_gradient, args, rows.logits, rows.args.width ? rows.args.rows : 0,
         2 * rows.args.width);
}

}  // namespace
}  // namespace torchweld
