// Shared by all optimizer ops for torch: arguments, scalars that are tensors, and checks.
#pragma once

#include <algorithm>
#include <utility>

#include "bind/dropout.h"
#include "bind/launch.h"
#include "bind/old_math.h"
#include "bind/packing.h"
#include "core/optim.h"

namespace torchweld {

// The arguments of every pass of every rule, in the order of the schema. The rule's settings
// follow. Lists have one entry per parameter; python/torchweld/ops/optimizer/batch.py describes
// them.
struct StepArguments {
  Tensors params, grads, masters, moments, absmaxes, new_absmaxes, steps, edges, rounding_offsets,
      companions;
  Tensor lr;
  OptionalTensor ratios, grad_factor, found_inf, average_rate, sums, settings_of_each;
  Shape whole_sizes;

  // Call this when all addresses are known; the caller keeps the tensors alive. After a step,
  // releasing thousands of handles takes longer, because they have left the cache.
  void release_handles() {
    for (Tensors* list :
         {&params, &masters, &moments, &absmaxes, &new_absmaxes, &steps, &companions}) {
      list->clear();
    }
  }
};

// Pops an op's arguments off torch's stack, one by one.
class Stack {
 public:
  explicit Stack(const StableIValue* first) : next_(first) {}
  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  // Takes a struct of settings, field by field.
  template <class Settings>
  Settings take_settings() {
    return take_fields<Settings>(std::make_index_sequence<fields_of<Settings>()>());
  }
  template <class Settings, class... Fields>
  static constexpr size_t fields_of() {
    if constexpr (is_made_of<Settings, Fields..., Field>(0)) {
      return fields_of<Settings, Fields..., Field>();
    } else {
      return sizeof...(Fields);
    }
  }

 private:
  // Converts to the type of any field.
  struct Field {
    Stack& stack;
    template <class T>
    operator T() const {
      return stack.take<T>();
    }
  };
  template <class Settings, class... Fields>
  static constexpr auto is_made_of(int) -> decltype(Settings{std::declval<Fields>()...}, true) {
    return true;
  }
  template <class Settings, class... Fields>
  static constexpr bool is_made_of(long) {
    return false;
  }
  template <class Settings, size_t... I>
  Settings take_fields(std::index_sequence<I...>) {
    return {((void)I, Field{*this})...};
  }

  const StableIValue* next_;
};

// A struct of settings from a row of numbers, one for each field.
class Row {
 public:
  explicit Row(const double* first) : next_(first) {}
  template <class Settings>
  Settings take() {
    return take_fields<Settings>(std::make_index_sequence<Stack::fields_of<Settings>()>());
  }

 private:
  struct Field {
    const double*& next;
    operator double() const { return *next++; }
    operator bool() const { return *next++ != 0; }
  };
  template <class Settings, size_t... I>
  Settings take_fields(std::index_sequence<I...>) {
    return {((void)I, Field{next_})...};
  }

  const double* next_;
};

// A boxed op with these arguments and a rule's settings.
template <class Settings, void (*run)(StepArguments&, const Settings&)>
void boxed(StableIValue* first, uint64_t count, uint64_t /*results*/) {
  constexpr uint64_t kArguments = 18 + Stack::fields_of<Settings>();
  STD_TORCH_CHECK(count == kArguments, "the schema has ", count, " arguments and not ", kArguments);
  Stack stack(first);
  StepArguments a;
  for (Tensors* list : {&a.params, &a.grads, &a.masters, &a.moments, &a.absmaxes, &a.new_absmaxes,
                        &a.steps, &a.edges, &a.rounding_offsets, &a.companions}) {
    *list = stack.take<Tensors>();
    check_memory(*list);
  }
  a.lr = stack.take<Tensor>();
  check_memory(a.lr);
  for (OptionalTensor* number :
       {&a.ratios, &a.grad_factor, &a.found_inf, &a.average_rate, &a.sums, &a.settings_of_each}) {
    *number = stack.take<OptionalTensor>();
    check_memory(*number);
  }
  a.whole_sizes = stack.take<Shape>();
  const auto settings = stack.take_settings<Settings>();
  if (!a.params.empty()) run(a, settings);
}

// A number that changes every step, in a tensor. If the tensor is on the parameters' device, the
// step reads it there, so that the host need not wait for a GPU.
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
// A tensor's step count, which a step increments in place.
inline Number counter(const Tensor& step, const Device& of_params) {
  Number count = number(step, of_params);
  STD_TORCH_CHECK(count.at, "steps are not beside their parameters");
  count.at = step.mutable_data_ptr();
  return count;
}
inline Number make_number(double value) { return {value, nullptr, false}; }
inline Number number_or(const OptionalTensor& t, double otherwise, const Device& of_params) {
  return t ? number(*t, of_params) : make_number(otherwise);
}

// One learning rate for all tensors, or one per tensor.
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
  Number operator[](size_t i) const { return each_.empty() ? of_all_ : make_number(each_[i]); }
  // Null if all tensors share one.
  const double* each() const { return each_.empty() ? nullptr : each_.data(); }
  const Number& of_all() const { return of_all_; }

