// Optimizer steps for torch; python/torchweld/ops/_optimizer.py has what their schemas share.
#include "bind/optim.h"

#include <algorithm>
#include <initializer_list>

#include "bind/quant8.h"
#include "core/adam.h"
#include "core/lamb.h"
#include "core/lion.h"
#include "core/sgd.h"

TW_KERNEL(adam_step, Step<torchweld::Adam<false>>);
TW_KERNEL(amsgrad_step, Step<torchweld::Adam<true>>);
TW_KERNEL(sgd_step, Step<torchweld::Sgd<false>>);
TW_KERNEL(momentum_step, Step<torchweld::Sgd<true>>);
TW_KERNEL(gradient_measure, Step<torchweld::Gradient>);
TW_KERNEL(lion_step, Step<torchweld::Lion>);
TW_KERNEL(lamb_step, Step<torchweld::Lamb>);
TW_KERNEL(lamb_measure, Step<torchweld::Lamb>);
TW_KERNEL(grad_squares, GradSquares);

namespace torchweld {
namespace {

// Those of all tensors, known to fit.
struct Scalars {
  Rates lr;
  Number grad_factor, found_inf;
  const double* ratios;
};

#if defined(TW_CUDA)
// At most, of all tensors, each in its own; narrow rows make fewer.
int64_t square_pieces(const std::vector<StepTensor>& tensors) {
  int64_t pieces = 0;
  for (size_t i = 0; i + 1 < tensors.size(); ++i) {
    const int64_t blocks = tensors[i + 1].first_block - tensors[i].first_block;
    pieces += (blocks + kSquarePiece - 1) / kSquarePiece;
  }
  return pieces;
}
#endif

// What a step writes is let go of before the work: whoever sees what is written has the tensors too,
// and after a step, when thousands of handles are no longer in the cache, it takes longer.
void let_go(std::initializer_list<Tensors*> lists) {
  for (Tensors* list : lists) list->clear();
}

// What all rules have in common: the tensors' addresses, once they are known to fit.
class Work {
 public:
  Work(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
       const Tensors& absmaxes, const Tensors& steps, const Tensors& edges, const Tensors& places,
       size_t moments_each)
      : like_(params[0]),
        count_(params.size()),
        fit_(params, completions),
        roundings_(roundings_of(params, places)) {
    check_count(grads, count_);
    check_count(completions, completions.empty() ? 0 : count_);
    check_count(moments, moments_each * count_);
    check_count(absmaxes, absmaxes.empty() ? 0 : moments.size());
    check_count(steps, count_);
    tensors_.resize(count_ + 1);
    steps_.reserve(count_);
    dtype_ = dtype_of(params[0]);
    STD_TORCH_CHECK(dtype_ != DType::f64, "float64 has no kernel");
    state_ = state_codec(moments, absmaxes);
    param_ = param_codec(completions, places, dtype_);
    set_cuts(edges);
    const ScalarType moment_dtype = (moments_each ? moments : params)[0].scalar_type();
    // Blocks and places are of rows.
    const bool in_any_order = state_ != StateCodec::blocks && places.empty();
    int64_t blocks = 0;
    for (size_t i = 0; i < count_; ++i) {
      packing_.pack(params, grads, completions, moments, i, in_any_order);
      const Tensor& p = params[i];
      const Sizes sizes = p.sizes();
      const int64_t elements = p.numel();
      const BlockRows rows(sizes);
      steps_.push_back(counter(steps[i], fit_.device));
      StepTensor& t = tensors_[i];
      fit_.set_param(t, params, grads, completions, i);
      t.width = state_ == StateCodec::blocks ? rows.width : elements;
      t.first_block = blocks;
      if (!cuts_.empty()) {
        cuts_[i].all_pieces = rows.rows * cuts_[i].pieces;
        check_cut(edges[i], rows);
      }
      for (size_t k = 0; k < moments_each; ++k) {
        const Tensor& moment = moments[k * count_ + i];
        fit_.check(moment, sizes, moment_dtype);
        t.moment[k] = moment.mutable_data_ptr();
        if (absmaxes.empty()) continue;
        const Tensor& absmax = absmaxes[k * count_ + i];
        const bool fits = cuts_.empty() ? rows.fits(absmax.sizes())
                                        : rows.fits_cut(absmax.sizes(), cuts_[i].pieces);
        STD_TORCH_CHECK(fits && absmax.is_contiguous() && device_of(absmax) == fit_.device &&
                            absmax.scalar_type() == ScalarType::Float,
                        "absmax does not fit its codes");
        t.absmax[k] = (float*)absmax.mutable_data_ptr();
      }
      const int64_t own = !cuts_.empty()                 ? cuts_[i].all_pieces
                          : state_ == StateCodec::blocks ? rows.blocks()
                                                         : quant_blocks(t.width);
      // To begin and to end a block is work too, which shows in rows of few elements.
      constexpr int64_t kElementsOfBegin = 8;
      amounts_.add(own, elements + kElementsOfBegin * own);
      blocks += own;
    }
    tensors_[count_].first_block = blocks;
    if (!roundings_.empty()) set_roundings();
  }

