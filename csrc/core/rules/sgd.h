// SGD with momentum, dampening and Nesterov momentum, in torch's order of operations. With a ratio
// per tensor it is LARS.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct SgdSettings {
  double momentum, dampening, weight_decay;
  bool nesterov;
};

template <bool HasMomentum>
struct SgdRule {
  using Settings = SgdSettings;
  static constexpr int kMoments = HasMomentum ? 1 : 0;
  static constexpr bool kSigned[] = {true};

  float lr, momentum, rate, l2, ratio;
  bool nesterov;

  // The first momentum is the first gradient, undampened.
  TW_HD SgdRule(const SgdSettings& s, const StepScalars& now)
      : lr((float)now.lr),
        momentum((float)s.momentum),
        rate((float)(now.number == 1 ? 1 : 1 - s.dampening)),
        l2((float)s.weight_decay),
        ratio((float)now.ratio),
        nesterov(s.nesterov) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    if (l2 != 0) g = g + p * l2;
    if (ratio != 1) g = g * ratio;
    if constexpr (HasMomentum) {
      m[0] = m[0] * momentum + g * rate;
      g = nesterov ? g + m[0] * momentum : m[0];
    }
    p = p - g * lr;
  }
};

using Sgd = SgdRule<false>;
using MomentumSgd = SgdRule<true>;

// LARS measures the norms of the parameter and of this direction, the gradient.
struct Gradient {
  using Settings = SgdSettings;
  static constexpr int kMoments = 0;
  static constexpr bool kSigned[] = {true};

  TW_HD Gradient(const SgdSettings&, const StepScalars&) {}

  template <class V>
  TW_HD V direction(V, V g, V*) const {
    return g;
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(Sgd) Step(MomentumSgd) Measure(Gradient)
