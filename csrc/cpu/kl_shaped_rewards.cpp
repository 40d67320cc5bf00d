#include "rlkernel/kl_shaped_rewards/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(kl_shaped_rewards, KlShapedRewards)

}  // namespace rlkernel::cpu
