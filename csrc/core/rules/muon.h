// Muon's two steps around the orthogonalisation, which lies between them: first the momentum and the
// direction that will be orthogonalised, then the parameter.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct MuonSettings {
  double momentum, weight_decay;
  bool nesterov;
  bool cautious_decay;  // decay only where the step does not oppose the parameter
};

// Overwrites `p`, a buffer, with the direction.
struct MuonMomentum {
  using Settings = MuonSettings;
  static constexpr int kMoments = 1;
  static constexpr bool kSigned[] = {true};

  float momentum, rate;
  bool nesterov;

  TW_HD MuonMomentum(const MuonSettings& s, const StepScalars&)
      : momentum((float)s.momentum), rate((float)(1 - s.momentum)), nesterov(s.nesterov) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    m[0] = m[0] + (g - m[0]) * rate;
    p = nesterov ? g + (m[0] - g) * momentum : m[0];
  }
};

// `g` is the orthogonalised direction.
struct MuonStep {
  using Settings = MuonSettings;
  static constexpr int kMoments = 0;
  static constexpr bool kSigned[] = {true};

  float lr, decay;
  bool cautious_decay;

  TW_HD MuonStep(const MuonSettings& s, const StepScalars& now)
      : lr((float)now.lr),
        decay((float)(1 - now.lr * s.weight_decay)),
        cautious_decay(s.cautious_decay) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V*) const {
    if (cautious_decay) {
      p = (oppose(g, p) ? p : p * decay) - g * lr;
    } else {
      p = p * decay - g * lr;
    }
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(MuonMomentum) Step(MuonStep)
