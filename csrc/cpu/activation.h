// Turns the activation and the types of an argument into C++ types.
#pragma once

#include "core/act.h"
#include "core/dispatch.h"

TW_NAMESPACE_BEGIN

// call(T, P, activation) for every compiled combination of types.
template <class Call>
void dispatch_all(Activation activation, DType dtype, DType param_dtype, Call&& call) {
  dispatch(dtype, param_dtype,
           [&](auto t, auto p) { dispatch(activation, [&](auto act) { call(t, p, act); }); });
}

TW_NAMESPACE_END
