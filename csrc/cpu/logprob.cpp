#include "rlkernel/logprob/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(logprob_forward, LogprobForward)
RLKERNEL_CPU_DISPATCH(logprob_backward, LogprobBackward)
RLKERNEL_CPU_DISPATCH(logprob_exp, LogprobExp)

}  // namespace rlkernel::cpu
