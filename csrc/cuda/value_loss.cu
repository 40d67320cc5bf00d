#include "rlkernel/value_loss/kernel.cuh"
