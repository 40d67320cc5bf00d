#include "rlkernel/attention/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(attention_backward, AttentionBackward)

}  // namespace rlkernel::cpu
