// Adafactor for torch.
#include "core/adafactor.h"

#include "bind/optim.h"

TW_KERNEL(adafactor_sum, Adafactor);
TW_KERNEL(adafactor_add, Adafactor);
TW_KERNEL(adafactor_average, Adafactor);
TW_KERNEL(adafactor_scale, Adafactor);
TW_KERNEL(adafactor_measure, Adafactor);
TW_KERNEL(adafactor_add_squares, Adafactor);
TW_KERNEL(adafactor_find_lengths, Adafactor);
TW_KERNEL(adafactor_step, Adafactor);
TW_FUNCTION(int64_t, adafactor_chunks, int64_t);
TW_FUNCTION(int64_t, adafactor_slices, int64_t);
#if defined(TW_CUDA)
TW_KERNEL(adafactor_prepare, Adafactor);
#endif

namespace torchweld {
namespace {

// A pass computes sums of g^2 over rows and columns, sums of row averages, sums of squares of
// parameters and directions, or the step.
enum class FactoredPass { squares, averages, directions, step };

// Averages may have torch's shape or that of transformers.
void check_average(const Tensor& t, const Tensor& param, int64_t count) {
  STD_TORCH_CHECK(t.numel() == count && same_device(t, param) && t.is_contiguous() &&
                      t.scalar_type() == ScalarType::Float,
                  "an average does not fit its parameter, or is not contiguous and float32");
}

// The passes of a step. For sharded parameters `whole_sizes` holds the rows, columns and elements
// of each whole parameter.
class Factoring {
 public:
  Factoring(StepArguments& a, const AdafactorSettings& settings)
      : like_(a.params[0]),
        fit_(a.params, a.masters),
        tensors_(a.params.size()),
        roundings_(make_roundings(a.params, a.rounding_offsets)) {
    STD_TORCH_CHECK(a.absmaxes.empty() && a.edges.empty() && !a.ratios && a.companions.empty() &&
                        !a.settings_of_each,
                    "Adafactor takes no absmaxes, edges, ratios or companions");
    Tensors &params = a.params, &grads = a.grads, &masters = a.masters, &moments = a.moments;
    const Shape& wholes = a.whole_sizes;
    const size_t count = params.size();
    const bool factored = like_.dim() > 1, with_momentum = settings.beta1 != 0;
    const size_t averages = factored ? 2 : 1;
    check_count(grads, count);
    check_count(masters, masters.empty() ? 0 : count);
    check_count(moments, (averages + with_momentum) * count);
    check_count(a.steps, count);
    STD_TORCH_CHECK(wholes.empty() || wholes.size() == 3 * count,
                    "whole_sizes does not hold three numbers per parameter");
    const DType dtype = dtype_of(like_);
    STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel");
    args_.given = tensors_.data();
    args_.count = (int64_t)count;
    args_.settings = settings;
    const Rates rates(a.lr, count, fit_.device);
    args_.grad_factor = number_or(a.grad_factor, 1, fit_.device);
    args_.found_inf = number_or(a.found_inf, 0, fit_.device);
    args_.dtype = dtype;
    args_.param = param_codec(masters, a.rounding_offsets, dtype);
    args_.factored = factored;
    for (size_t i = 0; i < count; ++i) {
      packing_.pack(params, grads, masters, moments, a.companions, i, /*in_any_order=*/false);
      const Tensor& p = params[i];
      STD_TORCH_CHECK((p.dim() > 1) == factored, "matrices and vectors need separate calls");
      steps_.push_back(counter(a.steps[i], fit_.device));
      FactoredTensor& t = tensors_[i];
      t.lr = rates[i];
      fit_.set_param(t, params, grads, masters, i);
      lay_out(t, p.sizes(), p.numel(), wholes.empty() ? nullptr : &wholes[3 * i]);
      if (t.whole_elements == 0) continue;  // nothing to average
      if (factored) {
        check_average(moments[i], p, t.matrices * t.height);
        check_average(moments[count + i], p, t.matrices * t.columns);
      } else {
        check_average(moments[i], p, p.numel());
      }
      for (size_t k = 0; k < averages; ++k) {
        t.moment[k] = moments[k * count + i].mutable_data_ptr();
      }
      if (!with_momentum) continue;
      fit_.check(moments[averages * count + i], p.sizes(), ScalarType::Float);
      t.moment[2] = moments[averages * count + i].mutable_data_ptr();
    }
    args_.steps = steps_.data();
    set_roundings();
  }
  Factoring(const Factoring&) = delete;

