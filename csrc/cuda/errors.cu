#include "rlkernel/errors.h"

#include <cuda_runtime.h>

namespace rlkernel::cuda {

const char* error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace rlkernel::cuda
