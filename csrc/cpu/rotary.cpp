#include "rlkernel/rotary/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(rotary, Rotary)

}  // namespace rlkernel::cpu
