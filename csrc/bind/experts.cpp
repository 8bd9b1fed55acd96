// The products of a mixture's experts, and what is between them, for torch; the schemas are in
// python/torchweld/ops.
#include "core/experts.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <limits>

#include "bind/act.h"

// MKL's, in torch's own builds for x86. It returns what it was, and 0 is the default.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak, visibility("default")));

TW_KERNEL(experts_act_forward, ExpertsAct);
TW_KERNEL(experts_act_backward, ExpertsAct);
TW_KERNEL(experts_sum, ExpertsSum);

namespace torchweld {
namespace {

// --- Products ---

// Threads take blocks of the products, each by a GEMM on one thread: experts with few rows would
// leave most of a GEMM's threads waiting. A block of many rows has fewer columns, so that a wave of
// one expert has blocks for several threads; a gradient of weights sums over the rows and has enough
// blocks. They do not depend on the number of threads, so that the bits do not.
constexpr int64_t kBlockRows = 512, kBlockColumns = 1024, kFewColumns = 256, kBlockSize = 1 << 16;

// The steps of `size`: a power of two of them, nearly equal, so that threads get as much each.
int64_t find_step(int64_t size, int64_t most) {
  int64_t parts = 1;
  while (parts * most < size) parts *= 2;
  const int64_t step = (size + parts - 1) / parts;
  return std::min(most, (step + 15) / 16 * 16);
}

// A matrix with any strides.
struct View {
  char* data;
  int64_t size[2], stride[2];

  View transposed() const { return {data, {size[1], size[0]}, {stride[1], stride[0]}}; }
  // `count` rows, or columns, from `first` on.
  View part(int axis, int64_t first, int64_t count, int64_t item) const {
    View view = *this;
    view.data += first * stride[axis] * item;
    view.size[axis] = count;
    return view;
  }
  Tensor tensor(ScalarType dtype, Device device) const {
    const int32_t kind = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    AtenTensorHandle result;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(data, 2, size, stride, 0, kind,
                                                              device.type, device.index, &result));
    return Tensor(result);
  }
};

// The experts' matrices: of three dimensions one each, of two some rows each.
View of_expert(const Tensor& t, int64_t expert, const Shape& bounds) {
  const bool stacked = t.dim() == 3;
  const View whole{(char*)t.mutable_data_ptr(),
                   {t.size(stacked), t.size(stacked + 1)},
                   {t.stride(stacked), t.stride(stacked + 1)}};
  const int64_t item = t.element_size();
  if (!stacked) return whole.part(0, bounds[expert], bounds[expert + 1] - bounds[expert], item);
  View view = whole;
  view.data += expert * t.stride(0) * item;
  return view;
}

// MKL adds in another order where it could take several threads, even if it takes one, as in a
// parallel region: on AVX-512, with more than some 700 terms.
class OneThread {
 public:
  OneThread() : before(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
  ~OneThread() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
  }

 private:
  const int before;
};

struct Block {
  View out, left, right;
  int64_t expert, column;
};

void check_operand(const Tensor& t, const Tensor& left, const Shape& bounds, bool may_convert,
                   const char* message) {
  const bool fits = t.dim() == 3 ? t.size(0) + 1 == (int64_t)bounds.size()
                                 : t.dim() == 2 && bounds.back() <= t.size(0);
  const bool is_kind = t.scalar_type() == left.scalar_type() ||
                       (may_convert && fits_beside(dtype_of(left), dtype_of(t)));
  STD_TORCH_CHECK(fits && is_kind && same_device(t, left), message);
}

// Numbers of a factor that a thread converts at a time, and of a gradient that it rounds.
constexpr int64_t kConverted = 1 << 18;

// The GEMM is of left's dtype.
void multiply_block(const Block& b, const Tensor& like, ScalarType right_dtype,
                    ScalarType out_dtype, const OptionalTensor& bias, bool add) {
  const ScalarType dtype = like.scalar_type();
  const Device device = device_of(like);
  const int64_t item = like.element_size(), terms = b.left.size[1];
  Tensor out = b.out.tensor(out_dtype, device);
  if (terms == 0) {
    if (!add) torch::stable::fill_(out, 0);
    return;
  }
  const Tensor to = out_dtype == dtype ? out : empty(like, Sizes(b.out.size, 2), dtype);
  Tensor start = to;
  if (bias) {  // a row of the bias for every row
    char* from = (char*)bias->mutable_data_ptr();
    from += (b.expert * bias->stride(0) + b.column * bias->stride(1)) * item;
    start = View{from, {b.out.size[0], b.out.size[1]}, {0, bias->stride(1)}}.tensor(dtype, device);
  }
  const bool converts = right_dtype != dtype;
  const int64_t step = converts ? std::max<int64_t>(kConverted / b.out.size[1], 1) : terms;
  const int64_t right_item = converts ? 2 : item;
  for (int64_t first = 0; first < terms; first += step) {
    const int64_t count = std::min(step, terms - first);
    const Tensor left = b.left.part(1, first, count, item).tensor(dtype, device);
    Tensor right = b.right.part(0, first, count, right_item).tensor(right_dtype, device);
    if (converts) right = as_type(right, dtype);
    if (first == 0 && !add && !bias) {
      TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(to.get(), left.get(), right.get()));
    } else {
      TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(to.get(), first ? to.get() : start.get(),
                                                      left.get(), right.get(), 1, 1));
    }
  }
  if (out_dtype != dtype) torch::stable::copy_(out, to);
}

