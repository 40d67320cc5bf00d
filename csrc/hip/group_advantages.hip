#include "../cuda/group_advantages.cu"
