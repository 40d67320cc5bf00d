#include "rlkernel/matmul/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH_BF16(matmul, Matmul)

}  // namespace rlkernel::cpu
