#include "rlkernel/logprob_backward.cuh"
#include "rlkernel/logprob_forward.cuh"

namespace rlkernel::cuda {

int logprob_forward(const LogprobForward& f, void* stream) { return launch_forward(f, stream); }
int logprob_backward(const LogprobBackward& b, void* stream) { return launch_backward(b, stream); }
int logprob_exp(const LogprobExp& e, void* stream) { return launch_exp(e, stream); }

}  // namespace rlkernel::cuda
