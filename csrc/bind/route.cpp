// A router's choice of experts for torch; the schemas are in python/torchweld/ops/experts/route.py.
#include "core/route.h"

#include "bind/launch.h"

TW_KERNEL(route_forward, Route);
TW_KERNEL(route_gradient, RouteGradient);

namespace torchweld {
namespace {

// The arguments of both passes, checked, and what they point to.
struct Rows {
  Route args{};
  Tensor logits, scratch;
  OptionalTensor bias, mask;
  ScalarType kind;
  int64_t blocks;

  Rows(const Tensor& logits_in, const OptionalTensor& bias_in, const OptionalTensor& mask_in,
       int64_t k, const Text& scores, int64_t groups, int64_t top_groups, int64_t best_of_group,
       bool renormalize, double scale)
      : logits(make_contiguous(logits_in)), scratch(logits) {
    const auto sizes = logits.sizes();
    STD_TORCH_CHECK(sizes.size() == 2, "logits are not [rows, experts]");
    args.rows = sizes[0];
    args.experts = sizes[1];
    args.k = k;
    args.groups = groups;
    args.top_groups = top_groups;
    args.best_of_group = best_of_group;
    args.sigmoid = scores == "sigmoid";
    args.renormalize = renormalize;
    args.scale = scale;
    args.dtype = dtype_of(logits);
    STD_TORCH_CHECK(groups > 0 && args.experts % groups == 0 && top_groups > 0 &&
                        top_groups <= groups && best_of_group > 0 && k > 0 &&
                        k <= args.experts / groups * top_groups,
                    "k or groups do not fit the logits");
    kind = accumulate_type(args.dtype);
    if (bias_in) {
      STD_TORCH_CHECK(bias_in->numel() == args.experts && same_device(*bias_in, logits),
                      "choice_bias does not fit the logits");
      bias = make_contiguous(as_type(*bias_in, kind));
    }
    if (mask_in) {
      STD_TORCH_CHECK(mask_in->numel() == args.rows && mask_in->scalar_type() == ScalarType::Bool &&
                          same_device(*mask_in, logits),
                      "token_mask does not fit the logits");
      mask = make_contiguous(*mask_in);
    }
    blocks = (args.rows + kRouteBlock - 1) / kRouteBlock;
    scratch = make(blocks, 4 * args.experts);
    args.logits = data(logits);
    args.bias = data(bias);
    args.mask = (const bool*)data(mask);
    args.scratch = scratch.mutable_data_ptr();
  }

  Tensor make(int64_t rows, int64_t columns) const {
    const int64_t sizes[] = {rows, columns};
    return empty(logits, Sizes(sizes, 2), kind);
  }
};

template <class A>
void finish(const Rows& rows, const Tensor& sums_in, Tensor& balance, Tensor& z, Tensor& counts) {
  const int64_t experts = rows.args.experts, width = 2 * experts + 2;
  const auto* sums = (const A*)data(sums_in);
  std::vector<double> total(width);
  for (int64_t at = 0; at < rows.blocks; ++at) {
    for (int64_t i = 0; i < width; ++i) total[i] += sums[at * width + i];
  }
  const double tokens = std::max(total[width - 1], 1.0);
  auto* made = (A*)counts.mutable_data_ptr();
  double sum = 0;
  for (int64_t i = 0; i < experts; ++i) {
    const double chosen = total[i] / (tokens * rows.args.k);
    made[i] = (A)chosen;
    sum += chosen * total[experts + i] / tokens;
  }
  made[experts] = (A)tokens;
  *(A*)balance.mutable_data_ptr() = (A)(sum * experts);
  *(A*)z.mutable_data_ptr() = (A)(total[width - 2] / tokens);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor logits, OptionalTensor bias, OptionalTensor mask, int64_t k, Text scores, int64_t groups,
    int64_t top_groups, int64_t best_of_group, bool renormalize, double scale) {
  Rows rows(logits, bias, mask, k, scores, groups, top_groups, best_of_group, renormalize, scale);
  const int64_t chosen[] = {rows.args.rows, k}, every[] = {rows.args.experts + 1};
  // Not by empty(), which may fill new tensors with NaN.
  Tensor indices = torch::stable::new_empty(rows.logits, Sizes(chosen, 2), ScalarType::Long);
  Tensor weights = rows.make(rows.args.rows, k);
  const Tensor sums = rows.make(rows.blocks, 2 * rows.args.experts + 2);
  Tensor balance = empty(rows.logits, Sizes(every, (size_t)0), rows.kind);
  Tensor z = empty(rows.logits, Sizes(every, (size_t)0), rows.kind);
  Tensor counts = empty(rows.logits, Sizes(every, 1), rows.kind);
  rows.args.indices = (int64_t*)indices.mutable_data_ptr();
  rows.args.weights = weights.mutable_data_ptr();
  rows.args.sums = sums.mutable_data_ptr();
  launch(route_forward, rows.args, rows.logits, rows.blocks, kRouteBlock * rows.args.experts);
  if (rows.args.dtype == DType::f64) {
    finish<double>(rows, sums, balance, z, counts);
  } else {
    finish<float>(rows, sums, balance, z, counts);
  }
  return {indices, weights, balance, z, counts};
}

double read(const Tensor& one) {
  return one.scalar_type() == ScalarType::Double ? *(const double*)data(one)
                                                 : *(const float*)data(one);
}

Tensor backward(Tensor grad_weights_in, Tensor grad_balance, Tensor grad_z, Tensor logits,
                OptionalTensor bias, OptionalTensor mask, Tensor indices_in, Tensor counts,
                int64_t k, Text scores, int64_t groups, int64_t top_groups, int64_t best_of_group,
                bool renormalize, double scale) {
  Rows rows(logits, bias, mask, k, scores, groups, top_groups, best_of_group, renormalize, scale);
  const Tensor indices = make_contiguous(indices_in);
  const Tensor grad_weights = make_contiguous(as_type(grad_weights_in, rows.kind));
  STD_TORCH_CHECK(
      indices.numel() == rows.args.rows * k && grad_weights.numel() == indices.numel() &&
          indices.scalar_type() == ScalarType::Long && counts.numel() == rows.args.experts + 1 &&
          counts.scalar_type() == rows.kind && grad_balance.numel() == 1 && grad_z.numel() == 1,
      "gradients do not fit the logits");
  const Tensor of_balance = as_type(grad_balance, rows.kind), of_z = as_type(grad_z, rows.kind);
  const Tensor own = make_contiguous(counts);
  rows.args.indices = (int64_t*)const_cast<void*>(data(indices));
  Tensor made = empty(rows.logits, rows.logits.sizes(), rows.logits.scalar_type());
  const RouteGradient args{rows.args,  data(grad_weights),      data(own),      read(of_balance),
                           read(of_z), made.mutable_data_ptr(), rows.args.dtype};
  launch(route_gradient, args, rows.logits, rows.blocks, 2 * kRouteBlock * rows.args.experts);
  return made;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("route"), TW_BOX(&forward));
  m.impl(TW_OVERLOAD("route_backward"), TW_BOX(&backward));
}

}  // namespace torchweld
