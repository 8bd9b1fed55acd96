// Products in blocks, for the experts of a mixture and for matrices of 16 bits on CPUs without units
// for them. The schemas are in python/torchweld/ops.
#include "bind/products.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>

// MKL's, in torch's own builds for x86. It returns what it was, and 0 is the default.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak, visibility("default")));

namespace torchweld {

int64_t find_step(int64_t size, int64_t most) {
  int64_t parts = 1;
  while (parts * most < size) parts *= 2;
  const int64_t step = (size + parts - 1) / parts;
  return std::min(most, (step + 15) / 16 * 16);
}

namespace {

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

Tensor tensor_of(const View& view, ScalarType dtype, Device device) {
  const int32_t kind = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle result;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      view.data, 2, view.size, view.stride, 0, kind, device.type, device.index, &result));
  return Tensor(result);
}

// A factor in the GEMM's dtype. A copy keeps the order in memory: reading across it is slow.
struct Factor {
  std::optional<Tensor> copy;
  Tensor tensor;

  Factor(const View& view, ScalarType dtype, const Product& p)
      : tensor(tensor_of(view, dtype, p.device)) {
    if (dtype == p.gemm) return;
    const bool is_turned = view.stride[0] < view.stride[1];
    const View rows = is_turned ? view.transposed() : view;
    copy = empty(tensor, Sizes(rows.size, 2), p.gemm);
    torch::stable::copy_(*copy, is_turned ? tensor_of(rows, dtype, p.device) : tensor);
    const View made = matrix_of(*copy, 0);
    tensor = tensor_of(is_turned ? made.transposed() : made, p.gemm, p.device);
  }
};

void multiply_block(const Block& b, const Product& p) {
  const int64_t terms = b.left.size[1];
  const bool converts_left = p.left != p.gemm, converts_right = p.right != p.gemm;
  Tensor out = tensor_of(b.out, p.out, p.device);
  Tensor to = p.out == p.gemm ? out : empty(out, Sizes(b.out.size, 2), p.gemm);
  Tensor start = to;
  if (b.start) {
    start = tensor_of(*b.start, p.start, p.device);
    if (p.start != p.gemm || terms == 0) {
      torch::stable::copy_(to, start);
      start = to;
    }
  } else if (terms == 0) {
    torch::stable::fill_(to, 0);
  }
  const int64_t converted =
      b.out.size[0] * converts_left + b.out.size[1] * converts_right;  // a term's numbers
  const int64_t step = converted ? std::max<int64_t>(kConverted / converted, 1) : terms;
  for (int64_t first = 0; first < terms; first += step) {
    const int64_t count = std::min(step, terms - first);
    const auto factor = [&](const View& view, int axis, ScalarType dtype) {
      const int64_t item = dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
      return Factor(view.part(axis, first, count, item), dtype, p);
    };
    const Factor left = factor(b.left, 1, p.left), right = factor(b.right, 0, p.right);
    if (first == 0 && !b.start && p.alpha == 1) {
      TORCH_ERROR_CODE_CHECK(
          aoti_torch_cpu_mm_out(to.get(), left.tensor.get(), right.tensor.get()));
    } else {
      const bool is_first = first == 0;
      const double beta = is_first ? (b.start ? p.beta : 0) : 1;
      TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(to.get(), is_first ? start.get() : to.get(),
                                                      left.tensor.get(), right.tensor.get(), beta,
                                                      p.alpha));
    }
  }
  if (p.out != p.gemm) torch::stable::copy_(out, to);
}

}  // namespace

void multiply_blocks(const std::vector<Block>& blocks, const Product& product) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  // A range of one would run outside of a parallel region, where a GEMM takes several threads and
  // may add in another order.
  const int64_t range = std::max<int64_t>(blocks.size(), 2);
  torch::stable::parallel_for(0, range, 1, [&](int64_t, int64_t) {
    // torch gives MKL its number of threads when a thread first uses it, which may be in a block.
    torch::stable::parallel_for(0, 1, 1, [](int64_t, int64_t) {});
    const OneThread here;
    for (int64_t at = next++; at < (int64_t)blocks.size(); at = next++) {
      try {
        multiply_block(blocks[at], product);
      } catch (...) {  // exceptions cannot leave a thread
        failed = true;
      }
    }
  });
  STD_TORCH_CHECK(!failed, "a GEMM failed, or there is no memory for its buffers");
}

