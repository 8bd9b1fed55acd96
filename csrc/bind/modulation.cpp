// Adaptive norms and gated residuals for torch; the schemas are in python/torchweld/ops.
#include "core/modulation.h"

#include "bind/norm.h"

TW_KERNEL(adaptive_layer_norm_forward, ModulationForward);
TW_KERNEL(adaptive_layer_norm_backward, ModulationBackward);
TW_KERNEL(adaptive_rms_norm_forward, ModulationForward);
TW_KERNEL(adaptive_rms_norm_backward, ModulationBackward);
TW_KERNEL(gated_residual_forward, ModulationForward);
TW_KERNEL(modulation_gradients, ModulationBackward);
TW_FUNCTION(int64_t, modulation_chunks, int64_t modulations, int64_t period);

namespace torchweld {
namespace {

Shape last_size(const Tensor& x) {
  STD_TORCH_CHECK(!x.sizes().empty(), "input has no dimensions");
  return {x.sizes().back()};
}

// Elements between the rows of [*, width]; -1 if they differ, or if columns are not adjacent.
int64_t row_stride(const Tensor& t) {
  const Sizes sizes = t.sizes(), strides = t.strides();
  const size_t last = sizes.size() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return -1;
  int64_t stride = 0, expected = -1;
  for (size_t i = last; i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (expected >= 0 && strides[i] != expected) return -1;
    if (expected < 0) stride = strides[i];
    expected = strides[i] * sizes[i];
  }
  return stride;
}

// The modulations of one call: checks, tensors as kernels read them, and what their rows serve.
class Modulations {
 public:
  int64_t rows = 1, period = 1;

  // `x` has the sizes of the input.
  Modulations(const Tensor& x, DType dtype, const Tensor& first) : x_(x), dtype_(dtype) {
    const Sizes sizes = x.sizes(), its = first.sizes();
    STD_TORCH_CHECK(its.size() == sizes.size(), "a modulation's rank is not input's");
    const size_t last = sizes.size() - 1;
    bool shared = true;
    for (size_t i = 0; i < last; ++i) {
      shared = shared && its[i] == sizes[i];
      STD_TORCH_CHECK(shared || its[i] == 1, "a modulation does not fit input");
      if (shared) {
        rows *= sizes[i];
      } else {
        period *= sizes[i];
      }
    }
    STD_TORCH_CHECK(its[last] == sizes[last], "a modulation does not have input's width");
    param_dtype_ = dtype_of(first);
    STD_TORCH_CHECK(is_parameter_beside(param_dtype_, dtype),
                    "a modulation is neither of input's dtype, nor are they float32 and 16 bits");
    sizes_ = Shape(its.begin(), its.end());
  }
  DType param_dtype() const { return dtype_ == DType::f32 ? dtype_ : param_dtype_; }

  Modulation read(const OptionalTensor& given) {
    if (!given) return {nullptr, 0};
    STD_TORCH_CHECK(same_device(*given, x_) && dtype_of(*given) == param_dtype_ &&
                        same_sizes(given->sizes(), Sizes(sizes_.data(), sizes_.size())),
                    "modulations differ in shape, dtype or device");
    Tensor t = as_type(*given, parameter_type(given->scalar_type(), dtype_));
    if (row_stride(t) < 0) t = copy_contiguous(t);
    kept_.push_back(t);
    return {data(t), row_stride(t)};
  }

