#include "../cuda/rotary.cu"
