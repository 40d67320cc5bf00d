#include "rlkernel/policy_loss/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(policy_loss, PolicyLoss)
RLKERNEL_CPU_DISPATCH(policy_select, PolicySelection)

}  // namespace rlkernel::cpu
