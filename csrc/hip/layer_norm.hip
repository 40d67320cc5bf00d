#include "../cuda/layer_norm.cu"
