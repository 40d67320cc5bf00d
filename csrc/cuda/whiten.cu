#include "rlkernel/whiten/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int whiten(const Whiten& w, void* stream) { return launch_whiten(w, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
