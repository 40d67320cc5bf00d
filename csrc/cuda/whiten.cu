#include "rlkernel/whiten/kernel.cuh"
