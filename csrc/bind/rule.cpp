// A rule's ops for torch: <rule> steps, <rule>_absmaxes finds the new absmax of split blocks, and
// <rule>_squares measures norms, if the rule is adaptive.
#include "bind/rule.h"

#include "core/rules.h"

#define TW_DECLARE_STEP(Rule) TW_KERNEL(Rule##_step, Step<torchweld::Rule>);
#define TW_DECLARE_MEASURE(Rule) TW_KERNEL(Rule##_measure, Step<torchweld::Rule>);
TW_RULE_TYPES(TW_DECLARE_STEP, TW_DECLARE_MEASURE)

namespace torchweld {
namespace {

// One struct of settings serves all of the rule's types.
#define TW_USE_SETTINGS(Rule) using Settings = Rule::Settings;
TW_RULE_TYPES(TW_USE_SETTINGS, TW_USE_SETTINGS)

// Runs the kernel of the type that has this many moments.
template <Pass pass>
void step(StepArguments& a, const Settings& settings) {
#define TW_STEP_IF_IT_FITS(Rule)                                           \
  if (a.moments.size() == Rule::kMoments * a.params.size()) {              \
    return Work(a, pass, Rule::kMoments).run<Rule>(Rule##_step, settings); \
  }
  TW_RULE_TYPES(TW_STEP_IF_IT_FITS, TW_NOTHING)
  STD_TORCH_CHECK(false, TW_RULE_NAME " does not take ", a.moments.size(), " moments for ",
                  a.params.size(), " parameters");
}

// Whether a type is measured.
#define TW_COUNT(Rule) +1
constexpr bool kMeasures = 0 TW_RULE_TYPES(TW_NOTHING, TW_COUNT) > 0;

// Measures with the type that has this many moments, or needs none of them.
[[maybe_unused]] void measure(StepArguments& a, const Settings& settings) {
#define TW_MEASURE_IF_IT_FITS(Rule)                                                    \
  if (Rule::kMoments == 0 || a.moments.size() == Rule::kMoments * a.params.size()) {   \
    return Work(a, Pass::squares, Rule::kMoments).run<Rule>(Rule##_measure, settings); \
  }
  TW_RULE_TYPES(TW_NOTHING, TW_MEASURE_IF_IT_FITS)
  (void)settings;
  STD_TORCH_CHECK(false, TW_RULE_NAME " does not measure ", a.moments.size(), " moments for ",
                  a.params.size(), " parameters");
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD(TW_RULE_NAME), boxed<Settings, step<Pass::step>>);
  m.impl(TW_OVERLOAD(TW_RULE_NAME "_absmaxes"), boxed<Settings, step<Pass::absmaxes>>);
  if constexpr (kMeasures) m.impl(TW_OVERLOAD(TW_RULE_NAME "_squares"), boxed<Settings, measure>);
}

}  // namespace torchweld
