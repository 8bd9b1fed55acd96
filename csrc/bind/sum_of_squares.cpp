// The sum of the squares of gradients for torch.
#include "bind/optim.h"

TW_KERNEL(grad_squares, GradSquares);

namespace torchweld {
namespace {

// The sum of the squares of all elements, in float64.
Tensor sum_of_squares(Tensors& grads) {
  STD_TORCH_CHECK(!grads.empty(), "there is no gradient");
  std::vector<StepTensor> tensors(grads.size() + 1);
  int64_t blocks = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    Tensor& g = grads[i];
    STD_TORCH_CHECK(g.scalar_type() == grads[0].scalar_type() && same_device(g, grads[0]),
                    "gradients differ in dtype or device");
    if (!g.is_contiguous() && !is_dense(g.sizes(), g.strides())) g = make_contiguous(g);
    tensors[i].grad = data(g);
    tensors[i].width = g.numel();
    tensors[i].first_block = blocks;
    blocks += quant_blocks(g.numel());
  }
  tensors.back().first_block = blocks;
  const DType dtype = dtype_of(grads[0]);
  STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel");
  Tensor result = empty(grads[0], Sizes(&blocks, size_t{0}), ScalarType::Double);
  double& total = *(double*)result.mutable_data_ptr();
#if defined(TW_CUDA)
  const int64_t pieces = square_pieces(tensors);
  const int64_t items = std::max<int64_t>(pieces, 1);  // nothing has a sum too
#else
  const int64_t pieces = (blocks + kSquarePiece - 1) / kSquarePiece, items = pieces;
  total = 0;
#endif
  const Tensor sums = empty(grads[0], Sizes(&pieces, 1), ScalarType::Double);
  const GradSquares args{tensors.data(), (int64_t)grads.size(), (double*)sums.mutable_data_ptr(),
                         &total, dtype};
  launch(grad_squares, args, grads[0], items, kSquarePiece * kQuantBlock);
#if !defined(TW_CUDA)
  for (int64_t i = 0; i < pieces; ++i) total += args.sums[i];
#endif
  return result;
}

}  // namespace

TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("sum_of_squares"), TW_BOX(&sum_of_squares)); }

}  // namespace torchweld
