// What the emulated primitives and the functions of kernels do, for the tests of the emulation itself.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace rlkernel::primitives {

int warp_size();
std::vector<uint64_t> ballots(unsigned threads);
std::vector<int> neighbours(unsigned threads, int mask, int width);
std::vector<int> histogram(unsigned blocks, unsigned threads, unsigned bins);
std::vector<int> cluster_sums(unsigned clusters, unsigned size, unsigned threads, bool pushed, const std::string& fault);
double log(double x);
float exp(float x);
float expm1(float x);
std::pair<float, float> tanh(float x);  // and its slope
float through_f16(float x);
float through_bf16(float x);

}  // namespace rlkernel::primitives
