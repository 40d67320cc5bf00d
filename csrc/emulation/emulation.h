// The thread model of a GPU on one CPU thread: every device thread of a block is a fiber that runs until it waits for
// others. Which fiber goes on is drawn by `seed`, so that a missing barrier shows under some order; shared memory starts
// with NaN in every word; a barrier that some threads never reach is an error, not a hang.
//
// The blocks of a cluster run at once, each with shared memory of its own, which the others reach through of_block.
//
// Not modelled: lockstep of a warp, the memory model, several clusters at once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#ifndef RLKERNEL_WARP
#define RLKERNEL_WARP 32
#endif
#define RLKERNEL_DEVICE emulated

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline

#define RLKERNEL_SHARED(type, name)                                    \
  type& name = *static_cast<type*>([]() -> void* {                     \
    static const char site = 0;                                        \
    return ::rlkernel::emulation::shared_memory(&site, sizeof(type));  \
  }())

namespace rlkernel::emulation {

struct Index {
  unsigned x = 0;
};

struct Settings {
  uint64_t seed = 0;             // 0: threads and blocks in order
  unsigned max_blocks = 1 << 20; // of a grid, to drive the kernels' loops over the grid; of clusters, where blocks form them
  unsigned room = 0;             // blocks that the device runs at a time; 0: for all, and it has no clusters
  struct {
    std::string file;  // the end of its path
    int line = 0;
  } missing;  // a barrier that nobody waits at: a fault that needs no compiler
};

Settings& settings();

// The indices of the running fiber.
const Index& thread_index();
Index block_index();
Index block_size();
Index grid_size();

// Where a thread waits. Threads that meet must stand at the same place.
struct Site {
  const char* file;
  int line;
};

void barrier(Site site);

// The cluster of the running block, its place there, and the wait for all threads of all its blocks.
unsigned cluster_size();
unsigned cluster_rank();
void cluster_barrier(Site site = {__builtin_FILE(), __builtin_LINE()});

// What lies at `mine`, in shared memory, in that of the block `rank` of the cluster: an error when it has left the kernel.
void* of_block(void* mine, unsigned rank);

// Memory of the block, the same for each of its threads that names the same site.
void* shared_memory(const void* site, size_t bytes);

// All `width` lanes that `lane` belongs to must call them.
uint64_t exchange(uint64_t value, int source_lane, int width, Site site);
uint64_t vote(bool value, int width, Site site);

// Throws std::runtime_error where threads wait for others that never come.
void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel);
void launch_all(unsigned blocks, unsigned threads, const std::function<void()>& kernel);  // whatever max_blocks is
void launch_clusters(unsigned clusters, unsigned size, unsigned threads, const std::function<void()>& kernel);

inline int lane() { return static_cast<int>(thread_index().x % RLKERNEL_WARP); }

template <class T>
T shuffle(T value, int source, int width, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane exchanges at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits, source, width, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle_xor(T value, int mask, int width, Site site = {__builtin_FILE(), __builtin_LINE()}) {
  return shuffle(value, lane() ^ mask, width, site);
}

template <class T>
T shuffle_down(T value, int distance, int width, Site site = {__builtin_FILE(), __builtin_LINE()}) {
  const int source = lane() + distance;
  return shuffle(value, source / width == lane() / width ? source : lane(), width, site);
}

template <class T>
T shuffle_from(T value, int source, int width, Site site = {__builtin_FILE(), __builtin_LINE()}) {
  return shuffle(value, source, width, site);
}

inline uint64_t ballot(bool value, int width = RLKERNEL_WARP, Site site = {__builtin_FILE(), __builtin_LINE()}) {
  return vote(value, width, site);
}

// Fibers of one CPU thread take turns, so a plain update is atomic.
template <class T>
T atomic_add(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <class T>
void atomic_min(T* address, T value) {
  if (value < *address) *address = value;
}

}  // namespace rlkernel::emulation

#define threadIdx (::rlkernel::emulation::thread_index())
#define blockIdx (::rlkernel::emulation::block_index())
#define blockDim (::rlkernel::emulation::block_size())
#define gridDim (::rlkernel::emulation::grid_size())
#define __syncthreads() ::rlkernel::emulation::barrier({__FILE__, __LINE__})
