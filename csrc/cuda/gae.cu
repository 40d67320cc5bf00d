#include "rlkernel/gae/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int gae(const Gae& g, void* stream) { return launch_gae(g, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
