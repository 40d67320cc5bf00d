#include "rlkernel/sampling/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int sampling_statistics(const SamplingInputs& in, void* stream) { return launch_sampling_statistics(in, stream); }
int sampling_finish(const SamplingInputs& in, const SamplingOutputs& out, void* stream) {
  return launch_sampling_finish(in, out, stream);
}

}  // namespace rlkernel::RLKERNEL_DEVICE
