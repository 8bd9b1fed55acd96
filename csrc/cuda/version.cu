// The compiler's version, which determines the oldest driver that can run the kernels, and the
// target architectures.
#include <cuda_runtime.h>

#include "core/dispatch.h"

TW_EXPORT int torchweld_cuda_version() { return CUDART_VERSION; }

// csrc/build.py defines the target architectures.
#if !defined(TW_ARCHITECTURES)
#define TW_ARCHITECTURES ""
#endif
TW_EXPORT const char* torchweld_cuda_architectures() { return TW_ARCHITECTURES; }
