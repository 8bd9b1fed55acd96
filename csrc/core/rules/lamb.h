// LAMB: Adam's step, including weight decay, scaled for each tensor.
//
//   step   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
//   then   p = p - lr ratio u,  ratio = |p| / |u| over the whole tensor
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct LambSettings {
  double beta1, beta2, eps, weight_decay;
  bool bias_correction;
  bool grad_averaging;  // scale gradients by 1 - beta1 in the first moment
};

struct Lamb {
  using Settings = LambSettings;
  static constexpr int kMoments = 2;
  static constexpr bool kSigned[] = {true, false};

  float beta1, rate1, beta2, rate2, eps, weight_decay, scale, root_scale, step_size;

  TW_HD Lamb(const LambSettings& s, const StepScalars& now)
      : beta1((float)s.beta1),
        rate1((float)(s.grad_averaging ? 1 - s.beta1 : 1)),
        beta2((float)s.beta2),
        rate2((float)(1 - s.beta2)),
        eps((float)s.eps),
        weight_decay((float)s.weight_decay),
        scale((float)(s.bias_correction ? 1 / (1 - pow(s.beta1, now.number)) : 1)),
        root_scale((float)(s.bias_correction ? 1 / sqrt(1 - pow(s.beta2, now.number)) : 1)),
        step_size((float)(now.lr * now.ratio)) {}

  template <class V>
  TW_HD V direction(V p, V g, V* m) const {
    m[0] = m[0] * beta1 + g * rate1;
    m[1] = m[1] * beta2 + g * g * rate2;
    return m[0] * scale / (square_root(m[1]) * root_scale + eps) + p * weight_decay;
  }

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    p = p - direction(p, g, m) * step_size;
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(Lamb) Measure(Lamb)