 private:
  Number of_all_ = {};
  std::vector<double> each_;
};

// The number of items of each tensor, and the amount of work in them.
class Amounts {
 public:
  void add(int64_t items, int64_t amount) {
    begins_.push_back({begins_.back().item + items, begins_.back().amount + amount});
  }
  int64_t all() const { return begins_.back().amount; }
  int64_t items() const { return begins_.back().item; }
  // The item at this amount of work.
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

#if defined(TW_CUDA)
// An upper bound on the number of pieces, each within one tensor. Narrow rows make fewer.
inline int64_t square_pieces(const std::vector<StepTensor>& tensors) {
  int64_t pieces = 0;
  for (size_t i = 0; i + 1 < tensors.size(); ++i) {
    const int64_t blocks = tensors[i + 1].first_block - tensors[i].first_block;
    pieces += (blocks + kSquarePiece - 1) / kSquarePiece;
  }
  return pieces;
}
#endif

inline void check_count(const Tensors& list, size_t count) {
  STD_TORCH_CHECK(list.size() == count, "lists of tensors differ in length");
}

// Checks tensors against their parameters. There may be thousands, so shared properties are read
// once.
class Fit {
 public:
  Fit(const Tensors& params, const Tensors& masters)
      : device(device_of(params[0])),
        dtype_(params[0].scalar_type()),
        master_(masters.empty() ? dtype_ : masters[0].scalar_type()) {}

  void check(const Tensor& t, Sizes sizes, ScalarType dtype) const {
    STD_TORCH_CHECK(
        same_sizes(t.sizes(), sizes) && device_of(t) == device && t.scalar_type() == dtype,
        "a tensor does not fit its parameter");
  }
  // Sets the addresses of parameter i, its gradient and its master.
  void set_param(StepTensor& t, const Tensors& params, const Tensors& grads, const Tensors& masters,
                 size_t i) const {
    const Sizes sizes = params[i].sizes();
    check(params[i], sizes, dtype_);
    check(grads[i], sizes, dtype_);
    t.param = params[i].mutable_data_ptr();
    t.grad = data(grads[i]);
    if (masters.empty()) return;
    check(masters[i], sizes, master_);
    t.master = masters[i].mutable_data_ptr();
  }

  const Device device;

 private:
  ScalarType dtype_, master_;
};

// How parameters with these rounding offsets are rounded. An offset holds the parameter's number,
// the position of its first element in the whole tensor, and the whole tensor's strides. Step
// numbers are filled in later.
inline std::vector<Rounding> make_roundings(const Tensors& params, const Tensors& offsets) {
  std::vector<Rounding> roundings;
  if (offsets.empty()) return roundings;
  check_count(offsets, params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Sizes sizes = params[i].sizes();
    const Tensor& offset = offsets[i];
    STD_TORCH_CHECK(
        offset.is_cpu() && offset.scalar_type() == ScalarType::Long && offset.is_contiguous() &&
            offset.numel() == (int64_t)sizes.size() + 2,
        "rounding offsets are not int64 numbers on the CPU, two plus one per dimension");
    const auto* numbers = (const int64_t*)data(offset);
    const std::vector<int64_t> strides(numbers + 2, numbers + offset.numel());
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
inline ParamCodec param_codec(const Tensors& masters, const Tensors& offsets, DType dtype) {
  STD_TORCH_CHECK(offsets.empty() || (masters.empty() && dtype == DType::bf16),
                  "only bfloat16 without masters is rounded stochastically");
  if (!offsets.empty()) return ParamCodec::rounded;
  if (masters.empty()) return ParamCodec::plain;
  const ScalarType masters_type = masters[0].scalar_type();
  if (masters_type == ScalarType::Short) {
    STD_TORCH_CHECK(dtype == DType::bf16, "only bfloat16 has a remainder");
    return ParamCodec::remainder;
  }
  if (masters_type == ScalarType::Char) {
    STD_TORCH_CHECK(dtype == DType::bf16, "only bfloat16 has a remainder");
    return ParamCodec::short_remainder;
  }
  STD_TORCH_CHECK(masters_type == ScalarType::Float && dtype != DType::f32,
                  "masters are float32, of 16-bit parameters");
  return ParamCodec::master;
}

}  // namespace torchweld
