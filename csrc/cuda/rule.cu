// A rule's launchers in CUDA: <Type>_step and <Type>_measure for its TW_RULE_TYPES.
#include "cuda/rule.cuh"

#include "core/rules.h"

#define TW_STEP(Rule)                                                          \
  TW_EXPORT cudaError_t Rule##_step(const torchweld::Step<torchweld::Rule>& a, \
                                    cudaStream_t stream) {                     \
    return torchweld::step(a, stream);                                         \
  }
#define TW_MEASURE(Rule)                                                          \
  TW_EXPORT cudaError_t Rule##_measure(const torchweld::Step<torchweld::Rule>& a, \
                                       cudaStream_t stream) {                     \
    return torchweld::measure(a, stream);                                         \
  }

TW_RULE_TYPES(TW_STEP, TW_MEASURE)
