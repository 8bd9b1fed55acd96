// rotary_embedding for torch; the schemas are in python/torchweld/ops/rotary.
#include "core/rotary.h"

#include <algorithm>
#include <string>

#include "bind/launch.h"

TW_KERNEL(rotary_forward, Rotary);
TW_KERNEL(rotary_backward, Rotary);
TW_KERNEL(rotary_parameter_gradients, Rotary);
TW_FUNCTION(int64_t, rotary_chunks, int64_t rows);

namespace torchweld {
namespace {

constexpr int kLeading = 3;  // the dimensions before a row that kernels take

// Sizes and strides of all dimensions but the last, with ones in front.
struct Leading {
  int64_t size[kLeading] = {1, 1, 1}, stride[kLeading] = {};

  explicit Leading(const Tensor& t, int64_t trailing = 1) {
    const int64_t rank = t.dim() - trailing;
    STD_TORCH_CHECK(rank >= 0 && rank <= kLeading, "a tensor has too many or too few dimensions");
    for (int64_t d = 0; d < rank; ++d) {
      size[kLeading - rank + d] = t.sizes()[d];
      stride[kLeading - rank + d] = t.sizes()[d] == 1 ? 0 : t.strides()[d];
    }
  }
};

// A result with the layout of another tensor, as torch.empty_like has it, if columns are adjacent.
Tensor empty_with_layout(const Tensor& like) {
  Tensor result = copy_by([](const Tensor& x) { return torch::stable::empty_like(x); }, like);
  const int64_t last = like.dim() - 1;
  if (result.sizes()[last] > 1 && result.strides()[last] != 1) {
    result = empty(like, like.sizes(), like.scalar_type());
  }
  if (poison) torch::stable::fill_(result, std::nan(""));
  return result;
}

// The tensor if the elements of its last dimension are adjacent, else a contiguous copy.
Tensor with_adjacent_columns(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.sizes()[last] <= 1 || t.strides()[last] == 1 ? t : copy_contiguous(t);
}

// What all passes are told besides the streams.
struct Settings {
  int64_t rotary_dim;
  bool interleaved, proportional;
  std::optional<double> eps;
  bool plus_one;
  std::string rounded;
  std::optional<int64_t> heads;
};

class Call {
 public:
  Rotary args{};

  Call(const Tensor& x, const OptionalTensor& key, const Tensor& cos, const Tensor& sin,
       const OptionalTensor& positions, const Settings& by)
      : table_{cos, sin}, lead_(x) {
    const int64_t rank = x.dim(), width = x.sizes()[rank - 1];
    STD_TORCH_CHECK(rank >= 1, "input has no dimensions");
    STD_TORCH_CHECK(same_sizes(cos.sizes(), sin.sizes()) &&
                        cos.scalar_type() == sin.scalar_type() && cos.dim() >= 1,
                    "cos and sin differ");
    const int64_t angles = cos.sizes()[cos.dim() - 1], pairs = by.rotary_dim / 2;
    STD_TORCH_CHECK(by.rotary_dim % 2 == 0 && by.rotary_dim >= 0 && by.rotary_dim <= width &&
                        (angles == pairs || angles == 2 * pairs),
                    "cos does not fit the dimensions that are rotated");
    args.width = width;
    args.pairs = pairs;
    args.distance = by.proportional ? width / 2 : pairs;
    STD_TORCH_CHECK(!by.proportional || (width % 2 == 0 && !by.interleaved),
                    "proportional pairs need an even width and halves");
    STD_TORCH_CHECK(!by.eps || *by.eps >= 0, "norm_eps is negative or NaN");
    STD_TORCH_CHECK(by.rounded == "none" || by.rounded == "result" || by.rounded == "both",
                    "norm_rounding is another word");
    args.interleaved = by.interleaved;
    args.full = angles != pairs;
    args.norm = by.eps.has_value();
    args.eps = by.eps.value_or(0);
    args.plus_one = by.plus_one;
    args.across = by.heads.has_value();
    args.rounded = by.rounded == "none" ? 0 : by.rounded == "result" ? 1 : 2;
    args.dtype = dtype_of(x);
    args.table_dtype = dtype_of(cos);
    args.count = key ? 2 : 1;
    STD_TORCH_CHECK(fits_beside(args.table_dtype, args.dtype), "cos is of another dtype");
    STD_TORCH_CHECK(same_device(cos, x) && same_device(sin, x), "cos is on another device");

    if (positions) {
      STD_TORCH_CHECK(cos.dim() == 2, "with positions cos is a matrix");
      STD_TORCH_CHECK((positions->scalar_type() == ScalarType::Long ||
                       positions->scalar_type() == ScalarType::Int) &&
                          same_device(*positions, x),
                      "position_ids are no integers, or on another device");
      positions_ = as_type(*positions, ScalarType::Long);
      check_positions(cos.sizes()[0]);
    }
    const Leading angle_lead = positions ? Leading(*positions_, 0) : Leading(cos);
    for (int d = 0; d < kLeading; ++d) {
      STD_TORCH_CHECK(angle_lead.size[d] == 1 || angle_lead.size[d] == lead_.size[d],
                      "cos does not broadcast to input");
    }
    choose_head(angle_lead, x, key, by);
    args.batch = lead_.size[batch_];
    args.tokens = lead_.size[token_];
    for (int k = 0; k < 2; ++k) {
      args.table[k] = data(table_[k]);
      const int64_t step = table_[k].strides()[table_[k].dim() - 1];
      if (positions_) {
        args.table_stride[k][1] = table_[k].strides()[0];
      } else {
        const Leading lead(table_[k]);
        args.table_stride[k][0] = lead.size[batch_] == 1 ? 0 : lead.stride[batch_];
        args.table_stride[k][1] = lead.size[token_] == 1 ? 0 : lead.stride[token_];
      }
      args.table_stride[k][2] = step;
    }
    if (positions_) {
      args.positions = positions_->const_data_ptr<int64_t>();
      args.position_stride[0] = angle_lead.size[batch_] == 1 ? 0 : angle_lead.stride[batch_];
      args.position_stride[1] = angle_lead.size[token_] == 1 ? 0 : angle_lead.stride[token_];
    }
  }

