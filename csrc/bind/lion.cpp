// Lion for torch.
#include "core/lion.h"
#include "bind/rule.h"

TW_KERNEL(lion_step, Step<torchweld::Lion>);

namespace torchweld {
namespace {

template <Pass pass>
void lion(StepArguments& a, const LionSettings& settings) {
  Work(a, pass, 1).run<Lion>(lion_step, settings);
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("lion"), boxed<LionSettings, lion<Pass::step>>);
  m.impl(TW_OVERLOAD("lion_absmaxes"), boxed<LionSettings, lion<Pass::absmaxes>>);
}

}  // namespace torchweld
