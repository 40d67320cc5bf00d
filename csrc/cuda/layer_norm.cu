#include "rlkernel/layer_norm/kernel.cuh"
