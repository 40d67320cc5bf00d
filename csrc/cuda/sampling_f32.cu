#include "rlkernel/sampling/launch.cuh"

RLKERNEL_SAMPLING_FILTER(float)
