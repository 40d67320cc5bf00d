// Which instruction set the CPU kernels run with. Files named *.isa.cpp are compiled once for each, in a namespace of
// its name; a function that leaves the namespace calls the widest one that this processor has.
#pragma once

namespace rlkernel::cpu {

enum class Isa { baseline, avx2, avx512, avx512_bf16 };

// The widest instruction set of this processor, or the lower one that RLKERNEL_CPU_ISA names.
// Throws std::invalid_argument where the variable names none.
Isa isa();

}  // namespace rlkernel::cpu

// Declares `int name(const Arguments&)` of every instruction set, and defines the `name` that chooses among them. Those of avx512
// run with avx512_bf16, for which setup.py compiles only what RLKERNEL_CPU_DISPATCH_BF16 defines.
#if defined(__x86_64__)
#define RLKERNEL_CPU_DISPATCH_WITH(name, Arguments, widest)     \
  namespace baseline { int name(const Arguments&); }            \
  namespace avx2 { int name(const Arguments&); }                \
  namespace avx512 { int name(const Arguments&); }              \
  namespace widest { int name(const Arguments&); }              \
  int name(const Arguments& arguments, void*) {                 \
    switch (isa()) {                                            \
      case Isa::avx512_bf16: return widest::name(arguments);    \
      case Isa::avx512: return avx512::name(arguments);         \
      case Isa::avx2: return avx2::name(arguments);             \
      case Isa::baseline: break;                                \
    }                                                           \
    return baseline::name(arguments);                           \
  }
#define RLKERNEL_CPU_DISPATCH(name, Arguments) RLKERNEL_CPU_DISPATCH_WITH(name, Arguments, avx512)
#define RLKERNEL_CPU_DISPATCH_BF16(name, Arguments) RLKERNEL_CPU_DISPATCH_WITH(name, Arguments, avx512_bf16)
#else
#define RLKERNEL_CPU_DISPATCH(name, Arguments)                                          \
  namespace baseline { int name(const Arguments&); }                                    \
  int name(const Arguments& arguments, void*) { return baseline::name(arguments); }
#define RLKERNEL_CPU_DISPATCH_BF16 RLKERNEL_CPU_DISPATCH
#endif
