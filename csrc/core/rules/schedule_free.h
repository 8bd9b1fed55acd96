// Schedule-free AdamW. The parameter is y, the point at which gradients are taken, and its companion
// z is the iterate of AdamW. The average x of z lies beyond y, seen from z, and is not stored.
//
//   d = g / (sqrt(v / (1 - beta2^k)) + eps) + weight_decay y
//   y = y + (z - y) weight - lr (1 - beta1 (1 - weight)) d
//   z = z - lr d
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct ScheduleFreeSettings {
  double beta1, beta2, eps, weight_decay;
  double weight;  // of z in the average
  double number;  // k, the number of the step of all parameters, from 1
};

struct ScheduleFree {
  using Settings = ScheduleFreeSettings;
  static constexpr int kMoments = 1;
  static constexpr bool kSigned[] = {false};
  static constexpr bool kIterates = true;

  float beta2, rate2, eps, weight_decay, root_scale, weight, of_y, lr;

  TW_HD ScheduleFree(const ScheduleFreeSettings& s, const StepScalars& now)
      : beta2((float)s.beta2),
        rate2((float)(1 - s.beta2)),
        eps((float)s.eps),
        weight_decay((float)s.weight_decay),
        root_scale((float)(1 / sqrt(1 - pow(s.beta2, s.number)))),
        weight((float)s.weight),
        of_y((float)(now.lr * (1 - s.beta1 * (1 - s.weight)))),
        lr((float)now.lr) {}

  template <class V>
  TW_HD void operator()(V& y, V g, V* m, V& z) const {
    m[0] = m[0] * beta2 + g * g * rate2;
    const V d = g / (square_root(m[0]) * root_scale + eps) + y * weight_decay;
    y = y + (z - y) * weight - d * of_y;
    z = z - d * lr;
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(ScheduleFree)
