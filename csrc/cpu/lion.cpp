// Lion on the CPU.
#include "cpu/optim.h"

#include "core/lion.h"

TW_STEP(lion_step, Lion)
