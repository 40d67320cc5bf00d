#include "../cuda/rms_norm.cu"
