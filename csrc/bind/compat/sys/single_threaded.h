// Replaces glibc's header of this name. libstdc++ includes it to skip atomics in single-threaded
// processes, through a variable that glibc 2.32 introduced. These libraries run under glibc 2.28.
#pragma once

static const char __libc_single_threaded = 0;
