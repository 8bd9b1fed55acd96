// SGD and LARS for torch.
#include "core/sgd.h"
#include "bind/rule.h"

TW_KERNEL(sgd_step, Step<torchweld::Sgd<false>>);
TW_KERNEL(momentum_step, Step<torchweld::Sgd<true>>);
TW_KERNEL(gradient_measure, Step<torchweld::Gradient>);

namespace torchweld {
namespace {

template <Pass pass>
void sgd(StepArguments& a, const SgdSettings& settings) {
  if (a.moments.empty()) {
    Work(a, pass, 0).run<Sgd<false>>(sgd_step, settings);
  } else {
    Work(a, pass, 1).run<Sgd<true>>(momentum_step, settings);
  }
}

// LARS measures the gradient instead of a step.
void measure(StepArguments& a, const SgdSettings& settings) {
  Work(a, Pass::squares, 0).run<Gradient>(gradient_measure, settings);
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("sgd"), boxed<SgdSettings, sgd<Pass::step>>);
  m.impl(TW_OVERLOAD("sgd_absmaxes"), boxed<SgdSettings, sgd<Pass::absmaxes>>);
  m.impl(TW_OVERLOAD("sgd_squares"), boxed<SgdSettings, measure>);
}

}  // namespace torchweld
