#include "rlkernel/value_loss/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int value_loss_forward(const ValueLossForward& f, void* stream) { return launch_value_forward(f, stream); }
int value_loss_backward(const ValueLossBackward& b, void* stream) { return launch_value_backward(b, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
