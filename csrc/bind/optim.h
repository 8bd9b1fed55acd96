// What optimizer steps for torch have in common: numbers that are tensors, and what fits a parameter.
#pragma once

#include <algorithm>

#include "bind/dropout.h"
#include "bind/launch.h"
#include "bind/packing.h"
#include "core/optim.h"

// Its newer version, of glibc 2.29, differs in how it sets errno alone.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif

namespace torchweld {

// A number that is kept as a tensor, since it changes every step. Beside the parameters it is read
// when they are stepped: nothing waits for a GPU here.
inline Number number(const Tensor& t, const Device& of_params) {
  const bool beside = device_of(t) == of_params;
  STD_TORCH_CHECK(t.numel() == 1 && (beside || t.is_cpu()),
                  "a scalar is not one number, on the CPU or beside the parameters");
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::f64,
                  "a scalar is neither float32 nor float64");
  const Number there{0, const_cast<void*>(data(t)), dtype == DType::f64};
  return beside ? there : Number{there.read(), nullptr, false};
}
// A tensor's steps, which are counted up there.
inline Number counter(const Tensor& step, const Device& of_params) {
  Number count = number(step, of_params);
  STD_TORCH_CHECK(count.at, "steps are not beside their parameters");
  count.at = step.mutable_data_ptr();
  return count;
}
inline Number known(double value) { return {value, nullptr, false}; }
inline Number number_or(const OptionalTensor& t, double otherwise, const Device& of_params) {
  return t ? number(*t, of_params) : known(otherwise);
}

// One number for all of `count` tensors, or one for each of them.
class Rates {
 public:
  Rates() = default;
  Rates(const Tensor& t, size_t count, const Device& of_params) {
    if (t.numel() == 1) {
      of_all_ = number(t, of_params);
      return;
    }
    STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == ScalarType::Double &&
                        t.numel() == (int64_t)count,
                    "learning rates are not one number, or a float64 number for each parameter");
    const auto* each = (const double*)data(t);
    each_.assign(each, each + count);
  }
  Number operator[](size_t i) const { return each_.empty() ? of_all_ : known(each_[i]); }
  // Or null, where there is one for all.
  const double* each() const { return each_.empty() ? nullptr : each_.data(); }
  const Number& of_all() const { return of_all_; }

 private:
  Number of_all_ = {};
  std::vector<double> each_;
};

// What tensors' items are: as many in each, and so much work in all of a tensor's.
class Amounts {
 public:
  void add(int64_t items, int64_t amount) {
    begins_.push_back({begins_.back().item + items, begins_.back().amount + amount});
  }
  int64_t all() const { return begins_.back().amount; }
  int64_t items() const { return begins_.back().item; }
  // The first one beyond so much work.
  int64_t item(int64_t amount) const {
    const auto next = std::upper_bound(begins_.begin(), begins_.end(), Begin{0, amount});
    if (next == begins_.end()) return items();
    const Begin begin = *(next - 1);
    return begin.item +
           (amount - begin.amount) * (next->item - begin.item) / (next->amount - begin.amount);
  }

 private:
  struct Begin {
    int64_t item, amount;
    bool operator<(const Begin& other) const { return amount < other.amount; }
  };
  std::vector<Begin> begins_{{0, 0}};
};
template <class Kernel, class Args>
void launch(const Kernel& kernel, const Args& args, const Tensor& like, const Amounts& amounts) {
#if defined(TW_CUDA)
  launch(kernel, args, like, amounts.items(), 0);
#else
  (void)like;
  launch_amounts(kernel, args, amounts.all(), kElementsPerTask,
                 [&](int64_t amount) { return amounts.item(amount); });
#endif
}

inline void check_count(const Tensors& list, size_t count) {
  STD_TORCH_CHECK(list.size() == count, "lists of tensors differ in length");
}

// Whether tensors fit their parameters. What is so of all is asked once: there are thousands.
class Fit {
 public:
  Fit(const Tensors& params, const Tensors& completions)
      : device(device_of(params[0])),
        dtype_(params[0].scalar_type()),
        completion_(completions.empty() ? dtype_ : completions[0].scalar_type()) {}

  void check(const Tensor& t, Sizes sizes, ScalarType dtype) const {
    STD_TORCH_CHECK(
        same_sizes(t.sizes(), sizes) && device_of(t) == device && t.scalar_type() == dtype,
        "a tensor does not fit its parameter");
  }
  // The addresses of parameter i, its gradient and what completes it.
  void set_param(StepTensor& t, const Tensors& params, const Tensors& grads,
                 const Tensors& completions, size_t i) const {
    const Sizes sizes = params[i].sizes();
    check(params[i], sizes, dtype_);
    check(grads[i], sizes, dtype_);
    t.param = params[i].mutable_data_ptr();
    t.grad = data(grads[i]);
    if (completions.empty()) return;
    check(completions[i], sizes, completion_);
    t.completion = completions[i].mutable_data_ptr();
  }

  const Device device;

 private:
  ScalarType dtype_, completion_;
};

// How parameters are rounded whose places these are: a parameter's number, that of its first element
// in the whole tensor, and the whole tensor's strides. Steps are not known yet.
inline std::vector<Rounding> roundings_of(const Tensors& params, const Tensors& places) {
  std::vector<Rounding> roundings;
  if (places.empty()) return roundings;
  check_count(places, params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Sizes sizes = params[i].sizes();
    const Tensor& place = places[i];
    STD_TORCH_CHECK(place.is_cpu() && place.scalar_type() == ScalarType::Long &&
                        place.is_contiguous() && place.numel() == (int64_t)sizes.size() + 2,
                    "places are not int64 numbers on the CPU, two and one for each dimension");
    const auto* numbers = (const int64_t*)data(place);
    const std::vector<int64_t> strides(numbers + 2, numbers + place.numel());
    const auto elements = row_map(sizes, strides, numbers[1]);
    STD_TORCH_CHECK(elements, "a parameter is a part in too many dimensions");
    const int last = elements->dims - 1;
    const bool side_by_side = last < 0 || elements->stride[last] == 1;
    const int64_t run = last >= 0 && side_by_side ? elements->size[last] : 1;
    bool in_fours = side_by_side && elements->offset % 4 == 0;
    for (int d = 0; d < last; ++d) in_fours &= run % 4 == 0 && elements->stride[d] % 4 == 0;
    roundings.push_back({*elements, run, (uint32_t)numbers[0] + 1, 0, in_fours});
  }
  return roundings;
}
inline ParamCodec param_codec(const Tensors& completions, const Tensors& places, DType dtype) {
  STD_TORCH_CHECK(places.empty() || (completions.empty() && dtype == DType::bf16),
                  "only bfloat16 without completions is rounded by places");
  if (!places.empty()) return ParamCodec::rounded;
  if (completions.empty()) return ParamCodec::plain;
  const ScalarType given = completions[0].scalar_type();
  if (given == ScalarType::Short) {
    STD_TORCH_CHECK(dtype == DType::bf16, "only bfloat16 has a remainder");
    return ParamCodec::remainder;
  }
  STD_TORCH_CHECK(given == ScalarType::Float && dtype != DType::f32,
                  "masters are float32, of 16-bit parameters");
  return ParamCodec::master;
}

}  // namespace torchweld
