// Activations and their derivatives, and the two passes that fuse them with what stands around a GEMM.
//
//   bias_act    y = act(z),  z = x + bias;   grad_x = grad_y * act'(z),  grad_bias = its sum over rows
//   gated_act   y = act(gate) * up;   grad_gate = grad_y * up * act'(gate),
//               grad_up = grad_y * act(gate)
//
// The functions take a value V: a float, a double, or a compiler's vector of either. They are
// branch-free, with an exponential of their own, so that a loop over them is all vectors. NaN and
// infinity come out as they do from the formulas of torch's documentation.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

enum class Activation : int32_t { gelu, gelu_tanh, relu, silu };

// Tensors are contiguous, but for the distance between rows of gate and up, which is given: they
// often are the two halves of one GEMM's result.
struct BiasActForward {
  const void* x;     // [rows, width], dtype
  const void* bias;  // [width], param_dtype, or null: zeros
  void* y;           // [rows, width], dtype; may be x
  int64_t rows, width;
  Activation activation;
  DType dtype, param_dtype;
};

struct BiasActBackward {
  const void* grad_y;  // [rows, width], dtype
  const void* x;       // [rows, width], dtype
  const void* bias;    // [width], param_dtype, or null: zeros
  void* grad_x;        // [rows, width], dtype; may be grad_y
  void* grad_bias;     // [width], param_dtype, or null: not wanted
  void*
      bias_partials;  // [chunks, width], Accumulate<dtype>, see core/chunks.h; null with grad_bias
  int64_t rows, width, chunks;
  Activation activation;
  DType dtype, param_dtype;
};

struct GatedActForward {
  const void* gate;  // [rows, width], dtype, as up is
  const void* up;
  void* y;
  int64_t rows, width, gate_pitch, up_pitch;
  Activation activation;
  DType dtype;
};

struct GatedActBackward {
  const void* grad_y;  // [rows, width], dtype, as all are
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  int64_t rows, width, gate_pitch, up_pitch;
  Activation activation;
  DType dtype;
};

namespace detail {

// The float or double that a value is or consists of.
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

// A value's bits: an unsigned integer for each element.
template <class V, class Unsigned>
struct BitsOf {
  typedef Unsigned type __attribute__((vector_size(sizeof(V))));
};
template <class Unsigned>
struct BitsOf<float, Unsigned> {
  using type = Unsigned;
};
template <class Unsigned>
struct BitsOf<double, Unsigned> {
  using type = Unsigned;
};

template <class To, class From>
TW_HD To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From), "only bits of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Polynomials, the coefficients from the lowest.

// 2^x for |x| <= 1/2, from interpolation at Chebyshev nodes: relative errors below 2^-23 and 2^-63.
template <class A>
struct PowerOfTwo;
template <>
struct PowerOfTwo<float> {
  using Unsigned = uint32_t;
  static constexpr int kMantissaBits = 23, kLowest = -126, kTerms = 6;
  static TW_HD float term(int i) {
    constexpr float kTerm[kTerms] = {1.000000075f,   0.693147188f,    0.2402210749f,
                                     0.05550357114f, 0.009676031918f, 0.001339086336f};
    return kTerm[i];
  }
};
template <>
struct PowerOfTwo<double> {
  using Unsigned = uint64_t;
  static constexpr int kMantissaBits = 52, kLowest = -1022, kTerms = 13;
  static TW_HD double term(int i) {
    constexpr double kTerm[kTerms] = {1.0,
                                      0.6931471805599453084,
                                      0.2402265069591007123,
                                      0.05550410866482169899,
                                      0.009618129107628483054,
                                      0.001333355814639035277,
                                      0.0001540353039336275529,
                                      1.525273385629346642e-05,
                                      1.321548681599997697e-06,
                                      1.017805119296064896e-07,
                                      7.054894386348348044e-09,
                                      4.456675341049205878e-10,
                                      2.573356830875689124e-11};
    return kTerm[i];
  }
};

// Phi(-t) * exp(t^2 / 2) for t >= 0, where Phi is the normal distribution's integral, in
// 1 / (1 + kScale * t). For float minimax: the relative error is below 2^-23 up to t = 4.5, and from
// there, where Phi is below 2^-18, below 2^-13. For double interpolated: below 2^-57.
template <class A>
struct Tail;
template <>
struct Tail<float> {
  static constexpr float kScale = 0.34f;
  static constexpr int kTerms = 8;
  static TW_HD float term(int i) {
    constexpr float kTerm[kTerms] = {-2.58259507e-05f, 0.136518964f, 0.126394262f, 0.167822206f,
                                     -0.0516554776f,   0.286127454f, -0.21284831f, 0.0476667729f};
    return kTerm[i];
  }
};
template <>
struct Tail<double> {
  static constexpr double kScale = 0.2;
  static constexpr int kTerms = 23;
  static TW_HD double term(int i) {
    constexpr double kTerm[kTerms] = {
        -1.16047532042302916e-12, 0.079788456164529829,   0.0797884532293032309,
        0.0765969776728132152,    0.0702129673059672994,  0.0610316651440583753,
        0.0497093472814275113,    0.0380995552185962995,  0.0229186653891850109,
        0.0267118478829667479,    -0.0336194570489528936, 0.11776021446162491,
        -0.275739887990492654,    0.529805592351347996,   -0.842844664474966584,
        1.07742108749485246,      -1.10020605775562673,   0.877216057225019578,
        -0.526472827209655037,    0.227664964275110735,   -0.0667579112865781397,
        0.0118871131116068994,    -0.00097215844097758881};
    return kTerm[i];
  }
};

