// LAMB for torch.
#include "core/lamb.h"
#include "bind/rule.h"

TW_KERNEL(lamb_step, Step<torchweld::Lamb>);
TW_KERNEL(lamb_measure, Step<torchweld::Lamb>);

namespace torchweld {
namespace {

template <Pass pass>
void lamb(StepArguments& a, const LambSettings& settings) {
  Work(a, pass, 2).run<Lamb>(pass == Pass::squares ? lamb_measure : lamb_step, settings);
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("lamb"), boxed<LambSettings, lamb<Pass::step>>);
  m.impl(TW_OVERLOAD("lamb_absmaxes"), boxed<LambSettings, lamb<Pass::absmaxes>>);
  m.impl(TW_OVERLOAD("lamb_squares"), boxed<LambSettings, lamb<Pass::squares>>);
}

}  // namespace torchweld
