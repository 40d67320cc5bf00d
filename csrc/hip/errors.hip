#include "rlkernel/errors.h"

#include <hip/hip_runtime.h>

namespace rlkernel::hip {

const char* error_string(int error) { return hipGetErrorString(static_cast<hipError_t>(error)); }

}  // namespace rlkernel::hip
