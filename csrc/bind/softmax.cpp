// softmax_dropout for torch; the schemas are in python/torchweld/ops.
#include "core/softmax.h"

#include "bind/dropout.h"
#include "bind/launch.h"

TW_KERNEL(softmax_dropout_forward, SoftmaxForward);
TW_KERNEL(softmax_dropout_backward, SoftmaxBackward);

namespace torchweld {
namespace {

Shape statistics_sizes(const Tensor& scores) {
  const Sizes leading = leading_sizes(scores, 1);
  Shape sizes(leading.begin(), leading.end());
  sizes.push_back(2);
  return sizes;
}

// `mask` broadcast to the scores. `mask` may be replaced by a copy with adjacent columns.
ScoreMask mask_of(const Tensor& scores, OptionalTensor& mask) {
  ScoreMask result;
  if (!mask) return result;
  const Sizes sizes = scores.sizes();
  STD_TORCH_CHECK(same_device(*mask, scores), "mask is on another device than input");
  STD_TORCH_CHECK(mask->sizes().size() <= sizes.size(), "mask has more dimensions than input");
  const size_t missing = sizes.size() - mask->sizes().size();
  for (size_t i = missing; i < sizes.size(); ++i) {
    const int64_t size = mask->sizes()[i - missing];
    STD_TORCH_CHECK(size == 1 || size == sizes[i], "mask does not broadcast to input");
  }
  if (mask->scalar_type() == ScalarType::Bool) {
    result.kind = MaskKind::boolean;
  } else {
    result.kind = MaskKind::additive;
    result.dtype = dtype_of(*mask);
    STD_TORCH_CHECK(fits_beside(result.dtype, dtype_of(scores)),
                    "mask is neither boolean, nor of input's dtype, nor float32 under 16 bits");
  }
  const size_t columns = sizes.size() - 1;
  std::vector<int64_t> strides;
  const auto stride_of = [&](size_t i) -> int64_t {
    if (i < missing || mask->sizes()[i - missing] == 1) return 0;
    return mask->strides()[i - missing];
  };
  for (const bool copied : {false, true}) {
    if (copied) mask = copy_contiguous(*mask);
    strides.clear();
    for (size_t i = 0; i < columns; ++i) strides.push_back(stride_of(i));
    result.stride = stride_of(columns);
    const auto rows = row_map(leading_sizes(scores, 1), strides, 0);
    STD_TORCH_CHECK(rows || !copied, "mask broadcasts in too many dimensions");
    if (rows && (result.stride == 0 || result.stride == 1)) {
      result.rows = *rows;
      break;
    }
  }
  result.data = data(mask);
  return result;
}

Causal causal_of(const Tensor& scores, bool causal, const Place& place) {
  Causal result;
  result.on = causal;
  const size_t rank = scores.sizes().size();
  if (rank < 2) return result;
  result.queries = result.all_queries = scores.sizes()[rank - 2];
  if (!place.whole.empty()) {
    result.first_query = place.offset[rank - 2];
    result.all_queries = place.whole[rank - 2];
  }
  return result;
}

void check_place(const Tensor& scores, const Place& place) {
  STD_TORCH_CHECK(!scores.sizes().empty(), "input has no dimensions");
  place.check(scores);
  STD_TORCH_CHECK(place.whole.empty() || place.whole.back() == scores.sizes().back(),
                  "shard: input lacks columns, and a softmax needs whole rows");
}

// y and statistics, which are empty if nothing is dropped.
std::tuple<Tensor, Tensor> softmax_dropout(Tensor scores_in, OptionalTensor mask, double scale,
                                           bool causal, double p, OptionalTensor seed,
                                           OptionalShape whole, OptionalShape offset) {
  const Place place{whole, offset};
  check_place(scores_in, place);
  SoftmaxForward args{};
  args.dropout = dropout_of(scores_in, 1, p, seed, place);
  args.mask = mask_of(scores_in, mask);
  args.causal = causal_of(scores_in, causal, place);
  args.width = scores_in.sizes().back();
  args.rows = product(leading_sizes(scores_in, 1));
  args.scale = scale;
  args.dtype = dtype_of(scores_in);

  const Tensor scores = make_contiguous(scores_in);
  Tensor y = empty(scores, scores.sizes(), scores.scalar_type());
  const Shape sizes = args.dropout.seed ? statistics_sizes(scores) : Shape{0};
  Tensor statistics = empty(scores, Sizes(sizes.data(), sizes.size()), accumulate_type(args.dtype));
  args.scores = data(scores);
  args.y = y.mutable_data_ptr();
  args.statistics = args.dropout.seed ? statistics.mutable_data_ptr() : nullptr;
  launch(softmax_dropout_forward, args, scores, args.width ? args.rows : 0, args.width);
  return {y, statistics};
}

Tensor softmax_dropout_grads(Tensor grad_y_in, OptionalTensor y_in, OptionalTensor scores_in,
                             OptionalTensor statistics_in, OptionalTensor mask, double scale,
                             bool causal, double p, OptionalTensor seed, OptionalShape whole,
                             OptionalShape offset) {
  const Place place{whole, offset};
  check_place(grad_y_in, place);
  SoftmaxBackward args{};
  args.dropout = dropout_of(grad_y_in, 1, p, seed, place);
  const OptionalTensor& saved = args.dropout.seed ? scores_in : y_in;
  STD_TORCH_CHECK(saved, "neither y nor input was saved");
  STD_TORCH_CHECK(same_device(*saved, grad_y_in) && same_sizes(saved->sizes(), grad_y_in.sizes()) &&
                      saved->scalar_type() == grad_y_in.scalar_type(),
                  "grad_y does not fit what the forward pass saved");
  args.width = grad_y_in.sizes().back();
  args.rows = product(leading_sizes(grad_y_in, 1));
  args.scale = scale;
  args.dtype = dtype_of(grad_y_in);
  args.causal = causal_of(grad_y_in, causal, place);

  const Tensor grad_y = make_contiguous(grad_y_in), kept = make_contiguous(*saved);
  OptionalTensor statistics;
  if (args.dropout.seed) {
    const Shape sizes = statistics_sizes(grad_y);
    STD_TORCH_CHECK(statistics_in && same_device(*statistics_in, grad_y) &&
                        same_sizes(statistics_in->sizes(), Sizes(sizes.data(), sizes.size())) &&
                        statistics_in->scalar_type() == accumulate_type(args.dtype),
                    "the statistics are not those of the forward pass");
    statistics = make_contiguous(statistics_in);
    args.mask = mask_of(grad_y, mask);
    args.scores = data(kept);
    args.statistics = data(statistics);
  } else {
    args.y = data(kept);
  }
  Tensor grad_scores = empty(grad_y, grad_y.sizes(), grad_y.scalar_type());
  args.grad_y = data(grad_y);
  args.grad_scores = grad_scores.mutable_data_ptr();
  launch(softmax_dropout_backward, args, grad_y, args.width ? args.rows : 0, args.width);
  return grad_scores;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("softmax_dropout"), TW_BOX(&softmax_dropout));
  m.impl(TW_OVERLOAD("softmax_dropout_backward"), TW_BOX(&softmax_dropout_grads));
}

}  // namespace torchweld
