#include "rlkernel/prefix_shared_attention/kernel.cuh"
