// bias_act and gated_act for torch; the schemas are in python/torchweld/ops.
#include "bind/act.h"

TW_KERNEL(bias_act_forward, BiasActForward);
TW_KERNEL(bias_act_backward, BiasActBackward);
TW_KERNEL(bias_act_bias_gradient, BiasActBackward);
TW_KERNEL(gated_act_forward, GatedActForward);
TW_KERNEL(gated_act_backward, GatedActBackward);
TW_FUNCTION(int64_t, bias_act_chunks, int64_t rows);

namespace torchweld {
namespace {

// The bias's DType, or x's if there is no bias.
DType check_bias(const Tensor& x, const OptionalTensor& bias) {
  const DType dtype = dtype_of(x);
  if (!bias) return dtype;
  const DType kind = dtype_of(*bias);
  STD_TORCH_CHECK(same_device(*bias, x) && bias->dim() == 1 && bias->size(0) == Matrix(x).width,
                  "bias does not fit input");
  STD_TORCH_CHECK(fits_beside(kind, dtype),
                  "bias is neither of input's dtype nor float32 under a 16-bit input");
  return kind;
}

// Writes to y, which is contiguous and may be x.
void bias_act_into(const Tensor& y, const Tensor& x_in, const OptionalTensor& bias_in,
                   const std::string& activation, const std::string& approximate) {
  const Matrix shape(x_in);
  const DType param_dtype = check_bias(x_in, bias_in);
  const Tensor x = make_contiguous(x_in);
  const OptionalTensor bias = make_contiguous(bias_in);
  const BiasActForward args{data(x),     data(bias),  y.mutable_data_ptr(),
                            shape.rows,  shape.width, activation_of(activation, approximate),
                            dtype_of(x), param_dtype};
  launch(bias_act_forward, args, x, shape.items(shape.rows), shape.width);
}

Tensor bias_act(Tensor x, OptionalTensor bias, Text activation, Text approximate) {
  Tensor y = empty(x, x.sizes(), x.scalar_type());
  bias_act_into(y, x, bias, activation, approximate);
  return y;
}

void bias_act_in_place(Tensor x, OptionalTensor bias, Text activation, Text approximate) {
  STD_TORCH_CHECK(x.is_contiguous(), "input is not contiguous");
  bias_act_into(x, x, bias, activation, approximate);
}

// Writes to grad_x, which is contiguous and may be grad_y. Returns grad_bias, or an empty tensor if
// it is not wanted.
Tensor bias_act_grads_into(const Tensor& grad_x, const Tensor& grad_y_in, const Tensor& x_in,
                           const OptionalTensor& bias_in, const std::string& activation,
                           const std::string& approximate, bool need_bias) {
  const Matrix shape(x_in);
  const DType param_dtype = check_bias(x_in, bias_in);
  check_like(grad_y_in, x_in, "grad_y does not fit input");
  const Tensor grad_y = make_contiguous(grad_y_in), x = make_contiguous(x_in);
  const OptionalTensor bias = make_contiguous(bias_in);
  const bool sums = need_bias && bias;
  const int64_t chunks = bias_act_chunks(shape.rows);
  const int64_t bias_sizes[] = {sums ? shape.width : 0};
  const int64_t partial_sizes[] = {sums ? chunks : 0, shape.width};
  Tensor grad_bias = empty(x, Sizes(bias_sizes, 1), sums ? bias->scalar_type() : x.scalar_type());
  const Tensor partials = empty(x, Sizes(partial_sizes, 2), accumulate_type(dtype_of(x)));
  const BiasActBackward args{data(grad_y),
                             data(x),
                             data(bias),
                             grad_x.mutable_data_ptr(),
                             sums ? grad_bias.mutable_data_ptr() : nullptr,
                             sums ? partials.mutable_data_ptr() : nullptr,
                             shape.rows,
                             shape.width,
                             chunks,
                             activation_of(activation, approximate),
                             dtype_of(x),
                             param_dtype};
  launch(bias_act_backward, args, x, shape.items(chunks), shape.rows * shape.width / chunks);
  if (sums) launch(bias_act_bias_gradient, args, x, shape.width, chunks);
  return grad_bias;
}

std::tuple<Tensor, Tensor> bias_act_grads(Tensor grad_y, Tensor x, OptionalTensor bias,
                                          Text activation, Text approximate, bool need_bias) {
  Tensor grad_x = empty(x, x.sizes(), x.scalar_type());
  Tensor grad_bias =
      bias_act_grads_into(grad_x, grad_y, x, bias, activation, approximate, need_bias);
  return {grad_x, grad_bias};
}

Tensor bias_act_grads_in_place(Tensor grad_y, Tensor x, OptionalTensor bias, Text activation,
                               Text approximate, bool need_bias) {
  STD_TORCH_CHECK(grad_y.is_contiguous(), "grad_y is not contiguous");
  return bias_act_grads_into(grad_y, grad_y, x, bias, activation, approximate, need_bias);
}

// The row stride in elements, if t is a matrix or the left or right half of one. Any other tensor
// must be packed first.
std::optional<int64_t> pitch_of(const Tensor& t, const Matrix& shape) {
  if (t.is_contiguous()) return shape.width;
  const int64_t rank = t.dim();
  if (rank < 2 || t.stride(rank - 1) != 1) return std::nullopt;
  const int64_t pitch = t.stride(rank - 2);
  for (int64_t i = rank - 2; i > 0; --i) {
    if (t.stride(i - 1) != t.stride(i) * t.size(i)) return std::nullopt;
  }
  return pitch;
}

// A tensor and its row pitch; the tensor is a packed copy if it had no usable pitch.
struct Pitched {
  Tensor tensor;
  int64_t pitch;

