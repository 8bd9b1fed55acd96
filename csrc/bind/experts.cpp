// The products of a mixture's experts, and what is between them, for torch; the schemas are in
// python/torchweld/ops.
#include "core/experts.h"

#include <algorithm>
#include <limits>

#include "bind/act.h"
#include "bind/products.h"

TW_KERNEL(experts_act_forward, ExpertsAct);
TW_KERNEL(experts_act_backward, ExpertsAct);
TW_KERNEL(experts_sum, ExpertsSum);

namespace torchweld {
namespace {

// --- Products ---

// Experts with few rows would leave most of a GEMM's threads waiting, so threads take blocks. A
// block of many rows has fewer columns, so that a wave of one expert has blocks for several threads;
// a gradient of weights sums over the rows and has enough blocks.
constexpr int64_t kBlockRows = 512, kBlockColumns = 1024, kFewColumns = 256, kBlockSize = 1 << 16;

// The experts' matrices: of three dimensions one each, of two some rows each.
View of_expert(const Tensor& t, int64_t expert, const Shape& bounds) {
  const View whole = matrix_of(t, expert);
  if (t.dim() == 3) return whole;
  return whole.part(0, bounds[expert], bounds[expert + 1] - bounds[expert], t.element_size());
}

void check_operand(const Tensor& t, const Tensor& left, const Shape& bounds, bool may_convert,
                   const char* message) {
  const bool fits = t.dim() == 3 ? t.size(0) + 1 == (int64_t)bounds.size()
                                 : t.dim() == 2 && bounds.back() <= t.size(0);
  const bool is_kind = t.scalar_type() == left.scalar_type() ||
                       (may_convert && fits_beside(dtype_of(left), dtype_of(t)));
  STD_TORCH_CHECK(fits && is_kind && same_device(t, left), message);
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
        const View part = to.part(0, i, rows, out_item).part(1, j, columns, out_item);
        std::optional<View> start;
        if (add) start = part;
        if (bias) {  // a row of the bias for every row
          start = matrix_of(*bias, 0).part(0, e, 1, bias->element_size());
          start = start->part(1, j, columns, bias->element_size());
          start->size[0] = rows, start->stride[0] = 0;
        }
        blocks.push_back({part, a.part(0, i, rows, left.element_size()),
                          b.part(1, j, columns, right.element_size()), start});
      }
    }
  }
  const ScalarType dtype = left.scalar_type();
  multiply_blocks(blocks, {dtype, out.scalar_type(), dtype, right.scalar_type(),
                           bias ? dtype : out.scalar_type(), device_of(left)});
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
