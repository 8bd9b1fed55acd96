// linear_act as one GEMM for torch, and the fused GEMM of the next layer's backward. Only for CUDA.
// The schemas are in python/torchweld/ops/gemm: epilogue.py and act_linear.py.
#if defined(TW_CUDA)

#include "cuda/linear_act.h"

#include <array>
#include <exception>

#include "bind/act.h"

TW_FUNCTION(bool, linear_act_plan, const torchweld::LinearAct&, int64_t* workspace_bytes);
TW_FUNCTION(bool, linear_act_forward, const torchweld::LinearAct&, void* workspace, cudaStream_t);
TW_FUNCTION(bool, act_linear_backward_plan, const torchweld::ActLinearBackward&,
            int64_t* workspace_bytes);
TW_FUNCTION(bool, act_linear_backward_launch, const torchweld::ActLinearBackward&, void* workspace,
            cudaStream_t);

namespace torchweld {
namespace {

template <class... Arguments>
Tensor aten(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Algorithm 1 allows tf32 for float32 products, 0 does not.
bool check_how(const std::string& activation, const std::string& approximate, int64_t algorithm) {
  STD_TORCH_CHECK(
      activation_of(activation, approximate) == Activation::GeluTanh,
      "activation is not gelu with approximate=tanh, the only one in cuBLASLt's epilogues");
  STD_TORCH_CHECK(algorithm == 0 || algorithm == 1, "algorithm is not 0 or 1");
  return algorithm == 1;
}

bool is_beside(const Tensor& t, const Tensor& x) {
  return same_device(t, x) && t.scalar_type() == x.scalar_type();
}

Tensor empty_rows(const Tensor& x, int64_t columns) {
  Shape sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  return empty(x, sizes, x.scalar_type());
}

// Workspace for the GEMM, or nothing if memory is exhausted.
OptionalTensor workspace_of(int64_t bytes, const Tensor& like) {
  try {
    return empty(like, Shape{bytes}, ScalarType::Byte);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Whether cuBLASLt computed the product. Its errors are not raised, since torch's GEMM can do the
// same. If both fail, torch raises.
template <class Args>
bool multiply(bool (*plan)(const Args&, int64_t*), bool (*gemm)(const Args&, void*, cudaStream_t),
              const Args& args, const Tensor& like) {
  const DeviceGuard device(like);
  int64_t bytes = 0;
  if (!plan(args, &bytes)) return false;
  const OptionalTensor workspace = workspace_of(bytes, like);
  return workspace && gemm(args, workspace->mutable_data_ptr(), device.stream());
}

// y, and z = x @ weight^T + bias or nothing.
std::tuple<Tensor, Tensor> linear_act(Tensor x_in, Tensor weight_in, OptionalTensor bias_in,
                                      Text activation, Text approximate, int64_t algorithm,
                                      bool save_z) {
  const bool tf32 = check_how(activation, approximate, algorithm);
  const Matrix shape(x_in);
  STD_TORCH_CHECK(
      is_beside(weight_in, x_in) && weight_in.dim() == 2 && weight_in.size(1) == shape.width,
      "weight does not fit input");
  const int64_t columns = weight_in.size(0);
  STD_TORCH_CHECK(
      !bias_in || (is_beside(*bias_in, x_in) && bias_in->dim() == 1 && bias_in->size(0) == columns),
      "bias does not fit input and weight");

  const Tensor x = make_contiguous(x_in), weight = make_contiguous(weight_in);
  const OptionalTensor bias = make_contiguous(bias_in);
  Tensor y = empty_rows(x, columns);
  Tensor z = save_z ? empty_rows(x, columns) : nothing(x);
  const LinearAct args{data(x),
                       data(weight),
                       data(bias),
                       y.mutable_data_ptr(),
                       save_z ? z.mutable_data_ptr() : nullptr,
                       shape.rows,
                       columns,
                       shape.width,
                       dtype_of(x),
                       tf32};
  if (multiply(linear_act_plan, linear_act_forward, args, x)) return {y, z};
  const Tensor sum = aten("aten::linear", x, weight, bias);
  return {aten("aten::gelu", sum, approximate), save_z ? sum : z};
}

// grad_z = (grad_y @ weight) * gelu'(z), and its sum over rows or nothing.
std::tuple<Tensor, Tensor> act_linear_backward(Tensor grad_y_in, Tensor weight_in, Tensor z_in,
                                               Text activation, Text approximate, int64_t algorithm,
                                               bool need_bias) {
  const bool tf32 = check_how(activation, approximate, algorithm);
  const Matrix grad_shape(grad_y_in), shape(z_in);
  STD_TORCH_CHECK(is_beside(weight_in, z_in) && weight_in.dim() == 2 &&
                      weight_in.size(0) == grad_shape.width && weight_in.size(1) == shape.width,
                  "weight does not fit grad_y and z");
  STD_TORCH_CHECK(is_beside(grad_y_in, z_in) && grad_shape.rows == shape.rows,
                  "grad_y does not fit z");

  const Tensor grad_y = make_contiguous(grad_y_in), weight = make_contiguous(weight_in),
               z = make_contiguous(z_in);
  Tensor grad_z = empty_rows(z, shape.width);
  Tensor grad_bias = need_bias ? empty(z, Shape{shape.width}, z.scalar_type()) : nothing(z);
  const ActLinearBackward args{data(grad_y),
                               data(weight),
                               data(z),
                               grad_z.mutable_data_ptr(),
                               need_bias ? grad_bias.mutable_data_ptr() : nullptr,
                               shape.rows,
                               shape.width,
                               grad_shape.width,
                               dtype_of(z),
                               tf32};
  if (multiply(act_linear_backward_plan, act_linear_backward_launch, args, z)) {
    return {grad_z, grad_bias};
  }
  const Tensor grad = aten("aten::matmul", grad_y, weight);
  const Tensor gelu_gradient = aten("aten::gelu_backward", grad, z, approximate);
  return {gelu_gradient,
          need_bias ? aten("aten::sum_to_size", gelu_gradient, Shape{shape.width}) : grad_bias};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("linear_act"), TORCH_BOX(&linear_act));
  m.impl(TW_OVERLOAD("act_linear_backward"), TORCH_BOX(&act_linear_backward));
}

}  // namespace torchweld

#endif
