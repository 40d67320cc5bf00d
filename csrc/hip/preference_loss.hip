#include "../cuda/preference_loss.cu"
