// normalize_act and the other ops of batch_norm_act for torch; the schemas are in
// python/torchweld/ops.
#include "core/batch_norm.h"

#include "bind/act.h"
#include "bind/norm.h"

TW_KERNEL(column_statistics, ColumnStatistics);
TW_KERNEL(column_statistics_of_chunks, ColumnStatistics);
TW_KERNEL(normalize_columns, NormalizeColumns);
TW_KERNEL(normalize_act_forward, NormalizeActForward);
TW_KERNEL(normalize_act_backward, NormalizeActBackward);
TW_KERNEL(normalize_act_parameter_gradients, NormalizeActBackward);
TW_FUNCTION(int64_t, column_statistics_chunks, int64_t rows);
TW_FUNCTION(int64_t, normalize_act_chunks, int64_t rows);

namespace torchweld {
namespace {

// [count, width] of the type that x is computed in.
Tensor rows_of_columns(const Tensor& x, int64_t count) {
  const int64_t sizes[] = {count, Matrix(x).width};
  return empty(x, Sizes(sizes, 2), accumulate_type(dtype_of(x)));
}

// The four rows that the passes over x read.
Tensor columns_of(const Tensor& x, const Tensor& mean_in, const Tensor& var_in,
                  const OptionalTensor& weight_in, const OptionalTensor& bias_in, double eps) {
  const Matrix shape(x);
  const DType dtype = dtype_of(x);
  const DType statistics_dtype = check_parameters(x, dtype, {shape.width}, mean_in, var_in);
  const DType param_dtype = check_parameters(x, dtype, {shape.width}, weight_in, bias_in);
  STD_TORCH_CHECK(eps >= 0, "eps is negative or NaN");
  const Tensor mean = parameter(mean_in, dtype), var = parameter(var_in, dtype);
  const OptionalTensor weight = parameter(weight_in, dtype), bias = parameter(bias_in, dtype);
  Tensor columns = rows_of_columns(x, Columns<float>::kCount);
  const NormalizeColumns args{
      data(mean),  data(var), data(weight), data(bias),  columns.mutable_data_ptr(),
      shape.width, eps,       dtype,        param_dtype, statistics_dtype};
  launch(normalize_columns, args, x, shape.width, Columns<float>::kCount);
  return columns;
}

// Writes to y, which is contiguous and may be x.
void normalize_act_into(const Tensor& y, const Tensor& x_in, const Tensor& mean, const Tensor& var,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                        const std::string& activation, const std::string& approximate) {
  const Matrix shape(x_in);
  const Activation kind = activation_of(activation, approximate);
  const Tensor columns = columns_of(x_in, mean, var, weight, bias, eps), x = make_contiguous(x_in);
  const NormalizeActForward args{data(x),     data(columns), y.mutable_data_ptr(), shape.rows,
                                 shape.width, kind,          dtype_of(x)};
  launch(normalize_act_forward, args, x, shape.items(shape.rows), shape.width);
}

Tensor normalize_act(Tensor x, Tensor mean, Tensor var, OptionalTensor weight, OptionalTensor bias,
                     double eps, Text activation, Text approximate) {
  Tensor y = empty(x, x.sizes(), x.scalar_type());
  normalize_act_into(y, x, mean, var, weight, bias, eps, activation, approximate);
  return y;
}

void normalize_act_in_place(Tensor x, Tensor mean, Tensor var, OptionalTensor weight,
                            OptionalTensor bias, double eps, Text activation, Text approximate) {
  STD_TORCH_CHECK(x.is_contiguous(), "input is not contiguous");
  normalize_act_into(x, x, mean, var, weight, bias, eps, activation, approximate);
}

// The tensors that both backward passes read.
struct Gradients {
  Tensor grad_y, x, columns;
  NormalizeActBackward args{};

