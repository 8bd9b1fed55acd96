// Optimizer steps for torch; the schemas are in python/torchweld/ops/optimizer.py.
#include "core/optim.h"

#include "bind/launch.h"
#include "bind/quant8.h"
#include "core/adam.h"
#include "core/lion.h"
#include "core/sgd.h"

TW_KERNEL(adam_step, Step<torchweld::Adam<false>>);
TW_KERNEL(amsgrad_step, Step<torchweld::Adam<true>>);
TW_KERNEL(sgd_step, Step<torchweld::Sgd<false>>);
TW_KERNEL(momentum_step, Step<torchweld::Sgd<true>>);
TW_KERNEL(lion_step, Step<torchweld::Lion>);
TW_KERNEL(grad_squares, GradSquares);

// Its newer version, of glibc 2.29, differs in how it sets errno alone.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif

namespace torchweld {
namespace {

using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

// A number that is kept as a tensor, since it changes every step.
double number(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "a scalar is not one number on the CPU");
  return dtype_of(t) == DType::f64 ? *(const double*)data(t) : (double)*(const float*)data(t);
}
void check_number(const Tensor& t) {
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1 && (dtype == DType::f32 || dtype == DType::f64),
                  "a scalar is not one float32 or float64 number on the CPU");
}

// The step that is taken now, counted in the tensor.
double advance(const Tensor& step) {
  double count;
  if (dtype_of(step) == DType::f64) {
    count = ++*(double*)step.mutable_data_ptr();
  } else {
    count = ++*(float*)step.mutable_data_ptr();
  }
  return count;
}

// What all rules have in common: the tensors' addresses, once they are known to fit.
class Work {
 public:
  Work(const Tensors& params, const Tensors& grads, const Tensors& completions,
       const Tensors& moments, const Tensors& absmaxes, size_t moments_each)
      : count_(params.size()) {
    check_count(grads, count_);
    check_count(completions, completions.empty() ? 0 : count_);
    check_count(moments, moments_each * count_);
    check_count(absmaxes, absmaxes.empty() ? 0 : moments.size());
    tensors_.resize(count_ + 1);
    dtype_ = dtype_of(params[0]);
    STD_TORCH_CHECK(dtype_ != DType::f64, "float64 has no kernel");
    state_ = state_codec(moments, absmaxes);
    param_ = param_codec(completions);
    int64_t blocks = 0;
    for (size_t i = 0; i < count_; ++i) {
      const Tensor& p = params[i];
      check_like(p, p, params[0].scalar_type());
      check_like(grads[i], p, params[0].scalar_type());
      const BlockRows rows(p.sizes());
      StepTensor& t = tensors_[i];
      t.param = p.mutable_data_ptr();
      t.grad = data(grads[i]);
      if (!completions.empty()) {
        check_like(completions[i], p, completions[0].scalar_type());
        t.completion = completions[i].mutable_data_ptr();
      }
      t.width = state_ == StateCodec::blocks ? rows.width : p.numel();
      t.first_block = blocks;
      for (size_t k = 0; k < moments_each; ++k) {
        const Tensor& moment = moments[k * count_ + i];
        check_like(moment, p, moments[0].scalar_type());
        t.moment[k] = moment.mutable_data_ptr();
        if (absmaxes.empty()) continue;
        const Tensor& absmax = absmaxes[k * count_ + i];
        STD_TORCH_CHECK(rows.fits(absmax.sizes()) && absmax.is_contiguous() &&
                            same_device(absmax, p) && absmax.scalar_type() == ScalarType::Float,
                        "absmax does not fit its codes");
        t.absmax[k] = (float*)absmax.mutable_data_ptr();
      }
      blocks += state_ == StateCodec::blocks ? rows.blocks() : quant_blocks(t.width);
    }
    tensors_[count_].first_block = blocks;
  }

  // One step of all, each by the rule that rule_at(its number of steps) makes for it.
  template <class Kernel, class RuleAt>
  void run(const Kernel& kernel, const Tensors& steps, const OptionalTensor& grad_factor,
           const Tensor& like, RuleAt&& rule_at) const {
    using Rule = decltype(rule_at(1.0));
    std::vector<Rule> rules;
    for (const Tensor& step : steps) rules.push_back(rule_at(advance(step)));
    const float factor = grad_factor ? (float)number(*grad_factor) : 1.0f;
    const Step<Rule> args{tensors_.data(), rules.data(), (int64_t)count_, factor,
                          dtype_,          state_,       param_};
    launch(kernel, args, like, tensors_[count_].first_block, kQuantBlock);
  }

 private:
  static void check_count(const Tensors& list, size_t count) {
    STD_TORCH_CHECK(list.size() == count, "lists of tensors differ in length");
  }
  static void check_like(const Tensor& t, const Tensor& param, ScalarType dtype) {
    STD_TORCH_CHECK(same_sizes(t.sizes(), param.sizes()) && same_device(t, param) &&
                        t.is_contiguous() && t.scalar_type() == dtype,
                    "a tensor does not fit its parameter, or is not contiguous");
  }
  static StateCodec state_codec(const Tensors& moments, const Tensors& absmaxes) {
    if (moments.empty()) return StateCodec::f32;
    const ScalarType dtype = moments[0].scalar_type();
    STD_TORCH_CHECK((dtype == ScalarType::Byte) == !absmaxes.empty(), "codes come with absmax");
    if (dtype == ScalarType::Byte) return StateCodec::blocks;
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                    "moments are not float32, bfloat16 or codes");
    return dtype == ScalarType::Float ? StateCodec::f32 : StateCodec::bf16;
  }
  ParamCodec param_codec(const Tensors& completions) const {
    if (completions.empty()) return ParamCodec::plain;
    const ScalarType dtype = completions[0].scalar_type();
    if (dtype == ScalarType::Short) {
      STD_TORCH_CHECK(dtype_ == DType::bf16, "only bfloat16 has a remainder");
      return ParamCodec::remainder;
    }
    STD_TORCH_CHECK(dtype == ScalarType::Float && dtype_ != DType::f32,
                    "masters are float32, of 16-bit parameters");
    return ParamCodec::master;
  }

  size_t count_;
  std::vector<StepTensor> tensors_;
  DType dtype_;
  StateCodec state_;
  ParamCodec param_;
};