  // The strides of a tensor like input or key: batch, token, head.
  void take_strides(const Tensor& t, int64_t (&stride)[3]) const {
    const Leading lead(t);
    stride[0] = lead.stride[batch_];
    stride[1] = lead.stride[token_];
    stride[2] = lead.stride[head_];
  }

  int64_t heads_of(const Tensor& t) const { return Leading(t).size[head_]; }

  void check_like_input(const Tensor& t, const Tensor& x) const {
    STD_TORCH_CHECK(t.dim() == x.dim() && t.scalar_type() == x.scalar_type() && same_device(t, x),
                    "key differs from input");
    const Leading lead(t);
    STD_TORCH_CHECK(t.sizes()[t.dim() - 1] == args.width && lead.size[batch_] == args.batch &&
                        lead.size[token_] == args.tokens,
                    "key does not fit input");
  }

  // One number a row, or one a token for a norm across heads.
  Tensor statistics(const Tensor& x) const {
    Shape sizes(x.sizes().begin(), x.sizes().end() - 1);
    const int64_t head = head_ - (kLeading - (int64_t)sizes.size());
    if (args.across && head >= 0) sizes[head] = 1;
    return empty(x, Sizes(sizes.data(), sizes.size()), accumulate_type(args.dtype));
  }
  void take_statistics_strides(const Tensor& rstd, int64_t (&stride)[3]) const {
    const Leading lead(rstd, 0);
    stride[0] = lead.stride[batch_];
    stride[1] = lead.stride[token_];
    stride[2] = lead.stride[head_];
  }

  void check_weight(const OptionalTensor& weight, const Tensor& x) {
    if (!weight) return;
    STD_TORCH_CHECK(args.norm, "a weight is given without eps");
    const int64_t count = (args.across ? heads_of(x) : 1) * args.width;
    const DType kind = dtype_of(*weight);
    STD_TORCH_CHECK(weight->dim() == 1 && weight->sizes()[0] == count, "a weight has another size");
    STD_TORCH_CHECK(fits_beside(kind, args.dtype) && same_device(*weight, x),
                    "a weight is of another dtype or on another device");
    STD_TORCH_CHECK(!has_weight_ || kind == args.param_dtype, "the weights differ in dtype");
    args.param_dtype = kind;
    has_weight_ = true;
  }

  bool empty_rows() const { return args.batch * args.tokens * args.width == 0; }

 private:
  void check_positions(int64_t rows) const {
    const Tensor flat = make_contiguous(*positions_);
    const int64_t* values = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      STD_TORCH_CHECK(values[i] >= 0 && values[i] < rows, "position_ids: element ", i, " is ",
                      values[i], ", and cos has ", rows, " rows");
    }
  }

