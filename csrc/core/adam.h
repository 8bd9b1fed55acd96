// Adam and AdamW, with torch's order of operations: decay, moments, then the update.
//
// A rule works on any type with arithmetic and square_root(): floats or vectors of floats.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdamSettings {
  double beta1, beta2, eps, weight_decay;
  bool decoupled;  // AdamW's weight decay; otherwise it is added to the gradient
};

template <bool Amsgrad>
struct Adam {
  using Settings = AdamSettings;
  static constexpr int kMoments = Amsgrad ? 3 : 2;
  static constexpr bool kSigned[] = {true, false, false};

  float rate1, rate2, beta2, eps, step_size, root_scale, decay, l2;

  TW_HD Adam(const AdamSettings& s, const StepScalars& now)
      : rate1((float)(1 - s.beta1)),
        rate2((float)(1 - s.beta2)),
        beta2((float)s.beta2),
        eps((float)s.eps),
        step_size((float)(now.lr / (1 - pow(s.beta1, now.number)))),
        root_scale((float)(1 / sqrt(1 - pow(s.beta2, now.number)))),
        decay((float)(s.decoupled ? 1 - now.lr * s.weight_decay : 1)),
        l2((float)(s.decoupled ? 0 : s.weight_decay)) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    if (l2 != 0) g = g + p * l2;
    p = p * decay;
    m[0] = m[0] + (g - m[0]) * rate1;
    m[1] = m[1] * beta2 + g * g * rate2;
    if constexpr (Amsgrad) m[2] = m[1] <= m[2] ? m[2] : m[1];
    p = p - m[0] / (square_root(m[kMoments - 1]) * root_scale + eps) * step_size;
  }
};

TW_NAMESPACE_END
