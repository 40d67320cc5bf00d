#include "rlkernel/logprob/backward.cuh"
#include "rlkernel/logprob/forward.cuh"
#include "rlkernel/logprob/support.cuh"
