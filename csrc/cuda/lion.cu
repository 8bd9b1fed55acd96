// Lion in CUDA.
#include "cuda/rule.cuh"

#include "core/lion.h"

TW_STEP(lion_step, Lion)
