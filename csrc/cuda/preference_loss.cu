#include "rlkernel/preference_loss/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int preference_sums(const PreferenceSums& p, void* stream) { return launch_preference_sums(p, stream); }
int preference_loss(const PreferenceLoss& p, void* stream) { return launch_preference_loss(p, stream); }
int preference_backward(const PreferenceBackward& b, void* stream) { return launch_preference_backward(b, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
