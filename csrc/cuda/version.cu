// The compiler's version, which decides the oldest driver that kernels run under, and the targets.
#include <cuda_runtime.h>

#include "core/dispatch.h"

TW_EXPORT int torchweld_cuda_version() { return CUDART_VERSION; }

// csrc/build.py says what it compiles for.
#if !defined(TW_ARCHITECTURES)
#define TW_ARCHITECTURES ""
#endif
TW_EXPORT const char* torchweld_cuda_architectures() { return TW_ARCHITECTURES; }