// Whether there is a step to take: not from infinite gradients.
bool wanted(const Tensors& params, const Tensors& steps, const Tensor& lr,
            const OptionalTensor& grad_factor, const OptionalTensor& found_inf) {
  STD_TORCH_CHECK(steps.size() == params.size(), "lists of tensors differ in length");
  check_number(lr);
  for (const Tensor& step : steps) check_number(step);
  if (grad_factor) check_number(*grad_factor);
  if (found_inf) check_number(*found_inf);
  return !(found_inf && number(*found_inf) != 0);
}

void step_adam(Tensors params, Tensors grads, Tensors completions, Tensors moments,
               Tensors absmaxes, Tensors steps, Tensor lr, double beta1, double beta2, double eps,
               double weight_decay, bool decoupled, OptionalTensor grad_factor,
               OptionalTensor found_inf) {
  if (params.empty()) return;
  const bool amsgrad = moments.size() == 3 * params.size();
  const Work work(params, grads, completions, moments, absmaxes, amsgrad ? 3 : 2);
  if (!wanted(params, steps, lr, grad_factor, found_inf)) return;
  const AdamSettings settings{number(lr), beta1, beta2, eps, weight_decay, decoupled};
  const auto beta2_root = [&](double t) { return std::sqrt(1 - std::pow(beta2, t)); };
  if (amsgrad) {
    work.run(amsgrad_step, steps, grad_factor, params[0],
             [&](double t) { return Adam<true>(settings, std::pow(beta1, t), beta2_root(t)); });
  } else {
    work.run(adam_step, steps, grad_factor, params[0],
             [&](double t) { return Adam<false>(settings, std::pow(beta1, t), beta2_root(t)); });
  }
}

void step_sgd(Tensors params, Tensors grads, Tensors completions, Tensors moments, Tensors absmaxes,
              Tensors steps, Tensor lr, double momentum, double dampening, double weight_decay,
              bool nesterov, OptionalTensor grad_factor, OptionalTensor found_inf) {
  if (params.empty()) return;
  const Work work(params, grads, completions, moments, absmaxes, moments.empty() ? 0 : 1);
  if (!wanted(params, steps, lr, grad_factor, found_inf)) return;
  const SgdSettings settings{number(lr), momentum, dampening, weight_decay, nesterov};
  if (moments.empty()) {
    work.run(sgd_step, steps, grad_factor, params[0],
             [&](double t) { return Sgd<false>(settings, t); });
  } else {
    work.run(momentum_step, steps, grad_factor, params[0],
             [&](double t) { return Sgd<true>(settings, t); });
  }
}

void step_lion(Tensors params, Tensors grads, Tensors completions, Tensors moments,
               Tensors absmaxes, Tensors steps, Tensor lr, double beta1, double beta2,
               double weight_decay, OptionalTensor grad_factor, OptionalTensor found_inf) {
  if (params.empty()) return;
  const Work work(params, grads, completions, moments, absmaxes, 1);
  if (!wanted(params, steps, lr, grad_factor, found_inf)) return;
  const LionSettings settings{number(lr), beta1, beta2, weight_decay};
  work.run(lion_step, steps, grad_factor, params[0], [&](double) { return Lion(settings); });
}

// The sum of the squares of all elements, in float64.
Tensor sum_of_squares(Tensors grads) {
  STD_TORCH_CHECK(!grads.empty(), "there is no gradient");
  std::vector<StepTensor> tensors(grads.size() + 1);
  int64_t blocks = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor& g = grads[i];
    STD_TORCH_CHECK(
        g.is_contiguous() && g.scalar_type() == grads[0].scalar_type() && same_device(g, grads[0]),
        "gradients differ in dtype or device, or are not contiguous");
    tensors[i].grad = data(g);
    tensors[i].width = g.numel();
    tensors[i].first_block = blocks;
    blocks += quant_blocks(g.numel());
  }
  tensors.back().first_block = blocks;
  const DType dtype = dtype_of(grads[0]);
  STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel");
  const int64_t pieces[] = {(blocks + kSquarePiece - 1) / kSquarePiece};
  Tensor sums = empty(grads[0], Sizes(pieces, 1), ScalarType::Double);
  const GradSquares args{tensors.data(), (int64_t)grads.size(), (double*)sums.mutable_data_ptr(),
                         dtype};
  launch(grad_squares, args, grads[0], pieces[0], kSquarePiece * kQuantBlock);
  Tensor result = empty(grads[0], Sizes(pieces, size_t{0}), ScalarType::Double);
  double total = 0;
  for (int64_t i = 0; i < pieces[0]; ++i) total += args.sums[i];
  *(double*)result.mutable_data_ptr() = total;
  return result;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("adam"), TORCH_BOX(&step_adam));
  m.impl(TW_OVERLOAD("sgd"), TORCH_BOX(&step_sgd));
  m.impl(TW_OVERLOAD("lion"), TORCH_BOX(&step_lion));
  m.impl(TW_OVERLOAD("sum_of_squares"), TORCH_BOX(&sum_of_squares));
}

}  // namespace torchweld
