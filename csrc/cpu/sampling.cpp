#include "rlkernel/sampling/arguments.h"

#include "isa.h"
#include "sampling/finish.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(sampling_statistics, SamplingInputs)
RLKERNEL_CPU_DISPATCH(sampling_finish, SamplingFinish)

int sampling_finish(const SamplingInputs& inputs, const SamplingOutputs& outputs, void* stream) {
  return sampling_finish(SamplingFinish{inputs, outputs}, stream);
}

}  // namespace rlkernel::cpu
