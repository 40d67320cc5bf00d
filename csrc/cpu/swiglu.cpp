#include "rlkernel/swiglu/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(swiglu_forward, SwigluForward)
RLKERNEL_CPU_DISPATCH(swiglu_backward, SwigluBackward)

}  // namespace rlkernel::cpu