  // A whole step, for unsharded parameters.
  void step() {
    if (is_left_out()) return;
    const Tensor sums = room(sums_, ScalarType::Double);
    begin((double*)sums.mutable_data_ptr(), /*is_last=*/true);
    sum();
    average();
    scale();
    measure();
    finish();
    packing_.write_back();
  }
  // One pass over shards. Reads the all-reduced sums of the earlier passes from `sums`, and writes
  // its own local sums there.
  void pass(FactoredPass pass, const OptionalTensor& sums) {
    STD_TORCH_CHECK(sums && same_device(*sums, like_) && sums->is_contiguous() &&
                        sums->numel() == sums_ && sums->scalar_type() == ScalarType::Double,
                    "sums do not match the passes, or are not contiguous float64 numbers");
    if (is_left_out()) return;
    begin((double*)sums->mutable_data_ptr(), /*is_last=*/pass == FactoredPass::step);
    switch (pass) {
      case FactoredPass::squares:
        return sum();
      case FactoredPass::averages:
        average();
        break;
      case FactoredPass::directions:
        scale();
        return measure();
      case FactoredPass::step:
        scale();
        finish();
    }
    packing_.write_back();
  }

 private:
  void lay_out(FactoredTensor& t, Sizes sizes, int64_t elements, const int64_t* whole) {
    t.width = elements;
    t.matrices = 1;
    if (args_.factored) {
      t.height = sizes[sizes.size() - 2];
      t.columns = sizes[sizes.size() - 1];
      for (size_t i = 0; i + 2 < sizes.size(); ++i) t.matrices *= sizes[i];
    } else {
      t.columns = kVectorRow;
      t.height = (elements + kVectorRow - 1) / kVectorRow;
    }
    t.whole_height = whole ? whole[0] : t.height;
    t.whole_columns = whole ? whole[1] : t.columns;
    t.whole_elements = whole ? whole[2] : elements;
    if (t.whole_elements == 0) t.matrices = 0;
    t.chunks = adafactor_chunks(t.height);
    t.slices = adafactor_slices(t.columns);
    t.first_matrix = args_.matrices;
    t.first_block = args_.blocks;
    t.first_average = args_.averages;
    args_.matrices += t.matrices;
    const int64_t blocks = t.matrices * t.chunks * t.slices;
    args_.blocks += blocks;
    amounts_.add(blocks, elements + blocks);
    sums_ += 2;
    if (!args_.factored) return;
    args_.averages += t.matrices * (t.height + t.columns);
    partials_ += t.matrices * (t.chunks * t.columns + t.height * t.slices);
    sums_ += t.matrices * (t.height + t.columns + 1);
  }
  Tensor room(int64_t elements, ScalarType dtype) const {
    return empty(like_, Sizes(&elements, 1), dtype);
  }
  // Before each pass: assigns memory for each tensor's sums, scales and partial sums.
  void begin(double* sums, bool is_last) {
    partials_of_all_ = room(partials_, ScalarType::Double);
    scales_of_all_ = room(args_.averages, ScalarType::Float);
    squares_of_all_ = room(2 * args_.blocks, ScalarType::Double);
    auto* partials = (double*)partials_of_all_->mutable_data_ptr();
    auto* scales = (float*)scales_of_all_->mutable_data_ptr();
    args_.squares = (double (*)[2])squares_of_all_->mutable_data_ptr();
    for (FactoredTensor& t : tensors_) {
      if (args_.factored) {
        const int64_t rows = t.matrices * t.height, columns = t.matrices * t.columns;
        t.row_sums = sums;
        t.column_sums = t.row_sums + rows;
        t.average_sums = t.column_sums + columns;
        sums = t.average_sums + t.matrices;
        t.row_scales = scales;
        t.column_scales = t.row_scales + rows;
        scales = t.column_scales + columns;
        t.column_partials = partials;
        t.row_partials = t.column_partials + columns * t.chunks;
        partials = t.row_partials + rows * t.slices;
      }
      t.squares = sums;
      sums += 2;
    }
    args_.counts = is_last;
    prepare();
  }

#if defined(TW_CUDA)
  // The kernels read found_inf, so that the host need not wait for it.
  static bool is_left_out() { return false; }
  // A kernel fills in the step numbers.
  void set_roundings() {
    if (roundings_.empty()) return;
    args_.roundings = roundings_.data();
    rounding_room_ = room(args_.count * sizeof(Rounding), ScalarType::Byte);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].master = (Rounding*)rounding_room_->mutable_data_ptr() + i;
    }
  }
  void prepare() {
    tensor_room_ = room(args_.count * sizeof(FactoredTensor), ScalarType::Byte);
    args_.tensors = (FactoredTensor*)tensor_room_->mutable_data_ptr();
    launch(adafactor_prepare, args_, like_, args_.count, 0);
  }
#else
  bool is_left_out() const { return args_.found_inf.read() != 0; }
  void set_roundings() {
    for (size_t i = 0; i < roundings_.size(); ++i) tensors_[i].master = &roundings_[i];
  }
  void prepare() {
    args_.tensors = tensors_.data();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      FactoredTensor& t = tensors_[i];
      t.number = steps_[i].read() + 1;
      t.rate = adafactor_rate(args_.settings, t.number);
      if (!roundings_.empty()) roundings_[i].step = (uint32_t)t.number;
      if (args_.counts) steps_[i].write(t.number);
    }
  }
