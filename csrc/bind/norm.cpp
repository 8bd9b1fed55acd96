// layer_norm and rms_norm for torch; the schemas are in python/torchweld/ops.
#include "bind/norm.h"

TW_KERNEL(layer_norm_forward, NormForward);
TW_KERNEL(layer_norm_backward, NormBackward);
TW_KERNEL(rms_norm_forward, NormForward);
TW_KERNEL(rms_norm_backward, NormBackward);

namespace torchweld {
namespace {

// y, mean (LayerNorm only) and rstd.
template <class Kernel>
std::tuple<Tensor, OptionalTensor, Tensor> forward(const Kernel& kernel, bool centered,
                                                   const Tensor& x_in,
                                                   const Shape& normalized_shape,
                                                   const OptionalTensor& weight_in,
                                                   const OptionalTensor& bias_in, double eps) {
  check_shape(x_in, normalized_shape);
  const DType param_dtype =
      check_parameters(x_in, dtype_of(x_in), normalized_shape, weight_in, bias_in);
  STD_TORCH_CHECK(eps >= 0, "eps is negative or NaN");

  const Tensor x = make_contiguous(x_in);
  const OptionalTensor weight = parameter(weight_in, dtype_of(x));
  const OptionalTensor bias = parameter(bias_in, dtype_of(x));
  const Rows shape(x, normalized_shape);
  const ScalarType statistics = accumulate_type(dtype_of(x));
  Tensor y = empty(x, x.sizes(), x.scalar_type());
  OptionalTensor mean;
  if (centered) mean = empty(x, shape.leading, statistics);
  Tensor rstd = empty(x, shape.leading, statistics);
  const NormForward args{data(x),
                         data(weight),
                         data(bias),
                         y.mutable_data_ptr(),
                         centered ? mean->mutable_data_ptr() : nullptr,
                         rstd.mutable_data_ptr(),
                         shape.rows,
                         shape.width,
                         eps,
                         dtype_of(x),
                         param_dtype};
  launch(kernel, args, x, shape.items(shape.rows), shape.width);
  return {y, mean, rstd};
}

// grad_x, grad_weight and grad_bias. The last two are empty if they are not wanted.
template <class Kernel>
std::tuple<Tensor, Tensor, Tensor> backward(const Kernel& kernel, const Tensor& grad_y_in,
                                            const Tensor& x_in, const Shape& normalized_shape,
                                            const OptionalTensor& weight_in,
                                            const OptionalTensor& bias_in,
                                            const OptionalTensor& mean_in, const Tensor& rstd_in,
                                            bool need_weight, bool need_bias) {
  check_shape(x_in, normalized_shape);
  const DType param_dtype =
      check_parameters(x_in, dtype_of(x_in), normalized_shape, weight_in, bias_in);
  const ScalarType statistics = accumulate_type(dtype_of(x_in));
  const Rows shape(x_in, normalized_shape);
  check_like(grad_y_in, x_in, x_in.sizes(), x_in.scalar_type());
  check_like(rstd_in, x_in, shape.leading, statistics);
  if (mean_in) check_like(*mean_in, x_in, shape.leading, statistics);

  const Tensor grad_y = make_contiguous(grad_y_in), x = make_contiguous(x_in),
               rstd = make_contiguous(rstd_in);
  const OptionalTensor weight = parameter(weight_in, dtype_of(x)), mean = make_contiguous(mean_in);
  Tensor grad_x = empty(x, x.sizes(), x.scalar_type());
  NormBackward args{};
  args.grad_y = data(grad_y);
  args.x = data(x);
  args.weight = data(weight);
  args.mean = data(mean);
  args.rstd = data(rstd);
  args.grad_x = grad_x.mutable_data_ptr();
  args.rows = shape.rows;
  args.width = shape.width;
  args.dtype = dtype_of(x);
  args.param_dtype = param_dtype;
  ParameterGradients gradients(x, args, need_weight ? weight_in : std::nullopt,
                               need_bias ? bias_in : std::nullopt);
  launch(kernel, args, x, shape.items(args.chunks), shape.rows * shape.width / args.chunks);
  gradients.add_chunks();
  return {grad_x, gradients.weight, gradients.bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(Tensor x, Shape normalized_shape,
                                              OptionalTensor weight, OptionalTensor bias,
                                              double eps) {
  const auto [y, mean, rstd] =
      forward(layer_norm_forward, /*centered=*/true, x, normalized_shape, weight, bias, eps);
  return {y, *mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_grads(Tensor grad_y, Tensor x, Shape normalized_shape,
                                                    OptionalTensor weight, OptionalTensor bias,
                                                    double /*eps*/, Tensor mean, Tensor rstd,
                                                    bool need_weight, bool need_bias) {
  return backward(layer_norm_backward, grad_y, x, normalized_shape, weight, bias, mean, rstd,
                  need_weight, need_bias);
}

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Shape normalized_shape, OptionalTensor weight,
                                    std::optional<double> eps) {
  const auto [y, mean, rstd] =
      forward(rms_norm_forward, /*centered=*/false, x, normalized_shape, weight, std::nullopt,
              eps.value_or(default_epsilon(dtype_of(x))));
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_grads(Tensor grad_y, Tensor x, Shape normalized_shape,
                                          OptionalTensor weight, std::optional<double> /*eps*/,
                                          Tensor rstd, bool need_weight) {
  const auto [grad_x, grad_weight, grad_bias] =
      backward(rms_norm_backward, grad_y, x, normalized_shape, weight, std::nullopt, std::nullopt,
               rstd, need_weight, false);
  return {grad_x, grad_weight};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("layer_norm"), TW_BOX(&layer_norm));
  m.impl(TW_OVERLOAD("layer_norm_backward"), TW_BOX(&layer_norm_grads));
  m.impl(TW_OVERLOAD("rms_norm"), TW_BOX(&rms_norm));
  m.impl(TW_OVERLOAD("rms_norm_backward"), TW_BOX(&rms_norm_grads));
}

}  // namespace torchweld
