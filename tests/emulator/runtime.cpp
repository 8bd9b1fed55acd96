// The scheduler. It runs every fiber until it waits, and resumes a group once all of its threads
// have arrived. It is compiled without TSan even if the kernels are compiled with it: races in the
// scheduler's data are not the kernels' races.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"

namespace emulator {

Context* current = nullptr;

namespace {

constexpr int kWarp = 32;

enum class State { kReady, kBlockBarrier, kClusterBarrier, kWarpOperation, kFinished };

struct Warp;
struct Block;
struct Cluster;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Thread {
  Context context;
  State state = State::kFinished;
  Site site = {};
  bool predicate = false;
  uint32_t mask = 0;
  int lane = 0, exchanges = 0, barriers = 0, arrivals = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;
  std::unique_ptr<Fiber> fiber;
};

// Two sets of slots suffice, since a lane is at most one exchange ahead of another.
struct Warp {
  std::vector<Thread*> lanes;
  uint64_t slots[2][kWarp] = {};
  char order = 0;  // an address for TSan: what a warp barrier orders
};

struct Block {
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared;
  int count = 0;  // of true predicates at the last barrier
  // One address for every other barrier: a thread may leave one when another is at the next, whose
  // stores it must not seem to have waited for.
  char order[2] = {};
  Cluster* cluster = nullptr;
};

struct Cluster {
  std::vector<Block> blocks;
  std::vector<Thread*> threads;  // of all blocks
  char order[2] = {};
};

std::mutex one_launch;
std::vector<std::unique_ptr<Thread>> pool;
std::string error;
bool failed = false;  // whether a thread did what a device does not allow
Fiber* scheduler = nullptr;
Thread* running = nullptr;
const std::function<void()>* kernel = nullptr;
char start_order = 0, end_order = 0;
uint64_t random_state = 1;

#if defined(TW_TSAN)
void acquire(char& order) { __tsan_acquire(&order); }
void release(char& order) { __tsan_release(&order); }
#else
void acquire(char&) {}
void release(char&) {}
#endif

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    std::swap(items[i - 1], items[(random_state >> 33) % i]);
  }
}

void enter() {
  running->fiber->arrive();
  for (;;) {
    acquire(start_order);
    (*kernel)();
    release(end_order);
    running->state = State::kFinished;
    running->fiber->switch_to(*scheduler);
  }
}

void wait(State state, Site site) {
  running->state = state;
  running->site = site;
  running->fiber->switch_to(*scheduler);
}

std::string describe(const Thread& t) {
  char text[256];
  const Index &b = t.context.block, &i = t.context.thread;
  std::snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u) waits at %s, %s:%d",
                i.x, i.y, i.z, b.x, b.y, b.z, t.site.what, t.site.file, t.site.line);
  return text;
}

bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && !std::strcmp(a.file, b.file);
}

// Releases the threads if all of them wait in `state` at the same site. Returns whether it did.
bool release_group(const std::vector<Thread*>& threads, State state) {
  for (const Thread* t : threads) {
    if (t->state != state || !same_site(t->site, threads[0]->site)) return false;
  }
  for (Thread* t : threads) t->state = State::kReady;
  return true;
}

bool release_warp(Warp& warp) {
  bool any = false;
  for (Thread* t : warp.lanes) {
    if (t->state != State::kWarpOperation) continue;
    const auto in_mask = [&](const Thread* o) { return t->mask >> o->lane & 1; };
    const bool complete = std::all_of(warp.lanes.begin(), warp.lanes.end(), [&](const Thread* o) {
      return !in_mask(o) || (o->state == State::kWarpOperation && o->mask == t->mask &&
                             same_site(o->site, t->site));
    });
    // Lanes that the block lacks can never arrive.
    if (!complete || (warp.lanes.size() < kWarp && t->mask >> warp.lanes.size())) continue;
    const uint32_t mask = t->mask;
    for (Thread* o : warp.lanes) {
      if (mask >> o->lane & 1) o->state = State::kReady;
    }
    any = true;
  }
  return any;
}

bool release_block(Block& block) {
  if (!release_group(block.threads, State::kBlockBarrier)) return false;
  block.count = std::count_if(block.threads.begin(), block.threads.end(),
                              [](const Thread* t) { return t->predicate; });
  return true;
}

// Releases the threads that wait for the cluster if all of its threads have arrived as often.
bool release_cluster(Cluster& cluster) {
  int least = cluster.threads[0]->arrivals;
  for (const Thread* t : cluster.threads) least = std::min(least, t->arrivals);
  bool any = false;
  for (Thread* t : cluster.threads) {
    if (t->state != State::kClusterBarrier || t->arrivals > least) continue;
    t->state = State::kReady;
    any = true;
  }
  return any;
}

void start_block(Cluster& cluster, Block& block, Index index, Index dim, Index grid,
                 size_t shared_bytes) {
  const size_t count = size_t{dim.x} * dim.y * dim.z, before = cluster.threads.size();
  block.cluster = &cluster;
  block.shared = std::make_unique<unsigned char[]>(shared_bytes);
  std::memset(block.shared.get(), 0xff, shared_bytes);
  block.warps.resize((count + kWarp - 1) / kWarp);
  while (pool.size() < before + count) {
    pool.push_back(std::make_unique<Thread>());
    pool.back()->fiber = std::make_unique<Fiber>(enter);
  }
  for (size_t i = 0; i < count; ++i) {
    Thread& t = *pool[before + i];
    const unsigned n = i;
    t.context = {{n % dim.x, n / dim.x % dim.y, n / dim.x / dim.y}, index, dim, grid};
    t.state = State::kReady;
    t.lane = i % kWarp;
    t.exchanges = t.barriers = t.arrivals = 0;
    t.copies.clear();
    t.groups.clear();
    t.warp = &block.warps[i / kWarp];
    t.block = &block;
    t.warp->lanes.push_back(&t);
    block.threads.push_back(&t);
    cluster.threads.push_back(&t);
  }
}

