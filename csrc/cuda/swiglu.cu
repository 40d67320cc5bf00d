#include "rlkernel/swiglu/kernel.cuh"
