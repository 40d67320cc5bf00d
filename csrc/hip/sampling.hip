#include "../cuda/sampling.cu"
