// Adam and AdamW on the CPU.
#include "cpu/optim.h"

#include "core/adam.h"

TW_STEP(adam_step, Adam<false>)
TW_STEP(amsgrad_step, Adam<true>)
