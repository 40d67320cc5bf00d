#include "../cuda/sampling_f16.cu"
