// layer_norm and rms_norm for torch; the schemas are in python/torchweld/ops.
#include "core/norm.h"

#include "bind/launch.h"

TW_KERNEL(layer_norm_forward, NormForward);
TW_KERNEL(layer_norm_backward, NormBackward);
TW_KERNEL(rms_norm_forward, NormForward);
TW_KERNEL(rms_norm_backward, NormBackward);
TW_KERNEL(norm_parameter_gradients, NormBackward);
TW_FUNCTION(int64_t, norm_chunks, int64_t rows, int64_t width);
TW_FUNCTION(int64_t, norm_workspace_bytes, int64_t chunks, int64_t width);

namespace torchweld {
namespace {

// The leading sizes of x are rows, the trailing ones, normalized_shape, make the width.
struct Rows {
  Sizes leading;
  int64_t rows = 1, width = 1;

  Rows(const Tensor& x, const Shape& normalized_shape)
      : leading(x.sizes().data(), x.sizes().size() - normalized_shape.size()) {
    for (int64_t size : leading) rows *= size;
    for (int64_t size : normalized_shape) width *= size;
  }
  // What stops kernels from being launched on nothing.
  int64_t items(int64_t n) const { return width == 0 ? 0 : n; }
};

void check_shape(const Tensor& x, const Shape& normalized_shape) {
  const size_t rank = x.sizes().size(), trailing = normalized_shape.size();
  STD_TORCH_CHECK(trailing >= 1 && trailing <= rank, "normalized_shape does not fit x");
  STD_TORCH_CHECK(same_sizes(Sizes(x.sizes().data() + rank - trailing, trailing),
                             Sizes(normalized_shape.data(), trailing)),
                  "x does not end in normalized_shape");
}

// Of weight and bias: DType of those given, which must agree.
DType check_parameters(const Tensor& x, const Shape& normalized_shape, const OptionalTensor& weight,
                       const OptionalTensor& bias) {
  const DType dtype = dtype_of(x);
  DType param_dtype = dtype;
  bool first = true;
  for (const OptionalTensor* param : {&weight, &bias}) {
    if (!*param) continue;
    const Tensor& p = **param;
    STD_TORCH_CHECK(same_device(p, x), "weight or bias is on another device than x");
    STD_TORCH_CHECK(same_sizes(p.sizes(), Sizes(normalized_shape.data(), normalized_shape.size())),
                    "weight or bias is not of normalized_shape");
    const DType given = dtype_of(p);
    STD_TORCH_CHECK(given == dtype || (given == DType::f32 && dtype != DType::f64),
                    "weight or bias is neither of x's dtype nor float32 under a 16-bit x");
    STD_TORCH_CHECK(first || given == param_dtype, "weight and bias differ in dtype");
    param_dtype = given;
    first = false;
  }
  return param_dtype;
}

void check_like(const Tensor& t, const Tensor& x, Sizes sizes, ScalarType dtype) {
  STD_TORCH_CHECK(same_device(t, x) && t.scalar_type() == dtype && same_sizes(t.sizes(), sizes),
                  "a tensor saved by the forward pass, or the gradient, does not fit x");
}

// y, mean (LayerNorm only), rstd.
template <class Kernel>
std::tuple<Tensor, OptionalTensor, Tensor> forward(const Kernel& kernel, bool centered,
                                                   const Tensor& x_in,
                                                   const Shape& normalized_shape,
                                                   const OptionalTensor& weight_in,
                                                   const OptionalTensor& bias_in, double eps) {
  check_shape(x_in, normalized_shape);
  const DType param_dtype = check_parameters(x_in, normalized_shape, weight_in, bias_in);
  STD_TORCH_CHECK(eps >= 0, "eps is negative or NaN");

  const Tensor x = packed(x_in);
  const OptionalTensor weight = packed(weight_in), bias = packed(bias_in);
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

// grad_x, grad_weight, grad_bias; the last two are empty where they are not wanted.
template <class Kernel>
std::tuple<Tensor, Tensor, Tensor> backward(const Kernel& kernel, const Tensor& grad_y_in,
                                            const Tensor& x_in, const Shape& normalized_shape,
                                            const OptionalTensor& weight_in,
                                            const OptionalTensor& bias_in,
                                            const OptionalTensor& mean_in, const Tensor& rstd_in,
                                            bool need_weight, bool need_bias) {
  check_shape(x_in, normalized_shape);
  const DType param_dtype = check_parameters(x_in, normalized_shape, weight_in, bias_in);
  const ScalarType statistics = accumulate_type(dtype_of(x_in));
  const Rows shape(x_in, normalized_shape);
  check_like(grad_y_in, x_in, x_in.sizes(), x_in.scalar_type());
  check_like(rstd_in, x_in, shape.leading, statistics);
  if (mean_in) check_like(*mean_in, x_in, shape.leading, statistics);

  const Tensor grad_y = packed(grad_y_in), x = packed(x_in), rstd = packed(rstd_in);
  const OptionalTensor weight = packed(weight_in), mean = packed(mean_in);
  const int64_t chunks = norm_chunks(shape.rows, shape.width);
  const int64_t partial_sizes[] = {chunks, shape.width}, none[] = {0};
  const int64_t workspace_sizes[] = {norm_workspace_bytes(chunks, shape.width) / 4};
  const Tensor workspace = empty(x, Sizes(workspace_sizes, 1), ScalarType::Float);

  Tensor grad_x = empty(x, x.sizes(), x.scalar_type());
  NormBackward args{};
  args.grad_y = data(grad_y);
  args.x = data(x);
  args.weight = data(weight);
  args.mean = data(mean);
  args.rstd = data(rstd);
  args.grad_x = grad_x.mutable_data_ptr();
  args.workspace = workspace.mutable_data_ptr();
  args.rows = shape.rows;
  args.width = shape.width;
  args.chunks = chunks;
  args.dtype = dtype_of(x);
  args.param_dtype = param_dtype;
  std::vector<Tensor> partials;  // alive until the last launch
  const auto parameter_gradient = [&](bool needed, const OptionalTensor& param, void*& grad,
                                      void*& partial) {
    if (!needed || !param) return empty(x, Sizes(none, 1), x.scalar_type());
    Tensor result = empty(x, param->sizes(), param->scalar_type());
    partials.push_back(empty(x, Sizes(partial_sizes, 2), statistics));
    grad = result.mutable_data_ptr();
    partial = partials.back().mutable_data_ptr();
    return result;
  };
  Tensor grad_weight =
      parameter_gradient(need_weight, weight_in, args.grad_weight, args.weight_partials);
  Tensor grad_bias = parameter_gradient(need_bias, bias_in, args.grad_bias, args.bias_partials);

  launch(kernel, args, x, shape.items(chunks), shape.rows * shape.width / chunks);
  if (!partials.empty()) {
    launch(norm_parameter_gradients, args, x, shape.width, chunks * (int64_t)partials.size());
  }
  return {grad_x, grad_weight, grad_bias};
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
  m.impl(TW_OVERLOAD("layer_norm"), TORCH_BOX(&layer_norm));
  m.impl(TW_OVERLOAD("layer_norm_backward"), TORCH_BOX(&layer_norm_grads));
  m.impl(TW_OVERLOAD("rms_norm"), TORCH_BOX(&rms_norm));
  m.impl(TW_OVERLOAD("rms_norm_backward"), TORCH_BOX(&rms_norm_grads));
}

}  // namespace torchweld
