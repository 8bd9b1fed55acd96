// A CUDA device on the CPU: the threads of a block are fibers of one OS thread, and what they wait
// for each other at (barriers, warp operations) are switches. What kernels see of it is
// include/cuda_runtime.h; what only the runtime and the launch helper see is here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

// Where in the kernel a thread waits: names it when the wait cannot end.
struct Site {
  const char* what;
  const char* file;
  int line;
};

// The indices of the thread that runs now.
struct Context {
  Index thread, block, block_dim, grid_dim;
};
extern Context* current;

// Runs body() in every thread of every block. False if threads wait for each other in a way that
// cannot end; last_error() then says who waits where. Blocks follow one another, in a shuffled
// order; those of a cooperative launch run side by side.
bool run(Index grid, Index block, size_t shared_bytes, bool cooperative,
         const std::function<void()>& body);
const char* last_error();

// Of the block of the running thread; full of NaN when the block starts.
void* dynamic_shared();

// All threads of the block (or of the grid) wait here for each other. Returns the number of threads
// that came with a true predicate.
int block_barrier(bool predicate, Site site);
void grid_barrier(Site site);

// The lanes of the mask wait here for each other and swap values: returns the value of lane
// `source`, which must be in the mask. `votes` receives the lanes whose value is not zero.
uint64_t warp_exchange(uint32_t mask, uint64_t value, int source, Site site, uint32_t* votes);
// The same as a barrier that also orders memory.
void warp_barrier(uint32_t mask, Site site);
int lane();

// Lets other threads run: for loops that wait on memory.
void yield();

// cuBLASLt's function of this name, by cublaslt.cpp.
void* cublaslt(const char* name);

}  // namespace emulator
