#include "rlkernel/policy_loss/kernel.cuh"
#include "rlkernel/policy_loss/selection.cuh"
