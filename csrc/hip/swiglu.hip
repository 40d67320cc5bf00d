#include "../cuda/swiglu.cu"
