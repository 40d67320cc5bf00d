#include "rlkernel/group_advantages/kernel.cuh"
