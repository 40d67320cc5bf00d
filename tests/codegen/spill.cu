// A kernel that must spill: 256 live values in at most 64 registers a thread. The gate that accepts it is broken.
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#define BOUNDS __launch_bounds__(1024, 8)
#else
#define BOUNDS __launch_bounds__(1024, 2)
#endif

extern "C" __global__ void BOUNDS spill(const float* x, float* out, int steps) {
  float value[256];
#pragma unroll
  for (int i = 0; i < 256; ++i) value[i] = x[i * 1024 + threadIdx.x];
  for (int step = 0; step < steps; ++step)
#pragma unroll
    for (int i = 0; i < 256; ++i) value[i] = value[i] * value[(i + 97) % 256] + x[step];
#pragma unroll
  for (int i = 0; i < 256; ++i) out[i * 1024 + threadIdx.x] = value[i];
}
