#include "rlkernel/whiten.cuh"

namespace rlkernel::cuda {

int whiten(const Whiten& w, void* stream) { return launch_whiten(w, stream); }

}  // namespace rlkernel::cuda
