#include "../cuda/policy_loss.cu"
