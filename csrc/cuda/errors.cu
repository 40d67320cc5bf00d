#include "rlkernel/errors.h"

#include <cuda_runtime.h>

namespace rlkernel::cuda {

const char* error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace rlkernel::cuda
