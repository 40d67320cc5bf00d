#include "rlkernel/kl_shaped_rewards/kernel.cuh"
