// dropout_add_layer_norm and dropout_add_rms_norm for torch; the schemas are in python/torchweld/ops.
#include "core/dropout_add_norm.h"

#include "bind/dropout.h"
#include "bind/norm.h"

TW_KERNEL(dropout_add_layer_norm_forward, DropoutAddNormForward);
TW_KERNEL(dropout_add_layer_norm_backward, DropoutAddNormBackward);
TW_KERNEL(dropout_add_rms_norm_forward, DropoutAddNormForward);
TW_KERNEL(dropout_add_rms_norm_backward, DropoutAddNormBackward);

namespace torchweld {
namespace {

// Refuses shards of rows, since a norm needs whole rows.
Dropout whole_rows(const Tensor& x, const Shape& normalized_shape, double p,
                   const OptionalTensor& seed, const Place& place) {
  place.check(x);
  STD_TORCH_CHECK(place.whole.empty() || place.whole.back() == x.sizes().back(),
                  "shard: input lacks columns, and a norm needs whole rows");
  return dropout_of(x, normalized_shape.size(), p, seed, place);
}

// z, y, mean (LayerNorm only) and rstd.
template <class Kernel>
std::tuple<Tensor, Tensor, OptionalTensor, Tensor> forward(
    const Kernel& kernel, bool centered, const Tensor& x_in, const OptionalTensor& residual_in,
    const Shape& normalized_shape, const OptionalTensor& weight_in, const OptionalTensor& bias_in,
    double p, double eps, const OptionalTensor& seed, const Place& place, bool wide_y) {
  check_shape(x_in, normalized_shape);
  DropoutAddNormForward args{};
  args.dtype = dtype_of(x_in);
  args.param_dtype = check_parameters(x_in, args.dtype, normalized_shape, weight_in, bias_in);
  args.stream_dtype = residual_in ? dtype_of(*residual_in) : args.dtype;
  if (residual_in) {
    STD_TORCH_CHECK(same_device(*residual_in, x_in) &&
                        same_sizes(residual_in->sizes(), x_in.sizes()) &&
                        fits_beside(args.stream_dtype, args.dtype),
                    "residual does not fit input");
  }
  const ScalarType y_dtype = wide_y ? accumulate_type(args.dtype) : x_in.scalar_type();
  args.y_dtype = dtype_of(y_dtype);
  STD_TORCH_CHECK(eps >= 0, "eps is negative or NaN");
  args.eps = eps;
  args.dropout = whole_rows(x_in, normalized_shape, p, seed, place);

  const Tensor x = make_contiguous(x_in);
  const OptionalTensor residual = make_contiguous(residual_in);
  const OptionalTensor weight = parameter(weight_in, args.dtype);
  const OptionalTensor bias = parameter(bias_in, args.dtype);
  const Rows shape(x, normalized_shape);
  const ScalarType statistics = accumulate_type(args.dtype);
  Tensor z = empty(x, x.sizes(), residual ? residual->scalar_type() : x.scalar_type());
  Tensor y = empty(x, x.sizes(), y_dtype);
  OptionalTensor mean;
  if (centered) mean = empty(x, shape.leading, statistics);
  Tensor rstd = empty(x, shape.leading, statistics);
  args.x = data(x);
  args.residual = data(residual);
  args.weight = data(weight);
  args.bias = data(bias);
  args.z = z.mutable_data_ptr();
  args.y = y.mutable_data_ptr();
  args.mean = centered ? mean->mutable_data_ptr() : nullptr;
  args.rstd = rstd.mutable_data_ptr();
  args.rows = shape.rows;
  args.width = shape.width;
  launch(kernel, args, x, shape.items(shape.rows), shape.width);
  return {z, y, mean, rstd};
}

// grad_x, grad_residual, grad_weight and grad_bias; each is empty if it is not wanted.
template <class Kernel>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Kernel& kernel, const OptionalTensor& grad_z_in, const OptionalTensor& grad_y_in,
    const Tensor& z_in, const Shape& normalized_shape, const OptionalTensor& weight_in,
    const OptionalTensor& bias_in, double p, const OptionalTensor& seed, const Place& place,
    const OptionalTensor& mean_in, const Tensor& rstd_in, ScalarType x_dtype, bool need_x,
    bool need_residual, bool need_weight, bool need_bias) {
  check_shape(z_in, normalized_shape);
  DropoutAddNormBackward args{};
  args.dtype = dtype_of(x_dtype);
  args.stream_dtype = dtype_of(z_in);
  STD_TORCH_CHECK(fits_beside(args.stream_dtype, args.dtype), "z does not fit input_dtype");
  args.param_dtype = check_parameters(z_in, args.dtype, normalized_shape, weight_in, bias_in);
  args.dropout = whole_rows(z_in, normalized_shape, p, seed, place);
  const Rows shape(z_in, normalized_shape);
  const ScalarType statistics = accumulate_type(args.dtype);
  const ScalarType y_dtype = grad_y_in ? grad_y_in->scalar_type() : x_dtype;
  args.y_dtype = dtype_of(y_dtype);
  STD_TORCH_CHECK(fits_beside(args.y_dtype, args.dtype), "grad_y does not fit input_dtype");
  if (grad_y_in) check_like(*grad_y_in, z_in, z_in.sizes(), y_dtype);
  if (grad_z_in) check_like(*grad_z_in, z_in, z_in.sizes(), z_in.scalar_type());
  check_like(rstd_in, z_in, shape.leading, statistics);
  if (mean_in) check_like(*mean_in, z_in, shape.leading, statistics);

  const Tensor z = make_contiguous(z_in), rstd = make_contiguous(rstd_in);
  const OptionalTensor grad_y = make_contiguous(grad_y_in), grad_z = make_contiguous(grad_z_in);
  const OptionalTensor mean = make_contiguous(mean_in);
  const OptionalTensor weight = parameter(weight_in, args.dtype);
  Tensor grad_x = need_x ? empty(z, z.sizes(), x_dtype) : nothing(z);
  Tensor grad_residual = need_residual ? empty(z, z.sizes(), z.scalar_type()) : nothing(z);
  args.grad_y = data(grad_y);
  args.grad_z = data(grad_z);
  args.x = data(z);
  args.weight = data(weight);
  args.mean = data(mean);
  args.rstd = data(rstd);
  args.grad_x = need_x ? grad_x.mutable_data_ptr() : nullptr;
  args.grad_residual = need_residual ? grad_residual.mutable_data_ptr() : nullptr;
  args.rows = shape.rows;
  args.width = shape.width;
  ParameterGradients gradients(z, args, need_weight ? weight_in : std::nullopt,
                               need_bias ? bias_in : std::nullopt);
  launch(kernel, args, z, shape.items(args.chunks), shape.rows * shape.width / args.chunks);
  gradients.add_chunks();
  return {grad_x, grad_residual, gradients.weight, gradients.bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(
    Tensor x, OptionalTensor residual, Shape normalized_shape, OptionalTensor weight,
    OptionalTensor bias, double p, double eps, OptionalTensor seed, OptionalShape whole,
    OptionalShape offset, bool wide_y) {
  const auto [z, y, mean, rstd] =
      forward(dropout_add_layer_norm_forward, /*centered=*/true, x, residual, normalized_shape,
              weight, bias, p, eps, seed, {whole, offset}, wide_y);
  return {z, y, *mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_grads(
    OptionalTensor grad_z, OptionalTensor grad_y, Tensor z, Shape normalized_shape,
    OptionalTensor weight, OptionalTensor bias, double p, double /*eps*/, OptionalTensor seed,
    OptionalShape whole, OptionalShape offset, Tensor mean, Tensor rstd, ScalarType x_dtype,
    bool need_x, bool need_residual, bool need_weight, bool need_bias) {
  return backward(dropout_add_layer_norm_backward, grad_z, grad_y, z, normalized_shape, weight,
                  bias, p, seed, {whole, offset}, mean, rstd, x_dtype, need_x, need_residual,
                  need_weight, need_bias);
}

std::tuple<Tensor, Tensor, Tensor> dropout_add_rms_norm(Tensor x, OptionalTensor residual,
                                                        Shape normalized_shape,
                                                        OptionalTensor weight, double p,
                                                        std::optional<double> eps,
                                                        OptionalTensor seed, OptionalShape whole,
                                                        OptionalShape offset, bool wide_y) {
  const auto [z, y, mean, rstd] = forward(
      dropout_add_rms_norm_forward, /*centered=*/false, x, residual, normalized_shape, weight,
      std::nullopt, p, eps.value_or(default_epsilon(dtype_of(x))), seed, {whole, offset}, wide_y);
  return {z, y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> dropout_add_rms_norm_grads(
    OptionalTensor grad_z, OptionalTensor grad_y, Tensor z, Shape normalized_shape,
    OptionalTensor weight, double p, std::optional<double> /*eps*/, OptionalTensor seed,
    OptionalShape whole, OptionalShape offset, Tensor rstd, ScalarType x_dtype, bool need_x,
    bool need_residual, bool need_weight) {
  const auto [grad_x, grad_residual, grad_weight, grad_bias] =
      backward(dropout_add_rms_norm_backward, grad_z, grad_y, z, normalized_shape, weight,
               std::nullopt, p, seed, {whole, offset}, std::nullopt, rstd, x_dtype, need_x,
               need_residual, need_weight, false);
  return {grad_x, grad_residual, grad_weight};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("dropout_add_layer_norm"), TW_BOX(&dropout_add_layer_norm));
  m.impl(TW_OVERLOAD("dropout_add_layer_norm_backward"), TW_BOX(&dropout_add_layer_norm_grads));
  m.impl(TW_OVERLOAD("dropout_add_rms_norm"), TW_BOX(&dropout_add_rms_norm));
  m.impl(TW_OVERLOAD("dropout_add_rms_norm_backward"), TW_BOX(&dropout_add_rms_norm_grads));
}

}  // namespace torchweld
