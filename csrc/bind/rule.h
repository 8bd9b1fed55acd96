// A pass of a rule for torch: the step, the search for the new absmax of split blocks, or the
// measuring of norms.
//
//   Work(arguments, Pass::step, Lion::kMoments).run<Lion>(Lion_step, settings);
#pragma once

#include "bind/optim.h"
#include "bind/quant8.h"

namespace torchweld {

enum class Pass { step, absmaxes, squares };

// The checked arguments of a pass, as addresses.
class Work {
 public:
  // The pass reads `moments_each` moments per tensor.
  Work(StepArguments& a, Pass pass, size_t moments_each)
      : pass_(pass), like_(a.params[0]), count_(a.params.size()), fit_(a.params, a.masters) {
    if (pass == Pass::squares) a.rounding_offsets.clear();  // nothing is rounded
    if (pass == Pass::squares && moments_each == 0) {
      for (Tensors* unread : {&a.moments, &a.absmaxes, &a.new_absmaxes, &a.edges}) unread->clear();
    }
    check_counts(a, moments_each);
    has_companions_ = !a.companions.empty();
    STD_TORCH_CHECK(pass != Pass::absmaxes || !a.edges.empty(),
                    "the absmax pass is only for split rows, which have edges");
    args_.dtype = dtype_of(like_);
    STD_TORCH_CHECK(args_.dtype != DType::f64, "float64 has no kernel");
    args_.state = state_codec(a.moments, a.absmaxes);
    args_.param = param_codec(a.masters, a.rounding_offsets, args_.dtype);
    set_splits(a.edges);
    lay_out(a, moments_each);
    set_roundings(a);
    set_numbers(a);
    a.release_handles();
  }
  Work(const Work&) = delete;

  // Runs the pass with a kernel of a rule with these settings.
  template <class Rule, class Kernel>
  void run(const Kernel& kernel, const typename Rule::Settings& settings) {
    Step<Rule> args{args_, nullptr, settings};
    STD_TORCH_CHECK(!kHasCompanion<Rule> || has_companions_,
                    "a rule with a second iterate lacks its companions");
    if (pass_ != Pass::squares) {
      launch_rules<Rule>(kernel, args);
      return packing_.write_back();
    }
    const int64_t sizes[] = {count_parts(), 2};
    const Tensor squares = empty(like_, Sizes(sizes, 2), ScalarType::Double);
    args.squares = (double (*)[2])squares.mutable_data_ptr();
    launch_rules<Rule>(kernel, args);
  }

