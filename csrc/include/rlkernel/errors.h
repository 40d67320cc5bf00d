// What a nonzero code of a launcher means, in the words of its runtime; and which runtime that is.
#pragma once

namespace rlkernel {
namespace cpu {
inline const char* error_string(int) { return "the CPU kernels cannot run these arguments"; }
}
namespace cuda {
const char* error_string(int);
// 1000 * major + 10 * minor of CUDA's runtime that is linked in, and of what the driver knows: 0 where there is none.
int runtime_version();
int driver_version();
}
namespace hip {
const char* error_string(int);
}
}  // namespace rlkernel
