#include "../cuda/value_loss.cu"
