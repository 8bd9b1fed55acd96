// SGD and LARS in CUDA.
#include "cuda/rule.cuh"

#include "core/sgd.h"

TW_STEP(sgd_step, Sgd<false>)
TW_STEP(momentum_step, Sgd<true>)
TW_MEASURE(gradient_measure, Gradient)