// For each expert e: out = left @ right + bias, or out += left @ right. Matrices with three
// dimensions have one for each expert, and those with two have its rows, from bounds[e] to
// bounds[e + 1]. If out has three dimensions, left is transposed. GEMMs are of left's dtype; if it
// is float32, factors of 16 bits are converted, and gradients of 16 bits rounded, by blocks.
void multiply(Tensor out, Tensor left, Tensor right, OptionalTensor bias, Shape bounds, bool add) {
  STD_TORCH_CHECK(
      bounds.size() > 0 && bounds[0] >= 0 && std::is_sorted(bounds.begin(), bounds.end()),
      "bounds do not ascend");
  check_operand(out, left, bounds, !add && out.dim() == 3, "out does not fit left");
  check_operand(left, left, bounds, false, "left does not fit bounds");
  check_operand(right, left, bounds, right.dim() == 3, "right does not fit left");
  STD_TORCH_CHECK(!bias || (bias->dim() == 2 && bias->size(0) + 1 == (int64_t)bounds.size() &&
                            bias->size(1) == out.size(out.dim() - 1) &&
                            bias->scalar_type() == left.scalar_type() && !add),
                  "bias does not fit out");
  const int64_t out_item = out.element_size();
  std::vector<Block> blocks;
  for (int64_t e = 0; e + 1 < (int64_t)bounds.size(); ++e) {
    const View to = of_expert(out, e, bounds), b = of_expert(right, e, bounds);
    const View a =
        out.dim() == 3 ? of_expert(left, e, bounds).transposed() : of_expert(left, e, bounds);
    STD_TORCH_CHECK(a.size[0] == to.size[0] && a.size[1] == b.size[0] && b.size[1] == to.size[1],
                    "the sizes of a product do not match");
    const bool rounds = out.scalar_type() != left.scalar_type();
    const int64_t height = find_step(to.size[0], rounds ? kConverted / kBlockColumns : kBlockRows);
    int64_t width = kBlockColumns;
    if (out.dim() == 2)
      width = std::clamp(kBlockSize / std::max<int64_t>(height, 1), kFewColumns, width);
    width = find_step(to.size[1], width);
    for (int64_t i = 0; i < to.size[0]; i += height) {
      const int64_t rows = std::min(height, to.size[0] - i);
      for (int64_t j = 0; j < to.size[1]; j += width) {
        const int64_t columns = std::min(width, to.size[1] - j);
        blocks.push_back({to.part(0, i, rows, out_item).part(1, j, columns, out_item),
                          a.part(0, i, rows, left.element_size()),
                          b.part(1, j, columns, right.element_size()), e, j});
      }
    }
  }
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  // A range of one would run outside of a parallel region, where a GEMM takes several threads and
  // may add in another order.
  const int64_t range = std::max<int64_t>(blocks.size(), 2);
  torch::stable::parallel_for(0, range, 1, [&](int64_t, int64_t) {
    const OneThread here;
    for (int64_t at = next++; at < (int64_t)blocks.size(); at = next++) {
      try {
        multiply_block(blocks[at], left, right.scalar_type(), out.scalar_type(), bias, add);
      } catch (...) {  // exceptions cannot leave a thread
        failed = true;
      }
    }
  });
  STD_TORCH_CHECK(!failed, "a GEMM of the experts failed");
}

// --- Activations ---

