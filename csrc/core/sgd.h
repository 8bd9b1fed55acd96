// SGD with momentum, dampening and Nesterov's form, in torch's order of operations.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
};

template <bool Momentum>
struct Sgd {
  static constexpr int kMoments = Momentum ? 1 : 0;
  static constexpr bool kSigned[] = {true};

  float lr, momentum, rate, l2;
  bool nesterov;

  // The first gradient is the first momentum, undampened.
  Sgd(const SgdSettings& s, double t)
      : lr((float)s.lr),
        momentum((float)s.momentum),
        rate((float)(t == 1 ? 1 : 1 - s.dampening)),
        l2((float)s.weight_decay),
        nesterov(s.nesterov) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    if (l2 != 0) g = g + p * l2;
    if constexpr (Momentum) {
      m[0] = m[0] * momentum + g * rate;
      g = nesterov ? g + m[0] * momentum : m[0];
    }
    p = p - g * lr;
  }
};

TW_NAMESPACE_END
