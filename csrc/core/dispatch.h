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

// call(Type<T>{}, Type<P>{}) with T the tensors' type and P the parameters': the same, or float
// under a 16-bit T. Calls nothing for a type that is not compiled.
template <class Call>
inline void dispatch(DType dtype, DType param_dtype, Call&& call) {
  const bool float_params = param_dtype == DType::f32;
  switch (dtype) {
    case DType::f32:
      return call(Type<float>{}, Type<float>{});
    case DType::bf16:
      return float_params ? call(Type<BFloat16>{}, Type<float>{})
                          : call(Type<BFloat16>{}, Type<BFloat16>{});
    case DType::f16:
      return float_params ? call(Type<Half>{}, Type<float>{}) : call(Type<Half>{}, Type<Half>{});
    case DType::f64:
#if defined(TW_BASELINE)
      return call(Type<double>{}, Type<double>{});
#else
      return;
#endif
  }
}

TW_NAMESPACE_END
