#include "rlkernel/sampling/kernel.cuh"
