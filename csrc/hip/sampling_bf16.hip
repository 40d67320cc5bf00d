#include "../cuda/sampling_bf16.cu"
