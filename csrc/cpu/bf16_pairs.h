// Whether this processor's instruction for pairs of bf16 adds them as the matrix product declares it.
#pragma once

namespace rlkernel::cpu {

#if defined(__x86_64__)
// To be called where there is AVX-512-BF16. Compares its results with those of two fmas on numbers that tell the order, the
// roundings and what becomes of numbers below the normal range; a processor, or what emulates one, that differs is not used.
bool bf16_pairs_as_declared();
#endif

}  // namespace rlkernel::cpu
