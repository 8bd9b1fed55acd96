// A CUDA device on the CPU. The threads of a block are fibers of one OS thread, and they switch
// when they wait for each other (barriers, warp operations). Kernels see include/cuda_runtime.h.
// This header is only for the runtime and the launch helper.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

// The place in a kernel where a thread waits, named in the error if the wait cannot end.
struct Site {
  const char* what;
  const char* file;
  int line;
};

// The indices of the running thread.
struct Context {
  Index thread, block, block_dim, grid_dim;
};
extern Context* current;

// Runs body() in every thread of every block. Returns false on a deadlock; last_error() then says
// which thread waits where. Clusters of `cluster` neighbouring blocks run one after another in a
// shuffled order, a cluster's blocks together. Static shared memory is one for all of them.
bool run(Index grid, Index block, size_t shared_bytes, unsigned cluster,
         const std::function<void()>& body);
const char* last_error();

// The dynamic shared memory of the running thread's block, filled with NaN when the block starts.
void* dynamic_shared();

// All threads of the block wait here for each other. Returns the number of threads that arrived with
// a true predicate.
int block_barrier(bool predicate, Site site);

// All threads of the cluster's blocks wait for each other, in two halves.
void arrive_at_cluster();
void wait_for_cluster(Site site);
// The place in the shared memory of the cluster's block `rank` that `here` is in this block's. The
// launch fails if that block may not have started, or has a thread that has ended.
void* shared_of_block(unsigned rank, void* here);
// The number of blocks that the device runs in clusters at the same time; 0 if it has no clusters.
extern "C" int emulator_cluster_blocks;
// Whether streams are being captured into a graph.
extern "C" int emulator_captures;

// Asynchronous copies of the running thread. They take effect only when the thread waits for them.
void copy_async(void* to, const void* from, size_t bytes);
void end_of_copies();
void wait_for_copies(int groups);

// The number of live device guards. Outside a guard the current device is arbitrary.
extern "C" int emulator_device_guards;

// The lanes of the mask wait here for each other and exchange values. Returns the value of lane
// `source`, which must be in the mask. `votes` receives the lanes with a nonzero value.
uint64_t warp_exchange(uint32_t mask, uint64_t value, int source, Site site, uint32_t* votes);
// A warp_exchange without values, as a barrier that also orders memory.
void warp_barrier(uint32_t mask, Site site);
int lane();

// Lets other threads run, for loops that wait on memory.
void yield();

}  // namespace emulator
