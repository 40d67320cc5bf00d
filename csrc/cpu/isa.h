// Which instruction set the CPU kernels run with. Files named *.isa.cpp are compiled once for each, in a namespace of
// its name; a function that leaves the namespace calls the widest one that this processor has.
#pragma once

namespace rlkernel::cpu {

enum class Isa { baseline, avx2, avx512 };

// The widest instruction set of this processor, or the lower one that RLKERNEL_CPU_ISA names.
// Throws std::invalid_argument where the variable names none.
Isa isa();

}  // namespace rlkernel::cpu

// Declares `int name(const Arguments&)` of every instruction set, and defines the `name` that chooses among them.
#if defined(__x86_64__)
#define RLKERNEL_CPU_DISPATCH(name, Arguments)                  \
  namespace baseline { int name(const Arguments&); }            \
  namespace avx2 { int name(const Arguments&); }                \
  namespace avx512 { int name(const Arguments&); }              \
  int name(const Arguments& arguments, void*) {                 \
    switch (isa()) {                                            \
      case Isa::avx512: return avx512::name(arguments);         \
      case Isa::avx2: return avx2::name(arguments);             \
      case Isa::baseline: break;                                \
    }                                                           \
    return baseline::name(arguments);                           \
  }
#else
#define RLKERNEL_CPU_DISPATCH(name, Arguments)                                          \
  namespace baseline { int name(const Arguments&); }                                    \
  int name(const Arguments& arguments, void*) { return baseline::name(arguments); }
#endif
