// Adafactor for torch; the schema is in python/torchweld/ops/adafactor.py.
#include "core/adafactor.h"

#include "bind/optim.h"

TW_KERNEL(adafactor_sum, Adafactor);
TW_KERNEL(adafactor_finish, Adafactor);
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

class Factoring {
 public:
  Factoring(const Tensors& params, const Tensors& grads, const Tensors& completions,
            const Tensors& moments, const Tensors& places, bool with_momentum)
      : factored_(params[0].dim() > 1),
        tensors_(params.size()),
        roundings_(roundings_of(params, places)) {
    const size_t count = params.size();
    const size_t averages = factored_ ? 2 : 1;
    check_count(grads, count);
    check_count(completions, completions.empty() ? 0 : count);
    check_count(moments, (averages + with_momentum) * count);
    dtype_ = dtype_of(params[0]);
    STD_TORCH_CHECK(dtype_ != DType::f64, "float64 has no kernel");
    param_ = param_codec(completions, places, dtype_);
    for (size_t i = 0; i < count; ++i) {
      const Tensor& p = params[i];
      STD_TORCH_CHECK((p.dim() > 1) == factored_, "matrices and vectors are steps of their own");
      FactoredTensor& t = tensors_[i];
      set_param(t, params, grads, completions, i);
      if (!roundings_.empty()) t.completion = &roundings_[i];
      lay_out(t, p.sizes(), p.numel());
      if (p.numel() == 0) continue;  // and there is nothing to average
      if (factored_) {
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

  void step(const Tensor& like, const Tensors& steps, const Tensor& lr, double grad_factor,
            const AdafactorSettings& s) {
    const double rate = number(lr, like).read();
    std::vector<StepScalars> now;
    for (const Tensor& step : steps) now.push_back({rate, number(step, like).read() + 1, 1});
    std::vector<double> squares(2 * chunks_), partials(partials_);
    std::vector<float> scales(scales_);
    double* partial = partials.data();
    float* scale = scales.data();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      FactoredTensor& t = tensors_[i];
      t.rate = (float)std::pow(now[i].number, s.decay_rate);
      if (!roundings_.empty()) roundings_[i].step = (uint32_t)now[i].number;
      if (!factored_) continue;
      t.partials = partial;
      t.row_scales = scale;
      t.column_scales = scale + t.matrices * t.height;
      partial += t.matrices * t.chunks * t.columns;
      scale += t.matrices * (t.height + t.columns);
    }
    Adafactor args{tensors_.data(),
                   (int64_t)tensors_.size(),
                   (double (*)[2])squares.data(),
                   s.eps_square,
                   s.eps_floor,
                   (float)s.beta1,
                   (float)grad_factor,
                   dtype_,
                   param_,
                   factored_};
    if (factored_) {
      launch(adafactor_sum, args, like, chunks_, elements_ / (chunks_ + 1));
      launch(adafactor_finish, args, like, matrices_, 16 * scales_ / (matrices_ + 1));
    }
    launch(adafactor_measure, args, like, chunks_, elements_ / (chunks_ + 1));
    for (size_t i = 0; i < tensors_.size(); ++i) {
      FactoredTensor& t = tensors_[i];
      double sums[2] = {};
      for (int64_t at = t.first_chunk; at < t.first_chunk + t.matrices * t.chunks; ++at) {
        for (int k = 0; k < 2; ++k) sums[k] += args.squares[at][k];
      }
      const double count = t.width > 0 ? (double)t.width : 1;
      const auto lengths = adafactor_lengths(s, now[i], sums[0] / count, sums[1] / count);
      t.decay = (float)lengths.decay;
      t.length = (float)lengths.length;
    }
    launch(adafactor_step, args, like, chunks_, elements_ / (chunks_ + 1));
    for (size_t i = 0; i < steps.size(); ++i) counter(steps[i], like).write(now[i].number);
  }

 private:
  void lay_out(FactoredTensor& t, Sizes sizes, int64_t elements) {
    t.width = elements;
    if (factored_) {
      t.height = sizes[sizes.size() - 2];
      t.columns = sizes[sizes.size() - 1];
      t.matrices = elements == 0 ? 0 : elements / (t.height * t.columns);
    } else {
      t.columns = kVectorRow;
      t.height = (elements + kVectorRow - 1) / kVectorRow;
      t.matrices = elements == 0 ? 0 : 1;
    }
    t.chunks = adafactor_chunks(t.height);
    t.first_matrix = matrices_;
    t.first_chunk = chunks_;
    matrices_ += t.matrices;
    chunks_ += t.matrices * t.chunks;
    elements_ += elements;
    if (!factored_) return;
    partials_ += t.matrices * t.chunks * t.columns;
    scales_ += t.matrices * (t.height + t.columns);
  }

  bool factored_;
  std::vector<FactoredTensor> tensors_;
  std::vector<Rounding> roundings_;
  int64_t matrices_ = 0, chunks_ = 0, elements_ = 0, partials_ = 0, scales_ = 0;
  DType dtype_;
  ParamCodec param_;
};

void step_adafactor(Tensors params, Tensors grads, Tensors completions, Tensors moments,
                    Tensors absmaxes, Tensors steps, Tensors edges, Tensors places, Tensor lr,
                    double decay_rate, double eps_square, double eps_floor, double eps_scale,
                    double clip, double beta1, double weight_decay, bool relative, bool warmup,
                    bool scaled, bool scaled_decay, OptionalTensor grad_factor,
                    OptionalTensor found_inf, bool only_absmaxes) {
  if (params.empty()) return;
  STD_TORCH_CHECK(absmaxes.empty() && edges.empty() && !only_absmaxes,
                  "averages are not kept in blocks");
  Factoring factoring(params, grads, completions, moments, places, beta1 != 0);
  check_count(steps, params.size());
  if (number_or(found_inf, 0, params[0]).read() != 0) return;
  factoring.step(params[0], steps, lr, number_or(grad_factor, 1, params[0]).read(),
                 {decay_rate, eps_square, eps_floor, eps_scale, clip, beta1, weight_decay, relative,
                  warmup, scaled, scaled_decay});
}

}  // namespace

TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("adafactor"), TORCH_BOX(&step_adafactor)); }

}  // namespace torchweld
