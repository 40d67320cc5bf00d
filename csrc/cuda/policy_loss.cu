#include "rlkernel/policy_loss.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int policy_loss(const PolicyLoss& p, void* stream) { return launch_policy_loss(p, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
