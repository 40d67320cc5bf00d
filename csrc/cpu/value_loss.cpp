#include "rlkernel/value_loss/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(value_loss_forward, ValueLossForward)
RLKERNEL_CPU_DISPATCH(value_loss_backward, ValueLossBackward)

}  // namespace rlkernel::cpu
