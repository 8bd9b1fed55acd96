// The CUDA version that compiled the kernels. It decides the oldest driver they run under.
#include <cuda_runtime.h>

#include "core/dispatch.h"

TW_EXPORT int torchweld_cuda_version() { return CUDART_VERSION; }