  Pitched(const Tensor& t, const Matrix& shape) : tensor(t), pitch(shape.width) {
    if (const auto own_pitch = pitch_of(t, shape)) {
      pitch = *own_pitch;
    } else {
      tensor = make_contiguous(t);
    }
  }
};

Tensor gated_act(Tensor gate_in, Tensor up_in, Text activation, Text approximate) {
  const Matrix shape(gate_in);
  check_like(up_in, gate_in, "up does not fit gate");
  const Pitched gate(gate_in, shape), up(up_in, shape);
  Tensor y = empty(gate_in, gate_in.sizes(), gate_in.scalar_type());
  const GatedActForward args{data(gate.tensor),
                             data(up.tensor),
                             y.mutable_data_ptr(),
                             shape.rows,
                             shape.width,
                             gate.pitch,
                             up.pitch,
                             activation_of(activation, approximate),
                             dtype_of(gate_in)};
  launch(gated_act_forward, args, gate_in, shape.items(shape.rows), shape.width);
  return y;
}

// grad_gate and grad_up.
std::tuple<Tensor, Tensor> gated_act_grads(Tensor grad_y_in, Tensor gate_in, Tensor up_in,
                                           Text activation, Text approximate) {
  const Matrix shape(gate_in);
  check_like(up_in, gate_in, "up does not fit gate");
  check_like(grad_y_in, gate_in, "grad_y does not fit gate");
  const Tensor grad_y = make_contiguous(grad_y_in);
  const Pitched gate(gate_in, shape), up(up_in, shape);
  Tensor grad_gate = empty(gate_in, gate_in.sizes(), gate_in.scalar_type());
  Tensor grad_up = empty(gate_in, gate_in.sizes(), gate_in.scalar_type());
  const GatedActBackward args{data(grad_y),
                              data(gate.tensor),
                              data(up.tensor),
                              grad_gate.mutable_data_ptr(),
                              grad_up.mutable_data_ptr(),
                              shape.rows,
                              shape.width,
                              gate.pitch,
                              up.pitch,
                              activation_of(activation, approximate),
                              dtype_of(gate_in)};
  launch(gated_act_backward, args, gate_in, shape.items(shape.rows), shape.width);
  return {grad_gate, grad_up};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("bias_act"), TW_BOX(&bias_act));
  m.impl(TW_OVERLOAD("bias_act_"), TW_BOX(&bias_act_in_place));
  m.impl(TW_OVERLOAD("bias_act_backward"), TW_BOX(&bias_act_grads));
  m.impl(TW_OVERLOAD("bias_act_backward_"), TW_BOX(&bias_act_grads_in_place));
  m.impl(TW_OVERLOAD("gated_act"), TW_BOX(&gated_act));
  m.impl(TW_OVERLOAD("gated_act_backward"), TW_BOX(&gated_act_grads));
}

}  // namespace torchweld
