// quantize_one_bit, average_one_bit and dequantize_one_bit for torch.
#include "core/one_bit.h"

#include "bind/launch.h"

#if defined(TW_CUDA)
TW_KERNEL(quantize_one_bit, Quantize1);
#else
TW_KERNEL(one_bit_signs, Quantize1);
TW_KERNEL(one_bit_errors, Quantize1);
#endif
TW_KERNEL(dequantize_one_bit, Dequantize1);

namespace torchweld {
namespace {

DType float_of(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() != ScalarType::Double, "float64 has no kernel");
  return dtype_of(t);
}

OneBitShape shape_of(int64_t size, int64_t block) {
  STD_TORCH_CHECK(size >= 0 && block > 0 && block % 8 == 0, "block is not a multiple of 8");
  return {size, block};
}

// Checks `rows` sets of bits and scales.
void check_bits(const Tensor& bits, const Tensor& scale, const OneBitShape& shape, int64_t rows) {
  STD_TORCH_CHECK(bits.scalar_type() == ScalarType::Byte && bits.numel() == rows * shape.bytes(),
                  "bits do not fit the size");
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && same_device(scale, bits) &&
                      scale.numel() == rows * shape.blocks(),
                  "scale does not fit bits");
}

// Fills in the arguments that both sources share, and quantises.
std::tuple<Tensor, Tensor> quantize(Quantize1& a, const OptionalTensor& error, Tensor& new_error,
                                    const Tensor& like) {
  STD_TORCH_CHECK(new_error.numel() == a.shape.size && new_error.is_contiguous() &&
                      same_device(new_error, like),
                  "new_error does not fit the size");
  STD_TORCH_CHECK(!error || (error->numel() == a.shape.size && same_device(*error, like) &&
                             error->scalar_type() == new_error.scalar_type()),
                  "error does not fit the size");
  const OptionalTensor packed_error = make_contiguous(error);
  const int64_t bytes = a.shape.bytes(), blocks = a.shape.blocks(), pieces = a.shape.pieces();
  Tensor bits = empty(like, Sizes(&bytes, 1), ScalarType::Byte);
  Tensor scale = empty(like, Sizes(&blocks, 1), ScalarType::Float);
  Tensor sums = empty(like, Sizes(&pieces, 1), ScalarType::Double);
  a.error = data(packed_error);
  a.new_error = new_error.mutable_data_ptr();
  a.error_dtype = float_of(new_error);
  a.bits = (uint8_t*)bits.mutable_data_ptr();
  a.scale = (float*)scale.mutable_data_ptr();
  a.sums = (double*)sums.mutable_data_ptr();
  const int64_t of_piece = a.shape.block < kOneBitPiece ? a.shape.block : kOneBitPiece;
#if defined(TW_CUDA)
  launch(quantize_one_bit, a, like, blocks, of_piece);
#else
  launch(one_bit_signs, a, like, pieces, of_piece);
  for (int64_t block = 0; block < blocks; ++block) {
    double sum = 0;
    const int64_t end = a.shape.first_piece(block + 1);
    for (int64_t i = a.shape.first_piece(block); i < end; ++i) sum += a.sums[i];
    a.scale[block] = one_bit_scale(sum, a.shape.count(block));
  }
  launch(one_bit_errors, a, like, pieces, of_piece);
#endif
  return {bits, scale};
}

std::tuple<Tensor, Tensor> quantize_given(Tensor x_in, OptionalTensor error, Tensor new_error,
                                          int64_t block) {
  const Tensor x = make_contiguous(x_in);
  Quantize1 args{};
  args.x = data(x);
  args.dtype = float_of(x);
  args.shape = shape_of(x.numel(), block);
  return quantize(args, error, new_error, x);
}

std::tuple<Tensor, Tensor> quantize_mean(Tensor bits_in, Tensor scale_in, OptionalTensor error,
                                         Tensor new_error, int64_t size, int64_t block) {
  STD_TORCH_CHECK(bits_in.dim() == 2 && bits_in.sizes()[0] > 0,
                  "bits are not [workers, bytes] with at least one worker");
  const Tensor bits = make_contiguous(bits_in), scale = make_contiguous(scale_in);
  Quantize1 args{};
  args.dtype = DType::f32;
  args.shape = shape_of(size, block);
  args.votes = {(const uint8_t*)data(bits), (const float*)data(scale), bits.sizes()[0]};
  check_bits(bits, scale, args.shape, args.votes.workers);
  return quantize(args, error, new_error, bits);
}

Tensor dequantize(Tensor bits_in, Tensor scale_in, Shape sizes, int64_t block, ScalarType dtype) {
  const Tensor bits = make_contiguous(bits_in), scale = make_contiguous(scale_in);
  Tensor y = empty(bits, Sizes(sizes.data(), sizes.size()), dtype);
  const Dequantize1 args{(const uint8_t*)data(bits), (const float*)data(scale),
                         y.mutable_data_ptr(), shape_of(y.numel(), block), float_of(y)};
  check_bits(bits, scale, args.shape, 1);
  launch(dequantize_one_bit, args, bits, args.shape.pieces(), kOneBitPiece);
  return y;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("quantize_one_bit"), TW_BOX(&quantize_given));
  m.impl(TW_OVERLOAD("average_one_bit"), TW_BOX(&quantize_mean));
  m.impl(TW_OVERLOAD("dequantize_one_bit"), TW_BOX(&dequantize));
}

}  // namespace torchweld
