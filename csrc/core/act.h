// Activations and their derivatives, and the two passes that fuse them with the work around a GEMM.
//
//   bias_act    y = act(z),  z = x + bias;   grad_x = grad_y * act'(z),  grad_bias = its sum over rows
//   gated_act   y = act(gate) * up;   grad_gate = grad_y * up * act'(gate),
//               grad_up = grad_y * act(gate)
//
// The functions take a value V: a float, a double, or a compiler's vector of either. They are
// branch-free and use core/exp.h, so that loops over them vectorise. NaN and infinity give what the
// formulas in torch's documentation give.
#pragma once

#include "core/exp.h"

TW_NAMESPACE_BEGIN

// Every activation: the type below that computes it, and its name in Python. A new activation needs
// a line here and a type.
#define TW_ACTIVATIONS(X)            \
  X(Gelu, "gelu", "none")            \
  X(GeluTanh, "gelu", "tanh")        \
  X(Relu, "relu", "none")            \
  X(Silu, "silu", "none")            \
  X(QuickGelu, "quick_gelu", "none") \
  X(Relu2, "relu2", "none")          \
  X(Sigmoid, "sigmoid", "none")      \
  X(Tanh, "tanh", "none")            \
  X(Identity, "identity", "none")

#define TW_ENUMERATOR(Act, activation, approximate) Act,
enum class Activation : int32_t { TW_ACTIVATIONS(TW_ENUMERATOR) };
#undef TW_ENUMERATOR

// Tensors are contiguous, except gate and up. These are often the two halves of one GEMM's result,
// so the distance between their rows is given.
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
  const void* gate;  // [rows, width], dtype, like up
  const void* up;
  void* y;
  int64_t rows, width, gate_pitch, up_pitch;
  Activation activation;
  DType dtype;
};

struct GatedActBackward {
  const void* grad_y;  // [rows, width], dtype, like all others
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  int64_t rows, width, gate_pitch, up_pitch;
  Activation activation;
  DType dtype;
};

namespace detail {

// Phi(-t) * exp(t^2 / 2) for t >= 0, as a polynomial in 1 / (1 + kScale * t). Phi is the normal
// distribution's integral. The float polynomial is minimax. Its relative error is below 2^-23 up to
// t = 4.5; beyond that Phi is below 2^-18, and the error below 2^-13. The double polynomial is
// interpolated, with an error below 2^-57.
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

// (tanh(t) / t - 1) / t^2 for |t| <= 1/2, as a polynomial in t^2, interpolated. The relative errors
// of the resulting tanh are below 2^-24 and 2^-61.
template <class A>
struct TanhNearZero;
template <>
struct TanhNearZero<float> {
  static constexpr int kTerms = 4;
  static TW_HD float term(int i) {
    constexpr float kTerm[kTerms] = {-0.3333331108f, 0.1333047649f, -0.05338711064f,
                                     0.01798874441f};
    return kTerm[i];
  }
};
template <>
struct TanhNearZero<double> {
  static constexpr int kTerms = 11;
  static TW_HD double term(int i) {
    constexpr double kTerm[kTerms] = {
        -0.3333333333333333,    0.1333333333333323,    -0.053968253968089755,
        0.0218694885258676,     -0.008863235198659135, 0.0035921217969498704,
        -0.0014557608138655873, 0.0005894667419101905, -0.00023635364294136244,
        8.819580305745065e-05,  -2.295330465333733e-05};
    return kTerm[i];
  }
};

}  // namespace detail

// 1 / (1 + exp(-x)) and its derivative, s * (1 - s). The argument of exp is never positive, so exp
// cannot overflow, and neither branch cancels.
template <class V>
struct Logistic {
  V value, slope;
};
template <class V>
TW_HD Logistic<V> logistic(V x) {
  const V e = exp_nonpositive(-magnitude(x));
  const V s = 1 / (1 + e);
  return {x < 0 ? e * s : s, e * s * s};
}