namespace {

// A side of a block; smaller blocks convert more often, and fewer leave threads without work.
constexpr int64_t kSide = 256, kSmallSide = 128, kManyBlocks = 16;

// out = alpha * left @ right + beta * start, by float32 GEMMs; start may be out, and is broadcast.
void multiply(Tensor out, Tensor left, Tensor right, OptionalTensor start, double alpha,
              double beta) {
  const int64_t dims = out.dim();
  STD_TORCH_CHECK((dims == 2 || dims == 3) && left.dim() == dims && right.dim() == dims,
                  "out, left and right are not all matrices, or all batches of them");
  for (const Tensor& t : {out, left, right, start ? *start : out}) {
    STD_TORCH_CHECK(dtype_of(t) != DType::f64 && same_device(t, out),
                    "a tensor is of float64, or on another device");
  }
  const int64_t batch = dims == 3 ? out.size(0) : 1;
  const int64_t rows = out.size(dims - 2), columns = out.size(dims - 1),
                terms = left.size(dims - 1);
  STD_TORCH_CHECK(left.size(dims - 2) == rows && right.size(dims - 2) == terms &&
                      right.size(dims - 1) == columns &&
                      (dims == 2 || (left.size(0) == batch && right.size(0) == batch)),
                  "the sizes of a product do not match");
  STD_TORCH_CHECK(!start || (same_sizes(start->sizes(), out.sizes()) && (terms > 0 || beta == 1)),
                  "start does not fit out");
  const auto count = [&](int64_t side) {
    return ((rows + side - 1) / side) * ((columns + side - 1) / side);
  };
  // Not by the batch: a matrix's bits must not depend on how many others there are.
  const int64_t side = count(kSide) < kManyBlocks ? kSmallSide : kSide;
  const int64_t height = find_step(rows, side), width = find_step(columns, side);
  const auto cut = [&](const Tensor& t, int64_t at, int64_t i, int64_t j) {
    const int64_t item = t.element_size();
    return matrix_of(t, at)
        .part(0, i, std::min(height, rows - i), item)
        .part(1, j, std::min(width, columns - j), item);
  };
  std::vector<Block> blocks;
  blocks.reserve(batch * count(kSmallSide));
  for (int64_t at = 0; at < batch; ++at) {
    const View a = matrix_of(left, at), b = matrix_of(right, at);
    for (int64_t i = 0; i < rows; i += height) {
      const View above = a.part(0, i, std::min(height, rows - i), left.element_size());
      for (int64_t j = 0; j < columns; j += width) {
        blocks.push_back({cut(out, at, i, j), above,
                          b.part(1, j, std::min(width, columns - j), right.element_size()),
                          start ? std::optional(cut(*start, at, i, j)) : std::nullopt});
      }
    }
  }
  multiply_blocks(blocks,
                  {ScalarType::Float, out.scalar_type(), left.scalar_type(), right.scalar_type(),
                   (start ? *start : out).scalar_type(), device_of(out), alpha, beta});
}

Tensor product(Tensor left, Tensor right, OptionalTensor start, double alpha, double beta) {
  const int64_t dims = left.dim();
  STD_TORCH_CHECK(dims >= 2 && right.dim() == dims, "left and right are not matrices or batches");
  Shape sizes(left.sizes().begin(), left.sizes().end());
  sizes[dims - 1] = right.size(dims - 1);
  Tensor out = empty(left, Sizes(sizes.data(), dims), left.scalar_type());
  multiply(out, left, right, start, alpha, beta);
  return out;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("multiply_"), TW_BOX(&multiply));
  m.impl(TW_OVERLOAD("product"), TW_BOX(&product));
}

}  // namespace torchweld
