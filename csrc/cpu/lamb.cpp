// LAMB on the CPU.
#include "cpu/optim.h"

#include "core/lamb.h"

TW_STEP(lamb_step, Lamb)
TW_MEASURE(lamb_measure, Lamb)
