// bias_dropout_add for torch; the schemas are in python/torchweld/ops.
#include "core/bias_dropout_add.h"

#include "bind/dropout.h"
#include "bind/launch.h"

TW_KERNEL(bias_dropout_add_forward, BiasDropoutAddForward);
TW_KERNEL(bias_dropout_add_backward, BiasDropoutAddBackward);
TW_KERNEL(bias_dropout_add_bias_gradient, BiasDropoutAddBackward);
TW_FUNCTION(int64_t, bias_dropout_add_chunks, int64_t rows, int64_t width);

namespace torchweld {
namespace {

// Checks and collects what both passes need. `stream` is the residual or grad_y.
template <class Args>
Args checked(const Tensor& stream, const OptionalTensor& bias, ScalarType x_dtype, double p,
             const OptionalTensor& seed, const Place& place) {
  Args args{};
  STD_TORCH_CHECK(!stream.sizes().empty(), "input has no dimensions");
  args.width = stream.sizes().back();
  args.rows = product(leading_sizes(stream, 1));
  args.dtype = dtype_of(x_dtype);
  args.stream_dtype = dtype_of(stream);
  args.bias_dtype = bias ? dtype_of(*bias) : args.dtype;
  STD_TORCH_CHECK(fits_beside(args.stream_dtype, args.dtype),
                  "residual is neither of input's dtype nor float32 beside a 16-bit input");
  STD_TORCH_CHECK(
      !bias || (same_device(*bias, stream) && bias->sizes().size() == 1 &&
                bias->sizes()[0] == args.width && fits_beside(args.bias_dtype, args.dtype)),
      "bias does not fit input");
  args.dropout = dropout_of(stream, 1, p, seed, place);
  return args;
}

Tensor bias_dropout_add(Tensor x_in, OptionalTensor bias_in, Tensor residual_in, double p,
                        OptionalTensor seed, OptionalShape whole, OptionalShape offset) {
  STD_TORCH_CHECK(same_device(residual_in, x_in) && same_sizes(residual_in.sizes(), x_in.sizes()),
                  "residual does not fit input");
  auto args = checked<BiasDropoutAddForward>(residual_in, bias_in, x_in.scalar_type(), p, seed,
                                             {whole, offset});
  const Tensor x = make_contiguous(x_in), residual = make_contiguous(residual_in);
  const OptionalTensor bias = make_contiguous(bias_in);
  Tensor y = empty(residual, residual.sizes(), residual.scalar_type());
  args.x = data(x);
  args.bias = data(bias);
  args.residual = data(residual);
  args.y = y.mutable_data_ptr();
  launch(bias_dropout_add_forward, args, x, args.width ? args.rows : 0, args.width);
  return y;
}

// grad_x and grad_bias, each empty if it is not wanted.
std::tuple<Tensor, Tensor> bias_dropout_add_grads(Tensor grad_y_in, OptionalTensor bias, double p,
                                                  OptionalTensor seed, OptionalShape whole,
                                                  OptionalShape offset, ScalarType x_dtype,
                                                  bool need_x, bool need_bias) {
  auto args = checked<BiasDropoutAddBackward>(grad_y_in, bias, x_dtype, p, seed, {whole, offset});
  const Tensor grad_y = make_contiguous(grad_y_in);
  const bool sums = need_bias && bias;
  Tensor grad_x = need_x ? empty(grad_y, grad_y.sizes(), x_dtype) : nothing(grad_y);
  Tensor grad_bias = sums ? empty(grad_y, bias->sizes(), bias->scalar_type()) : nothing(grad_y);
  args.chunks = bias_dropout_add_chunks(args.rows, args.width);
  const int64_t sizes[] = {args.chunks, args.width};
  Tensor partials =
      sums ? empty(grad_y, Sizes(sizes, 2), accumulate_type(args.dtype)) : nothing(grad_y);
  args.grad_y = data(grad_y);
  args.grad_x = need_x ? grad_x.mutable_data_ptr() : nullptr;
  args.grad_bias = sums ? grad_bias.mutable_data_ptr() : nullptr;
  args.partials = sums ? partials.mutable_data_ptr() : nullptr;
  if (need_x || sums) {
    launch(bias_dropout_add_backward, args, grad_y, args.width ? args.chunks : 0,
           args.rows * args.width / args.chunks);
  }
  if (sums) launch(bias_dropout_add_bias_gradient, args, grad_y, args.width, args.chunks);
  return {grad_x, grad_bias};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("bias_dropout_add"), TW_BOX(&bias_dropout_add));
  m.impl(TW_OVERLOAD("bias_dropout_add_backward"), TW_BOX(&bias_dropout_add_grads));
}

}  // namespace torchweld
