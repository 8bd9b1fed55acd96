// The rows of a cross entropy for torch; the schemas are in python/torchweld/ops/loss/rows.py.
#include "bind/loss_rows.h"

namespace torchweld {
namespace {

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors forward(Tensor logits, Tensor target, OptionalTensor weight,
                     OptionalTensor probabilities, OptionalTensor inverse_temperature, double scale,
                     double softcap, bool entropy, bool smooth, bool argmax) {
  Rows rows(logits, target, weight, probabilities, inverse_temperature, scale, softcap);
  Results results(rows, entropy, smooth, argmax);
  launch(loss_rows, rows.args, rows.logits, rows.args.rows, rows.args.width);
  return {results.picked, results.statistics, results.argmax};
}

void check_in_place(const Tensor& logits) {
  STD_TORCH_CHECK(logits.is_contiguous(), "logits that are overwritten are not contiguous");
}

// The gradient of the logits, over them if `in_place`.
Tensor backward(Tensor logits, Tensor target, Tensor statistics_in, Tensor coefficients,
                Tensor grad_picked, OptionalTensor weight, OptionalTensor probabilities,
                OptionalTensor inverse_temperature, double scale, double softcap) {
  Rows rows(logits, target, weight, probabilities, inverse_temperature, scale, softcap);
  OptionalTensor statistics =
      rows.beside(statistics_in, {rows.args.rows, kLossStatistics}, "statistics");
  rows.args.statistics = const_cast<void*>(data(*statistics));
  Tensor grad_logits = empty(rows.logits, rows.logits.sizes(), rows.logits.scalar_type());
  launch_gradient(rows, coefficients, grad_picked, grad_logits, false);
  return grad_logits;
}

void backward_in_place(Tensor logits, Tensor target, Tensor statistics_in, Tensor coefficients,
                       Tensor grad_picked, OptionalTensor weight, OptionalTensor probabilities,
                       OptionalTensor inverse_temperature, double scale, double softcap) {
  check_in_place(logits);
  Rows rows(logits, target, weight, probabilities, inverse_temperature, scale, softcap);
  OptionalTensor statistics =
      rows.beside(statistics_in, {rows.args.rows, kLossStatistics}, "statistics");
  rows.args.statistics = const_cast<void*>(data(*statistics));
  launch_gradient(rows, coefficients, grad_picked, logits, false);
}

// Forward and gradient of each row in turn.
ThreeTensors both_in_place(Tensor logits, Tensor target, Tensor coefficients, Tensor grad_picked,
                           OptionalTensor weight, OptionalTensor probabilities,
                           OptionalTensor inverse_temperature, double scale, double softcap,
                           bool smooth, bool argmax) {
  check_in_place(logits);
  Rows rows(logits, target, weight, probabilities, inverse_temperature, scale, softcap);
  Results results(rows, false, smooth, argmax);
  launch_gradient(rows, coefficients, grad_picked, logits, true);
  return {results.picked, results.statistics, results.argmax};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("loss_rows"), TW_BOX(&forward));
  m.impl(TW_OVERLOAD("loss_rows_backward"), TW_BOX(&backward));
  m.impl(TW_OVERLOAD("loss_rows_backward_"), TW_BOX(&backward_in_place));
  m.impl(TW_OVERLOAD("loss_rows_both_"), TW_BOX(&both_in_place));
}

}  // namespace torchweld
