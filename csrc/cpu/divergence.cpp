#include "rlkernel/divergence/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(divergence_forward, DivergenceForward)
RLKERNEL_CPU_DISPATCH(divergence_backward, DivergenceBackward)

}  // namespace rlkernel::cpu