// exp(-z^2 / 2), or 0 where its tail would be subnormal: a GEMM on a CPU takes many times as long for
// such numbers.
template <class V>
TW_HD V gaussian(V z) {
  using A = Element<V>;
  const V exponent = z * z * (A)-0.5;
  const V result = exp_nonpositive(exponent);
  return exponent < detail::Exp<A>::kLowest + 5 ? V{} : result;
}

// The normal distribution's integral, from the gaussian of z. Unlike (1 + erf(z / sqrt(2))) / 2,
// this does not cancel below zero.
template <class V>
TW_HD V normal_integral(V z, V gaussian) {
  using T = detail::Tail<Element<V>>;
  const V tail = gaussian * detail::evaluate<T>(1 / (1 + T::kScale * magnitude(z)));
  return z < 0 ? tail : 1 - tail;
}

// An activation has value(z), and gradient(z, grad), which is grad * d value / dz.

struct Gelu {
  template <class V>
  static TW_HD V value(V z) {
    return z * normal_integral(z, gaussian(z));
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    using A = Element<V>;
    const V g = gaussian(z);
    return grad * (normal_integral(z, g) + z * g * (A)0.39894228040143267794);  // 1 / sqrt(2 pi)
  }
};

// z / 2 * (1 + tanh(u)) = z * logistic(2u), u = sqrt(2 / pi) * (z + 0.044715 z^3).
struct GeluTanh {
  template <class V>
  static TW_HD V value(V z) {
    return z * gate(z).value;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    using A = Element<V>;
    const Logistic<V> s = gate(z);
    return grad * (s.value + z * s.slope * ((A)kTwice + (A)(3 * kTwice * kCubic) * z * z));
  }

 private:
  static constexpr double kTwice = 2 * 0.79788456080286535588, kCubic = 0.044715;
  template <class V>
  static TW_HD Logistic<V> gate(V z) {
    using A = Element<V>;
    return logistic(z * ((A)kTwice + (A)(kTwice * kCubic) * z * z));
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

struct Relu2 {
  template <class V>
  static TW_HD V value(V z) {
    const V positive = Relu::value(z);
    return positive * positive;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    return Relu::gradient(z, grad * (z + z));
  }
};

// z * logistic(c * z). The gradient multiplies the slope by c, because c * z may overflow.
template <int Thousandths>
struct Swish {
  template <class V>
  static TW_HD V value(V z) {
    return z * gate(z).value;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    const Logistic<V> s = gate(z);
    return grad * (s.value + z * (s.slope * (Element<V>)kScale));
  }

 private:
  static constexpr double kScale = Thousandths / 1000.0;
  template <class V>
  static TW_HD Logistic<V> gate(V z) {
    return logistic(z * (Element<V>)kScale);
  }
};

using Silu = Swish<1000>;
using QuickGelu = Swish<1702>;

struct Sigmoid {
  template <class V>
  static TW_HD V value(V z) {
    return logistic(z).value;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    return grad * logistic(z).slope;
  }
};

// The quotient cancels near zero. The polynomial does not, and NaN takes its branch.
struct Tanh {
  template <class V>
  static TW_HD V value(V z) {
    using A = Element<V>;
    const V size = magnitude(z), e = exp_nonpositive(-2 * size);
    const V far = (1 - e) / (1 + e);
    const V near = z + z * (z * z) * detail::evaluate<detail::TanhNearZero<A>>(z * z);
    return size >= (A)0.5 ? (z < 0 ? -far : far) : near;
  }
  template <class V>
  static TW_HD V gradient(V z, V grad) {
    return 4 * Sigmoid::gradient(2 * z, grad);
  }
};

struct Identity {
  template <class V>
  static TW_HD V value(V z) {
    return z;
  }
  template <class V>
  static TW_HD V gradient(V, V grad) {
    return grad;
  }
};

// call(Gelu{}) and so on.
template <class Call>
inline void dispatch(Activation activation, Call&& call) {
  switch (activation) {
#define TW_CASE(Act, activation, approximate) \
  case Activation::Act:                       \
    return call(Act{});
    TW_ACTIVATIONS(TW_CASE)
#undef TW_CASE
  }
}

TW_NAMESPACE_END
