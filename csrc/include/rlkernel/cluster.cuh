// Clusters: blocks that run side by side, wait for each other, and read and write each other's shared memory. GPUs have them from
// sm_90 on, but on sm_120 nobody has reckoned what an exchange takes: there, and elsewhere, every block is a cluster of its own.
// Code of sm_90 and later asks how large its cluster is, so that one PTX serves sm_100 and sm_120; what is launched says the host.
#pragma once

#include <atomic>

#include "rlkernel/device.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define RLKERNEL_CLUSTERS
#endif

#if defined(RLKERNEL_EMULATION)
#define RLKERNEL_LAUNCH_CLUSTERS(kernel, clusters, size, block, stream, ...) \
  (static_cast<void>(stream), ::rlkernel::emulation::launch_clusters(clusters, size, block, [=] { kernel(__VA_ARGS__); }))
#elif defined(__HIP__)
#define RLKERNEL_LAUNCH_CLUSTERS(kernel, clusters, size, block, stream, ...) \
  static_cast<void>(size), RLKERNEL_LAUNCH(kernel, clusters, block, stream, __VA_ARGS__)
#else
#define RLKERNEL_LAUNCH_CLUSTERS(kernel, clusters, size, block, stream, ...) \
  ::rlkernel::cuda::launch_clusters(kernel, clusters, size, block, static_cast<cudaStream_t>(stream), __VA_ARGS__)
#endif

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kLargestCluster = 8;  // that every GPU with clusters runs

// Blocks of this block's cluster.
__device__ __forceinline__ unsigned cluster_size() {
#if defined(RLKERNEL_EMULATION)
  return emulation::cluster_size();
#elif defined(RLKERNEL_CLUSTERS)
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// The place of this block among them.
__device__ __forceinline__ unsigned cluster_rank() {
#if defined(RLKERNEL_EMULATION)
  return emulation::cluster_rank();
#elif defined(RLKERNEL_CLUSTERS)
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// `mine`, in shared memory, as the block `rank` of the cluster has it. No block may leave the kernel before.
template <class T>
__device__ __forceinline__ T* of_block(T* mine, unsigned rank) {
#if defined(RLKERNEL_EMULATION)
  return static_cast<T*>(emulation::of_block(mine, rank));
#elif defined(RLKERNEL_CLUSTERS)
  T* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return theirs;
#else
  static_cast<void>(rank);
  return mine;
#endif
}

#if defined(RLKERNEL_EMULATION)
using emulation::cluster_barrier;

template <class Kernel>
inline int active_blocks(Kernel, unsigned) {
  return static_cast<int>(emulation::settings().room);
}
template <class Kernel>
inline int active_clusters(Kernel, unsigned size, unsigned) {
  return static_cast<int>(emulation::settings().room / size);
}
#else
// All threads of the cluster have come here, and what they wrote is seen. A block alone has a quicker barrier.
__device__ __forceinline__ void cluster_barrier() {
#if defined(RLKERNEL_CLUSTERS)
  if (cluster_size() > 1) {
    __cluster_barrier_arrive();  // CUDA's own: a warp need not come together
    __cluster_barrier_wait();
    return;
  }
#endif
  __syncthreads();
}
#endif

#if defined(RLKERNEL_EMULATION) || defined(__HIP__)
inline int current_device() { return -1; }
#endif

#if defined(__HIP__) && !defined(RLKERNEL_EMULATION)
template <class Kernel>
inline int active_blocks(Kernel, unsigned) {
  return 0;
}
template <class Kernel>
inline int active_clusters(Kernel, unsigned, unsigned) {
  return 0;
}
#elif !defined(RLKERNEL_EMULATION)
inline int current_device() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

inline cudaLaunchAttribute cluster_shape(unsigned size) {
  cudaLaunchAttribute shape = {};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = size;
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  return shape;
}

template <class... Arguments>
inline void launch_clusters(void (*kernel)(Arguments...), unsigned clusters, unsigned size, unsigned block, cudaStream_t stream,
                            Arguments... arguments) {
  cudaLaunchAttribute shape = cluster_shape(size);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * size);
  config.blockDim = dim3(block);
  config.stream = stream;
  config.attrs = &shape;
  config.numAttrs = size > 1 ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, arguments...));  // launch_error() says what was wrong
}

// How many blocks of a kernel the current device runs at a time. 0: nobody knows.
template <class... Arguments>
inline int active_blocks(void (*kernel)(Arguments...), unsigned block) {
  int multiprocessors = 0, blocks = 0;
  const bool can = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, current_device()) == cudaSuccess &&
                   cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(block), 0) == cudaSuccess;
  if (!can) static_cast<void>(cudaGetLastError());  // the launch has errors of its own
  return can ? blocks * multiprocessors : 0;
}

// How many clusters of `size` blocks, two at least. 0: the device knows none or runs code of this kernel that was made for GPUs
// without, or it is of sm_120 or later, whatever PTX its code came from.
template <class... Arguments>
inline int active_clusters(void (*kernel)(Arguments...), unsigned size, unsigned block) {
  int known = 0, clusters = 0;
  cudaFuncAttributes compiled = {};
  cudaLaunchAttribute shape = cluster_shape(size);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size);
  config.blockDim = dim3(block);
  config.attrs = &shape;
  config.numAttrs = 1;
  const bool can = cudaDeviceGetAttribute(&known, cudaDevAttrClusterLaunch, current_device()) == cudaSuccess && known != 0 &&
                   cudaFuncGetAttributes(&compiled, kernel) == cudaSuccess && compiled.ptxVersion >= 90 &&
                   compiled.binaryVersion < 120 && cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
  if (!can) static_cast<void>(cudaGetLastError());
  return can ? clusters : 0;
}
#endif

// Of one kernel, in clusters of a size or, of size 1, in blocks; asked once a device: an answer takes the driver microseconds.
class ActiveClusters {
 public:
  template <class Kernel>
  int operator()(Kernel kernel, unsigned size, unsigned block) {
    const int device = current_device();
    if (device < 0 || device >= kDevices) return ask(kernel, size, block);
    std::atomic<int>& known = known_[device][size];  // plus one
    if (known.load(std::memory_order_relaxed) == 0) known.store(ask(kernel, size, block) + 1, std::memory_order_relaxed);
    return known.load(std::memory_order_relaxed) - 1;
  }

 private:
  template <class Kernel>
  static int ask(Kernel kernel, unsigned size, unsigned block) {
    return size > 1 ? active_clusters(kernel, size, block) : active_blocks(kernel, block);
  }

  static constexpr int kDevices = 64;
  std::atomic<int> known_[kDevices][kLargestCluster + 1] = {};
};

}  // namespace rlkernel::RLKERNEL_DEVICE