// Runs the cluster until all of its threads end.
bool run_cluster(Cluster& cluster) {
  std::vector<Warp*> warps;
  for (Block& block : cluster.blocks) {
    for (Warp& warp : block.warps) warps.push_back(&warp);
  }
  for (;;) {
    shuffle(warps);
    bool progress = false, finished = true;
    for (Warp* warp : warps) {
      for (Thread* t : warp->lanes) {
        if (t->state != State::kReady) continue;
        progress = true;
        running = t;
        current = &t->context;
        scheduler->switch_to(*t->fiber);
      }
      progress |= release_warp(*warp);
    }
    for (Block& block : cluster.blocks) progress |= release_block(block);
    progress |= release_cluster(cluster);
    for (const Thread* t : cluster.threads) finished &= t->state == State::kFinished;
    if (finished) return true;
    if (!progress) break;
  }
  size_t waiting = 0;
  std::string places;
  Site last = {};
  for (Thread* t : cluster.threads) {
    if (t->state == State::kFinished) continue;
    ++waiting;
    if (!last.file || !same_site(last, t->site)) places += "; " + describe(*t);
    last = t->site;
    t->fiber->restart(enter);
  }
  error = std::to_string(waiting) + " of " + std::to_string(cluster.threads.size()) +
          " threads wait for others that never arrive" + places.substr(0, 1000);
  return false;
}

}  // namespace

// Counters for tests.
extern "C" {
__attribute__((visibility("default"))) int64_t emulator_launches = 0;
__attribute__((visibility("default"))) int emulator_device_guards = 0;
__attribute__((visibility("default"))) int emulator_cluster_blocks = 20;
__attribute__((visibility("default"))) int emulator_captures = 0;
}

bool run(Index grid, Index block, size_t shared_bytes, unsigned cluster,
         const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(one_launch);
  ++emulator_launches;
  const char* seed = std::getenv("TORCHWELD_EMULATOR_SEED");
  random_state = seed ? std::strtoull(seed, nullptr, 10) : 1;
  Fiber here;
  scheduler = &here;
  kernel = &body;
  std::vector<Index> order;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster) order.push_back({x, y, z});
    }
  }
  shuffle(order);
  bool good = true;
  failed = false;
  for (size_t i = 0; good && i < order.size(); ++i) {
    Cluster together;
    together.blocks.resize(cluster);
    for (Block& one : together.blocks) {
      start_block(together, one, order[i], block, grid, shared_bytes);
      ++order[i].x;
    }
    release(start_order);
    good = run_cluster(together) && !failed;
    acquire(end_order);
  }
  current = nullptr;
  return good;
}

const char* last_error() { return error.c_str(); }

void* dynamic_shared() { return running->block->shared.get(); }

int block_barrier(bool predicate, Site site) {
  running->predicate = predicate;
  char& order = running->block->order[++running->barriers % 2];
  release(order);
  wait(State::kBlockBarrier, site);
  acquire(order);
  return running->block->count;
}

void arrive_at_cluster() { release(running->block->cluster->order[++running->arrivals % 2]); }

void wait_for_cluster(Site site) {
  wait(State::kClusterBarrier, site);
  acquire(running->block->cluster->order[running->arrivals % 2]);
}

void* shared_of_block(unsigned rank, void* here) {
  const Block &mine = *running->block, &other = mine.cluster->blocks.at(rank);
  for (const Thread* t : other.threads) {
    if (t->arrivals > 0 && t->state != State::kFinished) continue;
    failed = true;
    error = "shared memory of a block that may not have started, or has a thread that has ended";
    return here;
  }
  return other.shared.get() + ((unsigned char*)here - mine.shared.get());
}

void copy_async(void* to, const void* from, size_t bytes) {
  running->copies.push_back({to, from, bytes});
}

void end_of_copies() { running->groups.push_back(std::move(running->copies)); }

void wait_for_copies(int groups) {
  while ((int)running->groups.size() > groups) {
    for (const Copy& copy : running->groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    running->groups.pop_front();
  }
}

uint64_t warp_exchange(uint32_t mask, uint64_t value, int source, Site site, uint32_t* votes) {
  Thread& me = *running;
  uint64_t* slots = me.warp->slots[me.exchanges++ % 2];
  slots[me.lane] = value;
  me.mask = mask;
  wait(State::kWarpOperation, site);
  if (votes) {
    *votes = 0;
    for (int i = 0; i < kWarp; ++i) *votes |= uint32_t{(mask >> i & 1) && slots[i]} << i;
  }
  // A lane outside the mask has no value; return all ones instead.
  return mask >> source & 1 ? slots[source] : ~uint64_t{0};
}

void warp_barrier(uint32_t mask, Site site) {
  release(running->warp->order);
  running->mask = mask;
  wait(State::kWarpOperation, site);
  acquire(running->warp->order);
}

int lane() { return running->lane; }

void yield() {
  running->fiber->switch_to(*scheduler);  // the thread stays ready
}

}  // namespace emulator
