#include "rlkernel/whiten/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(whiten, Whiten)

}  // namespace rlkernel::cpu