  Scalars scalars(const OptionalTensor& lr, const OptionalTensor& ratios,
                  const OptionalTensor& grad_factor, const OptionalTensor& found_inf) const {
    STD_TORCH_CHECK(!ratios || (device_of(*ratios) == fit_.device && ratios->is_contiguous() &&
                                ratios->scalar_type() == ScalarType::Double &&
                                ratios->numel() == (int64_t)count_),
                    "ratios are not a float64 number for each parameter");
    return {lr ? Rates(*lr, count_, fit_.device) : Rates(), number_or(grad_factor, 1, fit_.device),
            number_or(found_inf, 0, fit_.device), (const double*)data(ratios)};
  }

  // One step of all: by a rule of these settings, and of each tensor's own scalars.
  template <class Rule, class Kernel>
  void step(const Kernel& kernel, const typename Rule::Settings& settings, const Scalars& scalars,
            bool only_absmaxes) {
    STD_TORCH_CHECK(!only_absmaxes || !cuts_.empty(), "absmaxes are found of cut rows alone");
    Step<Rule> args = arguments<Rule>(settings, scalars);
    args.only_absmaxes = only_absmaxes;
    run(kernel, args);
    packing_.write_back();
  }

  // [parameters, 2], float64: the sums of the squares of each one's elements, and of its step's.
  template <class Rule, class Kernel>
  Tensor measure(const Kernel& kernel, const typename Rule::Settings& settings,
                 const Scalars& scalars) {
    const int64_t sizes[] = {(int64_t)count_, 2}, of_parts[] = {parts(), 2};
    Tensor result = empty(like_, Sizes(sizes, 2), ScalarType::Double);
    const Tensor squares = empty(like_, Sizes(of_parts, 2), ScalarType::Double);
    Step<Rule> args = arguments<Rule>(settings, scalars);
    args.sums = (double (*)[2])result.mutable_data_ptr();
    args.squares = (double (*)[2])squares.mutable_data_ptr();
    run(kernel, args);
    return result;
  }

