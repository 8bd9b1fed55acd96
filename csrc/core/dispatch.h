// From the DType of an argument to a C++ type, in one place. A library compiles the types that it
// serves: double lives in the CPU's baseline alone (TW_BASELINE), where only gradcheck needs it.
#pragma once

#include "core/dtype.h"

// What a kernel library exports: found by name, so no C++ mangling.
#define TW_EXPORT extern "C" __attribute__((visibility("default")))

TW_NAMESPACE_BEGIN

template <class T>
struct Type {
  using type = T;
};

// call(Type<P>{}) with P that of a tensor which may be float beside a 16-bit T: `dtype` says.
template <class T, class Call>
inline void dispatch_beside(DType dtype, Call&& call) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == DType::f32) return call(Type<float>{});
  }
  call(Type<T>{});
}

// call(Type<T>{}, Type<P>{}) with T the tensors' type and P the parameters': the same, or float
// under a 16-bit T. Calls nothing for a type that is not compiled.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, Call&& call) {
  const auto with = [&](auto t) {
    dispatch_beside<typename decltype(t)::type>(param_dtype, [&](auto p) { call(t, p); });
  };
  switch (dtype) {
    case DType::f32:
      return with(Type<float>{});
    case DType::bf16:
      return with(Type<BFloat16>{});
    case DType::f16:
      return with(Type<Half>{});
    case DType::f64:
#if defined(TW_BASELINE)
      return with(Type<double>{});
#else
      return;
#endif
  }
}

// call(Type<T>{}, Type<P>{}, Type<S>{}) with S that of the residual stream beside the tensors.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, DType stream_dtype, Call&& call) {
  dispatch(dtype, param_dtype, [&](auto t, auto p) {
    dispatch_beside<typename decltype(t)::type>(stream_dtype, [&](auto s) { call(t, p, s); });
  });
}

// call(Type<T>{}, Type<P>{}, Type<S>{}, Type<Y>{}) with Y that of a result beside the tensors.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, DType stream_dtype, DType y_dtype,
                     Call&& call) {
  dispatch(dtype, param_dtype, stream_dtype, [&](auto t, auto p, auto s) {
    dispatch_beside<typename decltype(t)::type>(y_dtype, [&](auto y) { call(t, p, s, y); });
  });
}

TW_NAMESPACE_END
