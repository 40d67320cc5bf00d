#include "rlkernel/logprob/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(logprob_support_forward, LogprobSupportForward)
RLKERNEL_CPU_DISPATCH(logprob_support_backward, LogprobSupportBackward)

}  // namespace rlkernel::cpu
