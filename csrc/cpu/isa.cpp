#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "bf16_pairs.h"

namespace rlkernel::cpu {
namespace {

Isa widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // the parts of x86-64-v4 and x86-64-v3 that no processor has without the rest
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") && bf16_pairs_as_declared() ? Isa::avx512_bf16 : Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return Isa::avx2;
#endif
  return Isa::baseline;
}

Isa choose() {
  const Isa best = widest();
  const char* wanted = std::getenv("RLKERNEL_CPU_ISA");
  if (wanted == nullptr || *wanted == 0) return best;
  const std::string name = wanted;
  const char* const names[] = {"baseline", "avx2", "avx512", "avx512_bf16"};
  for (int i = 0; i < 4; ++i)
    if (name == names[i]) return i < static_cast<int>(best) ? static_cast<Isa>(i) : best;
  throw std::invalid_argument("RLKERNEL_CPU_ISA must be baseline, avx2, avx512 or avx512_bf16, got " + name);
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace rlkernel::cpu
