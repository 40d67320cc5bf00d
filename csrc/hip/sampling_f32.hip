#include "../cuda/sampling_f32.cu"
