// A whole loss of logits for rows with one class; ops/loss/ways/fused.py has the schemas.
//
// The row kernels read what torch's ops would prepare: targets in which -1 is ignored, inverse
// temperatures, and the gradient's coefficients. Here a loop over the rows does, and adds up losses.
#include <cmath>
#include <cstring>

#include "bind/loss_rows.h"
#include "bind/old_math.h"

namespace torchweld {
namespace {

// Rows that are worth another thread.
constexpr int64_t kRowsPerTask = 4096;

// The arguments of both passes.
struct Terms {
  Tensor target;
  OptionalTensor weight, sum_of_weights, temperature, token_weights;
  double scale, softcap, smoothing, z_loss;
  int64_t ignored;
};

// What the kernels read of the terms, in the type of the sums.
template <class A>
struct Prepared {
  const Terms& terms;
  int64_t rows, width;
  Tensor marked;
  OptionalTensor weight, inverse, tokens;
  double whole;
  const int64_t* classes;  // of the rows

  Prepared(const Tensor& logits, const Terms& given) : terms(given) {
    STD_TORCH_CHECK(logits.sizes().size() == 2, "logits are not [rows, width]");
    rows = logits.sizes()[0];
    width = logits.sizes()[1];
    const ScalarType kind = accumulate_type(dtype_of(logits));
    const Tensor target = make_contiguous(as_type(terms.target, ScalarType::Long));
    const int64_t column[] = {rows, 1}, line[] = {rows};
    STD_TORCH_CHECK(same_sizes(target.sizes(), Sizes(line, 1)) && same_device(target, logits),
                    "target is not [rows] on the logits' device");
    marked = torch::stable::new_empty(target, Sizes(column, 2));
    const auto* from = (const int64_t*)data(target);
    auto* to = (int64_t*)marked.mutable_data_ptr();
    classes = to;
    for (int64_t row = 0; row < rows; ++row) {
      const bool counts = from[row] != terms.ignored;
      STD_TORCH_CHECK(!counts || (from[row] >= 0 && from[row] < width), "target ", row,
                      " is no class");
      to[row] = counts ? from[row] : -1;
    }
    weight = as_sums(terms.weight, kind, width, "weight");
    tokens = as_sums(terms.token_weights, kind, rows, "token_weights");
    inverse = as_sums(terms.temperature, kind, rows, "temperature");
    if (inverse) {
      const Tensor own = empty(logits, Sizes(line, 1), kind);
      for (int64_t row = 0; row < rows; ++row)
        ((A*)own.mutable_data_ptr())[row] = 1 / ((const A*)data(inverse))[row];
      inverse = own;
    }
    class_weights_ = (const A*)data(weight);
    token_weights_ = (const A*)data(tokens);
    whole = width;
    if (terms.sum_of_weights) {
      const Tensor sum = *as_sums(terms.sum_of_weights, kind, 1, "sum_of_weights");
      whole = *(const A*)data(sum);
    }
  }

  static OptionalTensor as_sums(const OptionalTensor& t, ScalarType kind, int64_t count,
                                const char* name) {
    if (!t) return t;
    STD_TORCH_CHECK(t->numel() == count, name, " does not fit the logits");
    return make_contiguous(as_type(*t, kind));
  }

  A weight_of(int64_t row) const { return token_weights_ ? token_weights_[row] : 1; }
  A class_weight(int64_t at) const { return class_weights_ ? class_weights_[at] : 1; }

 private:
  const A *class_weights_, *token_weights_;
};

template <class Call>
auto with_sums(const Tensor& logits, Call&& call) {
  return dtype_of(logits) == DType::f64 ? call(double{}) : call(float{});
}

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// The loss, the divisor of a mean, and the rows' statistics.
ThreeTensors forward(Tensor logits, Tensor target, OptionalTensor weight, OptionalTensor whole,
                     OptionalTensor temperature, OptionalTensor token_weights, double scale,
                     double softcap, double smoothing, double z_loss, int64_t ignored,
                     Text reduction, ScalarType dtype) {
  const Terms terms{target, weight,  whole,     temperature, token_weights,
                    scale,  softcap, smoothing, z_loss,      ignored};
  return with_sums(logits, [&](auto zero) {
    using A = decltype(zero);
    const Prepared<A> own(logits, terms);
    Rows rows(logits, own.marked, own.weight, std::nullopt, own.inverse, scale, softcap);
    Results results(rows, false, smoothing != 0, false);
    launch(loss_rows, rows.args, rows.logits, own.rows, own.width);

    const auto* picked = (const A*)data(results.picked);
    const auto* statistics = (const A*)data(results.statistics);
    const ScalarType kind = accumulate_type(rows.args.dtype);
    const int64_t line[] = {own.rows}, one[] = {1};
    const Tensor losses = empty(logits, Sizes(line, 1), kind);
    auto* loss = (A*)losses.mutable_data_ptr();
    torch::stable::parallel_for(0, own.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = own.classes[row];
        loss[row] = 0;
        if (at < 0) continue;
        const A* of = statistics + row * kLossStatistics;
        const A log_sum = std::log(of[kSum]), lse = of[kHighest] + log_sum,
                each = own.weight_of(row);
        const A log_p = (picked[row] - of[kHighest]) - log_sum;
        loss[row] = -log_p * ((A)(1 - smoothing) * each * own.class_weight(at));
        if (smoothing != 0)
          loss[row] += (lse * (A)own.whole - of[kSmooth]) * (each * (A)(smoothing / own.width));
        if (z_loss != 0) loss[row] += lse * lse * (each * (A)z_loss);
      }
    });
    if (reduction == "none")
      return ThreeTensors{as_type(losses, dtype), nothing(losses), results.statistics};
    double total = 0, divisor = 0;
    for (int64_t row = 0; row < own.rows; ++row) {
      const int64_t at = own.classes[row];
      if (at >= 0) divisor += own.weight_of(row) * own.class_weight(at);
      total += loss[row];
    }
    const bool averages = reduction == "mean";
    Tensor made = empty(logits, Sizes(one, (size_t)0), kind);
    const Tensor count = averages ? empty(logits, Sizes(one, 1), kind) : nothing(losses);
    if (averages) *(A*)count.mutable_data_ptr() = (A)divisor;
    *(A*)made.mutable_data_ptr() = (A)(averages ? total / (A)divisor : total);
    return ThreeTensors{as_type(made, dtype), count, results.statistics};
  });
}

