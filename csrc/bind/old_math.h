// For kernels outside csrc/cpu that call pow or log: their versions that glibc 2.28 has.
#pragma once

#include <cmath>

// The newer versions, of glibc 2.29, differ only in how they set errno.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver pow,pow@GLIBC_2.17");
__asm__(".symver log,log@GLIBC_2.17");
#endif
