#include "rlkernel/policy_loss/kernel.cuh"
#include "rlkernel/policy_loss/selection.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int policy_loss(const PolicyLoss& p, void* stream) { return launch_policy_loss(p, stream); }

int policy_select(const PolicySelection& p, void* stream) { return launch_policy_select(p, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