 private:
  template <class Rule>
  Step<Rule> arguments(const typename Rule::Settings& settings, const Scalars& scalars) const {
    return {tensors_.data(),
            nullptr,
            (int64_t)count_,
            settings,
            scalars.lr.of_all(),
            scalars.lr.each(),
            steps_.data(),
            scalars.ratios,
            scalars.grad_factor,
            scalars.found_inf,
            nullptr,
            nullptr,
            dtype_,
            state_,
            param_,
            cuts_.empty() ? nullptr : cuts_.data(),
            false,
            roundings_.empty() ? nullptr : roundings_.data()};
  }

#if defined(TW_CUDA)
  // The launcher makes the rules, counts the steps up, and adds up what is measured.
  int64_t parts() const { return square_pieces(tensors_); }
  template <class Rule, class Kernel>
  void run(const Kernel& kernel, Step<Rule>& args) {
    const int64_t bytes[] = {(int64_t)(count_ * sizeof(Rule))};
    const Tensor rules = empty(like_, Sizes(bytes, 1), ScalarType::Byte);
    args.rules = (Rule*)rules.mutable_data_ptr();
    launch(kernel, args, like_, args.count, 0);
  }
  void set_roundings() {
    const int64_t bytes[] = {(int64_t)(count_ * sizeof(Rounding))};
    room_ = empty(like_, Sizes(bytes, 1), ScalarType::Byte);
    for (size_t i = 0; i < count_; ++i) {
      tensors_[i].completion = (Rounding*)room_->mutable_data_ptr() + i;
    }
  }
#else
  int64_t parts() const { return tensors_[count_].first_block; }
  template <class Rule, class Kernel>
  void run(const Kernel& kernel, Step<Rule>& args) {
    if (args.found_inf.read() != 0) return;
    std::vector<Rule> rules;
    rules.reserve(count_);
    StepScalars before{};
    for (size_t i = 0; i < count_; ++i) {
      const StepScalars now{args.lrs ? args.lrs[i] : args.lr.read(), args.steps[i].read() + 1,
                            args.ratios ? args.ratios[i] : 1};
      // Mostly the same: two powers of a thousand tensors take a tenth of a millisecond.
      const bool alike =
          now.lr == before.lr && now.number == before.number && now.ratio == before.ratio;
      if (i > 0 && alike) {
        rules.push_back(rules.back());
      } else {
        rules.emplace_back(args.settings, now);
      }
      before = now;
      if (!roundings_.empty()) roundings_[i].step = (uint32_t)now.number;
    }
    args.rules = rules.data();
    launch(kernel, args, like_, amounts_);
    if (args.sums) return add_up(args.sums, args.squares);
    if (args.only_absmaxes) return;
    for (size_t i = 0; i < count_; ++i) args.steps[i].write(args.steps[i].read() + 1);
  }
  void add_up(double (*sums)[2], const double (*squares)[2]) const {
    for (size_t i = 0; i < count_; ++i) {
      sums[i][0] = sums[i][1] = 0;
      for (int64_t at = tensors_[i].first_block; at < tensors_[i + 1].first_block; ++at) {
        for (int k = 0; k < 2; ++k) sums[i][k] += squares[at][k];
      }
    }
  }
  void set_roundings() {
    for (size_t i = 0; i < count_; ++i) tensors_[i].completion = &roundings_[i];
  }
#endif
  // Of each tensor, where there are any.
  void set_cuts(const Tensors& edges) {
    if (edges.empty()) return;
    check_count(edges, count_);
    STD_TORCH_CHECK(state_ == StateCodec::blocks, "only codes have edges");
    for (const Tensor& of_row : edges) {
      STD_TORCH_CHECK(device_of(of_row) == fit_.device &&
                          of_row.scalar_type() == ScalarType::Long && of_row.is_contiguous() &&
                          of_row.dim() == 1 && of_row.numel() > 0,
                      "edges are not int64 numbers beside the parameters");
      cuts_.push_back({(const int64_t*)data(of_row), of_row.numel() - 1, 0});
    }
  }
  // On a GPU they are taken as they come: to look at them would be to wait for them.
  static void check_cut([[maybe_unused]] const Tensor& edges,
                        [[maybe_unused]] const BlockRows& rows) {
#if !defined(TW_CUDA)
    const auto* edge = (const int64_t*)data(edges);
    bool fits = edge[0] == 0 && edge[edges.numel() - 1] == rows.width;
    for (int64_t i = 1; i < edges.numel(); ++i) {
      fits &= edge[i - 1] < edge[i] && edge[i] <= edge[i - 1] + kQuantBlock;
    }
    STD_TORCH_CHECK(fits, "edges do not divide a row into pieces of blocks");
#endif
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

  Tensor like_;
  size_t count_;
  Fit fit_;
  Packing packing_;
  std::vector<StepTensor> tensors_;
  std::vector<Number> steps_;
  Amounts amounts_;  // of blocks
  std::vector<CutRows> cuts_;
  std::vector<Rounding> roundings_;
  OptionalTensor room_;  // for them on a GPU
  DType dtype_;
  StateCodec state_;
  ParamCodec param_;
};

void step_adam(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
               Tensors& absmaxes, Tensors& steps, const Tensors& edges, const Tensors& places,
               Tensor lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled, OptionalTensor grad_factor, OptionalTensor found_inf,
               bool only_absmaxes) {
  if (params.empty()) return;
  const bool amsgrad = moments.size() == 3 * params.size();
  Work work(params, grads, completions, moments, absmaxes, steps, edges, places, amsgrad ? 3 : 2);
  let_go({&params, &completions, &moments, &absmaxes, &steps});
  const Scalars scalars = work.scalars(lr, {}, grad_factor, found_inf);
  const AdamSettings settings{beta1, beta2, eps, weight_decay, decoupled};
  if (amsgrad) {
    work.step<Adam<true>>(amsgrad_step, settings, scalars, only_absmaxes);
  } else {
    work.step<Adam<false>>(adam_step, settings, scalars, only_absmaxes);
  }
}

void step_sgd(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
              Tensors& absmaxes, Tensors& steps, const Tensors& edges, const Tensors& places,
              Tensor lr, OptionalTensor ratios, double momentum, double dampening,
              double weight_decay, bool nesterov, OptionalTensor grad_factor,
              OptionalTensor found_inf, bool only_absmaxes) {
  if (params.empty()) return;
  const size_t each = moments.empty() ? 0 : 1;
  Work work(params, grads, completions, moments, absmaxes, steps, edges, places, each);
  let_go({&params, &completions, &moments, &absmaxes, &steps});
  const Scalars scalars = work.scalars(lr, ratios, grad_factor, found_inf);
  const SgdSettings settings{momentum, dampening, weight_decay, nesterov};
  if (each == 0) {
    work.step<Sgd<false>>(sgd_step, settings, scalars, only_absmaxes);
  } else {
    work.step<Sgd<true>>(momentum_step, settings, scalars, only_absmaxes);
  }
}

void step_lion(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
               Tensors& absmaxes, Tensors& steps, const Tensors& edges, const Tensors& places,
               Tensor lr, double beta1, double beta2, double weight_decay,
               OptionalTensor grad_factor, OptionalTensor found_inf, bool only_absmaxes) {
  if (params.empty()) return;
  Work work(params, grads, completions, moments, absmaxes, steps, edges, places, 1);
  let_go({&params, &completions, &moments, &absmaxes, &steps});
  const Scalars scalars = work.scalars(lr, {}, grad_factor, found_inf);
  work.step<Lion>(lion_step, {beta1, beta2, weight_decay}, scalars, only_absmaxes);
}

void step_lamb(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
               Tensors& absmaxes, Tensors& steps, const Tensors& edges, const Tensors& places,
               Tensor lr, OptionalTensor ratios, double beta1, double beta2, double eps,
               double weight_decay, bool bias_correction, bool averaged, OptionalTensor grad_factor,
               OptionalTensor found_inf, bool only_absmaxes) {
  if (params.empty()) return;
  Work work(params, grads, completions, moments, absmaxes, steps, edges, places, 2);
  let_go({&params, &completions, &moments, &absmaxes, &steps});
  const Scalars scalars = work.scalars(lr, ratios, grad_factor, found_inf);
  const LambSettings settings{beta1, beta2, eps, weight_decay, bias_correction, averaged};
  work.step<Lamb>(lamb_step, settings, scalars, only_absmaxes);
}

Tensor measure_lamb(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
                    const Tensors& absmaxes, const Tensors& steps, const Tensors& edges,
                    const Tensors&, double beta1, double beta2, double eps, double weight_decay,
                    bool bias_correction, bool averaged, OptionalTensor grad_factor) {
  STD_TORCH_CHECK(!params.empty(), "there is no parameter");
  Work work(params, grads, completions, moments, absmaxes, steps, edges, {}, 2);
  const Scalars scalars = work.scalars({}, {}, grad_factor, {});
  const LambSettings settings{beta1, beta2, eps, weight_decay, bias_correction, averaged};
  return work.measure<Lamb>(lamb_measure, settings, scalars);
}

// What LARS calls a step is the gradient alone.
Tensor measure_sgd(Tensors& params, Tensors& grads, Tensors& completions, const Tensors&,
                   const Tensors&, const Tensors& steps, const Tensors&, const Tensors&,
                   double momentum, double dampening, double weight_decay, bool nesterov,
                   OptionalTensor grad_factor) {
  STD_TORCH_CHECK(!params.empty(), "there is no parameter");
  Tensors none;
  Work work(params, grads, completions, none, none, steps, none, none, 0);
  const Scalars scalars = work.scalars({}, {}, grad_factor, {});
  const SgdSettings settings{momentum, dampening, weight_decay, nesterov};
  return work.measure<Gradient>(gradient_measure, settings, scalars);
}

// The sum of the squares of all elements, in float64.
Tensor sum_of_squares(Tensors& grads) {
  STD_TORCH_CHECK(!grads.empty(), "there is no gradient");
  std::vector<StepTensor> tensors(grads.size() + 1);
  int64_t blocks = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    Tensor& g = grads[i];
    STD_TORCH_CHECK(g.scalar_type() == grads[0].scalar_type() && same_device(g, grads[0]),
                    "gradients differ in dtype or device");
    if (!g.is_contiguous() && !is_dense(g.sizes(), g.strides())) g = packed(g);
    tensors[i].grad = data(g);
    tensors[i].width = g.numel();
    tensors[i].first_block = blocks;
    blocks += quant_blocks(g.numel());
  }
  tensors.back().first_block = blocks;
  const DType dtype = dtype_of(grads[0]);
  STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel");
  Tensor result = empty(grads[0], Sizes(&blocks, size_t{0}), ScalarType::Double);
  double& total = *(double*)result.mutable_data_ptr();
#if defined(TW_CUDA)
  const int64_t pieces = square_pieces(tensors);
  const int64_t items = std::max<int64_t>(pieces, 1);  // of nothing there is a sum too
#else
  const int64_t pieces = (blocks + kSquarePiece - 1) / kSquarePiece, items = pieces;
  total = 0;
#endif
  const Tensor sums = empty(grads[0], Sizes(&pieces, 1), ScalarType::Double);
  const GradSquares args{tensors.data(), (int64_t)grads.size(), (double*)sums.mutable_data_ptr(),
                         &total, dtype};
  launch(grad_squares, args, grads[0], items, kSquarePiece * kQuantBlock);
#if !defined(TW_CUDA)
  for (int64_t i = 0; i < pieces; ++i) total += args.sums[i];
#endif
  return result;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("adam"), TORCH_BOX(&step_adam));
  m.impl(TW_OVERLOAD("sgd"), TORCH_BOX(&step_sgd));
  m.impl(TW_OVERLOAD("sgd_squares"), TORCH_BOX(&measure_sgd));
  m.impl(TW_OVERLOAD("lion"), TORCH_BOX(&step_lion));
  m.impl(TW_OVERLOAD("lamb"), TORCH_BOX(&step_lamb));
  m.impl(TW_OVERLOAD("lamb_squares"), TORCH_BOX(&measure_lamb));
  m.impl(TW_OVERLOAD("sum_of_squares"), TORCH_BOX(&sum_of_squares));
}

}  // namespace torchweld
