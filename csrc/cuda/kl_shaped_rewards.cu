#include "rlkernel/kl_shaped_rewards/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int kl_shaped_rewards(const KlShapedRewards& k, void* stream) { return launch_kl_shaped_rewards(k, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