  // The dimension of heads: rows along it share their angles. The other two are batch and tokens.
  void choose_head(const Leading& angles, const Tensor& x, const OptionalTensor& key,
                   const Settings& by) {
    head_ = -1;
    if (by.heads) {
      STD_TORCH_CHECK(*by.heads < 0 && *by.heads >= -x.dim() && *by.heads != -1,
                      "heads is no dimension of input");
      head_ = kLeading + 1 + *by.heads;
    }
    const auto take = [&](int d) {
      STD_TORCH_CHECK(head_ == -1 || head_ == d, "key differs from input in another dimension");
      head_ = d;
    };
    if (key) {
      STD_TORCH_CHECK(key->dim() == x.dim(), "key has another number of dimensions than input");
      const Leading other(*key);
      for (int d = 0; d < kLeading; ++d) {
        if (other.size[d] != lead_.size[d]) take(d);
      }
    }
    for (int d = 0; d < kLeading && !by.heads && !has_different_heads(key); ++d) {
      if (angles.size[d] != 1 || lead_.size[d] == 1) continue;
      if (head_ == -1 || lead_.stride[d] <= lead_.stride[head_]) head_ = d;
    }
    if (head_ == -1) {
      for (int d = 0; d < kLeading; ++d) {
        if (angles.size[d] == 1 && lead_.size[d] == 1) head_ = d;
      }
    }
    if (head_ == -1 && kLeading + 1 > x.dim()) head_ = 0;
    STD_TORCH_CHECK(head_ >= 0, "no dimension shares angles: give cos a size of 1 there");
    STD_TORCH_CHECK(angles.size[head_] == 1, "cos differs along the heads");
    batch_ = head_ == 0 ? 1 : 0;
    token_ = head_ == 2 ? 1 : 2;
  }
  bool has_different_heads(const OptionalTensor& key) const {
    if (!key) return false;
    const Leading other(*key);
    return !std::equal(other.size, other.size + kLeading, lead_.size);
  }

