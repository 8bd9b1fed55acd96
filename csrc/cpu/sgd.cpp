// SGD and LARS on the CPU.
#include "cpu/optim.h"

#include "core/sgd.h"

TW_STEP(sgd_step, Sgd<false>)
TW_STEP(momentum_step, Sgd<true>)
TW_MEASURE(gradient_measure, Gradient)
