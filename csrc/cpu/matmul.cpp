#include "rlkernel/matmul/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(matmul, Matmul)

}  // namespace rlkernel::cpu
