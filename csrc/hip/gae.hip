#include "../cuda/gae.cu"
