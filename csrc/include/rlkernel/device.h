// One spelling of the thread model for CUDA, HIP and the host emulation of csrc/emulation. Kernels that include this file
// are compiled by all three, in the namespace RLKERNEL_DEVICE: the emulation plays CUDA with warps of 32 lanes and HIP with 64.
//
// Lanes are used in groups of 32 everywhere: half a wavefront of AMD's 64. Reductions so have the same tree on both
// vendors, and half-wavefront steps cost a wavefront the same as full ones.
#pragma once

#include <cstdint>

#if defined(RLKERNEL_EMULATION)
#include "emulation.h"
#define RLKERNEL_LAUNCH_BOUNDS(threads, blocks)
#define RLKERNEL_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), ::rlkernel::emulation::launch(grid, block, [=] { kernel(__VA_ARGS__); }))
#define RLKERNEL_LAUNCH_ALL(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), ::rlkernel::emulation::launch_all(grid, block, [=] { kernel(__VA_ARGS__); }))

#elif defined(__HIP__)
#include <hip/hip_runtime.h>
#define RLKERNEL_DEVICE hip
// HIP's second bound counts wavefronts per SIMD, of which a compute unit has four.
#define RLKERNEL_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, (threads) / 64 * (blocks) / 4)
#define RLKERNEL_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<dim3(grid), dim3(block), 0, static_cast<hipStream_t>(stream)>>>(__VA_ARGS__)

#else
#include <cuda_runtime.h>
#define RLKERNEL_DEVICE cuda
#define RLKERNEL_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define RLKERNEL_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<dim3(grid), dim3(block), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

#if !defined(RLKERNEL_EMULATION)
// For a kernel without a loop over the grid: the emulation, too, then runs each of its blocks.
#define RLKERNEL_LAUNCH_ALL RLKERNEL_LAUNCH
#define RLKERNEL_SHARED(type, name) __shared__ type name
#endif

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kLanes = 32;  // of a group that shuffles among itself
constexpr int kInvalidArguments = 1;  // cudaErrorInvalidValue, hipErrorInvalidValue

// Every lane of the group of 32 must call it.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
#if defined(RLKERNEL_EMULATION)
  return emulation::shuffle_xor(value, lane_mask, kLanes);
#elif defined(__HIP__)
  return __shfl_xor(value, lane_mask, kLanes);
#else
  return __shfl_xor_sync(0xffffffffu, value, lane_mask, kLanes);
#endif
}

// The value of the lane `distance` further on; its own where there is none. Every lane of the group of 32 must call it.
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int distance) {
#if defined(RLKERNEL_EMULATION)
  return emulation::shuffle_down(value, distance, kLanes);
#elif defined(__HIP__)
  return __shfl_down(value, distance, kLanes);
#else
  return __shfl_down_sync(0xffffffffu, value, distance, kLanes);
#endif
}

// The value of lane `source` of the group. Every lane of the group of 32 must call it.
template <class T>
__device__ __forceinline__ T shuffle(T value, int source) {
#if defined(RLKERNEL_EMULATION)
  return emulation::shuffle_from(value, source, kLanes);
#elif defined(__HIP__)
  return __shfl(value, source, kLanes);
#else
  return __shfl_sync(0xffffffffu, value, source, kLanes);
#endif
}

// Bit i: what lane i of the group says. Every lane of the group of 32 must call it.
__device__ __forceinline__ uint32_t ballot(bool value) {
#if defined(RLKERNEL_EMULATION)
  return static_cast<uint32_t>(emulation::ballot(value, kLanes));
#elif defined(__HIP__)
  return static_cast<uint32_t>(__ballot(value) >> (threadIdx.x & 32u));  // this half of the wavefront
#else
  return __ballot_sync(0xffffffffu, value);
#endif
}

// What the lanes have written to shared memory is seen by each other. Every lane of the group of 32 must call it.
__device__ __forceinline__ void sync_lanes() {
#if defined(RLKERNEL_EMULATION)
  static_cast<void>(emulation::ballot(true, kLanes));
#elif defined(__HIP__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");  // its lanes are in step, but clang may not know it
  __builtin_amdgcn_wave_barrier();
#else
  __syncwarp();
#endif
}

__device__ __forceinline__ int count_bits(uint32_t mask) {
#if defined(RLKERNEL_EMULATION)
  return __builtin_popcount(mask);
#else
  return __popc(mask);
#endif
}

// The lowest bit that is set; there must be one.
__device__ __forceinline__ int lowest_bit(uint32_t mask) {
#if defined(RLKERNEL_EMULATION)
  return __builtin_ctz(mask);
#else
  return __ffs(static_cast<int>(mask)) - 1;
#endif
}

// The value, of which nvcc knows nothing: what follows from it is computed again, not kept in registers from where it was computed
// before. clang for AMD has registers enough, and keeps others in their place where it meets assembly.
__device__ __forceinline__ uint32_t hidden(uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// Adds to a word of shared memory; what it held. Integers only: their sums do not depend on the order.
__device__ __forceinline__ uint32_t atomic_add(uint32_t* address, uint32_t value) {
#if defined(RLKERNEL_EMULATION)
  return emulation::atomic_add(address, value);
#else
  return atomicAdd(address, value);
#endif
}

__device__ __forceinline__ void atomic_min(int* address, int value) {
#if defined(RLKERNEL_EMULATION)
  emulation::atomic_min(address, value);
#else
  atomicMin(address, value);
#endif
}

inline int launch_error() {
#if defined(RLKERNEL_EMULATION)
  return 0;
#elif defined(__HIP__)
  return static_cast<int>(hipGetLastError());
#else
  return static_cast<int>(cudaGetLastError());
#endif
}

}  // namespace rlkernel::RLKERNEL_DEVICE
