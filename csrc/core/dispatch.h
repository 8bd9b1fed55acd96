// Turns the DType of an argument into a C++ type, in one place. A library compiles only the types
// that it supports: double exists only in the CPU's baseline (TW_BASELINE), for gradcheck. It has
// only double if kernels of another instruction set serve the other types (TW_DOUBLE_ONLY).
#pragma once

#include "core/dtype.h"

// A kernel library's exports. They are found by name, so C++ must not mangle them.
#define TW_EXPORT extern "C" __attribute__((visibility("default")))

TW_NAMESPACE_BEGIN

template <class T>
struct Type {
  using type = T;
};

// call(Type<P>{}), where P is the type of `dtype`: T, or float if T has 16 bits.
template <class T, class Call>
inline void dispatch_beside(DType dtype, Call&& call) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::f32) return call(Type<float>{});
  }
  call(Type<T>{});
}

// call(Type<T>{}, Type<P>{}), where T is the tensors' type and P the parameters': T itself, or
// float if T has 16 bits. Does nothing for a type that is not compiled.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, Call&& call) {
  const auto with = [&](auto t) {
    dispatch_beside<typename decltype(t)::type>(param_dtype, [&](auto p) { call(t, p); });
  };
  switch (dtype) {
#if !defined(TW_DOUBLE_ONLY)
    case DType::f32:
      return with(Type<float>{});
    case DType::bf16:
      return with(Type<BFloat16>{});
    case DType::f16:
      return with(Type<Half>{});
#endif
#if defined(TW_BASELINE)
    case DType::f64:
      return with(Type<double>{});
#endif
    default:
      return;
  }
}

// call(Type<T>{}, Type<P>{}, Type<S>{}), where S is also the residual stream's type.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, DType stream_dtype, Call&& call) {
  dispatch(dtype, param_dtype, [&](auto t, auto p) {
    dispatch_beside<typename decltype(t)::type>(stream_dtype, [&](auto s) { call(t, p, s); });
  });
}

// call(Type<T>{}, Type<P>{}, Type<S>{}, Type<Y>{}), where Y is also a result's type.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, DType stream_dtype, DType y_dtype,
                     Call&& call) {
  dispatch(dtype, param_dtype, stream_dtype, [&](auto t, auto p, auto s) {
    dispatch_beside<typename decltype(t)::type>(y_dtype, [&](auto y) { call(t, p, s, y); });
  });
}

TW_NAMESPACE_END