// The gradient of the logits; and x, rows of a layer's input, with zeros in ignored rows.
std::tuple<Tensor, Tensor> backward(Tensor grad_in, Tensor logits, Tensor target, Tensor statistics,
                                    Tensor count, OptionalTensor weight, OptionalTensor whole,
                                    OptionalTensor temperature, OptionalTensor token_weights,
                                    double scale, double softcap, double smoothing, double z_loss,
                                    int64_t ignored, OptionalTensor x) {
  const Terms terms{target, weight,  whole,     temperature, token_weights,
                    scale,  softcap, smoothing, z_loss,      ignored};
  return with_sums(logits, [&](auto zero) {
    using A = decltype(zero);
    const Prepared<A> own(logits, terms);
    Rows rows(logits, own.marked, own.weight, std::nullopt, own.inverse, scale, softcap);
    rows.args.statistics = const_cast<void*>(
        data(*rows.beside(statistics, {own.rows, kLossStatistics}, "statistics")));
    const ScalarType kind = accumulate_type(rows.args.dtype);
    const Tensor grads = make_contiguous(as_type(grad_in, kind));
    const bool is_one = grad_in.sizes().size() == 0;
    STD_TORCH_CHECK(is_one || grads.numel() == own.rows, "the gradient does not fit the rows");
    const auto* grad = (const A*)data(grads);
    const A divisor = count.numel() ? *(const A*)data(count) : 1;
    const Tensor coefficients = rows.make(kLossCoefficients), picked = rows.make(1);
    auto* of = (A*)coefficients.mutable_data_ptr();
    for (int64_t row = 0; row < own.rows; ++row, of += kLossCoefficients) {
      const int64_t at = own.classes[row];
      const A flowing = at < 0 ? 0 : grad[is_one ? 0 : row] / divisor * own.weight_of(row);
      const A of_target = at < 0 ? 0 : flowing * (A)(1 - smoothing) * own.class_weight(at);
      const A of_smooth = flowing * (A)(smoothing / own.width);
      of[kOnP] = of_target + (smoothing != 0 ? of_smooth * (A)own.whole : 0);
      of[kOnLse] = 2 * flowing * (A)z_loss;
      of[kOnEntropy] = of[kOnDot] = 0;
      of[kOnSmooth] = -of_smooth;
      ((A*)picked.mutable_data_ptr())[row] = -of_target;
    }
    Tensor made = empty(rows.logits, rows.logits.sizes(), rows.logits.scalar_type());
    launch_gradient(rows, coefficients, picked, made, false);
    if (!x) return std::tuple<Tensor, Tensor>{made, nothing(logits)};
    Tensor kept = make_contiguous(*x);
    bool is_copy = !x->is_contiguous();
    const int64_t bytes = kept.numel() / std::max<int64_t>(own.rows, 1) * kept.element_size();
    for (int64_t row = 0; row < own.rows; ++row) {
      if (own.classes[row] >= 0) continue;
      if (!is_copy) kept = copy_by([](const Tensor& t) { return torch::stable::clone(t); }, kept);
      is_copy = true;
      std::memset((char*)kept.mutable_data_ptr() + row * bytes, 0, bytes);
    }
    return std::tuple<Tensor, Tensor>{made, kept};
  });
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("loss_of_logits"), TW_BOX(&forward));
  m.impl(TW_OVERLOAD("loss_of_logits_backward"), TW_BOX(&backward));
}

}  // namespace torchweld
