// The parts of torch's stable ABI that a binding needs.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if !defined(TW_CUDA)
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/dtype.h"

namespace torchweld {

// A string argument. torch's conversion to std::string leaks one for each call, and the heap grows
// without bound: each of these small blocks keeps a hole from being merged with its neighbours.
struct Text : std::string {
  using std::string::string;
};

}  // namespace torchweld

template <>
struct torch::stable::detail::ToImpl<torchweld::Text> {
  static torchweld::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    const char* characters;
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &characters));
    torchweld::Text text(characters, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

template <>
struct torch::stable::detail::FromImpl<torchweld::Text>
    : torch::stable::detail::FromImpl<std::string> {};

namespace torchweld {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;
using OptionalShape = std::optional<Shape>;

inline DType dtype_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::Double:
      return DType::f64;
    default:
      STD_TORCH_CHECK(false, "dtype is not one of float32, bfloat16, float16, float64");
  }
}
inline DType dtype_of(const Tensor& t) { return dtype_of(t.scalar_type()); }

// Whether kernels accept this dtype with `dtype`: the same one, or float32 with 16 bits.
inline bool fits_beside(DType kind, DType dtype) {
  return kind == dtype || (kind == DType::f32 && dtype != DType::f64);
}

inline ScalarType accumulate_type(DType dtype) {
  return dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
}

// A norm's parameter may also have 16 bits with float32 input. Kernels then read it as float32.
inline bool is_parameter_beside(DType kind, DType dtype) {
  return fits_beside(kind, dtype) || (dtype == DType::f32 && kind != DType::f64);
}
inline ScalarType parameter_type(ScalarType kind, DType dtype) {
  return dtype == DType::f32 ? ScalarType::Float : kind;
}

// torch's default eps: the machine epsilon of the type that the dtype is computed in.
inline double default_epsilon(DType dtype) { return dtype == DType::f64 ? 0x1p-52 : 0x1p-23; }

struct Device {
  int32_t type, index;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};
inline Device device_of(const Tensor& t) {
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return {type, t.get_device_index()};
}

// TORCHWELD_POISON=1 fills new tensors with NaN, or with an arbitrary byte, which reveals elements
// that a kernel leaves unwritten.
inline const bool poison = std::getenv("TORCHWELD_POISON") != nullptr;

#if !defined(TW_CUDA)
// Asks for huge pages for large results. The first write to each page of a fresh block faults; with
// 2 MiB pages a copy of 64 MiB into a fresh block takes 9 ms, with 4 KiB pages 24 ms. Only whole
// pages of the block are advised, so it occupies no more memory.
inline void advise_huge_pages([[maybe_unused]] const Tensor& result) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kPage = 2 << 20, kFrom = 2 * kPage;
  const int64_t bytes = result.numel() * result.element_size();
  if (bytes < kFrom) return;
  const int64_t begin = (int64_t)result.mutable_data_ptr();
  const int64_t first = (begin + kPage - 1) / kPage * kPage, end = (begin + bytes) / kPage * kPage;
  madvise((void*)first, end - first, MADV_HUGEPAGE);  // may be refused
#endif
}
#endif

// The stable ABI returns a code only. Programs look for the sentence of torch's allocator.
inline void say_out_of_memory(Device device, int64_t bytes) {
  STD_TORCH_CHECK(device.type != aoti_torch_device_type_cpu(),
                  "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                  " bytes. Error code 12 (Cannot allocate memory)");
}

// A copy of a tensor that one of torch's functions makes, which fails only for lack of memory.
template <class Function>
Tensor copy_by(Function copy, const Tensor& t) {
  try {
    return copy(t);
  } catch (const std::exception&) {
    say_out_of_memory(device_of(t), t.numel() * t.element_size());
    throw;
  }
}
inline Tensor copy_contiguous(const Tensor& t) {
  return copy_by([](const Tensor& x) { return torch::stable::contiguous(x); }, t);
}

// A new contiguous tensor on the device of `like`.
inline Tensor empty(const Tensor& like, Sizes sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = stride;
  const Device device = device_of(like);
  const int32_t kind = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle result;
  const auto error = aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), kind,
                                              device.type, device.index, &result);
  if (error) say_out_of_memory(device, stride * (int64_t)aoti_torch_dtype_element_size(kind));
  TORCH_ERROR_CODE_CHECK(error);
  Tensor tensor(result);
#if !defined(TW_CUDA)
  if (device.type == aoti_torch_device_type_cpu()) advise_huge_pages(tensor);
#endif
  if (poison) torch::stable::fill_(tensor, dtype == ScalarType::Byte ? 0xa5 : std::nan(""));
  return tensor;
}

// An empty tensor, which an op returns in place of an unwanted result.
inline Tensor nothing(const Tensor& like) {
  const int64_t none[] = {0};
  return empty(like, Sizes(none, 1), like.scalar_type());
}

inline Tensor as_type(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  return copy_by([&](const Tensor& x) { return torch::stable::to(x, dtype); }, t);
}

// The tensor itself if it is contiguous, else a contiguous copy.
inline Tensor make_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : copy_contiguous(t);
}
inline OptionalTensor make_contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(make_contiguous(*t)) : std::nullopt;
}

// A norm's parameter, in the dtype that kernels read for input of `dtype`.
inline Tensor parameter(const Tensor& p, DType dtype) {
  return make_contiguous(as_type(p, parameter_type(p.scalar_type(), dtype)));
}
inline OptionalTensor parameter(const OptionalTensor& p, DType dtype) {
  return p ? OptionalTensor(parameter(*p, dtype)) : std::nullopt;
}

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const OptionalTensor& t) { return t ? data(*t) : nullptr; }

// Raises for a tensor whose storage was freed, as FSDP leaves a parameter that it has resharded.
inline void check_memory(const Tensor& t) {
  int64_t bytes = 1;
  aoti_torch_get_storage_size(t.get(), &bytes);
  STD_TORCH_CHECK(
      bytes > 0 || t.numel() == 0,
      "The tensor has a non-zero number of elements, but its data is not allocated: its "
      "storage was freed");
}
inline void check_memory(const OptionalTensor& t) {
  if (t) check_memory(*t);
}
inline void check_memory(const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) check_memory(t);
}
template <class Other>
void check_memory(const Other&) {}

inline bool same_sizes(Sizes a, Sizes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

inline bool same_device(const Tensor& a, const Tensor& b) { return device_of(a) == device_of(b); }

}  // namespace torchweld
