// A rule's kernels on the CPU: <Type>_step and <Type>_measure for its TW_RULE_TYPES.
#include "cpu/optim.h"

#include "core/rules.h"

#define TW_STEP(Rule)                                                                  \
  TW_EXPORT void Rule##_step(const torchweld::Step<torchweld::Rule>& a, int64_t begin, \
                             int64_t end) {                                            \
    torchweld::step(a, begin, end);                                                    \
  }
#define TW_MEASURE(Rule)                                                                  \
  TW_EXPORT void Rule##_measure(const torchweld::Step<torchweld::Rule>& a, int64_t begin, \
                                int64_t end) {                                            \
    torchweld::measure(a, begin, end);                                                    \
  }

TW_RULE_TYPES(TW_STEP, TW_MEASURE)
