#include "../cuda/kl_shaped_rewards.cu"
