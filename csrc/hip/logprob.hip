#include "../cuda/logprob.cu"