  Tensor table_[2];
  OptionalTensor positions_;
  Leading lead_;
  int head_ = 0, batch_ = 0, token_ = 0;
  bool has_weight_ = false;
};

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Results rotary(Tensor x_in, OptionalTensor key_in, Tensor cos, Tensor sin, OptionalTensor positions,
               OptionalTensor weight, OptionalTensor key_weight, int64_t rotary_dim,
               bool interleaved, bool proportional, std::optional<double> eps, bool plus_one,
               Text rounded, std::optional<int64_t> heads) {
  const Settings by{rotary_dim, interleaved, proportional, eps, plus_one, rounded, heads};
  const Tensor x = with_adjacent_columns(x_in);
  const OptionalTensor key = key_in ? OptionalTensor(with_adjacent_columns(*key_in)) : std::nullopt;
  Call call(x, key, cos, sin, positions, by);
  call.args.param_dtype = call.args.dtype;
  STD_TORCH_CHECK(key || !key_weight, "a weight is given without its key");
  call.check_weight(weight, x);
  if (key) call.check_like_input(*key, x), call.check_weight(key_weight, *key);

  std::vector<Tensor> results, statistics, kept;
  int64_t elements = 0;
  for (int n = 0; n < call.args.count; ++n) {
    const Tensor& t = n ? *key : x;
    RotaryStream& s = call.args.streams[n];
    results.push_back(empty_with_layout(n ? *key_in : x_in));
    s.x = data(t);
    s.result = results.back().mutable_data_ptr();
    s.heads = call.heads_of(t);
    call.take_strides(t, s.x_stride);
    call.take_strides(results.back(), s.result_stride);
    statistics.push_back(call.args.norm ? call.statistics(t) : nothing(t));
    if (call.args.norm) {
      s.rstd = statistics.back().mutable_data_ptr();
      call.take_statistics_strides(statistics.back(), s.rstd_stride);
    }
    kept.push_back(make_contiguous((n ? key_weight : weight).value_or(x)));
    if (n ? key_weight : weight) s.weight = data(kept.back());
    elements += s.heads * call.args.width;
  }
  const int64_t tokens = call.empty_rows() ? 0 : call.args.batch * call.args.tokens;
  launch(rotary_forward, call.args, x, tokens, elements);
  if (!key) results.push_back(nothing(x)), statistics.push_back(nothing(x));
  return {results[0], results[1], statistics[0], statistics[1]};
}

Results rotary_gradients(Tensor grad_y, Tensor grad_key_y, OptionalTensor x_in,
                         OptionalTensor key_in, Tensor cos, Tensor sin, OptionalTensor positions,
                         OptionalTensor weight, OptionalTensor key_weight, int64_t rotary_dim,
                         bool interleaved, bool proportional, std::optional<double> eps,
                         bool plus_one, Text rounded, std::optional<int64_t> heads,
                         OptionalTensor rstd_in, OptionalTensor key_rstd_in, bool need_weight,
                         bool need_key_weight) {
  const Settings by{rotary_dim, interleaved, proportional, eps, plus_one, rounded, heads};
  const bool has_key = grad_key_y.dim() == grad_y.dim() && (grad_y.dim() > 1 || grad_key_y.numel());
  const Tensor grad = with_adjacent_columns(grad_y);
  const OptionalTensor key_grad =
      has_key ? OptionalTensor(with_adjacent_columns(grad_key_y)) : std::nullopt;
  Call call(grad, key_grad, cos, sin, positions, by);
  Rotary& args = call.args;
  args.param_dtype = args.dtype;
  call.check_weight(weight, grad);
  if (has_key) call.check_like_input(*key_grad, grad), call.check_weight(key_weight, *key_grad);
  const int64_t tokens = call.empty_rows() ? 0 : args.batch * args.tokens;
  args.chunks = args.norm ? rotary_chunks(tokens) : tokens;

  std::vector<Tensor> results, parameters, kept;
  int64_t elements = 0, columns = 0, wanted = 0;
  for (int n = 0; n < args.count; ++n) {
    const Tensor& g = n ? *key_grad : grad;
    const OptionalTensor& x = n ? key_in : x_in;
    const OptionalTensor& w = n ? key_weight : weight;
    RotaryStream& s = args.streams[n];
    results.push_back(empty_with_layout(args.norm && x ? *x : n ? grad_key_y : grad_y));
    parameters.push_back(nothing(grad));
    s.grad = data(g);
    s.result = results.back().mutable_data_ptr();
    s.heads = call.heads_of(g);
    call.take_strides(g, s.grad_stride);
    call.take_strides(results.back(), s.result_stride);
    elements += s.heads * args.width;
    columns += (args.across ? s.heads : 1) * args.width;
    if (!args.norm) continue;
    STD_TORCH_CHECK(x && same_sizes(x->sizes(), g.sizes()) && x->scalar_type() == g.scalar_type() &&
                        same_device(*x, g),
                    "what was saved differs from the gradient");
    kept.push_back(with_adjacent_columns(*x));
    s.x = data(kept.back());
    call.take_strides(kept.back(), s.x_stride);
    const OptionalTensor& rstd = n ? key_rstd_in : rstd_in;
    STD_TORCH_CHECK(rstd, "a saved statistic is missing");
    kept.push_back(make_contiguous(*rstd));
    STD_TORCH_CHECK(same_sizes(kept.back().sizes(), call.statistics(g).sizes()) &&
                        kept.back().scalar_type() == accumulate_type(args.dtype),
                    "a saved statistic does not fit the gradient");
    s.rstd = const_cast<void*>(data(kept.back()));
    call.take_statistics_strides(kept.back(), s.rstd_stride);
    if (!w) continue;
    kept.push_back(make_contiguous(*w));
    s.weight = data(kept.back());
    if (!(n ? need_key_weight : need_weight)) continue;
    parameters.back() = empty(*w, w->sizes(), w->scalar_type());
    s.grad_weight = parameters.back().mutable_data_ptr();
    const int64_t sizes[] = {args.chunks, w->sizes()[0]};
    kept.push_back(empty(*w, Sizes(sizes, 2), accumulate_type(args.dtype)));
    s.partials = kept.back().mutable_data_ptr();
    ++wanted;
  }
  // With parameter gradients an empty chunk still has sums: zeros.
  const int64_t items = tokens || wanted ? args.chunks : 0;
  launch(rotary_backward, args, grad, items, elements * (tokens / (items + !items) + 1));
  if (wanted) launch(rotary_parameter_gradients, args, grad, columns, args.chunks);
  if (!has_key) results.push_back(nothing(grad)), parameters.push_back(nothing(grad));
  return {results[0], results[1], parameters[0], parameters[1]};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("rotary_embedding"), TW_BOX(&rotary));
  m.impl(TW_OVERLOAD("rotary_embedding_backward"), TW_BOX(&rotary_gradients));
}

}  // namespace torchweld
