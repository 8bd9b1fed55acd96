// Adam and AdamW for torch.
#include "core/adam.h"
#include "bind/rule.h"

TW_KERNEL(adam_step, Step<torchweld::Adam<false>>);
TW_KERNEL(amsgrad_step, Step<torchweld::Adam<true>>);

namespace torchweld {
namespace {

template <Pass pass>
void adam(StepArguments& a, const AdamSettings& settings) {
  if (a.moments.size() == 3 * a.params.size()) {
    Work(a, pass, 3).run<Adam<true>>(amsgrad_step, settings);
  } else {
    Work(a, pass, 2).run<Adam<false>>(adam_step, settings);
  }
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("adam"), boxed<AdamSettings, adam<Pass::step>>);
  m.impl(TW_OVERLOAD("adam_absmaxes"), boxed<AdamSettings, adam<Pass::absmaxes>>);
}

}  // namespace torchweld
