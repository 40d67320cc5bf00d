#include "rlkernel/gae.cuh"

namespace rlkernel::cuda {

int gae(const Gae& g, void* stream) { return launch_gae(g, stream); }

}  // namespace rlkernel::cuda
