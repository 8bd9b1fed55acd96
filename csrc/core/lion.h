// Lion: steps by the sign of an interpolation between the momentum and the gradient.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct LionSettings {
  double beta1, beta2, weight_decay;
};

struct Lion {
  using Settings = LionSettings;
  static constexpr int kMoments = 1;
  static constexpr bool kSigned[] = {true};

  float lr, beta1, rate1, beta2, rate2, decay;

  TW_HD Lion(const LionSettings& s, const StepScalars& now)
      : lr((float)now.lr),
        beta1((float)s.beta1),
        rate1((float)(1 - s.beta1)),
        beta2((float)s.beta2),
        rate2((float)(1 - s.beta2)),
        decay((float)(1 - now.lr * s.weight_decay)) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    const V ahead = m[0] * beta1 + g * rate1;
    const V zero = V{}, step = zero + lr;
    p = p * decay - ((ahead > 0 ? step : zero) - (ahead < 0 ? step : zero));
    m[0] = m[0] * beta2 + g * rate2;
  }
};

TW_NAMESPACE_END
