// Shared by the bindings of ops that end in a norm: checks, sizes, parameter gradients.
#pragma once

#include "bind/launch.h"
#include "core/norm.h"

TW_KERNEL(norm_parameter_gradients, NormBackward);
TW_FUNCTION(int64_t, norm_chunks, int64_t rows, int64_t width);
TW_FUNCTION(int64_t, norm_workspace_bytes, int64_t rows, int64_t width);

namespace torchweld {

// The leading sizes of x are the rows; the trailing ones, normalized_shape, form the width.
struct Rows {
  Sizes leading;
  int64_t rows = 1, width = 1;

  Rows(const Tensor& x, const Shape& normalized_shape)
      : leading(x.sizes().data(), x.sizes().size() - normalized_shape.size()) {
    for (int64_t size : leading) rows *= size;
    for (int64_t size : normalized_shape) width *= size;
  }
  // Zero if the rows are empty, so that no kernel is launched.
  int64_t items(int64_t n) const { return width == 0 ? 0 : n; }
};

inline void check_shape(const Tensor& x, const Shape& normalized_shape) {
  const size_t rank = x.sizes().size(), trailing = normalized_shape.size();
  STD_TORCH_CHECK(trailing >= 1 && trailing <= rank, "normalized_shape does not fit input");
  STD_TORCH_CHECK(same_sizes(Sizes(x.sizes().data() + rank - trailing, trailing),
                             Sizes(normalized_shape.data(), trailing)),
                  "input does not end in normalized_shape");
}

// Checks weight and bias against an x of `dtype`. Returns the dtype in which kernels read them,
// which must be the same for both.
inline DType check_parameters(const Tensor& x, DType dtype, const Shape& normalized_shape,
                              const OptionalTensor& weight, const OptionalTensor& bias) {
  std::optional<DType> common;
  for (const OptionalTensor* param : {&weight, &bias}) {
    if (!*param) continue;
    const Tensor& p = **param;
    STD_TORCH_CHECK(same_device(p, x), "weight or bias is on another device than input");
    STD_TORCH_CHECK(same_sizes(p.sizes(), Sizes(normalized_shape.data(), normalized_shape.size())),
                    "weight or bias is not of normalized_shape");
    const DType kind = dtype_of(p);
    STD_TORCH_CHECK(is_parameter_beside(kind, dtype),
                    "weight or bias is neither of input's dtype, nor are they float32 and 16 bits");
    STD_TORCH_CHECK(kind == common.value_or(kind), "weight and bias differ in dtype");
    common = kind;
  }
  return dtype == DType::f32 ? dtype : common.value_or(dtype);
}

inline void check_like(const Tensor& t, const Tensor& x, Sizes sizes, ScalarType dtype) {
  STD_TORCH_CHECK(same_device(t, x) && t.scalar_type() == dtype && same_sizes(t.sizes(), sizes),
                  "a tensor saved by the forward pass, or the gradient, does not fit input");
}

// Allocates a backward pass's workspace, partial sums and parameter gradients, and keeps them alive
// until the last launch.
class ParameterGradients {
 public:
  Tensor weight, bias;  // empty if not wanted

  // `args` has sizes and dtypes, and receives the pointers.
  ParameterGradients(const Tensor& like, NormBackward& args, const OptionalTensor& weight_in,
                     const OptionalTensor& bias_in)
      : args_(args), like_(weight_in ? weight_in : bias_in) {
    const DeviceGuard device(like);  // norm_chunks counts its multiprocessors
    args.chunks = norm_chunks(args.rows, args.width);
    const int64_t floats[] = {norm_workspace_bytes(args.rows, args.width) / 4};
    scratch_.push_back(empty(like, Sizes(floats, 1), ScalarType::Float));
    args.workspace = scratch_.back().mutable_data_ptr();
    weight = gradient(like, weight_in, args.grad_weight, args.weight_partials);
    bias = gradient(like, bias_in, args.grad_bias, args.bias_partials);
  }

  void add_chunks() {
    const int64_t wanted = (args_.grad_weight != nullptr) + (args_.grad_bias != nullptr);
    if (!wanted) return;
    launch(norm_parameter_gradients, args_, weight, args_.width, args_.chunks * wanted);
    if (args_.grad_weight) weight = as_type(weight, like_->scalar_type());
    if (args_.grad_bias) bias = as_type(bias, like_->scalar_type());
  }

 private:
  Tensor gradient(const Tensor& like, const OptionalTensor& param, void*& grad, void*& partials) {
    if (!param) return nothing(like);
    const int64_t sizes[] = {args_.chunks, args_.width};
    scratch_.push_back(empty(like, Sizes(sizes, 2), accumulate_type(args_.dtype)));
    partials = scratch_.back().mutable_data_ptr();
    Tensor result = empty(like, param->sizes(), parameter_type(param->scalar_type(), args_.dtype));
    grad = result.mutable_data_ptr();
    return result;
  }

  const NormBackward& args_;
  const OptionalTensor like_;  // the parameter that sets the gradients' dtype
  std::vector<Tensor> scratch_;
};

}  // namespace torchweld
