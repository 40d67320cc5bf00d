#include "rlkernel/gae/kernel.cuh"
