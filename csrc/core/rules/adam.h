// Adam and AdamW, with torch's order of operations: decay, moments, then the update.
//
// A rule works on any type with arithmetic and square_root(): floats or vectors of floats.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdamSettings {
  double beta1, beta2, eps, weight_decay;
  bool decoupled_weight_decay;  // AdamW's weight decay; otherwise it is added to the gradient
  bool cautious;                // step only where the first moment and the gradient agree
  bool cautious_decay;          // decay only where the step does not oppose the parameter
};

template <bool HasLargest>
struct AdamRule {
  using Settings = AdamSettings;
  static constexpr int kMoments = HasLargest ? 3 : 2;
  static constexpr bool kSigned[] = {true, false, false};

  float rate1, rate2, beta2, eps, step_size, root_scale, decay, l2, ratio;
  bool cautious, cautious_decay;

  TW_HD AdamRule(const AdamSettings& s, const StepScalars& now)
      : rate1((float)(1 - s.beta1)),
        rate2((float)(1 - s.beta2)),
        beta2((float)s.beta2),
        eps((float)s.eps),
        step_size((float)(now.lr / (1 - pow(s.beta1, now.number)))),
        root_scale((float)(1 / sqrt(1 - pow(s.beta2, now.number)))),
        decay((float)(s.decoupled_weight_decay ? 1 - now.lr * s.weight_decay : 1)),
        l2((float)(s.decoupled_weight_decay ? 0 : s.weight_decay)),
        ratio((float)now.ratio),
        cautious(s.cautious),
        cautious_decay(s.cautious_decay) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    take_in(p, g, m);
    V u = m[0] / (square_root(m[kMoments - 1]) * root_scale + eps);
    if (cautious) u = agree(m[0], g) ? u * ratio : V{};
    if (cautious_decay) {
      p = oppose(u, p) ? p : p * decay;
    } else {
      p = p * decay;
    }
    p = p - u * step_size;
  }

  // What a cautious step measures: 1 where it moves.
  template <class V>
  TW_HD V direction(V p, V g, V* m) const {
    take_in(p, g, m);
    return agree(m[0], g) ? V{} + 1.0f : V{};
  }

 private:
  template <class V>
  TW_HD void take_in(V p, V& g, V* m) const {
    if (l2 != 0) g = g + p * l2;
    m[0] = m[0] + (g - m[0]) * rate1;
    m[1] = m[1] * beta2 + g * g * rate2;
    if constexpr (HasLargest) m[2] = m[1] <= m[2] ? m[2] : m[1];
  }
};

using Adam = AdamRule<false>;
using Amsgrad = AdamRule<true>;  // divides by the root of the largest second moment so far

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(Adam) Step(Amsgrad) Measure(Adam) Measure(Amsgrad)
