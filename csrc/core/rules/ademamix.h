// AdEMAMix: AdamW with a second, slower average of gradients.
//
//   p = p - lr ((m1 / (1 - beta1^t) + alpha m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)
//
// alpha grows linearly from 0 over alpha_warmup steps. beta3 grows from beta1 over beta3_warmup steps,
// and the number of steps after which a gradient counts half grows linearly.
#pragma once

#include "core/optim.h"

TW_NAMESPACE_BEGIN

struct AdemamixSettings {
  double beta1, beta2, beta3, alpha, eps, weight_decay;
  double alpha_warmup, beta3_warmup;  // in steps; 0: none
};

// The number of steps after which a gradient counts half, and its inverse.
TW_HD double half_life(double beta) { return log(0.5) / log(beta + 1e-8) - 1; }
TW_HD double beta_of(double half_life) { return pow(0.5, 1 / (half_life + 1)); }

struct Ademamix {
  using Settings = AdemamixSettings;
  static constexpr int kMoments = 3;
  static constexpr bool kSigned[] = {true, true, false};

  float beta1, rate1, beta2, rate2, beta3, rate3, alpha, eps, scale, root_scale, decay, lr;

  TW_HD Ademamix(const AdemamixSettings& s, const StepScalars& now)
      : beta1((float)s.beta1),
        rate1((float)(1 - s.beta1)),
        beta2((float)s.beta2),
        rate2((float)(1 - s.beta2)),
        beta3((float)slow_beta(s, now.number)),
        rate3((float)(1 - slow_beta(s, now.number))),
        alpha((float)(now.number < s.alpha_warmup ? s.alpha * (now.number / s.alpha_warmup)
                                                  : s.alpha)),
        eps((float)s.eps),
        scale((float)(1 / (1 - pow(s.beta1, now.number)))),
        root_scale((float)(1 / sqrt(1 - pow(s.beta2, now.number)))),
        decay((float)(1 - now.lr * s.weight_decay)),
        lr((float)now.lr) {}

  template <class V>
  TW_HD void operator()(V& p, V g, V* m) const {
    m[0] = m[0] * beta1 + g * rate1;
    m[1] = m[1] * beta3 + g * rate3;
    m[2] = m[2] * beta2 + g * g * rate2;
    const V u = (m[0] * scale + m[1] * alpha) / (square_root(m[2]) * root_scale + eps);
    p = p * decay - u * lr;
  }

 private:
  static TW_HD double slow_beta(const AdemamixSettings& s, double number) {
    if (number >= s.beta3_warmup) return s.beta3;
    const double part = number / s.beta3_warmup;
    return beta_of((1 - part) * half_life(s.beta1) + part * half_life(s.beta3));
  }
};

TW_NAMESPACE_END

#define TW_RULE_TYPES(Step, Measure) Step(Ademamix)