 private:
  const Tensor& x_;
  DType dtype_, param_dtype_;
  Shape sizes_;
  std::vector<Tensor> kept_;
};

void check_branch(const Tensor& x, const Tensor& branch) {
  STD_TORCH_CHECK(same_device(branch, x) && same_sizes(branch.sizes(), x.sizes()) &&
                      fits_beside(dtype_of(x), dtype_of(branch)),
                  "branch does not fit input");
}

// z (without a branch: nothing), y (without a scale: nothing), mean (LayerNorm only) and rstd.
template <class Kernel>
std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor> forward(
    const Kernel& kernel, bool centered, const Tensor& x_in, const OptionalTensor& gate,
    const OptionalTensor& branch_in, const OptionalTensor& scale, const OptionalTensor& shift,
    double eps) {
  const Shape width = last_size(x_in);
  if (branch_in) check_branch(x_in, *branch_in);
  STD_TORCH_CHECK(eps >= 0, "eps is negative or NaN");
  ModulationForward args{};
  args.stream_dtype = dtype_of(x_in);
  args.dtype = branch_in ? dtype_of(*branch_in) : args.stream_dtype;
  Modulations modulations(x_in, args.dtype, gate ? *gate : *scale);
  args.gate = modulations.read(gate);
  args.scale = modulations.read(scale);
  args.shift = modulations.read(shift);
  args.param_dtype = modulations.param_dtype();
  args.period = modulations.period;

  const Tensor x = make_contiguous(x_in);
  const OptionalTensor branch = make_contiguous(branch_in);
  const Rows shape(x, width);
  OptionalTensor z, y, mean, rstd;
  if (branch) z = empty(x, x.sizes(), x.scalar_type());
  if (scale) {
    y = empty(x, x.sizes(), x.scalar_type());
    if (centered) mean = empty(x, shape.leading, accumulate_type(args.dtype));
    rstd = empty(x, shape.leading, accumulate_type(args.dtype));
  }
  const auto result = [](const OptionalTensor& t) { return t ? t->mutable_data_ptr() : nullptr; };
  args.x = data(x);
  args.branch = data(branch);
  args.z = result(z);
  args.y = result(y);
  args.mean = result(mean);
  args.rstd = result(rstd);
  args.rows = shape.rows;
  args.width = shape.width;
  args.eps = eps;
  launch(kernel, args, x, shape.items(shape.rows), shape.width);
  return {z, y, mean, rstd};
}

struct Wanted {
  bool x, gate, branch, scale, shift;
};

// The gradients of x, gate, branch, scale and shift; each is empty if it is not wanted. Without a
// norm, x is null.
template <class Kernel>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Kernel& kernel, const OptionalTensor& grad_z_in, const OptionalTensor& grad_y_in,
    const OptionalTensor& x_in, const OptionalTensor& gate, const OptionalTensor& branch_in,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& mean_in,
    const OptionalTensor& rstd_in, Wanted wanted) {
  const Tensor& like = x_in ? *x_in : *grad_z_in;
  const Shape width = last_size(like);
  const Rows shape(like, width);
  if (branch_in) check_branch(like, *branch_in);
  ModulationBackward args{};
  args.stream_dtype = dtype_of(like);
  args.dtype = branch_in ? dtype_of(*branch_in) : args.stream_dtype;
  const ScalarType statistics = accumulate_type(args.dtype);
  for (const OptionalTensor* grad : {&grad_z_in, &grad_y_in}) {
    if (*grad) check_like(**grad, like, like.sizes(), like.scalar_type());
  }
  for (const OptionalTensor* saved : {&mean_in, &rstd_in}) {
    if (*saved) check_like(**saved, like, shape.leading, statistics);
  }
  Modulations modulations(like, args.dtype, gate ? *gate : *scale);
  args.gate = modulations.read(gate);
  args.scale = modulations.read(scale);
  modulations.read(shift);
  args.param_dtype = modulations.param_dtype();
  args.period = modulations.period;
  args.chunks_each = modulation_chunks(modulations.rows, modulations.period);
  args.chunks = modulations.rows * args.chunks_each;

  const OptionalTensor grad_z = make_contiguous(grad_z_in), grad_y = make_contiguous(grad_y_in);
  const OptionalTensor x = make_contiguous(x_in), branch = make_contiguous(branch_in);
  const OptionalTensor mean = make_contiguous(mean_in), rstd = make_contiguous(rstd_in);
  std::vector<Tensor> partials;
  const auto gradient = [&](const OptionalTensor& modulation, bool is_wanted, void*& grad,
                            void*& sums) {
    if (!modulation || !is_wanted) return nothing(like);
    const ScalarType dtype = parameter_type(modulation->scalar_type(), args.dtype);
    Tensor result = empty(like, modulation->sizes(), dtype);
    grad = result.mutable_data_ptr();
    if (args.chunks_each > 1) {
      const int64_t sizes[] = {args.chunks, shape.width};
      partials.push_back(empty(like, Sizes(sizes, 2), statistics));
      sums = partials.back().mutable_data_ptr();
    }
    return result;
  };
  Tensor grad_gate = gradient(gate, wanted.gate, args.grad_gate, args.gate_partials);
  Tensor grad_scale = gradient(scale, wanted.scale, args.grad_weight, args.weight_partials);
  Tensor grad_shift = gradient(shift, wanted.shift, args.grad_bias, args.bias_partials);
  Tensor grad_x = wanted.x ? empty(like, like.sizes(), like.scalar_type()) : nothing(like);
  Tensor grad_branch =
      wanted.branch ? empty(like, branch->sizes(), branch->scalar_type()) : nothing(like);
  args.grad_z = data(grad_z);
  args.grad_y = data(grad_y);
  args.x = data(x);
  args.branch = data(branch);
  args.mean = data(mean);
  args.rstd = data(rstd);
  args.grad_x = wanted.x ? grad_x.mutable_data_ptr() : nullptr;
  args.grad_branch = wanted.branch ? grad_branch.mutable_data_ptr() : nullptr;
  args.rows = shape.rows;
  args.width = shape.width;
  const int64_t items = shape.items(args.chunks);  // without rows, their gradients are zeros
  launch(kernel, args, like, items, items ? shape.rows * shape.width / items : 0);
  if (!partials.empty()) {
    launch(modulation_gradients, args, like, shape.width, args.chunks * (int64_t)partials.size());
  }
  const auto finished = [&](const Tensor& grad, const OptionalTensor& modulation) {
    return modulation ? as_type(grad, modulation->scalar_type()) : grad;
  };
  return {grad_x, finished(grad_gate, gate), grad_branch, finished(grad_scale, scale),
          finished(grad_shift, shift)};
}

std::tuple<Tensor, Tensor, Tensor> adaptive_layer_norm(Tensor x, Tensor scale, OptionalTensor shift,
                                                       double eps) {
  const auto [z, y, mean, rstd] = forward(adaptive_layer_norm_forward, /*centered=*/true, x,
                                          std::nullopt, std::nullopt, scale, shift, eps);
  return {*y, *mean, *rstd};
}

std::tuple<Tensor, Tensor, Tensor> adaptive_layer_norm_grads(Tensor grad_y, Tensor x, Tensor scale,
                                                             OptionalTensor shift, double /*eps*/,
                                                             Tensor mean, Tensor rstd,
                                                             bool need_scale, bool need_shift) {
  const auto [grad_x, grad_gate, grad_branch, grad_scale, grad_shift] =
      backward(adaptive_layer_norm_backward, std::nullopt, grad_y, x, std::nullopt, std::nullopt,
               scale, shift, mean, rstd, {true, false, false, need_scale, need_shift});
  return {grad_x, grad_scale, grad_shift};
}

std::tuple<Tensor, Tensor> adaptive_rms_norm(Tensor x, Tensor scale, OptionalTensor shift,
                                             std::optional<double> eps) {
  const auto [z, y, mean, rstd] =
      forward(adaptive_rms_norm_forward, /*centered=*/false, x, std::nullopt, std::nullopt, scale,
              shift, eps.value_or(default_epsilon(dtype_of(x))));
  return {*y, *rstd};
}

std::tuple<Tensor, Tensor, Tensor> adaptive_rms_norm_grads(Tensor grad_y, Tensor x, Tensor scale,
                                                           OptionalTensor shift,
                                                           std::optional<double> /*eps*/,
                                                           Tensor rstd, bool need_scale,
                                                           bool need_shift) {
  const auto [grad_x, grad_gate, grad_branch, grad_scale, grad_shift] =
      backward(adaptive_rms_norm_backward, std::nullopt, grad_y, x, std::nullopt, std::nullopt,
               scale, shift, std::nullopt, rstd, {true, false, false, need_scale, need_shift});
  return {grad_x, grad_scale, grad_shift};
}

Tensor gated_residual(Tensor x, Tensor gate, Tensor branch) {
  return *std::get<0>(forward(gated_residual_forward, /*centered=*/false, x, gate, branch,
                              std::nullopt, std::nullopt, 0));
}

std::tuple<Tensor, Tensor> gated_residual_grads(Tensor grad_y, Tensor gate, Tensor branch,
                                                bool need_gate, bool need_branch) {
  const auto [grad_x, grad_gate, grad_branch, grad_scale, grad_shift] = backward(
      adaptive_rms_norm_backward, grad_y, std::nullopt, std::nullopt, gate, branch, std::nullopt,
      std::nullopt, std::nullopt, std::nullopt, {false, need_gate, need_branch, false, false});
  return {grad_gate, grad_branch};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gated_residual_layer_norm(Tensor x, Tensor gate,
                                                                     Tensor branch, Tensor scale,
                                                                     OptionalTensor shift,
                                                                     double eps) {
  const auto [z, y, mean, rstd] =
      forward(adaptive_layer_norm_forward, /*centered=*/true, x, gate, branch, scale, shift, eps);
  return {*z, *y, *mean, *rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_residual_layer_norm_grads(
    OptionalTensor grad_z, OptionalTensor grad_y, Tensor z, Tensor gate, Tensor branch,
    Tensor scale, OptionalTensor shift, double /*eps*/, Tensor mean, Tensor rstd, bool need_x,
    bool need_gate, bool need_branch, bool need_scale, bool need_shift) {
  return backward(adaptive_layer_norm_backward, grad_z, grad_y, z, gate, branch, scale, shift, mean,
                  rstd, {need_x, need_gate, need_branch, need_scale, need_shift});
}

std::tuple<Tensor, Tensor, Tensor> gated_residual_rms_norm(Tensor x, Tensor gate, Tensor branch,
                                                           Tensor scale, OptionalTensor shift,
                                                           std::optional<double> eps) {
  const auto [z, y, mean, rstd] =
      forward(adaptive_rms_norm_forward, /*centered=*/false, x, gate, branch, scale, shift,
              eps.value_or(default_epsilon(dtype_of(x))));
  return {*z, *y, *rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_residual_rms_norm_grads(
    OptionalTensor grad_z, OptionalTensor grad_y, Tensor z, Tensor gate, Tensor branch,
    Tensor scale, OptionalTensor shift, std::optional<double> /*eps*/, Tensor rstd, bool need_x,
    bool need_gate, bool need_branch, bool need_scale, bool need_shift) {
  return backward(adaptive_rms_norm_backward, grad_z, grad_y, z, gate, branch, scale, shift,
                  std::nullopt, rstd, {need_x, need_gate, need_branch, need_scale, need_shift});
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("adaptive_layer_norm"), TW_BOX(&adaptive_layer_norm));
  m.impl(TW_OVERLOAD("adaptive_layer_norm_backward"), TW_BOX(&adaptive_layer_norm_grads));
  m.impl(TW_OVERLOAD("adaptive_rms_norm"), TW_BOX(&adaptive_rms_norm));
  m.impl(TW_OVERLOAD("adaptive_rms_norm_backward"), TW_BOX(&adaptive_rms_norm_grads));
  m.impl(TW_OVERLOAD("gated_residual"), TW_BOX(&gated_residual));
  m.impl(TW_OVERLOAD("gated_residual_backward"), TW_BOX(&gated_residual_grads));
  m.impl(TW_OVERLOAD("gated_residual_layer_norm"), TW_BOX(&gated_residual_layer_norm));
  m.impl(TW_OVERLOAD("gated_residual_layer_norm_backward"),
         TW_BOX(&gated_residual_layer_norm_grads));
  m.impl(TW_OVERLOAD("gated_residual_rms_norm"), TW_BOX(&gated_residual_rms_norm));
  m.impl(TW_OVERLOAD("gated_residual_rms_norm_backward"), TW_BOX(&gated_residual_rms_norm_grads));
}

}  // namespace torchweld
