// Adafactor for torch; the schema is in python/torchweld/ops/adafactor.py.
#include "core/adafactor.h"

#include "bind/optim.h"

TW_KERNEL(adafactor_sum, Adafactor);
TW_KERNEL(adafactor_add, Adafactor);
TW_KERNEL(adafactor_average, Adafactor);
TW_KERNEL(adafactor_scale, Adafactor);
TW_KERNEL(adafactor_measure, Adafactor);
TW_KERNEL(adafactor_step, Adafactor);
TW_FUNCTION(int64_t, adafactor_chunks, int64_t);

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
  Factoring(const Tensors& params, const Tensors& grads, const Tensors& completions,
            const Tensors& moments, const Tensors& steps, const Tensor& lr,
            const OptionalTensor& grad_factor, const AdafactorSettings& settings,
            const Tensors& places, const Shape& wholes)
      : like_(params[0]),
        settings_(settings),
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
    args_ = {tensors_.data(),
             (int64_t)count,
             nullptr,
             settings.eps_square,
             settings.eps_floor,
             (float)settings.beta1,
             (float)number_or(grad_factor, 1, like_).read(),
             dtype,
             param_codec(completions, places, dtype),
             factored};
    const double rate = number(lr, like_).read();
    for (size_t i = 0; i < count; ++i) {
      const Tensor& p = params[i];
      STD_TORCH_CHECK((p.dim() > 1) == factored, "matrices and vectors are steps of their own");
      FactoredTensor& t = tensors_[i];
      set_param(t, params, grads, completions, i);
      if (!roundings_.empty()) t.completion = &roundings_[i];
      lay_out(t, p.sizes(), p.numel(), wholes.empty() ? nullptr : &wholes[3 * i]);
      steps_.push_back(counter(steps[i], like_));
      now_.push_back({rate, steps_[i].read() + 1, 1});
      if (!roundings_.empty()) roundings_[i].step = (uint32_t)now_[i].number;
      t.rate = (float)std::pow(now_[i].number, settings.decay_rate);
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
      check_like(moments[averages * count + i], p, ScalarType::Float);
      t.moment[2] = moments[averages * count + i].mutable_data_ptr();
    }
  }
  Factoring(const Factoring&) = delete;

  // A step of whole parameters.
  void step() {
    std::vector<double> sums(sums_);
    place_sums(sums.data());
    sum();
    average();
    scale();
    measure();
    finish();
  }
  // One of its passes, with all devices' sums from the passes before it.
  void pass(int64_t passed, const Tensor& sums) {
    STD_TORCH_CHECK(sums.is_cpu() && sums.is_contiguous() && sums.numel() == sums_ &&
                        sums.scalar_type() == ScalarType::Double,
                    "sums are not float64 numbers, as many as the passes have");
    STD_TORCH_CHECK(0 <= passed && passed < 4, "there are 4 passes");
    place_sums((double*)sums.mutable_data_ptr());
    if (passed == 0) return sum();
    if (passed == 1) return average();
    scale();
    passed == 2 ? measure() : finish();
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
    t.first_matrix = matrices_;
    t.first_chunk = chunks_;
    matrices_ += t.matrices;
    chunks_ += t.matrices * t.chunks;
    elements_ += elements;
    sums_ += 2;
    if (!args_.factored) return;
    partials_ += t.matrices * t.chunks * t.columns;
    scales_ += t.matrices * (t.height + t.columns);
    sums_ += t.matrices * (t.height + t.columns + 1);
  }
  // Of each tensor in turn.
  void place_sums(double* at) {
    for (FactoredTensor& t : tensors_) {
      if (args_.factored) {
        t.row_sums = at;
        t.column_sums = t.row_sums + t.matrices * t.height;
        t.average_sums = t.column_sums + t.matrices * t.columns;
        at = t.average_sums + t.matrices;
      }
      t.squares = at;
      at += 2;
    }
  }

  template <class Kernel>
  void over_chunks(const Kernel& kernel) const {
    launch(kernel, args_, like_, chunks_, elements_ / (chunks_ + 1));
  }
  template <class Kernel>
  void over_matrices(const Kernel& kernel) const {
    launch(kernel, args_, like_, matrices_, 16 * scales_ / (matrices_ + 1));
  }

  void sum() {
    if (!args_.factored) return;
    std::vector<double> partials(partials_);
    double* at = partials.data();
    for (FactoredTensor& t : tensors_) {
      t.partials = at;
      at += t.matrices * t.chunks * t.columns;
    }
    over_chunks(adafactor_sum);
    over_matrices(adafactor_add);
  }
  void average() const {
    if (args_.factored) over_matrices(adafactor_average);
  }
  void scale() {
    if (!args_.factored) return;
    room_for_scales_.resize(scales_);
    float* at = room_for_scales_.data();
    for (FactoredTensor& t : tensors_) {
      t.row_scales = at;
      t.column_scales = at + t.matrices * t.height;
      at = t.column_scales + t.matrices * t.columns;
    }
    over_matrices(adafactor_scale);
  }
  void measure() {
    std::vector<double> squares(2 * chunks_);
    args_.squares = (double (*)[2])squares.data();
    over_chunks(adafactor_measure);
    for (const FactoredTensor& t : tensors_) {
      t.squares[0] = t.squares[1] = 0;
      for (int64_t at = t.first_chunk; at < t.first_chunk + t.matrices * t.chunks; ++at) {
        for (int k = 0; k < 2; ++k) t.squares[k] += args_.squares[at][k];
      }
    }
  }
  void finish() {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      FactoredTensor& t = tensors_[i];
      const double count = t.whole_elements > 0 ? (double)t.whole_elements : 1;
      const auto lengths =
          adafactor_lengths(settings_, now_[i], t.squares[0] / count, t.squares[1] / count);
      t.decay = (float)lengths.decay;
      t.length = (float)lengths.length;
    }
    over_chunks(adafactor_step);
    for (size_t i = 0; i < steps_.size(); ++i) steps_[i].write(now_[i].number);
  }

  const Tensor& like_;
  const AdafactorSettings settings_;
  std::vector<FactoredTensor> tensors_;
  std::vector<Rounding> roundings_;
  Adafactor args_;
  std::vector<Number> steps_;
  std::vector<StepScalars> now_;
  std::vector<float> room_for_scales_;
  int64_t matrices_ = 0, chunks_ = 0, elements_ = 0, partials_ = 0, scales_ = 0, sums_ = 0;
};

// With `sums` one of its passes.
void step_adafactor(Tensors params, Tensors grads, Tensors completions, Tensors moments,
                    Tensors absmaxes, Tensors steps, Tensors edges, Tensors places, Tensor lr,
                    double decay_rate, double eps_square, double eps_floor, double eps_scale,
                    double clip, double beta1, double weight_decay, bool relative, bool warmup,
                    bool scaled, bool scaled_decay, OptionalTensor grad_factor,
                    OptionalTensor found_inf, bool only_absmaxes, OptionalTensor sums, Shape wholes,
                    int64_t passed) {
  if (params.empty()) return;
  STD_TORCH_CHECK(absmaxes.empty() && edges.empty() && !only_absmaxes,
                  "averages are not kept in blocks");
  Factoring factoring(params, grads, completions, moments, steps, lr, grad_factor,
                      {decay_rate, eps_square, eps_floor, eps_scale, clip, beta1, weight_decay,
                       relative, warmup, scaled, scaled_decay},
                      places, wholes);
  if (number_or(found_inf, 0, params[0]).read() != 0) return;
  sums ? factoring.pass(passed, *sums) : factoring.step();
}

}  // namespace

TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("adafactor"), TORCH_BOX(&step_adafactor)); }

}  // namespace torchweld
