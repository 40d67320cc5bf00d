#include "rlkernel/rotary/kernel.cuh"
