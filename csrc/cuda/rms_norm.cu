#include "rlkernel/rms_norm/kernel.cuh"
