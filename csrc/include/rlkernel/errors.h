// What a nonzero code of a launcher means, in the words of its runtime.
#pragma once

namespace rlkernel {
namespace cpu {
inline const char* error_string(int) { return "the CPU kernels cannot run these arguments"; }
}
namespace cuda {
const char* error_string(int);
}
namespace hip {
const char* error_string(int);
}
}  // namespace rlkernel
