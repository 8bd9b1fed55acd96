// Adafactor for torch; the schema is in python/torchweld/ops/adafactor.py.
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

// Elements of an average, whose shape is torch's or transformers'.
void check_average(const Tensor& t, const Tensor& param, int64_t count) {
  STD_TORCH_CHECK(t.numel() == count && same_device(t, param) && t.is_contiguous() &&
                      t.scalar_type() == ScalarType::Float,
                  "an average does not fit its parameter, or is not contiguous and float32");
}

// `wholes` has the rows, columns and elements of each parameter, where other devices have parts.
class Factoring {
 public:
  Factoring(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
            const Tensors& steps, const Tensor& lr, const OptionalTensor& grad_factor,
            const OptionalTensor& found_inf, const AdafactorSettings& settings,
            const Tensors& places, const Shape& wholes)
      : like_(params[0]),
        fit_(params, completions),
        tensors_(params.size()),
        roundings_(roundings_of(params, places)) {
    const size_t count = params.size();
    const bool factored = like_.dim() > 1, with_momentum = settings.beta1 != 0;
    const size_t averages = factored ? 2 : 1;
    check_count(grads, count);
    check_count(completions, completions.empty() ? 0 : count);
    check_count(moments, (averages + with_momentum) * count);
    check_count(steps, count);
    STD_TORCH_CHECK(wholes.empty() || wholes.size() == 3 * count, "wholes are not 3 sizes of each");
    const DType dtype = dtype_of(like_);
    STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel");
    args_.given = tensors_.data();
    args_.count = (int64_t)count;
    args_.settings = settings;
    const Rates rates(lr, count, fit_.device);
    args_.grad_factor = number_or(grad_factor, 1, fit_.device);
    args_.found_inf = number_or(found_inf, 0, fit_.device);
    args_.dtype = dtype;
    args_.param = param_codec(completions, places, dtype);
    args_.factored = factored;
    for (size_t i = 0; i < count; ++i) {
      packing_.pack(params, grads, completions, moments, i, /*in_any_order=*/false);
      const Tensor& p = params[i];
      STD_TORCH_CHECK((p.dim() > 1) == factored, "matrices and vectors are steps of their own");
      steps_.push_back(counter(steps[i], fit_.device));
      FactoredTensor& t = tensors_[i];
      t.lr = rates[i];
      fit_.set_param(t, params, grads, completions, i);
      lay_out(t, p.sizes(), p.numel(), wholes.empty() ? nullptr : &wholes[3 * i]);
      if (t.whole_elements == 0) continue;  // and there is nothing to average
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

  // A step of whole parameters.
  void step() {
    const Tensor sums = room(sums_, ScalarType::Double);
    begin((double*)sums.mutable_data_ptr(), /*is_last=*/true);
    sum();
    average();
    scale();
    measure();
    finish();
  }
  // One of its passes, with all devices' sums from the passes before it.
  void pass(int64_t passed, const Tensor& sums) {
    STD_TORCH_CHECK(same_device(sums, like_) && sums.is_contiguous() && sums.numel() == sums_ &&
                        sums.scalar_type() == ScalarType::Double,
                    "sums are not float64 numbers, as many as the passes have");
    STD_TORCH_CHECK(0 <= passed && passed < 4, "there are 4 passes");
    begin((double*)sums.mutable_data_ptr(), /*is_last=*/passed == 3);
    if (passed == 0) return sum();
    if (passed == 1) return average();
    scale();
    passed == 2 ? measure() : finish();
  }
  // What was not contiguous, after either.
  void write_back() { packing_.write_back(); }

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
  // Before any pass: the place of each tensor's sums, scales and partial sums.
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
  // What depends on the steps' numbers is made on the device.
  void set_roundings() {
    if (roundings_.empty()) return;
    args_.roundings = roundings_.data();
    rounding_room_ = room(args_.count * sizeof(Rounding), ScalarType::Byte);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].completion = (Rounding*)rounding_room_->mutable_data_ptr() + i;
    }
  }
  void prepare() {
    tensor_room_ = room(args_.count * sizeof(FactoredTensor), ScalarType::Byte);
    args_.tensors = (FactoredTensor*)tensor_room_->mutable_data_ptr();
    launch(adafactor_prepare, args_, like_, args_.count, 0);
  }
#else
  void set_roundings() {
    for (size_t i = 0; i < roundings_.size(); ++i) tensors_[i].completion = &roundings_[i];
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

// With `sums` one of its passes.
void step_adafactor(Tensors& params, Tensors& grads, Tensors& completions, Tensors& moments,
                    const Tensors& absmaxes, const Tensors& steps, const Tensors& edges,
                    const Tensors& places, Tensor lr, double decay_rate, double eps_square,
                    double eps_floor, double eps_scale, double clip, double beta1,
                    double weight_decay, bool relative, bool warmup, bool scaled, bool scaled_decay,
                    OptionalTensor grad_factor, OptionalTensor found_inf, bool only_absmaxes,
                    OptionalTensor sums, Shape wholes, int64_t passed) {
  if (params.empty()) return;
  STD_TORCH_CHECK(absmaxes.empty() && edges.empty() && !only_absmaxes,
                  "averages are not kept in blocks");
  Factoring factoring(params, grads, completions, moments, steps, lr, grad_factor, found_inf,
                      {decay_rate, eps_square, eps_floor, eps_scale, clip, beta1, weight_decay,
                       relative, warmup, scaled, scaled_decay},
                      places, wholes);
#if !defined(TW_CUDA)
  if (number_or(found_inf, 0, device_of(params[0])).read() != 0) return;
#endif
  sums ? factoring.pass(passed, *sums) : factoring.step();
  factoring.write_back();
}

}  // namespace

TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("adafactor"), TORCH_BOX(&step_adafactor)); }

}  // namespace torchweld
