// The element types of floats that kernels read and write.
#pragma once

namespace rlkernel {

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2 };

}  // namespace rlkernel
