// Adam and AdamW in CUDA.
#include "cuda/rule.cuh"

#include "core/adam.h"

TW_STEP(adam_step, Adam<false>)
TW_STEP(amsgrad_step, Adam<true>)