template <class Polynomial, class V>
TW_HD V evaluate(V x) {
  V sum = V{} + Polynomial::term(Polynomial::kTerms - 1);
#pragma GCC unroll 32
  for (int i = Polynomial::kTerms - 2; i >= 0; --i) sum = sum * x + Polynomial::term(i);
  return sum;
}

template <class V>
TW_HD V magnitude(V x) {
  using Unsigned = typename PowerOfTwo<Element<V>>::Unsigned;
  using Bits = typename BitsOf<V, Unsigned>::type;
  return reinterpret<V>(reinterpret<Bits>(x) & (~(Unsigned)0 >> 1));
}

}  // namespace detail

// 2^x for x <= 0; 0 where that would be subnormal.
template <class V>
TW_HD V power_of_two(V x) {
  using A = detail::Element<V>;
  using P = detail::PowerOfTwo<A>;
  using Bits = typename detail::BitsOf<V, typename P::Unsigned>::type;
  // Added to a number it leaves the nearest integer in the last bits of the sum, from where that is
  // shifted to the exponent's place; the magic number's own bits go over the edge.
  constexpr A kMagic = (A)1.5 * (A)((typename P::Unsigned)1 << P::kMantissaBits);
  const V shifted = x + kMagic;
  const V fraction = detail::evaluate<P>(x - (shifted - kMagic));
  const Bits exponent = detail::reinterpret<Bits>(shifted) << P::kMantissaBits;
  const V power = detail::reinterpret<V>(detail::reinterpret<Bits>(fraction) + exponent);
  return x < (A)P::kLowest ? V{} : power;
}

constexpr double kLog2E = 1.4426950408889634074;

// 1 / (1 + exp(-x)) and its derivative, s * (1 - s). The exponential is that of a negative number:
// it cannot overflow, and nothing cancels on either side.
template <class V>
struct Sigmoid {
  V value, slope;
};
template <class V>
TW_HD Sigmoid<V> sigmoid(V x) {
  using A = detail::Element<V>;
  const V e = power_of_two(detail::magnitude(x) * (A)-kLog2E);
  const V s = 1 / (1 + e);
  return {x < 0 ? e * s : s, e * s * s};
}

// exp(-z^2 / 2).
template <class V>
TW_HD V gaussian(V z) {
  using A = detail::Element<V>;
  return power_of_two(z * z * (A)(-0.5 * kLog2E));
}

// The normal distribution's integral, from the gaussian of z. Below zero nothing cancels, which
// (1 + erf(z / sqrt(2))) / 2 does there.
template <class V>
TW_HD V normal_integral(V z, V gaussian) {
  using T = detail::Tail<detail::Element<V>>;
  const V tail = gaussian * detail::evaluate<T>(1 / (1 + T::kScale * detail::magnitude(z)));
  return z < 0 ? tail : 1 - tail;
}

// An activation has value(z), and gradient(z, grad): grad * d value / dz.

struct Gelu {
  template <class V>
  static TW_HD V value(V z) {
    return z * normal_integral(z, gaussian(z));
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    using A = detail::Element<V>;
    const V g = gaussian(z);
    return grad * (normal_integral(z, g) + z * g * (A)0.39894228040143267794);  // 1 / sqrt(2 pi)
  }
};

// z / 2 * (1 + tanh(u)) = z * sigmoid(2u), u = sqrt(2 / pi) * (z + 0.044715 z^3).
struct GeluTanh {
  template <class V>
  static TW_HD V value(V z) {
    return z * gate(z).value;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    using A = detail::Element<V>;
    const Sigmoid<V> s = gate(z);
    return grad * (s.value + z * s.slope * ((A)kTwice + (A)(3 * kTwice * kCubic) * z * z));
  }

 private:
  static constexpr double kTwice = 2 * 0.79788456080286535588, kCubic = 0.044715;
  template <class V>
  static TW_HD Sigmoid<V> gate(V z) {
    using A = detail::Element<V>;
    return sigmoid(z * ((A)kTwice + (A)(kTwice * kCubic) * z * z));
  }
};

struct Relu {
  template <class V>
  static TW_HD V value(V z) {
    return z < 0 ? V{} : z;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    return z <= 0 ? V{} : grad;
  }
};

struct Silu {
  template <class V>
  static TW_HD V value(V z) {
    return z * sigmoid(z).value;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    const Sigmoid<V> s = sigmoid(z);
    return grad * (s.value + z * s.slope);
  }
};

// call(Gelu{}) and so on.
template <class Call>
inline void dispatch(Activation activation, Call&& call) {
  switch (activation) {
    case Activation::gelu:
      return call(Gelu{});
    case Activation::gelu_tanh:
      return call(GeluTanh{});
    case Activation::relu:
      return call(Relu{});
    case Activation::silu:
      return call(Silu{});
  }
}

TW_NAMESPACE_END
