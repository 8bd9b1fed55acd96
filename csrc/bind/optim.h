// What optimizer steps for torch have in common: numbers that are tensors, and what fits a parameter.
#pragma once

#include "bind/launch.h"
#include "core/optim.h"

// Its newer version, of glibc 2.29, differs in how it sets errno alone.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif

namespace torchweld {

using Tensors = std::vector<Tensor>;

// A number that is kept as a tensor, since it changes every step.
inline double number(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "a scalar is not one number on the CPU");
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::f64,
                  "a scalar is neither float32 nor float64");
  return dtype == DType::f64 ? *(const double*)data(t) : (double)*(const float*)data(t);
}
inline double number_or(const OptionalTensor& t, double otherwise) {
  return t ? number(*t) : otherwise;
}

inline void set_number(const Tensor& t, double value) {
  if (dtype_of(t) == DType::f64) {
    *(double*)t.mutable_data_ptr() = value;
  } else {
    *(float*)t.mutable_data_ptr() = (float)value;
  }
}

inline void check_count(const Tensors& list, size_t count) {
  STD_TORCH_CHECK(list.size() == count, "lists of tensors differ in length");
}
inline void check_like(const Tensor& t, const Tensor& param, ScalarType dtype) {
  STD_TORCH_CHECK(same_sizes(t.sizes(), param.sizes()) && same_device(t, param) &&
                      t.is_contiguous() && t.scalar_type() == dtype,
                  "a tensor does not fit its parameter, or is not contiguous");
}
inline ParamCodec param_codec(const Tensors& completions, DType dtype) {
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
