#include "rlkernel/group_advantages/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int group_advantages(const GroupAdvantages& a, void* stream) { return launch_group_advantages(a, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
