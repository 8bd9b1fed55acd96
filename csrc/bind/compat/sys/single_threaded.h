// Stands before glibc's header of this name, which libstdc++ includes to skip atomics in a process
// of one thread: that variable came with glibc 2.32, and the libraries run under 2.28.
#pragma once

static const char __libc_single_threaded = 0;
