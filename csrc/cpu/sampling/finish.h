// Both arguments of pass B as one, as RLKERNEL_CPU_DISPATCH takes them.
#pragma once

#include "rlkernel/sampling/arguments.h"

namespace rlkernel::cpu {

struct SamplingFinish {
  const SamplingInputs& inputs;
  const SamplingOutputs& outputs;
};

}  // namespace rlkernel::cpu
