#include "../cuda/prefix_shared_attention.cu"
