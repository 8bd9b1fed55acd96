// LAMB in CUDA.
#include "cuda/rule.cuh"

#include "core/lamb.h"

TW_STEP(lamb_step, Lamb)
TW_MEASURE(lamb_measure, Lamb)