ExpertsAct arguments(const Tensor& z, const Text& activation, const Text& approximate, bool gated,
                     const std::optional<double>& limit, double up_offset) {
  STD_TORCH_CHECK(z.dim() == 2 && z.is_contiguous() && (!gated || z.size(1) % 2 == 0),
                  "z is not a contiguous matrix of gates and ups");
  ExpertsAct a{};
  a.z = data(z), a.rows = z.size(0), a.width = z.size(1) / (gated ? 2 : 1);
  a.limit = limit ? *limit : std::numeric_limits<double>::infinity();
  a.up_offset = up_offset, a.gated = gated;
  a.activation = activation_of(activation, approximate), a.dtype = dtype_of(z);
  return a;
}

Tensor activate(Tensor z, Text activation, Text approximate, bool gated,
                std::optional<double> limit, double up_offset) {
  ExpertsAct a = arguments(z, activation, approximate, gated, limit, up_offset);
  const int64_t sizes[] = {a.rows, a.width};
  Tensor hidden = empty(z, Sizes(sizes, 2), z.scalar_type());
  a.hidden = hidden.mutable_data_ptr();
  launch(experts_act_forward, a, z, a.rows, a.width);
  return hidden;
}

// A vector with a number for each row, in the dtype of sums.
void check_vector(const OptionalTensor& t, const Tensor& rows, const char* message) {
  STD_TORCH_CHECK(
      !t || (t->dim() == 1 && t->is_contiguous() && t->size(0) == rows.size(0) &&
             t->scalar_type() == accumulate_type(dtype_of(rows)) && same_device(*t, rows)),
      message);
}

// Writes the hidden layer times scale over grad, and the gradient of z, which may be over z; returns
// the gradient of scale.
Tensor activation_grads(Tensor grad, Tensor z, Tensor grad_z, OptionalTensor scale, Text activation,
                        Text approximate, bool gated, std::optional<double> limit,
                        double up_offset) {
  ExpertsAct a = arguments(z, activation, approximate, gated, limit, up_offset);
  const int64_t sizes[] = {a.rows, a.width};
  const auto fits = [&](const Tensor& t, Sizes shape) {
    return t.is_contiguous() && t.scalar_type() == z.scalar_type() && same_device(t, z) &&
           same_sizes(t.sizes(), shape);
  };
  STD_TORCH_CHECK(fits(grad, Sizes(sizes, 2)), "grad does not fit z");
  STD_TORCH_CHECK(fits(grad_z, z.sizes()), "grad_z does not fit z");
  check_vector(scale, z, "scale does not fit z");
  Tensor grad_scale = empty(z, Sizes(sizes, 1), accumulate_type(a.dtype));
  a.grad = data(grad), a.hidden = grad.mutable_data_ptr(), a.scale = data(scale);
  a.grad_z = grad_z.mutable_data_ptr(), a.grad_scale = grad_scale.mutable_data_ptr();
  launch(experts_act_backward, a, z, a.rows, 2 * a.width);
  return grad_scale;
}

// --- Sums ---

void add_rows(Tensor sums, Tensor rows, Tensor places, OptionalTensor scale, int64_t first) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && sums.dim() == 2 &&
                      sums.is_contiguous() && sums.size(1) == rows.size(1) &&
                      sums.scalar_type() == accumulate_type(dtype_of(rows)),
                  "sums do not fit rows");
  STD_TORCH_CHECK(places.dim() == 2 && places.is_contiguous() && places.size(0) == sums.size(0) &&
                      places.scalar_type() == ScalarType::Long,
                  "places do not fit sums");
  check_vector(scale, rows, "scale does not fit rows");
  ExpertsSum a{};
  a.rows = data(rows), a.places = (const int64_t*)data(places), a.scale = data(scale);
  a.sums = sums.mutable_data_ptr();
  a.tokens = places.size(0), a.top = places.size(1), a.width = rows.size(1);
  a.first = first, a.count = rows.size(0), a.dtype = dtype_of(rows);
  launch(experts_sum, a, rows, a.tokens, a.top * a.width);
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("experts_multiply_"), TW_BOX(&multiply));
  m.impl(TW_OVERLOAD("experts_activation"), TW_BOX(&activate));
  m.impl(TW_OVERLOAD("experts_activation_backward_"), TW_BOX(&activation_grads));
  m.impl(TW_OVERLOAD("experts_sum_"), TW_BOX(&add_rows));
}

}  // namespace torchweld
