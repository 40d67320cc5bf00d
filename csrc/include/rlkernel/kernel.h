// How a kernel is declared, and the functions that it shares with the host.
#pragma once
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIP__)
#define RLKERNEL_HOST_DEVICE __host__ __device__
#else
#define RLKERNEL_HOST_DEVICE
#endif

// `int name(arguments..., void* stream)` of each part: 0, or the runtime's error code. `stream` is the queue to launch on; the
// CPU kernels ignore it.
#if defined(RLKERNEL_EMULATION)
#define RLKERNEL_KERNEL(name, ...) \
  namespace emulated { int name(__VA_ARGS__, void* stream); }
#else
#define RLKERNEL_KERNEL(name, ...)                                 \
  namespace cpu { int name(__VA_ARGS__, void* stream); }           \
  namespace cuda { int name(__VA_ARGS__, void* stream); }          \
  namespace hip { int name(__VA_ARGS__, void* stream); }
#endif
