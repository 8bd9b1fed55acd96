// The element types that kernels are compiled for. The two 16-bit floats are stored as bits.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TW_HD __host__ __device__ __forceinline__
#else
#define TW_HD inline
#endif

// Every library built from core/ gets its own copy of the code. If two instruction sets shared a
// weak symbol, the baseline could end up running AVX-512 code.
#ifndef TW_VARIANT
#define TW_VARIANT portable
#endif
#define TW_NAMESPACE_BEGIN \
  namespace torchweld {    \
  inline namespace TW_VARIANT {
#define TW_NAMESPACE_END \
  }                      \
  }

TW_NAMESPACE_BEGIN

enum class DType : int32_t { f32, bf16, f16, f64 };

// Storage only; cpu/ and cuda/ have their own conversions.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// The type that kernels compute in for a storage type.
template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

TW_NAMESPACE_END
