// quantize_8bit and dequantize_8bit for torch; the schemas are in python/torchweld/ops.
#include "bind/quant8.h"

#include "bind/launch.h"

TW_KERNEL(quantize_8bit, Quantize8);
TW_KERNEL(dequantize_8bit, Dequantize8);

namespace torchweld {
namespace {

void check_float(DType dtype) { STD_TORCH_CHECK(dtype != DType::f64, "float64 has no kernel"); }

std::tuple<Tensor, Tensor> quantize(Tensor x_in, bool is_signed) {
  check_float(dtype_of(x_in));
  const Tensor x = make_contiguous(x_in);
  const BlockRows shape(x.sizes());
  const int64_t blocks[] = {shape.rows, quant_blocks(shape.width)};
  Tensor codes = empty(x, x.sizes(), ScalarType::Byte);
  Tensor absmax = empty(x, Sizes(blocks, 2), ScalarType::Float);
  const Quantize8 args{data(x),
                       (uint8_t*)codes.mutable_data_ptr(),
                       (float*)absmax.mutable_data_ptr(),
                       shape.rows,
                       shape.width,
                       dtype_of(x),
                       is_signed};
  launch(quantize_8bit, args, x, shape.blocks(), kQuantBlock);
  return {codes, absmax};
}

Tensor dequantize(Tensor codes_in, Tensor absmax_in, bool is_signed, ScalarType dtype) {
  const BlockRows shape(codes_in.sizes());
  STD_TORCH_CHECK(codes_in.scalar_type() == ScalarType::Byte, "codes are not uint8");
  STD_TORCH_CHECK(absmax_in.scalar_type() == ScalarType::Float &&
                      same_device(absmax_in, codes_in) && shape.fits(absmax_in.sizes()),
                  "absmax does not fit codes");
  const Tensor codes = make_contiguous(codes_in), absmax = make_contiguous(absmax_in);
  Tensor y = empty(codes, codes.sizes(), dtype);
  check_float(dtype_of(y));
  const Dequantize8 args{(const uint8_t*)data(codes),
                         (const float*)data(absmax),
                         y.mutable_data_ptr(),
                         shape.rows,
                         shape.width,
                         dtype_of(y),
                         is_signed};
  launch(dequantize_8bit, args, codes, shape.blocks(), kQuantBlock);
  return y;
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("quantize_8bit"), TW_BOX(&quantize));
  m.impl(TW_OVERLOAD("dequantize_8bit"), TW_BOX(&dequantize));
}

}  // namespace torchweld