#endif

  template <class Kernel>
  void over_blocks(const Kernel& kernel) const {
    launch(kernel, args_, like_, amounts_);
  }
  template <class Kernel>
  void over_matrices(const Kernel& kernel) const {
    launch(kernel, args_, like_, args_.matrices, 16 * args_.averages / (args_.matrices + 1));
  }
  template <class Kernel>
  void over_tensors(const Kernel& kernel) const {
    launch(kernel, args_, like_, args_.count, 2 * args_.blocks / args_.count);
  }

  void sum() const {
    if (!args_.factored) return;
    over_blocks(adafactor_sum);
    over_matrices(adafactor_add);
  }
  void average() const {
    if (args_.factored) over_matrices(adafactor_average);
  }
  void scale() const {
    if (args_.factored) over_matrices(adafactor_scale);
  }
  void measure() const {
    over_blocks(adafactor_measure);
    over_tensors(adafactor_add_squares);
  }
  void finish() const {
    over_tensors(adafactor_find_lengths);
    over_blocks(adafactor_step);
  }

  const Tensor& like_;
  Fit fit_;
  Packing packing_;
  std::vector<FactoredTensor> tensors_;
  std::vector<Rounding> roundings_;
  std::vector<Number> steps_;
  Adafactor args_ = {};
  OptionalTensor partials_of_all_, scales_of_all_, squares_of_all_;
#if defined(TW_CUDA)
  OptionalTensor tensor_room_, rounding_room_;
#endif
  Amounts amounts_;  // of blocks
  int64_t partials_ = 0, sums_ = 0;
};

template <FactoredPass pass>
void adafactor(StepArguments& a, const AdafactorSettings& settings) {
  Factoring factoring(a, settings);
  if (pass == FactoredPass::step && !a.sums) {
    factoring.step();
  } else {
    factoring.pass(pass, a.sums);
  }
}

template <FactoredPass pass>
constexpr auto kBoxed = boxed<AdafactorSettings, adafactor<pass>>;

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("adafactor"), kBoxed<FactoredPass::step>);
  m.impl(TW_OVERLOAD("adafactor_squares"), kBoxed<FactoredPass::squares>);
  m.impl(TW_OVERLOAD("adafactor_averages"), kBoxed<FactoredPass::averages>);
  m.impl(TW_OVERLOAD("adafactor_directions"), kBoxed<FactoredPass::directions>);
}

}  // namespace torchweld
