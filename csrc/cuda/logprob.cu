#include "rlkernel/logprob/backward.cuh"
#include "rlkernel/logprob/forward.cuh"
#include "rlkernel/logprob/support.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int logprob_forward(const LogprobForward& f, void* stream) { return launch_forward(f, stream); }
int logprob_backward(const LogprobBackward& b, void* stream) { return launch_backward(b, stream); }
int logprob_exp(const LogprobExp& e, void* stream) { return launch_exp(e, stream); }
int logprob_support_forward(const LogprobSupportForward& f, void* stream) { return launch_support_forward(f, stream); }
int logprob_support_backward(const LogprobSupportBackward& b, void* stream) { return launch_support_backward(b, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
