// Lion: steps by the sign of an interpolation between the momentum and the gradient.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct LionSettings {
  double beta1, beta2, weight_decay;
  bool cautious;        // step only where the step and the gradient agree
  bool cautious_decay;  // decay only where the step does not oppose the parameter
};

struct Lion {
  using Settings = LionSettings;
  static constexpr int kMoments = 1;
  static constexpr bool kSigned[] = {true};

  float lr, beta1, rate1, beta2, rate2, decay;
  bool cautious, cautious_decay;

  TW_HD Lion(const LionSettings& s, const StepScalars& now)
      : lr((float)(now.lr * now.ratio)),
        beta1((float)s.beta1),
        rate1((float)(1 - s.beta1)),
        beta2((float)s.beta2),
        rate2((float)(1 - s.beta2)),
        decay((float)(1 - now.lr * s.weight_decay)),
        cautious(s.cautious),
        cautious_decay(s.cautious_decay) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    V ahead = m[0] * beta1 + g * rate1;
    const V zero = V{}, step = zero + lr;
    if (cautious) ahead = agree(ahead, g) ? ahead : zero;
    const V decayed = p * decay;
    if (cautious_decay) {
      p = oppose(ahead, p) ? p : decayed;
    } else {
      p = decayed;
    }
    p = p - ((ahead > 0 ? step : zero) - (ahead < 0 ? step : zero));
    m[0] = m[0] * beta2 + g * rate2;
  }

  // What a cautious step measures: 1 where it moves.
  template <class V>
  TW_HD V direction(V, V g, V* m) const {
    const V ahead = m[0] * beta1 + g * rate1;
    m[0] = m[0] * beta2 + g * rate2;
    return agree(ahead, g) ? V{} + 1.0f : V{};
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(Lion) Measure(Lion)