 private:
  void check_counts(const StepArguments& a, size_t moments_each) const {
    check_count(a.grads, count_);
    check_count(a.masters, a.masters.empty() ? 0 : count_);
    check_count(a.moments, moments_each * count_);
    check_count(a.absmaxes, a.absmaxes.empty() ? 0 : a.moments.size());
    check_count(a.new_absmaxes, a.edges.empty() ? 0 : a.moments.size());
    check_count(a.steps, count_);
    check_count(a.companions, a.companions.empty() ? 0 : count_);
  }
  void set_numbers(const StepArguments& a) {
    rates_ = Rates(a.lr, count_, fit_.device);
    args_.lr = rates_.of_all();
    args_.lrs = rates_.each();
    args_.grad_factor = number_or(a.grad_factor, 1, fit_.device);
    args_.found_inf = number_or(a.found_inf, 0, fit_.device);
    args_.average_rate = number_or(a.average_rate, 0, fit_.device);
    args_.ratios = numbers_of_each(a.ratios, 1);
    auto* sums = (double (*)[2])numbers_of_each(a.sums, 2);
    STD_TORCH_CHECK(pass_ != Pass::squares || sums, "the pass that measures norms needs sums");
    args_.sums = pass_ == Pass::squares ? sums : nullptr;
    args_.only_absmaxes = pass_ == Pass::absmaxes;
    if (!a.settings_of_each) return;
    const Tensor& each = *a.settings_of_each;
    STD_TORCH_CHECK(each.is_cpu() && fit_.device == device_of(each) && each.is_contiguous() &&
                        each.scalar_type() == ScalarType::Double && each.dim() == 2 &&
                        each.sizes()[0] == (int64_t)count_,
                    "settings of each are not rows of float64 numbers, of parameters on the CPU");
    settings_ = (const double*)data(each);
    fields_ = each.sizes()[1];
  }
  void lay_out(StepArguments& a, size_t moments_each) {
    tensors_.resize(count_ + 1);
    steps_.reserve(count_);
    const ScalarType moment_dtype = (moments_each ? a.moments : a.params)[0].scalar_type();
    const bool in_blocks = args_.state == StateCodec::blocks;
    // Blocks and rounding offsets refer to rows.
    const bool in_any_order = !in_blocks && a.rounding_offsets.empty();
    int64_t blocks = 0;
    for (size_t i = 0; i < count_; ++i) {
      packing_.pack(a.params, a.grads, a.masters, a.moments, a.companions, i, in_any_order);
      const Tensor& p = a.params[i];
      const Sizes sizes = p.sizes();
      const int64_t elements = p.numel();
      const BlockRows rows(sizes);
      steps_.push_back(counter(a.steps[i], fit_.device));
      StepTensor& t = tensors_[i];
      fit_.set_param(t, a.params, a.grads, a.masters, i);
      t.width = in_blocks ? rows.width : elements;
      t.first_block = blocks;
      if (!a.companions.empty()) {
        fit_.check(a.companions[i], sizes, ScalarType::Float);
        t.companion = (float*)a.companions[i].mutable_data_ptr();
      }
      if (!splits_.empty()) check_split(a.edges[i], rows);
      for (size_t k = 0; k < moments_each; ++k) {
        const size_t at = k * count_ + i;
        fit_.check(a.moments[at], sizes, moment_dtype);
        t.moment[k] = a.moments[at].mutable_data_ptr();
        if (a.absmaxes.empty()) continue;
        const int64_t of_row = splits_.empty() ? quant_blocks(rows.width) : splits_[i].pieces;
        t.absmax[k] = absmax(a.absmaxes[at], rows.rows, of_row);
        if (splits_.empty()) continue;
        splits_[i].new_absmax[k] = absmax(a.new_absmaxes[at], rows.rows, of_row);
      }
      const int64_t own = !splits_.empty() ? rows.rows * splits_[i].pieces
                          : in_blocks      ? rows.blocks()
                                           : quant_blocks(t.width);
      // Every block has a fixed cost, which matters in narrow rows.
      constexpr int64_t kElementsOfBegin = 8;
      amounts_.add(own, elements + kElementsOfBegin * own);
      blocks += own;
    }
    tensors_[count_].first_block = blocks;
    args_.tensors = tensors_.data();
    args_.count = (int64_t)count_;
    args_.steps = steps_.data();
  }

