#include "rlkernel/rms_norm/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(rms_norm_forward, RmsNormForward)
RLKERNEL_CPU_DISPATCH(rms_norm_in_order, RmsNormForward)
RLKERNEL_CPU_DISPATCH(rms_norm_backward, RmsNormBackward)

}  // namespace rlkernel::cpu
