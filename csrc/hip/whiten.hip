#include "rlkernel/whiten.cuh"

namespace rlkernel::hip {

int whiten(const Whiten& w, void* stream) { return launch_whiten(w, stream); }

}  // namespace rlkernel::hip
