// linear_act in one GEMM for torch, on CUDA alone; its schema is in python/torchweld/ops/_gemm_act.py.
#if defined(TW_CUDA)

#include "cuda/linear_act.h"

#include <array>

#include "bind/act.h"

TW_FUNCTION(int, linear_act_plan, const torchweld::LinearAct&, int64_t* workspace_bytes);
TW_FUNCTION(int, linear_act_forward, const torchweld::LinearAct&, void* workspace, cudaStream_t);

namespace torchweld {
namespace {

template <class... Arguments>
Tensor aten(const char* name, const Arguments&... given) {
  std::array<StableIValue, sizeof...(given)> stack{torch::stable::detail::from(given)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// y, and z = x @ weight^T + bias or nothing. Algorithm 1 multiplies float32 as tf32, 0 does not.
std::tuple<Tensor, Tensor> linear_act(Tensor x_in, Tensor weight_in, OptionalTensor bias_in,
                                      std::string activation, std::string approximate,
                                      int64_t algorithm, bool save_z) {
  STD_TORCH_CHECK(activation_of(activation, approximate) == Activation::gelu_tanh,
                  "activation is not gelu by tanh, which alone cuBLASLt's epilogues have");
  const Matrix shape(x_in);
  const auto beside = [&](const Tensor& t) {
    return same_device(t, x_in) && t.scalar_type() == x_in.scalar_type();
  };
  STD_TORCH_CHECK(beside(weight_in) && weight_in.dim() == 2 && weight_in.size(1) == shape.width,
                  "weight does not fit x");
  const int64_t columns = weight_in.size(0);
  STD_TORCH_CHECK(
      !bias_in || (beside(*bias_in) && bias_in->dim() == 1 && bias_in->size(0) == columns),
      "bias does not fit x and weight");
  STD_TORCH_CHECK(algorithm == 0 || algorithm == 1, "algorithm is not 0 or 1");

  const Tensor x = packed(x_in), weight = packed(weight_in);
  const OptionalTensor bias = packed(bias_in);
  Shape sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  Tensor y = empty(x, sizes, x.scalar_type());
  Tensor z = save_z ? empty(x, sizes, x.scalar_type()) : nothing(x);
  const LinearAct args{data(x),
                       data(weight),
                       data(bias),
                       y.mutable_data_ptr(),
                       save_z ? z.mutable_data_ptr() : nullptr,
                       shape.rows,
                       columns,
                       shape.width,
                       dtype_of(x),
                       algorithm == 1};
  const DeviceGuard device(x);
  int64_t bytes = 0;
  int status = linear_act_plan(args, &bytes);
  if (status == kNotServed) {  // an error would be the user's, who did not ask for cuBLASLt
    const Tensor sum = aten("aten::linear", x, weight, bias);
    return {aten("aten::gelu", sum, approximate), save_z ? sum : z};
  }
  if (status == 0) {
    const Tensor workspace = empty(x, Shape{bytes}, ScalarType::Byte);
    status = linear_act_forward(args, workspace.mutable_data_ptr(), device.stream());
  }
  STD_TORCH_CHECK(status == 0, "cuBLASLt: status ", status);
  return {y, z};
}

}  // namespace

TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("linear_act"), TORCH_BOX(&linear_act)); }

}  // namespace torchweld

#endif
