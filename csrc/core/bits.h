// The bits of floats, doubles and compiler vectors of them, as integers of the same element width.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// The element type of a value or vector: float or double.
template <class V>
struct ElementOf {
  using type = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V&>()[0])>>;
};
template <>
struct ElementOf<float> {
  using type = float;
};
template <>
struct ElementOf<double> {
  using type = double;
};
template <class V>
using Element = typename ElementOf<V>::type;

// The integer types that hold a value's bits. Comparing two vectors gives Signed, with all bits set
// for true.
template <class V>
struct BitsOf {
  typedef typename BitsOf<Element<V>>::Signed Signed __attribute__((vector_size(sizeof(V))));
  typedef typename BitsOf<Element<V>>::Unsigned Unsigned __attribute__((vector_size(sizeof(V))));
};
template <>
struct BitsOf<float> {
  using Signed = int32_t;
  using Unsigned = uint32_t;
};
template <>
struct BitsOf<double> {
  using Signed = int64_t;
  using Unsigned = uint64_t;
};

template <class To, class From>
TW_HD To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From), "only bits of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
TW_HD V magnitude(V x) {
  using Bits = typename BitsOf<V>::Unsigned;
  using Word = typename BitsOf<Element<V>>::Unsigned;
  return reinterpret<V>(reinterpret<Bits>(x) & (~(Word)0 >> 1));
}

TW_NAMESPACE_END