  float* absmax(const Tensor& t, int64_t rows, int64_t of_row) const {
    const int64_t expected[] = {rows, of_row};
    STD_TORCH_CHECK(same_sizes(t.sizes(), Sizes(expected, 2)) && t.is_contiguous() &&
                        device_of(t) == fit_.device && t.scalar_type() == ScalarType::Float,
                    "absmax does not fit its codes");
    return (float*)t.mutable_data_ptr();
  }
  // Null if the tensor is absent.
  double* numbers_of_each(const OptionalTensor& t, int64_t each) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(device_of(*t) == fit_.device && t->is_contiguous() &&
                        t->scalar_type() == ScalarType::Double &&
                        t->numel() == (int64_t)count_ * each,
                    "ratios or sums are not float64 numbers for each parameter");
    return (double*)t->mutable_data_ptr();
  }

#if defined(TW_CUDA)
  // The launcher makes the rules, increments the steps, and adds up the measured squares.
  int64_t count_parts() const { return square_pieces(tensors_); }
  template <class Rule, class Kernel>
  void launch_rules(const Kernel& kernel, Step<Rule>& args) {
    const int64_t bytes[] = {(int64_t)(count_ * sizeof(Rule))};
    const Tensor rules = empty(like_, Sizes(bytes, 1), ScalarType::Byte);
    args.rules = (Rule*)rules.mutable_data_ptr();
    launch(kernel, args, like_, args.count, 0);
  }
  void make_room_for_roundings() {
    const int64_t bytes[] = {(int64_t)(count_ * sizeof(Rounding))};
    room_ = empty(like_, Sizes(bytes, 1), ScalarType::Byte);
    for (size_t i = 0; i < count_; ++i) {
      tensors_[i].master = (Rounding*)room_->mutable_data_ptr() + i;
    }
  }
#else
  int64_t count_parts() const { return tensors_[count_].first_block; }
  template <class Rule, class Kernel>
  void launch_rules(const Kernel& kernel, Step<Rule>& args) {
    if (args.found_inf.read() != 0) return;
    constexpr int64_t kFields = (int64_t)Stack::fields_of<typename Rule::Settings>();
    STD_TORCH_CHECK(!settings_ || fields_ == kFields, "settings of each have other fields");
    std::vector<Rule> rules;
    rules.reserve(count_);
    StepScalars before{};
    for (size_t i = 0; i < count_; ++i) {
      const StepScalars now{args.lrs ? args.lrs[i] : args.lr.read(), args.steps[i].read() + 1,
                            args.ratios ? args.ratios[i] : 1};
      // Usually equal to the previous tensor's. Two powers for each of a thousand tensors take 0.1
      // ms.
      const double* row = settings_ ? settings_ + i * fields_ : nullptr;
      bool alike = now.lr == before.lr && now.number == before.number && now.ratio == before.ratio;
      alike &= !row || i == 0 || std::equal(row, row + fields_, row - fields_);
      if (i > 0 && alike) {
        rules.push_back(rules.back());
      } else {
        rules.emplace_back(row ? Row(row).take<typename Rule::Settings>() : args.settings, now);
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
  void make_room_for_roundings() {
    for (size_t i = 0; i < count_; ++i) tensors_[i].master = &roundings_[i];
  }
#endif

  // On a GPU a kernel fills in the step numbers, otherwise launch_rules.
  void set_roundings(const StepArguments& a) {
    roundings_ = make_roundings(a.params, a.rounding_offsets);
    if (roundings_.empty()) return;
    args_.roundings = roundings_.data();
    make_room_for_roundings();
  }
  void set_splits(const Tensors& edges) {
    if (edges.empty()) return;
    check_count(edges, count_);
    STD_TORCH_CHECK(args_.state == StateCodec::blocks, "only codes have edges");
    for (const Tensor& of_row : edges) {
      STD_TORCH_CHECK(device_of(of_row) == fit_.device &&
                          of_row.scalar_type() == ScalarType::Long && of_row.is_contiguous() &&
                          of_row.dim() == 1 && of_row.numel() > 0,
                      "edges are not int64 numbers beside the parameters");
      splits_.push_back({(const int64_t*)data(of_row), of_row.numel() - 1, {}});
    }
    args_.splits = splits_.data();
  }
  // On a GPU edges are not checked: the host would have to wait for them.
  static void check_split([[maybe_unused]] const Tensor& edges,
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

  Pass pass_;
  Tensor like_;
  size_t count_;
  bool has_companions_ = false;
  Fit fit_;
  Packing packing_;
  std::vector<StepTensor> tensors_;
  std::vector<Number> steps_;
  Amounts amounts_;  // of blocks
  std::vector<SplitRows> splits_;
  std::vector<Rounding> roundings_;
  OptionalTensor room_;  // memory for the roundings, on a GPU
  Rates rates_;
  const double* settings_ = nullptr;  // per-parameter settings, if they differ
  int64_t fields_ = 0;
  AnyStep args_ = {};  // points into the above
};

}  // namespace torchweld
