// The transposition and the mirror of a 16-bit matrix for torch; the schemas are in
// python/torchweld/ops.
#include "core/transpose.h"

#include "bind/launch.h"

TW_KERNEL(transpose_16_bits, Transpose);
TW_KERNEL(mirror_16_bits, Mirror);

namespace torchweld {
namespace {

Tensor transpose(Tensor x_in) {
  const DType dtype = dtype_of(x_in);
  STD_TORCH_CHECK(x_in.dim() == 2 && (dtype == DType::bf16 || dtype == DType::f16),
                  "input is not a matrix of 16-bit elements");
  const Tensor x = make_contiguous(x_in);
  const int64_t rows = x.sizes()[0], columns = x.sizes()[1], sizes[] = {columns, rows};
  Tensor y = empty(x, Sizes(sizes, 2), x.scalar_type());
  const Transpose args{data(x), y.mutable_data_ptr(), rows, columns, dtype};
  const int64_t blocks = (columns + kTransposeBlock - 1) / kTransposeBlock;
  launch(transpose_16_bits, args, x, blocks, rows * kTransposeBlock);
  return y;
}

void mirror(Tensor matrix) {
  const DType dtype = dtype_of(matrix);
  const bool is_square = matrix.dim() == 2 && matrix.sizes()[0] == matrix.sizes()[1];
  STD_TORCH_CHECK(
      is_square && matrix.is_contiguous() && (dtype == DType::bf16 || dtype == DType::f16),
      "matrix is not a contiguous square of 16-bit elements");
  const int64_t size = matrix.sizes()[0];
  const Mirror args{matrix.mutable_data_ptr(), size, dtype};
  launch_queue(mirror_16_bits, args, (size + kTransposeBlock - 1) / kTransposeBlock, size * size);
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("transposed"), TW_BOX(&transpose));
  m.impl(TW_OVERLOAD("mirror_"), TW_BOX(&mirror));
}

}  // namespace torchweld
