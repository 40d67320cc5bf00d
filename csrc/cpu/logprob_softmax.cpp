#include "rlkernel/logprob/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(softmax, SoftmaxRows)

}  // namespace rlkernel::cpu
