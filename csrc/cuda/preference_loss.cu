#include "rlkernel/preference_loss/kernel.cuh"
