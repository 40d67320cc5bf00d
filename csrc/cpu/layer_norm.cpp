#include "rlkernel/layer_norm/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(layer_norm_forward, LayerNormForward)
RLKERNEL_CPU_DISPATCH(layer_norm_backward, LayerNormBackward)

}  // namespace rlkernel::cpu
