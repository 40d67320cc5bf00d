#include "../cuda/whiten.cu"