  Gradients(const Tensor& grad_y_in, const Tensor& x_in, const Tensor& mean, const Tensor& var,
            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            const std::string& activation, const std::string& approximate)
      : grad_y(make_contiguous(grad_y_in)),
        x(make_contiguous(x_in)),
        columns(columns_of(x_in, mean, var, weight, bias, eps)) {
    check_like(grad_y_in, x_in, "grad_y does not fit input");
    const Matrix shape(x);
    args.grad_y = data(grad_y);
    args.x = data(x);
    args.columns = data(columns);
    args.rows = shape.rows;
    args.width = shape.width;
    args.chunks = normalize_act_chunks(shape.rows);
    args.activation = activation_of(activation, approximate);
    args.dtype = args.param_dtype = dtype_of(x);
  }
  void run() const {
    launch(normalize_act_backward, args, x, args.width == 0 ? 0 : args.chunks,
           args.rows * args.width / args.chunks);
  }
};

// grad_x, grad_weight and grad_bias for given statistics. Each is empty if it is not wanted.
std::tuple<Tensor, Tensor, Tensor> normalize_act_grads(
    Tensor grad_y, Tensor x, Tensor mean, Tensor var, OptionalTensor weight, OptionalTensor bias,
    double eps, Text activation, Text approximate, bool need_x, bool need_weight, bool need_bias) {
  Gradients gradients(grad_y, x, mean, var, weight, bias, eps, activation, approximate);
  NormalizeActBackward& args = gradients.args;
  Tensor grad_x = need_x ? empty(x, x.sizes(), x.scalar_type()) : nothing(x);
  if (need_x) args.grad_x = grad_x.mutable_data_ptr();
  std::vector<Tensor> partials;  // kept alive until the last launch
  const auto wanted = [&](bool needed, const OptionalTensor& param, void*& grad, void*& partial) {
    if (!needed || !param) return nothing(x);
    partials.push_back(rows_of_columns(x, args.chunks));
    partial = partials.back().mutable_data_ptr();
    Tensor result = empty(x, param->sizes(), parameter_type(param->scalar_type(), args.dtype));
    grad = result.mutable_data_ptr();
    args.param_dtype = dtype_of(result);
    return result;
  };
  Tensor grad_weight = wanted(need_weight, weight, args.grad_weight, args.weight_partials);
  Tensor grad_bias = wanted(need_bias, bias, args.grad_bias, args.bias_partials);
  gradients.run();
  const int64_t sums = partials.size();
  if (sums) launch(normalize_act_parameter_gradients, args, x, args.width, args.chunks * sums);
  if (args.grad_weight) grad_weight = as_type(grad_weight, weight->scalar_type());
  if (args.grad_bias) grad_bias = as_type(grad_bias, bias->scalar_type());
  return {grad_x, grad_weight, grad_bias};
}

// grad_x for statistics of x itself, or of a larger tensor that x is a shard of.
Tensor batch_norm_act_grad_x(Tensor grad_y, Tensor x, Tensor mean, Tensor var,
                             OptionalTensor weight, OptionalTensor bias, Tensor mean_g_in,
                             Tensor mean_g_x_hat_in, double eps, Text activation,
                             Text approximate) {
  Gradients gradients(grad_y, x, mean, var, weight, bias, eps, activation, approximate);
  const int64_t width[] = {gradients.args.width};
  for (const Tensor* t : {&mean_g_in, &mean_g_x_hat_in}) {
    check_like(*t, x, Sizes(width, 1), accumulate_type(dtype_of(x)));
  }
  const Tensor mean_g = make_contiguous(mean_g_in), mean_g_x_hat = make_contiguous(mean_g_x_hat_in);
  Tensor grad_x = empty(x, x.sizes(), x.scalar_type());
  gradients.args.grad_x = grad_x.mutable_data_ptr();
  gradients.args.mean_g = data(mean_g);
  gradients.args.mean_g_x_hat = data(mean_g_x_hat);
  gradients.run();
  return grad_x;
}

// mean and var.
std::tuple<Tensor, Tensor> statistics_of_columns(Tensor x_in) {
  const Matrix shape(x_in);
  const Tensor x = make_contiguous(x_in);
  const int64_t width[] = {shape.width}, chunks = column_statistics_chunks(shape.rows);
  const Tensor means = rows_of_columns(x, chunks), squares = rows_of_columns(x, chunks);
  Tensor mean = empty(x, Sizes(width, 1), means.scalar_type());
  Tensor var = empty(x, Sizes(width, 1), means.scalar_type());
  const ColumnStatistics args{data(x),
                              mean.mutable_data_ptr(),
                              var.mutable_data_ptr(),
                              means.mutable_data_ptr(),
                              squares.mutable_data_ptr(),
                              shape.rows,
                              shape.width,
                              chunks,
                              dtype_of(x)};
  launch(column_statistics, args, x, shape.items(chunks), shape.rows * shape.width / chunks);
  launch(column_statistics_of_chunks, args, x, shape.width, 3 * chunks);
  return {mean, var};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("column_statistics"), TW_BOX(&statistics_of_columns));
  m.impl(TW_OVERLOAD("normalize_act"), TW_BOX(&normalize_act));
  m.impl(TW_OVERLOAD("normalize_act_"), TW_BOX(&normalize_act_in_place));
  m.impl(TW_OVERLOAD("normalize_act_backward"), TW_BOX(&normalize_act_grads));
  m.impl(TW_OVERLOAD("batch_norm_act_grad_x"), TW_BOX(&batch_norm_act_grad_x));
}

}  // namespace torchweld
